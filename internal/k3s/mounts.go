package k3s

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// mount is a row of the mount table.
type mount struct {
	id     int
	point  string
	kind   string
	source string
}

// parseMounts reads /proc/PID/mountinfo.
func parseMounts(data []byte) ([]mount, error) {
	rows, err := mountinfo.GetMountsFromReader(bytes.NewReader(data), nil)
	if err != nil {
		return nil, fmt.Errorf("reading the mount table: %w", err)
	}
	out := make([]mount, 0, len(rows))
	for _, r := range rows {
		// The kernel marks what was deleted under a mount.
		out = append(out, mount{id: r.ID, point: strings.TrimSuffix(r.Mountpoint, "//deleted"), kind: r.FSType, source: r.Source})
	}
	return out, nil
}

func (m *Machine) mounts(ctx context.Context) ([]mount, error) {
	data, present, err := m.read(ctx, "/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	if !present {
		return nil, nil
	}
	return parseMounts(data)
}

// network says whether a file system lies on another machine, which may not answer.
func (m mount) network() bool {
	return strings.HasPrefix(m.kind, "nfs") || strings.HasPrefix(m.kind, "fuse.") ||
		slices.Contains([]string{"cifs", "smb3", "ceph", "glusterfs", "lustre", "9p", "afs"}, m.kind)
}

// made says whether k3s, its containerd or its kubelet made a mount. They do so in
// fixed places; a mount anywhere else below their directories is a person's, such as a
// disk for the images, and stays.
func (b belongs) made(m mount) bool {
	below := func(dir string) bool { return m.point != dir && within(m.point, dir) }
	switch {
	case within(m.point, runDir):
		return true
	case below(path.Join(b.dataDir, "agent/containerd")):
		// A disk for the images is mounted at a directory of the first level, what
		// containerd mounts lies deeper.
		rest := strings.TrimPrefix(m.point, path.Join(b.dataDir, "agent/containerd")+"/")
		return strings.Contains(rest, "/")
	case b.alone && (below(kubeletDir+"/pods") || below(kubeletDir+"/plugins")):
		return true
	}
	return false
}

// ownMounts picks the mounts of this k3s, in the order in which they can be taken
// off: the deepest first, and of several at one point the last made.
func ownMounts(all []mount, b belongs) []mount {
	own := slices.DeleteFunc(slices.Clone(all), func(m mount) bool { return !b.made(m) })
	slices.SortStableFunc(own, func(p, q mount) int {
		return cmp.Or(cmp.Compare(strings.Count(q.point, "/"), strings.Count(p.point, "/")), cmp.Compare(q.id, p.id))
	})
	return own
}

// mountsBelow lists the mount points at a directory and below, itself left out.
func mountsBelow(all []mount, dir string) []string {
	var out []string
	for _, m := range all {
		if m.point != dir && within(m.point, dir) && !slices.Contains(out, m.point) {
			out = append(out, m.point)
		}
	}
	slices.Sort(out)
	return out
}
