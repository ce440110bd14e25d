// Proofmachine shows on an empty machine of the lab that an install can be cut off
// anywhere and that a box can be taken off without a trace.
//
// `proofmachine kill` installs from nothing, kills llmbox (or cuts the machine's power)
// at a point chosen by its events, runs the same command again and compares files,
// service and objects with what an undisturbed install left. `proofmachine trace` cuts
// installs and uninstalls off, uninstalls, and compares the machine with what it was
// before. Points are stratified over the kinds of step: see strata.go. One row per trial
// is appended to docs/proofs/kill.jsonl or trace.jsonl.
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
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
	"github.com/llmbox-dev/llmbox/test/internal/labproc"
	"github.com/llmbox-dev/llmbox/test/internal/trace"
	"github.com/llmbox-dev/llmbox/test/proofcrash/snapshot"
)

// errDiffers means that a trial ended otherwise than it should.
var errDiffers = errors.New("not every trial ended as it should")

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

// row is one line of kill.jsonl or trace.jsonl.
type row struct {
	Time   string `json:"time"`
	Commit string `json:"commit"`
	Seed   uint64 `json:"seed"`
	Trial  int    `json:"trial"`
	// Kills says what was cut off: llmbox's install or uninstall, or the whole machine.
	Kills string `json:"kills"`
	// Chain is the number of the first of several kills of one growing install: the run
	// after each is cut off by the next, that after the last has to come to the end.
	Chain int `json:"chain,omitempty"`
	// Place is where the kill was meant to be, KilledAt the last event before it.
	Place         string `json:"place"`
	KilledAt      string `json:"killed_at,omitempty"`
	KilledAfterMS int64  `json:"killed_after_ms,omitempty"`
	Outcome       string `json:"outcome"`
	// RerunMS is how long the install or uninstall after the kill took.
	RerunMS int64    `json:"rerun_ms"`
	Diff    []string `json:"diff,omitempty"`
	Error   string   `json:"error,omitempty"`
}

// proof is a series of trials with what they share.
type proof struct {
	root, work, keep string
	seed             uint64
	commit           string
	out, rows        io.Writer

	box *box
	// before is the empty machine, end and objects what an undisturbed install left.
	before, end trace.State
	objects     snapshot.State
	// usual is how long each step takes.
	usual map[string]time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "proofmachine:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	root, err := labproc.Root()
	if err != nil {
		return err
	}
	what := ""
	if len(args) > 0 {
		what, args = args[0], args[1:]
	}
	all := map[string]func(uint64) []trial{"kill": kills, "trace": traces}[what]
	if all == nil {
		return errors.New("proofmachine kill or proofmachine trace, then flags")
	}
	flags := flag.NewFlagSet("proofmachine "+what, flag.ContinueOnError)
	seed := flags.Uint64("seed", 1, "what the moments inside steps are drawn from")
	first := flags.Int("first", 1, "`number` of the trial to begin with, to go on with a series of the same seed")
	last := flags.Int("last", 0, "`number` of the trial to end with (default: the last)")
	only := flags.String("only", "", "`numbers` of the trials to make, with commas between, instead of a range")
	chain := flags.Int("chain", 5, "how many `kills` of llmbox one growing install gets; 1 for each in one of its own")
	rows := flags.String("rows", filepath.Join(root, "docs", "proofs", what+".jsonl"), "`file` to append to")
	keep := flags.String("events", filepath.Join(os.TempDir(), "llmbox-"+what+"-events"), "`directory` for the events of every run")
	if err := flags.Parse(args); err != nil {
		return err
	}
	trials := all(*seed)
	if *last == 0 {
		*last = len(trials)
	}
	trials, err = chosen(trials, *first, *last, *only)
	if err != nil {
		return err
	}
	p := &proof{root: root, seed: *seed, out: out, keep: *keep}
	if p.commit, err = labproc.Commit(ctx); err != nil {
		return err
	}
	if p.work, err = os.MkdirTemp("", "llmbox-machine-"); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.work)) }()
	if err := os.MkdirAll(p.keep, 0o750); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	file, err := os.OpenFile(*rows, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644) // #nosec G302 G304 -- a public record, the file the user named
	if err != nil {
		return fmt.Errorf("opening the record: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	p.rows = file
	defer func() {
		if p.box != nil {
			err = errors.Join(err, p.box.lab.Stop())
		}
	}()
	return p.all(ctx, trials, what == "kill", max(*chain, 1))
}

// chosen are the trials from one number to another, or those of a list of numbers.
func chosen(trials []trial, first, last int, only string) ([]trial, error) {
	if only == "" {
		if first < 1 || last > len(trials) || first > last {
			return nil, fmt.Errorf("no trials %d to %d, there are %d", first, last, len(trials))
		}
		return trials[first-1 : last], nil
	}
	var out []trial
	for text := range strings.SplitSeq(only, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > len(trials) {
			return nil, fmt.Errorf("no trial %q, there are %d", text, len(trials))
		}
		out = append(out, trials[n-1])
	}
	return out, nil
}

func (p *proof) all(ctx context.Context, trials []trial, compare bool, chain int) error {
	if err := p.undisturbed(ctx, compare); err != nil {
		return err
	}
	good := 0
	for _, group := range chains(trials, chain) {
		rows, err := p.group(ctx, group)
		if err != nil {
			return err
		}
		for _, r := range rows {
			if err := p.record(r); err != nil {
				return err
			}
			if r.Outcome == same {
				good++
			}
		}
	}
	p.say("%d of %d as they should be", good, len(trials))
	if good < len(trials) {
		return fmt.Errorf("%w: %d of %d; events of the runs: %s", errDiffers, len(trials)-good, len(trials), p.keep)
	}
	return nil
}

// group makes the trials of one growing install. One that missed its moment is made
// again by itself, and all of them where the install did not come to its end.
func (p *proof) group(ctx context.Context, group []trial) ([]row, error) {
	var rows []row
	if len(group) > 1 {
		var err error
		if rows, group, err = p.chain(ctx, group); err != nil {
			return nil, err
		}
	}
	for _, t := range group {
		r := p.try(ctx, t)
		rows = append(rows, r)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if r.Outcome == same {
			continue
		}
		// What is left would spoil the next.
		if err := p.freshLab(ctx); err != nil {
			return nil, err
		}
	}
	return rows, nil
}

// record writes a row down.
func (p *proof) record(r row) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encoding a row: %w", err)
	}
	if _, err := fmt.Fprintf(p.rows, "%s\n", raw); err != nil {
		return fmt.Errorf("writing a row: %w", err)
	}
	p.say("%2d  %-9s %-46s killed after %6.1f s at %-46s then %6.1f s  %s", r.Trial, r.Kills, r.Place,
		float64(r.KilledAfterMS)/1000, r.KilledAt, float64(r.RerunMS)/1000, r.Outcome)
	for _, d := range r.Diff {
		p.say("       %s", d)
	}
	if r.Error != "" {
		p.say("       %s", r.Error)
	}
	return nil
}

