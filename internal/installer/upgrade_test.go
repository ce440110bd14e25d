package installer

import (
	"errors"
	"slices"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/component"
)

func TestVersionChanges(t *testing.T) {
	step := func(name, version string, mode component.Mode) Step {
		return Step{Node: component.Node{Component: component.Component{Name: name}, Mode: mode}, Version: version}
	}
	plan := &Plan{Steps: []Step{
		step("base", "", component.Install), step("keda", "2.21.0", component.Install), step("vault", "2.0.4", component.Install),
		step("kyverno", "1.19.1", component.Install), step("prometheus", "3.16.0", component.External),
	}}
	last := Journal{Version: "1.2.0", Components: map[string]ComponentState{
		"keda": {Version: "2.20.1"}, "vault": {Version: "2.0.4"}, "prometheus": {Version: "3.0.0"},
	}}
	got := VersionChanges(last, plan, "1.3.0")
	want := []VersionChange{{"llmbox", "1.2.0", "1.3.0"}, {"keda", "2.20.1", "2.21.0"}, {"kyverno", "", "1.19.1"}}
	if !slices.Equal(got, want) {
		t.Errorf("the changes are %v, want %v", got, want)
	}
	last.Version, last.Components["keda"], last.Components["kyverno"] = "1.3.0", ComponentState{Version: "2.21.0"}, ComponentState{Version: "1.19.1"}
	if got := VersionChanges(last, plan, "1.3.0"); len(got) > 0 {
		t.Errorf("nothing differs, and the changes are %v", got)
	}
}

func TestNoWayBack(t *testing.T) {
	for _, tt := range []struct {
		from, to string
		refused  bool
	}{
		{"", "1.0.0", false},
		{"1.0.0", "1.0.0", false},
		{"1.0.0", "1.0.1", false},
		{"1.9.0", "1.10.0", false},
		{"1.10.0", "1.9.0", true},
		{"v1.3.0", "1.2.9", true},
		{"2.0.0", "2.0.0-rc.1", true},
		{"v25.3.4", "v25.10.0", false},
		{"0.0.0-dev-abc", "0.0.0-dev-aaa", false},
		{"1.2.0", "0.0.0-dev-abc", false},
		{"0.0.0-dev-abc", "1.2.0", false},
		{"not a version", "1.0.0", false},
		{"1.0.0", "", false},
	} {
		err := CheckVersions([]VersionChange{{Name: "x", From: tt.from, To: tt.to}})
		if errors.Is(err, ErrOlder) != tt.refused {
			t.Errorf("%q to %q: %v, refused should be %t", tt.from, tt.to, err, tt.refused)
		}
	}
}
