package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/finding"
)

var update = flag.Bool("update", false, "write the golden files anew")

// control matches what must never reach a log: everything below space but the
// line break, DEL, and the C1 range.
var control = regexp.MustCompile(`[\x00-\x09\x0b-\x1f\x7f\x{80}-\x{9f}]`)

func recorded(t *testing.T, name string) []event.Event {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name+".ndjson"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var events []event.Event
	if err := ReadEvents(f, func(e event.Event) { events = append(events, e) }); err != nil {
		t.Fatal(err)
	}
	if len(events) == 0 {
		t.Fatal("the recorded run is empty")
	}
	return events
}

func account(t *testing.T, name string) *Timeline {
	t.Helper()
	r := NewRecorder()
	for _, e := range recorded(t, name) {
		r.Emit(e)
	}
	return r.Timeline()
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs from what was written (run with -update to accept):\n%s", path, firstDifference(got, string(want)))
	}
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range g {
		if i >= len(w) || g[i] != w[i] {
			line := ""
			if i < len(w) {
				line = w[i]
			}
			return "line " + itoa(i+1) + "\n got: " + g[i] + "\nwant: " + line
		}
	}
	return "want goes on: " + w[len(g)]
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func TestLinesAreAsRecorded(t *testing.T) {
	for _, name := range []string{"run", "failed"} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			p := NewLines(&out, LinesOptions{Title: "llmbox rehearse", Account: true})
			for _, e := range recorded(t, name) {
				p.Emit(e)
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			golden(t, name+".lines.txt", out.String())
			if at := control.FindStringIndex(out.String()); at != nil {
				t.Errorf("control character at byte %d", at[0])
			}
		})
	}
}

func TestTextAccountIsAsRecorded(t *testing.T) {
	for _, name := range []string{"run", "failed"} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := account(t, name).WriteText(&out, Meta{Title: "llmbox rehearse", Version: "v0.1.0"}); err != nil {
				t.Fatal(err)
			}
			golden(t, name+".account.txt", out.String())
			for i, line := range strings.Split(out.String(), "\n") {
				if len([]rune(line)) > textWidth {
					t.Errorf("line %d is %d wide: %s", i+1, len([]rune(line)), line)
				}
			}
		})
	}
}

func TestLastLineCountsTheSimulatedGates(t *testing.T) {
	var out bytes.Buffer
	if err := account(t, "run").WriteText(&out, Meta{}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := "10 of 14 gates were answered by rehearsal actors (simulated), 4 by real parts."
	if got := lines[len(lines)-1]; got != want {
		t.Errorf("last line is %q, want %q", got, want)
	}
	real := NewTimeline()
	real.Apply(event.Event{Type: event.RunDone, Summary: &event.Summary{Outcome: "done", GatesTotal: 14}})
	if got := real.GatesLine(); got != "" {
		t.Errorf("a run without actors says %q", got)
	}
}

func TestLinesNeverCarryControlCharacters(t *testing.T) {
	nasty := "\x1b[31mred\x1b[0m \x1b]0;title\x07 tab\there\r\nnext\x00\x7f \u0085\u009b2J \u202eoverride \xff\xfe"
	var out bytes.Buffer
	p := NewLines(&out, LinesOptions{Title: nasty, Account: true})
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	f := finding.Finding{ID: "a." + nasty, Severity: finding.Fail, Title: nasty, Measured: nasty, Required: nasty, Fix: nasty}
	for _, e := range []event.Event{
		{Type: event.RunStarted, Message: nasty, Plan: []event.PlannedStep{{Step: "component/" + nasty, Title: nasty}}},
		{Type: event.StepStarted, Step: "component/" + nasty},
		{Type: event.FindingMade, Step: nasty, Finding: &f},
		{Type: event.StepProgress, Step: "component/" + nasty + "/" + nasty, Message: nasty, Done: 1, Unit: nasty},
		{Type: event.Log, Message: nasty},
		{Type: event.StepFailed, Step: "component/" + nasty, Error: nasty, Fix: nasty},
		{Type: event.RunDone, Error: nasty, Summary: &event.Summary{Outcome: "failed", Endpoint: nasty, GatesTotal: 2, GatesSimulated: 1}},
	} {
		e.Time = at
		at = at.Add(5 * time.Second)
		p.Emit(e)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if at := control.FindStringIndex(out.String()); at != nil {
		t.Errorf("control character at byte %d of:\n%q", at[0], out.String())
	}
	if strings.ContainsRune(out.String(), '\u202e') {
		t.Error("a character that turns text around got through")
	}
	if !strings.Contains(out.String(), "red") {
		t.Error("the text itself got lost")
	}
}

func TestProgressLinesAreThrottled(t *testing.T) {
	var out bytes.Buffer
	p := NewLines(&out, LinesOptions{})
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	emit := func(after time.Duration, typ event.Type, step, message string) {
		p.Emit(event.Event{Time: start.Add(after), Type: typ, Step: step, Message: message})
	}
	emit(0, event.StepStarted, "component/a", "")
	emit(100*time.Millisecond, event.StepProgress, "component/a/ready", "first")
	if strings.Contains(out.String(), "first") {
		t.Error("a reason of the first instant was not held back")
	}
	for i := range 100 {
		emit(4*time.Second+time.Duration(i)*10*time.Millisecond, event.StepProgress, "component/a/ready", "reason "+itoa(i))
	}
	if got := strings.Count(out.String(), "ready: reason"); got != 1 {
		t.Errorf("%d progress lines within a second, want 1:\n%s", got, out.String())
	}
	// Another step's event lets the newest held reason out.
	emit(9*time.Second, event.StepStarted, "component/b", "")
	if !strings.Contains(out.String(), "ready: reason 99") {
		t.Errorf("the newest reason was lost:\n%s", out.String())
	}
	for s := 10; s < 60; s++ {
		emit(time.Duration(s)*time.Second, event.StepProgress, "component/a/ready", "reason 99")
	}
	if got := strings.Count(out.String(), "reason 99"); got != 1 {
		t.Errorf("an unchanged reason was written %d times within a minute, want once", got)
	}
	emit(75*time.Second, event.StepProgress, "component/a/ready", "reason 99")
	if got := strings.Count(out.String(), "reason 99"); got != 2 {
		t.Errorf("after a minute of silence the reason was written %d times in all, want twice", got)
	}
}

func TestFailureLinesWrap(t *testing.T) {
	var out bytes.Buffer
	p := NewLines(&out, LinesOptions{})
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	p.Emit(event.Event{Time: at, Type: event.StepStarted, Step: "component/external-secrets"})
	p.Emit(event.Event{Time: at, Type: event.StepFailed, Step: "component/external-secrets",
		Error: strings.Repeat("waiting for something: ", 30), Fix: "kubectl -n x get pods\nkubectl -n x describe pod"})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	for _, line := range lines {
		if len(line) > textWidth {
			t.Errorf("%d wide: %s", len(line), line)
		}
	}
	if !strings.Contains(out.String(), "fix   kubectl -n x get pods\n") || !strings.Contains(out.String(), "      kubectl -n x describe pod\n") {
		t.Errorf("the fix lost its lines:\n%s", out.String())
	}
}

type brokenWriter struct{ writes int }

func (w *brokenWriter) Write([]byte) (int, error) { w.writes++; return 0, io.ErrClosedPipe }

func TestBrokenOutputIsReportedOnceAndLeftAlone(t *testing.T) {
	for name, start := range map[string]func(io.Writer) Renderer{
		"lines": func(w io.Writer) Renderer { return NewLines(w, LinesOptions{Account: true}) },
		"json":  func(w io.Writer) Renderer { return NewJSON(w) },
	} {
		t.Run(name, func(t *testing.T) {
			w := &brokenWriter{}
			r := start(w)
			for _, e := range recorded(t, "run") {
				r.Emit(e)
			}
			if err := r.Close(); !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("Close returned %v, want the write's error", err)
			}
			if w.writes != 1 {
				t.Errorf("%d writes to a closed pipe, want 1", w.writes)
			}
		})
	}
}

func TestModeFollowsTerminalAndFormat(t *testing.T) {
	for _, c := range []struct {
		name     string
		terminal bool
		format   Format
		env      map[string]string
		want     Mode
	}{
		{"terminal", true, FormatText, map[string]string{"TERM": "xterm-256color"}, ModeScreen},
		{"format unset", true, "", map[string]string{"TERM": "xterm-256color"}, ModeScreen},
		{"NO_COLOR keeps the screen", true, FormatText, map[string]string{"TERM": "xterm", "NO_COLOR": "1"}, ModeScreen},
		{"pipe", false, FormatText, map[string]string{"TERM": "xterm"}, ModeLines},
		{"TERM=dumb", true, FormatText, map[string]string{"TERM": "dumb"}, ModeLines},
		{"TERM unset", true, FormatText, nil, ModeLines},
		{"CI", true, FormatText, map[string]string{"TERM": "xterm", "CI": "true"}, ModeLines},
		{"CI=false", true, FormatText, map[string]string{"TERM": "xterm", "CI": "false"}, ModeScreen},
		{"json on a terminal", true, FormatJSON, map[string]string{"TERM": "xterm"}, ModeJSON},
		{"json in CI", false, FormatJSON, map[string]string{"CI": "1"}, ModeJSON},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := Options{Terminal: c.terminal, Format: c.format, Getenv: func(k string) string { return c.env[k] }}
			if got := o.Mode(); got != c.want {
				t.Errorf("mode is %s, want %s", got, c.want)
			}
		})
	}
}

