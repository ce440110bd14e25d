package snapshot

// The names of the commands, each kept as commands/NAME.txt.
const (
	CommandDmesg          = "dmesg"
	CommandJournalKernel  = "journalctl-kernel"
	CommandUnits          = "systemctl-show"
	CommandSystemState    = "systemctl-state"
	CommandDetectVirt     = "systemd-detect-virt"
	CommandModinfo        = "modinfo-nvidia"
	CommandDKMS           = "dkms-status"
	CommandMokutil        = "mokutil-sb-state"
	CommandCTK            = "nvidia-ctk-version"
	CommandK3s            = "k3s-version"
	CommandUFW            = "ufw-status"
	CommandFirewallState  = "firewall-cmd-state"
	CommandFirewallZones  = "firewall-cmd-zones"
	CommandIptables       = "iptables-save"
	CommandIptablesLegacy = "iptables-legacy-save"
	CommandIptablesNft    = "iptables-nft-save"
	CommandIptablesVer    = "iptables-version"
	CommandNft            = "nft-ruleset"
	CommandDpkg           = "dpkg-packages"
	CommandRPM            = "rpm-packages"
	CommandLdconfig       = "ldconfig-nvidia"
	CommandJournalK3s     = "journalctl-k3s"
	CommandJournalSystemd = "journalctl-systemd"
)
