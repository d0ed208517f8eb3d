package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/runner"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/world"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// runOptions are the flags of lab run.
type runOptions struct {
	world, seed, shard, junit, pcap, dir string
	repeat                               int
	keep, sabotage, asJSON, plan, fresh  bool
	ci                                   bool
}

func newRunCommand(a *app, root *string) *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run [PATTERN...]",
		Short: "run scenarios and say what held",
		Long: `run builds the topology of each scenario (or uses it where lab up has built it),
runs the rows and prints a line for what held and an explanation for what did not.
A pattern is a scenario, or a row or a part of one: pod-to-pod, pod-to-pod/tcp,
'*/udp/*'.

Every run leaves runs/<time>-<seed> (and runs/latest): result.json, and for each
row that failed the packets, the state of every host, logs and API objects.`,
		Example: `  lab run
  lab run pod-to-pod/tcp --keep
  lab run drift --repeat 20 --seed 8f3a
  lab run --sabotage                 # every scenario must be able to fail
  lab run --plan                     # what would run
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
	f.StringVar(&o.world, "world", "auto", "auto, native or vm")
	f.StringVar(&o.seed, "seed", "", "decides the order of rows (default: random, printed)")
	f.StringVar(&o.shard, "shard", "", "i/n: the i-th of n parts of the rows")
	f.IntVar(&o.repeat, "repeat", 1, "run every row so many times")
	f.BoolVar(&o.keep, "keep", false, "leave the lab up afterwards")
	f.BoolVar(&o.fresh, "fresh", false, "build a lab of its own, even where lab up has built one")
	f.BoolVar(&o.sabotage, "sabotage", false, "break what the scenarios name and expect them to fail there")
	f.StringVar(&o.junit, "junit", "", "write JUnit XML to this file")
	f.BoolVar(&o.asJSON, "json", false, "print the result as JSON; progress goes to stderr")
	f.StringVar(&o.pcap, "pcap", "fail", "when to write packets: fail, always or never")
	f.BoolVar(&o.plan, "plan", false, "print what would run, and run nothing")
	f.StringVar(&o.dir, "scenarios", "", "folder with scenarios (default: scenarios)")
	return cmd
}

func (a *app) runScenarios(ctx context.Context, p place, patterns []string, o runOptions) error {
	if o.pcap != "fail" && o.pcap != "always" && o.pcap != "never" {
		return usageError("--pcap %q: fail, always or never", o.pcap)
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
	selected, err := choose(all, patterns, o)
	if err != nil {
		return err
	}
	if o.plan {
		printPlan(a.stdout, selected, o)
		return nil
	}
	if len(selected) == 0 {
		return exitError{report.ExitNone, "lab: nothing to run"}
	}
	probes := world.Doctor(ctx, p.bin())
	worldName, why, err := chooseWorld(o.world, probes)
	if err != nil {
		return err
	}
	out := a.stdout
	if o.asJSON {
		out = a.stderr
	}
	run := report.Run{Seed: o.seed, World: worldName, Version: version, Started: time.Now(), Sabotage: o.sabotage, Labs: []report.Lab{}}
	dir, err := report.NewDir(p.runs(), run.Started, o.seed)
	if err != nil {
		return infraError(err)
	}
	fmt.Fprintf(out, "seed %s · %s%s · results in %s\n", o.seed, worldName, why, dir.Path)
	s := &session{app: a, place: p, out: out, options: o, dir: dir, run: &run, features: nativeFeatures(probes)}
	for _, g := range groups(selected, worldName) {
		s.runGroup(ctx, g)
	}
	run.Took = report.Duration(time.Since(run.Started))
	return s.finish()
}

// A group is the scenarios that share a lab.
type group struct {
	topology, world string
	choices         []choice
}

func groups(selected []choice, worldName string) []group {
	var out []group
	for _, c := range selected {
		w := worldName
		if c.scenario.World != scenario.WorldAuto {
			w = c.scenario.World
		}
		found := false
		for i := range out {
			if out[i].topology == c.scenario.Topology.Name && out[i].world == w {
				out[i].choices = append(out[i].choices, c)
				found = true
			}
		}
		if !found {
			out = append(out, group{c.scenario.Topology.Name, w, []choice{c}})
		}
	}
	return out
}

// A session is one lab run.
type session struct {
	app     *app
	place   place
	out     io.Writer
	options runOptions
	dir     report.Dir
	run     *report.Run
	// features are what scenarios can require and this kernel has.
	features []string
}

// runGroup builds the lab of a group, once more when that failed, and runs
// its rows.
func (s *session) runGroup(ctx context.Context, g group) {
	skipped := s.unsupported(g)
	var lab *builtLab
	var err error
	result := report.Lab{Topology: g.topology, World: g.world}
	if len(skipped) < len(g.choices) {
		lab, err = s.open(ctx, g, &result)
		if err != nil && ctx.Err() == nil {
			fmt.Fprintf(s.out, "   the lab failed, once more: %v\n", err)
			result.Retries++
			lab, err = s.open(ctx, g, &result)
		}
	}
	if err != nil {
		result.Error = err.Error()
		fmt.Fprintf(s.out, "   the lab failed: %v\n", err)
	}
	held := &heldLab{lab: lab, group: g, result: &result}
	defer func() {
		s.run.Labs = append(s.run.Labs, result)
		if held.lab != nil {
			s.closeLab(held.lab)
		}
	}()
	for _, c := range g.choices {
		sc := report.Scenario{Name: c.scenario.Name, Description: c.scenario.Description, File: c.scenario.File}
		switch {
		case skipped[c.scenario.Name] != "":
			sc.Rows = same(c, s.options, report.Skip, skipped[c.scenario.Name])
		case err != nil:
			sc.Rows = same(c, s.options, report.Infra, err.Error())
		default:
			sc.Rows = s.runChoice(ctx, held, c)
		}
		s.run.Scenarios = append(s.run.Scenarios, sc)
		report.PrintScenario(s.out, sc, *s.run)
	}
}

// unsupported returns why scenarios can't run in this world, by name.
func (s *session) unsupported(g group) map[string]string {
	out := map[string]string{}
	if g.world == supervisor.VM {
		return out // its kernel has them all
	}
	for _, c := range g.choices {
		missing := missingFeatures(c.scenario.Requires, s.features)
		switch {
		case missing == "":
		case c.scenario.World == supervisor.Native:
			out[c.scenario.Name] = missing + "; the scenario asks for the native world, so take a kernel that has it"
		default:
			out[c.scenario.Name] = missing + "; run it with --world vm"
		}
	}
	return out
}

// open builds the lab of a group, or finds the one that lab up has built.
func (s *session) open(ctx context.Context, g group, result *report.Lab) (*builtLab, error) {
	t := g.choices[0].scenario.Topology
	if c, err := supervisor.Find(t.Name); err == nil && !s.options.fresh {
		if status, err := c.Status(ctx); err == nil && status.World == g.world && status.Phase == world.PhaseReady {
			fmt.Fprintf(s.out, "using lab %s, which is up\n", t.Name)
			return &builtLab{client: c, topology: t, found: true}, nil
		}
	}
	fmt.Fprintf(s.out, "%s in the %s world\n", t.Name, g.world)
	named := *t
	if !s.options.keep || s.options.fresh {
		// Beside a lab of the same topology in another world, and beside
		// another run.
		named.Name = t.Name[:min(len(t.Name), 24)] + "-run-" + s.options.seed
	}
	lab, err := builder{s.place, s.out}.build(ctx, &named, g.world, !s.options.keep)
	if lab != nil {
		result.Phases = lab.phases
	}
	if err != nil && lab != nil {
		s.labEvidence(ctx, lab, t.Name)
		s.closeLab(lab)
	}
	return lab, err
}

// labEvidence writes what explains a lab that did not come up.
func (s *session) labEvidence(ctx context.Context, lab *builtLab, name string) {
	dir, err := s.dir.RowDir(report.Row{Name: "lab-" + name})
	if err == nil {
		r := &runner.Runner{World: lab.client}
		err = r.Evidence(context.WithoutCancel(ctx), dir, lab.topology, &report.Row{Name: name}, "lab up "+name)
	}
	fmt.Fprintf(s.out, "   evidence: %s\n", dir)
	if err != nil {
		fmt.Fprintf(s.out, "   not all of it: %v\n", err)
	}
}

func (s *session) closeLab(lab *builtLab) {
	if lab.found {
		return // lab up built it, lab down takes it down
	}
	if s.options.keep {
		fmt.Fprintf(s.out, "lab %s stays up: lab down %s\n", lab.topology.Name, lab.topology.Name)
		return
	}
	if err := lab.client.Close(); err != nil {
		fmt.Fprintf(s.out, "   taking the lab down: %v\n", err)
	}
}

// A heldLab is the lab of a group while its rows run. A lab that has died is
// built once more.
type heldLab struct {
	lab    *builtLab
	group  group
	result *report.Lab
	dead   error
}

// revive makes sure that there is a lab.
func (s *session) revive(ctx context.Context, h *heldLab) {
	if h.dead != nil || ctx.Err() != nil {
		return
	}
	if _, err := h.lab.client.Status(ctx); err == nil {
		return
	}
	fmt.Fprintf(s.out, "   the lab is gone\n")
	if h.result.Retries > 0 {
		h.dead = errors.New("the lab went away, twice")
		return
	}
	h.result.Retries++
	lab, err := s.open(ctx, h.group, h.result)
	if err != nil {
		h.dead = fmt.Errorf("the lab went away and could not be built again: %w", err)
		return
	}
	h.lab = lab
}

func (s *session) runChoice(ctx context.Context, h *heldLab, c choice) []report.Row {
	var rows []report.Row
	for _, row := range c.rows {
		for range max(s.options.repeat, 1) {
			rows = append(rows, s.runRow(ctx, h, c.scenario, row)...)
		}
	}
	return rows
}

// attempts is how often a row may run when errors of the lab end it.
// Expectations are never tried again.
const attempts = 2

func (s *session) runRow(ctx context.Context, h *heldLab, sc *scenario.Scenario, row scenario.Row) []report.Row {
	once := []func(*runner.Runner) report.Row{func(r *runner.Runner) report.Row { return r.Run(ctx, sc, row) }}
	if s.options.sabotage {
		once = nil
		for _, sab := range sc.BuildSabotage(row) {
			once = append(once, func(r *runner.Runner) report.Row { return r.RunSabotage(ctx, sc, row, sab) })
		}
	}
	var out []report.Row
	for _, run := range once {
		res := report.Row{Name: row.Name, Verdict: report.Infra, Reason: "interrupted"}
		for n := range attempts {
			if h.dead != nil {
				res.Reason = h.dead.Error()
			}
			if h.dead != nil || ctx.Err() != nil {
				break
			}
			if n > 0 {
				fmt.Fprintf(s.out, "   %s: the lab failed, once more: %s\n", row.Name, firstLine(res.Reason))
			}
			res = run(s.runner(h))
			res.Retries = n
			if res.Verdict != report.Infra {
				break
			}
			s.revive(ctx, h)
		}
		if s.options.pcap == "always" && res.Bundle == "" && h.dead == nil {
			if dir, err := s.bundle(ctx, h.lab, &res); err == nil {
				res.Bundle = dir
			}
		}
		out = append(out, res)
	}
	return out
}

// runner returns the runner of the lab, which remembers what the row before
// did to it.
func (s *session) runner(h *heldLab) *runner.Runner {
	if h.lab.runner == nil {
		lab := h.lab
		lab.runner = &runner.Runner{
			World: lab.client, Seed: s.options.seed,
			Converged: s.converged(lab),
			Bundle: func(ctx context.Context, row *report.Row) (string, error) {
				if s.options.pcap == "never" {
					return "", nil
				}
				return s.bundle(ctx, lab, row)
			},
			Progress: s.progress(),
		}
	}
	return h.lab.runner
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

func (s *session) bundle(ctx context.Context, lab *builtLab, row *report.Row) (string, error) {
	dir, err := s.dir.RowDir(*row)
	if err != nil {
		return "", err
	}
	again := fmt.Sprintf("lab run %s --seed %s --world %s --keep", row.Name, s.options.seed, s.run.World)
	r := &runner.Runner{World: lab.client}
	return dir, r.Evidence(ctx, dir, lab.topology, row, again)
}

// progress prints what is being done, where somebody looks.
func (s *session) progress() func(string) {
	return func(text string) {
		if f, ok := s.out.(*os.File); ok && isTerminal(f) {
			fmt.Fprintf(f, "\r\x1b[K   %s\r", text)
		}
	}
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

// same gives all rows of a choice one verdict.
func same(c choice, o runOptions, v report.Verdict, reason string) []report.Row {
	var rows []report.Row
	for _, r := range c.rows {
		rows = append(rows, report.Row{Name: r.Name, Verdict: v, Reason: reason})
	}
	return rows
}
