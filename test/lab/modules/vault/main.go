// Command vault serves with Vault's own core, and only what a box asks of Vault:
// `vault server -config=FILE`, storage in files or in raft, Shamir's seal, the secrets
// engine KV, the auth method Kubernetes, audit to files.
//
// It is a program of the lab's own because Vault's main brings the clients of every
// database and cloud, some of which don't compile against the published modules. It must
// not know what a box puts into Vault. A setting that it would ignore is an error, where
// Vault warns or obeys.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/vault/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	// Vault reads its configuration anew; the default would be to end.
	signal.Ignore(syscall.SIGHUP)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "vault on its core:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("usage: vault server -config=FILE [-config=FILE…] | vault version")

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	switch {
	case len(args) == 1 && args[0] == "version":
		_, err := fmt.Fprintf(stdout, "Vault's core v%s, a stand-in for Vault\n", version.Version)
		return err
	case len(args) == 0 || args[0] != "server":
		return errUsage
	}
	var paths []string
	flags := flag.NewFlagSet("vault server", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.Func("config", "a file, or a folder of files", func(path string) error {
		paths = append(paths, path)
		return nil
	})
	if err := flags.Parse(args[1:]); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if len(paths) == 0 || flags.NArg() > 0 {
		return errUsage
	}
	config, err := load(paths)
	if err != nil {
		return err
	}
	s, err := newServer(ctx, config, stderr)
	if err != nil {
		return err
	}
	return s.serve(ctx)
}
