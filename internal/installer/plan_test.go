package installer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// boxInput settles a box for one GPU product as the command line does.
func boxInput(t *testing.T, product, kubeVersion string, stated ...func(*config.Layer) error) Input {
	t.Helper()
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	catalogue, err := model.Load(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	card, known := gpu.ProductByKey(product)
	if !known {
		t.Fatalf("no GPU product %q", product)
	}
	choice, err := catalogue.Choose(model.FactsOf(card, 1))
	if err != nil {
		t.Fatal(err)
	}
	var said, computed config.Layer
	for _, fn := range stated {
		if err := fn(&said); err != nil {
			t.Fatal(err)
		}
	}
	machine := config.Computed("the machine")
	if err := errors.Join(
		computed.Set("gpu.product", product, machine), computed.Set("gpu.count", 1, machine),
		computed.Set("model.name", choice.Model.Name, machine),
		computed.Set("model.contextTokens", choice.ContextTokens, machine),
	); err != nil {
		t.Fatal(err)
	}
	box, sources, err := config.Resolve(said, computed, config.Defaults())
	if err != nil {
		t.Fatal(err)
	}
	return Input{Assets: assets.FS(), Table: table, Box: box, Choice: choice, Sources: sources, Version: "1.2.3+dirty", KubeVersion: kubeVersion}
}

func port(n int) func(*config.Layer) error {
	return func(l *config.Layer) error { return l.Set("gateway.port", n, config.Flag("port")) }
}

func build(t *testing.T, in Input) *Plan {
	t.Helper()
	plan, err := BuildPlan(in)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// TestNoBranchForTheLab renders everything with what a rehearsal says (another
// port, upstream's Kubernetes) and with what a GPU machine has (the defaults,
// k3s) and finds only the port.
func TestNoBranchForTheLab(t *testing.T) {
	const labPort, boxPort = 39417, 8080
	lab := rendered(t, build(t, boxInput(t, "a10", "v1.36.3", port(labPort))))
	box := rendered(t, build(t, boxInput(t, "a10", "v1.36.4+k3s1")))
	if !slices.Equal(slices.Sorted(maps.Keys(lab)), slices.Sorted(maps.Keys(box))) {
		t.Errorf("other objects in the lab:\n%v\n%v", slices.Sorted(maps.Keys(lab)), slices.Sorted(maps.Keys(box)))
	}
	var different []string
	for key, there := range box {
		here := lab[key]
		if here == there {
			continue
		}
		different = append(different, key)
		for _, d := range differences("", decode(t, there), decode(t, here)) {
			if d != fmt.Sprintf("%s: %d, %d", d[:strings.Index(d, ":")], boxPort, labPort) {
				t.Errorf("%s differs in more than the port: %s", key, d)
			}
		}
	}
	slices.Sort(different)
	// The listener has the port, and so has the policy that lets clients in to it.
	want := []string{"envoy-gateway Gateway/public"}
	for _, key := range different {
		if !strings.HasPrefix(key, "envoy-gateway ") {
			t.Errorf("%s knows the gateway's port", key)
		}
	}
	for _, key := range want {
		if !slices.Contains(different, key) {
			t.Errorf("%s does not follow the port; different are %v", key, different)
		}
	}
}

// rendered gives the bytes of all that a plan applies.
func rendered(t *testing.T, p *Plan) map[string]string {
	t.Helper()
	out := map[string]string{}
	add := func(where string, objects []*unstructured.Unstructured) {
		for _, o := range objects {
			raw, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			key := fmt.Sprintf("%s %s/%s", where, o.GetKind(), o.GetName())
			if ns := o.GetNamespace(); ns != "" && ns != namespaceOf(p, where) {
				key += " in " + ns
			}
			if _, twice := out[key]; twice {
				t.Errorf("%s is there twice", key)
			}
			out[key] = string(raw)
		}
	}
	add("crds", p.CRDs)
	add("manifests", p.Manifests)
	add("if-absent", p.IfAbsent)
	for _, s := range p.Steps {
		add(s.Name, s.Objects)
	}
	return out
}

func namespaceOf(p *Plan, step string) string {
	for _, s := range p.Steps {
		if s.Name == step {
			return s.Namespace
		}
	}
	return ""
}

func decode(t *testing.T, raw string) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(raw), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// differences lists the leaves in which two documents differ, as "path: a, b".
func differences(at string, a, b any) []string {
	am, aMap := a.(map[string]any)
	bm, bMap := b.(map[string]any)
	if aMap && bMap {
		keys := maps.Clone(am)
		maps.Copy(keys, bm)
		var out []string
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			out = append(out, differences(at+"."+key, am[key], bm[key])...)
		}
		return out
	}
	al, aList := a.([]any)
	bl, bList := b.([]any)
	if aList && bList && len(al) == len(bl) {
		var out []string
		for i := range al {
			out = append(out, differences(fmt.Sprintf("%s[%d]", at, i), al[i], bl[i])...)
		}
		return out
	}
	if fmt.Sprint(a) == fmt.Sprint(b) {
		return nil
	}
	return []string{fmt.Sprintf("%s: %v, %v", at, a, b)}
}

// TestProductDoesNotKnowTheLab looks for the names of the lab's parts in what is
// shipped. The command that starts the lab may name it, and the cluster package
// reads the one annotation and the one header by which answers are marked.
func TestProductDoesNotKnowTheLab(t *testing.T) {
	root := filepath.Join("..", "..")
	allowed := map[string]bool{"internal/cli/rehearse.go": true, "internal/cli/rehearse_unix.go": true}
	words := []string{"kwok", "stand-in", "standin", "rehearsal/", "llmbox-lab", "kubelet-standin", "test/lab", "gpu-0"}
	looked := 0
	for _, top := range []string{"cmd", "internal", "embed"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(file string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(root, file)
			if err != nil {
				return err
			}
			if d.IsDir() && (d.Name() == "testdata" || rel == "embed/crds") {
				return fs.SkipDir
			}
			if d.IsDir() || strings.HasSuffix(file, "_test.go") || allowed[rel] || d.Name() == "llmbox-nvml" || rel == "embed/components.yaml" {
				return nil
			}
			raw, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			looked++
			for i, line := range strings.Split(strings.ToLower(string(raw)), "\n") {
				// The form of a GPU's serial is no node of the lab.
				line = strings.ReplaceAll(line, "gpu-00000000-", "")
				for _, word := range words {
					if strings.Contains(line, word) {
						t.Errorf("%s:%d: %q", rel, i+1, word)
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if looked < 100 {
		t.Errorf("only %d files were looked at", looked)
	}
}

// TestTableAgainstRender holds what the component table says against what the
// charts render with their own values.
func TestTableAgainstRender(t *testing.T) {
	in := boxInput(t, "a10", "v1.36.3")
	plan := build(t, in)
	for _, s := range plan.Steps {
		t.Run(s.Name, func(t *testing.T) {
			have := map[string]bool{}
			for _, img := range s.Images {
				have[bare(img.Reference)] = true
			}
			for _, ref := range chart.WorkloadImages(s.Objects) {
				if !have[bare(ref)] {
					t.Errorf("renders image %s, which the table does not have", ref)
				}
			}
			for key, img := range s.Images {
				if strings.Contains(img.Reference, "VERSION") || strings.Contains(img.Reference, "+") {
					t.Errorf("image %s is %q: the version was not put in", key, img.Reference)
				}
			}
			if want := s.Component.Requests; s.Requests != want {
				t.Errorf("renders requests of %+v, the table says %+v", s.Requests, want)
			}
		})
	}
	var cpu, memory int64
	for _, s := range plan.Steps {
		if s.Name != modelStep {
			cpu, memory = cpu+s.Requests.CPUMillis, memory+s.Requests.MemoryBytes
		}
	}
	beside, all := plan.Totals()
	if beside.CPUMillis != cpu || beside.MemoryBytes != memory {
		t.Errorf("beside the model it sums up to %+v, counted one by one it is %d, %d", beside, cpu, memory)
	}
	if memory > 2<<30 || cpu > 1200 {
		t.Errorf("beside the model %d MiB and %dm CPU are asked for: more than 2 GiB and 1.2 cores", memory>>20, cpu)
	}
	if all.MemoryBytes <= memory {
		t.Error("the model's own requests are missing from the total")
	}
}

// bare is an image reference without its digest.
func bare(ref string) string {
	name, _, _ := strings.Cut(ref, "@")
	return name
}

// TestPlanRefuses gives the planner what can't be carried out. The table is the
// embedded one with the change that the case describes.
func TestPlanRefuses(t *testing.T) {
	row := func(in *Input, name string) *component.Component {
		for i := range in.Table.Components {
			if in.Table.Components[i].Name == name {
				return &in.Table.Components[i]
			}
		}
		t.Fatalf("no component %s", name)
		return nil
	}
	set := func(in *Input, name string, c config.Component) {
		in.Box.Components = map[string]config.Component{name: c}
	}
	dir, err := filepath.Abs("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name   string
		change func(*Input)
		err    error
		says   []string
	}{
		{"cycle", func(in *Input) { row(in, "base").Needs = []string{"policies"} }, component.ErrCycle, []string{"base → policies → ", " → base"}},
		{"unknown need", func(in *Input) { row(in, "keda").Needs = []string{"bse"} }, component.ErrUnknownNeed, []string{`keda needs "bse"`}},
		{"need that is off", func(in *Input) { set(in, "vault", config.Component{Mode: config.ModeOff}) }, component.ErrNeedOff,
			[]string{"external-secrets needs vault"}},
		{"listed twice", func(in *Input) { in.Table.Components = append(in.Table.Components, *row(in, "keda")) }, component.ErrDuplicate, []string{"keda"}},
		{"chart that is not embedded", func(in *Input) { row(in, "keda").Chart = "kedda" }, chart.ErrLoad, []string{"components.keda.chart", "kedda"}},
		{"chart that is not there", func(in *Input) { set(in, "keda", config.Component{Chart: path.Join(dir, "absent")}) }, chart.ErrLoad,
			[]string{"components.keda.chart", "absent"}},
		{"chart that does not render", func(in *Input) { set(in, "keda", config.Component{Chart: path.Join(dir, "broken-chart")}) }, chart.ErrRender,
			[]string{"components.keda", "templates/object.yaml", "said by the template"}},
		{"value outside the schema", func(in *Input) {
			set(in, "keda", config.Component{Values: map[string]any{"nonsense": 1}})
		}, chart.ErrValues, []string{"components.keda", "nonsense"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := boxInput(t, "a10", "v1.36.3")
			tc.change(&in)
			_, err := BuildPlan(in)
			if !errors.Is(err, tc.err) {
				t.Fatalf("error is %v, want %v", err, tc.err)
			}
			for _, want := range tc.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q holds no %q", err, want)
				}
			}
		})
	}
	t.Run("every mistake at once", func(t *testing.T) {
		in := boxInput(t, "a10", "v1.36.3")
		in.Box.Components = map[string]config.Component{
			"keda": {Values: map[string]any{"nonsense": 1}}, "vault": {Values: map[string]any{"rubbish": 1}},
		}
		_, err := BuildPlan(in)
		if err == nil || !strings.Contains(err.Error(), "nonsense") || !strings.Contains(err.Error(), "rubbish") {
			t.Errorf("error is %v, want both mistakes", err)
		}
	})
}

func TestPlanModes(t *testing.T) {
	in := boxInput(t, "a10", "v1.36.3")
	in.Box.Components = map[string]config.Component{
		"prometheus": {Mode: config.ModeExternal},
		"policies":   {Mode: config.ModeOff},
		"keda":       {Values: map[string]any{"tolerations": []any{map[string]any{"operator": "Exists"}}}},
	}
	plan := build(t, in)
	for _, s := range plan.Steps {
		switch s.Name {
		case "policies":
			t.Error("a component that is off is in the plan")
		case "prometheus":
			if s.Release != nil || len(s.Objects) > 0 || len(s.Gates) == 0 {
				t.Errorf("an external component has a release (%v), %d objects and %d gates", s.Release, len(s.Objects), len(s.Gates))
			}
		case "keda":
			raw, err := json.Marshal(s.Objects)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(raw), `"tolerations":[{"operator":"Exists"}]`) {
				t.Error("the user's values did not reach keda")
			}
		}
	}
	for _, crd := range plan.CRDs {
		if strings.HasSuffix(crd.GetName(), ".monitoring.coreos.com") {
			t.Errorf("%s belongs to an external component", crd.GetName())
		}
	}
}

func TestOverriddenChart(t *testing.T) {
	dir, err := filepath.Abs("testdata/other-keda")
	if err != nil {
		t.Fatal(err)
	}
	in := boxInput(t, "a10", "v1.36.3")
	in.Box.Components = map[string]config.Component{"keda": {Chart: dir, Values: map[string]any{"replicas": 2}}}
	plan := build(t, in)
	for _, s := range plan.Steps {
		if s.Name != "keda" {
			continue
		}
		if s.ChartOrigin != dir || s.Version != "9.9.9" || len(s.Objects) != 1 {
			t.Errorf("%d objects of %s from %s", len(s.Objects), s.Version, s.ChartOrigin)
		}
		if _, ok := s.Images["example.com/other:9.9.9"]; !ok || len(s.Images) != 1 {
			t.Errorf("images are %v, want those of the other chart", s.Images)
		}
		if want := (component.Requests{CPUMillis: 20, MemoryBytes: 20 << 20}); s.Requests != want {
			t.Errorf("requests are %+v, want %+v", s.Requests, want)
		}
	}
	for _, crd := range plan.CRDs {
		if strings.HasSuffix(crd.GetName(), ".keda.sh") {
			t.Errorf("%s is applied beside a chart that brings its own", crd.GetName())
		}
	}
}

// TestOverriddenImage: an image that somebody names in the values is the one that is
// listed, pulled and carried; that of the table is not.
func TestOverriddenImage(t *testing.T) {
	const tagged, pinned = "registry.example.com/envoy:1", "registry.example.com/gateway:2"
	digest := "sha256:" + strings.Repeat("ab", 32)
	in := boxInput(t, "a10", "v1.36.3")
	in.Box.Components = map[string]config.Component{"envoy-gateway": {Values: map[string]any{
		"images": map[string]any{"envoy": tagged, "gateway": pinned + "@" + digest},
	}}}
	plan := build(t, in)
	listed := map[string]string{}
	for _, image := range plan.BundleImages().All() {
		listed[image.Reference] = image.Digest
	}
	if got, ok := listed[tagged]; !ok || got != "" {
		t.Errorf("%s is there %t, with the digest %q", tagged, ok, got)
	}
	if listed[pinned] != digest {
		t.Errorf("%s has the digest %q", pinned, listed[pinned])
	}
	for reference := range listed {
		if strings.Contains(reference, "envoyproxy/envoy:") || strings.Contains(reference, "envoyproxy/gateway:") {
			t.Errorf("%s is listed, and nothing runs it", reference)
		}
	}
	order := plan.PullOrder()
	if !slices.Contains(order, tagged) || !slices.Contains(order, pinned+"@"+digest) {
		t.Errorf("the order of pulling is %q", order)
	}
}

// TestPlanHoldsNoSecret renders everything with a token file and looks for what
// is in it.
func TestPlanHoldsNoSecret(t *testing.T) {
	const token = "what stands in the file 0123456789"
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	plan := build(t, boxInput(t, "a10", "v1.36.3", func(l *config.Layer) error {
		return l.Set("secrets.hfTokenFile", file, config.Flag("hf-token-file"))
	}))
	for key, raw := range rendered(t, plan) {
		if strings.Contains(raw, token) {
			t.Errorf("%s holds the token", key)
		}
	}
	for _, s := range plan.Steps {
		if s.Release == nil {
			continue
		}
		raw, err := json.Marshal(s.Release.Values)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(raw), token) || strings.Contains(string(raw), file) {
			t.Errorf("the values of %s hold the token or its file", s.Name)
		}
	}
}

func TestHostPorts(t *testing.T) {
	if got := build(t, boxInput(t, "a10", "", port(8088))).HostPorts(); !slices.Equal(got, []int32{8088, 9100}) {
		t.Errorf("host ports are %v, want the gateway's and node-exporter's", got)
	}
}

func TestImageTag(t *testing.T) {
	for in, want := range map[string]string{"v1.2.3": "1.2.3", "0.0.0-dev": "0.0.0-dev", "1.2.3+dirty": "1.2.3-dirty"} {
		if got := imageTag(in); got != want {
			t.Errorf("tag of %s is %s, want %s", in, got, want)
		}
	}
}

// The API server is no pod: policies name its ports and addresses, which differ from
// cluster to cluster.
func TestPoliciesNameTheAPIServer(t *testing.T) {
	for _, tt := range []struct {
		name    string
		servers []string
		ports   []any
		from    []any
	}{
		{"nobody says", nil, []any{int64(443), int64(6443)}, nil},
		{"k3s on this node", []string{"10.0.0.5:6443"}, []any{int64(443), int64(6443)}, []any{"10.0.0.5/32"}},
		{"three of them on another port", []string{"10.0.0.5:8443", "10.0.0.6:8443", "10.0.0.7:8443"},
			[]any{int64(443), int64(8443)}, []any{"10.0.0.5/32", "10.0.0.6/32", "10.0.0.7/32"}},
		{"on the Service's port", []string{"172.16.3.4:443"}, []any{int64(443)}, []any{"172.16.3.4/32"}},
		{"IPv6", []string{"[fd00::5]:6443"}, []any{int64(443), int64(6443)}, []any{"fd00::5/128"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := boxInput(t, "a10", "v1.36.4+k3s1")
			for _, s := range tt.servers {
				in.APIServers = append(in.APIServers, netip.MustParseAddrPort(s))
			}
			policies := map[string]*unstructured.Unstructured{}
			for _, step := range build(t, in).Steps {
				for _, o := range step.Objects {
					if o.GetKind() == "NetworkPolicy" {
						policies[o.GetName()] = o
					}
				}
			}
			if policies["vault"] == nil {
				t.Fatal("there is no policy vault")
			}
			if got := listed(policies["vault"], "egress", "ports", "port"); !slices.Equal(got, tt.ports) {
				t.Errorf("Vault reaches the API server on %v, want %v", got, tt.ports)
			}
			if got := listed(policies["vault"], "ingress", "from", "ipBlock", "cidr"); !slices.Equal(got, tt.from) {
				t.Errorf("Vault is reached from %v, want %v", got, tt.from)
			}
			var got []any
			if o := policies["prometheus-api-server"]; o != nil {
				got = listed(o, "ingress", "from", "ipBlock", "cidr")
			}
			if !slices.Equal(got, tt.from) {
				t.Errorf("Prometheus is reached from %v, want %v", got, tt.from)
			}
		})
	}
}

// listed collects a field of the entries of a policy's first rule.
func listed(policy *unstructured.Unstructured, direction, list string, field ...string) (out []any) {
	rules, _, _ := unstructured.NestedSlice(policy.Object, "spec", direction)
	if len(rules) == 0 {
		return nil
	}
	rule, _ := rules[0].(map[string]any)
	entries, _ := rule[list].([]any)
	for _, e := range entries {
		entry, _ := e.(map[string]any)
		if v, found, _ := unstructured.NestedFieldNoCopy(entry, field...); found {
			out = append(out, v)
		}
	}
	return out
}

// TestImageForTheDriver: the model server's image is the one that the driver can run,
// with what it has to be told.
func TestImageForTheDriver(t *testing.T) {
	for _, tt := range []struct {
		driver, suffix string
		env            bool
	}{
		{"", "", false},
		{"580.95.05", "", false},
		{"570.172.08", "", true},
		{"550.163.01", "-cu129", false},
	} {
		in := boxInput(t, "a100-80", "", func(*config.Layer) error { return nil })
		facts := model.FactsOf(mustProduct(t, "a100-80"), 1)
		facts[0].Driver = tt.driver
		catalogue, err := model.Load(assets.FS())
		if err != nil {
			t.Fatal(err)
		}
		if in.Choice, err = catalogue.Fit(in.Choice.Model.Name, 0, facts); err != nil {
			t.Fatal(err)
		}
		plan, err := BuildPlan(in)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range plan.Steps {
			if s.Name != modelStep {
				continue
			}
			ref := s.Images["vllm"].Reference
			if want := "docker.io/vllm/vllm-openai:v" + model.ServedVLLM + tt.suffix; ref != want {
				t.Errorf("driver %q: %s, want %s", tt.driver, ref, want)
			}
			images, _ := s.Release.Values["images"].(map[string]any)
			if images["vllm"] != ref && !strings.HasPrefix(fmt.Sprint(images["vllm"]), ref+"@") {
				t.Errorf("driver %q: the chart gets %v", tt.driver, images["vllm"])
			}
			if _, told := s.Release.Values["env"]; told != tt.env {
				t.Errorf("driver %q: the environment is %v", tt.driver, s.Release.Values["env"])
			}
		}
	}
}

func mustProduct(t *testing.T, key string) gpu.Product {
	t.Helper()
	product, known := gpu.ProductByKey(key)
	if !known {
		t.Fatalf("no GPU product %q", key)
	}
	return product
}
