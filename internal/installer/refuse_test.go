package installer

import (
	"errors"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/finding"
)

func TestRefuse(t *testing.T) {
	found := []finding.Finding{
		{ID: "host.container", Severity: finding.Fail, Title: "Machine or container"},
		{ID: "gpu.present", Severity: finding.Fail, Title: "NVIDIA GPU"},
		{ID: "host.root", Severity: finding.OK, Title: "root"},
	}
	for _, tt := range []struct {
		name   string
		ignore []string
		named  string
	}{
		{"two fail", nil, "host.container, gpu.present"},
		{"one may", []string{"host.container"}, "gpu.present"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var seen []event.Event
			summary, err := Refuse(Options{
				Machine: &Machine{Found: found}, Ignore: tt.ignore, Log: quiet(),
				Sink: event.SinkFunc(func(e event.Event) { seen = append(seen, e) }),
			})
			if !errors.Is(err, ErrCheckFailed) || !strings.HasSuffix(err.Error(), tt.named) || summary.Outcome != "failed" {
				t.Errorf("it ends with %v, %+v", err, summary)
			}
			shown := 0
			for _, e := range seen {
				if e.Type == event.FindingMade {
					shown++
				}
			}
			if last := seen[len(seen)-1]; shown != len(found) || seen[0].Type != event.RunStarted || last.Type != event.RunDone || last.Error == "" {
				t.Errorf("%d findings are shown in %d events, the last %+v", shown, len(seen), last)
			}
		})
	}
}
