package bench

import (
	"fmt"
	"slices"
)

// Comparison is two results side by side.
type Comparison struct {
	A Result `json:"a"`
	B Result `json:"b"`
	// Differs says what else than the boxes differs: with any of it the figures measure
	// different things.
	Differs []string `json:"differs"`
	// Levels are those that both have.
	Levels []LevelComparison `json:"levels"`
	// OnlyA and OnlyB are the numbers at once that only one of them has.
	OnlyA []int `json:"only_a"`
	OnlyB []int `json:"only_b"`
}

// LevelComparison is one level of two results.
type LevelComparison struct {
	Concurrency int     `json:"concurrency"`
	Figures     []Ratio `json:"figures"`
	// FailedA and FailedB are requests that failed: the figures leave them out.
	FailedA int `json:"failed_a"`
	FailedB int `json:"failed_b"`
}

// Ratio is one figure of two boxes.
type Ratio struct {
	Figure string  `json:"figure"`
	A      float64 `json:"a"`
	B      float64 `json:"b"`
	// Ratio is B over A; 0 where either has none.
	Ratio float64 `json:"ratio"`
	// MoreIsBetter: a ratio above 1 speaks for B; else one below 1 does.
	MoreIsBetter bool `json:"more_is_better"`
}

// Better says which box a figure speaks for: "A", "B", or nothing where they are within
// 3 % of each other or one has none.
func (r Ratio) Better() string {
	const same = 0.03
	switch {
	case r.Ratio == 0 || r.Ratio > 1-same && r.Ratio < 1+same:
		return ""
	case (r.Ratio > 1) == r.MoreIsBetter:
		return "B"
	}
	return "A"
}

// Compare puts two results side by side.
func Compare(a, b Result) Comparison {
	c := Comparison{A: a, B: b, Differs: []string{}, Levels: []LevelComparison{}, OnlyA: []int{}, OnlyB: []int{}}
	differ := func(what string, x, y any) {
		if x != y {
			c.Differs = append(c.Differs, fmt.Sprintf("%s: %v in A, %v in B", what, x, y))
		}
	}
	differ("words of a prompt", a.Parameters.PromptTokens, b.Parameters.PromptTokens)
	differ("tokens of an answer", a.Parameters.MaxTokens, b.Parameters.MaxTokens)
	if x, y := cmpModel(a.Box), cmpModel(b.Box); x != y {
		differ("model", x, y)
	}
	for name, r := range map[string]Result{"A": a, "B": b} {
		if r.CutOff {
			c.Differs = append(c.Differs, name+" was stopped before its end")
		}
	}
	slices.Sort(c.Differs)
	for _, l := range a.Levels {
		at := slices.IndexFunc(b.Levels, func(m Level) bool { return m.Concurrency == l.Concurrency })
		if at < 0 {
			c.OnlyA = append(c.OnlyA, l.Concurrency)
			continue
		}
		m := b.Levels[at]
		if l.CountedBy != m.CountedBy && l.CountedBy != "" && m.CountedBy != "" {
			differ(fmt.Sprintf("tokens with %d at once counted by", l.Concurrency), l.CountedBy, m.CountedBy)
		}
		c.Levels = append(c.Levels, LevelComparison{Concurrency: l.Concurrency, FailedA: l.failures(), FailedB: m.failures(), Figures: []Ratio{
			ratio("tokens a second, all", l.TokensPerSecond, m.TokensPerSecond, true),
			ratio("tokens a second, each", l.PerRequest, m.PerRequest, true),
			ratio("first token p50, ms", l.FirstToken.P50, m.FirstToken.P50, false),
			ratio("first token p99, ms", l.FirstToken.P99, m.FirstToken.P99, false),
			ratio("between chunks p50, ms", l.BetweenChunks.P50, m.BetweenChunks.P50, false),
			ratio("between chunks p99, ms", l.BetweenChunks.P99, m.BetweenChunks.P99, false),
		}})
	}
	for _, m := range b.Levels {
		if !slices.ContainsFunc(a.Levels, func(l Level) bool { return l.Concurrency == m.Concurrency }) {
			c.OnlyB = append(c.OnlyB, m.Concurrency)
		}
	}
	return c
}

// cmpModel is what names the model best.
func cmpModel(b Box) string {
	if b.Model != "" {
		return b.Model
	}
	return b.ServedName
}

func ratio(figure string, a, b float64, more bool) Ratio {
	r := Ratio{Figure: figure, A: a, B: b, MoreIsBetter: more}
	if a > 0 && b > 0 {
		r.Ratio = hundredth(b / a)
	}
	return r
}