func (p *proof) say(format string, args ...any) { _, _ = fmt.Fprintf(p.out, format+"\n", args...) }

// freshLab ends the lab there is and starts another.
func (p *proof) freshLab(ctx context.Context) error {
	if p.box != nil {
		old := p.box
		p.box = nil
		if err := old.lab.Stop(); err != nil {
			return err
		}
	}
	var err error
	if p.box, err = startBox(ctx, p.root, p.work); err != nil {
		return err
	}
	p.before, err = trace.Take(ctx, p.box.execute)
	return err
}

// undisturbed installs once on an empty machine, keeps what that left as the measure and
// takes it off again.
func (p *proof) undisturbed(ctx context.Context, compare bool) error {
	if err := p.freshLab(ctx); err != nil {
		return err
	}
	a, err := p.follow(ctx, p.box.install(), "undisturbed", nil)
	if err != nil {
		return err
	}
	p.usual = a.Steps
	p.say("undisturbed install: %.1f s", a.Took.Seconds())
	if compare {
		if p.end, p.objects, err = p.box.quiet(ctx); err != nil {
			return err
		}
		p.say("%d objects", len(p.objects))
	}
	a, err = p.follow(ctx, p.box.uninstall(), "undisturbed-uninstall", nil)
	if err != nil {
		return err
	}
	for name, took := range a.Steps {
		p.usual[name] = took
	}
	diff, err := p.box.bare(ctx, p.before)
	if err != nil {
		return err
	}
	if len(diff) > 0 {
		return fmt.Errorf("%w: an undisturbed uninstall left %q", errDiffers, diff)
	}
	p.say("undisturbed uninstall: %.1f s, no trace", a.Took.Seconds())
	return nil
}

// follow runs one command to its end, which must be 0.
func (p *proof) follow(ctx context.Context, c cutoff.Command, name string, aim *cutoff.Aim) (cutoff.Account, error) {
	a, err := cutoff.Follow(ctx, c, cutoff.EventsFile(p.keep, name), aim, p.usual)
	if err == nil && a.Exit != 0 && aim == nil {
		err = fmt.Errorf("exit status %d: %s", a.Exit, a.Error)
	}
	return a, err
}
