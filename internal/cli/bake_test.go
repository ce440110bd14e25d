package cli

import (
	"errors"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/bake"
)

func TestFlagsOfTheFirstBoot(t *testing.T) {
	for _, c := range []struct {
		args string
		want string
	}{
		{"", ""},
		{"--port 8081 --fix --ignore gpu.present --without kyverno,policies", ""},
		{"--model Qwen/Qwen3-8B --set k3s.tlsNames=box.example.com", ""},
		{"--init systemd", ""},
		{"--init supervised", "--init supervised can't follow"},
		{"--prot 8081", "--prot"},
		{"hello", "hello"},
		{"--bundle other.tar.zst", "--bundle can't follow"},
		{"--config box.yaml", "--config can't follow"},
		{"--kubeconfig k", "--kubeconfig can't follow"},
		{"--hf-token-file /root/token", "--hf-token-file can't follow"},
		{"--set paths.data=/data", "paths.data=/data can't follow"},
	} {
		err := (&app{}).checkInstallFlags(strings.Fields(c.args))
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.args, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || exitCode(err) != exitUsage || fixFor(err) == ""):
			t.Errorf("%s: %v, exit %d, fix %q", c.args, err, exitCode(err), fixFor(err))
		}
	}
}

func TestBakedText(t *testing.T) {
	clean := bakedText(bakeDoc{Clean: true, Report: bake.Report{
		Files: []bake.File{{Path: "/a", Bytes: 1_500_000, What: "llmbox"}, {Path: "/b", Bytes: 500_000, What: "llmbox"}}, Notes: []string{"2 host keys"},
	}})
	const want = "   2 files,     2.00 MB: llmbox\nnote: 2 host keys\nNo identity is here. Shut this machine down now and take the image of its disk.\n"
	if clean != want {
		t.Errorf("got %q, want %q", clean, want)
	}
	bad := bakedText(bakeDoc{Report: bake.Report{Problems: []bake.Problem{{Path: "/etc/machine-id", Why: "it names this machine"}}}})
	if bad != "not for an image: /etc/machine-id: it names this machine\n" {
		t.Errorf("got %q", bad)
	}
}

func TestFirstBootPassesItsCodeOn(t *testing.T) {
	err := errors.Join(firstBootError{exitCheckFailed, lastError("loading\nerror: it does not fit\n  fix: take another\n")})
	if exitCode(err) != exitCheckFailed || err.Error() != "error: it does not fit; fix: take another" {
		t.Errorf("%d: %v", exitCode(err), err)
	}
}

func TestFittingModels(t *testing.T) {
	for answer, want := range map[string]string{
		`{"models":[{"name":"a","fit":"fits"},{"name":"b","fit":"too big"},{"name":"c","fit":"fits"}]}`: "; the GPUs of this machine could serve a, c",
		`{"models":[{"name":"b","fit":"too big"}]}`:                                                     "",
		"": "",
	} {
		if got := fittingModels([]byte(answer)); got != want {
			t.Errorf("%s: %q", answer, got)
		}
	}
}
