package preflight

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func diskChecks() []Check {
	return []Check{
		{
			ID: "host.disk.pressure", Title: "Free space now", Required: fmt.Sprintf("at least %d %% free where k3s and the model will be", gcPercent),
			Source: "k3s-io/k3s#1552, #10209; akash-network/support#138; kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction", Judge: judgePressure,
		},
		{
			ID: "host.disk.space", Title: "Space for the install", Required: "what the plan writes, with room left",
			Source: "k3s-io/k3s#6290, #5813; kairos-io/kairos#2682", Judge: judgeSpace,
			Causes: []string{"host.disk.pressure"},
		},
		{
			ID: "host.disk.inodes", Title: "Free inodes", Required: fmt.Sprintf("at least %d %% free", inodesPercent),
			Source: "kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction; GoogleCloudPlatform/kubernetes-engine-samples#1581", Judge: judgeInodes,
		},
		{
			ID: "host.disk.filesystem", Title: "File system of k3s", Required: "ext4, xfs (ftype=1) or btrfs under /var/lib/rancher",
			Source: "k3s-io/k3s#3266, #12673; containerd/containerd#5464", Judge: judgeFilesystem,
			Causes: []string{"host.container"},
		},
		{
			ID: "host.disk.fsync", Title: "Time to reach the disk", Required: fmt.Sprintf("fsync p99 of at most %.0f ms", fsyncSlowMilli),
			Source: "k3s-io/k3s#2615, #8042, #12380", Judge: judgeFsync,
		},
		{
			ID: "host.disk.volatile", Title: "Disks that forget", Required: "k3s and the model on a disk that outlives a stop",
			Source: "docs.aws.amazon.com/AWSEC2 InstanceStorage; learn.microsoft.com/azure/virtual-machines/managed-disks-overview, temporary disk", Judge: judgeVolatile,
		},
	}
}

// disks returns the probed file systems.
func (f Facts) disks() ([]snapshot.Disk, []finding.Finding) {
	var disks []snapshot.Disk
	state, why := f.Probe(snapshot.ProbeDisks, &disks)
	if state != snapshot.Present {
		return nil, unknown("the file systems", why)
	}
	return disks, nil
}

// diskOf returns the probed file system that holds a path.
func diskOf(disks []snapshot.Disk, name string) (snapshot.Disk, bool) {
	var best snapshot.Disk
	found := false
	for _, d := range disks {
		if d.Path == name {
			return d, true
		}
		prefix := strings.TrimSuffix(d.MountPoint, "/") + "/"
		if (name == d.MountPoint || strings.HasPrefix(name, prefix)) && len(d.MountPoint) >= len(best.MountPoint) {
			best, found = d, true
		}
	}
	return best, found
}

// needPaths are the paths that the plan writes to, k3s's own without a plan.
func (f Facts) needPaths() []string {
	paths := []string{"/var/lib/rancher"}
	for _, n := range f.Need.Disk {
		if !slices.Contains(paths, n.Path) {
			paths = append(paths, n.Path)
		}
	}
	return paths
}

// pressed are the file systems that hold the paths, each once.
func (f Facts) pressed(disks []snapshot.Disk) []snapshot.Disk {
	var out []snapshot.Disk
	for _, p := range f.needPaths() {
		d, ok := diskOf(disks, p)
		if ok && d.TotalBytes > 0 && !slices.ContainsFunc(out, func(o snapshot.Disk) bool { return sameDisk(o, d) }) {
			out = append(out, d)
		}
	}
	return out
}

func sameDisk(a, b snapshot.Disk) bool {
	return a.MountPoint == b.MountPoint && a.Device == b.Device
}

func percentFree(d snapshot.Disk) float64 {
	return 100 * float64(d.AvailableBytes) / float64(d.TotalBytes)
}

func judgePressure(f Facts) []finding.Finding {
	disks, why := f.disks()
	if why != nil {
		return why
	}
	pressed := f.pressed(disks)
	if len(pressed) == 0 {
		return unknown("the file system of /var/lib/rancher", "not measured")
	}
	var bad []string
	var worst snapshot.Disk
	judge, then := warn, "Kubernetes deletes images to make room"
	for _, d := range pressed {
		free := percentFree(d)
		if free >= gcPercent {
			continue
		}
		if len(bad) == 0 || free < percentFree(worst) {
			worst = d
		}
		if free < pressurePercent {
			judge, then = fail, "Kubernetes stops programs to make room"
		}
		bad = append(bad, fmt.Sprintf("%s: %s of %s free (%.1f %%)", d.MountPoint, gib(d.AvailableBytes), gib(d.TotalBytes), free))
	}
	if len(bad) == 0 {
		return well(fmt.Sprintf("%s: %s of %s free", pressed[0].MountPoint, gib(pressed[0].AvailableBytes), gib(pressed[0].TotalBytes)))
	}
	fix := "Free space or enlarge the disk. What fills it: sudo du -xh --max-depth=2 " + worst.MountPoint + " | sort -h | tail"
	if better := f.roomier(disks, worst); better != "" {
		fix = "Put the data on the larger disk: " + onDisk(better) + ". Or enlarge this one"
	}
	return judge(strings.Join(bad, "; ")+": "+then, fix, atProbe(snapshot.ProbeDisks, "available_bytes"))
}

