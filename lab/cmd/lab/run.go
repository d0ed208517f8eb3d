package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
	"github.com/isthmus-net/isthmus/lab/internal/pace"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// runOptions are the flags of lab run.
type runOptions struct {
	world, overlay, seed, shard, junit, pcap, dir string
	sabotage                                      string // "", sabotageOnly or sabotageAfter
	snapshot                                      string // auto or off
	repeat, jobs                                  int
	rows, sabotages                               int // of each scenario at most; 0: all
	sabotageTime                                  sabotageTimes
	time                                          time.Duration // of the run, in which rows and sabotages begin; 0: always
	stretch                                       float64       // what bounds are multiplied with at most where the machine is busy
	keep, asJSON, plan, fresh                     bool
	ci                                            bool
	kubeconfigs                                   []string // of the world kubeconfig, as kubeconfig.ParseAccess reads them
	probeImage                                    string   // in that world
}

// Values of --sabotage.
const (
	sabotageOnly  = "only"  // what the flag alone means
	sabotageAfter = "after" // the rows, then the sabotages
)

func newRunCommand(a *app, root *string) *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run [PATTERN...]",
		Short: "run scenarios and say what held",
		Long: `run builds the labs that the scenarios need (or uses those that lab up has built
of the same checkout, topology, chart and programs, and says why it does not use
another one), runs the rows and prints a line for what held and an explanation for what did not.
A pattern is a scenario, or a row or a part of one: pod-to-pod, pod-to-pod/vxlan,
'*/*/udp'. PATTERN@OVERLAY stands for those of its rows that can run in that
overlay, PATTERN@kind for those that run in clusters of kind, and '!PATTERN' leaves rows out.
Of the sabotages that a scenario has in several overlays each is made
in one, and one at least in every overlay.

Each row runs in the fastest world that has what it needs: a lab that is up, then
this kernel (native), then the virtual machine (vm). Rows that name an overlay run
in a lab with that overlay. With --world kind those rows run that clusters of kind
have everything for, as with PATTERN@kind; the others are listed as not selected, with the reason.

With --world kubeconfig rows run in clusters that you have, which have Isthmus and are
peered: --kubeconfig milan=FILE@CONTEXT says which is scenarios' milan, --probe-image
from where their nodes pull the lab's probe (make node-images leaves it in bin/images). The lab
creates pods in their namespace default, sends probes between them, and deletes them.
It changes nothing else, unless you ask for --sabotage. Those rows run that need no more
than that.

With --jobs 2 two labs are up at a time, with --jobs 3 and more a further one each time
the machine's processors have been idle for a quarter of 20 seconds. Virtual machines come first;
where they are emulated one runs at a time, or two where there is such room or no other lab is left,
and none beside labs with containerd or of kind. With fewer than four processors a lab
with containerd runs alone, and an emulated machine, too; with --jobs 3 it has one lab of this kernel
beside it where it leaves such room.

Every run leaves runs/<time>-<seed> (and runs/latest): result.json, and for each
row that failed the packets, the state of every host, logs and API objects.`,
		Example: `  lab run
  lab run pod-to-pod/vxlan/tcp --keep
  lab run drift --repeat 20 --seed 8f3a
  lab run --overlay vxlan            # what needs no Geneve
  lab run '*@vxlan' 'drift@geneve'   # the same, and one scenario with Geneve
  lab run '*@vxlan' '!real-nodes-*'  # without those
  lab run --sabotage                 # every scenario must be able to fail
  lab run --sabotage=after --jobs 2  # rows, then sabotages; two labs at once
  lab run --sabotage=after --rows 1 --sabotages 1  # one of each scenario
  lab run --sabotage=after --sabotage-time 20s --sabotage-time '*@geneve=0'  # few of them but with Geneve
  lab run --plan                     # what would run
  lab run --world kubeconfig --kubeconfig milan=a.yaml --kubeconfig rome=b.yaml \
    --probe-image registry.example.com/isthmus-lab/probe:dev connectivity
  lab run --shard 1/4 --junit report.xml`,
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := findPlace(*root)
			if err != nil {
				return err
			}
			o.ci = os.Getenv("CI") != ""
			return a.runScenarios(cmd.Context(), p, args, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.world, "world", "auto", "auto, native, vm, kind or kubeconfig; auto is one of the first two")
	f.StringArrayVar(&o.kubeconfigs, "kubeconfig", nil, "NAME=FILE[@CONTEXT]: with --world kubeconfig, the cluster that scenarios call NAME; once for each")
	f.StringVar(&o.probeImage, "probe-image", "", "with --world kubeconfig, the image of the lab's probe")
	f.StringVar(&o.overlay, "overlay", overlayAuto, "only rows that can run in this overlay: geneve or vxlan; auto: all. PATTERN@OVERLAY has its own")
	f.StringVar(&o.seed, "seed", "", "decides the order of rows, and which sabotages --sabotages makes (default: random, printed)")
	f.StringVar(&o.shard, "shard", "", "i/n: the i-th of n parts of the rows")
	f.IntVar(&o.rows, "rows", 0, "at most so many rows of each scenario and @, spread over all that it has; 0: all of them")
	f.IntVar(&o.sabotages, "sabotages", 0, "at most so many sabotages of each scenario and @, for --sabotage; the seed draws which; 0: all of them")
	f.Var(&o.sabotageTime, "sabotage-time", "begin no further sabotage in a lab when its sabotages have taken so much time, and say which were left out; the seed decides which come first; 0: make them all. With PATTERN=TIME, which may be given besides and more than once, the sabotages of those rows have a time of their own")
	f.DurationVar(&o.time, "time", 0, "begin no further row and no sabotage when the run has taken so much time, and say which were left out; 0: run them all")
	f.Float64Var(&o.stretch, "stretch", pace.Most, "where the machine is busy, bounds of steps are so many times as long at most: from 1 to 5")
	f.IntVar(&o.repeat, "repeat", 1, "run every row so many times")
	f.IntVar(&o.jobs, "jobs", 1, "labs at the same time")
	f.BoolVar(&o.keep, "keep", false, "leave the labs up afterwards")
	f.BoolVar(&o.fresh, "fresh", false, "build labs of its own, even where lab up has built one of the same files")
	f.StringVar(&o.sabotage, "sabotage", "", "break what the scenarios name and expect them to fail there; after: once the rows have run")
	f.Lookup("sabotage").NoOptDefVal = sabotageOnly
	f.StringVar(&o.junit, "junit", "", "write JUnit XML to this file")
	f.BoolVar(&o.asJSON, "json", false, "print the result as JSON; progress goes to stderr")
	f.StringVar(&o.pcap, "pcap", "fail", "when to write packets: fail, always or never")
	f.BoolVar(&o.plan, "plan", false, "print what would run, and run nothing")
	f.StringVar(&o.dir, "scenarios", "", "folder with scenarios (default: scenarios)")
	snapshotFlag(cmd, &o.snapshot)
	return cmd
}

