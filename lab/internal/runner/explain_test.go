package runner_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/runner"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A memoryLab is a lab in memory: a probe passes the hosts of a way, every one
// of which captures it, until the host where it is lost.
type memoryLab struct {
	runner.World // what no probe needs: it is nil
	topology     *topology.Topology
	pods         map[string][]world.PodStatus
	way          []string // of requests; replies take it backwards
	lostAt       string   // "": nothing is lost
	gap          bool     // a log was begun anew
	seen         map[string][]world.Sighting
}

func newMemoryLab(t *testing.T) *memoryLab {
	t.Helper()
	topo, err := topology.Load(topologies + "/two-clusters.yaml")
	assert.NilError(t, err)
	pod := func(namespace, name, node, ip string) world.PodStatus {
		return world.PodStatus{Namespace: namespace, Name: name, Node: node, IP: netip.MustParseAddr(ip)}
	}
	return &memoryLab{
		topology: topo, seen: map[string][]world.Sighting{},
		pods: map[string][]world.PodStatus{
			"milan": {pod("default", "web", "node-1", "10.0.1.2"), pod("default", "probe", "node-2", "10.0.2.2")},
			"rome":  {pod("default", "web", "node-1", "10.1.1.2"), pod("default", "probe", "node-2", "10.1.2.2")},
		},
		way: []string{"milan/web", "milan/node-1", "milan/gateway", "rome/gateway", "rome/node-1", "rome/web"},
	}
}

func (l *memoryLab) Status(context.Context) (world.Status, error) {
	s := world.Status{Spec: world.Plan(l.topology)}
	for _, c := range l.topology.Clusters {
		s.Clusters = append(s.Clusters, world.ClusterStatus{Name: c.Name, Pods: l.pods[c.Name]})
	}
	return s, nil
}

// Exec sends the probe of `probe dial` on its way.
func (l *memoryLab) Exec(_ context.Context, req world.ExecRequest) (world.ExecResult, error) {
	i := slices.Index(req.Argv, "--token")
	if i < 0 {
		return world.ExecResult{}, fmt.Errorf("no probe: %q", req.Argv)
	}
	token := req.Argv[i+1]
	res := prober.Result{OK: true, SeenAs: netip.MustParseAddrPort("10.0.1.2:40000"), Server: prober.Server{Cluster: "rome", Pod: "web"}, RTT: time.Millisecond}
	back := slices.Clone(l.way)
	slices.Reverse(back)
	if !l.pass(token, prober.MarkRequest, l.way) || !l.pass(token, prober.MarkReply, back) {
		res = prober.Result{Error: prober.ErrorTimeout}
	}
	b, err := json.Marshal(res)
	return world.ExecResult{Stdout: b}, err
}

func (l *memoryLab) pass(token string, marker rune, way []string) (arrived bool) {
	for i, host := range way {
		for _, d := range []world.Direction{world.In, world.Out} {
			if i == 0 && d == world.In || i == len(way)-1 && d == world.Out || host == l.lostAt && d == world.Out {
				continue
			}
			l.seen[token] = append(l.seen[token], world.Sighting{
				Time: time.Unix(int64(len(l.seen[token])), 0), Host: host, Interface: "eth0", Direction: d,
				Src: netip.MustParseAddrPort("10.0.1.2:40000"), Proto: "udp", Marker: string(marker),
			})
		}
		if host == l.lostAt {
			return false
		}
	}
	return true
}

func (l *memoryLab) Sightings(_ context.Context, q world.SightingQuery) ([]world.Sighting, error) {
	return l.seen[q.Token], nil
}

// Logs has what every row looks at afterwards.
func (l *memoryLab) Logs(_ context.Context, since map[string]world.LogMark) ([]world.Log, error) {
	return []world.Log{{
		Name: "milan/node-1/log/liqo_isthmus-node-abcde_1-2-3/node/0", Text: "level=INFO msg=applied\n", Gap: l.gap && since != nil,
	}}, nil
}

