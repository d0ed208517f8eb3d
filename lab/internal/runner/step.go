package runner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/pace"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// A ranStep is a step that was run. Without an error and failures, it holds.
type ranStep struct {
	report.Step
	err error
	// green has how long each expectation took to hold, from when the step began
	// to look.
	green []time.Duration
	// failed are the indices of the expectations that Failures are about, in the
	// same order; an action is failedAction.
	failed []int
	// pending: the last expectation that failed had not been watched for long
	// enough to say so.
	pending bool
}

// failedAction is the index of what a step does, among what it expects.
const failedAction = -1

func (out *ranStep) fail(index int, f report.Fault) {
	out.Failures = append(out.Failures, f)
	out.failed = append(out.failed, index)
}

// An aim has, by index, the expectations of a step of which a sabotage must break
// one. Each is looked at for as long as its budget says since the first look, and
// at least twice.
type aim map[int]time.Duration

// aimLooks is how often an aim is looked at before it has failed: one look may
// have failed by chance.
const aimLooks = 2

// step acts and looks. Without an aim, every expectation is given until the
// step's time is over.
func (r *Runner) step(ctx context.Context, s *scenario.Scenario, row *expect.Row, st scenario.Step, at aim, undo *undoList) (out ranStep) {
	out.Name = st.Name
	start := time.Now()
	row.StepStarted = start
	ran := len(row.Ran)
	defer func() {
		out.Took = report.Duration(time.Since(start))
		if out.err != nil || len(out.Failures) > 0 {
			out.Commands = commands(row.Ran[ran:])
		}
	}()
	before, stop, meanwhile := split(st.Do)
	again, acted := r.actAll(ctx, s, row, st, before, undo, &out)
	if !acted {
		return out
	}
	if stop != nil {
		r.whileStopped(ctx, s, row, st, stop, again, meanwhile, undo, at, &out)
		return out
	}
	given := r.allow(st.Within)
	given.bound = st.Within / r.patient(1)
	r.expectAll(ctx, s, row, st, again, given, at, &out)
	return out
}

// split returns what a step does before it stops a component, and what it does while
// that is stopped.
func split(do scenario.Actions) (before scenario.Actions, stop *scenario.Stop, meanwhile scenario.Actions) {
	for i, a := range do {
		if stop, is := a.(*scenario.Stop); is {
			return do[:i], stop, do[i+1:]
		}
	}
	return do, nil, nil
}

// actAll does one action after the other, and returns the commands that are to be run again
// whenever expectations are looked at. acted is false when an action failed; out says which.
func (r *Runner) actAll(ctx context.Context, s *scenario.Scenario, row *expect.Row, st scenario.Step, do scenario.Actions, undo *undoList, out *ranStep) (again []*scenario.Exec, acted bool) {
	var opened []*expect.FlowState
	for _, a := range do {
		flow, opens := a.(*scenario.Flow)
		if !opens && len(opened) > 0 {
			r.awaitAnswers(ctx, opened)
			opened = nil
			row.StepStarted = time.Now() // what is done to the streams begins here
		}
		if e, is := a.(*scenario.Exec); is && e.Again {
			again = append(again, e)
		}
		fault, err := r.act(ctx, row, a, undo)
		if err != nil {
			out.err = fmt.Errorf("step %q: %s: %w", st.Name, a, err)
			return nil, false
		}
		if fault != nil {
			fault.Place = s.Place(st.Pos)
			out.fail(failedAction, *fault)
			return nil, false
		}
		if opens {
			opened = append(opened, row.Flows[flow.Name])
		}
	}
	return again, true
}

// openTime is how long a step waits for the first answers of the streams that it
// has opened before it does something else: twice what TCP takes to ask again
// (RFC 6298, 2.1).
const openTime = 3 * time.Second

// awaitAnswers waits until every stream has been answered, as long as it takes to
// see that one is not. What a step does to a stream must not meet it half open:
// on a busy machine its program may not even have started.
func (r *Runner) awaitAnswers(ctx context.Context, flows []*expect.FlowState) {
	given := r.allow(r.patient(openTime))
	for _, f := range flows {
		for !f.Answered() && !given.over(0) && ctx.Err() == nil {
			pause := time.NewTimer(20 * time.Millisecond)
			select {
			case <-ctx.Done():
			case <-pause.C:
			}
			pause.Stop()
		}
	}
}

