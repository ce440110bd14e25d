package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/bake"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/host"
	"github.com/llmbox-dev/llmbox/internal/k3s"
)

const (
	bootUnit     = "llmbox-boot.service"
	bootUnitFile = "/etc/systemd/system/" + bootUnit
	bootUnitLink = "/etc/systemd/system/multi-user.target.wants/" + bootUnit
	// bootFile says how the box came back after the last boot.
	bootFile = "boot.json"
)

// BootUnit is the unit that looks after the box once after each boot. It only talks to
// the API server, so it may be shut in.
func BootUnit(command []string) string {
	words := make([]string, len(command))
	for i, word := range command {
		words[i] = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "%", "%%", "$", "$$").Replace(word) + `"`
	}
	return `# Written by llmbox. It is written anew by each install.
[Unit]
Description=Bring the box back after a boot (llmbox)
Wants=k3s.service
After=k3s.service

[Service]
Type=oneshot
ExecStart=` + strings.Join(words, " ") + `
TimeoutStartSec=45min
Nice=5
ProtectSystem=strict
ReadWritePaths=` + StateDir + `
ProtectHome=true
PrivateTmp=true
PrivateDevices=true
ProtectKernelTunables=true
ProtectKernelModules=true
ProtectControlGroups=true
NoNewPrivileges=true
RestrictSUIDSGID=true
RestrictNamespaces=true
LockPersonality=true
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
CapabilityBoundingSet=
SystemCallArchitectures=native
SystemCallFilter=@system-service

[Install]
WantedBy=multi-user.target
`
}

// ensureBoot has the machine look after the box after each boot, where systemd starts
// it. Elsewhere the supervisor does. The unit counts from the next boot on, so nothing
// has to be read anew.
func (h *Host) ensureBoot(init k3s.Init, program string, box config.Box) (changed bool, err error) {
	if init != k3s.Systemd {
		return false, nil
	}
	unit := []byte(BootUnit(h.command(program, box, "boot")))
	at := h.at(bootUnitFile)
	has, err := os.ReadFile(at) // #nosec G304 -- a fixed path
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("reading %s: %w", bootUnitFile, err)
	}
	if string(has) != string(unit) {
		const mode = 0o644
		if err := writeFile(at, mode, unit); err != nil {
			return false, fmt.Errorf("writing %s: %w", bootUnitFile, err)
		}
		changed = true
	}
	link := h.at(bootUnitLink)
	if _, err := os.Lstat(link); errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(path.Dir(link)); err != nil {
			return changed, fmt.Errorf("enabling %s: %w", bootUnit, err)
		}
		if err := os.Symlink(bootUnitFile, link); err != nil {
			return changed, fmt.Errorf("enabling %s: %w", bootUnit, err)
		}
		changed = true
	}
	return changed, nil
}

// removeBoot takes the unit away and ends it where it runs.
func (h *Host) removeBoot(ctx context.Context) ([]string, error) {
	var gone []string
	for _, name := range []string{bootUnitLink, bootUnitFile, path.Join(path.Dir(bootUnitFile), ".llmbox."+bootUnit)} {
		at := h.at(name)
		if _, err := os.Lstat(at); err != nil {
			continue
		}
		if len(gone) == 0 {
			// One that does not run, or no systemd, is as good.
			_, _ = h.o.Runner.Run(ctx, stopBoot())
		}
		if err := os.Remove(at); err != nil {
			return gone, fmt.Errorf("removing %s: %w", name, err)
		}
		gone = append(gone, name)
	}
	return gone, nil
}

func stopBoot() host.Command {
	const deadline = 30 * time.Second
	return host.Command{Program: "systemctl", Args: []string{"stop", bootUnit}, Deadline: deadline}
}

// forgetUnits has systemd read its units anew where it still holds one of llmbox's whose
// file is gone: after an uninstall that was cut off between the two. Otherwise it asks for
// nothing, as a reload can take the GPUs from containers of others
// (NVIDIA/nvidia-container-toolkit#48).
func (h *Host) forgetUnits(ctx context.Context) error {
	const deadline = 30 * time.Second
	if _, err := h.files.Stat(ctx, "/run/systemd/system"); err != nil {
		return nil //nolint:nilerr // no systemd that runs
	}
	systemctl := func(args ...string) (string, error) {
		said, err := h.o.Runner.Run(ctx, host.Command{Program: "systemctl", Args: args, Deadline: deadline})
		return string(said.Output), err
	}
	for _, unit := range []string{"k3s.service", "k3s-agent.service", bootUnit, launchUnit, bake.UnitName} {
		said, err := systemctl("show", unit, "--property=LoadState,FragmentPath")
		if err != nil {
			return fmt.Errorf("asking systemd about %s: %w", unit, err)
		}
		if !strings.Contains(said, "LoadState=loaded\n") {
			continue
		}
		_, fragment, _ := strings.Cut(said, "FragmentPath=")
		if _, err := h.files.Stat(ctx, strings.TrimSpace(strings.SplitN(fragment, "\n", 2)[0])); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if _, err := systemctl("daemon-reload"); err != nil {
			return fmt.Errorf("having systemd forget %s: %w", unit, err)
		}
		return nil
	}
	return nil
}

// Boot is how the box came back after a boot.
type Boot struct {
	BootID string    `json:"boot_id"`
	Time   time.Time `json:"time"`
	// Seconds is how long after llmbox began to look everything was ready; 0 if it never
	// was.
	Seconds float64 `json:"seconds,omitempty"`
	// Cleared are the pods of before the boot that were taken away.
	Cleared []string `json:"cleared,omitempty"`
	// Missing says what did not come back, and why.
	Missing []string `json:"missing,omitempty"`
}

// NoteBoot keeps how the box came back for status and doctor.
func (h *Host) NoteBoot(ctx context.Context, b Boot) error {
	b.BootID, _ = h.bootID(ctx)
	data, err := json.MarshalIndent(b, "", "  ")
	if err != nil {
		return fmt.Errorf("noting the boot: %w", err)
	}
	const mode = 0o644
	if err := writeFile(h.at(path.Join(StateDir, bootFile)), mode, append(data, '\n')); err != nil {
		return fmt.Errorf("noting the boot: %w", err)
	}
	return nil
}

func (h *Host) bootID(ctx context.Context) (string, error) {
	data, err := h.files.ReadFile(ctx, "/proc/sys/kernel/random/boot_id", 0)
	return strings.TrimSpace(string(data)), err
}

// Rebooted says that k3s was last started by llmbox in an earlier boot.
func (h *Host) Rebooted(ctx context.Context, box config.Box) (bool, error) {
	record, err := h.K3s(box).Record(ctx)
	if err != nil || record.Started == nil {
		return false, err
	}
	now, err := h.bootID(ctx)
	return err == nil && now != record.Started.BootID, err
}
