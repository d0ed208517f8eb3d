package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"io"
	mathrand "math/rand/v2"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// A choice is the rows of a scenario that shall run.
type choice struct {
	scenario *scenario.Scenario
	rows     []scenario.Row
}

// choose picks the rows that the patterns and the shard name, in an order
// that the seed decides. With sabotage it is each scenario's first one.
func choose(all []*scenario.Scenario, patterns []string, o runOptions) ([]choice, error) {
	part, parts, err := parseShard(o.shard)
	if err != nil {
		return nil, err
	}
	used := make([]bool, len(patterns))
	var out []choice
	for _, s := range all {
		c := choice{scenario: s}
		for _, r := range s.Rows {
			if matches(r.Name, patterns, used) && inShard(r.Name, part, parts) {
				c.rows = append(c.rows, r)
			}
		}
		if o.sabotage && len(c.rows) > 0 {
			c.rows = c.rows[:1]
		}
		if len(c.rows) > 0 {
			shuffle(c.rows, o.seed)
			out = append(out, c)
		}
	}
	for i, u := range used {
		if !u {
			var names []string
			for _, s := range all {
				names = append(names, s.Name)
			}
			return nil, usageError("no row matches %q\n%s", patterns[i], yamlfile.DidYouMean(patterns[i], names))
		}
	}
	return out, nil
}

func matches(name string, patterns []string, used []bool) bool {
	found := len(patterns) == 0
	for i, p := range patterns {
		p = strings.TrimSuffix(p, "/")
		glob, err := path.Match(p, name)
		// A pattern also stands for what is below it.
		below := false
		if n := strings.Count(p, "/") + 1; err == nil && !glob {
			if parts := strings.SplitN(name, "/", n+1); len(parts) > n {
				below, _ = path.Match(p, strings.Join(parts[:n], "/"))
			}
		}
		if name == p || glob || below {
			found, used[i] = true, true
		}
	}
	return found
}

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

func shuffle(rows []scenario.Row, seed string) {
	var key [32]byte
	copy(key[:], seed)
	rng := mathrand.New(mathrand.NewChaCha8(key))
	rng.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
}

func newSeed() string {
	var b [2]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand never fails
	}
	return hex.EncodeToString(b[:])
}

// printPlan prints every row with its steps.
func printPlan(w io.Writer, selected []choice, o runOptions) {
	rows := 0
	for _, c := range selected {
		s := c.scenario
		fmt.Fprintf(w, "%s on %s: %s\n", s.Name, s.Topology.Name, s.Description)
		if len(s.Requires) > 0 {
			fmt.Fprintf(w, "  requires %s\n", strings.Join(s.Requires, ", "))
		}
		for _, r := range c.rows {
			rows++
			fmt.Fprintf(w, "  %s\n", r.Name)
			if o.sabotage {
				for _, sab := range s.BuildSabotage(r) {
					fmt.Fprintf(w, "    %s\n      must fail: %s\n", sab, sab.Fails)
				}
				continue
			}
			for i, st := range s.Build(r) {
				fmt.Fprintf(w, "    %d %s\n", i+1, st.Name)
				for _, a := range st.Do {
					fmt.Fprintf(w, "        do     %s\n", a)
				}
				for _, e := range st.Expect {
					fmt.Fprintf(w, "        expect %s\n", e)
				}
			}
		}
	}
	fmt.Fprintf(w, "%d scenarios, %d rows\n", len(selected), rows)
}

// convergeTime is how long the clusters may take after a row that disturbed
// them.
const convergeTime = 60 * time.Second

// converged waits until all clusters of a lab have applied everything.
func (s *session) converged(lab *builtLab) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, c := range lab.topology.Clusters {
			cl, err := deploy.NewClient(clusters{ctx, lab.client}, c.Name)
			if err != nil {
				return err
			}
			if err := deploy.Converged(ctx, lab.topology, c.Name, cl, convergeTime); err != nil {
				return fmt.Errorf("cluster %s: %w", c.Name, err)
			}
		}
		return nil
	}
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }
