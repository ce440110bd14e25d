package snapshot

import (
	"regexp"
	"time"
)

// reading says how much of a file's content is taken.
type reading int

const (
	// statOnly records that the path is there, with mode, owner, size, time and
	// where a link leads; never its content. All that can hold a secret (k3s's
	// token, kubeconfigs, keys) and all that is large (binaries, modules) is so.
	statOnly reading = iota
	// whole takes the content, or nothing where it is over the limit.
	whole
	// head and tail take the first or last bytes up to the limit.
	head
	tail
)

// fileGroup is a row of what is collected of the file system.
type fileGroup struct {
	// Purpose is what the facts are for.
	Purpose string
	Read    reading
	// Limit is in bytes; 0 means 1 MiB.
	Limit int64
	// Keep drops all lines that it does not match.
	Keep *regexp.Regexp
	// Leads drops symbolic links whose target it does not match, and what is no link.
	Leads *regexp.Regexp
	// Binary content is taken as it is; text goes through the redaction.
	Binary bool
	// YAML content is redacted value by value, and left out where it is no YAML.
	YAML bool
	// Paths are absolute paths or patterns of path.Match.
	Paths []string
}

// mostMatches bounds what one pattern may bring in.
const mostMatches = 512

var (
	// The modules that flannel, kube-proxy, containerd and the GPU driver ask for.
	// A line of modules.dep is "path: paths it needs"; one of modules.builtin a path.
	keepModules = regexp.MustCompile(`^[^:]*/(nvidia[\w-]*|nouveau|nova[\w-]*|overlay|br_netfilter|bridge|veth|vxlan|` +
		`nf_conntrack|nf_nat|xt_comment|xt_conntrack|xt_MASQUERADE|xt_mark|xt_multiport|xt_statistic|xt_addrtype|xt_nfacct|` +
		`x_tables|ip_tables|iptable_nat|iptable_filter|iptable_mangle|ip6_tables|ip6table_nat|nf_tables|nft_compat|nft_chain_nat|ip_set[\w]*|ip_vs[\w]*|` +
		`fuse|squashfs|wireguard|ib_umad|mlx5_core)\.ko`)
	keepProxies = regexp.MustCompile(`(?i)^\s*(export\s+|(Default)?Environment=|Acquire::)?["']?[a-z0-9:_]*proxy`)
	keepNvidia  = regexp.MustCompile(`(?i)nvidia|libcuda`)
	leadsNvidia = regexp.MustCompile(`nvidia`)
)

