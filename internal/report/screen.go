package report

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/colorprofile"
	"github.com/charmbracelet/x/term"
	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/event"
)

// closeWait bounds how long the screen may take to give the terminal back. A
// terminal that takes no output (Ctrl-S) must not keep the process alive.
const closeWait = 2 * time.Second

// errScreenStuck says that the terminal took no more output.
var errScreenStuck = errors.New("the terminal takes no output")

// screen draws the run on a terminal. When drawing ends before the run does
// (the line hung up, or drawing failed), it goes on in plain lines.
type screen struct {
	o       Options
	look    look
	profile colorprofile.Profile
	board   *board
	program *tea.Program
	// saved is the terminal's state as we found it, for the case that Bubble
	// Tea can't put it back.
	saved    *term.State
	keysFile *os.File
	hangup   chan os.Signal
	suspend  chan os.Signal
	ended    chan struct{}

	mu       sync.Mutex
	closing  bool
	fallback *Lines
	once     sync.Once
	closeErr error
}

func startScreen(o Options) *screen {
	s := &screen{
		o: o, look: screenLook(!o.unicodeOK()), profile: o.profile(), board: newBoard(),
		hangup: make(chan os.Signal, 1), suspend: make(chan os.Signal, 1), ended: make(chan struct{}),
	}
	m := newModel(s.board, s.look, o.Title, o.Now)
	m.hasKeys = o.Keys != nil
	if o.Interrupt != nil {
		m.interrupt = func() { go o.Interrupt() }
	}
	m.suspend = func() {
		// The signal's own way, so that there is one.
		select {
		case s.suspend <- syscall.SIGTSTP:
		default:
		}
	}
	if f, ok := o.Keys.(*os.File); ok && term.IsTerminal(f.Fd()) {
		s.keysFile = f
		if state, err := term.GetState(f.Fd()); err == nil {
			s.saved = state
		}
	}
	s.program = tea.NewProgram(m,
		tea.WithInput(o.Keys), tea.WithOutput(o.Stdout), tea.WithoutSignalHandler(),
		tea.WithColorProfile(s.profile), tea.WithFPS(30))
	signal.Notify(s.hangup, syscall.SIGHUP)
	signal.Notify(s.suspend, syscall.SIGTSTP)
	go s.run()
	go s.signals()
	return s
}

func (s *screen) run() {
	defer close(s.ended)
	_, _ = s.program.Run()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return
	}
	s.restore()
	s.fallback = NewLines(s.o.Stdout, LinesOptions{Title: s.o.Title, Account: true})
	s.board.mu.Lock()
	defer s.board.mu.Unlock()
	s.fallback.t = s.board.t.clone()
}

func (s *screen) signals() {
	for {
		select {
		case <-s.hangup:
			s.program.Kill()
		case <-s.suspend:
			s.stop()
		case <-s.ended:
			return
		}
	}
}

// stop gives the terminal back and stops the process, as SIGTSTP would if
// nobody had caught it, until somebody continues it. It sends SIGSTOP because
// the Go runtime doesn't bring a signal's default action back once it was
// caught; to the whole group, because in `curl … | sh` the shell belongs to the
// job.
func (s *screen) stop() {
	if !canSuspend() {
		return
	}
	if err := s.program.ReleaseTerminal(); err != nil {
		return
	}
	// Another thread may be the one that takes the signal, so that this one
	// still runs for a moment: only SIGCONT says that it is over.
	awake := make(chan os.Signal, 1)
	signal.Notify(awake, unix.SIGCONT)
	defer signal.Stop(awake)
	if err := unix.Kill(0, unix.SIGSTOP); err == nil {
		<-awake
	}
	_ = s.program.RestoreTerminal()
}

// Emit implements event.Sink. It only notes the event; drawing happens when the
// terminal is ready for it.
func (s *screen) Emit(e event.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.board.apply(e)
	if s.fallback != nil {
		s.fallback.Emit(e)
	}
}

// Close implements Renderer.
func (s *screen) Close() error {
	s.once.Do(func() { s.closeErr = s.close() })
	return s.closeErr
}

func (s *screen) close() error {
	s.mu.Lock()
	s.closing = true
	fallback := s.fallback
	s.mu.Unlock()
	defer signal.Stop(s.suspend)
	// The hangup handler stays: whoever closes has work left to do, and a line
	// that drops meanwhile is no reason to die in the middle of it.
	if fallback != nil {
		return fallback.Close()
	}
	go s.program.Quit()
	select {
	case <-s.ended:
	case <-time.After(closeWait):
		go s.program.Kill()
		s.restore()
		return errScreenStuck
	}
	s.restore()
	return s.last()
}

// restore puts the terminal's modes back as they were found. Bubble Tea did it
// already unless it crashed; doing it twice is harmless.
func (s *screen) restore() {
	if s.keysFile != nil && s.saved != nil {
		_ = term.Restore(s.keysFile.Fd(), s.saved)
	}
}

// last writes the final account below what was on the terminal before.
func (s *screen) last() error {
	s.board.mu.Lock()
	defer s.board.mu.Unlock()
	if len(s.board.t.Steps) == 0 && len(s.board.t.Findings) == 0 {
		return nil
	}
	width := textWidth
	if f, ok := s.o.Stdout.(term.File); ok {
		if w, _, err := term.GetSize(f.Fd()); err == nil && w > 0 {
			width = w
		}
	}
	out := io.Writer(&colorprofile.Writer{Forward: s.o.Stdout, Profile: s.profile})
	if s.o.colorless() {
		out = &colorprofile.Writer{Forward: s.o.Stdout, Profile: colorprofile.NoTTY}
	}
	lines := s.board.t.account(s.look, Meta{Title: s.o.Title, Version: s.o.Version}, min(width, 120), false)
	if _, err := io.WriteString(out, strings.Join(lines, "\n")+"\n"); err != nil {
		return fmt.Errorf("writing report: %w", err)
	}
	return nil
}

// profile is how many colours the terminal has, by its own account.
func (o Options) profile() colorprofile.Profile {
	if o.colorless() {
		return colorprofile.ASCII
	}
	var environ []string
	for _, name := range []string{"TERM", "COLORTERM", "TERM_PROGRAM", "WT_SESSION", "GOOGLE_CLOUD_SHELL"} {
		if v := o.env(name); v != "" {
			environ = append(environ, name+"="+v)
		}
	}
	return colorprofile.Env(environ)
}