// An allowance is how long something is looked at: for a while since a moment, and
// for as much longer as the machine has been slower since then.
type allowance struct {
	since  time.Time
	within time.Duration
	pace   *pace.Meter
	// bound is how long a step may take on an idle machine of its own: its within, which is
	// scenario.DefaultWithin where the scenario says none. 0: it is no step's, or a component is
	// stopped meanwhile.
	bound time.Duration
}

func (r *Runner) allow(within time.Duration) allowance {
	return allowance{since: time.Now(), within: within, pace: r.Pace}
}

// allowAction is how long an action, or what undoes one, may wait for something that
// must come true: as much longer as the machine is slower, as steps are.
func (r *Runner) allowAction(d time.Duration) allowance { return r.allow(r.patient(d)) }

// stillMost is for how long a machine that stands still again and again is waited for, in all.
const stillMost = time.Minute

// most is how long it is on the slowest machine.
func (a allowance) most() time.Duration { return a.within*pace.Most + stillMost }

// end is when it is over on the slowest machine.
func (a allowance) end() time.Time { return a.since.Add(a.most()) }

// over tells whether it is at an end after a pause.
func (a allowance) over(pause time.Duration) bool {
	return time.Since(a.since)+pause > min(a.most(), a.pace.Longer(a.within, a.since, time.Time{}))
}

// exceeded says that what held in time took longer than the bound; empty: it did not. looked is
// when the look began that saw it, the zero time when that was the first one: what a look takes, as
// probes do that wait for their answers, is not held against it.
func (a allowance) exceeded(looked time.Time) string {
	took := looked.Sub(a.since)
	if a.bound == 0 || looked.IsZero() || took <= a.bound {
		return ""
	}
	return fmt.Sprintf("it held after %v; the bound is %v, and %v on a machine as slow as this one was", took.Round(10*time.Millisecond), a.bound, max(took, a.pace.Longer(a.within, a.since, time.Time{})).Round(10*time.Millisecond))
}

// expectAll looks at each expectation until it holds or the patience is over.
func (r *Runner) expectAll(ctx context.Context, s *scenario.Scenario, row *expect.Row, st scenario.Step, again []*scenario.Exec, given allowance, at aim, out *ranStep) {
	began := time.Now()
	stale := false // another expectation was waited for since commands printed something
	for i, e := range st.Expect {
		has, looks := given, 1
		if budget, ok := at[i]; ok {
			has, looks = allowance{since: time.Now(), within: budget}, aimLooks
		}
		res, looked, err := r.look(ctx, row, e, again, stale, has, looks)
		for err == nil && res.Pending && !given.over(0) {
			res, looked, err = r.look(ctx, row, e, again, stale, given, looks)
		}
		stale = e.Name != "output"
		if err != nil {
			out.err = fmt.Errorf("step %q: %s: %w", st.Name, e, err)
			return
		}
		if res.OK {
			out.Notes = append(out.Notes, res.Notes...)
			if res.Excused != "" {
				out.Excused = append(out.Excused, res.Excused)
			}
			if late := given.exceeded(looked); late != "" && at == nil {
				out.Excused = append(out.Excused, e.String()+": "+late)
			}
			if len(out.green) == i { // of several rounds, the first
				out.green = append(out.green, time.Since(began))
			}
		} else {
			out.pending = res.Pending
			out.fail(i, report.Fault{
				Expectation: e.String(), Place: s.Place(e.Pos),
				Want: res.Want, Got: res.Got, Why: res.Why, Path: res.Path, Reply: res.Reply,
			})
		}
		if at != nil && !res.OK {
			return // what a sabotage breaks first is what counts
		}
		if !res.OK && e.Name == "reach" {
			return // source, path and never speak about this probe
		}
	}
}

