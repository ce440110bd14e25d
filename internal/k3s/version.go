package k3s

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	goversion "github.com/hashicorp/go-version"
)

var (
	// spoken is the first line of `k3s --version`.
	spoken = regexp.MustCompile(`(?m)^k3s version (v?[0-9][^\s(]*)`)
	// build is what k3s puts behind the version of Kubernetes.
	build = regexp.MustCompile(`^k3s([0-9]+)$`)
)

// Version is a release of k3s: a version of Kubernetes and the number of k3s's own
// build of it.
type Version struct {
	text  string
	core  *goversion.Version
	build int
}

// ParseVersion reads a version such as "v1.36.4+k3s1".
func ParseVersion(text string) (Version, error) {
	text = strings.TrimSpace(text)
	core, err := goversion.NewSemver(text)
	if err != nil {
		return Version{}, fmt.Errorf("reading version %q: %w", text, err)
	}
	v := Version{text: text, core: core}
	if m := build.FindStringSubmatch(core.Metadata()); m != nil {
		if v.build, err = strconv.Atoi(m[1]); err != nil {
			return Version{}, fmt.Errorf("reading version %q: %w", text, err)
		}
	}
	return v, nil
}

// parseSpoken reads what `k3s --version` says.
func parseSpoken(output []byte) (Version, error) {
	m := spoken.FindSubmatch(output)
	if m == nil {
		return Version{}, fmt.Errorf("reading the answer to --version: %w", ErrNotK3s)
	}
	return ParseVersion(string(m[1]))
}

// String is the version as it was written.
func (v Version) String() string { return v.text }

// Compare orders versions. go-version leaves what stands behind "+" out of account,
// so the build of k3s decides where the rest is equal.
func (v Version) Compare(w Version) int {
	if c := v.core.Compare(w.core); c != 0 {
		return c
	}
	return cmp.Compare(v.build, w.build)
}

func (v Version) majorMinor() (major, minor int) {
	segments := v.core.Segments()
	return segments[0], segments[1]
}

// Change is what going from one version to another amounts to.
type Change string

// The changes.
const (
	Fresh        Change = "fresh"
	Same         Change = "same"
	PatchUpgrade Change = "patch"
	MinorUpgrade Change = "minor"
)

// UpgradeVerdict says whether k3s may go from one version to another. An empty from
// is a machine without k3s. Kubernetes supports neither going back nor leaving out a
// minor (kubernetes.io, "Version Skew Policy"; docs.k3s.io, "Upgrades").
func UpgradeVerdict(from, to string) (Change, error) {
	wanted, err := ParseVersion(to)
	if err != nil {
		return "", err
	}
	if from == "" {
		return Fresh, nil
	}
	has, err := ParseVersion(from)
	if err != nil {
		return "", err
	}
	hasMajor, hasMinor := has.majorMinor()
	major, minor := wanted.majorMinor()
	switch c := wanted.Compare(has); {
	case c == 0:
		return Same, nil
	case c < 0:
		return "", &Problem{
			What: fmt.Sprintf("k3s %s is installed and %s is older: its datastore can't go back", has, wanted),
			Out:  "Keep " + has.String() + " (sudo llmbox install --set k3s.version=" + has.String() + "), or start anew: sudo llmbox uninstall",
			Err:  ErrVersion,
		}
	case major != hasMajor || minor > hasMinor+1:
		step := fmt.Sprintf("%d.%d", hasMajor, hasMinor+1)
		out := "Go by way of every minor, first the newest release of " + step + ": sudo llmbox upgrade --set k3s.version=v" + step + ".X+k3s1"
		if major != hasMajor {
			out = "Start anew: sudo llmbox uninstall"
		}
		return "", &Problem{What: fmt.Sprintf("from k3s %s to %s leaves out minors of Kubernetes", has, wanted), Out: out, Err: ErrVersion}
	case minor > hasMinor:
		return MinorUpgrade, nil
	}
	return PatchUpgrade, nil
}
