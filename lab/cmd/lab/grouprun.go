package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/runner"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A groupRun runs one group on its lab. A lab that has died, or that a row has
// left unlike it was, is built again, some times.
type groupRun struct {
	session   *session
	group     *group
	out       io.Writer
	lab       *builtLab
	dead      error // why there is no lab
	rebuilt   int   // how often it was built again
	result    report.Lab
	scenarios []report.Scenario
}

// all builds the lab, once more when that failed, and runs the rows, then the
// sabotages.
func (r *groupRun) all(ctx context.Context) {
	g := r.group
	r.result = report.Lab{Name: g.name(), Topology: g.topology.Name, World: g.world, Overlay: g.overlay}
	start := time.Now()
	if g.runs() && !r.session.over() {
		r.dead = r.open(ctx)
		if r.dead != nil && !errors.Is(r.dead, errAppliance) && ctx.Err() == nil {
			fmt.Fprintf(r.out, "   the lab failed, so it is built again: %v\n", r.dead)
			r.rebuilt++
			r.result.Retried = append(r.result.Retried, r.dead.Error())
			r.dead = r.open(ctx)
		}
	}
	if r.dead != nil {
		fmt.Fprintf(r.out, "   the lab failed: %v\n", r.dead)
	}
	built := time.Now()
	for _, c := range g.rows {
		r.choice(ctx, r.inTime(ctx, c), false)
	}
	ran := time.Now()
	r.sabotages(ctx)
	if r.lab != nil {
		parts := []string{"lab in " + report.Duration(built.Sub(start)).String()}
		if len(g.rows) > 0 {
			parts = append(parts, "rows in "+report.Duration(ran.Sub(built)).String())
		}
		if len(g.sabotages) > 0 {
			parts = append(parts, "sabotages in "+report.Duration(time.Since(ran)).String())
		}
		fmt.Fprintf(r.out, "   %s: %s\n", g.name(), strings.Join(parts, ", "))
		r.close()
	}
	if r.dead != nil && slices.ContainsFunc(r.scenarios, func(s report.Scenario) bool {
		return slices.ContainsFunc(s.Rows, func(row report.Row) bool { return row.Reason == r.dead.Error() })
	}) {
		r.result.Error = r.dead.Error() // after the last row it would be no news
	}
	r.result.Took = report.Duration(time.Since(start))
}

// sabotages makes the group's sabotages, those of one scenario after the other, until they
// have had the time that there is for them. Where the lab is dead, the result of each says why.
func (r *groupRun) sabotages(ctx context.Context) {
	start := time.Now()
	for _, c := range r.group.sabotages {
		r.choice(ctx, r.leaveOut(ctx, r.inTime(ctx, c), time.Since(start)), true)
	}
}

// inTime is what of a choice still begins: nothing that can run, once the run has had its time.
// It says what does not. Where the lab is dead, or somebody has ended the run, each row says so.
func (r *groupRun) inTime(ctx context.Context, c choice) choice {
	if !r.session.over() || r.dead != nil || ctx.Err() != nil {
		return c
	}
	in := choice{scenario: c.scenario, items: slices.DeleteFunc(slices.Clone(c.items), func(i item) bool { return i.skip == "" })}
	if n := len(c.items) - len(in.items); n > 0 {
		for _, i := range c.items {
			if i.skip == "" {
				r.result.OutOfTime = append(r.result.OutOfTime, i.String())
			}
		}
		fmt.Fprintf(r.out, " - %-24s left out: %d. The run has had its %v\n", c.scenario.Name, n, r.session.options.time)
	}
	return in
}

// leaveOut is what of a scenario's sabotages still begins when those of the lab have taken so
// long. It says what does not.
func (r *groupRun) leaveOut(ctx context.Context, c choice, took time.Duration) choice {
	if r.dead != nil || ctx.Err() != nil {
		return c
	}
	in, n := choice{scenario: c.scenario}, 0
	var had time.Duration
	for _, i := range c.items {
		limit := r.session.options.sabotageTime.in(r.group.world, r.group.overlay, i.row.Name)
		if i.skip != "" || limit == 0 || took <= limit {
			in.items = append(in.items, i)
			continue
		}
		r.result.LeftOut = append(r.result.LeftOut, i.String())
		n, had = n+1, limit
	}
	if n > 0 {
		fmt.Fprintf(r.out, " - %-24s sabotages left out: %d. Those of this lab have had their %v\n", c.scenario.Name, n, had)
	}
	return in
}

