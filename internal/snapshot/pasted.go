package snapshot

import (
	"encoding/json"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// What somebody without llmbox on the machine can send: the output of ss and of
// nvidia-smi, kept as commands/ss.txt and commands/nvidia-smi.txt. The collector asks
// the kernel and NVML instead and never writes them. Each stands in for the probe or
// report that is not there.
const (
	commandSS  = "ss"
	commandSMI = "nvidia-smi"
)

// exitTimedOut is how timeout(1) ends when it had to end the program.
const exitTimedOut = 124

func (s *Snapshot) readPasted() {
	if ss := s.Command(commandSS); ss.State == Present && s.probes[ProbeListeners] == nil {
		if raw, err := json.Marshal(readSS(ss.Lines())); err == nil {
			s.AddProbe(ProbeListeners, raw)
		}
	}
	_, spoilt := s.Manifest.Unreadable[gpuName]
	if smi := s.Command(commandSMI); smi.State == Present && s.GPU == nil && !spoilt {
		s.GPU = readSMIWords(smi.Data, smi.Exit)
	}
}

var ssUser = regexp.MustCompile(`\(\("([^"]*)",pid=(\d+)`)

// readSS reads the lines of "ss -ltnp" or "ss -lntup", with or without the column of the
// protocol.
func readSS(lines []string) []Listener {
	listeners := []Listener{}
	for _, line := range lines {
		fields := strings.Fields(line)
		protocol := "tcp"
		if len(fields) > 0 && (strings.HasPrefix(fields[0], "tcp") || strings.HasPrefix(fields[0], "udp")) {
			protocol, fields = fields[0][:3], fields[1:]
		}
		if len(fields) < 4 || fields[0] != "LISTEN" && fields[0] != "UNCONN" {
			continue
		}
		if fields[0] == "UNCONN" {
			protocol = "udp"
		}
		at := strings.LastIndex(fields[3], ":")
		if at < 0 {
			continue
		}
		port, err := strconv.ParseUint(fields[3][at+1:], 10, 16)
		if err != nil {
			continue
		}
		l := Listener{Protocol: protocol, Address: address(fields[3][:at]), Port: int(port)}
		if m := ssUser.FindStringSubmatch(line); m != nil {
			l.Process = m[1]
			if pid, err := strconv.Atoi(m[2]); err == nil {
				l.PID = pid
			}
		}
		listeners = append(listeners, l)
	}
	return listeners
}

// address takes off the brackets and the interface that ss writes.
func address(text string) string {
	text, _, _ = strings.Cut(strings.Trim(text, "[]"), "%")
	if text == "*" || net.ParseIP(text) == nil {
		return "::"
	}
	return text
}

var (
	smiListed  = regexp.MustCompile(`(?m)^GPU (\d+): (.+?) \(UUID: ([^)]+)\)`)
	smiLibrary = regexp.MustCompile(`NVML library version: (\d+(?:\.\d+)+)`)
	smiHandle  = regexp.MustCompile(`Unable to determine the device handle for (?:GPU\s?)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])`)
)

// readSMIWords reads how nvidia-smi ended, by the words of NVML that it prints, and the
// list of "nvidia-smi -L". It returns nil where neither is to be found.
func readSMIWords(text string, exit int) *gpu.Report {
	report := gpu.Report{Schema: gpu.ReportSchema, Source: gpu.SourceNone, Devices: []gpu.Device{}}
	if m := smiLibrary.FindStringSubmatch(text); m != nil {
		report.Library = m[1]
	}
	for _, m := range smiListed.FindAllStringSubmatch(text, -1) {
		report.Source = gpu.SourceSMI
		report.Devices = append(report.Devices, gpu.Device{Index: len(report.Devices), Name: gpu.OneLine(m[2]), UUID: gpu.OneLine(m[3])})
	}
	first, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	end := gpu.NVMLEnding{Code: exit, Detail: gpu.OneLine(first)}
	switch {
	case strings.Contains(text, "Driver/library version mismatch"):
		end.Ending = gpu.EndingVersionMismatch
	case strings.Contains(text, "couldn't communicate with the NVIDIA driver"), strings.Contains(text, "Driver Not Loaded"):
		end.Ending = gpu.EndingDriverNotLoaded
	case strings.Contains(text, "couldn't find libnvidia-ml.so"):
		end.Ending = gpu.EndingLibraryNotFound
	case strings.Contains(text, "Insufficient Permissions"):
		end.Ending = gpu.EndingNoPermission
	case smiHandle.MatchString(text), strings.Contains(text, "GPU is lost"):
		end.Ending = gpu.EndingGPULost
		for _, m := range smiHandle.FindAllStringSubmatch(text, -1) {
			report.Devices = append(report.Devices, gpu.Device{Index: len(report.Devices), PCIBus: gpu.NormalBus(m[1]), Lost: true, Error: end.Detail})
		}
	case exit == exitTimedOut && strings.TrimSpace(text) == "":
		end = gpu.NVMLEnding{Ending: gpu.EndingTimeout, Slow: true}
	case len(report.Devices) > 0:
		end = gpu.NVMLEnding{Ending: gpu.EndingOK}
	default:
		return nil
	}
	report.NVML = end
	return &report
}
