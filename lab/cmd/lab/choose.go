package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"io"
	mathrand "math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/term"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

func parseShard(s string) (part, parts int, err error) {
	if s == "" {
		return 1, 1, nil
	}
	if n, err := fmt.Sscanf(s, "%d/%d", &part, &parts); n != 2 || err != nil || part < 1 || part > parts {
		return 0, 0, usageError("--shard %q: write 1/4 for the first of four parts", s)
	}
	return part, parts, nil
}

// inShard puts a row into the same part whatever else there is.
func inShard(name string, part, parts int) bool {
	h := fnv.New32a()
	h.Write([]byte(name))
	return int(h.Sum32()%uint32(parts)) == part-1
}

// shuffled is what is there in an order that the seed decides.
func shuffled[T any](all []T, seed string) []T {
	rng := mathrand.New(mathrand.NewChaCha8(sha256.Sum256([]byte(seed))))
	out := slices.Clone(all)
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// drawn is n of all, which the seed decides; all of them where n is 0 or more than there are.
func drawn[T any](all []T, n int, seed string) []T {
	if n == 0 || n >= len(all) {
		return all
	}
	return shuffled(all, seed)[:n]
}

func newSeed() string {
	var b [2]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand never fails
	}
	return hex.EncodeToString(b[:])
}

// printPlan prints every row with its steps, or with its sabotages, or both.
func printPlan(w io.Writer, selected []selection, o runOptions) {
	rows, broken := 0, 0
	scenarios := map[*scenario.Scenario]bool{}
	sabotages := sabotagesOf(selected, func(selection, scenario.Row) int { return 0 }, nil, o)
	for n, sel := range selected {
		scenarios[sel.scenario] = true
		s := sel.scenario
		fmt.Fprintf(w, "%s on %s: %s\n", s.Name, s.Topology.Name, s.Description)
		if o.sabotage != sabotageOnly {
			for _, r := range sel.rows {
				rows++
				printRow(w, sel, r)
			}
		}
		if o.sabotage == "" {
			continue
		}
		for _, i := range sabotages[n] {
			broken++
			fmt.Fprintf(w, "  %s\n    %s\n      must fail: %s\n", sel.pattern(i.row.Name), i.sabotage, i.sabotage.Fails)
			for _, st := range s.Build(i.row) {
				if st.Name == i.sabotage.Fails {
					for _, e := range i.sabotage.Expectation {
						fmt.Fprintf(w, "            that: %s\n", st.Expect[e])
					}
				}
			}
		}
	}
	fmt.Fprintf(w, "%d scenarios, %d rows", len(scenarios), rows)
	if o.sabotage != "" {
		fmt.Fprintf(w, ", %d sabotages", broken)
	}
	fmt.Fprintln(w)
	if o.sabotage != "" && o.sabotages > 0 {
		fmt.Fprintln(w, "a run may make other sabotages: --sabotages draws them by the seed, from those that the kernel can run")
	}
}

func printRow(w io.Writer, sel selection, r scenario.Row) {
	fmt.Fprintf(w, "  %s\n", sel.pattern(r.Name))
	if len(r.Requires) > 0 {
		fmt.Fprintf(w, "    requires %s\n", strings.Join(r.Requires, ", "))
	}
	for i, st := range sel.scenario.Build(r) {
		fmt.Fprintf(w, "    %d %s\n", i+1, st.Name)
		for _, a := range st.Do {
			fmt.Fprintf(w, "        do     %s\n", a)
		}
		for _, e := range st.Expect {
			fmt.Fprintf(w, "        expect %s\n", e)
		}
	}
}

// convergeTime is that of a machine that is not emulated.
const convergeTime = 2 * time.Minute

// converged waits until all clusters of a lab have applied everything. The status
// of a gateway that was replaced just now is that of the one before it, so packets
// are tried as well.
func (lab *builtLab) converged(ctx context.Context) error {
	if err := lab.saysConverged(ctx); err != nil {
		return err
	}
	if err := lab.podsReachEachOther(ctx); err != nil {
		return err
	}
	if _, ok := lab.client.(*kubeconfig.Lab); ok {
		return nil
	}
	if err := deploy.TunnelsAgree(ctx, lab.topology, clusters{ctx, lab.client}, lab.convergeTime()); err != nil {
		return err
	}
	return lab.saysConverged(ctx)
}

// convergeTime is how long the clusters may take after a row that disturbed them, on a machine that has
// nothing else to do.
func (lab *builtLab) convergeTime() time.Duration {
	if lab.emulated {
		return convergeTime * emulatedPatience
	}
	return convergeTime
}

// podsReachEachOther waits until pods of all peerings that there are reach each
// other, both ways.
func (lab *builtLab) podsReachEachOther(ctx context.Context) error {
	reach := reachOf(lab)
	for _, p := range lab.topology.PresentPeerings() {
		client, server, ok := deploy.EndsOf(lab.topology, p)
		if !ok {
			continue
		}
		if err := reach(ctx, client, server); err != nil {
			return err
		}
		if err := reach(ctx, server, client); err != nil {
			return err
		}
	}
	return nil
}

// saysConverged waits until the statuses of all clusters say that everything is
// applied.
func (lab *builtLab) saysConverged(ctx context.Context) error {
	if there, ok := lab.client.(*kubeconfig.Lab); ok {
		return there.Converged(ctx)
	}
	for _, c := range lab.topology.Clusters {
		cl, err := deploy.NewClient(clusters{ctx, lab.client}, c.Name)
		if err != nil {
			return err
		}
		if err := deploy.Converged(ctx, lab.topology, networkingv1beta1.Overlay(lab.overlay), c.Name, cl, lab.convergeTime()); err != nil {
			return fmt.Errorf("cluster %s: %w", c.Name, err)
		}
	}
	return nil
}

// connect connects a peering that was absent so far.
func (lab *builtLab) connect(ctx context.Context, p topology.Peering) error {
	return deploy.Connect(ctx, deploy.Config{Topology: lab.topology, Clusters: clusters{ctx, lab.client}, Reach: reachOf(lab)}, p)
}

// operator returns who administers the clusters of a lab.
func (lab *builtLab) operator(p place) func(context.Context) deploy.Operator {
	return func(ctx context.Context) deploy.Operator {
		return deploy.Operator{
			Topology: lab.topology, Overlay: networkingv1beta1.Overlay(lab.overlay),
			Clusters: clusters{ctx, lab.client}, ChartDir: p.chart(), Exec: lab.client.Exec,
		}
	}
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }
