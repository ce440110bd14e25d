package report

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/llmbox-dev/llmbox/internal/event"
)

// screenAt builds the screen of a recorded run, as it was after that long.
func screenAt(t *testing.T, name string, after time.Duration, ascii bool, w, h int) *model {
	t.Helper()
	b := newBoard()
	events := recorded(t, name)
	at := events[0].Time.Add(after)
	for _, e := range events {
		if !e.Time.After(at) {
			b.apply(e)
		}
	}
	m := newModel(b, screenLook(ascii), "llmbox rehearse", func() time.Time { return at })
	m.hasKeys = true
	m.Update(tea.WindowSizeMsg{Width: w, Height: h})
	return m
}

func press(m *model, names ...string) {
	for _, name := range names {
		m.Update(tea.KeyPressMsg(keyOf(name)))
	}
}

func keyOf(name string) tea.Key {
	switch name {
	case "up":
		return tea.Key{Code: tea.KeyUp}
	case "down":
		return tea.Key{Code: tea.KeyDown}
	case "pgup":
		return tea.Key{Code: tea.KeyPgUp}
	case "pgdown":
		return tea.Key{Code: tea.KeyPgDown}
	case "home":
		return tea.Key{Code: tea.KeyHome}
	case "end":
		return tea.Key{Code: tea.KeyEnd}
	case "esc":
		return tea.Key{Code: tea.KeyEscape}
	case "ctrl+c":
		return tea.Key{Code: 'c', Mod: tea.ModCtrl}
	case "ctrl+z":
		return tea.Key{Code: 'z', Mod: tea.ModCtrl}
	}
	return tea.Key{Code: []rune(name)[0], Text: name}
}

func checkSize(t *testing.T, what, screen string, w, h int) {
	t.Helper()
	if screen == "" {
		return
	}
	lines := strings.Split(screen, "\n")
	if len(lines) > h {
		t.Errorf("%s: %d lines on a screen of %d", what, len(lines), h)
	}
	for i, line := range lines {
		if got := ansi.StringWidth(line); got > w {
			t.Errorf("%s: line %d is %d wide on a screen of %d: %q", what, i+1, got, w, ansi.Strip(line))
		}
	}
}

// Every size from nothing to wide, at every moment of a run, in every pane.
func TestScreenFitsEverySize(t *testing.T) {
	sizes := [][2]int{{40, 12}, {80, 24}, {200, 50}, {110, 30}, {59, 15}, {300, 100}}
	for _, w := range []int{0, 1, 2, 3, 5, 8, 11} {
		for _, h := range []int{0, 1, 2, 3, 5, 7} {
			sizes = append(sizes, [2]int{w, h}, [2]int{w * 9, h})
		}
	}
	for _, name := range []string{"run", "failed"} {
		for _, after := range []time.Duration{-time.Second, 9 * time.Second, time.Minute} {
			for _, ascii := range []bool{false, true} {
				if ascii && name == "failed" {
					continue
				}
				m := screenAt(t, name, after, ascii, 80, 24)
				for _, size := range sizes {
					m.Update(tea.WindowSizeMsg{Width: size[0], Height: size[1]})
					for _, key := range []string{"", "l", "up", "c", "pgdown", "?", "down", "esc", "down", "down", "pgdown", "end"} {
						if key != "" {
							press(m, key)
						}
						what := fmt.Sprintf("%s after %s at %dx%d, key %q, ascii %v", name, after, size[0], size[1], key, ascii)
						checkSize(t, what, m.View().Content, size[0], size[1])
					}
				}
			}
		}
	}
}

