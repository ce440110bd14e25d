package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
)

// newRow describes a trial that has not ended yet.
func (p *proof) newRow(t trial) row {
	return row{
		Time: time.Now().UTC().Format(time.RFC3339), Commit: p.commit, Seed: p.seed, Trial: t.Number,
		Kills: string(t.Kills), Place: fmt.Sprintf("%s %s", t.Place, t.Name()), Outcome: broken,
	}
}

// try makes one trial on a machine that is bare, and leaves it bare.
func (p *proof) try(ctx context.Context, t trial) row {
	r := p.newRow(t)
	killed, err := p.cut(ctx, t, trialName(t))
	if err != nil {
		r.Error = err.Error()
		return r
	}
	if !killed.Killed {
		r.Outcome, r.Error = notKilled, fmt.Sprintf("the run was quicker, %d times", aims)
		return r
	}
	r.KilledAt, r.KilledAfterMS = killed.At, killed.KilledAfter.Milliseconds()
	if t.Kills == wholeMachine {
		if err := p.box.order(ctx, "reboot"); err != nil {
			r.Error = err.Error()
			return r
		}
	}
	p.conclude(ctx, t, &r)
	return r
}

// conclude runs what has to come to the trial's end, and leaves the machine bare.
func (p *proof) conclude(ctx context.Context, t trial, r *row) {
	fail := func(outcome string, err error) { r.Outcome, r.Error = outcome, err.Error() }
	name := trialName(t)
	if t.Ends == installed {
		again, err := p.follow(ctx, p.box.install(), name+"-again", nil)
		r.RerunMS = again.Took.Milliseconds()
		if err != nil {
			fail(rerunError, err)
			return
		}
		if r.Diff, err = p.box.differs(ctx, p.end, p.objects); err != nil {
			fail(broken, err)
			return
		}
	}
	gone, err := p.follow(ctx, p.box.uninstall(), name+"-uninstall", nil)
	if err != nil {
		fail(rerunError, err)
		return
	}
	left, err := p.box.bare(ctx, p.before)
	if err != nil {
		fail(broken, err)
		return
	}
	if t.Ends == bare {
		r.RerunMS = gone.Took.Milliseconds()
	}
	r.Diff = append(r.Diff, left...)
	r.Outcome = same
	if len(r.Diff) > 0 {
		r.Outcome, r.Diff = different, r.Diff[:min(len(r.Diff), mostDifferences)]
	}
}

func trialName(t trial) string { return fmt.Sprintf("trial-%02d", t.Number) }

// chain kills one growing install at each of several points in their order. It returns
// the rows of those that were killed at their moment, and the trials that have to be made
// again, each by itself.
func (p *proof) chain(ctx context.Context, group []trial) (rows []row, again []trial, err error) {
	var done []trial
	for i, t := range group {
		killed, err := p.follow(ctx, p.box.install(), trialName(t)+"-killed", &t.Aim)
		if err != nil {
			return nil, nil, err
		}
		if !killed.Killed {
			again = append(again, group[i:]...)
			break
		}
		if _, late := killed.Steps[t.Name()]; late && t.Place == cutoff.Inside {
			again = append(again, t)
			continue
		}
		r := p.newRow(t)
		r.Chain, r.KilledAt, r.KilledAfterMS = group[0].Number, killed.At, killed.KilledAfter.Milliseconds()
		rows, done = append(rows, r), append(done, t)
	}
	end := p.newRow(group[0])
	p.conclude(ctx, group[0], &end)
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	if end.Outcome == same {
		for i := range rows {
			rows[i].Outcome = same
			if i == len(rows)-1 {
				rows[i].RerunMS = end.RerunMS
			}
		}
		return rows, again, nil
	}
	p.say("kills %d…: %s %s %q; each by itself", group[0].Number, end.Outcome, end.Error, end.Diff)
	return nil, append(done, again...), p.freshLab(ctx)
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
			command.Kill = func(*os.Process) error { return p.box.cutPower(ctx) }
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
