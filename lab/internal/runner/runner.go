// Package runner runs the rows of scenarios on a lab: it acts, looks until
// what is expected holds or the time is over, undoes what it did, and looks
// after itself: no errors in logs, nothing left over. With sabotage it breaks
// one thing and expects the row to fail where the scenario says.
package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/pace"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A World is what the runner needs of a lab; *world.Client is one.
type World interface {
	expect.World
	State(ctx context.Context) ([]world.HostState, error)
	StopComponent(ctx context.Context, cluster, component string) error
	StartComponent(ctx context.Context, cluster, component string) error
	Impair(ctx context.Context, req world.ImpairRequest) error
	KillContainer(ctx context.Context, target, container string) error
	JoinNode(ctx context.Context, cluster, node string) error
	LeaveNode(ctx context.Context, cluster, node string) error
	LoseNode(ctx context.Context, cluster, node string) error
	RebootNode(ctx context.Context, cluster, node string) error
	WritePcap(ctx context.Context, w io.Writer) error
}

// A Runner runs scenarios of one topology on one lab. World is required.
type Runner struct {
	World World
	Seed  string
	// Converged waits until the appliance has applied everything.
	Converged func(ctx context.Context) error
	// Connect applies the objects of a peering and waits until it is connected.
	// Scenarios that connect one need it.
	Connect func(ctx context.Context, p topology.Peering) error
	// Operator is who administers the clusters. Scenarios that install the
	// appliance, or remove it, need it.
	Operator func(ctx context.Context) deploy.Operator
	// Bundle, when set, writes the evidence for a row that failed and returns
	// the directory.
	Bundle func(ctx context.Context, row *report.Row) (string, error)
	// ProbeTimeout is how long a probe waits for its answer; 0: as long as
	// package expect says.
	ProbeTimeout time.Duration
	// Patience is how many times as long steps are given as scenarios say, and
	// streams may be silent; 0: once.
	Patience int
	// FreshInterval is the least time between two messages of a stream that has
	// a socket for each; 0: what scenarios say.
	FreshInterval time.Duration
	// FlowInterval is the same of other streams.
	FlowInterval time.Duration
	// Pace, when set, knows how much slower the machine is than when it has
	// nothing else to do: steps are given as much longer, and streams may be silent
	// for as much longer.
	Pace *pace.Meter
	// OfOthers: somebody else has made the clusters. What is there in them is not
	// written over.
	OfOthers bool
	// Progress, when set, hears what is being done.
	Progress func(text string)

	api *expect.API
	mu  sync.Mutex // of rng and green, which rows share that run at once
	rng *rand.Rand
	// needsConvergence: the row before may have disturbed the appliance, and has
	// not waited until it was as before.
	needsConvergence bool
	// before is what there was on hosts when a row last waited until they stayed the
	// same; nil: no row has done so yet.
	before expect.Leftovers
	// spoiled is why the lab is not what it was before its first row.
	spoiled error
	// green has, by row and step, how long each expectation took to hold in the
	// last run of the row that passed.
	green map[string]map[string][]time.Duration
	// moved are the nodes that the present row has let join or leave.
	moved map[string]bool
	// operated are the clusters whose installation the present row has changed.
	operated map[string]bool
}

// Spoiled returns why the lab can't be used any more: a row could not be
// undone, or the clusters did not become what they were. Nil: it can be used.
func (r *Runner) Spoiled() error { return r.spoiled }

func (r *Runner) setup() {
	if r.api == nil {
		r.green = map[string]map[string][]time.Duration{}
		r.api = expect.NewAPI(r.World.RESTConfig)
		var seed [32]byte
		copy(seed[:], r.Seed+time.Now().Format(time.RFC3339Nano))
		r.rng = rand.New(rand.NewChaCha8(seed))
	}
}

// tokenLength is the number of letters of a token: enough that no two probes
// share one, and that no other traffic has one by chance.
const tokenLength = 16

func (r *Runner) token() string {
	const letters = "abcdefghijklmnopqrstuvwxyz234567"
	b := make([]byte, tokenLength)
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range b {
		b[i] = letters[r.rng.IntN(len(letters))]
	}
	return string(b)
}

func (r *Runner) say(format string, args ...any) {
	if r.Progress != nil {
		r.Progress(fmt.Sprintf(format, args...))
	}
}

