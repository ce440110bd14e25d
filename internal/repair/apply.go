package repair

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/repair/record"
)

// saveDeadline bounds what is still done after a run was called off.
const saveDeadline = 5 * time.Second

// Event is a word on how the work goes.
type Event struct {
	// Action is its name; Index and Count begin at 1.
	Action       string
	Index, Count int
	// Text says what is done now, how it ended, or what a step left out was.
	Text string
	// End is set on the last event of an action.
	End *Outcome
}

// Result is how an action ended.
type Result string

// The results.
const (
	// Mended means that the steps were taken and the check holds.
	Mended Result = "mended"
	// Already means that there was nothing to do.
	Already Result = "already"
	// Broke means that a step or the check failed.
	Broke Result = "failed"
	// Left means that an action that it needs failed, or that the run was called off.
	Left Result = "left"
)

// Outcome is how an action ended and what it did until then.
type Outcome struct {
	Name     string   `json:"name"`
	Findings []string `json:"findings,omitempty"`
	Result   Result   `json:"result"`
	// Why is set for Broke and Left.
	Why string `json:"why,omitempty"`
	// Did are the steps that were taken.
	Did []string `json:"did,omitempty"`
	// Output is the end of what the program that failed said, without secrets.
	Output string `json:"output,omitempty"`
	// Err is the error behind Why.
	Err error `json:"-"`
}

// worker carries actions out.
type worker struct {
	machine  *Machine
	record   *record.Record
	stop     <-chan struct{}
	progress func(Event)
}

// Apply carries the actions out one after the other and keeps the record. A closed
// stop lets the step at hand finish and begins no other; the end of the context
// stops at once. An action that fails leaves those that don't need it untouched;
// the error is of the run itself: the record can't be written, or it was called off.
func Apply(ctx context.Context, m *Machine, actions []Action, r *record.Record, stop <-chan struct{}, progress func(Event)) ([]Outcome, error) {
	w := &worker{machine: m, record: r, stop: stop, progress: progress}
	if w.progress == nil {
		w.progress = func(Event) {}
	}
	var outcomes []Outcome
	failed := map[string]bool{}
	for i, a := range actions {
		out := Outcome{Name: a.Name, Findings: a.Findings}
		say := func(text string) { w.progress(Event{Action: a.Name, Index: i + 1, Count: len(actions), Text: text}) }
		err := w.calledOff(ctx)
		needs := slices.IndexFunc(a.After, func(n string) bool { return failed[n] })
		switch {
		case err != nil:
			out.Result, out.Err, out.Why = Left, err, "called off"
		case needs >= 0:
			out.Result, out.Why = Left, a.After[needs]+" did not work"
		default:
			w.act(ctx, a, &out, say)
		}
		failed[a.Name] = out.Result == Broke || out.Result == Left
		outcomes = append(outcomes, out)
		w.progress(Event{Action: a.Name, Index: i + 1, Count: len(actions), Text: string(out.Result), End: &out})
		if errors.Is(out.Err, errSaving) {
			return outcomes, out.Err
		}
	}
	if err := w.calledOff(ctx); err != nil {
		return outcomes, fmt.Errorf("repairing: %w", err)
	}
	return outcomes, nil
}

// errSaving wraps the errors of the record: what can't be recorded is not done.
var errSaving = errors.New("nothing is changed that can't be recorded")

// calledOff says whether to begin no further step.
func (w *worker) calledOff(ctx context.Context) error {
	select {
	case <-w.stop:
		return context.Canceled
	default:
		return ctx.Err()
	}
}

// act carries one action out.
func (w *worker) act(ctx context.Context, a Action, out *Outcome, say func(string)) {
	say(a.Title)
	if !a.Always && w.mended(ctx, a) {
		out.Result = Already
		return
	}
	entry := w.record.Begin(a.Name, a.Title, a.Findings, a.Undo)
	err := w.save()
	if err == nil {
		err = w.steps(ctx, a, entry, out, say)
	}
	if err == nil {
		say("checking")
		err = w.verify(ctx, a)
	}
	out.Result, entry.State = Mended, record.Done
	if err != nil {
		out.Result, out.Err, out.Why = Broke, err, w.machine.hidden(err.Error())
		entry.State, entry.Error = record.Failed, out.Why
		if w.calledOff(ctx) != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
			out.Result, entry.State = Left, record.Started
		}
	}
	if saving := w.save(); saving != nil {
		out.Result, out.Err, out.Why = Broke, errors.Join(err, saving), saving.Error()
	}
}

