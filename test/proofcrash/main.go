// Proofcrash kills installs with SIGKILL and shows that a plain re-run ends in
// the state of an undisturbed one.
//
// A trial removes a component (or starts from a bare cluster), runs
// `llmbox install`, kills it at a point chosen by its events, runs it again and
// compares every object of the cluster with what an undisturbed install left.
// Points are stratified over the kinds of step: see strata.go. One row per trial
// is appended to docs/proofs/crash.jsonl.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
	"github.com/llmbox-dev/llmbox/test/internal/labproc"
	"github.com/llmbox-dev/llmbox/test/proofcrash/snapshot"
)

// errDiffers means that a trial ended in another state than an undisturbed run.
var errDiffers = errors.New("not every trial ended as an undisturbed run")

// aims is how often a kill is tried whose moment the run was quicker than.
const aims = 4

// mostDifferences is how many differences a row names.
const mostDifferences = 12

// The outcomes of a trial; same alone is good.
const (
	same       = "same"
	different  = "different"
	rerunError = "rerun failed"
	notKilled  = "not killed"
	broken     = "trial broken"
)

// row is one line of crash.jsonl.
type row struct {
	Time    string `json:"time"`
	Commit  string `json:"commit"`
	Seed    uint64 `json:"seed"`
	Trial   int    `json:"trial"`
	Stratum string `json:"stratum"`
	// Place is where the kill was meant to be, KilledAt the last event before it.
	Place         string   `json:"place"`
	KilledAt      string   `json:"killed_at,omitempty"`
	KilledAfterMS int64    `json:"killed_after_ms"`
	Outcome       string   `json:"outcome"`
	RerunMS       int64    `json:"rerun_ms"`
	Diff          []string `json:"diff,omitempty"`
	Error         string   `json:"error,omitempty"`
}

