package preflight

import (
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/finding"
)

var (
	setKey     = regexp.MustCompile(`--set (\S+?)=(\S+?)(?:[;,.)]?(?:\s|$))`)
	configKey  = regexp.MustCompile(`\b(?:k3s|network|gateway|gpu|paths|components|registries|model|secrets)\.[a-zA-Z][\w.-]*[a-zA-Z]\b`)
	subcommand = regexp.MustCompile(`(?:^|sudo |: )llmbox ([a-z-]+)`)
)

// typeable asserts that a fix names only keys of the configuration and commands that
// exist, and leaves no blank to be filled in by a program.
func typeable(t *testing.T, f finding.Finding) {
	t.Helper()
	if strings.Contains(f.Fix, gpuIndex) || strings.Contains(f.Fix, "%!") {
		t.Errorf("%s has a blank in its fix: %s", f.ID, f.Fix)
	}
	var layer config.Layer
	for _, m := range setKey.FindAllStringSubmatch(f.Fix, -1) {
		if strings.HasPrefix(m[1], "nvidia-") {
			continue // of nvidia-ctk
		}
		if err := layer.SetString(m[1], m[2], config.Flag("set")); err != nil {
			t.Errorf("%s advises what is refused: %v", f.ID, err)
		}
	}
	for _, key := range configKey.FindAllString(f.Fix, -1) {
		if strings.Contains(key, "k3s.io") || strings.HasSuffix(key, ".service") || strings.HasSuffix(key, ".yaml") || strings.HasPrefix(key, "components.model.values.") {
			continue
		}
		if err := layer.SetString(key, "x", config.Flag("set")); err != nil && strings.Contains(err.Error(), "unknown key") {
			t.Errorf("%s names a key that is none: %v", f.ID, err)
		}
	}
	for _, m := range subcommand.FindAllStringSubmatch(f.Fix, -1) {
		if !slices.Contains([]string{"install", "preflight", "models", "plan", "status", "doctor"}, m[1]) {
			t.Errorf("%s names the command %q, which is none: %s", f.ID, m[1], f.Fix)
		}
	}
	// What begins with sudo or printf is meant for a shell, up to where prose goes on.
	for _, command := range shellParts(f.Fix) {
		if out, err := exec.Command("sh", "-n", "-c", command).CombinedOutput(); err != nil {
			t.Errorf("%s: no shell takes %q: %s", f.ID, command, out)
		}
	}
}

// shellParts are the commands in a fix.
func shellParts(fix string) []string {
	var out []string
	for rest := fix; ; {
		at := regexp.MustCompile(`(?:^|[ (])(?:sudo|printf) `).FindStringIndex(rest)
		if at == nil {
			return out
		}
		command := strings.TrimLeft(rest[at[0]:], " (")
		end := len(command)
		for _, stop := range []string{" (", ", ", ". "} {
			if i := strings.Index(command, stop); i >= 0 {
				end = min(end, i)
			}
		}
		part := strings.TrimRight(command[:end], ").;, ")
		if strings.Count(command[:end], "(") > strings.Count(part, ")") {
			part = strings.TrimRight(command[:end], ".;, ")
		}
		out = append(out, part)
		rest = command[end:]
	}
}
