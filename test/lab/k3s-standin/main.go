// Command k3s-standin takes the place of the k3s binary in the lab: it answers the
// commands of k3s that an installer uses, and serves Kubernetes as `k3s server` would,
// with Kubernetes' own programs out of /lab/programs.
//
// It is no k3s and has no part of k3s in it; see package k3sserver.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/test/lab/k3sserver"
)

// version is the k3s in whose place it stands; set another when linking to have
// something to upgrade from.
var version = "v1.36.4+k3s1"

const (
	kubernetes = "v1.36.3"
	// programsDir is where a lab's machine has the upstream programs: who installs copies
	// this file and nothing else. LAB_PROGRAMS names another place.
	programsDir = "/lab/programs"
	// stagedEnv marks the copy under the data directory.
	stagedEnv = "K3S_STANDIN_STAGED"
)

func main() {
	log := k3sserver.NewLogger(os.Stderr)
	if err := run(os.Args, log); err != nil {
		log.Fatal(err)
		os.Exit(1)
	}
}

func run(args []string, log k3sserver.Logger) error {
	name, args := filepath.Base(args[0]), args[1:]
	if slices.Contains([]string{"ctr", "crictl", "kubectl"}, name) {
		return external(name, args)
	}
	if len(args) == 0 {
		return printVersion(os.Stdout)
	}
	switch args[0] {
	case "--version", "-v", "version":
		return printVersion(os.Stdout)
	case "ctr", "crictl", "kubectl":
		return external(args[0], args[1:])
	case "server":
		return node(args[1:], log, k3sserver.Run)
	case "agent":
		return node(args[1:], log, k3sserver.RunAgent)
	case "token":
		return token(args[1:])
	}
	return fmt.Errorf("the stand-in for k3s has no %q", args[0])
}

func printVersion(to io.Writer) error {
	_, err := fmt.Fprintf(to, "k3s version %s (k3s-standin)\ngo version %s\nThis is a stand-in of the llmbox lab: it runs Kubernetes %s and has no part of k3s.\n",
		version, runtime.Version(), kubernetes)
	return err
}

// external runs a tool that k3s has inside, against its containerd.
func external(tool string, args []string) error {
	switch {
	case tool == "ctr":
	case tool == "crictl" && len(args) == 2 && args[0] == "pull":
		// What containerd's part for the kubelet does with the same mirrors.
		config, err := k3sserver.ReadConfig(k3sserver.Source{Env: os.Getenv, File: k3sserver.DefaultFile})
		if err != nil {
			return err
		}
		args = []string{"images", "pull", "--hosts-dir", k3sserver.CertsDir(config.DataDir), args[1]}
	default:
		return fmt.Errorf("the stand-in for k3s has no %s %s", tool, strings.Join(args, " "))
	}
	path, err := exec.LookPath("/usr/bin/ctr")
	if err != nil {
		return fmt.Errorf("running ctr: %w", err)
	}
	return unix.Exec(path, append([]string{"ctr", "--address", k3sserver.ContainerdSocket, "--namespace", "k8s.io"}, args...), os.Environ())
}

// token does `token create`.
func token(args []string) error {
	if len(args) == 0 || args[0] != "create" {
		return fmt.Errorf("the stand-in for k3s has no token %s", strings.Join(args, " "))
	}
	flags := flag.NewFlagSet("token create", flag.ContinueOnError)
	ttl := flags.Duration("ttl", 24*time.Hour, "")
	description := flags.String("description", "", "")
	dataDir := flags.String("data-dir", "/var/lib/rancher/k3s", "")
	kubeconfig := flags.String("kubeconfig", "/etc/rancher/k3s/k3s.yaml", "")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	made, err := k3sserver.CreateToken(context.Background(), *dataDir, *kubeconfig, *description, *ttl)
	if err == nil {
		_, err = fmt.Println(made)
	}
	return err
}

// node runs a server or an agent.
func node(args []string, log k3sserver.Logger, run func(context.Context, k3sserver.Options) error) error {
	config, err := k3sserver.ReadConfig(k3sserver.Source{Args: args, Env: os.Getenv, File: k3sserver.DefaultFile})
	if err != nil {
		return err
	}
	if os.Getenv(stagedEnv) == "" {
		return stage(config.DataDir, log)
	}
	// Its own containers are to have none of it.
	if err := os.Unsetenv(stagedEnv); err != nil {
		return fmt.Errorf("clearing the environment: %w", err)
	}
	unix.Umask(0o022)
	dir := programsDir
	if other := os.Getenv("LAB_PROGRAMS"); other != "" {
		dir = other
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err = run(ctx, k3sserver.Options{
		Config: config, Programs: dir, Log: log, Output: os.Stderr,
		Version: fmt.Sprintf("%s (stand-in, Kubernetes %s)", version, kubernetes),
	})
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// stage goes on as the copy of this program under the data directory, as k3s does: what
// runs then is not the file that an upgrade replaces.
func stage(dataDir string, log k3sserver.Logger) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	staged, err := k3sserver.Stage(dataDir, self, log)
	if err != nil {
		return err
	}
	// By the name under which it was called, so that a list of processes reads as with k3s.
	return unix.Exec(staged, os.Args, append(os.Environ(), stagedEnv+"=1"))
}
