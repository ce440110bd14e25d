package preflight

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// Need is what the planned install asks of the machine. The zero value asks for
// nothing: a check whose need is empty judges only what is always true.
type Need struct {
	// Disk is the space that will be written, by path.
	Disk []DiskNeed
	// MemoryBytes and CPUMillis are the requests of everything the plan starts.
	MemoryBytes int64
	CPUMillis   int64
	// Ports are the TCP ports the box takes on the host.
	Ports []PortNeed
	// Hosts are the hosts that the install downloads from.
	Hosts []string
	// PodCIDR and ServiceCIDR are the networks of the cluster.
	PodCIDR, ServiceCIDR string
	// K3sVersion is what will be installed, such as "v1.36.4+k3s1".
	K3sVersion string
	// CUDA is what the model server's image asks of the driver, such as "12.9".
	CUDA string
	// Offline says that nothing may be downloaded.
	Offline bool
	// OtherInit says that something other than systemd was chosen to keep k3s running.
	OtherInit bool
	// Installed says that a box of ours is already here: its own k3s, ports and
	// mounts are then no leftovers.
	Installed bool
}

// DiskNeed is space wanted on the file system that holds Path.
type DiskNeed struct {
	Path  string
	Bytes int64
	What  string
}

// PortNeed is a TCP or UDP port and what wants it.
type PortNeed struct {
	Port     int
	Protocol string
	What     string
}

// Facts is all that a check may look at.
type Facts struct {
	*snapshot.Snapshot
	Need Need

	// log keeps the kernel's messages once they are taken apart; nil keeps nothing.
	log *keptLog
}

// keptLog is the kernel's messages, read by whoever asks first.
type keptLog struct {
	once  sync.Once
	lines []string
	from  snapshot.Text
}

// Check is one row of the registry.
type Check struct {
	// ID is the finding's id where the check finds nothing wrong, and the id by
	// which --ignore names it.
	ID string
	// Also lists further ids that Judge can return.
	Also  []string
	Title string
	// Required is what the check asks for, in a few words.
	Required string
	// Source is the failure report or document that the check comes from.
	Source string
	// Strict findings can't be ignored.
	Strict bool
	// Network checks are left out with --offline.
	Network bool
	// Causes are ids that explain this finding when they fail too.
	Causes []string
	// Judge returns one finding or, where one look tells several things apart,
	// more. It fills in ID (when it is not the check's), Severity, State, Measured,
	// Fix and Evidence; the rest comes from the row. It must not block.
	Judge func(Facts) []finding.Finding
}

// Deadline bounds one check.
const Deadline = 2 * time.Second

// Judge runs the checks concurrently, each within its deadline, and returns their
// findings: failing roots first, then warnings, then what follows from them, then
// the rest, in the registry's order within each.
func Judge(ctx context.Context, checks []Check, facts Facts) []finding.Finding {
	return judge(ctx, checks, facts, Deadline)
}

func judge(ctx context.Context, checks []Check, facts Facts, deadline time.Duration) []finding.Finding {
	facts.log = &keptLog{}
	results := make([][]finding.Finding, len(checks))
	var group sync.WaitGroup
	for i, check := range checks {
		if check.Network && facts.Need.Offline {
			results[i] = []finding.Finding{check.finish(finding.Finding{
				Severity: finding.OK, State: finding.NotApplicable, Measured: "not looked at: offline",
			})}
			continue
		}
		group.Go(func() { results[i] = check.run(ctx, facts, deadline) })
	}
	group.Wait()
	return Arrange(slices.Concat(results...))
}

// run calls Judge in a goroutine of its own, so that one that blocks costs its
// deadline and nothing more.
func (c Check) run(ctx context.Context, facts Facts, deadline time.Duration) []finding.Finding {
	bounded, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	done := make(chan []finding.Finding, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- []finding.Finding{{
					Severity: finding.Warn, State: finding.Unreadable,
					Measured: fmt.Sprintf("the check itself broke: %v", p),
					Evidence: []finding.Evidence{{Line: firstOwnFrame(string(debug.Stack()))}},
				}}
			}
		}()
		done <- c.Judge(facts)
	}()
	var found []finding.Finding
	select {
	case found = <-done:
	case <-bounded.Done():
		found = []finding.Finding{{
			Severity: finding.Warn, State: finding.Unreadable,
			Measured: fmt.Sprintf("no answer within %s", deadline),
		}}
	}
	for i := range found {
		found[i] = c.finish(found[i])
	}
	return found
}

func firstOwnFrame(stack string) string {
	for line := range strings.Lines(stack) {
		if strings.Contains(line, "/internal/preflight/") && !strings.Contains(line, "check.go") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// finish fills in what the row knows.
func (c Check) finish(f finding.Finding) finding.Finding {
	if f.ID == "" {
		f.ID = c.ID
	}
	if f.Title == "" {
		f.Title = c.Title
	}
	if f.Required == "" {
		f.Required = c.Required
	}
	if f.Source == "" {
		f.Source = c.Source
	}
	if f.State == "" {
		f.State = finding.Judged
	}
	if f.Severity == "" {
		f.Severity = finding.OK
	}
	f.Strict = f.Strict || c.Strict
	if f.Causes == nil {
		f.Causes = c.Causes
	}
	return f
}

// Arrange keeps of each finding's causes those that are themselves bad, and puts
// roots first. A failure is explained by failures only: what a mere warning explained
// away would stop nothing.
func Arrange(found []finding.Finding) []finding.Finding {
	bad := map[string]finding.Severity{}
	for _, f := range found {
		if f.Severity == finding.Fail || f.Severity == finding.Warn {
			bad[f.ID] = f.Severity
		}
	}
	for i, f := range found {
		var causes []string
		for _, id := range f.Causes {
			if bad[id] != "" && id != f.ID && bad[f.ID] != "" && (f.Severity == finding.Warn || bad[id] == finding.Fail) {
				causes = append(causes, id)
			}
		}
		found[i].Causes = causes
	}
	rank := func(f finding.Finding) int {
		switch {
		case f.Severity == finding.Fail && len(f.Causes) == 0:
			return 0
		case f.Severity == finding.Warn && len(f.Causes) == 0:
			return 1
		case f.Severity == finding.Fail, f.Severity == finding.Warn:
			return 2
		case f.Severity == finding.Info:
			return 3
		}
		return 4
	}
	slices.SortStableFunc(found, func(a, b finding.Finding) int { return rank(a) - rank(b) })
	return found
}

// Stopping lists the ids of the findings that keep an install from beginning: what
// failed and may not, or was not told to, be ignored. What follows from another failure
// is not named beside it, unless that one is ignored: then it stands for itself.
func Stopping(found []finding.Finding, ignore []string) []string {
	stops := map[string]bool{}
	for _, f := range found {
		if f.Severity == finding.Fail && (f.Strict || !slices.Contains(ignore, f.ID)) {
			stops[f.ID] = true
		}
	}
	var out []string
	for _, f := range found {
		explained := slices.ContainsFunc(f.Causes, func(id string) bool { return stops[id] })
		if stops[f.ID] && !explained {
			out = append(out, f.ID)
		}
	}
	return out
}
