// Proofdoctor shows on a machine of the lab that llmbox doctor names the root of what is
// broken first, whatever else is red because of it.
//
// It starts an empty machine, installs the whole box on it, looks at it twenty times while
// nothing is wrong, and then breaks it in one way after the other: each time doctor is
// asked until the root comes first or the fault's patience is over, `--fix` mends where
// doctor claims to, the fault is taken back, and the box has to become well again. One
// row per look and per fault is appended to docs/proofs/doctor.jsonl.
//
// It knows the lab and the box; nothing of the product knows it.
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
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/test/internal/labproc"
)

// errWrong means that doctor was wrong at least once.
var errWrong = errors.New("doctor was not right every time")

const (
	// again is the pause between two looks.
	again = 2 * time.Second
	// settleLimit is how long the box may take to be well after a fault.
	settleLimit = 4 * time.Minute
	// usualPatience is how long a fault may take to show.
	usualPatience = 100 * time.Second
)

// The outcomes of a trial; right alone is good.
const (
	right       = "right"
	wrong       = "wrong"
	notInjected = "not injected"
)

// row is one line of doctor.jsonl: a look at the healthy box, or a fault.
type row struct {
	Time   string `json:"time"`
	Commit string `json:"commit"`
	// Fault is "none" for a look at the healthy box.
	Fault string `json:"fault"`
	// Want are the ids of which one has to come first, First is the one that did.
	Want     []string `json:"want,omitempty"`
	First    string   `json:"first,omitempty"`
	Measured string   `json:"measured,omitempty"`
	// Roots are all that did not follow from another, Followers how many did.
	Roots     []string `json:"roots,omitempty"`
	Followers int      `json:"followers"`
	Outcome   string   `json:"outcome"`
	// AfterMS is how long after the fault doctor named its root, DoctorMS how long that
	// run of doctor took from start to end.
	AfterMS  int64 `json:"after_ms,omitempty"`
	DoctorMS int64 `json:"doctor_ms"`
	// Fixed is "yes" where --fix mended it, empty where doctor does not claim to.
	Fixed string `json:"fixed,omitempty"`
	FixMS int64  `json:"fix_ms,omitempty"`
	// Well is "no" where the box did not become well after the fault was taken back.
	Well  string `json:"well,omitempty"`
	Error string `json:"error,omitempty"`
}

// proof is a series of trials with what they share.
type proof struct {
	commit, keep string
	out          io.Writer
	rows         io.Writer
	box          *box
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "proofdoctor:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	root, err := labproc.Root()
	if err != nil {
		return err
	}
	all := faults()
	flags := flag.NewFlagSet("proofdoctor", flag.ContinueOnError)
	healthy := flags.Int("healthy", 20, "how `often` the healthy box is looked at first")
	only := flags.String("only", "", "`names` of faults, with commas between (default: all)")
	first := flags.Int("first", 1, "`number` of the fault to begin with")
	last := flags.Int("last", len(all), "`number` of the fault to end with")
	list := flags.Bool("list", false, "list the faults and do nothing")
	rows := flags.String("rows", filepath.Join(root, "docs", "proofs", "doctor.jsonl"), "`file` to append to")
	keep := flags.String("keep", filepath.Join(os.TempDir(), "llmbox-doctor"), "`directory` for the snapshots of what doctor was wrong about")
	stay := flags.Bool("keep-lab", false, "leave the lab up until interrupted")
	if err := flags.Parse(args); err != nil {
		return err
	}
	chosen, err := choose(all, *only, *first, *last)
	if err != nil {
		return err
	}
	if *list {
		for i, f := range all {
			_, _ = fmt.Fprintf(out, "%2d  %-26s %s\n", i+1, f.name, strings.Join(f.want, " or "))
		}
		return nil
	}
	p := &proof{out: out, keep: *keep}
	if p.commit, err = labproc.Commit(ctx); err != nil {
		return err
	}
	if err := os.MkdirAll(p.keep, 0o750); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	work, err := os.MkdirTemp("", "llmbox-doctor-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	file, err := os.OpenFile(*rows, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644) // #nosec G302 G304 -- a public record, the file the user named
	if err != nil {
		return fmt.Errorf("opening the record: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	p.rows = file
	began := time.Now()
	if p.box, err = startBox(ctx, root, work, out); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.box.lab.Stop()) }()
	p.say("the whole box after %s", time.Since(began).Round(time.Second))
	err = p.all(ctx, chosen, *healthy)
	if *stay && ctx.Err() == nil {
		p.say("%v\nthe lab stays: %s", err, p.box.lab.Dir)
		<-ctx.Done()
	}
	return err
}

// choose takes the faults that are asked for.
func choose(all []fault, only string, first, last int) ([]fault, error) {
	if first < 1 || last > len(all) || first > last {
		return nil, fmt.Errorf("no faults %d to %d, there are %d", first, last, len(all))
	}
	if only == "" {
		return all[first-1 : last], nil
	}
	var out []fault
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(all, func(f fault) bool { return f.name == name })
		if i < 0 {
			return nil, fmt.Errorf("no fault is called %q", name)
		}
		out = append(out, all[i])
	}
	return out, nil
}

func (p *proof) say(format string, args ...any) { _, _ = fmt.Fprintf(p.out, format+"\n", args...) }

