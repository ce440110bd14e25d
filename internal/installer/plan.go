package installer

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// Input is all that a plan is a function of.
type Input struct {
	// Assets are the embedded files.
	Assets fs.FS
	Table  *component.Table
	Box    config.Box
	// Choice is what the model and its arguments were decided to be.
	Choice model.Choice
	// Sources says where each configured value came from.
	Sources config.Sources
	// Version is llmbox's own, which is also the tag of its image.
	Version string
	// KubeVersion is what charts are rendered for; empty without a cluster.
	KubeVersion string
	// HostModels is set where llmbox fills the model directory of the machine itself.
	HostModels *HostModels
	// APIServers is where the API server itself listens, as far as the cluster says.
	APIServers []netip.AddrPort
}

// Plan is what a run will do, in order, before anything is touched.
type Plan struct {
	Steps []Step
	// CRDs are applied each once, in this order: see orderCRDs.
	CRDs []*unstructured.Unstructured
	// Manifests are the plain objects of the base step.
	Manifests []*unstructured.Unstructured
	// IfAbsent are applied only where nothing of that name exists.
	IfAbsent []*unstructured.Unstructured
	Model    ModelPlan
	Sources  config.Sources
	Box      config.Box
}

// Step is one component of the plan with everything that is applied for it.
type Step struct {
	component.Node
	// Release is nil for components that are not made of a chart or only waited for.
	Release *chart.Release
	// Objects are the rendered objects of the release.
	Objects []*unstructured.Unstructured
	// CRDs names those that have to be there before the release: the component's own
	// and those of others that its objects use.
	CRDs []string
	// Images are the references of every image the component runs, by key.
	Images map[string]component.Image
	// Requests are the requests of all pods, operands included.
	Requests component.Requests
	// Version is what the component installs.
	Version string
	// ChartOrigin is "embedded" or the user's chart.
	ChartOrigin string
}

// Path is the step's path in events.
func (s Step) Path() string { return "component/" + s.Name }

// ModelPlan is what will be served and how.
type ModelPlan struct {
	Name          string
	Revision      string
	ServedName    string
	ContextTokens int
	GPUs          int
	Args          []string
	Reason        string
}

