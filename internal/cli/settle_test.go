package cli

import (
	"io"
	"testing"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/machine"
)

// What the last run found out about its model counts for that model alone.
func TestAnotherModelForgetsTheFormer(t *testing.T) {
	const recorded = `apiVersion: llmbox.dev/v1alpha1
kind: Box
model:
  name: Qwen/Qwen3-8B
  revision: 0123456789abcdef0123456789abcdef01234567
  contextTokens: 4096
gateway: {port: 8099}
`
	for _, tt := range []struct {
		name, model, commit string
		revision            string
		tokens              bool
	}{
		{"the same", "Qwen/Qwen3-8B", "", "0123456789abcdef0123456789abcdef01234567", true},
		{"the same, and the source has moved on", "Qwen/Qwen3-8B", "feedfeedfeedfeedfeedfeedfeedfeedfeedfeed", "0123456789abcdef0123456789abcdef01234567", true},
		{"another", "Qwen/Qwen3-4B", "", "", false},
		{"another, with what its source has", "Qwen/Qwen3-4B", "feedfeedfeedfeedfeedfeedfeedfeedfeedfeed", "feedfeedfeedfeedfeedfeedfeedfeedfeedfeed", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			host := machine.New(machine.Options{Root: t.TempDir(), Executable: "/usr/local/bin/llmbox"})
			if err := host.Choose(t.Context(), []byte(recorded)); err != nil {
				t.Fatal(err)
			}
			a := &app{env: Env{Stderr: io.Discard, Getenv: func(string) string { return "" }, Environ: func() []string { return nil }}}
			flags := &boxFlags{machine: host, commit: tt.commit}
			cmd := &cobra.Command{}
			flags.register(cmd)
			if err := cmd.ParseFlags([]string{"--model", tt.model, "--gpu", "a100-80", "--gpus", "1"}); err != nil {
				t.Fatal(err)
			}
			s, err := a.decide(t.Context(), cmd, flags, false, a.newLogger())
			if err != nil {
				t.Fatal(err)
			}
			if s.box.Model.Revision != tt.revision || (s.box.Model.ContextTokens == 4096) != tt.tokens || s.box.Gateway.Port != 8099 {
				t.Errorf("revision %q, %d tokens, port %d", s.box.Model.Revision, s.box.Model.ContextTokens, s.box.Gateway.Port)
			}
		})
	}
}