func (w *worker) save() error {
	if err := w.record.Save(); err != nil {
		return fmt.Errorf("%w: %w", errSaving, err)
	}
	return nil
}

// mended says whether all is as it shall be before anything was done.
func (w *worker) mended(ctx context.Context, a Action) bool {
	for _, s := range a.Steps {
		if s.Write != nil && s.Unless == nil {
			if data, err := w.machine.files.ReadFile(ctx, s.Write.Path, fileLimit); err != nil || string(data) != s.Write.Content {
				return false
			}
		}
	}
	for _, c := range a.Verify {
		if ok, err := w.holds(ctx, c); !ok || err != nil {
			return false
		}
	}
	return len(a.Verify) > 0
}

func (w *worker) steps(ctx context.Context, a Action, entry *record.Repaired, out *Outcome, say func(string)) error {
	// A condition is asked once: writing the list of a repository must not make the
	// step behind it needless.
	answers := map[*Check]bool{}
	for _, s := range a.Steps {
		if err := w.calledOff(ctx); err != nil {
			return fmt.Errorf("before %q: %w", s.short(), err)
		}
		if s.Unless != nil {
			held, asked := answers[s.Unless]
			if !asked {
				// Where it can't be told, the step is taken.
				held, _ = w.holds(ctx, *s.Unless)
				answers[s.Unless] = held
			}
			if held {
				say("not needed: " + s.short())
				continue
			}
		}
		say(s.short())
		said, err := w.step(ctx, s, entry)
		if err != nil {
			out.Output = said
			return err
		}
		out.Did = append(out.Did, s.Shown())
		if err := w.save(); err != nil {
			return err
		}
	}
	return nil
}

// step takes one step. The record is written before anything changes.
func (w *worker) step(ctx context.Context, s Step, entry *record.Repaired) (said string, err error) {
	switch {
	case s.Write != nil:
		return "", w.write(ctx, *s.Write, entry)
	case s.Link != nil:
		return "", w.link(ctx, *s.Link, entry)
	case s.Download != nil:
		return "", w.download(ctx, *s.Download, entry)
	case s.Run != nil:
		entry.Ran(s.Shown())
		return w.run(ctx, *s.Run, entry)
	case s.Kube != nil:
		entry.Ran(s.Shown())
		return "", w.kube(ctx, *s.Kube)
	}
	return "", nil
}

func (w *worker) write(ctx context.Context, f Write, entry *record.Repaired) error {
	before, err := w.machine.before(ctx, f.Path)
	if err != nil {
		return err
	}
	if before.State != record.BeforeAbsent && (before.State != record.BeforeFile || !strings.HasPrefix(string(before.Content), marker)) {
		return fmt.Errorf("writing %s: %w", f.Path, ErrNotOurs)
	}
	if before.State == record.BeforeFile && string(before.Content) == f.Content && before.Mode == f.Mode {
		return nil
	}
	if f.Elsewhere != nil {
		if name, err := w.elsewhere(ctx, *f.Elsewhere, f.Path); err != nil {
			return err
		} else if name != "" {
			return fmt.Errorf("writing %s: %w: %s", f.Path, ErrElsewhere, name)
		}
	}
	return w.put(ctx, f.Path, f.Mode, []byte(f.Content), before, entry)
}

// put records and writes a file.
func (w *worker) put(ctx context.Context, name string, mode fs.FileMode, content []byte, before record.Before, entry *record.Repaired) error {
	sum := sha256.Sum256(content)
	entry.Wrote(name, before, hex.EncodeToString(sum[:]))
	if err := w.save(); err != nil {
		return err
	}
	return w.machine.write(ctx, name, mode, content)
}

// elsewhere names a file of the patterns that holds the text outside comments.
func (w *worker) elsewhere(ctx context.Context, e Elsewhere, but string) (string, error) {
	for _, pattern := range e.Patterns {
		names, _, err := w.machine.files.Glob(ctx, pattern)
		if err != nil {
			return "", fmt.Errorf("looking for %s: %w", pattern, err)
		}
		for _, name := range names {
			if name == but {
				continue
			}
			data, err := w.machine.files.ReadFile(ctx, name, fileLimit)
			if err != nil {
				return "", fmt.Errorf("reading %s: %w", name, err)
			}
			for line := range strings.Lines(string(data)) {
				if !strings.HasPrefix(strings.TrimSpace(line), "#") && strings.Contains(line, e.Text) {
					return name, nil
				}
			}
		}
	}
	return "", nil
}

