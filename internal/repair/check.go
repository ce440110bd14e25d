package repair

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	goversion "github.com/hashicorp/go-version"
)

// askDeadline bounds a program that only answers.
const askDeadline = 2 * time.Minute

// holds looks at each part of a check.
func (w *worker) holds(ctx context.Context, c Check) (bool, error) {
	if len(c.AnyOf) > 0 {
		if ok, err := w.anyOf(ctx, c.AnyOf); !ok || err != nil {
			return false, err
		}
	}
	if c.File != "" {
		data, err := w.machine.files.ReadFile(ctx, c.File, 4*fileLimit)
		if absent(err) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("reading %s: %w", c.File, err)
		}
		for _, text := range c.Has {
			if !strings.Contains(string(data), text) {
				return false, nil
			}
		}
	}
	for _, s := range c.Settings {
		if w.setting(ctx, s.Key) != s.Value {
			return false, nil
		}
	}
	if len(c.Devices) > 0 {
		if ok, err := w.devices(ctx, c.Devices); !ok || err != nil {
			return false, err
		}
	}
	if len(c.Run) > 0 {
		got, err := w.machine.run(ctx, c.Run, nil, askDeadline)
		if err != nil || got.Exit != 0 {
			return false, err
		}
		words := strings.Fields(got.Text)
		for _, want := range c.Says {
			if !slices.Contains(words, want) {
				return false, nil
			}
		}
		if c.Version != "" && !atLeast(versionIn(got.Text), c.Version) {
			return false, nil
		}
	}
	if c.Kube != nil {
		if ok, err := w.kubeHolds(ctx, *c.Kube); !ok || err != nil {
			return false, err
		}
	}
	if c.Offers != nil {
		return w.offers(ctx, *c.Offers)
	}
	return true, nil
}

func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// anyOf follows links: one that leads nowhere is nothing.
func (w *worker) anyOf(ctx context.Context, names []string) (bool, error) {
	for _, name := range names {
		at, err := w.machine.files.Resolve(ctx, name)
		if err == nil {
			_, err = w.machine.files.Stat(ctx, at)
		}
		if err == nil {
			return true, nil
		}
		if !absent(err) {
			return false, fmt.Errorf("looking at %s: %w", name, err)
		}
	}
	return false, nil
}

// devices compares device files with the numbers that the kernel gave out.
func (w *worker) devices(ctx context.Context, nodes []DeviceNode) (bool, error) {
	data, err := w.machine.files.ReadFile(ctx, "/proc/devices", fileLimit)
	if err != nil {
		return false, fmt.Errorf("reading /proc/devices: %w", err)
	}
	characters, _, _ := strings.Cut(string(data), "Block devices:")
	majors := map[string]uint32{}
	for line := range strings.Lines(characters) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		if n, err := strconv.ParseUint(fields[0], 10, 32); err == nil {
			majors[fields[1]] = uint32(n)
		}
	}
	for _, node := range nodes {
		info, err := w.machine.files.Stat(ctx, node.Path)
		if absent(err) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("looking at %s: %w", node.Path, err)
		}
		if info.Mode&fs.ModeCharDevice == 0 {
			return false, nil
		}
		right := slices.ContainsFunc(node.Registered, func(name string) bool {
			major, known := majors[name]
			return known && major == info.Major
		})
		if !right {
			return false, nil
		}
	}
	return true, nil
}

