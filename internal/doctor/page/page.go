// Package page renders the index page of a support bundle: what was found, versions, a
// timeline of events and the GPUs, as one HTML file that stands alone. It must not
// judge, and it shows nothing that is not in the snapshot beside it.
package page

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

//go:embed index.html.tmpl
var source string

// mostEvents is how many events the timeline shows, the newest.
const mostEvents = 200

type row struct{ Name, Value string }

type root struct {
	finding.Finding
	Mark    string
	Follows []finding.Finding
}

type moment struct {
	Time, Kind, Where, Reason, Message string
	Warning                            bool
	Count                              int32
}

type device struct {
	gpu.Device
	Rows []row
	// Used is the share of memory in use, in percent.
	Used int
}

type data struct {
	Title, Time string
	Roots       []root
	Well        []finding.Finding
	Notes       []finding.Finding
	Unjudged    []finding.Finding
	Counts      string
	Versions    []row
	Events      []moment
	Left        int
	GPUs        []device
	NVML        string
	Unreadable  []row
}

// Render makes the page of a snapshot and its findings, which come arranged.
func Render(s *snapshot.Snapshot, found []finding.Finding) ([]byte, error) {
	t, err := template.New("index").Parse(source)
	if err != nil {
		return nil, fmt.Errorf("reading the page's template: %w", err)
	}
	var out bytes.Buffer
	if err := t.Execute(&out, gather(s, found)); err != nil {
		return nil, fmt.Errorf("writing the page: %w", err)
	}
	return out.Bytes(), nil
}

func bad(f finding.Finding) bool {
	return f.Severity == finding.Fail || f.Severity == finding.Warn
}

func gather(s *snapshot.Snapshot, found []finding.Finding) data {
	d := data{Title: "A box, as it was", Time: s.Manifest.Time.UTC().Format("2006-01-02 15:04:05 MST")}
	at := map[string]int{}
	for _, f := range found {
		if bad(f) && len(f.Causes) == 0 {
			at[f.ID] = len(d.Roots)
			mark := string(f.Severity)
			if f.State == finding.Wait {
				mark = "wait"
			}
			d.Roots = append(d.Roots, root{Finding: f, Mark: mark})
		}
	}
	byID := map[string]finding.Finding{}
	for _, f := range found {
		byID[f.ID] = f
	}
	for _, f := range found {
		switch {
		case bad(f) && len(f.Causes) > 0:
			id := f.ID
			for range 32 {
				if one, ok := byID[id]; ok && len(one.Causes) > 0 {
					id = one.Causes[0]
				}
			}
			if i, ok := at[id]; ok {
				d.Roots[i].Follows = append(d.Roots[i].Follows, f)
			}
		case bad(f):
		case f.State == finding.Unreadable:
			d.Unjudged = append(d.Unjudged, f)
		case f.Severity == finding.Info, f.State == finding.Wait:
			d.Notes = append(d.Notes, f)
		case f.State == finding.Judged:
			d.Well = append(d.Well, f)
		}
	}
	d.Counts = fmt.Sprintf("%d checked, %d to mend, %d well", len(found), len(d.Roots), len(d.Well))
	d.Versions = versions(s)
	d.Events, d.Left = events(s)
	d.GPUs, d.NVML = devices(s.GPU)
	for _, place := range sortedKeys(s.Manifest.Unreadable) {
		d.Unreadable = append(d.Unreadable, row{place, s.Manifest.Unreadable[place]})
	}
	return d
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func versions(s *snapshot.Snapshot) []row {
	var out []row
	add := func(name, value string) {
		if value = strings.TrimSpace(value); value != "" {
			out = append(out, row{name, value})
		}
	}
	add("llmbox", s.Manifest.Version)
	for line := range strings.Lines(s.File("/etc/os-release").Data) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
			add("System", strings.Trim(v, `"`))
		}
	}
	var system snapshot.System
	if state, _ := s.Probe(snapshot.ProbeSystem, &system); state == snapshot.Present {
		add("Kernel", system.Kernel+" "+system.Machine)
		add("Processors and memory", fmt.Sprintf("%d, %.0f GiB", system.CPUs, float64(system.MemoryBytes)/(1<<30)))
	}
	var api snapshot.APIProbe
	if state, _ := s.Probe(snapshot.ProbeAPI, &api); state == snapshot.Present {
		add("Kubernetes", cmp.Or(api.Version, "no answer: "+api.Error))
	}
	if s.GPU != nil {
		add("NVIDIA driver", s.GPU.Driver)
		add("CUDA that it serves", s.GPU.CUDA)
	}
	if t := s.Command(snapshot.CommandCTK); t.State == snapshot.Present {
		first, _, _ := strings.Cut(t.Trimmed(), "\n")
		add("Container toolkit", first)
	}
	images := map[string]bool{}
	var pods []corev1.Pod
	if state, _ := s.Cluster("pods", &pods); state == snapshot.Present {
		for _, p := range pods {
			for _, c := range p.Spec.Containers {
				images[c.Image] = true
			}
		}
	}
	for _, image := range sortedKeys(images) {
		add("Image", image)
	}
	return out
}

