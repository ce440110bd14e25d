package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

// TestSameAsShipped compares each CRD with the YAML that its own project
// generated and keeps beside the types, descriptions aside. What differs must be
// written down, with a reason, in knownDifferences.
func TestSameAsShipped(t *testing.T) {
	seen := map[knownDifference]bool{}
	for _, g := range groups() {
		t.Run(g.name, func(t *testing.T) {
			shipped := map[string]*apiext.CustomResourceDefinition{}
			for _, s := range g.sources {
				for _, pattern := range s.shipped {
					for _, d := range readShipped(t, s, pattern) {
						shipped[d.Name] = d
					}
				}
			}
			if len(shipped) == 0 {
				if g.name != "prometheus" {
					t.Fatal("no shipped CRDs found to compare with")
				}
				t.Skip("the module of the operator's types ships no YAML")
			}
			ours := readCommitted(t, g)
			for name := range shipped {
				if _, ok := ours[name]; !ok {
					t.Errorf("%s: shipped, not generated", name)
				}
			}
			for name, d := range ours {
				theirs, ok := shipped[name]
				if !ok {
					t.Errorf("%s: generated, not shipped", name)
					continue
				}
				withoutDescriptions(theirs)
				for _, difference := range differences("", generic(t, theirs.Spec), generic(t, d.Spec)) {
					if k, ok := known(name, difference); ok {
						seen[k] = true
						continue
					}
					t.Errorf("%s: %s: %s", name, difference.path, difference.what)
				}
			}
			for _, k := range knownDifferences() {
				if _, here := ours[k.crd]; here && !seen[k] {
					t.Errorf("known difference %s %s: not there any more", k.crd, k.path)
				}
			}
		})
	}
}

// difference is one place where two schemas are not the same.
type difference struct{ path, what string }

// knownDifference is one that is meant. path is the end of the JSON path.
type knownDifference struct{ crd, path, why string }

// knownDifferences are what fix-ups do after the files that upstream commits
// were generated; upstream does KEDA's when it builds its release.
func knownDifferences() []knownDifference {
	const (
		protocol      = "fix-up: protocol required"
		stabilization = "fix-up: range of stabilizationWindowSeconds"
		v1beta1       = "fix-up: v1beta1 dropped"
	)
	return []knownDifference{
		{"scaledjobs.keda.sh", "/properties/containers/items/properties/ports/items/required", protocol},
		{"scaledjobs.keda.sh", "/properties/ephemeralContainers/items/properties/ports/items/required", protocol},
		{"scaledjobs.keda.sh", "/properties/initContainers/items/properties/ports/items/required", protocol},
		{"scaledjobs.keda.sh", "/template/properties/metadata/x-kubernetes-preserve-unknown-fields", "fix-up: metadata of the Job's pods kept"},
		{"scaledjobs.keda.sh", "/triggers/items/properties/metricType", "fix-up: metricType removed"},
		{"scaledobjects.keda.sh", "/scaleDown/properties/stabilizationWindowSeconds/minimum", stabilization},
		{"scaledobjects.keda.sh", "/scaleDown/properties/stabilizationWindowSeconds/maximum", stabilization},
		{"scaledobjects.keda.sh", "/scaleUp/properties/stabilizationWindowSeconds/minimum", stabilization},
		{"scaledobjects.keda.sh", "/scaleUp/properties/stabilizationWindowSeconds/maximum", stabilization},
		{"clusterexternalsecrets.external-secrets.io", "/versions/v1beta1", v1beta1},
		{"clustersecretstores.external-secrets.io", "/versions/v1beta1", v1beta1},
		{"externalsecrets.external-secrets.io", "/versions/v1beta1", v1beta1},
		{"secretstores.external-secrets.io", "/versions/v1beta1", v1beta1},
	}
}

func known(crd string, d difference) (knownDifference, bool) {
	for _, k := range knownDifferences() {
		if k.crd == crd && strings.HasSuffix(d.path, k.path) {
			return k, true
		}
	}
	return knownDifference{}, false
}

// readShipped reads the CRDs a module ships.
func readShipped(t *testing.T, s source, pattern string) []*apiext.CustomResourceDefinition {
	t.Helper()
	module := s.module
	if s.shippedIn != "" {
		module = s.shippedIn
	}
	paths, err := filepath.Glob(filepath.Join(moduleDir(t, module, s.version), pattern))
	if err != nil {
		t.Fatal(err)
	}
	var all []*apiext.CustomResourceDefinition
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for document := range strings.SplitSeq("\n"+string(content), "\n---") {
			var d apiext.CustomResourceDefinition
			if err := yaml.Unmarshal([]byte(document), &d); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			if d.Kind == "CustomResourceDefinition" {
				all = append(all, &d)
			}
		}
	}
	return all
}

