package preflight

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func capacityChecks() []Check {
	return []Check{
		{
			ID: "capacity.memory", Title: "Memory", Required: "what the plan asks for",
			Source: "vllm-project/vllm#28923; docs.k3s.io/installation/requirements", Judge: judgeMemory,
		},
		{
			ID: "capacity.cpu", Title: "Processors", Required: "what the plan asks for",
			Source: "docs.k3s.io/installation/requirements; kubernetes.io/docs/concepts/scheduling-eviction", Judge: judgeCPU,
		},
	}
}

// memory is what this machine may use in bytes, and who says so.
func (f Facts) memory() (total uint64, from finding.Evidence, why []finding.Finding) {
	if s, ok := f.system(); ok && s.MemoryBytes > 0 {
		total, from = s.MemoryBytes, atProbe(snapshot.ProbeSystem, "memory_bytes")
		if s.LimitBytes > 0 && s.LimitBytes < total {
			total, from = s.LimitBytes, atProbe(snapshot.ProbeSystem, "limit_bytes")
		}
		return total, from, nil
	}
	t := f.File("/proc/meminfo")
	if t.State != snapshot.Present {
		return 0, from, unknownText(t)
	}
	fields := strings.Fields(colonFields(t.Data)["MemTotal"])
	if len(fields) == 0 {
		return 0, from, unknown("/proc/meminfo", "no MemTotal")
	}
	kib, err := strconv.ParseUint(fields[0], 10, 64)
	if err != nil {
		return 0, from, unknown("/proc/meminfo", err.Error())
	}
	return kib << 10, at(t, "MemTotal: "+fields[0]+" kB"), nil
}

func judgeMemory(f Facts) []finding.Finding {
	total, from, why := f.memory()
	if why != nil {
		return why
	}
	if f.Need.MemoryBytes <= 0 {
		return notApplicable("no plan says how much is needed; there are " + gib(total))
	}
	need := uint64(f.Need.MemoryBytes)
	required := gib(need) + " for everything in the plan"
	var out []finding.Finding
	switch {
	case total < need-need*memorySlackPercent/100:
		out = fail(gib(total)+" in all, "+gib(need)+" asked for: some parts would never start",
			"Take a machine with more memory, a smaller model (sudo llmbox models), or leave parts out: sudo llmbox install --without kyverno,policies,keda,autoscale", from)
	case total < need+need/10:
		out = warn(gib(total)+" in all, "+gib(need)+" asked for: hardly anything is left for the system",
			"Leave parts out: sudo llmbox install --without kyverno,policies,keda,autoscale", from)
	default:
		out = well(gib(total), from)
	}
	out[0].Required = required
	return out
}

func judgeCPU(f Facts) []finding.Finding {
	s, ok := f.system()
	if !ok || s.CPUs == 0 {
		return unknown("the number of processors", "")
	}
	if f.Need.CPUMillis <= 0 {
		return notApplicable("no plan says how many are needed; there are " + strconv.Itoa(s.CPUs))
	}
	have, need := int64(s.CPUs)*1000, f.Need.CPUMillis
	required := fmt.Sprintf("%.1f processors for everything in the plan", float64(need)/1000)
	out := well(count(s.CPUs, "processor"))
	if have < need {
		out = fail(fmt.Sprintf("%s, %.1f asked for: some parts would never start", count(s.CPUs, "processor"), float64(need)/1000),
			"Take a machine with more processors, or leave parts out: sudo llmbox install --without kyverno,policies,keda,autoscale", atProbe(snapshot.ProbeSystem, "cpus"))
	}
	out[0].Required = required
	return out
}
