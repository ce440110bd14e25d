package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/test/lab/node"
)

// machine is the command under which a lab of machine size starts this program as the
// first process of a machine.
func machine(ctx context.Context, args []string) error {
	if len(args) != 1 {
		return usageError("%s is for the lab itself", node.MachineCommand())
	}
	return node.Machine(ctx, args[0])
}

// executeOnMachine runs a program as if it had been typed on a machine by root: in its
// root directory, its namespaces and its cgroups, with a fresh environment. What it
// leaves running belongs to the machine.
func executeOnMachine(dir, name string, command []string) error {
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		return fmt.Errorf("entering the machine: %w", err)
	}
	m, err := node.Join(dir, name)
	if err != nil {
		return err
	}
	env := []string{"HOME=/root", "USER=root", "LOGNAME=root", "SHELL=/bin/sh",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/lab/bin"}
	for _, v := range []string{"TERM", "LANG", "NO_COLOR"} {
		if value, ok := os.LookupEnv(v); ok {
			env = append(env, v+"="+value)
		}
	}
	enter := []string{"nsenter", "--target", strconv.Itoa(m.Init.PID), "--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup", "--"}
	return unix.Exec(nsenter, append(enter, command...), env)
}

// machineKill cuts a machine's power and leaves it off.
func machineKill(ctx context.Context, args []string) error {
	return throw(ctx, "machine-kill", args, false)
}

// reboot cuts a machine's power, if it is on, and boots it.
func reboot(ctx context.Context, args []string) error {
	return throw(ctx, "reboot", args, true)
}

// throw throws a machine's switch and prints how the machine is now.
func throw(ctx context.Context, command string, args []string, boot bool) error {
	fs := flag.NewFlagSet("llmbox-lab "+command, flag.ContinueOnError)
	dir := fs.String("dir", "", "the lab's `directory`")
	name := fs.String("machine", "", "which `machine` of a lab of several (default: the first)")
	address := new(string)
	if boot {
		address = fs.String("address", "", "the machine's `address` from now on (default: as before)")
	}
	if err := parse(fs, args, false); err != nil {
		return err
	}
	if *dir == "" {
		return usageError("%s needs --dir", command)
	}
	m, err := node.Order(ctx, *dir, *name, true, boot, *address)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(m)
}