// series of trials with what they share.
type proof struct {
	root, work string
	keep       string
	program    string
	port       int
	seed       uint64
	commit     string
	out        io.Writer
	rows       io.Writer
	table      *component.Table

	lab  *labproc.Lab
	labs int
	// spoiled says that a trial left the kept cluster in another state.
	spoiled   bool
	reference snapshot.State
	usual     map[string]time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "proofcrash:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	root, err := labproc.Root()
	if err != nil {
		return err
	}
	flags := flag.NewFlagSet("proofcrash", flag.ContinueOnError)
	n := flags.Int("trials", len(points()), "`number` of kills")
	seed := flags.Uint64("seed", 1, "what the moments inside steps are drawn from")
	first := flags.Int("first", 1, "`number` of the trial to begin with, to go on with a series of the same seed")
	only := flags.String("only", "", "one `stratum`: release, vault, ready, journal, lock, manifests, crds or secrets")
	rows := flags.String("rows", filepath.Join(root, "docs", "proofs", "crash.jsonl"), "`file` to append to")
	keep := flags.String("events", "", "`directory` to keep the events of every run in (default: only of trials that fail)")
	program := flags.String("llmbox", filepath.Join(root, "bin", "llmbox"), "the `program` to kill")
	if err := flags.Parse(args); err != nil {
		return err
	}
	trials := series(*n, *only, *seed)
	if *first < 1 || *first > len(trials) {
		return fmt.Errorf("no trial %d of stratum %q", *first, *only)
	}
	trials = trials[*first-1:]
	p := &proof{root: root, seed: *seed, out: out, keep: *keep, program: *program}
	if p.table, err = component.LoadTable(os.DirFS(filepath.Join(root, "embed"))); err != nil {
		return err
	}
	if p.commit, err = labproc.Commit(ctx); err != nil {
		return err
	}
	if p.port, err = labproc.FreePort(ctx); err != nil {
		return err
	}
	if p.work, err = os.MkdirTemp("", "llmbox-crash-"); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.work)) }()
	if p.keep == "" {
		p.keep = filepath.Join(os.TempDir(), "llmbox-crash-events")
	}
	if err := os.MkdirAll(p.keep, 0o750); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	file, err := os.OpenFile(*rows, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644) // #nosec G302 G304 -- a public record, the file the user named
	if err != nil {
		return fmt.Errorf("opening the record: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	p.rows = file
	defer func() { err = errors.Join(err, p.stopLab()) }()
	return p.all(ctx, trials)
}

func (p *proof) all(ctx context.Context, trials []trial) error {
	if err := p.undisturbed(ctx); err != nil {
		return err
	}
	good := 0
	for _, t := range trials {
		r := p.try(ctx, t)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		raw, err := json.Marshal(r)
		if err != nil {
			return fmt.Errorf("encoding a row: %w", err)
		}
		if _, err := fmt.Fprintf(p.rows, "%s\n", raw); err != nil {
			return fmt.Errorf("writing a row: %w", err)
		}
		p.say("%2d/%d  %-10s %-42s killed after %6.1f s at %-46s re-run %6.1f s  %s", t.Number, trials[len(trials)-1].Number, r.Stratum, r.Place,
			float64(r.KilledAfterMS)/1000, r.KilledAt, float64(r.RerunMS)/1000, r.Outcome)
		for _, d := range r.Diff {
			p.say("       %s", d)
		}
		if r.Error != "" {
			p.say("       %s", r.Error)
		}
		if r.Outcome == same {
			good++
		} else {
			p.spoiled = true
		}
	}
	p.say("%d of %d ended as the undisturbed run", good, len(trials))
	if good < len(trials) {
		return fmt.Errorf("%w: %d of %d; events of the runs: %s", errDiffers, len(trials)-good, len(trials), p.keep)
	}
	return nil
}

func (p *proof) say(format string, args ...any) { _, _ = fmt.Fprintf(p.out, format+"\n", args...) }

// undisturbed installs once on a fresh lab and keeps what it left as the measure.
func (p *proof) undisturbed(ctx context.Context) error {
	if err := p.freshLab(ctx); err != nil {
		return err
	}
	a, err := cutoff.Follow(ctx, p.command(), cutoff.EventsFile(p.keep, "undisturbed"), nil, nil)
	if err != nil || a.Exit != 0 {
		return errors.Join(fmt.Errorf("the undisturbed install ended with %d: %s", a.Exit, a.Error), err)
	}
	client, err := connect(ctx, p.lab.Kubeconfig)
	if err != nil {
		return err
	}
	if p.reference, err = cutoff.Quiet(ctx, client); err != nil {
		return err
	}
	p.usual = a.Steps
	p.say("undisturbed install: %.1f s, %d objects", a.Took.Seconds(), len(p.reference))
	return nil
}

// freshLab ends the lab there is and starts another on the same gateway port, so
// that both clusters are asked for the same box.
func (p *proof) freshLab(ctx context.Context) error {
	if err := p.stopLab(); err != nil {
		return err
	}
	p.labs++
	lab, err := labproc.Start(ctx, labproc.Options{
		Program: filepath.Join(p.root, "bin", "llmbox-lab"), Dir: p.work, Name: fmt.Sprintf("lab-%d", p.labs),
		GatewayPort: p.port, Log: io.Discard,
	})
	if err != nil {
		return err
	}
	p.lab = lab
	return nil
}

func (p *proof) stopLab() error {
	if p.lab == nil {
		return nil
	}
	lab := p.lab
	p.lab = nil
	return lab.Stop()
}

func (p *proof) try(ctx context.Context, t trial) row {
	r := row{
		Time: time.Now().UTC().Format(time.RFC3339), Commit: p.commit, Seed: p.seed, Trial: t.Number,
		Stratum: t.Stratum, Place: string(t.Place) + " " + t.Step, Outcome: broken,
	}
	name := fmt.Sprintf("trial-%02d", t.Number)
	var killed cutoff.Account
	for aim := 0; ; aim++ {
		if aim == aims {
			r.Outcome = notKilled
			return r
		}
		if err := p.prepare(ctx, t.Reset); err != nil {
			r.Error = err.Error()
			return r
		}
		var err error
		if killed, err = cutoff.Follow(ctx, p.command(), cutoff.EventsFile(p.keep, name+"-killed"), &cutoff.Aim{Step: t.Step, Place: t.Place, Fraction: t.Fraction}, p.usual); err != nil {
			r.Error = err.Error()
			return r
		}
		// A step takes longer in a whole install than where little is to do: what
		// it took just now is the better measure.
		took, late := killed.Steps[t.Step]
		if late {
			p.usual[t.Step] = took
		}
		if killed.Killed && (t.Place != cutoff.Inside || !late) {
			break
		}
	}
	r.KilledAt, r.KilledAfterMS = killed.At, killed.KilledAfter.Milliseconds()

	again, err := cutoff.Follow(ctx, p.command(), cutoff.EventsFile(p.keep, name+"-again"), nil, nil)
	r.RerunMS = again.Took.Milliseconds()
	if err != nil || again.Exit != 0 {
		r.Outcome, r.Error = rerunError, fmt.Sprintf("exit status %d: %s", again.Exit, again.Error)
		return r
	}
	client, err := connect(ctx, p.lab.Kubeconfig)
	if err != nil {
		r.Error = err.Error()
		return r
	}
	diff, err := cutoff.Settled(ctx, client, p.reference)
	if err != nil {
		r.Error = err.Error()
		return r
	}
	if len(diff) > 0 {
		r.Outcome = different
		r.Diff = diff[:min(len(diff), mostDifferences)]
		return r
	}
	r.Outcome = same
	return r
}

// prepare brings the cluster to where the trial begins: a bare one, or the kept
// one without a part of it. A cluster that a former trial left in another state
// would spoil the next, so it is replaced.
func (p *proof) prepare(ctx context.Context, want reset) error {
	if want.cluster {
		return p.freshLab(ctx)
	}
	if p.spoiled {
		if err := p.freshLab(ctx); err != nil {
			return err
		}
		a, err := cutoff.Follow(ctx, p.command(), cutoff.EventsFile(p.keep, "afresh"), nil, nil)
		if err != nil || a.Exit != 0 {
			return errors.Join(fmt.Errorf("installing afresh ended with %d: %s", a.Exit, a.Error), err)
		}
		p.spoiled = false
	}
	client, err := connect(ctx, p.lab.Kubeconfig)
	if err != nil {
		return err
	}
	r, err := newResetter(client, p.table)
	if err != nil {
		return err
	}
	if err := r.apply(ctx, want); err != nil {
		return fmt.Errorf("resetting the cluster: %w", err)
	}
	return nil
}
