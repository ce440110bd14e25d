package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/test/lab/images"
	"github.com/llmbox-dev/llmbox/test/lab/labdir"
	"github.com/llmbox-dev/llmbox/test/lab/node"
)

// nodeFlags are the flags of start that only the node size has.
type nodeFlags struct {
	llmbox, version, model, gpuBy string
	gatewayPort                   int
	helmController                bool
}

func (n *nodeFlags) register(fs *flag.FlagSet) {
	fs.StringVar(&n.llmbox, "llmbox", "", "node size: the llmbox `binary` that becomes llmbox's own image (default: llmbox beside this program)")
	fs.StringVar(&n.version, "llmbox-version", "", "node size: tag of that image (default: what the binary says)")
	fs.StringVar(&n.model, "model", "Qwen/Qwen3-0.6B", "node size: the one model that the hub's stand-in offers")
	fs.StringVar(&n.gpuBy, "gpu-by", node.ByLab, "node size: who offers the GPUs, lab or operator")
	fs.BoolVar(&n.helmController, "helm-controller", false, "node size: run helm-controller on the node, as k3s does in its server")
	fs.IntVar(&n.gatewayPort, "node-gateway-port", 8080, "node size: the gateway's port on the node, to which --gateway-port leads")
}

// complete fills what depends on where this program lies.
func (n *nodeFlags) complete(ctx context.Context) error {
	if n.gpuBy != node.ByLab && n.gpuBy != node.ByOperator {
		return usageError("--gpu-by is lab or operator, not %q", n.gpuBy)
	}
	if n.llmbox == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("finding llmbox: %w", err)
		}
		n.llmbox = filepath.Join(filepath.Dir(self), "llmbox")
	}
	var err error
	if n.llmbox, err = filepath.Abs(n.llmbox); err != nil {
		return fmt.Errorf("finding llmbox: %w", err)
	}
	if n.version != "" {
		return nil
	}
	out, err := exec.CommandContext(ctx, n.llmbox, "version").Output() // #nosec G204 -- named by the caller
	if err != nil {
		return fmt.Errorf("asking %s for its version: %w", n.llmbox, err)
	}
	fields := strings.Fields(string(out))
	if len(fields) < 2 || fields[0] != "llmbox" {
		return fmt.Errorf("asking %s for its version: it says %q", n.llmbox, strings.TrimSpace(string(out)))
	}
	// An image's tag may hold no plus sign.
	n.version = strings.ReplaceAll(fields[1], "+", "-")
	return nil
}

func startNode(ctx context.Context, o node.Options, n nodeFlags, isDetached bool) error {
	if err := n.complete(ctx); err != nil {
		return err
	}
	o.LLMBox, o.LLMBoxVersion, o.Model, o.GPUBy, o.NodeGatewayPort = n.llmbox, n.version, n.model, n.gpuBy, n.gatewayPort
	o.HelmController = n.helmController
	return node.Run(ctx, o, func(r node.Ready) error { return tell(r, r.Dir, isDetached) })
}

// inside is the command under which the node size starts this program again.
func inside(ctx context.Context, args []string) error {
	if len(args) != 1 {
		return usageError("%s is for the lab itself", node.InsideCommand())
	}
	return node.Inside(ctx, args[0])
}

// execute runs a program in a node's network, where its addresses mean something.
func execute(args []string) error {
	fs := flag.NewFlagSet("llmbox-lab exec", flag.ContinueOnError)
	dir := fs.String("dir", "", "the lab's `directory`")
	all := fs.Bool("root", false, "with the node's root directory and processes, too; a machine is always entered so")
	name := fs.String("machine", "", "which `machine` of a lab of several (default: the first)")
	if err := parse(fs, args, true); err != nil {
		return err
	}
	if *dir == "" || fs.NArg() == 0 {
		return usageError("exec needs --dir and a command")
	}
	state, err := labdir.Read(*dir)
	if err != nil {
		return err
	}
	pid := 0
	for _, p := range state.Children {
		if p.Name == "node" && p.Alive() {
			pid = p.PID
		}
	}
	if pid == 0 {
		return errors.New("there is no running node in this directory")
	}
	if node.HasMachines(*dir) {
		return executeOnMachine(*dir, *name, fs.Args())
	}
	enter := []string{"nsenter", "--target", strconv.Itoa(pid), "--net"}
	if *all {
		enter = append(enter, "--mount", "--pid", "--uts", "--ipc")
	}
	path, err := exec.LookPath("nsenter")
	if err != nil {
		return fmt.Errorf("entering the node: %w", err)
	}
	return unix.Exec(path, append(append(enter, "--"), fs.Args()...), os.Environ())
}

// listImages prints what a node could pull, and what it lacks.
func listImages(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("llmbox-lab images", flag.ContinueOnError)
	programs := fs.String("programs", "", "`directory` of the built programs (default: lab beside this program)")
	var n nodeFlags
	n.register(fs)
	if err := parse(fs, args, false); err != nil {
		return err
	}
	if err := n.complete(ctx); err != nil {
		return err
	}
	if *programs == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("finding the lab's programs: %w", err)
		}
		*programs = filepath.Join(filepath.Dir(self), "lab")
	}
	all, err := images.Catalogue(*programs, n.llmbox, n.version)
	if err != nil {
		return err
	}
	there, lacking := images.Available(all)
	scratch, err := os.MkdirTemp("", "llmbox-lab-images-")
	if err != nil {
		return fmt.Errorf("listing images: %w", err)
	}
	registry, err := images.NewRegistry(scratch, there)
	if err = errors.Join(err, os.RemoveAll(scratch)); err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	return out.Encode(map[string]any{"images": registry.Served(), "lacking": lacking})
}

// clearNode removes what a node leaves outside of its directory.
func clearNode(dir string) error {
	if os.Geteuid() != 0 {
		return nil // such a lab could not have been started
	}
	if err := node.RemoveCgroups(dir); err != nil && !errors.Is(err, syscall.ENOENT) {
		return err
	}
	return nil
}