func (w *worker) link(ctx context.Context, l Link, entry *record.Repaired) error {
	before, err := w.machine.before(ctx, l.Path)
	switch {
	case err != nil:
		return err
	case before.State == record.BeforeLink && before.Target == l.Target:
		return nil
	case before.State != record.BeforeAbsent:
		return fmt.Errorf("linking %s: %w", l.Path, ErrNotOurs)
	}
	entry.Wrote(l.Path, before, "")
	if err := w.save(); err != nil {
		return err
	}
	return w.machine.link(ctx, l.Path, l.Target)
}

func (w *worker) download(ctx context.Context, d Download, entry *record.Repaired) error {
	before, err := w.machine.before(ctx, d.Path)
	if err != nil {
		return err
	}
	// A key in armour has no room for a mark of ours; the right key is as good.
	if before.State == record.BeforeFile && checkKey(before.Content, d.Fingerprint) == nil {
		return nil
	}
	if before.State != record.BeforeAbsent {
		return fmt.Errorf("writing %s: %w", d.Path, ErrNotOurs)
	}
	data, err := w.machine.download(ctx, d.URL)
	if err != nil {
		return err
	}
	if err := checkKey(data, d.Fingerprint); err != nil {
		return fmt.Errorf("fetching %s: %w", d.URL, err)
	}
	return w.put(ctx, d.Path, d.Mode, data, before, entry)
}

func (w *worker) run(ctx context.Context, r Run, entry *record.Repaired) (string, error) {
	name := strings.Join(r.Argv, " ")
	if err := w.waitForLock(ctx, r); err != nil {
		return "", err
	}
	if r.Guard != nil {
		if said, err := w.guard(ctx, *r.Guard, r.Environment); err != nil {
			return said, err
		}
	}
	for _, t := range r.Touches {
		before, err := w.machine.before(ctx, t)
		if err != nil {
			return "", err
		}
		entry.Wrote(t, before, "")
	}
	for _, s := range r.Settings {
		entry.Set(s.Key, s.Value, w.setting(ctx, s.Key))
	}
	was, err := w.versions(ctx, r.Packages)
	if err != nil {
		return "", err
	}
	if err := w.save(); err != nil {
		return "", err
	}
	got, err := w.machine.run(ctx, r.Argv, r.Environment, time.Duration(r.DeadlineSeconds)*time.Second)
	if r.Packages != nil {
		// Also after a failure: what came along until then stays.
		asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveDeadline)
		now, listErr := w.versions(asking, r.Packages)
		cancel()
		err = errors.Join(err, listErr)
		for _, n := range r.Packages.Names {
			if now[n] != "" && now[n] != was[n] {
				entry.Installed(n, now[n], was[n])
			}
		}
	}
	switch {
	case err != nil && r.Lenient && w.calledOff(ctx) == nil:
		return "", nil
	case err != nil:
		return got.Text, err
	case got.Exit != 0 && !r.Lenient:
		return got.Text, fmt.Errorf("running %s: %w: status %d", name, ErrProgram, got.Exit)
	}
	return "", nil
}

// waitForLock waits until nobody holds the lock of the package manager. Where it
// can't be looked at, the program itself will tell.
func (w *worker) waitForLock(ctx context.Context, r Run) error {
	if r.Lock == "" {
		return nil
	}
	waiting, cancel := context.WithTimeout(ctx, time.Duration(r.LockSeconds)*time.Second)
	defer cancel()
	for {
		held, err := w.machine.locked(waiting, r.Lock)
		if err != nil || !held {
			return ctx.Err()
		}
		if err := w.pause(waiting, time.Second); err != nil {
			return fmt.Errorf("waiting for %s: %w", r.Lock, err)
		}
	}
}

func (w *worker) pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-w.stop:
		return context.Canceled
	case <-ctx.Done():
		return ctx.Err()
	}
}

// setting reads a kernel setting; empty where it can't be read.
func (w *worker) setting(ctx context.Context, key string) string {
	data, err := w.machine.files.ReadHead(ctx, settingPath(key), 4096)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// verify asks until each check holds or its time is over.
func (w *worker) verify(ctx context.Context, a Action) error {
	for _, c := range a.Verify {
		until := time.Now().Add(time.Duration(c.WithinSeconds) * time.Second)
		for {
			ok, err := w.holds(ctx, c)
			if ok && err == nil {
				break
			}
			if !time.Now().Before(until) {
				return errors.Join(fmt.Errorf("%w: %s", ErrNotMended, c.What), err)
			}
			if err := w.pause(ctx, time.Second); err != nil {
				return fmt.Errorf("checking whether %s: %w", c.What, err)
			}
		}
	}
	return nil
}
