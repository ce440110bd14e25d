package main

import "testing"

func TestParseCores(t *testing.T) {
	before, err := parseCores("cpu  100 0 100 1000 50 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
	if err != nil {
		t.Fatal(err)
	}
	after, err := parseCores("cpu  300 100 200 1400 250 50 50 100 900 900\n")
	if err != nil {
		t.Fatal(err)
	}
	got := after.since(before)
	if want := (cores{Busy: 6, IOWait: 2, Idle: 4}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for _, bad := range []string{"", "cpu 1 2 3\n", "intr 1 2 3 4 5 6 7 8 9\n", "cpu 1 2 3 4 5 6 7 x 9\n"} {
		if _, err := parseCores(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestChosenCaps(t *testing.T) {
	all := []float64{0.2, 1, 10}
	if got, err := chosen(all, ""); err != nil || len(got) != 3 {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := chosen(all, "10, 0.2"); err != nil || len(got) != 2 || got[0] != 10 || got[1] != 0.2 {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"5", "x", "1,"} {
		if _, err := chosen(all, bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
