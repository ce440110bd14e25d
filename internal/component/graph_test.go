package component

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func rows(spec string) []Component {
	var out []Component
	for _, row := range strings.Fields(spec) {
		name, needs, _ := strings.Cut(row, "<")
		c := Component{Name: name}
		if needs != "" {
			c.Needs = strings.Split(needs, ",")
		}
		out = append(out, c)
	}
	return out
}

func TestOrder(t *testing.T) {
	for _, tc := range []struct {
		name, spec string
		off        []string
		want       string
		err        error
		says       string
	}{
		{name: "keeps the table's order where free", spec: "a b c", want: "a b c"},
		{name: "needs come first", spec: "route<model model<base base", want: "base model route"},
		{name: "diamond", spec: "a b<a c<a d<b,c", want: "a b c d"},
		{name: "off is left out", spec: "a b", off: []string{"a"}, want: "b"},
		{name: "need is off", spec: "a b<a", off: []string{"a"}, err: ErrNeedOff, says: "b needs a"},
		{name: "need is unknown", spec: "b<nowhere", err: ErrUnknownNeed, says: `b needs "nowhere"`},
		{name: "cycle is named in order", spec: "z a<c b<a c<b", err: ErrCycle, says: "a → c → b → a"},
		{name: "needs itself", spec: "a<a", err: ErrCycle, says: "a → a"},
		{name: "twice", spec: "a a", err: ErrDuplicate, says: "a"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			nodes, err := Order(rows(tc.spec), func(n string) Mode {
				if slices.Contains(tc.off, n) {
					return Off
				}
				return Install
			})
			if !errors.Is(err, tc.err) {
				t.Fatalf("error is %v, want %v", err, tc.err)
			}
			if err != nil {
				if !strings.Contains(err.Error(), tc.says) {
					t.Fatalf("error %q does not say %q", err, tc.says)
				}
				return
			}
			var names []string
			for _, n := range nodes {
				names = append(names, n.Name)
			}
			if got := strings.Join(names, " "); got != tc.want {
				t.Errorf("order is %q, want %q", got, tc.want)
			}
		})
	}
}

func TestCriticalPath(t *testing.T) {
	nodes, err := Order(rows("a b<a c<a d<b,c e"), nil)
	if err != nil {
		t.Fatal(err)
	}
	cost := map[string]int64{"a": 1, "b": 5, "c": 2, "d": 1, "e": 6}
	path, length := CriticalPath(nodes, func(n string) int64 { return cost[n] })
	if got := strings.Join(path, " "); got != "a b d" || length != 7 {
		t.Errorf("critical path is %q of length %d, want \"a b d\" of 7", got, length)
	}
}

// BenchmarkOrder shows that planning is linear in the edges: each row of the
// synthetic table needs up to eight earlier rows.
func BenchmarkOrder(b *testing.B) {
	for _, n := range []int{10, 100, 1000} {
		table := make([]Component, n)
		edges := 0
		for i := range table {
			table[i].Name = fmt.Sprintf("component-%d", i)
			for d := 1; d <= 8 && d <= i; d++ {
				table[i].Needs = append(table[i].Needs, fmt.Sprintf("component-%d", i-d))
				edges++
			}
		}
		b.Run(fmt.Sprintf("components=%d", n), func(b *testing.B) {
			for b.Loop() {
				if _, err := Order(table, nil); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(edges), "ns/edge")
		})
	}
}
