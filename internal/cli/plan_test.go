package cli

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestPlanShowsRequests checks that a person and a program are told the same of each
// component's requests, and of their sum beside the model.
func TestPlanShowsRequests(t *testing.T) {
	doc := plan(t, nil, "--gpu", "a10")
	text := run(t, nil, "", "plan", "--gpu", "a10")
	if text.code != 0 {
		t.Fatalf("%+v", text)
	}
	rows := map[string][]string{}
	for line := range strings.Lines(text.stdout) {
		if fields := strings.Fields(line); len(fields) > 5 {
			rows[fields[0]] = fields
		}
	}
	var cpu, memory int64
	asking := 0
	for _, c := range doc.Components {
		want := []string{"–", "–"}
		if c.Requests.CPUMillis > 0 {
			asking++
			want = []string{fmt.Sprintf("%dm", c.Requests.CPUMillis), fmt.Sprint(c.Requests.MemoryBytes >> 20), "MiB"}
		}
		if row := rows[c.Name]; len(row) < 3+len(want) || !slices.Equal(row[3:3+len(want)], want) {
			t.Errorf("the row of %s is %q, want the requests %v", c.Name, row, want)
		}
		if c.Name != "model" {
			cpu, memory = cpu+c.Requests.CPUMillis, memory+c.Requests.MemoryBytes
		}
	}
	if asking < 5 {
		t.Errorf("only %d components ask for anything", asking)
	}
	if want := fmt.Sprintf("%dm CPU, %d MiB memory beside the model", cpu, memory>>20); !strings.Contains(text.stdout, want) {
		t.Errorf("the text does not say %q:\n%s", want, text.stdout)
	}
}

// TestPlanFastStartGolden holds what a person is told of how vLLM will start.
func TestPlanFastStartGolden(t *testing.T) {
	for name, args := range map[string][]string{
		"l4-auto":   {"--gpu", "l4", "--fast-start"},
		"h100-auto": {"--gpu", "h100", "--model", "Qwen/Qwen3-8B", "--fast-start=auto"},
		"two-eager": {"--gpu", "l40s", "--gpus", "2", "--fast-start=eager"},
		"own-words": {"--gpu", "l4", "--set", `model.extraArgs=["-O1"]`, "--set", "model.fastStart=graphs"},
		"off":       {"--gpu", "l4"},
	} {
		t.Run(name, func(t *testing.T) {
			got := run(t, nil, "", append([]string{"plan"}, args...)...)
			if got.code != 0 {
				t.Fatalf("%+v", got)
			}
			model, _, _ := strings.Cut(got.stdout, "\n\n")
			golden(t, "plan-fast-start-"+name+".txt", model+"\n")
		})
	}
	if got := run(t, nil, "", "plan", "--gpu", "l4", "--fast-start=quick"); got.code != exitUsage || !strings.Contains(got.stderr, "one of: off, auto, graphs, eager") {
		t.Errorf("%+v", got)
	}
	doc := plan(t, map[string]string{"LLMBOX_MODEL_FAST_START": "eager"}, "--gpu", "h100")
	if !slices.Contains(doc.Model.Args, "--enforce-eager") {
		t.Errorf("vLLM is told %q", doc.Model.Args)
	}
}