func eventTime(e *corev1.Event) time.Time {
	for _, t := range []time.Time{e.LastTimestamp.Time, e.EventTime.Time, e.CreationTimestamp.Time} {
		if !t.IsZero() {
			return t
		}
	}
	return time.Time{}
}

func events(s *snapshot.Snapshot) (out []moment, left int) {
	var list []corev1.Event
	if state, _ := s.Cluster("events", &list); state != snapshot.Present {
		return nil, 0
	}
	slices.SortStableFunc(list, func(a, b corev1.Event) int { return eventTime(&b).Compare(eventTime(&a)) })
	if len(list) > mostEvents {
		left, list = len(list)-mostEvents, list[:mostEvents]
	}
	for i := range list {
		e := &list[i]
		at := ""
		if t := eventTime(e); !t.IsZero() {
			at = t.UTC().Format("01-02 15:04:05")
		}
		out = append(out, moment{
			Time: at, Kind: e.InvolvedObject.Kind, Where: strings.Trim(e.InvolvedObject.Namespace+"/"+e.InvolvedObject.Name, "/"),
			Reason: e.Reason, Message: e.Message, Warning: e.Type == corev1.EventTypeWarning, Count: e.Count,
		})
	}
	return out, left
}

func devices(report *gpu.Report) (out []device, nvml string) {
	if report == nil {
		return nil, "not asked"
	}
	nvml = strings.ReplaceAll(string(report.NVML.Ending), "_", " ") + fmt.Sprintf(" after %d ms; %s spoke", report.NVML.ElapsedMS, report.Source)
	if report.NVML.Detail != "" {
		nvml += ": " + report.NVML.Detail
	}
	for _, d := range report.Devices {
		one := device{Device: d}
		add := func(name, value string) {
			if value != "" {
				one.Rows = append(one.Rows, row{name, value})
			}
		}
		add("Bus", d.PCIBus)
		if d.ComputeMajor != nil && d.ComputeMinor != nil {
			add("Compute capability", fmt.Sprintf("%d.%d", *d.ComputeMajor, *d.ComputeMinor))
		}
		if m := d.Memory; m != nil && m.TotalBytes > 0 {
			one.Used = int(100 * float64(m.UsedBytes) / float64(m.TotalBytes))
			add("Memory", fmt.Sprintf("%.1f of %.1f GiB in use", float64(m.UsedBytes)/(1<<30), float64(m.TotalBytes)/(1<<30)))
		}
		if d.Temperature != nil {
			add("Temperature", fmt.Sprintf("%v °C", d.Temperature.Now))
		}
		if d.PowerWatts != nil {
			add("Power", number(d.PowerWatts.Now)+" of "+number(d.PowerWatts.Limit)+" W")
		}
		if r := d.Remap; r != nil {
			add("Remapped rows", fmt.Sprintf("%d correctable, %d uncorrectable, pending %t, failed %t", r.Correctable, r.Uncorrectable, r.Pending, r.Failure))
		}
		add("Throttled by", strings.Join(d.Throttle, ", "))
		for _, p := range d.Processes {
			used := ""
			if p.UsedBytes != nil {
				used = fmt.Sprintf(", %.1f GiB", float64(*p.UsedBytes)/(1<<30))
			}
			add("Process", fmt.Sprintf("%d %s%s", p.PID, p.Name, used))
		}
		add("Error", d.Error)
		out = append(out, one)
	}
	return out, nvml
}

func number(v *float64) string {
	if v == nil {
		return "?"
	}
	return fmt.Sprintf("%.0f", *v)
}