func TestScreenIsAsDrawn(t *testing.T) {
	for _, c := range []struct {
		golden, run string
		after       time.Duration
		w, h        int
		ascii       bool
		keys        []string
	}{
		{"screen-80x24.txt", "run", 9 * time.Second, 80, 24, false, nil},
		{"screen-40x12.txt", "run", 9 * time.Second, 40, 12, false, nil},
		{"screen-200x50-logs.txt", "run", 30 * time.Second, 200, 50, false, []string{"l"}},
		{"screen-80x24-failed.txt", "failed", 42*time.Second + 500*time.Millisecond, 80, 24, false, nil},
		{"screen-80x24-checks.txt", "run", 9 * time.Second, 80, 24, false, []string{"c"}},
		{"screen-80x24-ascii.txt", "run", 9 * time.Second, 80, 24, true, nil},
		{"screen-30x6.txt", "run", 9 * time.Second, 30, 6, false, nil},
		{"screen-help.txt", "run", 9 * time.Second, 60, 20, false, []string{"?"}},
	} {
		t.Run(c.golden, func(t *testing.T) {
			m := screenAt(t, c.run, c.after, c.ascii, c.w, c.h)
			press(m, c.keys...)
			var lines []string
			for _, line := range strings.Split(ansi.Strip(m.View().Content), "\n") {
				lines = append(lines, strings.TrimRight(line, " "))
			}
			got := strings.Join(lines, "\n") + "\n"
			golden(t, c.golden, got)
			if c.ascii && strings.IndexFunc(got, func(r rune) bool { return r > '~' }) >= 0 {
				t.Error("a glyph that a terminal without UTF-8 can't show")
			}
		})
	}
}

func TestScreenSaysWhatItShould(t *testing.T) {
	m := screenAt(t, "run", 9*time.Second, false, 80, 24)
	screen := ansi.Strip(m.View().Content)
	for _, want := range []string{
		"KEDA", "0 of 1 pods ready (ContainerCreating)", // component and newest reason
		"0:09",                   // total elapsed
		"0:07",                   // a step's elapsed
		"2 of 14 done",           // count
		"7 running",              // what runs
		"next: Model server",     // what is next
		"after GPU Operator",     // what a step waits for
		"33%",                    // the bar
		"12 checks, 1 warning",   // preflight
		"6.2 of 14.2 GiB",        // a counter
		"q stop", "l logs", "? ", // keys
	} {
		if !strings.Contains(screen, want) {
			t.Errorf("%q isn't on the screen:\n%s", want, screen)
		}
	}
}

func TestKeysAskToStop(t *testing.T) {
	asked := 0
	m := screenAt(t, "run", 9*time.Second, false, 80, 24)
	m.interrupt = func() { asked++ }
	press(m, "q")
	if asked != 1 {
		t.Fatalf("q asked %d times", asked)
	}
	if screen := ansi.Strip(m.View().Content); !strings.Contains(screen, "stopping after this step") {
		t.Errorf("the screen doesn't say that it stops:\n%s", screen)
	}
	press(m, "q")
	if asked != 1 {
		t.Error("a second q stopped the run in the middle of a step")
	}
	press(m, "ctrl+c")
	if asked != 2 {
		t.Errorf("Ctrl-C after q asked %d times in all, want 2", asked)
	}
}

func TestLogPaneScrollsAndFollows(t *testing.T) {
	m := screenAt(t, "run", 9*time.Second, false, 80, 20)
	press(m, "l")
	shows := func(s string) bool { return strings.Contains(ansi.Strip(m.View().Content), s) }
	add := func(text string) {
		m.board.apply(event.Event{Time: m.now(), Type: event.Log, Message: text})
	}
	add("newest one")
	if !shows("newest one") {
		t.Error("the pane doesn't show its end")
	}
	press(m, "home")
	if !shows("cluster: Kubernetes") {
		t.Error("home doesn't show the oldest line")
	}
	add("while reading")
	if shows("while reading") || !shows("cluster: Kubernetes") {
		t.Error("a new line tore the reader away")
	}
	press(m, "end")
	add("newest two")
	if !shows("newest two") {
		t.Error("after end, the pane doesn't follow")
	}
	press(m, "l")
	if shows("newest two") {
		t.Error("l doesn't close the pane")
	}
}