// offers asks the package manager for the newest version that it could install.
func (w *worker) offers(ctx context.Context, o Offer) (bool, error) {
	argv := map[Manager][]string{
		Apt:    {"apt-cache", "policy", o.Package},
		DNF:    {"dnf", "-q", "repoquery", "--latest-limit=1", "--qf", "%{version}\n", o.Package},
		Yum:    {"yum", "-q", "repoquery", "--latest-limit=1", "--qf", "%{version}\n", o.Package},
		Zypper: {"zypper", "--non-interactive", "--no-refresh", "search", "-s", "--match-exact", o.Package},
	}[o.Manager]
	if argv == nil {
		return false, nil
	}
	got, err := w.machine.run(ctx, argv, nil, askDeadline)
	if err != nil || got.Exit != 0 {
		return false, err
	}
	for line := range strings.Lines(got.Text) {
		v := strings.TrimSpace(line)
		switch o.Manager {
		case Apt:
			rest, ok := strings.CutPrefix(v, "Candidate:")
			if !ok {
				continue
			}
			v = strings.TrimSpace(rest)
		case Zypper:
			fields := strings.Split(v, "|")
			if len(fields) < 4 || strings.TrimSpace(fields[1]) != o.Package {
				continue
			}
			v = strings.TrimSpace(fields[3])
		}
		if atLeast(v, o.AtLeast) {
			return true, nil
		}
	}
	return false, nil
}

// packageVersion is the upstream part of a package's version, whole.
var packageVersion = regexp.MustCompile(`^(?:\d+:)?(\d+(?:\.\d+)+)(~?)`)

// atLeast compares versions as packages write them. What is no version, and a
// pre-release, is not enough.
func atLeast(version, least string) bool {
	m := packageVersion.FindStringSubmatch(version)
	if m == nil || m[2] != "" {
		return false
	}
	have, err := goversion.NewVersion(m[1])
	if err != nil {
		return false
	}
	want, err := goversion.NewVersion(least)
	return err == nil && have.GreaterThanOrEqual(want)
}

// versionIn is the word behind "version" in what a program says of itself.
func versionIn(text string) string {
	words := strings.Fields(text)
	if i := slices.Index(words, "version"); i >= 0 && i+1 < len(words) {
		return strings.TrimPrefix(words[i+1], "v")
	}
	return ""
}

// versions asks which of the packages are installed.
func (w *worker) versions(ctx context.Context, p *Packages) (map[string]string, error) {
	found := map[string]string{}
	if p == nil {
		return found, nil
	}
	argv := slices.Concat([]string{"rpm", "-q", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\tii\n"}, p.Names)
	if p.Manager == Apt {
		argv = slices.Concat([]string{"dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Abbrev}\n"}, p.Names)
	}
	// It ends with an error where one of them is not there.
	got, err := w.machine.run(ctx, argv, nil, askDeadline)
	if err != nil {
		return nil, fmt.Errorf("asking for packages: %w", err)
	}
	for line := range strings.Lines(got.Text) {
		fields := strings.Split(strings.TrimRight(line, "\n"), "\t")
		if len(fields) == 3 && slices.Contains(p.Names, fields[0]) && strings.HasPrefix(fields[2], "ii") {
			found[fields[0]] = fields[1]
		}
	}
	return found, nil
}

// simulated is a line of apt-get -s: a removal, or an installation, with the version
// that is replaced in brackets.
var simulated = regexp.MustCompile(`^(Inst|Remv|Purg) (\S+)( \[[^\]]*\])?`)

// guard has apt-get say what it would do, and refuses more than was asked for.
func (w *worker) guard(ctx context.Context, g Guard, environment []string) (said string, err error) {
	got, err := w.machine.run(ctx, g.Argv, environment, askDeadline)
	if err != nil {
		return got.Text, err
	}
	if got.Exit != 0 {
		return got.Text, fmt.Errorf("running %s: %w: status %d", strings.Join(g.Argv, " "), ErrProgram, got.Exit)
	}
	for line := range strings.Lines(got.Text) {
		m := simulated.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		name, _, _ := strings.Cut(m[2], ":")
		switch {
		case m[1] != "Inst":
			return got.Text, fmt.Errorf("installing packages: %w: %s would be removed", ErrRefused, name)
		case driverName.MatchString(name), kernelName.MatchString(name) && !slices.Contains(g.New, name):
			return got.Text, fmt.Errorf("installing packages: %w: %s would come, a part of a driver or kernel", ErrRefused, name)
		case m[3] != "" && !slices.Contains(g.Upgrade, name):
			return got.Text, fmt.Errorf("installing packages: %w: %s would be upgraded", ErrRefused, name)
		}
	}
	return "", nil
}
