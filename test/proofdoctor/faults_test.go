package main

import (
	"testing"

	"github.com/llmbox-dev/llmbox/internal/doctor"
)

// What is asked for must be something that doctor can say, or a trial shows nothing.
func TestFaults(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	kinds := map[string]bool{}
	for _, f := range faults() {
		if f.name == "" || seen[f.name] {
			t.Errorf("fault %q has no name of its own", f.name)
		}
		seen[f.name] = true
		if f.inject == nil || f.revert == nil {
			t.Errorf("%s: can't be made or taken back", f.name)
		}
		if len(f.want) == 0 {
			t.Errorf("%s: wants nothing", f.name)
		}
		for _, id := range f.want {
			if !doctor.Known(id) {
				t.Errorf("%s: no check returns %q", f.name, id)
			}
		}
		if len(f.want) > 0 {
			kinds[f.want[0]] = true
		}
	}
	if len(kinds) < 25 {
		t.Errorf("only %d kinds of faults", len(kinds))
	}
}

func TestChoose(t *testing.T) {
	t.Parallel()
	all := faults()
	for _, tt := range []struct {
		name        string
		only        string
		first, last int
		want        int
	}{
		{"all", "", 1, len(all), len(all)},
		{"some", "", 3, 5, 3},
		{"by name", "vault-sealed,disk-full", 1, len(all), 2},
		{"an unknown name", "nothing", 1, len(all), -1},
		{"none", "", 5, 3, -1},
		{"beyond the end", "", 1, len(all) + 1, -1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := choose(all, tt.only, tt.first, tt.last)
			if (err != nil) != (tt.want < 0) || err == nil && len(got) != tt.want {
				t.Errorf("%d faults, %v; want %d", len(got), err, tt.want)
			}
		})
	}
}
