package k3s

import (
	"errors"
	"slices"
	"testing"
)

func TestVersionsAreOrdered(t *testing.T) {
	ordered := []string{
		"v1.35.9+k3s1", "v1.36.0-rc1+k3s1", "v1.36.0+k3s1", "v1.36.4+k3s1", "v1.36.4+k3s2", "v1.36.4+k3s10", "v1.36.10+k3s1", "v1.37.0+k3s1",
	}
	var versions []Version
	for _, text := range ordered {
		v, err := ParseVersion(text)
		if err != nil {
			t.Fatal(err)
		}
		versions = append(versions, v)
	}
	for i, v := range versions {
		for j, w := range versions {
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			if got := v.Compare(w); got != want {
				t.Errorf("%s against %s: %d, want %d", v, w, got, want)
			}
		}
	}
	shuffled := slices.Clone(versions)
	slices.Reverse(shuffled)
	slices.SortFunc(shuffled, Version.Compare)
	for i := range shuffled {
		if shuffled[i].String() != ordered[i] {
			t.Errorf("place %d: %s, want %s", i, shuffled[i], ordered[i])
		}
	}
}

func TestUpgradeVerdict(t *testing.T) {
	for _, test := range []struct {
		from, to string
		want     Change
		err      error
	}{
		{"", "v1.36.4+k3s1", Fresh, nil},
		{"v1.36.4+k3s1", "v1.36.4+k3s1", Same, nil},
		{"v1.36.4+k3s1", "1.36.4+k3s1", Same, nil},
		{"v1.36.4+k3s1", "v1.36.4+k3s2", PatchUpgrade, nil},
		{"v1.36.3+k3s2", "v1.36.4+k3s1", PatchUpgrade, nil},
		{"v1.35.9+k3s1", "v1.36.4+k3s1", MinorUpgrade, nil},
		{"v1.36.4-rc1+k3s1", "v1.36.4+k3s1", PatchUpgrade, nil},
		// Without a build of k3s, as Kubernetes itself has it.
		{"v1.36.3", "v1.36.4+k3s1", PatchUpgrade, nil},
		{"v1.36.4", "v1.36.4+k3s1", PatchUpgrade, nil},
		{"v1.36.4+k3s2", "v1.36.4+k3s1", "", ErrVersion},
		{"v1.36.4+k3s1", "v1.36.3+k3s1", "", ErrVersion},
		{"v1.37.0+k3s1", "v1.36.4+k3s1", "", ErrVersion},
		{"v1.34.9+k3s1", "v1.36.4+k3s1", "", ErrVersion},
		{"v1.36.4+k3s1", "v1.38.0+k3s1", "", ErrVersion},
		{"v1.36.4+k3s1", "v2.0.0+k3s1", "", ErrVersion},
		{"v2.0.0+k3s1", "v1.36.4+k3s1", "", ErrVersion},
	} {
		got, err := UpgradeVerdict(test.from, test.to)
		if got != test.want || !errors.Is(err, test.err) {
			t.Errorf("%s to %s: %q, %v; want %q, %v", test.from, test.to, got, err, test.want, test.err)
		}
		var p *Problem
		if err != nil && (!errors.As(err, &p) || p.Fix() == "") {
			t.Errorf("%s to %s: no way out in %v", test.from, test.to, err)
		}
	}
	for _, bad := range []string{"", "latest", "v1.x", "k3s"} {
		if _, err := UpgradeVerdict("v1.36.4+k3s1", bad); err == nil {
			t.Errorf("%q was read as a version", bad)
		}
	}
}

func TestSpokenVersion(t *testing.T) {
	for text, want := range map[string]string{
		"k3s version v1.36.4+k3s1 (3dd98cc5)\ngo version go1.26.8\n": "v1.36.4+k3s1",
		"some warning\nk3s version v1.36.3+k3s2(abc)\n":              "v1.36.3+k3s2",
		"Kubernetes v1.36.4\n":                                       "",
		"rke2 version v1.36.4+rke2r1\n":                              "",
		"":                                                           "",
	} {
		v, err := parseSpoken([]byte(text))
		if want == "" {
			if !errors.Is(err, ErrNotK3s) {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		if err != nil || v.String() != want {
			t.Errorf("%q: %s, %v; want %s", text, v, err, want)
		}
	}
}
