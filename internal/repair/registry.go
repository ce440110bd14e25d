package repair

import "github.com/llmbox-dev/llmbox/internal/finding"

// entry is a repair that exists.
type entry struct {
	name string
	// does and undo are for the page of docs; source says why it is known to help.
	does, undo, source string
	// always asks plan even without a finding: it can follow from other actions.
	always bool
	// plan is nil where another entry plans for it.
	plan func(*planner, []finding.Finding)
}

// repairs are all repairs, in the order in which they are taken: later ones may
// need what earlier ones bring.
func repairs() []entry {
	return []entry{
		{
			name: Modules, plan: planModules,
			does:   "Installs the package with further modules for the kernel that runs (`linux-modules-extra-…` on Ubuntu, `kernel-modules-extra-…` on RHEL and its kin), loads them with `modprobe`, and has them loaded at boot by `" + ModulesFile + "`.",
			undo:   "remove the file and the package",
			source: "k3s-io/k3s#3852, #8015; flannel-io/flannel#2068; modules-load.d(5)",
		},
		{
			name: Sysctl, plan: planSettings, always: true,
			does:   "Writes the settings that findings ask for into `" + SysctlFile + "`, one file for all, and applies that file with `sysctl -p`. Declined where `/etc/sysctl.conf` or a later file says otherwise.",
			undo:   "remove the file; `sysctl -w` with the values from before, which are shown and recorded",
			source: "k3s-io/k3s#5712, #8015; docs.k3s.io/security/hardening-guide; sysctl.d(5)",
		},
		{
			name:   Inotify,
			does:   "The same for `fs.inotify.max_user_instances` and `max_user_watches`; higher limits that are there stay.",
			undo:   "as above",
			source: "k3s-io/k3s#10020; containerd/containerd#10309; inotify(7)",
		},
		{
			name: AppArmor, plan: planAppArmor,
			does:   "Installs AppArmor's parser from the distribution (Debian, Ubuntu, SUSE).",
			undo:   "remove the package",
			source: "k3s-io/k3s#3406, #3884; rancher/rke2#1459",
		},
		{
			name: HoldDriver, plan: planHold,
			does:   "`apt-mark hold` on the installed packages of the NVIDIA driver, so that an unattended upgrade can't replace the libraries under the loaded driver. Where the driver's modules come ready made for each kernel, the packages that pull in new kernels are held too.",
			undo:   "`apt-mark unhold`",
			source: "oddmario/NVIDIA-Ubuntu-Driver-Guide#4; pando85/homelab#4110; apt-mark(8)",
		},
		{
			name: Needrestart, plan: planNeedrestart,
			does:   "Writes `" + NeedrestartFile + "`, which keeps needrestart from restarting k3s after upgrades.",
			undo:   "remove the file",
			source: "m-lab/k8s-support#520; NVIDIA/nvidia-docker#1678; liske/needrestart README.md",
		},
		{
			name: Firewall, plan: planFirewall,
			does:   "Lets the cluster's pod and service networks in: `ufw allow from …`, or firewalld's zone `trusted`, now and at boot, without reloading it. Declined where the rules are neither's.",
			undo:   "`ufw delete allow from …`, or `firewall-cmd … --remove-source=…`",
			source: "docs.k3s.io/installation/requirements, Operating Systems; k3s-io/k3s#24, #1019, #10010",
		},
		{
			name: DeviceNodes, plan: planDeviceNodes,
			does:   "Makes the GPU's device files with the driver's own `nvidia-modprobe`.",
			undo:   "none needed: they are gone at the next boot",
			source: "NVIDIA/nvidia-modprobe nvidia-modprobe.c; NVIDIA/gpu-operator#430",
		},
		{
			name: Toolkit, plan: planToolkit,
			does:   "Installs the NVIDIA Container Toolkit " + toolkitAtLeast + " or newer with apt, dnf, yum or zypper: from the sources that are configured where they offer it, else from NVIDIA's repository, whose key is downloaded, compared with the fingerprint `" + toolkitFingerprint + "` and named by `signed-by`. apt is asked first what it would do, and nothing is done where that would remove a package, upgrade another one, or bring a driver or kernel.",
			undo:   "remove the packages, the list and the key",
			source: "docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide; NVIDIA/libnvidia-container stable/rpm/nvidia-container-toolkit.repo; NVIDIA security bulletin 5659",
		},
		{
			name: CDI, plan: planCDI,
			does:   "`nvidia-ctk cdi generate` over specifications of its own that name another driver than the loaded one or can't be read.",
			undo:   "none needed; the old content is recorded",
			source: "NVIDIA/gpu-operator#1900; cncf-tags/container-device-interface SPEC.md",
		},
		{
			name: DevCharLinks, plan: planDevChar,
			does:   "`nvidia-ctk system create-dev-char-symlinks --create-all`, and `" + UdevFile + "`, which does so at each boot. Without nvidia-ctk the links that are missing are made one by one, until the next boot.",
			undo:   "remove the rule",
			source: "NVIDIA/nvidia-container-toolkit#48; NVIDIA/gpu-operator#430, #539",
		},
		{
			name: RestartK3s, plan: planRestart, always: true,
			does:   "`systemctl restart k3s` (or k3s-agent), which looks for the NVIDIA runtime only when it starts. Containers go on running. It also follows the installation of the toolkit or of AppArmor's parser while k3s runs.",
			undo:   "none needed",
			source: "NVIDIA/gpu-operator#413, #730; docs.k3s.io/upgrades/killall",
		},
		{
			name: StartK3s, plan: planStart,
			does: "`systemctl start k3s` (or k3s-agent), where the unit is there and does not run.",
			undo: "`systemctl stop k3s`", source: "docs.k3s.io/advanced, running k3s with systemd",
		},
		{
			name: PruneImages, plan: planPrune,
			does: "`k3s crictl rmi --prune`: removes container images that no container uses. Nothing else is deleted: neither models nor volumes nor logs.",
			undo: "none needed: what is used again is pulled again", source: "kubernetes docs, garbage collection of images; kubernetes-sigs/cri-tools crictl rmi",
		},
		{
			name: Uncordon, plan: planUncordon,
			does: "Takes the cordon off the node.", undo: "`kubectl cordon NODE`", source: "kubernetes docs, safely drain a node",
		},
		{
			name: PendingRelease, plan: planPending,
			does: "Deletes the Secret of the one revision of a release that an interrupted run left `pending-…`, when nobody is at work on it. What it applied stays, and the next install takes it up.",
			undo: "not needed: `llmbox install` writes a new revision", source: "k3s-io/k3s#9534; fluxcd/helm-controller#149; helm.sh/docs, release states",
		},
		{
			name: Unseal, plan: planUnseal,
			does: "Brings the unsealer of the box's own Vault back (one replica, a fresh pod); it knows the key, and opens Vault. The key itself is not read.",
			undo: "none needed", source: "hashicorp/vault-helm#17, #130; llmbox embed/charts/vault",
		},
		{
			name: RestartDNS, plan: planDNS,
			does: "One replica of CoreDNS where there are none, and a fresh pod.", undo: "none needed", source: "kubernetes docs, debugging DNS resolution",
		},
		{
			name: RestartPlugin, plan: planPlugin,
			does: "A fresh pod of the NVIDIA device plugin, which counts the GPUs again.", undo: "none needed", source: "NVIDIA/k8s-device-plugin#348; NVIDIA/gpu-operator#475",
		},
		{
			name: RestartWebhook, plan: planWebhook,
			does: "Fresh pods of the Deployments behind an admission webhook that nobody answers for. The webhook itself stays.", undo: "none needed", source: "kyverno/kyverno#3232, #7576",
		},
		{
			name: DeletePod, plan: planDeletePod,
			does: "Deletes a pod that lost its GPU while it ran; its owner makes a new one, which gets it.", undo: "none needed", source: "NVIDIA/nvidia-container-toolkit#48; NVIDIA/gpu-operator#485",
		},
		{
			name: RestartModel, plan: planModel,
			does: "A fresh pod of the model server, whose engine is dead.", undo: "none needed", source: "vllm-project/vllm#48966, #39863",
		},
		{
			name: StalePods, plan: planStale,
			does: "Deletes failed pods that the kubelet refused or evicted and that their owners replaced.", undo: "none needed: they ran no more", source: "NVIDIA/gpu-operator#475; kubernetes docs, pod garbage collection",
		},
	}
}