// newRow makes what the steps of a row share.
func (r *Runner) newRow(ctx context.Context, s *scenario.Scenario) (*expect.Row, error) {
	r.setup()
	row := &expect.Row{
		World: r.World, Topology: s.Topology, API: r.api,
		Directory: expect.NewDirectory(r.World, r.api, s.Topology),
		NewToken:  r.token, ProbeTimeout: r.ProbeTimeout, Pace: r.Pace, Patience: r.Patience, OfOthers: r.OfOthers,
		Started: time.Now(),
		Flows:   map[string]*expect.FlowState{},
		Outputs: map[string]expect.Ran{},

		Remembered: map[string]expect.Remembered{},
	}
	logs, err := r.World.Logs(ctx, nil)
	if err != nil {
		return nil, err
	}
	row.LogMarks = expect.Marks(logs)
	return row, nil
}

// markEvents looks at the events of the clusters of which the steps expect some: what has been told
// so far does not count.
func (r *Runner) markEvents(ctx context.Context, row *expect.Row, steps []scenario.Step) error {
	row.EventMarks = expect.EventMarks{}
	for _, st := range steps {
		for _, c := range st.Expect {
			e, ok := c.Expectation.(*expect.Event)
			if !ok || row.EventMarks[e.In] != nil {
				continue
			}
			if err := row.EventMarks.MarkEvents(ctx, r.api, e.In); err != nil {
				return err
			}
		}
	}
	return nil
}

// Run runs one row. An error of the lab is the verdict infra.
func (r *Runner) Run(ctx context.Context, s *scenario.Scenario, sr scenario.Row) report.Row {
	r.say("%s", sr.Name)
	out := report.Row{Name: sr.Name}
	start := time.Now()
	var bundled evidence
	err := r.run(ctx, s, sr, &out, func(err error) {
		out.Took = report.Duration(time.Since(start))
		out.Verdict, out.Reason = verdict(&out, s.XFail, err)
		bundled.write(ctx, r, &out)
	})
	out.Took = report.Duration(time.Since(start))
	out.Verdict, out.Reason = verdict(&out, s.XFail, err)
	bundled.write(ctx, r, &out)
	out.Reason = bundled.reason(out.Reason)
	return out
}

// evidence of a row that failed is written once: of the lab as the failure left it, where that
// is known before it is undone, since it shows nothing then.
type evidence struct {
	tried bool
	err   error // what was not written
}

func (e *evidence) write(ctx context.Context, r *Runner, out *report.Row) {
	if r.Bundle == nil || e.tried || out.Verdict != report.Fail && out.Verdict != report.Infra {
		return
	}
	e.tried = true
	bundle, err := r.Bundle(context.WithoutCancel(ctx), out)
	if errors.Is(err, world.ErrNotRunning) { // the reason says so already
		return
	}
	out.Bundle, e.err = bundle, err
}

// reason is why a row failed, with the evidence that could not be written.
func (e *evidence) reason(why string) string {
	if e.err == nil {
		return why
	}
	return strings.TrimSpace(why + "\nnot all evidence was written: " + e.err.Error())
}

// verdict judges a row. What failed as an expectation has failed, whatever the
// lab did afterwards: only a row without a failure may be tried again.
func verdict(out *report.Row, xfail string, err error) (report.Verdict, string) {
	failed := slices.ContainsFunc(out.Steps, func(s report.Step) bool { return len(s.Failures) > 0 })
	reason := ""
	if err != nil {
		reason = err.Error()
	}
	switch {
	case failed && xfail != "":
		return report.XFail, xfail
	case failed:
		return report.Fail, reason
	case err != nil:
		return report.Infra, reason
	case xfail != "":
		return report.XPass, "passed although it is known to fail: " + xfail
	}
	return report.Pass, ""
}

// run runs a row. red is told of a failure before anything is undone.
func (r *Runner) run(ctx context.Context, s *scenario.Scenario, sr scenario.Row, out *report.Row, red func(error)) (err error) {
	row, err := r.newRow(ctx, s)
	if err != nil {
		return err
	}
	if err := r.settle(ctx, out); err != nil {
		return err
	}
	steps := r.steps(s, sr)
	if err := r.markEvents(ctx, row, steps); err != nil {
		return err
	}
	if disturbs(steps) {
		looked := phase(out, "looked at what there is before")
		if row.Before, err = r.lookBefore(ctx, s); err != nil {
			return fmt.Errorf("look at what there is before: %w", err)
		}
		looked()
	}
	var undo undoList
	failed := false
	green := map[string][]time.Duration{}
	for _, st := range steps {
		rs := r.step(ctx, s, row, st, nil, &undo)
		out.Steps = append(out.Steps, rs.Step)
		green[st.Name] = rs.green
		if rs.err != nil {
			err = rs.err
			break
		}
		if failed = len(rs.Failures) > 0; failed {
			break // what follows builds on it
		}
	}
	if err != nil || failed {
		red(err)
	}
	// Whatever happened, the next row finds the lab as this one did.
	closeFlows(row)
	restored, restoreErr := r.restore(ctx, out, &undo, disturbs(steps))
	err = errors.Join(err, restoreErr)
	if err != nil || failed || !restored || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	hygiene := r.hygiene(ctx, s, row, disturbs(steps))
	out.Steps = append(out.Steps, hygiene)
	if len(hygiene.Failures) == 0 {
		r.mu.Lock()
		r.green[sr.Name] = green
		r.mu.Unlock()
	}
	return nil
}

