package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/bench"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// connectTopology has two clusters, naples and milan, that are no peers yet.
const connectTopology = "hub-joins"

// connectOptions are the flags of lab bench connect.
type connectOptions struct {
	world, overlay string
	pairs          int
	asJSON         bool
}

func newBenchConnectCommand(a *app, root *string) *cobra.Command {
	var o connectOptions
	cmd := &cobra.Command{
		Use:   "connect",
		Short: "how long it takes to connect two clusters, by one command and by objects that are applied",
		Long: `connect measures how long it takes from the beginning to the first answer that a pod of
one cluster has from a pod of the other: of isthmusctl network connect, beside kubectl
apply of the objects that isthmusctl peer manifests has written before. The two
take turns in one lab, and the clusters forget each other in between. What counts is the
median of the pairs' ratios.`,
		Example: `  lab bench connect
  lab bench connect --overlay geneve --world vm
  lab bench connect --pairs 11 --json > connect.json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := findPlace(*root)
			if err != nil {
				return err
			}
			return a.benchConnect(cmd.Context(), p, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.world, "world", scenario.WorldAuto, "native or vm; auto: where it can run")
	f.StringVar(&o.overlay, "overlay", scenario.OverlayVXLAN, "geneve or vxlan")
	f.IntVar(&o.pairs, "pairs", claimPairs, "how often each way is measured")
	f.BoolVar(&o.asJSON, "json", false, "print the result as JSON; progress and table go to stderr")
	return cmd
}

func (a *app) benchConnect(ctx context.Context, p place, o connectOptions) (err error) {
	if err := (benchOptions{world: o.world, implementation: "auto", pairs: o.pairs, duration: time.Second}).check(); err != nil {
		return err
	}
	t, err := p.topologyNamed(connectTopology)
	if err != nil {
		return err
	}
	c, err := newChooser(o.world, o.overlay, world.Doctor(ctx, p.bin()), nil)
	if err != nil {
		return err
	}
	at := c.choose(need{topology: t, overlay: o.overlay, world: scenario.WorldAuto})
	if at.skip != "" {
		return exitError{report.ExitNone, "lab: " + at.skip}
	}
	out := a.stdout
	if o.asJSON {
		out = a.stderr
	}
	if o.pairs < claimPairs {
		fmt.Fprintf(out, "%d pairs are to look at; a claim about speed needs %d\n", o.pairs, claimPairs)
	}
	run := benchRun{builder: builder{place: p, out: out}, out: out, options: benchOptions{pairs: o.pairs}}
	lab, err := run.build(ctx, labConfig{name: labName(t, at.world, o.overlay) + "-bench-" + newSeed(), topology: t, world: at.world, overlay: o.overlay, ephemeral: true})
	if lab != nil {
		defer func() { err = errors.Join(err, lab.client.Close()) }()
	}
	if err != nil {
		return exitError{report.ExitInfra, "lab: " + err.Error()}
	}
	cfg, err := connectConfig(lab, o.pairs)
	if err != nil {
		return err
	}
	cfg.Progress = run.progress()
	rep := bench.ConnectReport{Version: version, Started: time.Now(), Overlay: o.overlay, Pairs: o.pairs}
	seconds, err := bench.MeasureConnect(ctx, cfg)
	if err != nil {
		return exitError{report.ExitInfra, "lab: " + err.Error()}
	}
	rep.Rows = bench.SummarizeConnect(cfg.Ways, seconds)
	rep.Write(out)
	if o.asJSON {
		return writeJSON(a.stdout, rep)
	}
	return nil
}

// connectConfig has naples dial milan.
func connectConfig(lab *builtLab, pairs int) (bench.ConnectConfig, error) {
	shell := func(format string, args ...any) func(context.Context) error {
		return func(ctx context.Context) error {
			res, err := lab.client.Exec(ctx, world.ExecRequest{Target: "naples/control-plane", Host: true, Argv: []string{"sh", "-ec", fmt.Sprintf(format, args...)}})
			if err == nil && res.Code != 0 {
				err = fmt.Errorf("exit code %d: %s", res.Code, strings.TrimSpace(string(res.Stderr)))
			}
			return err
		}
	}
	var from, to, node operand.Operand
	for text, at := range map[string]*operand.Operand{"naples/web": &from, "milan/web": &to, "milan/node-1": &node} {
		var err error
		if *at, err = operand.Parse(text, lab.topology); err != nil {
			return bench.ConnectConfig{}, err
		}
	}
	api := expect.NewAPI(lab.client.RESTConfig)
	row := func() *expect.Row { // which knows nothing of the peering before
		return &expect.Row{
			World: lab.client, Topology: lab.topology, Directory: expect.NewDirectory(lab.client, api, lab.topology), NewToken: rand.Text, ProbeTimeout: 200 * time.Millisecond,
		}
	}
	return bench.ConnectConfig{
		Ways: []bench.Way{
			{
				Name: "kubectl apply",
				Prepare: func(ctx context.Context) error {
					addr, err := row().Directory.Address(ctx, node, "")
					if err != nil {
						return err
					}
					return shell(`rm -rf $TMPDIR/bench && isthmusctl peer manifests --server-kubeconfig $KUBECONFIGS/milan/admin.kubeconfig --client-kubeconfig $KUBECONFIGS/naples/admin.kubeconfig \
						--server-service-type NodePort --server-address %s --server-port 31841 --out $TMPDIR/bench`, addr)(ctx)
				},
				Connect: shell(`for c in milan naples; do kubernetes kubectl --kubeconfig $KUBECONFIGS/$c/admin.kubeconfig apply --server-side -f $TMPDIR/bench/$c; done`),
			},
			{Name: "network connect", Connect: shell(`isthmusctl network connect --remote-kubeconfig $KUBECONFIGS/milan/admin.kubeconfig --gw-server-service-type NodePort --wait`)},
		},
		Pairs:      pairs,
		Disconnect: shell(`isthmusctl network reset --remote-kubeconfig $KUBECONFIGS/milan/admin.kubeconfig --wait`),
		Reached: func(ctx context.Context) (bool, error) {
			return row().Reached(ctx, from, to, "tcp")
		},
	}, nil
}
