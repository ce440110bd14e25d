package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
)

func TestSeriesCoversEveryPointOnce(t *testing.T) {
	seen := map[point2]int{}
	for _, tr := range series(len(points()), "", 7) {
		seen[point2{tr.Step, tr.Place}]++
		if tr.Fraction <= 0 || tr.Fraction >= 1 {
			t.Errorf("trial %d: fraction %v", tr.Number, tr.Fraction)
		}
	}
	want := map[point2]int{}
	for _, p := range points() {
		want[point2{p.Step, p.Place}]++
	}
	for p, n := range want {
		if seen[p] != n {
			t.Errorf("%v: %d trials, want %d", p, seen[p], n)
		}
	}
}

type point2 struct {
	step  string
	place cutoff.Place
}

func TestSeries(t *testing.T) {
	strata := map[string]bool{}
	for _, p := range points() {
		strata[p.Stratum] = true
	}
	for _, tt := range []struct {
		name   string
		trials []trial
		want   int
	}{
		{"a short one takes one of each stratum", series(len(strata), "", 1), len(strata)},
		{"one longer than the points repeats them", series(60, "", 1), 60},
		{"one stratum", series(5, "vault", 1), 5},
		{"an unknown stratum has no trial", series(5, "nonsense", 1), 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if len(tt.trials) != tt.want {
				t.Fatalf("got %d trials, want %d", len(tt.trials), tt.want)
			}
			fresh := false
			for i, tr := range tt.trials {
				if fresh && !tr.Reset.cluster {
					t.Errorf("trial %d wants the kept cluster after it was replaced", i+1)
				}
				fresh = fresh || tr.Reset.cluster
			}
		})
	}
	got := map[string]bool{}
	for _, tr := range series(len(strata), "", 1) {
		got[tr.Stratum] = true
	}
	if len(got) != len(strata) {
		t.Errorf("a short series covers %d of %d strata", len(got), len(strata))
	}
	again, other := series(25, "", 3), series(25, "", 4)
	if same := series(25, "", 3); again[0].Fraction != same[0].Fraction || again[0].Fraction == other[0].Fraction {
		t.Error("the seed does not decide the moments")
	}
}

// A step that the product no longer has would never be killed at.
func TestPointsNameComponents(t *testing.T) {
	table, err := component.LoadTable(os.DirFS(filepath.Join("..", "..", "embed")))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range points() {
		parts := strings.Split(p.Step, "/")
		if parts[0] == "component" {
			if _, ok := table.Get(parts[1]); !ok {
				t.Errorf("%s: no such component", p.Step)
			}
		}
		for _, name := range p.Reset.components {
			if _, ok := table.Get(name); !ok {
				t.Errorf("%s: no component %s to remove", p.Step, name)
			}
		}
	}
}
