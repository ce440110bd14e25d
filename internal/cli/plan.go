package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
)

func (a *app) planCommand() *cobra.Command {
	var flags boxFlags
	var sources bool
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show what install would do: components, order, images, requests, ports",
		Long: `plan needs no cluster and changes nothing. It settles the configuration, checks
every chart and value, and shows the components in the order of work for the GPUs of
this machine, or for those named with --gpu. With --kubeconfig it also takes in what that cluster shows and what the last run chose.`,
		Example: `  llmbox plan --gpu l4
  llmbox plan --config box.yaml --sources
  llmbox plan --gpu h100 --gpus 8 --output json | jq .totals`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runPlanWith(cmd, &flags, sources) },
	}
	flags.register(cmd)
	cmd.Flags().BoolVar(&sources, "sources", false, "show every value of the configuration and where it comes from")
	return cmd
}

func (a *app) runPlan(cmd *cobra.Command, flags *boxFlags) error {
	return a.runPlanWith(cmd, flags, false)
}

func (a *app) runPlanWith(cmd *cobra.Command, flags *boxFlags, sources bool) error {
	flags.readGPUs = a.machineGPUs
	s, err := a.settle(cmd.Context(), cmd, flags, a.kubeconfig != "", a.newLogger())
	if err != nil {
		return err
	}
	doc := planDocument(s)
	if a.output == "json" {
		return a.printJSON(doc)
	}
	return a.printPlan(s, doc, sources)
}

// planDoc is the document of plan --output json; units are in the names.
type planDoc struct {
	Components []planComponent `json:"components"`
	Model      planModel       `json:"model"`
	Totals     planTotals      `json:"totals"`
	HostPorts  []int32         `json:"host_ports"`
	Config     config.Sources  `json:"config"`
}

type planComponent struct {
	Name      string         `json:"name"`
	Title     string         `json:"title"`
	Mode      component.Mode `json:"mode"`
	Version   string         `json:"version"`
	Namespace string         `json:"namespace"`
	Needs     []string       `json:"needs"`
	// Wave is the earliest round in which the component can start, from 0.
	Wave     int                `json:"wave"`
	Chart    string             `json:"chart,omitempty"`
	Objects  int                `json:"objects"`
	Images   []string           `json:"images"`
	Requests component.Requests `json:"requests"`
}

type planModel struct {
	Name          string   `json:"name"`
	Revision      string   `json:"revision,omitempty"`
	ServedName    string   `json:"served_name"`
	ContextTokens int      `json:"context_tokens,omitempty"`
	GPUs          int      `json:"gpus"`
	Args          []string `json:"args"`
	Reason        string   `json:"reason,omitempty"`
	// FastStart is off, graphs or eager, where a fast start was asked for.
	FastStart       string `json:"fast_start,omitempty"`
	FastStartReason string `json:"fast_start_reason,omitempty"`
}

type planTotals struct {
	Components int                `json:"components"`
	Objects    int                `json:"objects"`
	CRDs       int                `json:"crds"`
	Images     int                `json:"images"`
	Requests   component.Requests `json:"requests"`
	// BesideModel is the sum without the model server.
	BesideModel component.Requests `json:"requests_beside_model"`
}

func planDocument(s *settled) planDoc {
	p := s.plan
	beside, all := p.Totals()
	doc := planDoc{
		Components: []planComponent{}, HostPorts: p.HostPorts(), Config: p.Sources,
		Model: planModel{Name: p.Model.Name, Revision: p.Model.Revision, ServedName: p.Model.ServedName,
			ContextTokens: p.Model.ContextTokens, GPUs: p.Model.GPUs, Args: p.Model.Args, Reason: p.Model.Reason},
		Totals: planTotals{Components: len(p.Steps), CRDs: len(p.CRDs), Requests: all, BesideModel: beside},
	}
	if start := s.choice.Start; start.Reason != "" {
		doc.Model.FastStart, doc.Model.FastStartReason = string(start.Mode), start.Reason
	}
	waves := map[string]int{}
	images := map[string]bool{}
	for _, step := range p.Steps {
		wave := 0
		for _, need := range step.Needs {
			wave = max(wave, waves[need]+1)
		}
		waves[step.Name] = wave
		c := planComponent{
			Name: step.Name, Title: step.Title, Mode: step.Mode, Version: step.Version, Namespace: step.Namespace,
			Needs: slices.Concat([]string{}, step.Needs), Wave: wave, Objects: len(step.Objects), Images: imageRefs(step), Requests: step.Requests,
		}
		if step.Release != nil {
			c.Chart = step.ChartOrigin
		}
		for _, ref := range c.Images {
			images[ref] = true
		}
		doc.Totals.Objects += c.Objects
		doc.Components = append(doc.Components, c)
	}
	doc.Totals.Objects += len(p.Manifests) + len(p.IfAbsent)
	doc.Totals.Images = len(images)
	return doc
}