// OnlyLooks tells whether a row does nothing but send probes and look at what
// there is, so that others of its kind may run at the same time. One that measures
// a rate fills the path, and the captures.
func OnlyLooks(s *scenario.Scenario, sr scenario.Row) bool {
	steps := s.Build(sr)
	return !acts(steps) && !slices.ContainsFunc(steps, func(st scenario.Step) bool {
		return slices.ContainsFunc(st.Expect, func(e expect.Checked) bool {
			_, measures := e.Expectation.(*expect.Rate)
			return measures
		})
	})
}

// RunAll runs rows that only look, so many at a time. The results are in the
// order of the rows.
func (r *Runner) RunAll(ctx context.Context, s *scenario.Scenario, rows []scenario.Row, atOnce int) []report.Row {
	r.setup()
	out := make([]report.Row, len(rows))
	var g errgroup.Group
	g.SetLimit(atOnce)
	for i, sr := range rows {
		g.Go(func() error {
			out[i] = r.Run(ctx, s, sr)
			return nil
		})
	}
	_ = g.Wait() // rows say themselves how they went
	return out
}

// restoreStep is the step in which a row takes back what it did.
const restoreStep = "afterwards: what the row did is undone, and the clusters converge"

// restore undoes what a row did and waits until the clusters have converged. What
// of it does not happen is a failure of the row, and spoils the lab for those
// that follow; the error is the lab's.
func (r *Runner) restore(ctx context.Context, out *report.Row, undo *undoList, disturbed bool) (restored bool, err error) {
	if !disturbed && len(*undo) == 0 {
		return true, nil
	}
	ctx = context.WithoutCancel(ctx)
	r.needsConvergence = r.needsConvergence || disturbed
	fault := report.Fault{Expectation: "the row is undone", Want: "everything as it was"}
	var failed error
	if len(*undo) > 0 {
		undone := phase(out, "undone")
		failed = undo.run(ctx)
		undone()
	}
	if failed == nil {
		fault.Expectation = "the clusters converge"
		failed = r.settle(ctx, out)
	}
	if failed == nil {
		return true, nil
	}
	r.spoiled = fmt.Errorf("%s: %w", out.Name, failed)
	if _, err := r.World.Status(ctx); err != nil {
		return false, errors.Join(failed, err) // the lab is gone, and with it what was to be undone
	}
	fault.Got = failed.Error()
	out.Steps = append(out.Steps, report.Step{Name: restoreStep, Failures: []report.Fault{fault}})
	return false, nil
}

// patient returns how long something may take of which d is said.
func (r *Runner) patient(d time.Duration) time.Duration { return d * time.Duration(max(r.Patience, 1)) }

// steps are the steps of a row, with the time that they are given here.
func (r *Runner) steps(s *scenario.Scenario, sr scenario.Row) []scenario.Step {
	steps := s.Build(sr)
	for i := range steps {
		steps[i].Within = r.patient(steps[i].Within)
	}
	return steps
}

// disturbs tells whether steps do more than send traffic.
func disturbs(steps []scenario.Step) bool {
	return slices.ContainsFunc(steps, func(st scenario.Step) bool {
		return slices.ContainsFunc(st.Do, func(a scenario.Action) bool {
			_, flow := a.(*scenario.Flow)
			return !flow
		})
	})
}

// phase begins a part of a row's time that is no step; calling what it returns
// ends it.
func phase(out *report.Row, name string) (end func()) {
	start := time.Now()
	return func() {
		out.Phases = append(out.Phases, report.Phase{Name: name, Took: report.Duration(time.Since(start))})
	}
}

