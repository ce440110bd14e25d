package helmchart

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What is read of a log at most, and what of it an error carries.
const (
	logLines = 200
	logBytes = 256 << 10
	tailSize = 20
	// maxAsked is how often a log is asked for that can't be had.
	maxAsked = 3
)

// logbook keeps what the tries of a Job left behind. A container that starts
// again hides the log of the one that told the cause, and a Job that gives up
// takes its pods along, so each end is read when it is seen.
type logbook struct {
	// all reads the logs of good ends too.
	all bool

	asked   map[string]int // how often for a try's log; answered is enough
	pod     string
	tail    []string
	cause   string
	named   bool   // the cause is a line that names one
	message string // what the container left as its termination message
}

// keepLogs reads the log of each end of a container that was not read before.
func (e *Engine) keepLogs(ctx context.Context, l *logbook, pods []*corev1.Pod, job *batchv1.Job) {
	if job == nil {
		return
	}
	for _, p := range pods {
		if !metav1.IsControlledBy(p, job) {
			continue
		}
		for _, c := range p.Status.ContainerStatuses {
			ended, previous, try := c.State.Terminated, false, c.RestartCount
			if ended == nil {
				ended, previous, try = c.LastTerminationState.Terminated, true, c.RestartCount-1
			}
			key := fmt.Sprintf("%s/%s/%d", p.UID, c.Name, try)
			if c.Name != jobContainer || ended == nil || ended.ExitCode == 0 && !l.all || l.asked[key] >= maxAsked {
				continue
			}
			if l.asked == nil {
				l.asked = map[string]int{}
			}
			raw, err := e.readLog(ctx, p.Name, previous)
			if err != nil {
				e.log.Debug("reading the log of a Job's pod", "pod", p.Name, "error", err)
				l.asked[key]++
			} else {
				l.asked[key] = maxAsked
			}
			l.add(p.Name, string(raw), ended.Message)
		}
	}
}

func (e *Engine) readLog(ctx context.Context, pod string, previous bool) ([]byte, error) {
	asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
	defer cancel()
	lines, bytes := int64(logLines), int64(logBytes)
	return e.client.Kube.CoreV1().Pods(Namespace).GetLogs(pod, &corev1.PodLogOptions{
		Container: jobContainer, Previous: previous, TailLines: &lines, LimitBytes: &bytes,
	}).DoRaw(asking)
}

// add takes a log in. A named cause is only replaced by a newer named one.
func (l *logbook) add(pod, text, message string) {
	if message = oneLine(message); message != "" {
		l.message = message
	}
	lines := clean(text)
	cause, named := causeOf(lines)
	if len(lines) == 0 || l.named && !named {
		return
	}
	l.pod, l.cause, l.named = pod, cause, named
	l.tail = lines[max(0, len(lines)-tailSize):]
}

var (
	stamps = regexp.MustCompile(`^(?:` +
		`\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\s+` + // RFC 3339, Go's log
		`|time=\S+\s+` + // slog, logrus
		`|[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+\s+\d+ \S+\] ` + // klog
		`)`)
	helmError  = regexp.MustCompile(`^Error: `)
	otherError = regexp.MustCompile(`(?i)^(?:level=(?:error|fatal)\b|fatal|panic: |error\b)|(?:no space left|permission denied|command not found)`)
)

// clean splits a log into lines without timestamps.
func clean(text string) []string {
	var lines []string
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, " \t\r\n")
		for {
			cut := stamps.ReplaceAllString(line, "")
			if cut == line {
				break
			}
			line = cut
		}
		if line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// causeOf finds the line that names what went wrong: Helm's last "Error: …",
// with the lines that belong to it, or else the last that looks like an error.
// The shell traces its commands with "+ "; that an operator is waited for is
// what a later try says, never the cause.
func causeOf(lines []string) (cause string, named bool) {
	for i := len(lines) - 1; i >= 0; i-- {
		if !helmError.MatchString(lines[i]) {
			continue
		}
		end := i + 1
		for end < len(lines) && end-i < 6 && !trace(lines[end]) && !helmError.MatchString(lines[end]) {
			end++
		}
		return oneLine(strings.Join(lines[i:end], " ")), true
	}
	last := ""
	for i := len(lines) - 1; i >= 0; i-- {
		switch {
		case trace(lines[i]):
		case otherError.MatchString(lines[i]):
			return oneLine(lines[i]), true
		case last == "":
			last = lines[i]
		}
	}
	return oneLine(last), false
}

func trace(line string) bool { return strings.HasPrefix(line, "+") }
