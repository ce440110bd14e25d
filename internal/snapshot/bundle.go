package snapshot

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Extra is a file that stands beside the facts in a bundle, for people: the page with
// the findings. Whoever loads the snapshot passes over it.
type Extra struct {
	Name string
	Data []byte
}

// SaveBundle writes the snapshot with further files as a gzipped tar archive, only for
// its owner's eyes. The file appears whole or not at all.
func (s *Snapshot) SaveBundle(name string, extras []Extra) (err error) {
	file, err := os.CreateTemp(filepath.Dir(name), ".bundle-*")
	if err != nil {
		return fmt.Errorf("writing bundle %s: %w", name, err)
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = os.Remove(file.Name())
			err = fmt.Errorf("writing bundle %s: %w", name, err)
		}
	}()
	if err = file.Chmod(0o600); err != nil {
		return err
	}
	if err = s.writeBundle(file, extras); err != nil {
		return err
	}
	if err = errors.Join(file.Sync(), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), name)
}

func (s *Snapshot) writeBundle(w io.Writer, extras []Extra) error {
	members, err := s.members()
	if err != nil {
		return err
	}
	all := make([]member, 0, len(members)+len(extras))
	for _, e := range extras {
		if err := safeName(e.Name); err != nil {
			return err
		}
		all = append(all, member{e.Name, e.Data})
	}
	all = append(all, members...)
	zipped := gzip.NewWriter(w)
	archive := tar.NewWriter(zipped)
	for _, m := range all {
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: m.name, Mode: 0o600, Size: int64(len(m.data)), ModTime: s.Manifest.Time.UTC().Truncate(time.Second), Format: tar.FormatPAX,
		}
		if header.ModTime.IsZero() {
			header.ModTime = time.Unix(0, 0)
		}
		if err := archive.WriteHeader(header); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if _, err := archive.Write(m.data); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	return errors.Join(archive.Close(), zipped.Close())
}

// Names for people's own things in an anonymous snapshot. The same thing has the same
// name everywhere, so that what belongs together can still be seen to.
type names struct {
	replaced map[string]string
	counts   map[string]int
	hosts    *strings.Replacer
}

func (n *names) of(kind, original string, make func(i int) string) string {
	if known, ok := n.replaced[original]; ok {
		return known
	}
	n.counts[kind]++
	n.replaced[original] = make(n.counts[kind])
	return n.replaced[original]
}