// moduleDir is where the module cache keeps a module, fetched if need be.
func moduleDir(t *testing.T, module, version string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module+"@"+version) // #nosec G204 -- from the list in groups.go
	cmd.Dir = t.TempDir()
	out, err := cmd.Output()
	var answer struct{ Dir, Error string }
	if jsonErr := json.Unmarshal(out, &answer); err != nil || jsonErr != nil || answer.Dir == "" {
		t.Fatalf("fetching %s@%s: %v, %v, %s", module, version, err, jsonErr, answer.Error)
	}
	return answer.Dir
}

// readCommitted reads the group's files in the source tree.
func readCommitted(t *testing.T, g group) map[string]*apiext.CustomResourceDefinition {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("..", "..", g.dir, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) == 0 {
		t.Fatalf("no CRDs in %s", g.dir)
	}
	all := map[string]*apiext.CustomResourceDefinition{}
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var d apiext.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(content, &d); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if want := d.Name + ".yaml"; filepath.Base(path) != want {
			t.Errorf("%s: holds %s, so its name should be %s", path, d.Name, want)
		}
		all[d.Name] = &d
	}
	return all
}

func generic(t *testing.T, spec apiext.CustomResourceDefinitionSpec) any {
	t.Helper()
	// Defaulted by the API server; generators differ in writing it out.
	if spec.Conversion != nil && spec.Conversion.Strategy == apiext.NoneConverter {
		spec.Conversion = nil
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	mergeEnums(v)
	return v
}

// mergeEnums replaces "all of these lists of values" by the values in all of
// them, as newer generators write it.
func mergeEnums(v any) {
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			mergeEnums(item)
		}
	case map[string]any:
		for _, item := range v {
			mergeEnums(item)
		}
		parts, ok := v["allOf"].([]any)
		if !ok || v["enum"] != nil {
			return
		}
		var common []any
		for n, part := range parts {
			p, ok := part.(map[string]any)
			values, isEnum := p["enum"].([]any)
			if !ok || !isEnum || len(p) != 1 {
				return
			}
			if n == 0 {
				common = slices.Clone(values)
				continue
			}
			common = slices.DeleteFunc(common, func(value any) bool { return !slices.Contains(values, value) })
		}
		delete(v, "allOf")
		v["enum"] = common
	}
}

// differences lists where two JSON values differ. Lists of names (required, enum, categories) are compared as sets; versions by
// their name.
func differences(path string, was, is any) []difference {
	switch w := was.(type) {
	case map[string]any:
		i, ok := is.(map[string]any)
		if !ok {
			break
		}
		keys := map[string]bool{}
		for k := range w {
			keys[k] = true
		}
		for k := range i {
			keys[k] = true
		}
		var all []difference
		for _, k := range sortedKeys(keys) {
			wv, inW := w[k]
			iv, inI := i[k]
			switch {
			case !inI:
				all = append(all, difference{path + "/" + k, "was " + short(wv) + ", is gone"})
			case !inW:
				all = append(all, difference{path + "/" + k, "was absent, is " + short(iv)})
			default:
				all = append(all, differences(path+"/"+k, wv, iv)...)
			}
		}
		return all
	case []any:
		i, ok := is.([]any)
		if !ok {
			break
		}
		if named(w) && named(i) {
			return differences(path, byName(w), byName(i))
		}
		ws, is := slices.Clone(w), slices.Clone(i)
		less := func(s []any) func(a, b int) bool {
			return func(a, b int) bool { return short(s[a]) < short(s[b]) }
		}
		sort.Slice(ws, less(ws))
		sort.Slice(is, less(is))
		if reflect.DeepEqual(ws, is) {
			return nil
		}
		if len(w) == len(i) {
			var all []difference
			for n := range w {
				all = append(all, differences(fmt.Sprintf("%s/%d", path, n), w[n], i[n])...)
			}
			return all
		}
	}
	if reflect.DeepEqual(was, is) {
		return nil
	}
	return []difference{{path, "was " + short(was) + ", is " + short(is)}}
}

func named(list []any) bool {
	for _, v := range list {
		m, ok := v.(map[string]any)
		if !ok {
			return false
		}
		if _, ok := m["name"].(string); !ok {
			return false
		}
	}
	return len(list) > 0
}

func byName(list []any) map[string]any {
	m := map[string]any{}
	for _, v := range list {
		entry := v.(map[string]any)
		m[entry["name"].(string)] = entry
	}
	return m
}

func short(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	if len(raw) > 160 {
		return string(raw[:160]) + "…"
	}
	return string(raw)
}

func sortedKeys(m map[string]bool) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
