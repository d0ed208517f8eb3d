package runner

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A changingLab answers each command by the next of what it has, and by the last
// of it from then on.
type changingLab struct {
	refusingLab
	answers []func() (world.ExecResult, error)
}

func (l *changingLab) Exec(context.Context, world.ExecRequest) (world.ExecResult, error) {
	next := l.answers[0]
	if len(l.answers) > 1 {
		l.answers = l.answers[1:]
	}
	return next()
}

// prints is a command that has printed a text.
func prints(text string) func() (world.ExecResult, error) {
	return func() (world.ExecResult, error) { return world.ExecResult{Stdout: []byte(text)}, nil }
}

// TestLookingAgain: a command that is run again and again may find nobody to run
// it for some time. That is the product's doing, and fails the expectation where
// it lasts; a lab that does not answer is the lab's.
func TestLookingAgain(t *testing.T) {
	parse := func(within string) *scenario.Scenario {
		s, err := scenario.Parse("looks.yaml", []byte(`description: A pod prints what it is asked for.
topology: two-clusters
steps:
  - name: it prints
    within: `+within+`
    do: { exec: { name: things, again: true, on: milan/web, run: show things } }
    expect: { output: { of: things, contains: done } }
sabotage:
  - { withhold: configuration/rome, in: milan, fails: it prints }
`), "../../../topologies")
		assert.NilError(t, err)
		return s
	}
	fails := func(err error) func() (world.ExecResult, error) {
		return func() (world.ExecResult, error) { return world.ExecResult{}, err }
	}
	gone := fails(fmt.Errorf("%w: milan/web", world.ErrNoTarget))
	type answers = []func() (world.ExecResult, error)
	for _, tc := range []struct {
		name    string
		answers answers
		got     string // of the fault; empty: green
		err     string // of the lab
	}{
		{"it comes about", answers{prints("not yet"), prints("done")}, "", ""},
		{"the pod is another one meanwhile", answers{prints("not yet"), gone, gone, prints("done")}, "", ""},
		{"the pod does not come back", answers{prints("not yet"), gone}, "on milan/web: show things: no such target: milan/web", ""},
		{"the lab ends", answers{prints("not yet"), fails(world.ErrNotRunning)}, "", "the lab is not running"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := parse("1m") // these cases end by themselves
			if tc.got != "" {
				s = parse("1s")
			}
			l := &changingLab{refusingLab{topology: s.Topology, api: refuseWrites(t)}, tc.answers}
			r := &Runner{World: l, Seed: "1"}
			r.setup()
			row := &expect.Row{
				World: l, Topology: s.Topology, API: r.api, Directory: expect.NewDirectory(l, r.api, s.Topology), NewToken: r.token,
				Outputs: map[string]expect.Ran{},
			}
			var undo undoList
			began := time.Now()
			out := r.step(t.Context(), s, row, s.Build(s.Rows[0])[0], nil, &undo)
			if tc.err != "" {
				assert.ErrorContains(t, out.err, tc.err)
				return
			}
			assert.NilError(t, out.err)
			if tc.got == "" {
				assert.Equal(t, len(out.Failures), 0, "%+v", out.Failures)
				return
			}
			assert.Equal(t, len(out.Failures), 1)
			assert.Equal(t, out.Failures[0].Got, tc.got)
			assert.Assert(t, time.Since(began) >= 500*time.Millisecond, "it was not looked at for long enough")
		})
	}
}

// TestOutputIsFresh: what a command printed before another expectation was waited for does not
// count: it is run again before its output is looked at the first time.
func TestOutputIsFresh(t *testing.T) {
	s, err := scenario.Parse("fresh.yaml", []byte(`description: A host prints what it has.
topology: two-clusters
steps:
  - name: it prints
    within: 500ms
    do: { exec: { name: things, again: true, on: milan/web, run: show things } }
    expect: { output: { of: things, contains: none } }
sabotage:
  - { withhold: configuration/rome, in: milan, fails: it prints }
`), "../../../topologies")
	assert.NilError(t, err)
	for waited, failures := range map[bool]int{false: 0, true: 1} {
		l := &changingLab{refusingLab{topology: s.Topology, api: refuseWrites(t)}, []func() (world.ExecResult, error){prints("none"), prints("some")}}
		r := &Runner{World: l, Seed: "1"}
		r.setup()
		row := &expect.Row{World: l, Topology: s.Topology, API: r.api, Directory: expect.NewDirectory(l, r.api, s.Topology), NewToken: r.token, Outputs: map[string]expect.Ran{}}
		st := s.Build(s.Rows[0])[0]
		if waited {
			st.Expect = append(expect.List{{Name: "reach", Expectation: &changingReach{[]expect.Result{{OK: true}}}}}, st.Expect...)
		}
		var undo undoList
		out := r.step(t.Context(), s, row, st, nil, &undo)
		assert.NilError(t, out.err)
		assert.Equal(t, len(out.Failures), failures, "after another expectation: %v: %+v", waited, out.Failures)
	}
}