func (l *memoryLab) RESTConfig(context.Context, string) (*rest.Config, error) {
	return nil, errors.New("there is no API server in this lab")
}

const topologies = "../../../topologies"

// TestWrongExpectations runs scenarios that expect what is not so, and reads
// what lab run prints of them: what was wanted, what was got, and the path.
func TestWrongExpectations(t *testing.T) {
	const right = "path: { via: [milan/web, milan/node-1, milan/gateway, rome/gateway, rome/node-1, rome/web], symmetric: true }"
	for _, tt := range []struct {
		name    string
		lostAt  string
		expects []string
		want    report.Verdict
		exit    int
	}{
		{"right", "", []string{"source: { seenBy: rome/web, is: milan/web }", right}, report.Pass, report.ExitPass},
		{"wrong-source-and-path", "", []string{
			"source: { seenBy: rome/web, is: milan/probe }", "path: { via: [milan/web, milan/node-1, milan/router, rome/router, rome/node-1, rome/web] }",
		}, report.Fail, report.ExitFail},
		{"request-lost", "milan/gateway", []string{right}, report.Fail, report.ExitFail},
		{"no-answer", "rome/web", []string{right}, report.Fail, report.ExitFail},
	} {
		t.Run(tt.name, func(t *testing.T) {
			src := "description: " + tt.name + "\ntopology: two-clusters\nsteps:\n  - name: the pod answers\n    expect:\n" +
				"      reach: { from: milan/web, to: rome/web, proto: udp }\n      " + strings.Join(tt.expects, "\n      ") + "\n" +
				"    within: 100ms # a look or two: nothing changes in this lab\n" +
				"sabotage:\n  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: the pod answers, expectation: reach }\n"
			sc, err := scenario.Parse("scenarios/"+tt.name+".yaml", []byte(src), topologies)
			assert.NilError(t, err)
			l := newMemoryLab(t)
			l.lostAt = tt.lostAt

			r := &runner.Runner{World: l, Seed: "8f3a"}
			row := r.Run(t.Context(), sc, sc.Rows[0])
			assert.Equal(t, row.Verdict, tt.want, "%s", row.Reason)
			row.Took = 0 // it differs from run to run
			run := report.Run{Seed: "8f3a", Scenarios: []report.Scenario{{Name: sc.Name, World: "vm", File: sc.File, Rows: []report.Row{row}}}}
			assert.Equal(t, run.ExitCode(false), tt.exit)

			var out strings.Builder
			report.PrintScenario(&out, run.Scenarios[0], run)
			report.PrintSummary(&out, run)
			golden.Assert(t, out.String(), tt.name+".golden")
		})
	}
}

// TestLogGap: errors could stand in what is gone of a log.
func TestLogGap(t *testing.T) {
	src := "description: d\ntopology: two-clusters\nsteps:\n  - name: the pod answers\n    expect:\n      reach: { from: milan/web, to: rome/web, proto: udp }\n" +
		"sabotage:\n  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: the pod answers }\n"
	sc, err := scenario.Parse("scenarios/gap.yaml", []byte(src), topologies)
	assert.NilError(t, err)
	for _, gap := range []bool{false, true} {
		l := newMemoryLab(t)
		l.gap = gap
		row := (&runner.Runner{World: l, Seed: "8f3a"}).Run(t.Context(), sc, sc.Rows[0])
		if !gap {
			assert.Equal(t, row.Verdict, report.Pass, row.Reason)
			continue
		}
		assert.Equal(t, row.Verdict, report.Fail)
		f := row.Steps[len(row.Steps)-1].Failures[0]
		assert.Equal(t, f.Want, "all of the log of milan/node-1/log/liqo_isthmus-node-abcde_1-2-3/node/0")
		assert.Equal(t, f.Got, "the log was begun anew since the row began, so nothing is known of errors in what is gone")
	}
}
