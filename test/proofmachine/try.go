package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
)

// try makes one trial on a machine that is bare, and leaves it bare.
func (p *proof) try(ctx context.Context, t trial) row {
	r := row{
		Time: time.Now().UTC().Format(time.RFC3339), Commit: p.commit, Seed: p.seed, Trial: t.Number,
		Kills: string(t.Kills), Place: fmt.Sprintf("%s %s", t.Place, t.Name()), Outcome: broken,
	}
	name := fmt.Sprintf("trial-%02d", t.Number)
	fail := func(outcome string, err error) row {
		r.Outcome, r.Error = outcome, err.Error()
		return r
	}
	killed, err := p.cut(ctx, t, name)
	if err != nil {
		return fail(broken, err)
	}
	if !killed.Killed {
		return fail(notKilled, fmt.Errorf("the run was quicker, %d times", aims))
	}
	r.KilledAt, r.KilledAfterMS = killed.At, killed.KilledAfter.Milliseconds()
	if t.Kills == wholeMachine {
		if err := p.box.order(ctx, "reboot"); err != nil {
			return fail(broken, err)
		}
	}
	if t.Ends == installed {
		again, err := p.follow(ctx, p.box.install(), name+"-again", nil)
		r.RerunMS = again.Took.Milliseconds()
		if err != nil {
			return fail(rerunError, err)
		}
		if r.Diff, err = p.box.differs(ctx, p.end, p.objects); err != nil {
			return fail(broken, err)
		}
	}
	gone, err := p.follow(ctx, p.box.uninstall(), name+"-uninstall", nil)
	if err != nil {
		return fail(rerunError, err)
	}
	left, err := p.box.bare(ctx, p.before)
	if err != nil {
		return fail(broken, err)
	}
	if t.Ends == bare {
		r.RerunMS = gone.Took.Milliseconds()
	}
	r.Diff = append(r.Diff, left...)
	r.Outcome = same
	if len(r.Diff) > 0 {
		r.Outcome, r.Diff = different, r.Diff[:min(len(r.Diff), mostDifferences)]
	}
	return r
}

// cut makes the run that is cut off. Where it was quicker than the moment that was aimed
// at, the machine is made bare again and what the step took just now is the measure.
func (p *proof) cut(ctx context.Context, t trial, name string) (cutoff.Account, error) {
	var killed cutoff.Account
	for range aims {
		command := p.box.install()
		if t.Kills == uninstall {
			if _, err := p.follow(ctx, command, name+"-install", nil); err != nil {
				return killed, err
			}
			command = p.box.uninstall()
		}
		if t.Kills == wholeMachine {
			command.Kill = func(*os.Process) error { return p.box.order(ctx, "machine-kill") }
		}
		var err error
		if killed, err = p.follow(ctx, command, name+"-killed", &t.Aim); err != nil {
			return killed, err
		}
		took, late := killed.Steps[t.Name()]
		if late {
			p.usual[t.Name()] = took
		}
		if killed.Killed && (t.Place != cutoff.Inside || !late) {
			return killed, nil
		}
		if t.Kills == wholeMachine && killed.Killed {
			if err := p.box.order(ctx, "reboot"); err != nil {
				return killed, err
			}
		}
		if _, err := p.follow(ctx, p.box.uninstall(), name+"-anew", nil); err != nil {
			return killed, err
		}
	}
	killed.Killed = false
	return killed, nil
}