// roomier is the mount point of a disk with more room, if one was seen.
func (f Facts) roomier(disks []snapshot.Disk, than snapshot.Disk) string {
	var best snapshot.Disk
	for _, d := range disks {
		if !sameDisk(d, than) && diskFit(d.Type) && d.AvailableBytes > best.AvailableBytes && d.AvailableBytes > 2*than.AvailableBytes && d.AvailableBytes > bigDiskBytes/2 {
			best = d
		}
	}
	return strings.TrimSuffix(best.MountPoint, "/")
}

// onDisk is the install with its data below a mount point.
func onDisk(mountPoint string) string {
	return installSet("k3s.dataDir="+mountPoint+"/k3s", "paths.data="+mountPoint+"/llmbox")
}

func diskFit(kind string) bool {
	return slices.Contains([]string{"ext4", "ext3", "xfs", "btrfs", "ext2/ext3"}, kind)
}

func judgeSpace(f Facts) []finding.Finding {
	if len(f.Need.Disk) == 0 {
		return notApplicable("no plan says what will be written")
	}
	disks, why := f.disks()
	if why != nil {
		return why
	}
	type group struct {
		disk  snapshot.Disk
		bytes uint64
		what  []string
	}
	var groups []*group
	var unmeasured []string
	for _, n := range f.Need.Disk {
		d, ok := diskOf(disks, n.Path)
		if !ok || d.TotalBytes == 0 {
			unmeasured = append(unmeasured, n.Path)
			continue
		}
		i := slices.IndexFunc(groups, func(g *group) bool { return sameDisk(g.disk, d) })
		if i < 0 {
			groups = append(groups, &group{disk: d})
			i = len(groups) - 1
		}
		if n.Bytes > 0 {
			groups[i].bytes += uint64(n.Bytes)
		}
		groups[i].what = append(groups[i].what, fmt.Sprintf("%s for %s", gib(uint64(max(n.Bytes, 0))), cmp.Or(n.What, n.Path)))
	}
	if len(groups) == 0 {
		return unknown("the file systems of "+some(3, unmeasured), "not measured")
	}
	var out []finding.Finding
	for _, g := range groups {
		left := float64(g.disk.AvailableBytes) - float64(g.bytes)
		percent := 100 * left / float64(g.disk.TotalBytes)
		if percent >= gcPercent {
			continue
		}
		need := g.bytes + g.disk.TotalBytes*evictPercent/100
		measured := fmt.Sprintf("%s: %s free, %s will be written (%s)", g.disk.MountPoint, gib(g.disk.AvailableBytes), gib(g.bytes), strings.Join(g.what, ", "))
		fix := "Free space, or enlarge the disk to at least " + gib(g.disk.TotalBytes-g.disk.AvailableBytes+g.bytes+g.disk.TotalBytes*gcPercent/100)
		if better := f.roomier(disks, g.disk); better != "" {
			fix = "Put the data on the larger disk: " + onDisk(better)
		}
		fix += ". Or take a smaller model: sudo llmbox models"
		judge := warn
		if percent < evictPercent {
			judge = fail
		}
		one := judge(measured, fix, atProbe(snapshot.ProbeDisks, "available_bytes"))
		one[0].Required = gib(need) + " free on " + g.disk.MountPoint
		out = append(out, one...)
	}
	if len(out) > 1 {
		// One finding an id: the worst first, the others in its words.
		slices.SortStableFunc(out, func(a, b finding.Finding) int {
			if worse(a.Severity, b.Severity) {
				return -1
			}
			return 0
		})
		for _, other := range out[1:] {
			out[0].Measured += "; " + other.Measured
			out[0].Required += "; " + other.Required
		}
		out = out[:1]
	}
	if len(out) > 0 {
		return out
	}
	var measured []string
	for _, g := range groups {
		measured = append(measured, fmt.Sprintf("%s: %s free, %s will be written", g.disk.MountPoint, gib(g.disk.AvailableBytes), gib(g.bytes)))
	}
	return well(strings.Join(measured, "; "))
}

func judgeInodes(f Facts) []finding.Finding {
	disks, why := f.disks()
	if why != nil {
		return why
	}
	pressed := f.pressed(disks)
	if len(pressed) == 0 {
		return unknown("the file system of /var/lib/rancher", "not measured")
	}
	for _, d := range pressed {
		// btrfs and some network file systems count no inodes.
		if d.Inodes == 0 {
			continue
		}
		if percent := 100 * float64(d.InodesFree) / float64(d.Inodes); percent < inodesPercent {
			return fail(fmt.Sprintf("%s: %d of %d free (%.1f %%)", d.MountPoint, d.InodesFree, d.Inodes, percent),
				"Remove many small files. Where they are: sudo du --inodes -xd2 "+d.MountPoint+" | sort -n | tail", atProbe(snapshot.ProbeDisks, "inodes_free"))
		}
	}
	return well("enough")
}

