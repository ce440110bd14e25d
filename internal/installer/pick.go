package installer

import (
	"fmt"
	"log/slog"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/config"
)

// NewEngine returns the engine that was asked for; "auto" takes Helm in-process.
func NewEngine(c *cluster.Client, name string, log *slog.Logger) (Engine, error) {
	switch name {
	case config.EngineHelm, config.EngineAuto, "":
		return chart.NewHelm(chart.Cluster{REST: c.REST, Discovery: c.Discovery, Mapper: c.Mapper, Kube: c.Kube}, c.Version, log)
	default:
		return nil, fmt.Errorf("unknown engine %q", name)
	}
}
