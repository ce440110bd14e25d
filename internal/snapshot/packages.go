package snapshot

import "strings"

// Unit is what systemd says about one of its units.
type Unit struct {
	Name string
	// Load is "loaded", "masked" or "not-found"; Active "active", "inactive",
	// "failed", "activating"; File "enabled", "disabled", "static", "masked".
	Load, Active, Sub, File string
	// Since is when it last became active, in systemd's own form.
	Since string
	// Restarts is systemd's count, as text.
	Restarts string
}

// Unit returns a systemd unit from the command "systemctl-show". A name without a
// suffix is a service. Absent means that systemd does not know the unit or was not
// asked; Unreadable that it gave no answer.
func (s *Snapshot) Unit(name string) (Unit, State) {
	if !strings.Contains(name, ".") {
		name += ".service"
	}
	text := s.Command(CommandUnits)
	if text.State != Present {
		return Unit{Name: name}, text.State
	}
	for block := range strings.SplitSeq(text.Data, "\n\n") {
		values := map[string]string{}
		for line := range strings.Lines(block) {
			if key, value, ok := strings.Cut(strings.TrimRight(line, "\n"), "="); ok {
				values[key] = value
			}
		}
		if values["Id"] != name {
			continue
		}
		u := Unit{
			Name: name, Load: values["LoadState"], Active: values["ActiveState"],
			Sub: values["SubState"], File: values["UnitFileState"],
			Since: values["ActiveEnterTimestamp"], Restarts: values["NRestarts"],
		}
		if u.Load == "not-found" {
			return u, Absent
		}
		return u, Present
	}
	// systemctl speaks even where no systemd runs; then no unit is there to be read.
	if text.Exit != 0 {
		return Unit{Name: name}, Unreadable
	}
	return Unit{Name: name}, Absent
}

// Package is one package of the distribution.
type Package struct {
	Name, Arch, Version string
	// Held says that upgrades leave it alone (apt-mark hold).
	Held bool
	// Installed is false for one that left its configuration or is half installed.
	Installed bool
}

// Packages returns the packages that the commands "dpkg-packages" and
// "rpm-packages" listed.
func (s *Snapshot) Packages() ([]Package, State) {
	var found []Package
	state := Absent
	for _, name := range []string{CommandDpkg, CommandRPM} {
		text := s.Command(name)
		if text.State == Present || state == Absent {
			state = text.State
		}
		for _, line := range text.Lines() {
			fields := strings.Split(line, "\t")
			switch {
			case name == CommandDpkg && len(fields) == 4 && len(fields[0]) >= 2:
				found = append(found, Package{
					Name: fields[1], Arch: fields[2], Version: fields[3],
					Held: fields[0][0] == 'h', Installed: fields[0][1] == 'i',
				})
			case name == CommandRPM && len(fields) == 3:
				found = append(found, Package{
					Name: fields[0], Arch: fields[1], Version: strings.TrimPrefix(fields[2], "0:"), Installed: true,
				})
			}
		}
	}
	return found, state
}