// choice runs what there is of one scenario and prints how it went.
func (r *groupRun) choice(ctx context.Context, c choice, sabotage bool) {
	if len(c.items) == 0 {
		return
	}
	sc := report.Scenario{
		Name: c.scenario.Name, Description: c.scenario.Description, File: c.scenario.File,
		World: r.group.world, Overlay: r.group.overlay, Sabotage: sabotage,
	}
	items := slices.Concat(slices.Repeat([][]item{c.items}, max(r.session.options.repeat, 1))...)
	sc.Rows = r.lookAtOnce(ctx, c.scenario, items)
	for n, i := range items {
		if v := sc.Rows[n].Verdict; v == "" || v == report.Infra {
			sc.Rows[n] = r.item(ctx, c, i, sc.Rows[n])
		}
		r.keepPackets(ctx, &sc.Rows[n])
	}
	r.scenarios = append(r.scenarios, sc)
	report.PrintScenario(r.out, sc, *r.session.run)
}

// atOnce is how many rows that only look run at a time.
func (r *groupRun) atOnce() int {
	if r.lab.emulated {
		return 2 // it has one processor
	}
	return 6
}

// lookAtOnce runs what only looks; the others have no verdict yet.
func (r *groupRun) lookAtOnce(ctx context.Context, s *scenario.Scenario, items []item) []report.Row {
	out := make([]report.Row, len(items))
	if r.dead != nil || ctx.Err() != nil {
		return out
	}
	var rows []scenario.Row
	var at []int
	for n, i := range items {
		if i.sabotage == nil && i.skip == "" && runner.OnlyLooks(s, i.row) {
			rows, at = append(rows, i.row), append(at, n)
		}
	}
	if len(rows) == 0 {
		return out
	}
	for n, row := range r.runner().RunAll(ctx, s, rows, r.atOnce()) {
		out[at[n]] = row
	}
	r.revive(ctx)
	return out
}

// rebuilds is how often a lab is built again. A row that fails leaves its lab
// unlike it was, and so do several that fail for one reason: what they leave
// unjudged would hide all that the group could still show.
const rebuilds = 3

// attempts is how often a row may run when errors of the lab end it.
// Expectations are never tried again.
const attempts = 2

// item runs one row, or one sabotage of it. Where an error of the lab has ended
// it before, that was how it went.
func (r *groupRun) item(ctx context.Context, c choice, i item, before report.Row) report.Row {
	res, n := before, 1
	if before.Verdict == "" {
		res, n = report.Row{Name: i.row.Name, Verdict: report.Infra, Reason: "interrupted"}, 0
	}
	if i.sabotage != nil {
		res.Sabotage = i.sabotage.String()
	}
	if i.skip != "" {
		res.Verdict, res.Reason = report.Skip, i.skip
		return res
	}
	var retried []string
	for ; n < attempts; n++ {
		if r.dead != nil {
			res.Reason = r.dead.Error()
			if errors.Is(r.dead, errAppliance) {
				res.Verdict = report.Fail
			}
		}
		if r.dead != nil || ctx.Err() != nil {
			break
		}
		if n > 0 {
			fmt.Fprintf(r.out, "   %s: the lab failed, so the row is run again: %s\n", i.row.Name, firstLine(res.Reason))
			retried = append(retried, res.Reason)
		}
		if i.sabotage != nil {
			res = r.runner().RunSabotage(ctx, c.scenario, i.row, *i.sabotage)
		} else {
			res = r.runner().Run(ctx, c.scenario, i.row)
		}
		r.revive(ctx)
		if res.Verdict != report.Infra {
			break
		}
	}
	res.Retried = retried
	return res
}

// keepPackets writes the evidence of a row that has none, where that is asked
// for.
func (r *groupRun) keepPackets(ctx context.Context, row *report.Row) {
	if r.session.options.pcap != "always" || row.Bundle != "" || row.Verdict == report.Skip || r.dead != nil || r.lab == nil {
		return
	}
	if dir, err := r.bundle(ctx, r.lab, row); err == nil {
		row.Bundle = dir
	}
}

