package main

import (
	"context"
	"os"
	"os/exec"
	"strconv"

	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
)

// command is how llmbox is called in every run of a series.
func (p *proof) command() cutoff.Command {
	return cutoff.Command{Start: func(ctx context.Context) *exec.Cmd {
		// #nosec G204 -- the project's own program
		return exec.CommandContext(ctx, p.program, "install", "--output", "json",
			"--kubeconfig", p.lab.Kubeconfig, "--port", strconv.Itoa(p.port), "--log-file", os.DevNull)
	}}
}
