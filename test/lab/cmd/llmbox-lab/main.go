// Command llmbox-lab builds, starts, stops and sweeps labs: real Kubernetes
// control planes with simulated GPU nodes, for rehearsals and tests.
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

	"github.com/llmbox-dev/llmbox/test/lab/node"
)

const usage = `llmbox-lab runs Kubernetes control planes with simulated GPU nodes.

Usage:
  llmbox-lab build [flags] [NAME...]   compile the pinned programs, once
  llmbox-lab start --dir DIR [flags]   start a lab and stay until told to stop
  llmbox-lab stop --dir DIR            stop a lab
  llmbox-lab sweep --root DIR          remove what killed labs left under DIR
  llmbox-lab exec --dir DIR -- CMD     run a program in a node's network, or on a machine
  llmbox-lab machine-kill --dir DIR    cut a machine's power
  llmbox-lab reboot --dir DIR [flags]  cut it and boot again, at another address if one is named
  llmbox-lab images [flags]            list what a node can pull

llmbox-lab COMMAND --help lists the flags.
`

// errUsage means that the command line was wrong; the message has been printed.
var errUsage = errors.New("bad usage")

func main() {
	// A reader of our one line may be gone: that is an error to handle, not a death.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case err == nil:
	case errors.Is(err, errUsage), errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "llmbox-lab:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return errUsage
	}
	switch args[0] {
	case "build":
		return build(ctx, args[1:])
	case "start":
		return start(ctx, args[1:])
	case "stop":
		return stop(args[1:])
	case "sweep":
		return sweep(args[1:])
	case "exec":
		return execute(args[1:])
	case "images":
		return listImages(ctx, args[1:])
	case "machine-kill":
		return machineKill(ctx, args[1:])
	case "reboot":
		return reboot(ctx, args[1:])
	case node.MachineCommand():
		return machine(ctx, args[1:])
	case node.InsideCommand():
		return inside(ctx, args[1:])
	case "help", "-h", "--help":
		_, err := io.WriteString(os.Stdout, usage)
		return err
	}
	return usageError("unknown command %q", args[0])
}

func parse(fs *flag.FlagSet, args []string, operands bool) error {
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return errUsage
	}
	if fs.NArg() > 0 && !operands {
		return usageError("unexpected argument %q", fs.Arg(0))
	}
	return nil
}

func usageError(format string, a ...any) error {
	fmt.Fprintf(os.Stderr, "llmbox-lab: "+format+"\n", a...)
	return errUsage
}