// open builds the group's lab, or finds the one that lab up has built.
func (r *groupRun) open(ctx context.Context) error {
	if err := r.find(ctx); err != nil || r.lab == nil {
		return err
	}
	// The other worlds capture from the start.
	if l, ok := r.lab.client.(*kind.Lab); ok {
		if err := l.Capture(ctx); err != nil && !errors.Is(err, world.ErrNoCaptures) {
			return err
		}
	}
	status, err := r.lab.client.Status(ctx)
	if err == nil && status.VM != nil && status.VM.Retries > 0 {
		r.result.Retried = append(r.result.Retried, fmt.Sprintf("the virtual machine got stuck %d times before it had booted", status.VM.Retries))
	}
	if r.lab.emulated = err == nil && isEmulated(status); r.lab.emulated {
		fmt.Fprintf(r.out, "   the machine is emulated: steps are given %d times as long as scenarios say\n", emulatedPatience)
	}
	return nil
}

func (r *groupRun) find(ctx context.Context) error {
	g, o := r.group, r.session.options
	name := g.name()
	c, why := r.session.labs.find(ctx, labConfig{name: name, topology: g.topology, world: g.world, overlay: g.overlay})
	switch {
	case c != nil && !o.fresh:
		fmt.Fprintf(r.out, "using lab %s, which is up\n", name)
		r.lab = &builtLab{client: c, name: name, topology: g.topology, overlay: g.overlay, found: true}
		return nil
	case why != "" && !o.fresh:
		fmt.Fprintf(r.out, "lab %s is up and is not used: %s (lab down %[1]s takes it down)\n", name, why)
	}
	if !o.keep || o.fresh || why != "" {
		name += "-run-" + o.seed // beside another run
	}
	fmt.Fprintln(r.out, name)
	warm, err := useSnapshots(o.snapshot)
	if err != nil {
		return err
	}
	b := builder{place: r.session.place, out: r.out, clusters: r.session.clusters, probeImage: o.probeImage}
	lab, err := b.build(ctx, labConfig{name: name, topology: g.topology, world: g.world, overlay: g.overlay, ephemeral: !o.keep, snapshots: warm})
	if lab != nil {
		r.result.Phases = lab.phases
	}
	if err != nil && lab != nil {
		r.labEvidence(ctx, lab)
		r.lab = lab
		r.close()
		r.lab = nil
		return err
	}
	r.lab = lab
	return err
}

// labEvidence writes what explains a lab that did not come up.
func (r *groupRun) labEvidence(ctx context.Context, lab *builtLab) {
	name := r.group.name()
	dir, err := r.session.dir.RowDir(report.Row{Name: "lab-" + name})
	if err == nil {
		run := &runner.Runner{World: lab.client}
		again := fmt.Sprintf("lab up %s --world %s --overlay %s", r.group.topology.File, r.group.world, r.group.overlay)
		if r.group.world == kubeconfig.World { // nobody builds these
			again = fmt.Sprintf("lab run --world %s %s", r.group.world, r.session.options.keptWith())
		}
		err = run.Evidence(context.WithoutCancel(ctx), dir, lab.topology, &report.Row{Name: name}, again)
	}
	fmt.Fprintf(r.out, "   evidence: %s\n", dir)
	if err != nil {
		fmt.Fprintf(r.out, "   not all of it: %v\n", err)
	}
}

func (r *groupRun) close() {
	switch {
	case r.lab.found: // lab up built it, lab down takes it down
	case r.session.options.keep:
		fmt.Fprintf(r.out, "lab %s stays up: lab down %s\n", r.lab.name, r.lab.name)
	default:
		if err := r.lab.client.Close(); err != nil {
			fmt.Fprintf(r.out, "   taking the lab down: %v\n", err)
			r.result.Left = err.Error()
		}
	}
}