// A changingReach has one result after the other, and the last of them from then on.
type changingReach struct{ results []expect.Result }

func (*changingReach) Lint(*expect.Linter) {}

func (*changingReach) String() string { return "it is reached" }

func (c *changingReach) Check(context.Context, *expect.Row) (expect.Result, error) {
	next := c.results[0]
	if len(c.results) > 1 {
		c.results = c.results[1:]
	}
	return next, nil
}

// TestImpostorIsTold: somebody else has answered, and the last look had no answer: both are
// told. Of a look that held, and of a last one that says so itself, there is no more to say.
func TestImpostorIsTold(t *testing.T) {
	other, lost := expect.Result{Got: "rome/web answered", Impostor: true}, expect.Result{Got: "no answer within 1s", Why: "it was dropped"}
	for _, tc := range []struct {
		results  []expect.Result
		got, why string
	}{
		{[]expect.Result{other, lost}, "no answer within 1s", "it was dropped\nbefore that, rome/web answered"},
		{[]expect.Result{lost, other}, "rome/web answered", ""},
		{[]expect.Result{lost}, "no answer within 1s", "it was dropped"},
		{[]expect.Result{other, {OK: true}}, "", ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := &Runner{}
			res, err := r.await(t.Context(), nil, expect.Checked{Expectation: &changingReach{tc.results}}, nil, r.allow(time.Second), 1)
			assert.NilError(t, err)
			assert.Equal(t, res.Got, tc.got)
			assert.Equal(t, res.Why, tc.why)
		})
	}
}

// TestExceeded: in an emulated machine a step has more time than its scenario says. What needs it is
// green, and says so.
func TestExceeded(t *testing.T) {
	not := expect.Result{Got: "not yet"}
	for _, tc := range []struct {
		looks   int // that fail before one holds
		excused []string
	}{
		{3, nil},
		{6, []string{"it is reached: it held after 1.75s; the bound is 1s, and 3s on a machine as slow as this one was"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := &Runner{Patience: 3}
			reach := &changingReach{append(slices.Repeat([]expect.Result{not}, tc.looks), expect.Result{OK: true})}
			st := scenario.Step{Name: "soon", Within: r.patient(time.Second), Expect: []expect.Checked{{Name: "reach", Expectation: reach}}}
			out := r.step(t.Context(), nil, &expect.Row{}, st, nil, nil)
			assert.NilError(t, out.err)
			assert.Equal(t, len(out.Failures), 0)
			assert.DeepEqual(t, out.Excused, tc.excused)
		})
	}
}

// TestUpTo: steps that only look are looked at again until what a sabotage breaks
// shows, whatever a row does after them.
func TestUpTo(t *testing.T) {
	looks, does := scenario.Step{Name: "looks"}, scenario.Step{Name: "does", Do: scenario.Actions{&scenario.Flow{}}}
	for _, tt := range []struct {
		steps []scenario.Step
		name  string
		want  bool // something is done
	}{
		{[]scenario.Step{looks}, "looks", false},
		{[]scenario.Step{looks, does}, "looks", false},
		{[]scenario.Step{looks, does}, "does", true},
		{[]scenario.Step{does, looks}, "looks", true},
	} {
		assert.Equal(t, acts(upTo(tt.steps, tt.name)), tt.want, "%v up to %s", tt.steps, tt.name)
	}
}

// TestUntil: what is waited for may take as long as is allowed, and the error says how
// long that was; what hangs ends, too.
func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &Runner{Patience: 2}
		start := time.Now()
		assert.NilError(t, until(t.Context(), r.allowAction(time.Second), "it is not there", func(context.Context) (bool, error) {
			return time.Since(start) > 1500*time.Millisecond, nil
		}))
		assert.Error(t, until(t.Context(), r.allowAction(time.Second), "it is not there", func(context.Context) (bool, error) {
			return false, nil
		}), "after 2.1s it is not there")
		assert.Error(t, until(t.Context(), r.allowAction(time.Second), "it is not there", func(ctx context.Context) (bool, error) {
			<-ctx.Done()
			return false, ctx.Err()
		}), "after 1m10s it is not there")
	})
}
