package cli

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/machine"
	"github.com/llmbox-dev/llmbox/internal/report"
)

func (a *app) tokenCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "token", Short: "Tokens by which other machines join this box", Args: noArgs,
		Example: `  sudo llmbox token create >token`,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	ttl := time.Hour
	create := &cobra.Command{
		Use:   "create",
		Short: "Make a token and print it",
		Long: `create prints a token on standard output, and on standard error how it is used. The
token is a secret: whoever has it can make a machine a node of this box until it
expires.`,
		Example: `  sudo llmbox token create >token && scp token gpu-1:
  sudo llmbox token create --ttl 15m`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runTokenCreate(cmd, ttl) },
	}
	create.Flags().DurationVar(&ttl, "ttl", ttl, "how long it can be used")
	cmd.AddCommand(create)
	return cmd
}

func (a *app) runTokenCreate(cmd *cobra.Command, ttl time.Duration) error {
	if ttl <= 0 {
		return usageError{fmt.Errorf("--ttl is %s", ttl), "say a time such as --ttl 1h"}
	}
	ctx := cmd.Context()
	host, err := a.thisMachine()
	if err != nil {
		return err
	}
	if !host.IsRoot() {
		return usageError{errors.New("a token is made by the server of this machine"), "run it as root: sudo llmbox token create"}
	}
	box, err := a.boxOnMachine(ctx, cmd, &boxFlags{}, host)
	if err != nil {
		return err
	}
	token, err := host.K3s(box).CreateToken(ctx, ttl, "llmbox join")
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(a.env.Stdout, token); err != nil {
		return err
	}
	address := "ADDRESS-OF-THIS-MACHINE"
	if found, err := host.Address(ctx, box); err == nil {
		address = found.String()
	}
	_, _ = fmt.Fprintf(a.env.Stderr, "On the other machine, within %s, with the token in a file that only root can read:\n  sudo llmbox join --server https://%s:6443 --token-file FILE\n", ttl, hostOf(address))
	return nil
}

// hostOf is an address as it stands in a URL.
func hostOf(address string) string {
	if a, err := netip.ParseAddr(address); err == nil && a.Is6() {
		return "[" + address + "]"
	}
	return address
}

func (a *app) joinCommand() *cobra.Command {
	var flags boxFlags
	var here machineFlags
	var server, tokenFile string
	cmd := &cobra.Command{
		Use:   "join",
		Short: "Make this machine a further node of a box",
		Long: `join looks at this machine as install does, brings k3s in as an agent of the box at
--server and waits until the node is ready. What the box runs on each node, the GPU
operator's parts among it, comes by itself. Run again, it changes nothing that is as
wanted. llmbox uninstall takes the machine out again.`,
		Example: `  sudo llmbox join --server https://10.0.0.5:6443 --token-file token
  sudo llmbox join --server https://10.0.0.5:6443 --token-file - <token
  sudo llmbox join --server https://10.0.0.5:6443 --token-file token --bundle box.tar.zst    nothing is downloaded`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runJoin(cmd, &flags, &here, server, tokenFile) },
	}
	flags.register(cmd)
	here.register(cmd, &flags)
	here.bundle.register(cmd)
	cmd.Flags().StringVar(&server, "server", "", "URL of the box's first machine, such as https://10.0.0.5:6443")
	cmd.Flags().StringVar(&tokenFile, "token-file", "", "file with a token of llmbox token create, or - for standard input")
	cmd.Flags().StringVar(&a.reportFile, "report", "", "write the timeline of the run to this HTML file")
	return cmd
}

// tokenLimit bounds a token in bytes; real ones have some hundred.
const tokenLimit = 4096

// readToken reads a token and checks its form. The token is in no error.
func (a *app) readToken(file string) (string, error) {
	in := a.env.Stdin
	if file != "-" {
		opened, err := os.Open(file) // #nosec G304 -- the file that was named
		if err != nil {
			return "", usageError{fmt.Errorf("reading the token: %w", err), "name a file that exists with --token-file; on the other machine: sudo llmbox token create"}
		}
		defer func() { _ = opened.Close() }()
		in = opened
	}
	raw, err := io.ReadAll(io.LimitReader(in, tokenLimit+1))
	if err != nil {
		return "", fmt.Errorf("reading the token: %w", err)
	}
	token := strings.TrimSpace(string(raw))
	if len(raw) > tokenLimit {
		token = ""
	}
	if err := k3s.CheckToken(token); err != nil {
		return "", usageError{err, "it begins with K10 and is one line: sudo llmbox token create on the box's first machine"}
	}
	return token, nil
}

func checkServer(server string) error {
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" || strings.Trim(u.Path, "/") != "" || u.User != nil || u.RawQuery != "" {
		return usageError{fmt.Errorf("--server is %q", server), "write it as https://ADDRESS:6443"}
	}
	return nil
}

func (a *app) runJoin(cmd *cobra.Command, flags *boxFlags, here *machineFlags, server, tokenFile string) (err error) {
	switch {
	case server == "" || tokenFile == "":
		return usageError{errors.New("join needs --server and --token-file"), helpOf(cmd)}
	case here.adopt:
		return usageError{errors.New("--adopt is for a box's first machine"), "leave out --adopt"}
	case here.bundle.file == "-" && (tokenFile == "-" || a.configFile == "-"):
		return usageError{errors.New("--bundle and another flag both read standard input"), "name a file for one of them"}
	}
	if err := checkServer(server); err != nil {
		return err
	}
	token, err := a.readToken(tokenFile)
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	host, err := a.thisMachine()
	if err != nil {
		return err
	}
	flags.machine = host
	if here.bundle.file != "" {
		// The model is the first machine's.
		if err := here.bundle.read(a); err != nil {
			return err
		}
		defer here.bundle.close()
	}
	look, release, err := a.admit(ctx, cmd, flags, host, here, "join",
		preflightFlags{gpuTimeout: gpu.HangAfter, fix: here.fix, agent: true, offline: here.bundle.file != ""})
	if err != nil {
		return err
	}
	defer release()
	s, err := a.settle(ctx, cmd, flags, false, a.newLogger())
	if err != nil {
		return err
	}
	if here.bundle.open != nil {
		if err := here.bundle.holdsK3s(s); err != nil {
			return err
		}
	}
	ctx, session, err := a.start(ctx, "llmbox join")
	if err != nil {
		return err
	}
	defer report.Rescue(session.renderer)
	defer func() { err = errors.Join(err, session.end()) }()
	want := s.wantMachine(false)
	want.Join = &machine.Join{URL: strings.TrimRight(server, "/"), Token: token}
	self := &installer.Machine{Host: host, Found: look.found, Want: want}
	here.bundle.into(self)
	_, err = installer.Join(ctx, installer.Options{
		Target:  installer.Target{Plan: s.plan, Recorded: s.recorded},
		Machine: self,
		Version: a.env.Version, Ignore: here.ignore, Sink: session.sink, Log: session.log, Interrupt: session.interrupt,
	})
	return err
}