func judgeFilesystem(f Facts) []finding.Finding {
	disks, why := f.disks()
	if why != nil {
		return why
	}
	d, ok := diskOf(disks, "/var/lib/rancher")
	if !ok || d.Type == "" {
		return unknown("the file system of /var/lib/rancher", "not measured")
	}
	fix := "Mount an ext4 volume at /var/lib/rancher, or name a directory on one: " + installSet("k3s.dataDir=/mnt/k3s")
	where := fmt.Sprintf("%s is %s", d.MountPoint, d.Type)
	evidence := atProbe(snapshot.ProbeDisks, "type")
	switch {
	case d.Type == "xfs" && slices.Contains(d.Options, "ftype=0"):
		return fail(where+" with ftype=0: containers' layers can't lie on it", fix, evidence)
	case diskFit(d.Type), d.Type == "f2fs", d.Type == "bcachefs":
		return well(where, evidence)
	case slices.Contains([]string{"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "glusterfs", "fuse"}, d.Type), strings.HasPrefix(d.Type, "fuse."):
		return fail(where+": containers' layers and the datastore can't lie on a network file system", fix, evidence)
	case d.Type == "tmpfs" || d.Type == "ramfs":
		return fail(where+": all of it is gone at the next boot", fix, evidence)
	case d.Type == "overlay":
		return fail(where+": layers can't lie on layers", fix, evidence)
	case d.Type == "zfs":
		// OpenZFS 2.2 can; containerd looks for itself and older ones are refused.
		return warn(where+", on which overlay works only from OpenZFS 2.2 on", fix+". Or let containerd use ZFS itself: "+installSet("k3s.extraArgs=--snapshotter=zfs"), evidence)
	}
	return warn(where+", which has not been tried", fix, evidence)
}

func judgeFsync(f Facts) []finding.Finding {
	var measured []snapshot.Fsync
	state, why := f.Probe(snapshot.ProbeFsync, &measured)
	switch {
	case state == snapshot.Unreadable:
		return unknown("how long fsync takes", why)
	case state == snapshot.Absent || len(measured) == 0:
		return unknown("how long fsync takes", "not measured")
	}
	var slowest snapshot.Fsync
	for _, m := range measured {
		if m.P99Milli > slowest.P99Milli {
			slowest = m
		}
	}
	if slowest.P99Milli > fsyncSlowMilli {
		return warn(fmt.Sprintf("%s: p99 %.0f ms, p50 %.1f ms over %d writes", slowest.Path, slowest.P99Milli, slowest.P50Milli, slowest.Writes),
			"Put k3s on a faster disk (SSD or NVMe), such as one mounted at /mnt: "+installSet("k3s.dataDir=/mnt/k3s"), atProbe(snapshot.ProbeFsync, "p99_ms"))
	}
	return well(fmt.Sprintf("p99 %.1f ms", slowest.P99Milli))
}

// volatileMounts are mount points that clouds give to disks which are emptied when
// the machine stops.
func volatileMounts() []string {
	return []string{"/opt/dlami/nvme", "/ephemeral", "/mnt/local", "/mnt/resource"}
}

func judgeVolatile(f Facts) []finding.Finding {
	disks, why := f.disks()
	if why != nil {
		return why
	}
	for _, p := range f.needPaths() {
		d, ok := diskOf(disks, p)
		if !ok {
			continue
		}
		reason := ""
		switch {
		case slices.Contains(volatileMounts(), d.MountPoint):
			reason = "a mount point of instance storage"
		case f.instanceStore(d.Device):
			reason = "instance storage"
		case d.MountPoint == "/mnt" && f.exists("/mnt/DATALOSS_WARNING_README.txt"):
			reason = "Azure's temporary disk"
		}
		if reason != "" {
			return warn(fmt.Sprintf("%s lies on %s (%s): it is empty after a stop and start", p, d.MountPoint, reason),
				"Keep k3s on the system disk. For the model such a disk will do if downloading it again after each stop is fine", atProbe(snapshot.ProbeDisks, "mount_point"))
		}
	}
	return well("no")
}

// instanceStore says whether a block device calls itself instance storage.
func (f Facts) instanceStore(device string) bool {
	name := strings.TrimPrefix(device, "/dev/")
	for _, candidate := range []string{name, strings.TrimRight(strings.TrimRight(name, "0123456789"), "p")} {
		model := f.File("/sys/block/" + candidate + "/device/model").Trimmed()
		if strings.Contains(model, "Instance Storage") || strings.Contains(model, "Microsoft NVMe Direct Disk") {
			return true
		}
	}
	return false
}
