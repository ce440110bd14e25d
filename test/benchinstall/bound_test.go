package main

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/component"
)

// The table in testdata makes every image take one second, but big ones ten.
func testDelays(t *testing.T) delays {
	t.Helper()
	d, err := loadDelays(filepath.Join("testdata", "delays.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestAlone(t *testing.T) {
	d := testDelays(t)
	for _, tt := range []struct {
		name string
		work workload
		want float64
	}{
		{"one pod", workload{waves: [][]string{{"a:1"}}}, 1 + 2},
		{"images come one after the other", workload{waves: [][]string{{"a:1", "b:1", "big/c:1"}}}, 12 + 2},
		{"the operator's pods come after it", workload{waves: [][]string{{"a:1"}, {"b:1"}}}, 1 + 2 + 1 + 2},
		{"an image is pulled once", workload{waves: [][]string{{"a:1"}, {"a:1"}}}, 1 + 2 + 2},
		{"a Job has to end", workload{waves: [][]string{{"a:1"}}, job: true}, 1 + 2 + 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := d.alone(tt.work); math.Abs(got-tt.want) > 1e-9 {
				t.Errorf("got %v s, want %v s", got, tt.want)
			}
		})
	}
}

func TestBound(t *testing.T) {
	d := testDelays(t)
	parts := []component.Component{{Name: "base"}, {Name: "vault", Needs: []string{"base"}},
		{Name: "secrets", Needs: []string{"vault"}}, {Name: "other", Needs: []string{"base"}}}
	order, err := component.Order(parts, nil)
	if err != nil {
		t.Fatal(err)
	}
	one := func(images ...string) workload { return workload{waves: [][]string{images}} }
	for _, tt := range []struct {
		name                   string
		work                   map[string]workload
		critical, link, theirs float64
	}{
		{"the chain is longest", map[string]workload{"vault": one("a:1"), "secrets": one("b:1"), "other": one("c:1")}, 6, 5, 9},
		{"the link is longest", map[string]workload{"vault": one("a:1"), "secrets": one("b:1"), "other": one("big/c:1")}, 12, 14, 18},
		{"a shared image is pulled once", map[string]workload{"vault": one("big/a:1"), "secrets": one("big/a:1"), "other": one("c:1")}, 24, 13, 27},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := computeBound(d, order, tt.work)
			if b.CriticalPathSeconds != tt.critical || b.LinkSeconds != tt.link || b.SumSeconds != tt.theirs {
				t.Errorf("got critical path %v, link %v, sum %v; want %v, %v, %v",
					b.CriticalPathSeconds, b.LinkSeconds, b.SumSeconds, tt.critical, tt.link, tt.theirs)
			}
			if b.BoundSeconds != max(tt.critical, tt.link) {
				t.Errorf("got bound %v, want the larger of %v and %v", b.BoundSeconds, tt.critical, tt.link)
			}
		})
	}
}

// A component, an operand or an image key that the product's table no longer
// has would silently shorten the bound.
func TestOperandsAreInTheTable(t *testing.T) {
	table, err := component.LoadTable(os.DirFS(filepath.Join("..", "..", "embed")))
	if err != nil {
		t.Fatal(err)
	}
	for name := range operands() {
		c, ok := table.Get(name)
		if !ok {
			t.Fatalf("no component %s", name)
		}
		w, err := workloadOf(c, "")
		if err != nil {
			t.Fatal(err)
		}
		if len(w.waves) != 2 || slices.Contains(w.waves[1], "") {
			t.Errorf("%s: got waves %v", name, w.waves)
		}
	}
}

func TestOneByOne(t *testing.T) {
	d := testDelays(t)
	order, err := component.Order([]component.Component{{Name: "operator"}, {Name: "other"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		work map[string]workload
		want float64
	}{
		{"two charts", map[string]workload{"operator": {waves: [][]string{{"a:1"}}}, "other": {waves: [][]string{{"b:1"}}}}, 3 + 3},
		{"operands are not waited for but hold the link", map[string]workload{
			"operator": {waves: [][]string{{"a:1"}, {"big/b:1"}}}, "other": {waves: [][]string{{"c:1"}}}}, 3 + 10 + 1 + 2},
		{"nothing is pulled twice", map[string]workload{
			"operator": {waves: [][]string{{"a:1"}, {"big/b:1"}}}, "other": {waves: [][]string{{"a:1"}}}}, 3 + 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := d.oneByOne(order, tt.work); math.Abs(got-tt.want) > 1e-9 {
				t.Errorf("got %v s, want %v s", got, tt.want)
			}
		})
	}
}