// revive makes sure that there is a lab, and that it is what it was before its
// first row.
func (r *groupRun) revive(ctx context.Context) {
	if r.dead != nil || ctx.Err() != nil {
		return
	}
	why := r.runner().Spoiled()
	if _, err := r.lab.client.Status(ctx); err != nil {
		why = fmt.Errorf("the lab is gone: %w", err)
	}
	switch {
	case why == nil:
		return
	case r.lab.found:
		r.dead = fmt.Errorf("lab %s is not what it was any more, and was up before this run: lab down %[1]s takes it down: %w", r.lab.name, why)
		return
	case r.rebuilt == rebuilds:
		r.dead = fmt.Errorf("the lab had to be built again %d times already: %w", rebuilds, why)
		return
	}
	fmt.Fprintf(r.out, "   a new lab, because this one is not what it was any more: %s\n", firstLine(why.Error()))
	r.rebuilt++
	r.result.Retried = append(r.result.Retried, why.Error())
	// One that is gone can't be taken down either.
	if err := r.lab.client.Close(); err != nil {
		fmt.Fprintf(r.out, "   taking the lab down: %v\n", err)
	}
	r.lab = nil
	if err := r.open(ctx); err != nil {
		r.dead = fmt.Errorf("the lab could not be built again: %w", err)
	}
}

// runner returns the runner of the lab, which remembers what the row before
// did to it.
func (r *groupRun) runner() *runner.Runner {
	if r.lab.runner == nil {
		lab := r.lab
		lab.runner = &runner.Runner{
			World: lab.client, Seed: r.session.options.seed,
			Converged: lab.converged, Connect: lab.connect, Operator: lab.operator(r.session.place),
			Bundle: func(ctx context.Context, row *report.Row) (string, error) {
				if r.session.options.pcap == "never" {
					return "", nil
				}
				return r.bundle(ctx, lab, row)
			},
			Progress: r.session.progress(), Pace: r.session.pace, OfOthers: lab.topology.OfOthers,
		}
		if lab.emulated {
			lab.runner.ProbeTimeout, lab.runner.Patience = emulatedTimeout, emulatedPatience
			lab.runner.FreshInterval, lab.runner.FlowInterval = emulatedFreshInterval, emulatedFlowInterval
		}
	}
	return r.lab.runner
}

// isEmulated tells whether a lab's virtual machine has no processor of its own.
func isEmulated(s world.Status) bool { return s.VM != nil && s.VM.Accelerator == vm.TCG }

// emulatedTimeout is how long a probe waits for its answer in a machine that is
// emulated: there a new connection took 4 s while everybody in it dialled
// an API server that was gone, right after the lab had come up.
const emulatedTimeout = 10 * time.Second

// emulatedPatience is how many times as long steps are given there: a node that
// joins in 5 s natively took more than 30.
const emulatedPatience = 3

// emulatedFreshInterval is the least time between new flows there. Its one processor
// takes some 12 ms for the first packets of a flow, through the tables of five
// namespaces and as many captures each: with 83 a second a gateway took 4 s for
// a change that takes 0.1 s natively, and every eighth flow had no answer within
// a second.
const emulatedFreshInterval = 50 * time.Millisecond

// emulatedFlowInterval is the least time between two messages of another stream
// there, twice what it is elsewhere: four of them took most of a processor that
// has to do everything else as well, so that answers took seconds.
const emulatedFlowInterval = 100 * time.Millisecond

func (r *groupRun) bundle(ctx context.Context, lab *builtLab, row *report.Row) (string, error) {
	dir, err := r.session.dir.RowDir(*row)
	if err != nil {
		return "", err
	}
	again := fmt.Sprintf("lab run %s --seed %s --world %s %s", row.Name, r.session.options.seed, r.group.world, r.session.options.keptWith())
	if row.Sabotage != "" {
		again += " --sabotage"
	}
	run := &runner.Runner{World: lab.client}
	return dir, run.Evidence(ctx, dir, lab.topology, row, again)
}

// progress prints what is being done, where somebody looks and one lab at a
// time is used.
func (s *session) progress() func(string) {
	if s.options.jobs > 1 {
		return nil
	}
	return transient(s.out)
}

// transient shows a text until the next one, or the next line, where somebody
// looks: on a terminal. Elsewhere it is nil.
func transient(out io.Writer) func(string) {
	f, ok := out.(*os.File)
	if !ok || !isTerminal(f) {
		return nil
	}
	return func(text string) { fmt.Fprintf(f, "\r\x1b[K   %s\r", text) }
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
