//go:build tools

// Package promtool pins Prometheus' own tool, which the tests of the rules compile and run.
// A module of its own keeps Prometheus' dependencies out of the product's.
package promtool

import (
	_ "github.com/prometheus/prometheus/cmd/promtool"
)