func (p *proof) record(r row) error {
	r.Time, r.Commit = time.Now().UTC().Format(time.RFC3339), p.commit
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("writing the record: %w", err)
	}
	if _, err := p.rows.Write(append(raw, '\n')); err != nil {
		return fmt.Errorf("writing the record: %w", err)
	}
	p.say("%-26s %-12s %-28s %d followers, after %5.1f s, doctor %4.1f s  %s %s %s", r.Fault, r.Outcome, r.First, r.Followers,
		float64(r.AfterMS)/1000, float64(r.DoctorMS)/1000, r.Fixed, r.Measured, r.Error)
	return nil
}

func (p *proof) all(ctx context.Context, chosen []fault, healthy int) error {
	// The install is done with the first token; autoscaling has its figures a minute later.
	if !p.settle(ctx) {
		p.say("the box is not well to begin with")
	}
	good, trials := 0, 0
	count := func(r row) error {
		// What was called off shows nothing.
		if ctx.Err() != nil {
			return ctx.Err()
		}
		trials++
		if r.Outcome == right && r.Fixed != "no" {
			good++
		}
		return p.record(r)
	}
	for i := range healthy {
		if err := count(p.lookWell(ctx, i)); err != nil {
			return err
		}
	}
	for _, f := range chosen {
		if err := count(p.try(ctx, f)); err != nil {
			return err
		}
	}
	p.say("%d of %d right", good, trials)
	if good < trials {
		return fmt.Errorf("%w: %d of %d; what it saw: %s", errWrong, trials-good, trials, p.keep)
	}
	return nil
}

// lookWell looks at the box while nothing is wrong: neither failure nor warning, not even
// one that follows from another.
func (p *proof) lookWell(ctx context.Context, number int) row {
	r := row{Fault: "none", Outcome: right}
	found, took, err := p.box.doctor(ctx, "", nil)
	r.DoctorMS = took.Milliseconds()
	r.describe(found)
	if err != nil || len(r.Roots) > 0 || r.Followers > 0 || len(found) == 0 {
		r.Outcome = wrong
		if err != nil {
			r.Error = err.Error()
		}
		p.save(ctx, fmt.Sprintf("healthy-%02d", number), nil)
	} else {
		r.First, r.Measured = "", ""
	}
	return r
}

// describe takes down what doctor said.
func (r *row) describe(found []finding.Finding) {
	r.First, r.Measured, r.Roots, r.Followers = "", "", nil, 0
	for _, f := range found {
		switch {
		case f.Severity != finding.Fail && f.Severity != finding.Warn:
		case len(f.Causes) > 0:
			r.Followers++
		default:
			r.Roots = append(r.Roots, f.ID)
		}
	}
	if len(found) > 0 && len(r.Roots) > 0 {
		r.First, r.Measured = found[0].ID, found[0].Measured
	}
}

// try makes one fault, asks doctor, mends, takes it back and waits.
func (p *proof) try(ctx context.Context, f fault) row {
	r := row{Fault: f.name, Want: f.want, Outcome: wrong}
	began := time.Now()
	if err := f.inject(ctx, p.box); err != nil {
		r.Outcome, r.Error = notInjected, err.Error()
	} else {
		p.ask(ctx, f, &r, began)
	}
	if r.Outcome == wrong {
		p.save(ctx, f.name, f.want)
	}
	if f.fix && r.Outcome == right {
		mending := time.Now()
		r.Fixed = "yes"
		if err := p.box.fix(ctx, f.want); err != nil {
			r.Fixed, r.Error = "no", err.Error()
			p.save(ctx, f.name+"-fix", f.want)
		}
		r.FixMS = time.Since(mending).Milliseconds()
	}
	if f.revert != nil {
		if err := f.revert(ctx, p.box); err != nil {
			r.Error = strings.TrimSpace(r.Error + " taking it back: " + err.Error())
		}
	}
	if !p.settle(ctx) {
		r.Well = "no"
		p.save(ctx, f.name+"-after", nil)
	}
	return r
}

// ask runs doctor until the root comes first, or the patience is over.
func (p *proof) ask(ctx context.Context, f fault, r *row, began time.Time) {
	patience := f.patience
	if patience == 0 {
		patience = usualPatience
	}
	for {
		found, took, err := p.box.doctor(ctx, "", f.want)
		r.DoctorMS, r.AfterMS, r.Error = took.Milliseconds(), time.Since(began).Milliseconds(), ""
		if err != nil {
			r.Error = err.Error()
		}
		r.describe(found)
		if len(r.Roots) > 0 && slices.Contains(f.want, r.First) {
			r.Outcome = right
			return
		}
		if time.Since(began) > patience || sleep(ctx, again) != nil {
			return
		}
	}
}

// settle waits until nothing is wrong, and a look later still nothing.
func (p *proof) settle(ctx context.Context) bool {
	deadline := time.Now().Add(settleLimit)
	quiet := 0
	var last row
	for time.Now().Before(deadline) && ctx.Err() == nil {
		found, _, err := p.box.doctor(ctx, "", nil)
		last.describe(found)
		if err == nil && len(found) > 0 && len(last.Roots) == 0 {
			if quiet++; quiet == 2 {
				return true
			}
			continue
		}
		quiet = 0
		if sleep(ctx, again) != nil {
			break
		}
	}
	p.say("  not well: %q %s", last.Roots, last.Measured)
	return false
}

// save keeps a snapshot of the box as it is, to look into.
func (p *proof) save(ctx context.Context, name string, want []string) {
	if _, _, err := p.box.doctor(ctx, filepath.Join(p.keep, name+".tar.gz"), want); err != nil {
		p.say("  %s: %v", name, err)
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