func TestLongListScrolls(t *testing.T) {
	m := screenAt(t, "run", 9*time.Second, false, 40, 12)
	shows := func(s string) bool { return strings.Contains(ansi.Strip(m.View().Content), s) }
	if shows("Preflight") || !shows("2 done") {
		t.Error("what is over isn't folded")
	}
	press(m, "down")
	if !shows("Preflight") {
		t.Error("scrolling doesn't show the whole list")
	}
	press(m, "pgdown", "pgdown", "pgdown")
	if !shows("Policies") {
		t.Error("the end of the list can't be reached")
	}
	press(m, "esc")
	if !shows("2 done") {
		t.Error("esc doesn't fold the list again")
	}
}

func TestLogPaneIsBounded(t *testing.T) {
	b := newBoard()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for i := range 3 * maxLogLines {
		b.apply(event.Event{Time: at, Type: event.Log, Message: fmt.Sprint(i)})
	}
	if n := len(b.log); n > maxLogLines*5/4 {
		t.Errorf("%d lines kept", n)
	}
	if b.dropped+len(b.log) != 3*maxLogLines {
		t.Errorf("%d dropped and %d kept of %d", b.dropped, len(b.log), 3*maxLogLines)
	}
}

// sgr matches the sequences that set a colour.
var sgr = regexp.MustCompile(`\x1b\[[0-9;:]*m`)

func colors(s string) []string {
	var out []string
	for _, seq := range sgr.FindAllString(s, -1) {
		for _, p := range strings.FieldsFunc(strings.TrimSuffix(strings.TrimPrefix(seq, "\x1b["), "m"), func(r rune) bool { return r == ';' }) {
			if len(p) == 2 && strings.ContainsAny(p[:1], "349") || len(p) == 3 && strings.HasPrefix(p, "10") {
				out = append(out, seq)
			}
		}
	}
	return out
}

// The whole way to the terminal, through Bubble Tea, since it is there that
// colours are taken out.
func TestNoColor(t *testing.T) {
	for name, c := range map[string]struct {
		env     map[string]string
		noColor bool
		colored bool
	}{
		"colour":     {map[string]string{}, false, true},
		"NO_COLOR=1": {map[string]string{"NO_COLOR": "1"}, false, false},
		"NO_COLOR=x": {map[string]string{"NO_COLOR": "x"}, false, false},
		"NO_COLOR=":  {map[string]string{"NO_COLOR": ""}, false, true},
		"--no-color": {map[string]string{}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			c.env["TERM"], c.env["LANG"] = "xterm-256color", "C.UTF-8"
			var out bytes.Buffer
			o := Options{Title: "llmbox", Stdout: &out, Terminal: true, NoColor: c.noColor, Getenv: func(k string) string { return c.env[k] }, Now: time.Now}
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			m := screenAt(t, "failed", 9*time.Second, false, 80, 24)
			p := tea.NewProgram(&closeAfterDraw{m}, tea.WithContext(ctx), tea.WithInput(nil), tea.WithOutput(&out),
				tea.WithWindowSize(80, 24), tea.WithColorProfile(o.profile()), tea.WithoutSignalHandler())
			if _, err := p.Run(); err != nil && !errors.Is(err, tea.ErrProgramKilled) {
				t.Fatal(err)
			}
			if !strings.Contains(ansi.Strip(out.String()), "Prometheus") {
				t.Fatalf("nothing was drawn: %q", out.String())
			}
			if got := colors(out.String()); (len(got) > 0) != c.colored {
				t.Errorf("colours: %q", got)
			}
		})
	}
}

// closeAfterDraw quits once the screen has its size and was drawn.
type closeAfterDraw struct{ *model }

func (c *closeAfterDraw) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	_, cmd := c.model.Update(msg)
	if _, ok := msg.(tick); ok && c.frame > 2 {
		return c, tea.Quit
	}
	return c, cmd
}
