// Package bake holds what a machine image made by llmbox is: which files lie in it, which
// of them may, and the unit by which a machine made of the image becomes a box. It judges
// and describes; it must not know how parts get to their places, nor how an install runs.
package bake

import (
	"encoding/json"
	"fmt"
	"path"
	"strings"
)

// The places of an image that are known without a configuration.
const (
	// StateDir is llmbox's own.
	StateDir = "/var/lib/llmbox"
	// Dir holds what the first boot goes by.
	Dir = StateDir + "/bake"
	// RecordFile says with what the install is called, HeadFile is the beginning of the
	// bundle, ConfigFile the configuration where one was named.
	RecordFile = Dir + "/bake.json"
	HeadFile   = Dir + "/head.tar.zst"
	ConfigFile = Dir + "/config.yaml"
	// ReadyFile is there once the machine serves, FailedFile holds why it does not.
	ReadyFile  = Dir + "/ready"
	FailedFile = Dir + "/failed"
	// LogFile is in the directory of llmbox's logs.
	LogFile = "firstboot.log"
	// UnitName runs at the first boot, UnitFile is it and UnitLink enables it.
	UnitName = "llmbox-firstboot.service"
	UnitFile = "/etc/systemd/system/" + UnitName
	UnitLink = "/etc/systemd/system/multi-user.target.wants/" + UnitName
)

// Record is what the first boot has to know.
type Record struct {
	// Version is that of the llmbox that made the image.
	Version string `json:"llmbox_version"`
	// Bundle is the SHA-256 of the manifest of the bundle that lies in the image.
	Bundle string `json:"bundle_manifest_sha256"`
	// Log is the directory of llmbox's logs.
	Log string `json:"log_directory"`
	// Args are the arguments of the install.
	Args []string `json:"install_arguments"`
}

// Encode writes a record down.
func (r Record) Encode() ([]byte, error) {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("writing the record of the image: %w", err)
	}
	return append(data, '\n'), nil
}

// ReadRecord reads what Encode wrote.
func ReadRecord(data []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("reading the record of the image: %w", err)
	}
	return r, nil
}

// Arguments are those of the install at the first boot: what is baked first, then what
// was asked for. Where a configuration was named, the image has a copy of it.
func Arguments(config bool, more []string) []string {
	args := []string{"install", "--bundle", HeadFile, "--yes", "--output", "json"}
	if config {
		args = append(args, "--config", ConfigFile)
	}
	return append(args, more...)
}

// Unit is what systemd runs at the first boot, until the machine is a box. It installs
// services, loads modules and mounts what others must see, so that nothing may be used
// that gives it a view of its own of the file system.
func Unit(program string) string {
	word := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "%", "%%", "$", "$$").Replace(program) + `"`
	return `# Written by llmbox bake.
[Unit]
Description=Make this machine a box at its first boot (llmbox)
Documentation=file:` + path.Join(Dir, "bake.json") + `
Wants=network-online.target
After=network-online.target cloud-init.service nvidia-persistenced.service
ConditionPathExists=` + RecordFile + `
ConditionPathExists=!` + ReadyFile + `

[Service]
Type=oneshot
ExecStart=` + word + ` host firstboot
TimeoutStartSec=infinity
Restart=on-failure
RestartSec=30s
RestartPreventExitStatus=2 3
NoNewPrivileges=true
LockPersonality=true
RestrictRealtime=true
RestrictSUIDSGID=true
SystemCallArchitectures=native
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
KeyringMode=private

[Install]
WantedBy=multi-user.target
`
}
