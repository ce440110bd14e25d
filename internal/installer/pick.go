package installer

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/installer/helmchart"
)

// NewEngine returns the engine that was asked for. "auto" stays with the one of
// the last run; on a fresh cluster it takes Helm in-process, where helm-controller
// is at work too (docs/decisions/0009).
func NewEngine(ctx context.Context, c *cluster.Client, wanted, last string, log *slog.Logger) (Engine, error) {
	if wanted == config.EngineAuto || wanted == "" {
		wanted = last
	}
	if wanted == "" {
		wanted = config.EngineHelm
	}
	byController := helmchart.New(c, helmchart.Options{}, log)
	switch wanted {
	case config.EngineHelmChart:
		return byController, nil
	case config.EngineHelm:
		inProcess, err := chart.NewHelm(chart.Cluster{REST: c.REST, Discovery: c.Discovery, Mapper: c.Mapper, Kube: c.Kube}, c.Version, log)
		if err != nil {
			return nil, err
		}
		if last == config.EngineHelmChart {
			return detaching{Helm: inProcess, former: byController}, nil
		}
		return inProcess, nil
	default:
		return nil, fmt.Errorf("unknown engine %q", wanted)
	}
}

// detaching takes each release out of helm-controller's hands, without
// uninstalling it, before Helm in-process touches it.
type detaching struct {
	*chart.Helm
	former *helmchart.Engine
}

func (d detaching) Apply(ctx context.Context, r chart.Release) (chart.Outcome, error) {
	if err := d.former.Detach(ctx, r.Name); err != nil {
		return chart.Outcome{}, fmt.Errorf("taking release %s over from helm-controller: %w", r.Name, err)
	}
	return d.Helm.Apply(ctx, r)
}

func (d detaching) Uninstall(ctx context.Context, namespace, name string) error {
	if err := d.former.Detach(ctx, name); err != nil {
		return fmt.Errorf("taking release %s over from helm-controller: %w", name, err)
	}
	return d.Helm.Uninstall(ctx, namespace, name)
}