// settle waits for the appliance when a row has disturbed it.
func (r *Runner) settle(ctx context.Context, out *report.Row) error {
	if !r.needsConvergence || r.Converged == nil {
		return nil
	}
	defer phase(out, "converged")()
	r.say("waiting for the clusters to converge")
	if err := r.Converged(ctx); err != nil {
		return fmt.Errorf("the clusters have not converged: %w", err)
	}
	r.needsConvergence = false
	return nil
}

// hygieneStep is the step that every row ends with.
const hygieneStep = "afterwards: clean logs, nothing left over"

// leftoverTime is how long the appliance is given to tidy up.
const leftoverTime = 20 * time.Second

func (r *Runner) hygiene(ctx context.Context, s *scenario.Scenario, row *expect.Row, leftovers bool) report.Step {
	start := time.Now()
	out := report.Step{Name: hygieneStep}
	logs, err := r.World.Logs(ctx, row.LogMarks)
	if err != nil {
		out.Failures = append(out.Failures, report.Fault{Expectation: "clean logs", Want: "logs to look at", Got: err.Error()})
	}
	// Where scenarios install it, it may be gone by now, and its pods' logs with
	// them.
	if err == nil && row.Topology.Install != topology.InstallNone && !slices.ContainsFunc(logs, func(l world.Log) bool { return ofAppliance(l.Name) }) {
		out.Failures = append(out.Failures, report.Fault{Expectation: "clean logs", Want: "logs of the appliance", Got: "none, so nothing is known of errors"})
	}
	for _, l := range logs {
		if l.Gap && ofAppliance(l.Name) {
			out.Failures = append(out.Failures, report.Fault{
				Expectation: "clean logs", Want: "all of the log of " + l.Name, Got: "the log was begun anew since the row began, so nothing is known of errors in what is gone",
			})
		}
		if bad := errorLines(l, s, r.slow(row)); len(bad) > 0 {
			out.Failures = append(out.Failures, report.Fault{
				Expectation: "clean logs", Want: "no error in the log of " + l.Name,
				Got: fmt.Sprintf("%d error lines", len(bad)), Why: strings.Join(bad[:min(3, len(bad))], "\n"),
			})
		}
	}
	if leftovers {
		e := expect.Checked{Name: "gone", Expectation: &expect.Gone{}}
		res, err := r.await(ctx, row, e, nil, r.allow(r.patient(leftoverTime)), 1)
		if err != nil {
			res.Got = err.Error()
		}
		if !res.OK {
			out.Failures = append(out.Failures, report.Fault{Expectation: e.String(), Want: res.Want, Got: res.Got, Why: res.Why})
		}
	}
	out.Took = report.Duration(time.Since(start))
	return out
}

// lateLease is what client-go logs when the API server does not answer within the
// lockTimeout of the controllers' lease, 3 s; the last one when the answer has begun.
var lateLease = regexp.MustCompile(`rror retrieving (lease|resource) lock|Failed to (update|release) lease|Unexpected error when reading response body`)

// slowPace is how many times as long as at best a machine takes that may be late
// for a lease.
const slowPace = 2

// slow tells whether an API server of the lab may have been late for a lease since
// a row began: in an emulated machine, or where the processors have too much to do.
func (r *Runner) slow(row *expect.Row) bool {
	return r.Patience > 1 || r.Pace.Since(row.Started) >= slowPace
}

// errorLines are the error lines of one of our daemons that the scenario does
// not allow. On a slow machine the API server may be late for the lease: such a
// controller only waits, and what it costs is looked at where there is time.
func errorLines(l world.Log, s *scenario.Scenario, slow bool) []string {
	if !ofAppliance(l.Name) {
		return nil
	}
	var bad []string
	for line := range strings.Lines(l.Text) {
		line = strings.TrimSpace(line)
		isError := strings.Contains(line, `"level":"ERROR"`) || strings.Contains(line, "level=ERROR") ||
			strings.Contains(line, "panic:") || strings.Contains(line, "DATA RACE")
		if !isError {
			continue
		}
		allowed := slow && lateLease.MatchString(line) && strings.Contains(line, "context deadline exceeded")
		for _, re := range s.AllowLogs {
			allowed = allowed || re.MatchString(line)
		}
		if !allowed {
			bad = append(bad, line)
		}
	}
	return bad
}

// ofAppliance tells whether a log is of a container in the system namespace
// or in a tenant's.
func ofAppliance(name string) bool {
	c, ok := expect.ContainerOf(name)
	return ok && (c.Namespace == deploy.Namespace || strings.HasPrefix(c.Namespace, "liqo-tenant-"))
}

func closeFlows(row *expect.Row) {
	for _, f := range row.Flows {
		f.Close()
	}
}