func (o runOptions) check() error {
	if _, err := useSnapshots(o.snapshot); err != nil {
		return err
	}
	if o.pcap != "fail" && o.pcap != "always" && o.pcap != "never" {
		return usageError("--pcap %q: fail, always or never", o.pcap)
	}
	if o.sabotage != "" && o.sabotage != sabotageOnly && o.sabotage != sabotageAfter {
		return usageError("--sabotage=%s: --sabotage for nothing else, --sabotage=after for rows first", o.sabotage)
	}
	if err := o.checkKubeconfigs(); err != nil {
		return err
	}
	if o.rows < 0 {
		return usageError("--rows %d: at most so many rows of each scenario, or 0 for all", o.rows)
	}
	if o.sabotages < 0 {
		return usageError("--sabotages %d: at most so many sabotages of each scenario, or 0 for all", o.sabotages)
	}
	if o.sabotage == "" && (o.sabotages > 0 || o.sabotageTime.limited()) {
		return usageError("--sabotages and --sabotage-time say which sabotages are made: add --sabotage or --sabotage=after")
	}
	if !(o.stretch >= 1 && o.stretch <= pace.Most) { // not a number is neither
		return usageError("--stretch %v: from 1, as scenarios say, to %d times as long", o.stretch, pace.Most)
	}
	if o.time < 0 {
		return usageError("--time %v: a time such as 30m, or 0 to run all rows", o.time)
	}
	if o.jobs < 1 {
		return usageError("--jobs %d: at least one lab at a time", o.jobs)
	}
	return nil
}

