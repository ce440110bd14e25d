package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
)

var update = flag.Bool("update", false, "write golden files and the reference anew")

// golden compares got with a file, or writes it under -update.
func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs.\n--- got\n%s--- want\n%s", file, got, want)
	}
}

func known() Known {
	return Known{
		Components: []string{"envoy-gateway", "external-secrets", "gpu-operator", "keda", "kyverno", "prometheus", "vault"},
		Profiles:   []string{"core", "observability"},
		GPUs:       []string{"a10", "l4", "a100-40", "a100-80", "h100"},
	}
}

func dumpSources(s Sources) string {
	var b strings.Builder
	for _, one := range s {
		value, err := json.Marshal(one.Value)
		if err != nil {
			value = []byte(err.Error())
		}
		fmt.Fprintf(&b, "%s = %s (%s)\n", one.Path, value, one.Origin)
	}
	return b.String()
}

func dumpError(err error) string {
	var b strings.Builder
	for _, e := range Problems(err) {
		fmt.Fprintf(&b, "%s\n", e)
	}
	return b.String()
}

func TestParse(t *testing.T) {
	files, err := filepath.Glob("testdata/parse/*.yaml")
	if err != nil || len(files) < 50 {
		t.Fatalf("%d fixtures, %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			layer, err := Parse("box.yaml", data)
			got := ""
			switch {
			case err != nil:
				if !strings.HasPrefix(name, "bad-") {
					t.Errorf("refused: %v", err)
				}
				if layer.Len() != 0 {
					t.Errorf("an error came with %d values", layer.Len())
				}
				var e *Error
				if !errors.As(err, &e) {
					t.Errorf("%T is no *Error", err)
				}
				for _, e := range Problems(err) {
					if e.Place == "" || e.Problem == "" || e.Fix == "" {
						t.Errorf("not whole: %+v", e)
					}
				}
				for _, secret := range []string{"hf_AbC", "hvs.AbC"} {
					if strings.Contains(err.Error(), secret) {
						t.Errorf("the error quotes a secret: %v", err)
					}
				}
				if strings.Contains(name, "secret") && !errors.Is(err, ErrSecret) {
					t.Errorf("%v is no ErrSecret", err)
				}
				got = dumpError(err)
			default:
				if !strings.HasPrefix(name, "ok-") {
					t.Errorf("accepted")
				}
				_, sources, err := Resolve(layer)
				if err != nil {
					t.Fatal(err)
				}
				got = dumpSources(sources)
			}
			golden(t, strings.TrimSuffix(file, ".yaml")+".golden", got)
		})
	}
}

func TestValidate(t *testing.T) {
	files, err := filepath.Glob("testdata/validate/*.yaml")
	if err != nil || len(files) < 15 {
		t.Fatalf("%d fixtures, %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			layer, err := Parse("box.yaml", data)
			if err != nil {
				t.Fatal(err)
			}
			box, sources, err := Resolve(layer, Defaults())
			if err != nil {
				t.Fatal(err)
			}
			err = Validate(box, sources, known())
			if (err != nil) != strings.HasPrefix(name, "bad-") {
				t.Errorf("Validate = %v", err)
			}
			for _, e := range Problems(err) {
				if e.Place == "" || e.Path == "" || e.Problem == "" || e.Fix == "" {
					t.Errorf("not whole: %+v", e)
				}
				if strings.Contains(e.Error(), "s3cr3t") {
					t.Errorf("the error quotes a password: %v", e)
				}
			}
			got := dumpError(err)
			if err == nil {
				got = dumpSources(sources)
			}
			golden(t, strings.TrimSuffix(file, ".yaml")+".golden", got)
		})
	}
}

func TestReadIsBounded(t *testing.T) {
	big := "apiVersion: llmbox.dev/v1alpha1\nkind: Box\n#" + strings.Repeat("x", maxBytes)
	_, err := Read("stdin", strings.NewReader(big))
	if got := dumpError(err); !strings.HasPrefix(got, "stdin: is larger than 1 MiB;") {
		t.Errorf("Read = %q", got)
	}
	broken := errors.New("cable pulled")
	if _, err := Read("stdin", iotest.ErrReader(broken)); !errors.Is(err, broken) {
		t.Errorf("Read = %v", err)
	}
}

func TestReadFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if _, err := ReadFile(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
	if err := os.WriteFile(file, []byte("apiVersion: llmbox.dev/v1alpha1\nkind: Box\ngateway:\n  port: 9000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	layer, err := ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, sources, err := Resolve(layer, Defaults())
	if err != nil {
		t.Fatal(err)
	}
	if got := sources.Origin("gateway.port"); got != file+":4" {
		t.Errorf("origin %q", got)
	}
}

// layerOf builds a layer from text values.
func layerOf(t *testing.T, origin Origin, pairs ...string) Layer {
	t.Helper()
	var l Layer
	for i := 0; i < len(pairs); i += 2 {
		if err := l.SetString(pairs[i], pairs[i+1], origin); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func TestLayersStrongestFirst(t *testing.T) {
	flags := layerOf(t, Flag("model"), "model.name", "flag/model")
	env, err := Env([]string{"LLMBOX_MODEL=env/model", "LLMBOX_GATEWAY_PORT=1001"})
	if err != nil {
		t.Fatal(err)
	}
	file, err := Parse("/etc/llmbox/config.yaml", []byte("apiVersion: llmbox.dev/v1alpha1\nkind: Box\nmodel: {name: file/model}\ngateway: {port: 1002}\nengine: helm\n"))
	if err != nil {
		t.Fatal(err)
	}
	recorded, err := ParseRecorded("record", []byte("model: {name: old/model}\ngateway: {port: 1003}\nengine: helmchart\npaths: {data: /data/box}\n"))
	if err != nil {
		t.Fatal(err)
	}
	computed := layerOf(t, Computed("fits one NVIDIA A10"), "model.contextTokens", "8192", "paths.data", "/never")

	box, sources, err := Resolve(flags, env, file, recorded, computed, Defaults())
	if err != nil {
		t.Fatal(err)
	}
	if err := Validate(box, sources, known()); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"model.name":          `"flag/model" (flag --model)`,
		"gateway.port":        `1001 (env LLMBOX_GATEWAY_PORT)`,
		"engine":              `"helm" (/etc/llmbox/config.yaml:5)`,
		"paths.data":          `"/data/box" (recorded by the last run)`,
		"model.contextTokens": `8192 (computed: fits one NVIDIA A10)`,
		"network.clusterCIDR": `"10.42.0.0/16" (default)`,
	} {
		s, ok := sources.Find(path)
		value, err := json.Marshal(s.Value)
		if got := fmt.Sprintf("%s (%s)", value, s.Origin); !ok || err != nil || got != want {
			t.Errorf("%s = %s, want %s", path, got, want)
		}
	}
	if box.Model.Name != "flag/model" || box.Gateway.Port != 1001 || box.Engine != "helm" || box.Paths.Data != "/data/box" || box.Model.ContextTokens != 8192 {
		t.Errorf("box %+v", box)
	}
}

func TestResolveSharesNothing(t *testing.T) {
	file, err := Parse("f", []byte("apiVersion: llmbox.dev/v1alpha1\nkind: Box\nprofiles: [core]\ncomponents: {keda: {values: {a: {b: [1]}}}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	first, _, err := Resolve(file)
	if err != nil {
		t.Fatal(err)
	}
	first.Profiles[0] = "changed"
	first.Components["keda"].Values["a"].(map[string]any)["b"] = "changed"
	second, _, err := Resolve(file)
	if err != nil {
		t.Fatal(err)
	}
	if second.Profiles[0] != "core" || fmt.Sprint(second.Components["keda"].Values) != "map[a:map[b:[1]]]" {
		t.Errorf("a change of one box reached another: %+v", second)
	}
}

func TestEnv(t *testing.T) {
	tests := []struct {
		name    string
		environ []string
		want    string
	}{
		{"names follow paths", []string{"LLMBOX_MODEL_NAME=a/b", "LLMBOX_GATEWAY_RATE_LIMIT_REQUESTS_PER_MINUTE=5", "LLMBOX_NETWORK_CLUSTER_CIDR=10.1.0.0/16", "LLMBOX_GATEWAY_TLS_ENABLED=true"},
			"model.name = \"a/b\" (env LLMBOX_MODEL_NAME)\ngateway.tls.enabled = true (env LLMBOX_GATEWAY_TLS_ENABLED)\ngateway.rateLimit.requestsPerMinute = 5 (env LLMBOX_GATEWAY_RATE_LIMIT_REQUESTS_PER_MINUTE)\nnetwork.clusterCIDR = \"10.1.0.0/16\" (env LLMBOX_NETWORK_CLUSTER_CIDR)\n"},
		{"alias", []string{"LLMBOX_MODEL=a/b"}, "model.name = \"a/b\" (env LLMBOX_MODEL)\n"},
		{"alias and name agree", []string{"LLMBOX_MODEL=a/b", "LLMBOX_MODEL_NAME=a/b"}, "model.name = \"a/b\" (env LLMBOX_MODEL)\n"},
		{"alias and name differ", []string{"LLMBOX_MODEL=a/b", "LLMBOX_MODEL_NAME=c/d"}, "env LLMBOX_MODEL_NAME: model.name: is also set by LLMBOX_MODEL, differently; unset one of the two\n"},
		{"lists", []string{"LLMBOX_PROFILES=core, observability", `LLMBOX_MODEL_EXTRA_ARGS=["--a={\"x\":1,\"y\":2}"]`},
			"model.extraArgs = [\"--a={\\\"x\\\":1,\\\"y\\\":2}\"] (env LLMBOX_MODEL_EXTRA_ARGS)\nprofiles = [\"core\",\"observability\"] (env LLMBOX_PROFILES)\n"},
		{"components", []string{"LLMBOX_COMPONENTS_EXTERNAL_SECRETS_MODE=off"}, "components.external-secrets.mode = \"off\" (env LLMBOX_COMPONENTS_EXTERNAL_SECRETS_MODE)\n"},
		{"not ours", []string{"LLMBOX_LAB=1", "LLMBOX_HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUvWx", "LLMBOX_CONFIG=x", "PATH=/bin", "LLMBOXX=1", "LLMBOX_ENGINE="}, ""},
		{"unknown", []string{"LLMBOX_MODLE=a/b", "LLMBOX_ZZZ_QQQ=1"}, "env LLMBOX_MODLE: unknown variable; did you mean LLMBOX_MODEL?\nenv LLMBOX_ZZZ_QQQ: unknown variable; unset it; the names stand in the configuration reference\n"},
		{"file only", []string{"LLMBOX_COMPONENTS_KEDA_VALUES={}"}, "env LLMBOX_COMPONENTS_KEDA_VALUES: unknown variable; unset it; the names stand in the configuration reference\n"},
		{"wrong type", []string{"LLMBOX_GATEWAY_PORT=http", "LLMBOX_GATEWAY_TLS_ENABLED=yes"}, "env LLMBOX_GATEWAY_PORT: gateway.port: must be a whole number, not \"http\"\nenv LLMBOX_GATEWAY_TLS_ENABLED: gateway.tls.enabled: must be true or false, not \"yes\"\n"},
		{"secret", []string{"LLMBOX_SECRETS_HF_TOKEN_FILE=hf_AbCdEfGhIjKlMnOpQrStUvWx"}, "env LLMBOX_SECRETS_HF_TOKEN_FILE: secrets.hfTokenFile: holds what looks like a secret; put it into a file (chmod 600) and name that: secrets.hfTokenFile: /path, or --hf-token-file /path\n"},
		{"carriage return", []string{"LLMBOX_MODEL=a/b\r"}, "env LLMBOX_MODEL: model.name: holds a control character (U+000D); remove it\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			layer, err := Env(tt.environ)
			got := dumpError(err)
			if err == nil {
				_, sources, err := Resolve(layer)
				if err != nil {
					t.Fatal(err)
				}
				got = dumpSources(sources)
			}
			if got != tt.want {
				t.Errorf("got\n%swant\n%s", got, tt.want)
			}
		})
	}
}

func TestEnvNamesAreUnique(t *testing.T) {
	seen := map[string]string{}
	for _, name := range ForeignEnv() {
		seen[name] = "not configuration"
	}
	for _, f := range Fields() {
		for _, name := range append([]string{f.Env}, f.Aliases...) {
			if name == "" {
				continue
			}
			if other, twice := seen[name]; twice {
				t.Errorf("%s stands for %s and for %s", name, other, f.Path)
			}
			seen[name] = f.Path
		}
	}
}

func TestSet(t *testing.T) {
	tests := []struct {
		path  string
		value any
		want  string
	}{
		{"model.name", "a/b", ""},
		{"gateway.port", 80, ""},
		{"profiles", []string{"core"}, ""},
		{"components.external-secrets.mode", "off", ""},
		{"registries.mirrors[docker.io].endpoints", []string{"https://m"}, ""},
		{"components.keda.values", map[string]any{"a": int64(1)}, ""},
		{"gateway.port", "80", "flag --x: gateway.port: must be a whole number, not a string\n"},
		{"gateway.prot", 80, "flag --x: gateway.prot: unknown key; did you mean \"port\"?\n"},
		{"gateway", 80, "flag --x: gateway: is a section, not a value; set one of its keys: port, tls, rateLimit\n"},
		{"", "x", "flag --x: is a section, not a value; set one of its keys: apiVersion, kind, model, gateway, components, profiles, engine, gpu, k3s, network, paths, registries, secrets\n"},
		{"components.keda.values", map[string]any{"a": []any{"hf_AbCdEfGhIjKlMnOpQrStUvWx"}}, "flag --x: components.keda.values: holds what looks like a secret; put it into a Secret and name that in the chart's values\n"},
	}
	for _, tt := range tests {
		var l Layer
		err := l.Set(tt.path, tt.value, Flag("x"))
		if got := dumpError(err); got != tt.want {
			t.Errorf("Set(%q) = %q, want %q", tt.path, got, tt.want)
		}
		if _, ok := l.Get(tt.path); ok != (tt.want == "") {
			t.Errorf("Set(%q): value there is %v", tt.path, ok)
		}
	}
}

func TestRecordRoundTrip(t *testing.T) {
	data, err := os.ReadFile("testdata/parse/ok-full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file, err := Parse("box.yaml", data)
	if err != nil {
		t.Fatal(err)
	}
	box, sources, err := Resolve(file, Defaults())
	if err != nil {
		t.Fatal(err)
	}
	record, err := Record(sources)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/recorded/full.yaml", string(record))
	recorded, err := ParseRecorded("record", record)
	if err != nil {
		t.Fatal(err)
	}
	again, sources2, err := Resolve(recorded, Defaults())
	if err != nil {
		t.Fatal(err)
	}
	// What belongs to one run is the only difference.
	again.K3s.BinaryPath, again.Secrets = box.K3s.BinaryPath, box.Secrets
	if a, b := fmt.Sprintf("%#v", box), fmt.Sprintf("%#v", again); a != b {
		t.Errorf("the box changed:\n%s\n%s", a, b)
	}
	record2, err := Record(sources2)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(record, record2) {
		t.Errorf("a plain re-run changes the record:\n%s\n%s", record, record2)
	}
}

func TestRecordKeepsDefaultsThatMustNotMove(t *testing.T) {
	_, sources, err := Resolve(Defaults())
	if err != nil {
		t.Fatal(err)
	}
	record, err := Record(sources)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/recorded/defaults.yaml", string(record))
}

func TestRecordOfAnotherVersion(t *testing.T) {
	_, err := ParseRecorded("ConfigMap llmbox-system/llmbox-state", []byte("model: {name: a/b, flavour: x}\n"))
	want := "ConfigMap llmbox-system/llmbox-state:1: model.flavour: unknown key; it was recorded by another version of llmbox: run that version or a newer one\n"
	if got := dumpError(err); got != want {
		t.Errorf("got %q", got)
	}
	if l, err := ParseRecorded("record", []byte("\n")); err != nil || l.Len() != 0 {
		t.Errorf("no earlier run: %v, %v", l, err)
	}
}

func TestCheckImmutable(t *testing.T) {
	recorded, err := ParseRecorded("record", []byte("network: {clusterCIDR: 10.42.0.0/16}\npaths: {data: /var/lib/llmbox}\nmodel: {name: a/b}\n"))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name  string
		pairs []string
		want  string
	}{
		{"nothing asked", nil, ""},
		{"same", []string{"network.clusterCIDR", "10.42.0.0/16", "paths.data", "/var/lib/llmbox/"}, ""},
		{"mutable", []string{"model.name", "c/d"}, ""},
		{"not recorded", []string{"network.serviceCIDR", "10.99.0.0/16"}, ""},
		{"two", []string{"network.clusterCIDR", "10.50.0.0/16", "paths.data", "/data"},
			"flag --x: network.clusterCIDR: was fixed to 10.42.0.0/16 by the first install and can't become 10.50.0.0/16; leave it at 10.42.0.0/16, or start over: `llmbox uninstall`, then install with the new value\n" +
				"flag --x: paths.data: was fixed to /var/lib/llmbox by the first install and can't become /data; leave it at /var/lib/llmbox, or start over: `llmbox uninstall`, then install with the new value\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, sources, err := Resolve(layerOf(t, Flag("x"), tt.pairs...), recorded, Defaults())
			if err != nil {
				t.Fatal(err)
			}
			err = CheckImmutable(sources, recorded)
			if got := dumpError(err); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			if errors.Is(err, ErrImmutable) != (tt.want != "") {
				t.Errorf("%v: ErrImmutable", err)
			}
		})
	}
}

func TestPathsRoundTrip(t *testing.T) {
	for _, path := range []string{"engine", "gateway.tls.enabled", "registries.mirrors[docker.io].endpoints", "components.external-secrets.values"} {
		if got := formatPath(splitPath(path)); got != path {
			t.Errorf("%q becomes %q", path, got)
		}
		if boxSchema().find(splitPath(path)) == nil {
			t.Errorf("%q leads nowhere", path)
		}
	}
}

func TestProblemsOfOthers(t *testing.T) {
	one := &Error{Place: "p", Problem: "x"}
	wrapped := fmt.Errorf("outer: %w", errors.Join(one, fmt.Errorf("inner: %w", one), errors.New("not ours")))
	if got := Problems(wrapped); len(got) != 2 {
		t.Errorf("%d problems, want 2", len(got))
	}
	if Problems(nil) != nil || Problems(errors.New("x")) != nil {
		t.Error("problems out of nothing")
	}
}