var (
	addressV4 = regexp.MustCompile(`\b(?:\d{1,3}\.){3}\d{1,3}\b`)
	// The first group is what stands before, for a version such as 1.2:3 is no address.
	addressV6 = regexp.MustCompile(`(?i)\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{0,4}\b|\b(?:[0-9a-f]{1,4}:){1,6}:(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4})*)?`)
	macAddr   = regexp.MustCompile(`(?i)\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b`)
	gpuUUID   = regexp.MustCompile(`(?i)\b(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)
	homeDir   = regexp.MustCompile(`(/home/)([A-Za-z0-9._-]+)`)
	mail      = regexp.MustCompile(`\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b`)
	serial    = regexp.MustCompile(`("(?:serial|uuid|board_id)"\s*:\s*")([^"]+)(")`)
)

// Anonymous returns a copy in which names of machines and people, addresses, and numbers
// of devices are replaced, each by the same word everywhere. Addresses of the cluster's
// own networks, loopback and masks stay: they are the same on every box.
func (s *Snapshot) Anonymous() (*Snapshot, error) {
	n := &names{replaced: map[string]string{}, counts: map[string]int{}}
	n.hosts = strings.NewReplacer(s.hostNames(n)...)
	members, err := s.members()
	if err != nil {
		return nil, err
	}
	b := newBuilder(limits{entries: 10 * defaultLimits().entries, file: 1 << 30, total: 8 << 30})
	for _, m := range members {
		data := n.anonymous(string(m.data))
		if err := b.file(n.anonymous(m.name), strings.NewReader(data)); err != nil {
			// Two names that became one: the first stays.
			if errors.Is(err, ErrDuplicate) {
				continue
			}
			return nil, err
		}
	}
	return b.finish()
}

// hostNames are the machines' names with what to call them, the longest first.
func (s *Snapshot) hostNames(n *names) []string {
	var found []string
	add := func(name string) {
		name = strings.TrimSpace(name)
		// A short or everyday word would change half of all texts.
		if len(name) >= 4 && !slices.Contains([]string{"localhost", "node", "server", "host", "ubuntu", "debian"}, name) && !slices.Contains(found, name) {
			found = append(found, name)
		}
	}
	add(s.files["/etc/hostname"])
	add(s.files["/proc/sys/kernel/hostname"])
	var system System
	if state, _ := s.Probe(ProbeSystem, &system); state == Present {
		add(system.Hostname)
	}
	var nodes []struct {
		Metadata struct {
			Name string `json:"name"`
		} `json:"metadata"`
	}
	if state, _ := s.Cluster("nodes", &nodes); state == Present {
		for _, one := range nodes {
			add(one.Metadata.Name)
		}
	}
	var routes []struct {
		Spec struct {
			Hostnames []string `json:"hostnames"`
		} `json:"spec"`
	}
	if state, _ := s.Cluster("httproutes", &routes); state == Present {
		for _, r := range routes {
			for _, h := range r.Spec.Hostnames {
				add(h)
			}
		}
	}
	slices.SortFunc(found, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, name := range found {
		pairs = append(pairs, name, n.of("host", name, func(i int) string { return "host-" + strconv.Itoa(i) }))
	}
	return pairs
}

func (n *names) anonymous(text string) string {
	text = n.hosts.Replace(text)
	text = serial.ReplaceAllStringFunc(text, func(m string) string {
		g := serial.FindStringSubmatch(m)
		return g[1] + n.of("serial", g[2], func(i int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i) }) + g[3]
	})
	text = gpuUUID.ReplaceAllStringFunc(text, func(m string) string {
		return n.of("serial", m, func(i int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i) })
	})
	text = macAddr.ReplaceAllStringFunc(text, func(m string) string {
		return n.of("mac", strings.ToLower(m), func(i int) string { return fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8&255, i&255) })
	})
	text = addressV4.ReplaceAllStringFunc(text, n.v4)
	text = addressV6.ReplaceAllStringFunc(text, n.v6)
	text = mail.ReplaceAllStringFunc(text, func(m string) string {
		return n.of("mail", m, func(i int) string { return "person-" + strconv.Itoa(i) + "@example.org" })
	})
	return homeDir.ReplaceAllStringFunc(text, func(m string) string {
		g := homeDir.FindStringSubmatch(m)
		return g[1] + n.of("user", "home:"+g[2], func(i int) string { return "user-" + strconv.Itoa(i) })
	})
}

// v4 replaces an address by one of the range for benchmarks (RFC 2544), which is no
// machine's.
func (n *names) v4(text string) string {
	a, err := netip.ParseAddr(text)
	if err != nil || a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast() || kept(a) {
		return text
	}
	return n.of("v4", text, func(i int) string { return fmt.Sprintf("198.18.%d.%d", i>>8&255, i&255) })
}

func (n *names) v6(text string) string {
	a, err := netip.ParseAddr(text)
	if err != nil || a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast() || !a.Is6() {
		return text
	}
	return n.of("v6", text, func(i int) string { return fmt.Sprintf("2001:db8::%x", i) })
}

// kept are addresses that tell nothing of whose box it is: the networks of pods and
// services, masks, versions that look like an address, and public name servers.
func kept(a netip.Addr) bool {
	for _, p := range []string{"10.42.0.0/16", "10.43.0.0/16", "0.0.0.0/8", "255.0.0.0/8", "240.0.0.0/4", "8.8.8.8/32", "8.8.4.4/32", "1.1.1.1/32", "1.0.0.0/24"} {
		if prefix, err := netip.ParsePrefix(p); err == nil && prefix.Contains(a) {
			return true
		}
	}
	return false
}