func (a *app) runScenarios(ctx context.Context, p place, patterns []string, o runOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	if o.seed == "" {
		o.seed = newSeed()
	}
	if o.dir == "" {
		o.dir = p.scenarios()
	}
	all, err := scenario.LoadAll(o.dir, p.topologies())
	var bad *yamlfile.Error
	switch {
	case errors.As(err, &bad):
		return exitError{report.ExitUsage, err.Error()}
	case err != nil:
		return usageError("%v", err)
	}
	if err := o.sabotageTime.check(all); err != nil {
		return err
	}
	selected, err := choose(all, patterns, o)
	if err != nil {
		return err
	}
	out := a.stdout
	if o.asJSON {
		out = a.stderr
	}
	var have []kubeconfig.Cluster
	inKind := func(sel selection) bool { return cmp.Or(sel.at.world, o.world) == kind.World }
	withKind := slices.ContainsFunc(selected, inKind)
	switch {
	case withKind && o.world == kubeconfig.World:
		return usageError("PATTERN@kind: with --world kubeconfig all rows run in the clusters that --kubeconfig names")
	case withKind:
		engine, err := kind.FindEngine(ctx)
		captures := err != nil || kind.CanCapture(engine) // without an engine rows are skipped, and say so
		var left []selection
		for _, sel := range selected {
			if inKind(sel) {
				left = append(left, ofKind(captures).leave(out, []selection{sel}, o.sabotage != "")...)
			} else {
				left = append(left, sel)
			}
		}
		selected = left
	case o.world == kubeconfig.World:
		if have, err = readClusters(ctx, out, o.kubeconfigs); err != nil {
			return err
		}
		selected = leaveForClusters(out, selected, have, patterns, o)
		for _, sel := range selected {
			kubeconfig.Take(sel.scenario.Topology, have)
		}
	}
	if o.plan {
		printPlan(a.stdout, selected, o)
		return nil
	}
	if len(selected) == 0 {
		return exitError{report.ExitNone, "lab: nothing to run"}
	}
	labs := newReuse(p)
	var up labUp
	if !o.fresh {
		up = labs.up(ctx)
	}
	chooser, err := newChooser(o.world, o.overlay, probe(ctx, p, withKind), up)
	if err != nil {
		return err
	}
	chooser.clusters = have
	run := report.Run{Seed: o.seed, World: o.world, Again: o.keptWith(), Version: version, Started: time.Now(), Labs: []report.Lab{}}
	dir, err := report.NewDir(p.runs(), run.Started, o.seed)
	if err != nil {
		return infraError(err)
	}
	fmt.Fprintf(out, "seed %s · results in %s\n", o.seed, dir.Path)
	if _, err := removeDead(ctx, out, rundir.Base(), kind.Kept()); err != nil {
		return err
	}
	meter := pace.Start(ctx, o.stretch)
	s := &session{app: a, place: p, labs: labs, out: out, options: o, dir: dir, run: &run, clusters: have, pace: meter}
	s.runGroups(pace.With(ctx, meter), groups(selected, chooser, o), chooser)
	run.Took = report.Duration(time.Since(run.Started))
	run.Slowdown = s.pace.Since(run.Started)
	return s.finish()
}