// BuildPlan checks the whole of a run before anything is touched: the graph,
// every chart, every value. Its errors name the place.
func BuildPlan(in Input) (*Plan, error) {
	nodes, err := component.Order(in.Table.Components, func(name string) component.Mode {
		return component.Mode(in.Box.Mode(name))
	})
	if err != nil {
		return nil, fmt.Errorf("ordering the components: %w", err)
	}
	if tls := in.Box.Gateway.TLS; tls.Enabled && tls.ExistingSecret == "" {
		// Serving plain HTTP where TLS was asked for would be the worst answer.
		return nil, &config.Error{
			Place: in.Sources.Origin("gateway.tls.enabled"), Path: "gateway.tls.existingSecret",
			Problem: "llmbox does not make certificates itself yet",
			Fix:     "create a kubernetes.io/tls Secret in namespace envoy-gateway-system and name it",
		}
	}
	plan := &Plan{Sources: in.Sources, Box: in.Box, Model: planModel(in)}
	if plan.Manifests, plan.IfAbsent, err = loadManifests(in.Assets); err != nil {
		return nil, err
	}

	var problems []error
	for _, node := range nodes {
		step, err := planStep(in, plan, node)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		plan.Steps = append(plan.Steps, step)
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	return plan, planCRDs(in.Assets, plan)
}

// EmbeddedChart is the origin of a chart that llmbox brings.
const EmbeddedChart = "embedded"

func planStep(in Input, plan *Plan, node component.Node) (Step, error) {
	step := Step{Node: node, Images: map[string]component.Image{}, Version: node.Version.Shipped, ChartOrigin: EmbeddedChart}
	for key, img := range node.Images {
		img.Reference = strings.ReplaceAll(img.Reference, ":VERSION", ":"+imageTag(in.Version))
		step.Images[key] = img
	}
	if node.Name == modelStep {
		step.serveWith(in.Choice.Fit.Image)
	}
	if node.Name == weightsStep && in.HostModels != nil && node.Mode == component.Install {
		// Nothing of it is in the cluster.
		step.Images, step.Gates = nil, nil
		return step, nil
	}
	if node.Chart == "" || node.Mode == component.External {
		return step, nil
	}
	override := in.Box.Components[node.Name]
	var err error
	var ch *chart.Chart
	if override.Chart != "" {
		step.ChartOrigin = override.Chart
		ch, err = chart.LoadOverride(chart.Override{
			Chart: override.Chart, Repository: override.Repository, Version: override.Version,
		})
		step.Images = nil
	} else {
		ch, err = chart.Load(in.Assets, node.Chart)
	}
	if err != nil {
		return step, fmt.Errorf("components.%s.chart: %w", node.Name, err)
	}
	values := map[string]any{}
	if override.Chart == "" {
		values = computeValues(in, plan, step)
	} else {
		step.Version = ch.AppVersion()
	}
	values = chart.MergeValues(values, override.Values)
	if override.Chart == "" {
		step.runs(values, "components."+node.Name+".values.images")
	}
	step.Release = &chart.Release{Name: node.Name, Namespace: node.Namespace, Chart: ch, Values: values}
	if step.Objects, err = step.Release.Render(in.KubeVersion); err != nil {
		return step, fmt.Errorf("components.%s: %w", node.Name, err)
	}
	cpu, mem := chart.PodRequests(step.Objects)
	step.Requests = component.Requests{CPUMillis: cpu, MemoryBytes: mem}
	if override.Chart == "" {
		for _, op := range node.Operands {
			step.Requests = step.Requests.Add(component.Requests{CPUMillis: op.CPUMillis, MemoryBytes: op.MemoryBytes})
		}
		return step, nil
	}
	step.Images = map[string]component.Image{}
	for _, ref := range chart.WorkloadImages(step.Objects) {
		step.Images[ref] = component.Image{Reference: ref, Source: override.Chart}
	}
	return step, nil
}

// runs has the images be those that the values name: who overrides one wants that pulled
// and carried, and nothing else.
func (s *Step) runs(values map[string]any, origin string) {
	named, _ := values["images"].(map[string]any)
	for key, image := range s.Images {
		text, _ := named[key].(string)
		reference, digest, _ := strings.Cut(text, "@")
		if reference != "" && (reference != image.Reference || digest != image.Digest) {
			s.Images[key] = component.Image{Reference: reference, Digest: digest, Source: origin}
		}
	}
}

// vllmImageKey is under which the model names the model server's image.
const vllmImageKey = "vllm"

// serveWith takes the image that the GPU's driver can run in the place of the table's.
func (s *Step) serveWith(image model.Image) {
	table, known := s.Images[vllmImageKey]
	repository, tag, tagged := strings.Cut(table.Reference, ":")
	if !known || !tagged || image.Tag == "" || image.Tag == tag {
		return
	}
	// Digest and size are those of the table's tag.
	s.Images[vllmImageKey] = component.Image{Reference: repository + ":" + image.Tag, Source: table.Source}
}

// imageTag makes a version usable as a tag: "+" is not allowed there.
func imageTag(version string) string {
	return strings.ReplaceAll(strings.TrimPrefix(version, "v"), "+", "-")
}

func planModel(in Input) ModelPlan {
	args := in.Choice.Arguments()
	mp := ModelPlan{
		Name: in.Box.Model.Name, Revision: in.Box.Model.Revision, ServedName: in.Box.Model.ServedName,
		ContextTokens: in.Box.Model.ContextTokens, GPUs: max(in.Choice.GPUs, 1), Reason: in.Choice.Reason,
	}
	if mp.ServedName == "" {
		mp.ServedName = mp.Name
	}
	if mp.ContextTokens == 0 {
		mp.ContextTokens = args.ContextTokens
	}
	args.Model, args.Revision, args.ServedName, args.ContextTokens = mp.Name, mp.Revision, mp.ServedName, mp.ContextTokens
	args.TensorParallel = mp.GPUs
	args.Extra = append(args.Extra, in.Box.Model.ExtraArgs...)
	mp.Args = args.Args()
	return mp
}

// ifAbsentFile is the manifest of objects that others may own already.
const ifAbsentFile = "runtimeclass-nvidia.yaml"

func loadManifests(fsys fs.FS) (manifests, ifAbsent []*unstructured.Unstructured, err error) {
	entries, err := fs.ReadDir(fsys, "manifests")
	if err != nil {
		return nil, nil, fmt.Errorf("reading the embedded manifests: %w", err)
	}
	for _, e := range entries {
		f, err := fsys.Open(path.Join("manifests", e.Name()))
		if err != nil {
			return nil, nil, fmt.Errorf("reading the embedded manifests: %w", err)
		}
		objects, err := chart.Decode(f)
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
		if err != nil {
			return nil, nil, fmt.Errorf("reading embedded manifest %s: %w", e.Name(), err)
		}
		if e.Name() == ifAbsentFile {
			ifAbsent = append(ifAbsent, objects...)
		} else {
			manifests = append(manifests, objects...)
		}
	}
	return manifests, ifAbsent, nil
}

// Totals sums what all steps but the model ask for, and the model's own.
func (p *Plan) Totals() (besideModel, all component.Requests) {
	for _, s := range p.Steps {
		all = all.Add(s.Requests)
		if s.Name != modelStep {
			besideModel = besideModel.Add(s.Requests)
		}
	}
	return besideModel, all
}

// The components that the plan knows by name, because values or the account
// depend on them.
const (
	baseStep       = "base"
	modelStep      = "model"
	weightsStep    = "weights"
	vaultStep      = "vault"
	prometheusStep = "prometheus"
	kedaStep       = "keda"
	gatewayStep    = "envoy-gateway"
	autoscaleStep  = "autoscale"
	gpuStep        = "gpu-operator"
)

// GPURuntime says that llmbox itself brings what gives GPUs to pods, which stands on the
// runtime class of k3s.
func (p *Plan) GPURuntime() bool {
	return slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Name == gpuStep && s.Mode == component.Install })
}

// ownImageKey is under which components name llmbox's own image.
const ownImageKey = "llmbox"

// OwnImage is the reference of llmbox's own image; empty where no component runs it.
func (p *Plan) OwnImage() string {
	for _, s := range p.Steps {
		if image, runs := s.Images[ownImageKey]; runs && s.Mode == component.Install {
			return image.Reference
		}
	}
	return ""
}

// HostPorts lists the ports that the box takes on the node, sorted.
func (p *Plan) HostPorts() []int32 {
	ports := []int32{}
	for _, s := range p.Steps {
		for _, port := range s.HostPorts {
			if s.Name == gatewayStep {
				port = int32(p.Box.Gateway.Port) // #nosec G115 -- validated to 1–65535
			}
			ports = append(ports, port)
		}
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}
