package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/bench"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
	"github.com/isthmus-net/isthmus/lab/internal/lane"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// benchTopology is what is measured: two nodes each, so that pods can be on
// other nodes than their gateway.
const benchTopology = "two-clusters"

// claimPairs is how many pairs a claim about speed needs.
const claimPairs = 5

// benchOptions are the flags of lab bench datapath.
type benchOptions struct {
	world, overlay, implementation string
	pairs                          int
	duration                       time.Duration
	asJSON                         bool
}

func newBenchCommand(a *app, root *string) *cobra.Command {
	cmd := &cobra.Command{Use: "bench", Short: "measure, as ratios within one run"}
	cmd.AddCommand(newBenchDatapathCommand(a, root), newBenchFirewallCommand(a), newBenchConnectCommand(a, root))
	return cmd
}

func newBenchDatapathCommand(a *app, root *string) *cobra.Command {
	var o benchOptions
	cmd := &cobra.Command{
		Use:   "datapath",
		Short: "how fast pods of two clusters reach each other, beside the bare tunnel and the underlay",
		Long: `datapath measures throughput, small packets, connections and latency on three
paths of one lab, one after the other and again: from pod to pod of the other
cluster (both on other nodes than their gateways), from gateway to gateway
through WireGuard, and from node to node of the other cluster. It prints how
the first compares with the two others: the median of the pairs' ratios, with
the smallest and the largest. No number is good or bad here: the machine
decides the numbers, and the ratios are to be compared within one world.

It does so for each overlay and each implementation of WireGuard that the
worlds have, in labs of its own, or in one that is up and is made so. The lab's
captures are paused meanwhile. With the default times a combination takes some
80 seconds, and what it takes to build its lab.`,
		Example: `  lab bench datapath
  lab bench datapath --world native --json > bench.json
  lab bench datapath --world vm --overlay geneve --implementation kernel
  lab bench datapath --pairs 11 --duration 3s`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := findPlace(*root)
			if err != nil {
				return err
			}
			return a.benchDatapath(cmd.Context(), p, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.world, "world", scenario.WorldAuto, "native or vm; auto: both, as far as they can run here")
	f.StringVar(&o.overlay, "overlay", overlayAuto, "geneve or vxlan; auto: both")
	f.StringVar(&o.implementation, "implementation", topology.ImplementationAuto, "of WireGuard: kernel or userspace; auto: both")
	f.IntVar(&o.pairs, "pairs", claimPairs, "how often each path is measured")
	f.DurationVar(&o.duration, "duration", time.Second, "of one measurement")
	f.BoolVar(&o.asJSON, "json", false, "print the result as JSON; progress and tables go to stderr")
	return cmd
}

func (o benchOptions) check() error {
	switch {
	case o.world == kubeconfig.World:
		return usageError("--world kubeconfig is for lab run")
	case !slices.Contains([]string{topology.ImplementationAuto, topology.ImplementationKernel, topology.ImplementationUserspace}, o.implementation):
		return usageError("--implementation %q: auto, kernel or userspace", o.implementation)
	case o.pairs < 1:
		return usageError("--pairs %d: at least one, and %d for a claim", o.pairs, claimPairs)
	case o.duration < time.Millisecond:
		return usageError("--duration %v: a millisecond at least", o.duration)
	}
	return nil
}

// A benchSite is a combination with the lab that it runs in.
type benchSite struct {
	bench.Combination
	topology *topology.Topology // with that implementation
	skip     string             // why it can't run
}

// benchSites are the combinations that were asked for, in both worlds when
// none was named.
func benchSites(t *topology.Topology, o benchOptions, c chooser) []benchSite {
	pick := func(asked, open string, all ...string) []string {
		if asked != open {
			return []string{asked}
		}
		return all
	}
	var out []benchSite
	for _, w := range pick(o.world, scenario.WorldAuto, supervisor.Native, supervisor.VM) {
		for _, overlay := range pick(o.overlay, overlayAuto, scenario.OverlayGeneve, scenario.OverlayVXLAN) {
			for _, implementation := range pick(o.implementation, topology.ImplementationAuto, topology.ImplementationKernel, topology.ImplementationUserspace) {
				s := benchSite{
					Combination: bench.Combination{World: w, Overlay: overlay, Implementation: implementation},
					topology:    withImplementation(t, implementation),
				}
				s.skip = c.try(need{topology: s.topology, overlay: overlay, world: scenario.WorldAuto}, w).skip
				if o.world == scenario.WorldAuto {
					s.skip = strings.TrimSuffix(s.skip, tryVM)
				}
				out = append(out, s)
			}
		}
	}
	return out
}

// withImplementation is a topology whose tunnels are made by this
// implementation of WireGuard.
func withImplementation(t *topology.Topology, implementation string) *topology.Topology {
	out := *t
	out.Peerings = slices.Clone(t.Peerings)
	for i := range out.Peerings {
		out.Peerings[i].Implementation = implementation
	}
	return &out
}

func (a *app) benchDatapath(ctx context.Context, p place, o benchOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	t, err := p.topologyNamed(benchTopology)
	if err != nil {
		return err
	}
	labs := newReuse(p)
	c, err := newChooser(o.world, o.overlay, world.Doctor(ctx, p.bin()), labs.up(ctx))
	if err != nil {
		return err
	}
	out := a.stdout
	if o.asJSON {
		out = a.stderr
	}
	if o.pairs < claimPairs {
		fmt.Fprintf(out, "%d pairs are to look at; a claim about speed needs %d\n", o.pairs, claimPairs)
	}
	b := benchRun{builder: builder{place: p, out: out}, labs: labs, out: out, options: o}
	rep := bench.Report{Version: version, Started: time.Now(), Results: []bench.Result{}}
	ran, failed := 0, 0
	for _, s := range benchSites(t, o, c) {
		res := bench.Result{Combination: s.Combination, NotRun: s.skip}
		if s.skip == "" {
			ran++
			if res, err = b.site(ctx, s); err != nil {
				failed++
				res.Error = err.Error()
			}
			res.Write(out)
		}
		rep.Results = append(rep.Results, res)
		if ctx.Err() != nil {
			break
		}
	}
	rep.Write(out)
	if o.asJSON {
		if err := writeJSON(a.stdout, rep); err != nil {
			return err
		}
	}
	switch {
	case failed > 0:
		return exitError{report.ExitInfra, fmt.Sprintf("lab: %d of %d combinations failed", failed, ran)}
	case ran == 0:
		return exitError{report.ExitNone, "lab: nothing that was asked for can run here"}
	}
	return nil
}

// A benchRun is one run of lab bench datapath.
type benchRun struct {
	builder
	labs    *reuse
	out     io.Writer
	options benchOptions
}

// site measures one combination.
func (b benchRun) site(ctx context.Context, s benchSite) (res bench.Result, err error) {
	o := b.options
	res = bench.Result{Combination: s.Combination, Pairs: o.pairs, Duration: report.Duration(o.duration)}
	lab, err := b.open(ctx, s)
	if lab != nil && !lab.found {
		defer func() { err = errors.Join(err, lab.client.Close()) }()
	}
	if err != nil {
		return res, err
	}
	res.Lab = lab.name
	lanes, err := benchLanes(ctx, lab, s.Implementation)
	if err != nil {
		return res, err
	}
	res.Ends = map[bench.Path]string{}
	for _, l := range lanes {
		res.Ends[l.Path] = l.String()
	}
	cfg := bench.Config{World: lab.client, Lanes: lanes, Pairs: o.pairs, Duration: o.duration, Progress: b.progress()}
	if s.World == supervisor.VM {
		for i := range lanes {
			lanes[i].Nice = world.MachineNice
		}
	}
	start := time.Now()
	fmt.Fprintf(b.out, "   measuring %d pairs, at least %s\n", o.pairs, report.Duration(cfg.Time()))
	samples, err := bench.Measure(ctx, cfg)
	if err != nil {
		return res, err
	}
	b.phase(lab, "measured", time.Since(start))
	res.Rows, err = bench.Summarize(samples, o.pairs)
	return res, err
}

// progress shows what is being measured, and leaves a line for each pair.
func (b benchRun) progress() func(pair int, text string) {
	show, last := transient(b.out), 0
	return func(pair int, text string) {
		if pair != last {
			last = pair
			fmt.Fprintf(b.out, "   pair %d of %d\n", pair, b.options.pairs)
		}
		if show != nil {
			show(text)
		}
	}
}

// open finds a lab that is up and made like this, or builds one.
func (b benchRun) open(ctx context.Context, s benchSite) (*builtLab, error) {
	name := labName(s.topology, s.World, s.Overlay)
	c, why := b.labs.find(ctx, labConfig{name: name, topology: s.topology, world: s.World, overlay: s.Overlay})
	if why != "" {
		fmt.Fprintf(b.out, "%s: lab %s is up and is not used: %s\n", s.Combination, name, why)
	}
	if c != nil {
		end, err := bench.FindTunnelEnd(ctx, c, benchGateway(s.topology.Peerings[0].Client))
		if err == nil && end.Implementation == s.Implementation {
			fmt.Fprintf(b.out, "%s: using lab %s, which is up\n", s.Combination, name)
			return &builtLab{client: c, name: name, topology: s.topology, overlay: s.Overlay, found: true}, nil
		}
	}
	name += "-" + s.Implementation + "-bench-" + newSeed() // beside others
	fmt.Fprintf(b.out, "%s: building %s\n", s.Combination, name)
	return b.build(ctx, labConfig{name: name, topology: s.topology, world: s.World, overlay: s.Overlay, ephemeral: true})
}

// benchGateway is the gateway of a cluster with one peering.
func benchGateway(cluster string) string { return cluster + "/" + world.GatewayHost }

// benchLanes are the ends of the three paths from the client of the lab's
// peering to its server.
func benchLanes(ctx context.Context, lab *builtLab, implementation string) ([]bench.Lane, error) {
	t := lab.topology
	from, to := t.Peerings[0].Client, t.Peerings[0].Server
	dir := expect.NewDirectory(lab.client, expect.NewAPI(lab.client.RESTConfig), t)
	var tunnel bench.TunnelEnd
	var pods, nodes [2]operand.Operand
	for i, cluster := range []string{from, to} { // the server's end stays
		var err error
		if tunnel, err = bench.FindTunnelEnd(ctx, lab.client, benchGateway(cluster)); err != nil {
			return nil, err
		}
		if tunnel.Implementation != implementation {
			return nil, fmt.Errorf("%s has WireGuard in %s, not in %s: lab exec %[1]s -- ip -d link shows it", benchGateway(cluster), tunnel.Implementation, implementation)
		}
		if nodes[i], err = benchNode(ctx, dir, t, cluster); err != nil {
			return nil, err
		}
		if pods[i], err = benchPod(t, cluster, nodes[i].Node); err != nil {
			return nil, err
		}
	}
	lanes := []bench.Lane{
		{Path: bench.PodToPod, Lane: lane.Lane{From: pods[0].HostName(t), To: pods[1].HostName(t)}},
		{Path: bench.Tunnel, Lane: lane.Lane{From: benchGateway(from), To: benchGateway(to), Addr: tunnel.Addr}},
		{Path: bench.Underlay, Lane: lane.Lane{From: nodes[0].HostName(t), To: nodes[1].HostName(t)}},
	}
	var err error
	if lanes[0].Addr, err = dir.Address(ctx, pods[1], from); err != nil {
		return nil, err
	}
	lanes[2].Addr, err = dir.Address(ctx, nodes[1], from)
	return lanes, err
}

// benchNode is the node of a cluster's gateway: the ends of what the tunnel's
// own packets travel on.
func benchNode(ctx context.Context, dir *expect.Directory, t *topology.Topology, cluster string) (operand.Operand, error) {
	o, err := operand.Parse(benchGateway(cluster)+".node", t)
	if err != nil {
		return o, err
	}
	return dir.Settle(ctx, o)
}

// benchPod is a pod on another node than the gateway's, so that the overlay is
// part of its path.
func benchPod(t *topology.Topology, cluster string, gatewayNode int) (operand.Operand, error) {
	for _, p := range t.Pods {
		if p.Cluster == cluster && !p.HostNetwork && p.Node != gatewayNode {
			return operand.Parse(cluster+"/"+p.Name, t)
		}
	}
	return operand.Operand{}, fmt.Errorf("topology %s has no pod in %s outside node %d, where the gateway is", t.Name, cluster, gatewayNode)
}
