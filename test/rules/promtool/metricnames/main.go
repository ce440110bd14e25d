// Command metricnames reads PromQL expressions, a JSON array of strings, from its standard
// input, parses each with Prometheus' own parser and writes what every one selects, a JSON
// array of objects in the same order.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

// selected is what one expression reads.
type selected struct {
	// Metrics are the names of its vector selectors, in order of appearance.
	Metrics []string `json:"metrics"`
	// Error is why it could not be parsed, or that a selector has no fixed name.
	Error string `json:"error,omitempty"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "metricnames:", err)
		os.Exit(1)
	}
}

func run() error {
	var expressions []string
	if err := json.NewDecoder(os.Stdin).Decode(&expressions); err != nil {
		return fmt.Errorf("reading expressions: %w", err)
	}
	out := make([]selected, len(expressions))
	for i, expression := range expressions {
		out[i] = names(expression)
	}
	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		return fmt.Errorf("writing names: %w", err)
	}
	return nil
}

func names(expression string) selected {
	tree, err := parser.NewParser(parser.Options{}).ParseExpr(expression)
	if err != nil {
		return selected{Error: err.Error()}
	}
	out := selected{Metrics: []string{}}
	parser.Inspect(tree, func(node parser.Node, _ []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		for _, m := range selector.LabelMatchers {
			if m.Name != labels.MetricName {
				continue
			}
			if m.Type != labels.MatchEqual {
				out.Error = "a selector by a pattern of names: " + selector.String()
				continue
			}
			out.Metrics = append(out.Metrics, m.Value)
			return nil
		}
		if out.Error == "" {
			out.Error = "a selector without a name: " + selector.String()
		}
		return nil
	})
	return out
}
