package doctor

import (
	"regexp"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

// saying is a row of what only words tell: the last thing a program said, where no
// structured fact knows. A row has a few ways to say it, for releases differ.
type saying struct {
	check Check
	// kinds of texts to look at; all when empty.
	kinds []string
	// ways are tried in their order: the first that is found is the one that counts.
	ways []way
	// where bounds the texts by what is known of their pod; nil takes all.
	where func(*facts, text) bool
}

// way is one form of a sentence.
type way struct {
	// hint stands in the sentence as it is; looking for it is far cheaper than a pattern.
	hint string
	// pattern is matched from the line of the hint on; nil takes the hint alone.
	pattern *regexp.Regexp
	// judge makes the answer of what the pattern caught; nil says the line.
	judge func(f *facts, t text, m []string) answer
}

// answer is what a way says. An id of another row takes the place of the row's.
type answer struct {
	id, measured, fix string
	severity          finding.Severity
	causes            []string
	// ignore says that on a closer look it is not so.
	ignore bool
}

// window is how much text behind a hint a sentence may run over.
const window = 1500

// heard is one sentence that was found.
type heard struct {
	text text
	line string
	m    []string
	way  *way
}

// hear looks for the sentence, the last occurrence in the first text that has it and
// that speaks of now.
func (s saying) hear(f *facts) []heard {
	var out []heard
	for i := range s.ways {
		w := &s.ways[i]
		for _, t := range f.texts {
			if len(s.kinds) > 0 && !slices.Contains(s.kinds, t.kind) || !strings.Contains(t.data, w.hint) {
				continue
			}
			if !f.speaks(t) || s.where != nil && !s.where(f, t) {
				continue
			}
			if h, ok := w.find(t); ok {
				out = append(out, h)
			}
		}
	}
	return out
}

func (w *way) find(t text) (heard, bool) {
	data := t.data
	// A log that says it a thousand times says it once.
	const tries = 8
	end := len(data)
	for range tries {
		i := strings.LastIndex(data[:end], w.hint)
		if i < 0 {
			break
		}
		end = i
		line := lineAround(data, i)
		if w.pattern == nil {
			return heard{t, line, nil, w}, true
		}
		begin := strings.LastIndexByte(data[:i], '\n') + 1
		if m := w.pattern.FindStringSubmatch(data[begin:min(len(data), i+window)]); m != nil {
			return heard{t, line, m, w}, true
		}
	}
	return heard{}, false
}

// rows makes a row of the registry of each saying.
func rows(sayings ...saying) []Check {
	var out []Check
	for _, s := range sayings {
		c := s.check
		if c.Reads == "" {
			c.Reads = "logs, events and states of pods"
		}
		c.Judge = func(f *facts) []finding.Finding { return s.judge(f, c) }
		out = append(out, c)
	}
	return out
}

func (s saying) judge(f *facts, c Check) []finding.Finding {
	byID := map[string]*finding.Finding{}
	var order []string
	for _, h := range s.hear(f) {
		var a answer
		if h.way.judge != nil {
			a = h.way.judge(f, h.text, h.m)
		}
		if a.ignore {
			continue
		}
		if a.id == "" {
			a.id = c.ID
		}
		if a.measured == "" {
			a.measured = oneLine(strings.TrimSpace(stripPrefix(h.line)))
		}
		if a.severity == "" {
			a.severity = finding.Fail
		}
		if h.text.pod != "" && (a.severity == finding.Fail || a.severity == finding.Warn) {
			f.explain(h.text.namespace+"/"+h.text.pod, a.id)
		}
		if known := byID[a.id]; known != nil {
			if len(known.Evidence) < 3 {
				known.Evidence = append(known.Evidence, h.text.evidence(h.line))
			}
			continue
		}
		byID[a.id] = &finding.Finding{
			ID: a.id, Severity: a.severity, Measured: a.measured, Fix: a.fix, Causes: a.causes, Evidence: []finding.Evidence{h.text.evidence(h.line)},
		}
		order = append(order, a.id)
	}
	var out []finding.Finding
	for _, id := range order {
		one := *byID[id]
		// What another row is called is said in that row's words.
		if id != c.ID {
			if row, ok := rowByID(id); ok {
				one = row.finish(one)
			}
		}
		out = append(out, one)
	}
	return out
}

// rowByID finds the row that an id has as its own.
func rowByID(id string) (Check, bool) {
	for _, c := range Checks() {
		if c.ID == id {
			return c, true
		}
	}
	return Check{}, false
}

// loggers stand in front of a line of vLLM: process, level, time and place.
var loggers = regexp.MustCompile(`^(?:\([A-Za-z0-9_]+ pid=\d+\)\s*)?(?:\[rank\d+\]:\s*)?(?:(?:ERROR|WARNING|INFO|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d\s*)?(?:\[[^\]\s]+\.py:\d+\]\s*)?`)

func stripPrefix(line string) string { return loggers.ReplaceAllString(line, "") }

// explain notes that a finding explains why a pod is not well.
func (f *facts) explain(pod, id string) {
	if f.explained == nil {
		f.explained = map[string][]string{}
	}
	if !slices.Contains(f.explained[pod], id) {
		f.explained[pod] = append(f.explained[pod], id)
	}
}