func imageRefs(step installer.Step) []string {
	refs := []string{}
	for _, key := range slices.Sorted(maps.Keys(step.Images)) {
		refs = append(refs, step.Images[key].Reference)
	}
	slices.Sort(refs)
	return slices.Compact(refs)
}

func (a *app) printPlan(s *settled, doc planDoc, sources bool) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Model      %s", doc.Model.Name)
	if doc.Model.ContextTokens > 0 {
		fmt.Fprintf(&b, ", %d tokens of context", doc.Model.ContextTokens)
	}
	fmt.Fprintf(&b, ", on %d × %s\n", doc.Model.GPUs, gpuName(s))
	if doc.Model.Reason != "" {
		fmt.Fprintf(&b, "           %s\n", doc.Model.Reason)
	}
	if doc.Model.FastStart != "" {
		fmt.Fprintf(&b, "           fast start: %s: %s\n", doc.Model.FastStart, doc.Model.FastStartReason)
	}
	fmt.Fprintf(&b, "           vllm serve %s\n\n", strings.Join(doc.Model.Args, " "))

	w := tabwriter.NewWriter(&b, 0, 4, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "COMPONENT\tVERSION\tNAMESPACE\tCPU\tMEMORY\tNEEDS")
	for _, c := range doc.Components {
		version := c.Version
		switch {
		case c.Mode == component.External:
			version = "external"
		case c.Chart != "" && c.Chart != "embedded":
			version += " (" + c.Chart + ")"
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", c.Name, dash(version), dash(c.Namespace),
			milli(c.Requests.CPUMillis), mebi(c.Requests.MemoryBytes), dash(strings.Join(c.Needs, ", ")))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	t := doc.Totals
	fmt.Fprintf(&b, "\n%d components, %d objects, %d CRDs, %d images", t.Components, t.Objects, t.CRDs, t.Images)
	fmt.Fprintf(&b, " (llmbox images lists them)\n")
	fmt.Fprintf(&b, "Requests   %s CPU, %s memory beside the model; %s, %s with it\n",
		milli(t.BesideModel.CPUMillis), mebi(t.BesideModel.MemoryBytes), milli(t.Requests.CPUMillis), mebi(t.Requests.MemoryBytes))
	ports := make([]string, len(doc.HostPorts))
	for i, p := range doc.HostPorts {
		ports[i] = fmt.Sprint(p)
	}
	fmt.Fprintf(&b, "Ports      %s on the node\n", strings.Join(ports, ", "))
	b.WriteString("\nConfiguration\n")
	w = tabwriter.NewWriter(&b, 0, 4, 2, ' ', 0)
	for _, src := range doc.Config {
		if !sources && src.Kind() == config.FromDefault {
			continue
		}
		_, _ = fmt.Fprintf(w, "  %s\t%s\t%s\n", src.Path, src.Text(), src.Origin)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if !sources {
		b.WriteString("  (everything else is the default; --sources shows it all)\n")
	}
	_, err := fmt.Fprint(a.env.Stdout, b.String())
	return err
}

// gpuName is the product the plan was made for.
func gpuName(s *settled) string {
	if p, ok := gpu.ProductByKey(s.box.GPU.Product); ok {
		return p.Name
	}
	return "GPU"
}

func dash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}

func milli(n int64) string {
	if n == 0 {
		return "–"
	}
	return fmt.Sprintf("%dm", n)
}

func mebi(n int64) string {
	if n == 0 {
		return "–"
	}
	return fmt.Sprintf("%d MiB", n>>20)
}