// await looks again and again, at first at short distances, until the
// expectation holds or can't hold any more, or until the allowance is over, and
// at least so many times. A failure says who else has answered, whichever look that was.
func (r *Runner) await(ctx context.Context, row *expect.Row, e expect.Checked, again []*scenario.Exec, given allowance, looks int) (expect.Result, error) {
	res, _, err := r.look(ctx, row, e, again, false, given, looks)
	return res, err
}

// look is await, and returns when the last look began, unless it was the first one. Before each
// further look at an output its command is run again; where the output is stale, before the first one, too.
func (r *Runner) look(ctx context.Context, row *expect.Row, e expect.Checked, again []*scenario.Exec, stale bool, given allowance, looks int) (res expect.Result, looked time.Time, err error) {
	pause := 50 * time.Millisecond
	var impostor string
	for n := 1; ; n++ {
		if n > 1 {
			looked = time.Now()
		}
		if (n > 1 || stale) && e.Name == "output" {
			err = r.execAgain(ctx, row, again)
		}
		switch {
		case err == nil:
			res, err = e.Check(ctx, row)
		case !ofLab(ctx, err): // whoever prints it has ended, say, or is not there yet
			res, err = expect.Result{Want: e.String(), Got: err.Error()}, nil
		}
		if res.Impostor {
			impostor = res.Got
		}
		if err != nil || res.OK || res.Final || n >= looks && given.over(pause) {
			if impostor != "" && !res.OK && !res.Impostor {
				res.Why = strings.TrimPrefix(res.Why+"\nbefore that, "+impostor, "\n")
			}
			return res, looked, err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return res, looked, ctx.Err()
		case <-timer.C:
		}
		pause = min(pause*2, 500*time.Millisecond)
	}
}

// stoppedLook is the least time for which expectations are looked at while a
// component is stopped: TCP sends a lost packet again after a second, and once
// more after two (RFC 6298, 2.1).
const stoppedLook = 3 * time.Second

// whileStopped ends a component, does what is to be done meanwhile, demands that the
// expectations hold then and until its time is over, and starts it again.
func (r *Runner) whileStopped(ctx context.Context, s *scenario.Scenario, row *expect.Row, st scenario.Step, stop *scenario.Stop, again []*scenario.Exec, meanwhile scenario.Actions, undo *undoList, at aim, out *ranStep) {
	if err := r.World.StopComponent(ctx, stop.In, stop.Component); err != nil {
		out.err = fmt.Errorf("step %q: %s: %w", st.Name, stop, err)
		return
	}
	more, _ := r.actAll(ctx, s, row, st, meanwhile, undo, out)
	again = append(again, more...)
	end := time.Now().Add(stop.For)
	rounds := 0
	for time.Now().Before(end) && out.err == nil && len(out.Failures) == 0 {
		out.Notes, out.Excused = nil, nil
		// The last look, too, is long enough for a packet that has to be sent again.
		r.expectAll(ctx, s, row, st, again, r.allow(max(time.Until(end), r.patient(stoppedLook))), at, out)
		rounds++
		pause := time.NewTimer(min(500*time.Millisecond, max(0, time.Until(end))))
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
		pause.Stop()
		if ctx.Err() != nil {
			break
		}
	}
	out.Notes = append(out.Notes, fmt.Sprintf("held %d times in %v without %s", rounds, stop.For, stop.Component))
	start := time.Now()
	if err := r.World.StartComponent(context.WithoutCancel(ctx), stop.In, stop.Component); err != nil {
		out.err = errors.Join(out.err, fmt.Errorf("step %q: start %s in %s again: %w", st.Name, stop.Component, stop.In, err))
		return
	}
	out.Notes = append(out.Notes, fmt.Sprintf("%s healthy again after %v", stop.Component, time.Since(start).Round(10*time.Millisecond)))
}

func (r *Runner) execAgain(ctx context.Context, row *expect.Row, again []*scenario.Exec) error {
	for _, a := range again {
		if _, err := r.exec(ctx, row, a); err != nil {
			return fmt.Errorf("%s: %w", a, err)
		}
	}
	return nil
}