func TestGlyphsFollowTheLocale(t *testing.T) {
	for _, c := range []struct {
		name string
		env  map[string]string
		want bool
	}{
		{"utf-8", map[string]string{"LANG": "en_US.UTF-8"}, true},
		{"LC_ALL wins", map[string]string{"LANG": "en_US.UTF-8", "LC_ALL": "C"}, false},
		{"C.utf8", map[string]string{"LC_ALL": "C.utf8"}, true},
		{"unset", nil, false},
		{"kernel console", map[string]string{"LANG": "C.UTF-8", "TERM": "linux"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := Options{Getenv: func(k string) string { return c.env[k] }}
			if got := o.unicodeOK(); got != c.want {
				t.Errorf("unicode is %v, want %v", got, c.want)
			}
		})
	}
}

func TestJSONModeFeedsProgramAndPerson(t *testing.T) {
	var program, person bytes.Buffer
	r := New(Options{Title: "llmbox install", Stdout: &program, Stderr: &person, Format: FormatJSON})
	events := recorded(t, "run")
	for _, e := range events {
		r.Emit(e)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	var back []event.Event
	if err := ReadEvents(&program, func(e event.Event) { back = append(back, e) }); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back, events) {
		t.Error("what was written isn't what was emitted")
	}
	if !strings.Contains(person.String(), "component") && !strings.Contains(person.String(), "keda") {
		t.Error("nothing for a person on stderr")
	}
}

func TestRecordedRunFitsTheSchema(t *testing.T) {
	s := compiledSchema(t)
	// The last one is a real rehearsal, the others are made up.
	for _, name := range []string{"run", "failed", "rehearsal"} {
		// What JSON writes is what is promised, so it goes through it.
		var out bytes.Buffer
		w := NewJSON(&out)
		for _, e := range recorded(t, name) {
			w.Emit(e)
		}
		for i, line := range strings.Split(strings.TrimSpace(out.String()), "\n") {
			doc, err := jsonschema.UnmarshalJSON(strings.NewReader(line))
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Validate(doc); err != nil {
				t.Errorf("%s: event %d: %v\n%s", name, i+1, err, line)
			}
		}
	}
}

func TestSchemaRefusesWhatIsWrong(t *testing.T) {
	s := compiledSchema(t)
	for name, line := range map[string]string{
		"no time":               `{"type":"log","message":"x"}`,
		"bad time":              `{"time":"yesterday","type":"log","message":"x"}`,
		"unknown type":          `{"time":"2026-01-02T03:04:05Z","type":"step.paused","step":"a/b"}`,
		"unknown field":         `{"time":"2026-01-02T03:04:05Z","type":"log","message":"x","colour":"red"}`,
		"step missing":          `{"time":"2026-01-02T03:04:05Z","type":"step.done"}`,
		"failure without error": `{"time":"2026-01-02T03:04:05Z","type":"step.failed","step":"a/b"}`,
		"finding missing":       `{"time":"2026-01-02T03:04:05Z","type":"finding"}`,
		"summary missing":       `{"time":"2026-01-02T03:04:05Z","type":"run.done"}`,
		"odd outcome":           `{"time":"2026-01-02T03:04:05Z","type":"run.done","summary":{"outcome":"fine","gates_total":0,"gates_simulated":0}}`,
	} {
		doc, err := jsonschema.UnmarshalJSON(strings.NewReader(line))
		if err != nil {
			t.Fatal(err)
		}
		if s.Validate(doc) == nil {
			t.Errorf("%s: accepted: %s", name, line)
		}
	}
}

func compiledSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("event.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("event.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The schema is kept by hand for its descriptions; this holds it to the types.
func TestSchemaNamesExactlyTheFields(t *testing.T) {
	var doc struct {
		Properties map[string]json.RawMessage
		Required   []string
		Defs       map[string]struct {
			Properties map[string]json.RawMessage
			Required   []string
		} `json:"$defs"`
	}
	if err := json.Unmarshal(Schema(), &doc); err != nil {
		t.Fatal(err)
	}
	check := func(name string, typ reflect.Type, properties map[string]json.RawMessage, required []string) {
		must := map[string]bool{}
		for _, r := range required {
			must[r] = true
		}
		seen := map[string]bool{}
		for i := range typ.NumField() {
			tag, rest, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			seen[tag] = true
			if _, ok := properties[tag]; !ok {
				t.Errorf("%s: field %s isn't in the schema", name, tag)
			}
			if optional := strings.Contains(rest, "omitempty"); optional == must[tag] {
				t.Errorf("%s: field %s: omitempty is %v and required is %v", name, tag, optional, must[tag])
			}
		}
		for p := range properties {
			if !seen[p] {
				t.Errorf("%s: the schema has %s, the type hasn't", name, p)
			}
		}
	}
	check("event", reflect.TypeFor[event.Event](), doc.Properties, doc.Required)
	for name, typ := range map[string]reflect.Type{
		"plannedStep": reflect.TypeFor[event.PlannedStep](),
		"summary":     reflect.TypeFor[event.Summary](),
		"finding":     reflect.TypeFor[finding.Finding](),
	} {
		check(name, typ, doc.Defs[name].Properties, doc.Defs[name].Required)
	}
}

func TestLogIsAppendedAndPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "logs", "run.ndjson")
	for range 2 {
		l, err := OpenLog(path)
		if err != nil {
			t.Fatal(err)
		}
		l.Emit(event.Event{Type: event.Log, Message: "<hello> & goodbye"})
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(data), "<hello> & goodbye"); got != 2 {
		t.Errorf("%d events after two runs, want 2: %s", got, data)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode is %o, want 600", info.Mode().Perm())
	}
}

func TestReadEventsForgivesOnlyATornLastLine(t *testing.T) {
	whole := `{"time":"2026-01-02T03:04:05Z","type":"log","message":"a"}` + "\n"
	for name, c := range map[string]struct {
		in   string
		want int
		ok   bool
	}{
		"whole":          {whole + whole, 2, true},
		"torn last line": {whole + whole[:20], 1, true},
		"torn in middle": {whole[:20] + "\n" + whole, 0, false},
		"no line break":  {strings.TrimSpace(whole), 1, true},
		"empty lines":    {"\n\n" + whole + "\n", 1, true},
	} {
		n := 0
		err := ReadEvents(strings.NewReader(c.in), func(event.Event) { n++ })
		if (err == nil) != c.ok || n != c.want {
			t.Errorf("%s: %d events, error %v", name, n, err)
		}
	}
}

func TestTimeline(t *testing.T) {
	tl := account(t, "run")
	keda := tl.find("component/keda")
	if keda.State != Done || len(keda.Phases) != 3 || keda.Name != "keda" || keda.Title != "KEDA" {
		t.Errorf("keda is %+v", keda)
	}
	if got := keda.Elapsed(tl.Stop()); got != 11400*time.Millisecond {
		t.Errorf("keda took %s", got)
	}
	if _, simulated := keda.Actors(); simulated {
		t.Error("keda's gate was a real one")
	}
	if by, simulated := tl.find("vault").Actors(); !simulated || !reflect.DeepEqual(by, []string{"vault-actor"}) {
		t.Errorf("vault was answered by %v, %v", by, simulated)
	}
	var critical []string
	for _, s := range tl.CriticalSteps() {
		critical = append(critical, s.Name)
	}
	if want := []string{"machine", "weights", "model", "autoscale", "policies"}; !reflect.DeepEqual(critical, want) {
		t.Errorf("critical path is %v, want %v", critical, want)
	}
	if tl.Fraction() != 1 {
		t.Errorf("a finished run is at %v", tl.Fraction())
	}
	if reason, d := tl.find("prometheus").find("ready").LongestWait(); !strings.HasPrefix(reason, "5 workloads") || d < 8*time.Second {
		t.Errorf("prometheus waited longest for %q, %s", reason, d)
	}
}

func (s *Step) find(phase string) *Phase { return s.phase(phase, s.Path+"/"+phase) }

func TestTimelineOfACutStream(t *testing.T) {
	events := recorded(t, "run")
	tl := NewTimeline()
	for _, e := range events[:len(events)/2] {
		tl.Apply(e)
	}
	if tl.Outcome() != OutcomeUnfinished {
		t.Errorf("outcome is %s", tl.Outcome())
	}
	var out bytes.Buffer
	if err := tl.WriteText(&out, Meta{}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "not finished") {
		t.Errorf("the account doesn't say so:\n%s", out.String())
	}
	out.Reset()
	if err := tl.WriteHTML(&out, Meta{}); err != nil {
		t.Fatal(err)
	}
}

func TestStepsBeforeThePlanBelongToTheRun(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	tl := NewTimeline()
	tl.Apply(event.Event{Time: at, Type: event.StepStarted, Step: "rehearsal/cluster", Message: "Starting a control plane"})
	tl.Apply(event.Event{Time: at.Add(9 * time.Second), Type: event.StepDone, Step: "rehearsal/cluster"})
	plan := []event.PlannedStep{{Step: "component/keda", Title: "KEDA"}}
	tl.Apply(event.Event{Time: at.Add(10 * time.Second), Type: event.RunStarted, Plan: plan})
	if len(tl.Steps) != 2 || tl.Steps[0].Title != "Starting a control plane" || tl.Elapsed(at.Add(10*time.Second)) != 10*time.Second {
		t.Errorf("steps %+v, start %s", tl.Steps, tl.Start)
	}
	tl.Apply(event.Event{Time: at.Add(20 * time.Second), Type: event.StepStarted, Step: "component/keda"})
	// The run was killed; a log goes on with the next one.
	tl.Apply(event.Event{Time: at.Add(time.Hour), Type: event.RunStarted, Plan: plan})
	if len(tl.Steps) != 1 || tl.Steps[0].State != Pending || tl.Elapsed(at.Add(time.Hour)) != 0 {
		t.Errorf("the second run starts with %+v", tl.Steps[0])
	}
}

func TestStepsThatEndTakeTheirPhasesAlong(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	tl := NewTimeline()
	tl.Apply(event.Event{Time: at, Type: event.StepStarted, Step: "component/a"})
	tl.Apply(event.Event{Time: at, Type: event.StepStarted, Step: "component/a/ready"})
	tl.Apply(event.Event{Time: at.Add(time.Second), Type: event.StepFailed, Step: "component/a", Error: "no"})
	s := tl.find("a")
	if p := s.FailedPhase(); p == nil || p.Name != "ready" {
		t.Errorf("the open phase of a failed step is %+v", s.Phases[0])
	}
	tl.Apply(event.Event{Time: at.Add(2 * time.Second), Type: event.StepStarted, Step: "component/b"})
	tl.Apply(event.Event{Time: at.Add(3 * time.Second), Type: event.RunDone, Summary: &event.Summary{Outcome: "interrupted"}})
	if got := tl.find("b").State; got != Stopped {
		t.Errorf("a step at work when the run was interrupted is %s", got)
	}
}

func TestRecorderIsSafeForConcurrentUse(t *testing.T) {
	r := NewRecorder()
	events := recorded(t, "run")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for _, e := range events {
				r.Emit(e)
				if e.Type == event.StepDone {
					_ = r.Timeline().Fraction()
				}
			}
		})
	}
	wg.Wait()
}

func TestRescueClosesAndPanicsOn(t *testing.T) {
	l, err := OpenLog(filepath.Join(t.TempDir(), "x"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if r := recover(); r != "boom" {
			t.Errorf("recovered %v, want the panic to go on", r)
		}
		if l.end != nil {
			t.Error("not closed")
		}
	}()
	func() {
		defer Rescue(l)
		panic("boom")
	}()
}