// A session is one lab run.
type session struct {
	app     *app
	place   place
	labs    *reuse
	out     io.Writer
	options runOptions
	dir     report.Dir
	run     *report.Run
	pace    *pace.Meter
	// clusters are those of the world kubeconfig.
	clusters []kubeconfig.Cluster
}

// over tells whether the run has had its time, so that nothing more begins.
func (s *session) over() bool {
	return s.options.time > 0 && time.Since(s.run.Started) > s.options.time
}

func printLines(w io.Writer, lines []string) {
	for _, line := range lines {
		fmt.Fprintln(w, line)
	}
}

// runGroups runs the groups, as many at a time as there are jobs. Each says
// first what it runs and why there.
func (s *session) runGroups(ctx context.Context, all []*group, c chooser) {
	for _, g := range all {
		why := c.why(g.world, g.lacks, c.up != nil && c.up(g.topology, g.world, g.overlay))
		fmt.Fprintln(s.out, g.describe(why))
	}
	var worlds []string
	for _, g := range all {
		if !slices.Contains(worlds, g.world) {
			worlds = append(worlds, g.world)
			printLines(s.out, c.tight(g.world))
		}
	}
	output := newSequence(s.out)
	ran := make(map[*group]*groupRun, len(all))
	for _, g := range all {
		ran[g] = &groupRun{session: s, group: g}
	}
	q := newQueue(all, s.options.jobs, s.emulated(ctx, all), runtime.NumCPU(), inotifyLimit())
	var wg sync.WaitGroup
	var room sync.Mutex // held by the one that looks for room
	for n := range s.options.jobs {
		wg.Go(func() {
			for {
				g := s.next(ctx, q, n >= alwaysAtOnce, &room)
				if g == nil {
					return
				}
				part := output.add() // what starts first is printed first
				ran[g].out = part
				ran[g].all(ctx)
				part.Close() // an output that is gone has no reader
				q.done(g)
			}
		})
	}
	wg.Wait()
	for _, g := range all {
		s.run.Labs = append(s.run.Labs, ran[g].result)
		s.run.Scenarios = append(s.run.Scenarios, ran[g].scenarios...)
	}
}

// next is the group to run now. It is nil when no group is left. An extra lab waits until
// the machine has room. Only one of them looks at a time: two would find the same room.
func (s *session) next(ctx context.Context, q *queue, extra bool, room *sync.Mutex) *group {
	if !extra {
		return q.take(false)
	}
	room.Lock()
	defer room.Unlock()
	if !waitForRoom(ctx, q) {
		return nil
	}
	return q.take(true)
}

// emulated tells whether the virtual machines of groups are emulated: whether a
// guest boots under KVM is known only when one has been tried.
func (s *session) emulated(ctx context.Context, all []*group) bool {
	if !slices.ContainsFunc(all, func(g *group) bool { return g.world == supervisor.VM }) {
		return false
	}
	img, err := buildImage(ctx, s.place, s.out)
	if err != nil {
		return true // and the labs will say why
	}
	accelerator, _ := vm.Accelerator(ctx, img, "")
	return accelerator == vm.TCG
}

// finish writes the results and returns the exit code.
func (s *session) finish() error {
	report.PrintSummary(s.out, *s.run)
	if err := s.dir.WriteResult(*s.run); err != nil {
		return infraError(err)
	}
	if s.options.junit != "" {
		f, err := os.Create(s.options.junit)
		if err != nil {
			return infraError(err)
		}
		defer f.Close()
		if err := report.WriteJUnit(f, *s.run); err != nil {
			return infraError(err)
		}
	}
	if s.options.asJSON {
		if err := report.WriteJSON(s.app.stdout, *s.run); err != nil {
			return infraError(err)
		}
	}
	if code := s.run.ExitCode(s.options.ci); code != report.ExitPass {
		return exitError{code: code}
	}
	return nil
}
