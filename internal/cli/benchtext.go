package cli

import (
	"fmt"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/bench"
)

// benchText is a result for people, 100 columns wide.
func benchText(r bench.Result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Model      %s\n", benchModel(r.Box))
	fmt.Fprintf(&b, "On         %s\n", benchOn(r.Box))
	fmt.Fprintf(&b, "Measured   %s by llmbox %s\n", r.Measured.UTC().Format("2006-01-02 15:04 MST"), dash(r.LLMBox))
	fmt.Fprintf(&b, "Asked      prompts of %d words, answers of %d tokens\n\n", r.Parameters.PromptTokens, r.Parameters.MaxTokens)

	fmt.Fprintf(&b, "%7s  %8s  %8s  %8s  %20s\n", "", "", "", "", "TOKENS A SECOND")
	fmt.Fprintf(&b, "%7s  %8s  %8s  %8s  %9s  %9s\n", "AT ONCE", "ANSWERED", "FAILED", "SECONDS", "ALL", "EACH")
	for _, l := range r.Levels {
		fmt.Fprintf(&b, "%7d  %8d  %8d  %8s  %9s  %9s\n", l.Concurrency, l.Succeeded, l.Requests-l.Succeeded-l.Abandoned,
			figure(l.Seconds), figure(l.TokensPerSecond), figure(l.PerRequest))
	}
	fmt.Fprintf(&b, "\n%7s  %-38s    BETWEEN CHUNKS, ms\n", "", "  FIRST TOKEN, ms")
	fmt.Fprintf(&b, "%7s", "AT ONCE")
	for range 2 {
		fmt.Fprintf(&b, "  %8s  %8s  %8s  %8s", "p50", "p90", "p99", "max")
	}
	b.WriteByte('\n')
	for _, l := range r.Levels {
		fmt.Fprintf(&b, "%7d", l.Concurrency)
		for _, s := range []bench.Spread{l.FirstToken, l.BetweenChunks} {
			fmt.Fprintf(&b, "  %8s  %8s  %8s  %8s", figure(s.P50), figure(s.P90), figure(s.P99), figure(s.Max))
		}
		b.WriteByte('\n')
	}
	b.WriteByte('\n')
	benchNotes(&b, r)
	return wrapLines(b.String(), tableWidth)
}

// benchNotes says what the figures leave out, and how they were counted.
func benchNotes(b *strings.Builder, r bench.Result) {
	for _, l := range r.Levels {
		var kinds []string
		for _, kind := range bench.Failures() {
			if n := l.Failed[kind]; n > 0 {
				kinds = append(kinds, fmt.Sprintf("%d × %s", n, kind.Words()))
			}
		}
		if len(kinds) > 0 {
			fmt.Fprintf(b, "%d at once: %d of %d requests failed and are in no figure: %s\n", l.Concurrency, l.Requests-l.Succeeded-l.Abandoned, l.Requests, strings.Join(kinds, ", "))
		}
		switch l.Ended {
		case bench.EndedTime:
			fmt.Fprintf(b, "%d at once: its time was up after %d requests\n", l.Concurrency, l.Requests)
		case bench.EndedInterrupted:
			fmt.Fprintf(b, "%d at once: stopped, %d requests were under way\n", l.Concurrency, l.Abandoned)
		}
		switch l.CountedBy {
		case bench.CountedByChunks:
			fmt.Fprintf(b, "%d at once: the server doesn't count tokens: each piece of a stream counts as one\n", l.Concurrency)
		case bench.CountedMixed:
			fmt.Fprintf(b, "%d at once: the server counted the tokens of some answers only: elsewhere each piece counts as one\n", l.Concurrency)
		}
	}
	if len(r.Levels) > 0 && r.Levels[len(r.Levels)-1].CountedBy == bench.CountedByUsage {
		l := r.Levels[len(r.Levels)-1]
		fmt.Fprintf(b, "Tokens are as the server counts them: %.0f a prompt, %.2f a chunk.\n", l.PromptTokens, float64(l.OutputTokens)/float64(max(l.Chunks, 1)))
	}
	switch n := len(r.Parameters.Concurrency); {
	case r.CutOff:
		fmt.Fprintf(b, "CUT OFF: the run was stopped after %d of %d levels; this is what there was.\n", len(r.Levels), n)
	case len(r.Levels) < n:
		b.WriteString("Nothing succeeded on the last level: no further one was begun.\n")
	}
}

// benchCompareText is two results side by side, 100 columns wide.
func benchCompareText(c bench.Comparison) string {
	var b strings.Builder
	for _, side := range []struct {
		name string
		r    bench.Result
	}{{"A", c.A}, {"B", c.B}} {
		fmt.Fprintf(&b, "%s  %s\n", side.name, benchModel(side.r.Box))
		fmt.Fprintf(&b, "   %s; %s, llmbox %s\n", benchOn(side.r.Box), side.r.Measured.UTC().Format("2006-01-02 15:04 MST"), dash(side.r.LLMBox))
	}
	if len(c.Differs) > 0 {
		b.WriteString("\nMore than the box differs, so these figures measure different things:\n")
		for _, d := range c.Differs {
			fmt.Fprintf(&b, "  %s\n", d)
		}
	}
	for _, l := range c.Levels {
		fmt.Fprintf(&b, "\n%-26s  %10s  %10s  %8s  %s\n", fmt.Sprintf("%d AT ONCE", l.Concurrency), "A", "B", "B / A", "BETTER")
		for _, f := range l.Figures {
			ratio := "–"
			if f.Ratio > 0 {
				ratio = fmt.Sprintf("%.2f", f.Ratio)
			}
			fmt.Fprintf(&b, "%-26s  %10s  %10s  %8s  %s\n", f.Figure, figure(f.A), figure(f.B), ratio, dash(f.Better()))
		}
		if l.FailedA+l.FailedB > 0 {
			fmt.Fprintf(&b, "%d requests failed in A, %d in B; the figures leave them out\n", l.FailedA, l.FailedB)
		}
	}
	for _, only := range []struct {
		name   string
		levels []int
	}{{"A", c.OnlyA}, {"B", c.OnlyB}} {
		if len(only.levels) > 0 {
			fmt.Fprintf(&b, "\nOnly %s was measured with %s at once.\n", only.name, strings.Trim(strings.Join(strings.Fields(fmt.Sprint(only.levels)), ", "), "[]"))
		}
	}
	return wrapLines(b.String(), tableWidth)
}

func benchModel(b bench.Box) string {
	if b.Model == "" || b.Model == b.ServedName {
		return dash(plain(b.ServedName))
	}
	return plain(b.Model) + ", asked for as " + dash(plain(b.ServedName))
}

// benchOn says what it ran on.
func benchOn(b bench.Box) string {
	var parts []string
	switch {
	case b.GPU != "" && b.GPUs > 0:
		parts = append(parts, fmt.Sprintf("%d × %s", b.GPUs, plain(b.GPU)))
	case b.GPU != "":
		parts = append(parts, plain(b.GPU))
	default:
		parts = append(parts, "a GPU that isn't known")
	}
	if b.Image != "" {
		parts = append(parts, plain(b.Image))
	}
	return strings.Join(parts, ", ")
}

// figure writes a number with as many digits as matter; none where there is nothing.
func figure(x float64) string {
	switch {
	case x == 0:
		return "–"
	case x >= 1000:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}
