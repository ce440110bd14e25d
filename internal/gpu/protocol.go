package gpu

import (
	"strings"
	"unicode/utf8"
)

// What parent and child agree on beside the report itself.
const (
	// EnvLibrary names the library that the child opens instead of the system's.
	EnvLibrary = "LLMBOX_NVML_LIBRARY"
	// EnvProgress is set where the child shall name each call on ProgressFD before
	// it enters it: one line, the call and, where there is one, the GPU's index.
	EnvProgress = "LLMBOX_NVML_PROGRESS"
	// ProgressFD is the file descriptor of that pipe in the child.
	ProgressFD = 3
)

// NormalBus writes a PCI address as sysfs does, four digits of domain and lower
// case ("00000000:17:00.0" becomes "0000:17:00.0"), so that both can be compared.
func NormalBus(bus string) string {
	bus = strings.ToLower(strings.TrimSpace(bus))
	domain, rest, ok := strings.Cut(bus, ":")
	if !ok || !strings.Contains(rest, ":") {
		return bus
	}
	domain = strings.TrimLeft(domain, "0")
	if len(domain) < 4 {
		domain = strings.Repeat("0", 4-len(domain)) + domain
	}
	return domain + ":" + rest
}

// OneLine makes text from elsewhere fit for a report: one line, printable, at most
// 400 bytes and an ellipsis.
func OneLine(text string) string {
	const most = 400
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 || r == utf8.RuneError {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, " "))
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}

// ProcessName is the program in what NVML gives as the name of a process: programs
// that rewrite their title put their arguments there, which may hold a secret.
func ProcessName(title string) string {
	name, _, _ := strings.Cut(OneLine(title), " ")
	return name
}
