package installer

import (
	"errors"
	"fmt"
	"strings"

	"github.com/hashicorp/go-version"

	"github.com/llmbox-dev/llmbox/internal/component"
)

// ErrOlder means that what is installed is newer than what would take its place.
var ErrOlder = errors.New("what is installed is newer")

// VersionChange is one line of an upgrade's plan.
type VersionChange struct {
	Name string `json:"name"`
	// From is empty for what is new, To for what goes.
	From string `json:"from"`
	To   string `json:"to"`
}

// VersionChanges lists what an upgrade changes, in the order of the plan: llmbox itself,
// then each component whose version differs from the last run's.
func VersionChanges(last Journal, plan *Plan, own string) []VersionChange {
	var out []VersionChange
	if last.Version != own {
		out = append(out, VersionChange{Name: "llmbox", From: last.Version, To: own})
	}
	for _, s := range plan.Steps {
		if s.Mode != component.Install || s.Version == "" {
			continue
		}
		if from := last.Components[s.Name].Version; from != s.Version {
			out = append(out, VersionChange{Name: s.Name, From: from, To: s.Version})
		}
	}
	return out
}

// CheckVersions refuses to go back: components migrate their data forwards only. A
// version that is not one, such as a development build's, is not compared.
func CheckVersions(changes []VersionChange) error {
	var back []string
	for _, c := range changes {
		from, errFrom := version.NewVersion(c.From)
		to, errTo := version.NewVersion(c.To)
		if errFrom == nil && errTo == nil && to.LessThan(from) && !development(from) && !development(to) {
			back = append(back, fmt.Sprintf("%s is %s and would become %s", c.Name, c.From, c.To))
		}
	}
	if len(back) > 0 {
		return fmt.Errorf("%w: %s", ErrOlder, strings.Join(back, ", "))
	}
	return nil
}

// development builds are 0.0.0-dev-COMMIT: their order says nothing.
func development(v *version.Version) bool {
	return v.Core().Equal(version.Must(version.NewVersion("0.0.0")))
}
