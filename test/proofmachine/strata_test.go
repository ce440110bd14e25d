package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/component"
)

func TestSeries(t *testing.T) {
	for name, series := range map[string]struct {
		all  func(uint64) []trial
		want map[kill]int
	}{
		"kill":  {kills, map[kill]int{install: 50, wholeMachine: 10}},
		"trace": {traces, map[kill]int{install: 10, uninstall: 10}},
	} {
		counts := map[kill]int{}
		moments := map[string]float64{}
		for i, tr := range series.all(7) {
			counts[tr.Kills]++
			if tr.Number != i+1 || (tr.Place == inside) != (tr.Fraction > 0) || tr.Fraction >= 1 {
				t.Errorf("%s: trial %d: %+v", name, i+1, tr)
			}
			key := string(tr.Kills) + tr.Name()
			if tr.Place == inside && tr.Fraction <= moments[key] {
				t.Errorf("%s: trial %d comes before an earlier one of its step", name, tr.Number)
			}
			moments[key] = tr.Fraction
		}
		for k, n := range series.want {
			if counts[k] != n {
				t.Errorf("%s: %d kills of %s, want %d", name, counts[k], k, n)
			}
		}
		if again := series.all(1); reflect.DeepEqual(again, series.all(2)) || !reflect.DeepEqual(again, series.all(1)) {
			t.Error("the seed does not decide the moments")
		}
	}
}

func TestChains(t *testing.T) {
	for size, want := range map[int]int{1: 60, 5: 20, 7: 18, 100: 11} {
		seen := map[int]bool{}
		groups := chains(kills(1), size)
		for _, group := range groups {
			if len(group) > size {
				t.Errorf("a chain of %d, want %d at most", len(group), size)
			}
			for i, tr := range group {
				if seen[tr.Number] || i > 0 && (tr.Number <= group[i-1].Number || tr.Kills != install) {
					t.Errorf("trial %d of chain %d", tr.Number, group[0].Number)
				}
				seen[tr.Number] = true
			}
		}
		if len(seen) != 60 || len(groups) != want {
			t.Errorf("%d trials in %d chains of %d, want %d", len(seen), len(groups), size, want)
		}
	}
}

// A step that the product no longer has would never be killed at.
func TestPointsNameComponents(t *testing.T) {
	table, err := component.LoadTable(os.DirFS(filepath.Join("..", "..", "embed")))
	if err != nil {
		t.Fatal(err)
	}
	for _, tr := range append(kills(1), traces(1)...) {
		parts := strings.Split(tr.Step, "/")
		if parts[0] == "component" && parts[1] != "k3s" {
			if _, ok := table.Get(parts[1]); !ok {
				t.Errorf("%s: no such component", tr.Step)
			}
		}
	}
}