// hostFiles is the table of everything taken from the file system, apart from what
// belongs to one PCI device or one process.
func hostFiles() []fileGroup {
	return []fileGroup{
		{Purpose: "distribution and its version", Read: whole, Paths: []string{
			"/etc/os-release", "/usr/lib/os-release", "/etc/debian_version", "/etc/redhat-release",
			"/etc/hostname", "/etc/dgx-release", "/etc/nv_tegra_release",
		}},
		{Purpose: "running kernel, boot options, uptime, memory, swap", Read: whole, Paths: []string{
			"/proc/version", "/proc/cmdline", "/proc/modules", "/proc/meminfo", "/proc/swaps",
			"/proc/uptime", "/proc/loadavg", "/proc/filesystems", "/proc/devices", "/proc/cgroups",
			"/proc/partitions", "/proc/sys/kernel/osrelease", "/proc/sys/kernel/hostname",
			"/proc/sys/kernel/tainted", "/proc/pressure/*",
		}},
		{Purpose: "number and features of the processors", Read: head, Limit: 8 << 10, Paths: []string{"/proc/cpuinfo"}},
		{Purpose: "mounts: read-only roots, noexec, leftovers of containers", Read: whole, Limit: 4 << 20, Paths: []string{
			"/proc/mounts", "/proc/self/mounts", "/proc/self/mountinfo", "/etc/fstab",
		}},
		{Purpose: "kernel settings that Kubernetes and its pods need", Read: whole, Paths: []string{
			"/proc/sys/fs/inotify/*", "/proc/sys/fs/file-max", "/proc/sys/fs/file-nr", "/proc/sys/fs/nr_open", "/proc/sys/fs/aio-max-nr",
			"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/proc/sys/kernel/panic", "/proc/sys/kernel/panic_on_oops",
			"/proc/sys/kernel/keys/root_maxkeys", "/proc/sys/kernel/keys/maxkeys", "/proc/sys/kernel/random/entropy_avail",
			"/proc/sys/kernel/unprivileged_userns_clone", "/proc/sys/kernel/modules_disabled",
			"/proc/sys/vm/overcommit_memory", "/proc/sys/vm/panic_on_oom", "/proc/sys/vm/max_map_count", "/proc/sys/vm/swappiness",
			"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/all/rp_filter", "/proc/sys/net/ipv4/conf/default/rp_filter",
			"/proc/sys/net/ipv4/conf/all/forwarding", "/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/ipv4/ip_unprivileged_port_start",
			"/proc/sys/net/ipv6/conf/all/disable_ipv6", "/proc/sys/net/ipv6/conf/all/forwarding",
			"/proc/sys/net/bridge/*", "/proc/sys/net/netfilter/nf_conntrack_max", "/proc/sys/net/netfilter/nf_conntrack_count",
			"/etc/sysctl.conf", "/etc/sysctl.d/*.conf", "/run/sysctl.d/*.conf", "/usr/lib/sysctl.d/*.conf",
		}},
		{Purpose: "routes and tables of the packet filter", Read: whole, Paths: []string{
			"/proc/net/route", "/proc/net/ipv6_route", "/proc/net/if_inet6", "/proc/net/fib_trie",
			"/proc/net/ip_tables_names", "/proc/net/ip6_tables_names",
		}},
		{Purpose: "a container or WSL instead of a machine, and who is process 1", Read: whole, Paths: []string{
			"/proc/1/comm", "/proc/1/cgroup", "/proc/self/cgroup", "/run/systemd/container",
			"/etc/wsl.conf", "/sys/class/dmi/id/sys_vendor", "/sys/class/dmi/id/product_name", "/sys/class/dmi/id/chassis_vendor",
			"/sys/hypervisor/type",
		}},
		{Purpose: "a container or WSL instead of a machine", Paths: []string{
			"/.dockerenv", "/run/.containerenv", "/run/systemd/system", "/proc/sys/fs/binfmt_misc/WSLInterop", "/usr/lib/wsl", "/dev/dxg",
		}},
		{Purpose: "control groups", Read: whole, Paths: []string{
			"/sys/fs/cgroup/cgroup.controllers", "/sys/fs/cgroup/cgroup.subtree_control",
		}},
		{Purpose: "control groups of version 1", Paths: []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"}},

		{Purpose: "GPU driver: versions, parameters, GPUs that it knows", Read: whole, Paths: []string{
			"/proc/driver/nvidia/version", "/proc/driver/nvidia/params", "/proc/driver/nvidia/registry",
			"/proc/driver/nvidia/gpus/*/information", "/proc/driver/nvidia/gpus/*/power", "/proc/driver/nvidia/gpus/*/numa_status",
			"/proc/driver/nvidia-nvswitch/devices/*/information", "/proc/driver/nvidia/capabilities/mig/*",
			"/sys/module/nvidia/version", "/sys/module/nvidia/refcnt", "/sys/module/nvidia/taint", "/sys/module/nvidia/initstate",
			"/sys/module/nvidia_uvm/version", "/sys/module/nvidia_modeset/version", "/sys/module/nvidia_drm/version",
			"/sys/module/nvidia_drm/parameters/modeset", "/sys/module/nvidia_peermem/version", "/sys/module/nouveau/refcnt",
		}},
		{Purpose: "modules that are loaded", Paths: []string{
			"/sys/module/nvidia*", "/sys/module/nouveau", "/sys/module/nova_core", "/sys/module/vfio_pci", "/sys/module/gdrdrv",
			"/sys/module/overlay", "/sys/module/br_netfilter", "/sys/module/vxlan", "/sys/module/nf_conntrack", "/sys/module/xt_comment",
			"/sys/module/ip_set", "/sys/module/ip_tables", "/sys/module/nf_tables", "/sys/module/zfs", "/sys/module/fuse",
		}},
		{Purpose: "IOMMU groups: peer-to-peer traffic between GPUs", Paths: []string{"/sys/class/iommu/*"}},
		{Purpose: "IOMMU groups that translate addresses", Read: whole, Limit: 4096, Paths: []string{"/sys/kernel/iommu_groups/*/type"}},
		{Purpose: "device nodes with their numbers", Paths: []string{
			"/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/nvidia-caps-imex-channels/*", "/dev/nvswitch*", "/dev/vfio/*",
			"/dev/infiniband/umad*", "/dev/shm", "/dev/fuse", "/dev/kmsg", "/dev/net/tun",
		}},
		{Purpose: "links that keep GPUs in containers across a systemd reload", Leads: leadsNvidia, Paths: []string{"/dev/char/*"}},
		{Purpose: "the driver's module by kernel", Paths: []string{
			"/lib/modules/*", "/lib/modules/*/build",
			"/lib/modules/*/updates/nvidia.ko*", "/lib/modules/*/updates/dkms/nvidia.ko*", "/lib/modules/*/extra/nvidia.ko*",
			"/lib/modules/*/extra/*/nvidia.ko*", "/lib/modules/*/weak-updates/nvidia.ko*", "/lib/modules/*/weak-updates/*/nvidia.ko*",
			"/lib/modules/*/kernel/nvidia*/nvidia.ko*", "/lib/modules/*/kernel/nvidia*/bits/nvidia.*", "/lib/modules/*/kernel/drivers/video/nvidia.ko*",
			"/lib/modules/*/kernel/drivers/video/*/nvidia.ko*", "/lib/modules/*/kernel/drivers/char/drm/nvidia.ko*",
			"/lib/modules/*/misc/nvidia.ko*", "/lib/modules/*/nvidia/nvidia.ko*", "/lib/modules/*/updates/*/nvidia.ko*",
			"/lib/modules/*/kernel/drivers/gpu/drm/nouveau/nouveau.ko*",
			"/usr/src/linux-headers-*", "/usr/src/kernels/*", "/usr/src/nvidia-*",
		}},
		{Purpose: "modules that can be loaded", Read: whole, Limit: 4 << 20, Keep: keepModules, Paths: []string{
			"/lib/modules/*/modules.dep", "/lib/modules/*/modules.builtin",
		}},
		{Purpose: "the kernel of the next boot", Paths: []string{
			"/boot", "/boot/vmlinuz*", "/vmlinuz", "/boot/initrd.img", "/boot/loader/entries/*", "/boot/grub/grub.cfg", "/boot/grub2/grub.cfg",
		}},
		{Purpose: "the kernel of the next boot", Read: whole, Paths: []string{
			"/etc/default/grub", "/etc/default/grub.d/*.cfg", "/boot/grub/grubenv", "/boot/grub2/grubenv",
		}},
		{Purpose: "modules kept from loading, options of the driver", Read: whole, Paths: []string{
			"/etc/modprobe.d/*.conf", "/usr/lib/modprobe.d/nvidia*.conf", "/lib/modprobe.d/nvidia*.conf", "/etc/modules", "/etc/modules-load.d/*.conf",
		}},
		{Purpose: "Secure Boot: four bytes of attributes, then 1 for on", Read: head, Limit: 64, Binary: true, Paths: []string{
			"/sys/firmware/efi/efivars/SecureBoot-*", "/sys/firmware/efi/efivars/SetupMode-*", "/sys/firmware/efi/efivars/MokListXRT-*",
		}},
		{Purpose: "firmware and lockdown", Paths: []string{"/sys/firmware/efi"}},
		{Purpose: "lockdown", Read: whole, Paths: []string{"/sys/kernel/security/lockdown", "/sys/module/module/parameters/sig_enforce"}},
		{Purpose: "what DKMS has built", Paths: []string{
			"/var/lib/dkms/nvidia*", "/var/lib/dkms/nvidia*/*", "/var/lib/dkms/nvidia*/*/*", "/var/lib/dkms/nvidia*/*/*/*",
			"/var/lib/dkms/nvidia*/*/build/make.log", "/var/lib/shim-signed/mok/MOK.der",
		}},
		{Purpose: "why DKMS failed", Read: tail, Limit: 16 << 10, Paths: []string{"/var/lib/dkms/nvidia*/*/build/make.log"}},

		{Purpose: "user space libraries of the driver, where their links lead", Paths: []string{
			"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so*", "/usr/lib/x86_64-linux-gnu/libcuda.so*", "/usr/lib/x86_64-linux-gnu/libnvidia-container.so*",
			"/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so*", "/usr/lib/x86_64-linux-gnu/nvidia/current/lib*.so*",
			"/usr/lib/aarch64-linux-gnu/libnvidia-ml.so*", "/usr/lib/aarch64-linux-gnu/libcuda.so*", "/usr/lib/aarch64-linux-gnu/libnvidia-container.so*",
			"/usr/lib64/libnvidia-ml.so*", "/usr/lib64/libcuda.so*", "/usr/lib64/libnvidia-container.so*", "/usr/lib64/libnvidia-ptxjitcompiler.so*",
			"/usr/lib64/nvidia/libnvidia-ml.so*", "/usr/lib/libnvidia-ml.so*", "/usr/lib/libcuda.so*", "/usr/lib/nvidia*/libnvidia-ml.so*",
			"/usr/local/lib/libnvidia-ml.so*", "/usr/local/nvidia/lib64/libnvidia-ml.so*", "/usr/local/nvidia/lib64/libcuda.so*",
			"/usr/local/cuda/compat/libcuda.so*", "/usr/local/cuda/lib64/stubs/libnvidia-ml.so*", "/usr/lib/wsl/lib/libnvidia-ml.so*",
			"/run/nvidia/driver", "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so*", "/run/nvidia/validations/*",
		}},
		{Purpose: "where the loader looks for libraries", Read: whole, Paths: []string{"/etc/ld.so.conf.d/*nvidia*", "/etc/ld.so.conf.d/*cuda*", "/etc/ld.so.preload"}},
		{Purpose: "programs: driver tools, container toolkit (stale copies too), other runtimes, package tools", Paths: []string{
			"/usr/bin/nvidia-*", "/usr/local/bin/nvidia-*", "/usr/local/sbin/nvidia-*", "/usr/sbin/nvidia-*", "/usr/local/nvidia/toolkit/nvidia-*", "/opt/bin/nvidia-*",
			"/usr/bin/nv-fabricmanager", "/usr/bin/nv-hostengine", "/opt/nvidia/nvlsm/sbin/nvlsm",
			"/usr/bin/docker", "/usr/bin/dockerd", "/usr/bin/containerd", "/usr/local/bin/containerd", "/usr/bin/runc", "/usr/local/sbin/runc", "/usr/bin/podman", "/usr/bin/crio",
			"/usr/bin/kubelet", "/usr/local/bin/kubelet", "/usr/bin/kubeadm", "/usr/local/bin/k3s", "/usr/bin/k3s", "/usr/local/bin/k0s", "/usr/local/bin/rke2", "/opt/rke2/bin/rke2",
			"/usr/local/bin/k3s-killall.sh", "/usr/local/bin/k3s-uninstall.sh", "/usr/local/bin/k3s-agent-uninstall.sh", "/usr/local/bin/rke2-uninstall.sh",
			"/sbin/apparmor_parser", "/usr/sbin/apparmor_parser", "/usr/bin/apparmor_parser", "/sbin/ldconfig", "/sbin/ldconfig.real", "/usr/sbin/ldconfig",
			"/usr/sbin/iptables*", "/sbin/iptables*", "/usr/sbin/nft", "/usr/sbin/ufw", "/usr/bin/firewall-cmd", "/usr/sbin/modprobe", "/sbin/modprobe",
			"/usr/bin/apt-get", "/usr/bin/dnf", "/usr/bin/yum", "/usr/bin/zypper", "/usr/bin/tdnf", "/usr/bin/pacman", "/usr/bin/systemctl", "/usr/bin/unattended-upgrade",
			"/usr/sbin/needrestart", "/sbin/mount.nfs", "/usr/sbin/mount.nfs", "/usr/bin/curl", "/usr/bin/snap",
		}},
		{Purpose: "the container toolkit's and the runtimes' settings", Read: whole, Paths: []string{
			"/etc/nvidia-container-runtime/config.toml", "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
			"/etc/docker/daemon.json", "/etc/containerd/config.toml", "/etc/containerd/conf.d/*.toml", "/etc/crio/crio.conf.d/*nvidia*",
			"/etc/cdi/*.yaml", "/etc/cdi/*.json", "/var/run/cdi/*.yaml", "/var/run/cdi/*.json", "/run/cdi/*.yaml", "/run/cdi/*.json",
			"/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "/var/lib/rancher/k3s/agent/etc/containerd/config*.toml.tmpl",
		}},
		{Purpose: "directories and sockets of container runtimes", Paths: []string{
			"/etc/cdi", "/var/run/cdi", "/run/cdi", "/etc/nvidia-container-runtime", "/etc/nvidia-container-toolkit",
			"/run/containerd/containerd.sock", "/run/docker.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock",
			"/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/*", "/var/lib/docker", "/var/lib/containerd", "/opt/containerd",
		}},

		{Purpose: "k3s: a cluster that is here, or what one left; secrets are never read", Paths: []string{
			"/etc/rancher", "/etc/rancher/*", "/etc/rancher/k3s/*", "/etc/rancher/node/*", "/etc/rancher/rke2/*", "/var/lib/rancher", "/var/lib/rancher/*",
			"/var/lib/rancher/k3s/*", "/var/lib/rancher/k3s/server/*", "/var/lib/rancher/k3s/server/db/*", "/var/lib/rancher/k3s/agent/*", "/var/lib/rancher/k3s/data/*",
			"/etc/systemd/system/k3s*.service", "/etc/systemd/system/k3s*.service.env", "/etc/systemd/system/rke2*.service", "/run/k3s", "/run/flannel/subnet.env",
			"/var/lib/llmbox", "/var/lib/llmbox/*", "/etc/llmbox/config.yaml", "/opt/llmbox",
		}},
		{Purpose: "k3s's settings without their secrets", Read: whole, YAML: true, Paths: []string{
			"/etc/rancher/k3s/config.yaml", "/etc/rancher/k3s/config.yaml.d/*.yaml", "/etc/rancher/k3s/registries.yaml",
		}},
		{Purpose: "another Kubernetes, its network and its data", Paths: []string{
			"/etc/cni/net.d", "/etc/cni/net.d/*", "/opt/cni/bin", "/opt/cni/bin/*", "/var/lib/cni", "/var/lib/cni/*", "/var/lib/cni/networks/*", "/var/lib/calico", "/var/run/calico", "/var/lib/cilium", "/var/run/cilium",
			"/var/lib/kubelet", "/var/lib/kubelet/*", "/var/lib/etcd", "/var/lib/etcd/member", "/etc/kubernetes", "/etc/kubernetes/*", "/etc/kubernetes/manifests/*",
			"/snap/microk8s", "/var/snap/microk8s", "/snap/k8s", "/snap/docker", "/var/lib/k0s", "/etc/k0s", "/var/lib/minikube", "/etc/eksctl", "/etc/eks",
			"/sys/class/net/cni0", "/sys/class/net/flannel*", "/sys/class/net/kube-ipvs0", "/sys/class/net/cilium_host", "/sys/class/net/vxlan.calico", "/sys/class/net/docker0", "/sys/class/net/tailscale0",
		}},
		{Purpose: "network settings that a container network left", Read: whole, Limit: 64 << 10, Paths: []string{"/etc/cni/net.d/*.conf", "/etc/cni/net.d/*.conflist"}},
		{Purpose: "interfaces", Read: whole, Paths: []string{
			"/sys/class/net/*/mtu", "/sys/class/net/*/operstate", "/sys/class/net/*/type",
		}},
		{Purpose: "interfaces that hardware or a hypervisor stands behind", Paths: []string{"/sys/class/net/*"}},
		{Purpose: "names and their servers", Read: whole, Paths: []string{
			"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf", "/run/systemd/resolve/stub-resolv.conf", "/etc/hosts", "/etc/nsswitch.conf",
			"/etc/systemd/resolved.conf", "/etc/systemd/resolved.conf.d/*.conf",
		}},
		{Purpose: "proxies for services and logins, without passwords", Read: whole, Keep: keepProxies, Paths: []string{
			"/etc/environment", "/etc/profile.d/*proxy*", "/etc/apt/apt.conf", "/etc/apt/apt.conf.d/*proxy*", "/etc/systemd/system/k3s.service.env", "/etc/default/k3s", "/etc/sysconfig/k3s",
			"/etc/systemd/system/docker.service.d/*.conf", "/etc/systemd/system/containerd.service.d/*.conf", "/etc/systemd/system.conf.d/*.conf", "/etc/dnf/dnf.conf", "/etc/yum.conf",
		}},
		{Purpose: "certificate authorities beside the distribution's", Paths: []string{
			"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/usr/local/share/ca-certificates/*", "/etc/pki/ca-trust/source/anchors/*",
		}},

		{Purpose: "upgrades that happen by themselves", Read: whole, Paths: []string{
			"/etc/apt/apt.conf.d/10periodic", "/etc/apt/apt.conf.d/20auto-upgrades", "/etc/apt/apt.conf.d/50unattended-upgrades", "/etc/apt/apt.conf.d/5*unattended-upgrades*", "/etc/apt/apt.conf.d/99*",
			"/etc/dnf/automatic.conf", "/etc/needrestart/needrestart.conf", "/etc/needrestart/conf.d/*.conf", "/etc/apt/preferences.d/*",
		}},
		{Purpose: "what was upgraded last", Read: tail, Limit: 64 << 10, Paths: []string{"/var/log/apt/history.log", "/var/log/dnf.rpm.log", "/var/log/nvidia-installer.log"}},
		{Purpose: "repositories that offer the driver and the toolkit", Paths: []string{
			"/etc/apt/sources.list.d/*", "/etc/yum.repos.d/*", "/usr/share/keyrings/nvidia-*", "/etc/apt/keyrings/*", "/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/updates/*",
		}},
		{Purpose: "the first boot", Read: whole, Paths: []string{"/run/cloud-init/status.json", "/run/cloud-init/result.json", "/run/cloud-init/cloud-id"}},
		{Purpose: "the first boot", Paths: []string{"/run/cloud-init", "/var/lib/cloud/instance/boot-finished", "/etc/cloud/cloud-init.disabled"}},
		{Purpose: "a reboot that is due", Read: whole, Paths: []string{"/var/run/reboot-required", "/var/run/reboot-required.pkgs"}},
		{Purpose: "mandatory access control", Read: whole, Paths: []string{
			"/etc/selinux/config", "/sys/fs/selinux/enforce", "/sys/module/apparmor/parameters/enabled", "/sys/kernel/security/lsm",
		}},
		{Purpose: "mandatory access control", Paths: []string{"/sys/fs/selinux", "/usr/share/selinux/packages/k3s.pp", "/var/lib/selinux/targeted/active/modules/*/k3s", "/var/lib/selinux/targeted/active/modules/*/container"}},
		{Purpose: "firewalls", Read: whole, Paths: []string{"/etc/ufw/ufw.conf", "/etc/default/ufw", "/etc/firewalld/firewalld.conf"}},
		{Purpose: "firewalls", Paths: []string{"/etc/firewalld/zones/*", "/etc/iptables/rules.v4", "/etc/sysconfig/iptables", "/etc/nftables.conf"}},
		{Purpose: "disks, mounted or not", Read: whole, Paths: []string{
			"/sys/block/*/size", "/sys/block/*/ro", "/sys/block/*/removable", "/sys/block/*/queue/rotational", "/sys/block/*/device/model",
		}},
		{Purpose: "disks that a stop of the VM empties", Paths: []string{
			"/mnt", "/mnt/DATALOSS_WARNING_README.txt", "/mnt/resource", "/mnt/local", "/opt/dlami/nvme", "/ephemeral",
		}},
		{Purpose: "who holds a disk", Paths: []string{"/sys/block/*/holders/*", "/sys/block/*/*/holders/*"}},
		{Purpose: "clock", Read: whole, Paths: []string{
			"/sys/devices/system/clocksource/clocksource0/current_clocksource", "/etc/timezone", "/sys/class/rtc/rtc0/since_epoch",
		}},
		{Purpose: "clock", Paths: []string{"/etc/localtime", "/run/systemd/timesync/synchronized"}},
		{Purpose: "NUMA nodes of processors and memory", Read: whole, Paths: []string{
			"/sys/devices/system/node/online", "/sys/devices/system/cpu/online", "/sys/devices/system/cpu/smt/active", "/sys/kernel/mm/transparent_hugepage/enabled",
		}},
	}
}

// pciFiles are read of each PCI device of NVIDIA (vendor 0x10de).
func pciFiles() []fileGroup {
	return []fileGroup{
		{Purpose: "which GPU or switch, on which node, over which link", Read: whole, Limit: 4096, Paths: []string{
			"vendor", "device", "class", "subsystem_vendor", "subsystem_device", "revision", "numa_node", "enable", "power_state",
			"current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "power/runtime_status",
		}},
		{Purpose: "all ones when it fell off the bus", Read: head, Limit: 64, Binary: true, Paths: []string{"config"}},
		{Purpose: "the driver that owns it", Paths: []string{"driver", "iommu_group", "physfn", "virtfn0"}},
	}
}

// commandItem is a row of what is asked of the machine's programs.
type commandItem struct {
	// Name is the name within the snapshot.
	Name    string
	Purpose string
	Program string
	Args    []string
	// Root commands answer nothing of use to others.
	Root bool
	Tail bool
	// Limit is in bytes; 0 means 1 MiB.
	Limit int
	// Deadline is the longest it may take; 0 means commandDeadline.
	Deadline time.Duration
	Keep     *regexp.Regexp
	// Needs is a path without which the program has nothing to tell; asking nft
	// would load its module.
	Needs string
	// Instead is run where this one is not there or ends with an error.
	Instead *commandItem
}

// packagePatterns name what the distribution's package manager is asked about.
func packagePatterns(kernels ...string) []string {
	return append(kernels, "*nvidia*", "cuda-drivers*", "cuda-compat*", "datacenter-gpu-manager*", "nvlsm*",
		"docker*", "containerd*", "runc", "cri-o*", "podman*", "kubelet", "kubeadm",
		"dkms", "mokutil", "apparmor", "iptables", "nftables", "ufw", "firewalld",
		"unattended-upgrades", "needrestart", "k3s-selinux", "container-selinux", "dnf-automatic", "nfs-common", "open-iscsi", "chrony", "systemd-timesyncd")
}

func unitNames() []string {
	return []string{
		"nvidia-fabricmanager.service", "nvidia-persistenced.service", "nvidia-dcgm.service",
		"docker.service", "containerd.service", "kubelet.service", "k3s.service", "k3s-agent.service",
		"rke2-server.service", "rke2-agent.service", "k0scontroller.service", "k0sworker.service",
		"snap.microk8s.daemon-kubelite.service", "snap.k8s.kubelet.service", "crio.service",
		"systemd-resolved.service", "firewalld.service", "ufw.service", "nftables.service", "iptables.service",
		"nm-cloud-setup.service", "nm-cloud-setup.timer", "NetworkManager.service",
		"unattended-upgrades.service", "apt-daily.service", "apt-daily.timer", "apt-daily-upgrade.service", "apt-daily-upgrade.timer",
		"dnf-automatic.timer", "dnf-automatic-install.timer", "dnf5-automatic.timer", "packagekit.service",
		"chrony.service", "chronyd.service", "systemd-timesyncd.service", "ntp.service", "ntpd.service",
		"apparmor.service", "multipathd.service", "cloud-init.service", "cloud-final.service",
	}
}

// commands is the table of everything that has no file.
func commands() []commandItem {
	return []commandItem{
		{
			Name: CommandDmesg, Purpose: "the kernel's words on GPUs, modules, memory", Program: "dmesg", Tail: true,
			Instead: &commandItem{
				Name: CommandJournalKernel, Purpose: "the same, where dmesg is refused", Program: "journalctl",
				Args: []string{"-k", "-b", "--no-pager", "-o", "short-monotonic", "-n", "4000"}, Tail: true,
			},
		},
		{
			Name: CommandUnits, Purpose: "services that run or would", Program: "systemctl",
			Args: append([]string{"show", "--no-pager", "--property=Id,LoadState,ActiveState,SubState,UnitFileState,ActiveEnterTimestamp,NRestarts,Result"}, unitNames()...),
		},
		{Name: CommandSystemState, Purpose: "whether systemd is up", Program: "systemctl", Args: []string{"is-system-running"}},
		{Name: CommandDetectVirt, Purpose: "hypervisor or container", Program: "systemd-detect-virt"},
		{Name: CommandModinfo, Purpose: "the module for the running kernel: version, signer, flavour", Program: "modinfo", Args: []string{"nvidia"}},
		{Name: CommandDKMS, Purpose: "modules by kernel", Program: "dkms", Args: []string{"status"}, Deadline: time.Second},
		{Name: CommandMokutil, Purpose: "Secure Boot as the shim sees it", Program: "mokutil", Args: []string{"--sb-state"}},
		{Name: CommandCTK, Purpose: "version of the container toolkit", Program: "nvidia-ctk", Args: []string{"--version"}},
		{Name: CommandK3s, Purpose: "version of a k3s that is here", Program: "k3s", Args: []string{"--version"}},
		{Name: CommandUFW, Purpose: "firewall", Program: "ufw", Args: []string{"status", "verbose"}, Root: true},
		{Name: CommandFirewallState, Purpose: "firewall", Program: "firewall-cmd", Args: []string{"--state"}},
		{Name: CommandFirewallZones, Purpose: "zones that pods would need", Program: "firewall-cmd", Args: []string{"--list-all-zones"}, Root: true},
		{Name: CommandIptables, Purpose: "rules that refuse or are left over", Program: "iptables-save", Root: true},
		{Name: CommandIptablesLegacy, Purpose: "both backends in use at once", Program: "iptables-legacy-save", Root: true},
		{Name: CommandIptablesNft, Purpose: "both backends in use at once", Program: "iptables-nft-save", Root: true, Needs: "/sys/module/nf_tables"},
		{Name: CommandIptablesVer, Purpose: "backend and version of iptables", Program: "iptables", Args: []string{"--version"}},
		{Name: CommandNft, Purpose: "rules that refuse", Program: "nft", Args: []string{"list", "ruleset"}, Root: true, Needs: "/sys/module/nf_tables"},
		{
			Name: CommandDpkg, Purpose: "packages with version and hold", Program: "dpkg-query",
			Args: append([]string{"-W", "-f", `${db:Status-Abbrev}\t${Package}\t${Architecture}\t${Version}\n`},
				packagePatterns("linux-headers-*", "linux-image-*", "linux-modules-*")...),
			// Neither those never installed nor those that only left their settings.
			Keep: regexp.MustCompile(`^.[^nc]`),
		},
		{
			// Where it is a guest (Debian's rpm), a question makes a database in the root directory.
			Name: CommandRPM, Purpose: "packages with version", Program: "rpm", Needs: "/etc/rpm",
			Args: append([]string{"-qa", "--qf", `%{NAME}\t%{ARCH}\t%{EPOCHNUM}:%{VERSION}-%{RELEASE}\n`},
				packagePatterns("kernel*", "kmod-*", "akmod-*")...),
		},
		{Name: CommandLdconfig, Purpose: "which library of the driver the loader takes", Program: "ldconfig", Args: []string{"-p"}, Keep: keepNvidia},
	}
}
