package preflight

import (
	"fmt"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// fitCheck is the row of the one check that no file of the machine answers: whether
// the model fits these GPUs.
func fitCheck() Check {
	return Check{
		ID: "model.fit", Title: "The model on these GPUs", Required: "weights and one whole context in the GPU's memory",
		Source: "vllm-project/vllm vllm/v1/worker/gpu_worker.py (determine_available_memory)",
		// A GPU that can't be used or read explains why nothing fits it.
		Causes: []string{"preflight.gpu_generation", "gpu.present", "gpu.memory.used", "gpu.driver", "gpu.nvml"},
	}
}

// ModelFit tells how a model fits. The zero Fit means that there is no GPU to judge
// for.
func ModelFit(f model.Fit) finding.Finding {
	check := fitCheck()
	if f.Name == "" {
		return check.finish(finding.Finding{State: finding.NotApplicable, Measured: "no GPU to judge for"})
	}
	out := finding.Finding{Severity: finding.OK}
	switch f.Verdict {
	case model.No:
		out.Severity = finding.Fail
		out.Measured = fmt.Sprintf("%s does not fit: %s", f.Name, f.Detail)
		out.Fix = "Name a model that fits: llmbox models lists them"
		if len(f.Instead) > 0 {
			out.Fix = "What fits instead: " + strings.Join(f.Instead, "; ")
		}
	case model.Tight:
		out.Severity = finding.Info
		out.Measured = fmt.Sprintf("%s just fits, with %d tokens of context", f.Name, f.ContextTokens)
	default:
		out.Measured = fmt.Sprintf("%s fits, with %d tokens of context", f.Name, f.ContextTokens)
	}
	return check.finish(out)
}
