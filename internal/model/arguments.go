package model

import (
	"slices"
	"strconv"
	"strings"
)

// Arguments is what vLLM is told. Zero values are left to vLLM.
type Arguments struct {
	// Model is a name on the hub or a directory.
	Model      string
	Revision   string
	ServedName string
	// ContextTokens is the longest prompt and answer together.
	ContextTokens     int
	MemoryUtilization float64
	TensorParallel    int
	// MaxNumSeqs, MaxBatchedTokens, KVCacheDType, LargestGraph and Eager trade speed for
	// memory, the last two also for time to start.
	MaxNumSeqs       int
	MaxBatchedTokens int
	KVCacheDType     string
	// LargestGraph is the largest batch that CUDA graphs are captured for.
	LargestGraph int
	Eager        bool
	// ToolParser and ReasoningParser are how the model writes calls of tools and its
	// thoughts, in vLLM's words; empty where it does neither.
	ToolParser, ReasoningParser string
	// Extra are the user's own words; they win over the above.
	Extra []string
}

// Arguments is what a choice means for vLLM; served name, revision and extra words
// are the caller's to add.
func (c Choice) Arguments() Arguments {
	a := c.Fit.Arguments
	a.Model, a.ContextTokens, a.MemoryUtilization, a.TensorParallel = c.Model.Name, c.ContextTokens, c.MemoryUtilization, c.GPUs
	if c.Fit.Variant != "" {
		a.Model = c.Fit.Arguments.Model
	}
	return a
}

// Args are the words after `vllm serve`, the model first. The address and the port
// are the deployment's to set.
func (a Arguments) Args() []string {
	args := []string{a.Model}
	add := func(flag, value string) {
		if value != "" && !given(a.Extra, flag) {
			args = append(args, flag+"="+value)
		}
	}
	add("--revision", a.Revision)
	add("--served-model-name", a.ServedName)
	if a.ContextTokens > 0 {
		add("--max-model-len", strconv.Itoa(a.ContextTokens))
	}
	if a.MemoryUtilization > 0 {
		add("--gpu-memory-utilization", strconv.FormatFloat(a.MemoryUtilization, 'f', 2, 64))
	}
	if a.TensorParallel > 1 {
		add("--tensor-parallel-size", strconv.Itoa(a.TensorParallel))
	}
	if a.MaxNumSeqs > 0 {
		add("--max-num-seqs", strconv.Itoa(a.MaxNumSeqs))
	}
	if a.MaxBatchedTokens > 0 {
		add("--max-num-batched-tokens", strconv.Itoa(a.MaxBatchedTokens))
	}
	add("--kv-cache-dtype", a.KVCacheDType)
	add("--reasoning-parser", a.ReasoningParser)
	if a.ToolParser != "" && !given(a.Extra, "--tool-call-parser") {
		// Without the first of them the second does nothing, and `tools` of a request is
		// refused (docs.vllm.ai, "Tool Calling").
		if !given(a.Extra, "--enable-auto-tool-choice") {
			args = append(args, "--enable-auto-tool-choice")
		}
		add("--tool-call-parser", a.ToolParser)
	}
	switch {
	case a.Eager && !given(a.Extra, "--enforce-eager"):
		args = append(args, "--enforce-eager")
	case !a.Eager && a.LargestGraph > 0:
		add("--max-cudagraph-capture-size", strconv.Itoa(a.LargestGraph))
	}
	return append(args, a.Extra...)
}

// given says whether the user's words set a flag, in any of the spellings vLLM
// takes: "--flag value", "--flag=value", underscores for dashes, -tp for one.
func given(extra []string, flag string) bool {
	return slices.ContainsFunc(extra, func(word string) bool {
		name, _, _ := strings.Cut(word, "=")
		if flag == "--tensor-parallel-size" && name == "-tp" {
			return true
		}
		return strings.HasPrefix(name, "--") && strings.ReplaceAll(name, "_", "-") == flag
	})
}
