package report

import (
	"io"
	"os"
	"strings"
	"time"

	"github.com/charmbracelet/x/term"
	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/event"
)

// Format is the value of --output.
type Format string

// The formats of --output.
const (
	FormatText Format = "text"
	FormatJSON Format = "json"
)

// Mode is the renderer that suits an output.
type Mode string

// The modes.
const (
	// ModeScreen redraws a terminal screen.
	ModeScreen Mode = "screen"
	// ModeLines writes plain lines.
	ModeLines Mode = "lines"
	// ModeJSON writes NDJSON on stdout and plain lines on stderr.
	ModeJSON Mode = "json"
)

// Options says what the output goes to and what was asked for.
type Options struct {
	// Title names the command, such as "llmbox install".
	Title string
	// Version of llmbox, for the account.
	Version        string
	Stdout, Stderr io.Writer
	// Terminal says that Stdout is a terminal which is ours to draw on; see
	// IsTerminal.
	Terminal bool
	// Getenv reads the environment; nil means that it is empty.
	Getenv func(string) string
	// NoColor is --no-color.
	NoColor bool
	// Format is --output; empty means text.
	Format Format
	// Keys is where keys are read from, such as an opened /dev/tty; nil means
	// that none are, and that Ctrl-C comes as a signal.
	Keys io.Reader
	// Interrupt is called, on a goroutine of its own, each time the person at
	// the keyboard asks to stop: the first call means after the current step,
	// the second one at once.
	Interrupt func()
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Renderer shows events to a person or a program.
type Renderer interface {
	event.Sink
	// Close gives the terminal back and writes the final account. It may be
	// called more than once and from any goroutine, and must be called before
	// the process ends.
	Close() error
}

// Mode chooses the renderer. Redrawing needs a terminal and a TERM that can do
// it, and is never done where a CI system collects the output; --output json
// wins over everything. NO_COLOR has no say in it: it only removes colour.
func (o Options) Mode() Mode {
	switch {
	case o.Format == FormatJSON:
		return ModeJSON
	case !o.Terminal, o.env("TERM") == "", o.env("TERM") == "dumb", truthy(o.env("CI")):
		return ModeLines
	}
	return ModeScreen
}

// New starts the renderer that suits the output.
func New(o Options) Renderer {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Stderr == nil {
		o.Stderr = io.Discard
	}
	switch o.Mode() {
	case ModeJSON:
		return both{NewJSON(o.Stdout), NewLines(o.Stderr, LinesOptions{Title: o.Title})}
	case ModeScreen:
		return startScreen(o)
	case ModeLines:
	}
	return NewLines(o.Stdout, LinesOptions{Title: o.Title, Account: true})
}

func (o Options) env(name string) string {
	if o.Getenv == nil {
		return ""
	}
	return o.Getenv(name)
}

func (o Options) colorless() bool { return o.NoColor || o.env("NO_COLOR") != "" }

// unicodeOK says whether the locale is UTF-8 and the terminal has the glyphs.
// The console of the Linux kernel has no Braille and no check mark.
func (o Options) unicodeOK() bool {
	if o.env("TERM") == "linux" {
		return false
	}
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := strings.ToLower(o.env(name)); v != "" {
			return strings.Contains(v, "utf-8") || strings.Contains(v, "utf8")
		}
	}
	return false
}

// truthy takes CI=false and CI=0 at their word.
func truthy(v string) bool {
	switch strings.ToLower(v) {
	case "", "0", "false", "no":
		return false
	}
	return true
}

// IsTerminal says whether f is a terminal that is ours to draw on: a job in the
// background has one too, but would be stopped for touching it.
func IsTerminal(f *os.File) bool {
	if !term.IsTerminal(f.Fd()) {
		return false
	}
	fd := int(f.Fd())
	foreground, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	// A terminal that isn't our controlling one can't stop us.
	return err != nil || foreground == unix.Getpgrp()
}

// OpenKeys opens the terminal to read keys from, whatever stdin is: in
// `curl … | sh` stdin is the script. It returns nil where there is no terminal
// or where it isn't ours.
func OpenKeys() *os.File {
	f, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	if !IsTerminal(f) {
		_ = f.Close()
		return nil
	}
	return f
}

// Rescue is for `defer report.Rescue(r)` at the top of every goroutine: a panic
// gives the terminal back before it takes the process down.
func Rescue(c io.Closer) {
	if r := recover(); r != nil {
		_ = c.Close()
		panic(r)
	}
}

// both is a renderer made of two.
type both struct{ program, person Renderer }

func (b both) Emit(e event.Event) {
	b.program.Emit(e)
	b.person.Emit(e)
}

// Close returns the first one's error: what the program reads is the output
// that was asked for.
func (b both) Close() error {
	err := b.program.Close()
	_ = b.person.Close()
	return err
}
