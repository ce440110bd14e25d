package component_test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
)

//go:generate go test -run TestComponentsPage -update .

var update = flag.Bool("update", false, "write the page about the components anew")

const componentsPage = "../../docs/components.md"

// TestComponentsPage keeps the page and the table from saying different things.
func TestComponentsPage(t *testing.T) {
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	page := writePage(table)
	if *update {
		if err := os.WriteFile(componentsPage, []byte(page), 0o644); err != nil { // #nosec G306 -- a page of the documentation
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(componentsPage)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != page {
		t.Errorf("%s does not say what embed/components.yaml says: run make docs", componentsPage)
	}
}

func writePage(table *component.Table) string {
	var b strings.Builder
	b.WriteString(`# Components

This page is written from ` + "`embed/components.yaml`" + ` by ` + "`make docs`" + `; a test keeps
the two equal. ` + "`llmbox plan`" + ` shows the same for a configuration of yours, with
the model's real requests.

Each component starts as soon as what it needs is ready. The modes
(` + "`components.NAME.mode`" + `) are ` + "`install`, `external`" + ` (somebody else's: only the
gates are asked) and ` + "`off`" + `.

| component | version | namespace | needs | images | requests | host ports | values |
|---|---|---|---|---|---|---|---|
`)
	var sum component.Requests
	for _, c := range table.Components {
		if c.Name != "model" {
			sum = sum.Add(c.Requests)
		}
		values := "–"
		if c.Chart != "" {
			values = fmt.Sprintf("[%s](../embed/charts/%s/values.yaml)", c.Chart, c.Chart)
		}
		ports := make([]string, len(c.HostPorts))
		for i, p := range c.HostPorts {
			ports[i] = fmt.Sprint(p)
		}
		fmt.Fprintf(&b, "| `%s`: %s | %s | %s | %s | %d | %s | %s | %s |\n", c.Name, c.Title, or(c.Version.Shipped),
			or(c.Namespace), or(strings.Join(c.Needs, ", ")), len(c.Images), requests(c.Requests), or(strings.Join(ports, ", ")), values)
	}
	fmt.Fprintf(&b, "\nBeside the model all components together request %s. The pods that operators\nmake are counted in; the model's row holds its chart's defaults.\n", requests(sum))

	b.WriteString("\n## When a component is ready\n\nAll of its gates hold, asked in this order.\n\n| component | gates | at most |\n|---|---|---|\n")
	for _, c := range table.Components {
		gates := make([]string, len(c.Gates))
		for i, g := range c.Gates {
			gates[i] = gate(g)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", c.Name, or(strings.Join(gates, "; ")), minutes(c))
	}

	b.WriteString("\n## Versions\n\nWhat is shipped, the version of which a program or a stand-in can be run beside it\n(a rehearsal runs none of them: [fidelity.md](fidelity.md)), and what each chart was\ncompared with.\n\n| component | shipped | can be run | compared with |\n|---|---|---|---|\n")
	for _, c := range table.Components {
		if c.Chart != "" {
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", c.Name, or(c.Version.Shipped), or(c.Version.RunInLab), or(c.Version.CheckedAgainst))
		}
	}

	b.WriteString("\n## Images\n\nA digest or a size that no public source states is left out, never guessed.\n\n| image | digest | used by | read in |\n|---|---|---|---|\n")
	type row struct {
		component.Image
		by []string
	}
	images := map[string]*row{}
	for _, c := range table.Components {
		for _, img := range c.Images {
			if images[img.Reference] == nil {
				images[img.Reference] = &row{Image: img}
			}
			images[img.Reference].by = append(images[img.Reference].by, "`"+c.Name+"`")
		}
	}
	for _, ref := range slices.Sorted(maps.Keys(images)) {
		r := images[ref]
		digest := "–"
		if r.Digest != "" {
			digest = "`" + r.Digest[:19] + "…`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", ref, digest, strings.Join(r.by, ", "), r.Source)
	}
	return b.String()
}

// gate says what a gate waits for.
func gate(g component.Gate) string {
	switch g.Kind {
	case component.GateWorkloads:
		return "workloads ready"
	case component.GateNodeAllocatable:
		return fmt.Sprintf("a node offers `%s` ≥ %d", g.Resource, max(g.AtLeast, 1))
	case component.GateCondition:
		return fmt.Sprintf("`%s` %s is %s", g.Resource+"."+g.Group, strings.TrimPrefix(g.Namespace+"/"+g.Name, "/"), g.Condition)
	case component.GateGateway:
		return fmt.Sprintf("Gateway %s/%s is Programmed", g.Namespace, g.Name)
	case component.GateAPIService:
		return fmt.Sprintf("APIService `%s` is Available", g.Name)
	case component.GateToken:
		return fmt.Sprintf("a token comes back through Gateway %s with a key", g.Gateway)
	case component.GatePrometheusTarget:
		return fmt.Sprintf("Prometheus has a target of job `%s` that is up", g.Job)
	case component.GateVault:
		return "Vault is unsealed and its key-value store can be read"
	case component.GateAdmission:
		return "the API server refuses a pod that breaks a policy and mutates one that uses a GPU"
	default:
		return string(g.Kind)
	}
}

func requests(r component.Requests) string {
	if r == (component.Requests{}) {
		return "–"
	}
	return fmt.Sprintf("%dm, %d MiB", r.CPUMillis, r.MemoryBytes>>20)
}

func minutes(c component.Component) string {
	return fmt.Sprintf("%d min", int(c.Timeout.Minutes()))
}

func or(s string) string {
	if s == "" {
		return "–"
	}
	return s
}
