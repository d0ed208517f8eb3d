package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/bench"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// firewallOptions are the flags of lab bench firewall.
type firewallOptions struct {
	addresses, networks []int
	nodes               []int
	pairs               int
	duration            time.Duration
	asJSON              bool
}

func newBenchFirewallCommand(a *app) *cobra.Command {
	var o firewallOptions
	cmd := &cobra.Command{
		Use:   "firewall",
		Short: "what many mapped addresses cost a gateway, beside the same rules written one by one",
		Long: `firewall measures new connections and packets per second through a gateway with
few and with many mapped addresses, and with many remapped networks of the peer:
the tables, rules and routes that a gateway has, made by the same code, in
network namespaces of their own and without tunnel. Beside them it measures the
same with a rule for each address. With --nodes it measures instead what a packet of a
node and its answer take in a gateway with so many nodes, beside the same with rules for
each node. The cases take turns, each right after the first one; what counts is the
median of the ratios to that. It needs root and no lab, and takes a minute or two with
the default times.`,
		Example: `  lab bench firewall
  lab bench firewall --addresses 2,4,8,16 --networks 2
  lab bench firewall --nodes 10,100,1000
  lab bench firewall --pairs 11 --json > firewall.json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.benchFirewall(cmd.Context(), o) },
	}
	f := cmd.Flags()
	f.IntSliceVar(&o.addresses, "addresses", []int{10, 1000, 10_000}, "numbers of mapped addresses; the first is what all else is compared with")
	f.IntSliceVar(&o.networks, "networks", []int{1000}, "numbers of remapped networks")
	f.IntSliceVar(&o.nodes, "nodes", nil, "numbers of nodes, to measure those instead; the first is what all else is compared with")
	f.IntVar(&o.pairs, "pairs", claimPairs, "how often each case is measured")
	f.DurationVar(&o.duration, "duration", 300*time.Millisecond, "of one measurement")
	f.BoolVar(&o.asJSON, "json", false, "print the result as JSON; progress and table go to stderr")
	return cmd
}

func (o firewallOptions) check() error {
	if len(o.addresses) == 0 {
		return usageError("--addresses: one number at least")
	}
	for _, n := range append(append([]int{}, o.addresses...), o.networks...) {
		if n < 1 || n > bench.MaxFirewall {
			return usageError("%d addresses or networks: 1 to %d", n, bench.MaxFirewall)
		}
	}
	for _, n := range o.nodes {
		if n < 1 || n > bench.MaxNodes {
			return usageError("--nodes: %d nodes: 1 to %d", n, bench.MaxNodes)
		}
	}
	return benchOptions{implementation: "auto", pairs: o.pairs, duration: o.duration}.check()
}

func (a *app) benchFirewall(ctx context.Context, o firewallOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	out := a.stdout
	if o.asJSON {
		out = a.stderr
	}
	if o.pairs < claimPairs {
		fmt.Fprintf(out, "%d pairs are to look at; a claim about speed needs %d\n", o.pairs, claimPairs)
	}
	cases := bench.FirewallCases(o.addresses, o.networks)
	if len(o.nodes) > 0 {
		cases = bench.NodeCases(o.nodes)
	}
	rep := bench.FirewallReport{Version: version, Started: time.Now(), Pairs: o.pairs, Duration: report.Duration(o.duration)}
	samples, err := bench.MeasureFirewall(ctx, bench.FirewallConfig{
		Cases: cases, Pairs: o.pairs, Duration: o.duration, Progress: benchRun{out: out, options: benchOptions{pairs: o.pairs}}.progress(),
	})
	if err == nil {
		rep.Rows, err = bench.SummarizeFirewall(cases, samples)
	}
	if err != nil {
		return exitError{report.ExitInfra, "lab: " + err.Error()}
	}
	rep.Write(out)
	if o.asJSON {
		return writeJSON(a.stdout, rep)
	}
	return nil
}
