package expect_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
)

// TestWhoAnswers: an answer counts only from whom it was asked. In the world of
// this test rome/web has an address that a pod of milan could have, too.
func TestWhoAnswers(t *testing.T) {
	const shared = "10.1.1.2"
	for _, tc := range []struct {
		name   string
		to     string
		server prober.Server
		got    string // who is said to have answered; empty: whom was asked
	}{
		{"the pod", "rome/web", prober.Server{Cluster: "rome", Pod: "web", UID: "uid-" + shared}, ""},
		{"a pod of another cluster with the same address", "rome/web", prober.Server{Cluster: "milan", Pod: "web", UID: "uid-10.0.1.2"}, "milan/web answered (10.1.1.2)"},
		{"another pod of the cluster", "rome/web", prober.Server{Cluster: "rome", Pod: "probe", UID: "uid-10.1.2.2"}, "rome/probe answered (10.1.2.2)"},
		{"a pod that was replaced", "rome/web", prober.Server{Cluster: "rome", Pod: "web", UID: "of-before"}, "a pod rome/web that is no more answered (10.1.1.2)"},
		{"a server without a name", "rome/web", prober.Server{}, "a server that does not say who it is answered (10.1.1.2)"},
		{"a host outside of the name of a pod", "rome/web", prober.Server{Host: "web"}, "web answered (10.1.1.2)"},
		{"the host outside", "user", prober.Server{Host: "user"}, ""},
		{"a pod instead of the host outside", "user", prober.Server{Cluster: "milan", Pod: "user"}, "milan/user answered (10.1.1.2)"},
		{"a pod in the network of the node", "rome/node-1", prober.Server{Cluster: "rome", Pod: "hostprobe", Node: "node-1", HostNetwork: true}, ""},
		{"one on the node", "rome/node-1", prober.Server{Cluster: "rome", Pod: "hostprobe", Node: "node-1"}, "rome/hostprobe answered (10.1.1.2)"},
		{"one in the network of another node", "rome/node-1", prober.Server{Cluster: "rome", Pod: "hostprobe", Node: "node-2", HostNetwork: true}, "rome/hostprobe answered (10.1.1.2)"},
		{"the node of a gateway", "rome/gateway.node", prober.Server{Cluster: "rome", Pod: "hostprobe", Node: "node-2", HostNetwork: true}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			w.server, w.by = &tc.server, netip.MustParseAddr(shared)
			if strings.Contains(tc.got, "10.1.2.2") {
				w.by = netip.MustParseAddr("10.1.2.2")
			}
			from, to := ref(t, row, "milan/web"), ref(t, row, tc.to)
			for _, proto := range []string{"tcp", "udp"} {
				res, err := (&expect.Reach{From: from, To: to, Proto: proto}).Check(t.Context(), row)
				assert.NilError(t, err)
				assert.Equal(t, res.OK, tc.got == "", "%+v", res)
				if tc.got != "" {
					assert.Equal(t, res.Got, tc.got)
					assert.Assert(t, strings.HasPrefix(res.Want, tc.to+" answers milan/web"), res.Want)
				}
				reached, err := row.Reached(t.Context(), from.Operand, to.Operand, proto)
				assert.NilError(t, err)
				assert.Equal(t, reached, tc.got == "")
				// What an impostor says it saw is not what whom was asked has seen.
				res, err = (&expect.Source{SeenBy: to, Is: from}).Check(t.Context(), row)
				assert.NilError(t, err)
				assert.Equal(t, res.OK, tc.got == "", "%+v", res)
				if tc.got != "" {
					assert.Equal(t, res.Got, tc.got+", so it is not known what "+tc.to+" saw")
				}
			}
			// An address may lead to somebody else, who is named then.
			node := ref(t, row, "milan/node-1")
			res, err := (&expect.Reach{From: from, To: node, AnsweredBy: to, Proto: "tcp", Port: 30080}).Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.got == "", "%+v", res)
			if last := w.ran[len(w.ran)-1]; tc.got == "" {
				assert.Equal(t, last[len(last)-7], "172.18.1.11:30080", "%v", last)
			}
			// Whom nothing should reach is reached by whoever answers.
			res, err = (&expect.Unreachable{From: from, To: to, Proto: "tcp", As: "drop"}).Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Assert(t, !res.OK)
			want := tc.got
			if want == "" {
				want = tc.to + " answered"
			}
			assert.Equal(t, res.Got, want)
		})
	}
}

// TestWhoAnswersEchos: a kernel has no name. Captures tell which one it was; a
// host that only passes the reply on is not meant.
func TestWhoAnswersEchos(t *testing.T) {
	local := []string{"milan/web", "milan/node-1", "milan/probe"}
	for _, tc := range []struct {
		name, to, answeredBy string
		hops                 []string
		got                  string
	}{
		{"the pod", "rome/web", "", seedsPath(), ""},
		{"a pod of the same cluster", "rome/web", "", local, "milan/probe answered"},
		{"behind another address", "milan/node-1", "rome/web", seedsPath(), ""},
		{"somebody else behind another address", "milan/node-1", "rome/web", local, "milan/probe answered"},
		{"a node that passes it on", "milan/node-1", "", local, "milan/probe answered"},
		{"a node", "milan/node-1", "", local[:2], ""},
		{"nobody saw it", "rome/web", "", nil, "an answer came, and none of the captures shows from which host"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			w.hops = tc.hops
			e := &expect.Reach{From: ref(t, row, "milan/web"), To: ref(t, row, tc.to), Proto: "icmp"}
			if tc.answeredBy != "" {
				e.AnsweredBy = ref(t, row, tc.answeredBy)
			}
			res, err := e.Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.got == "", "%+v", res)
			if tc.got != "" {
				assert.Equal(t, res.Got, tc.got)
			}
		})
	}
}

// TestWhoAnswersEchosBlind: where nobody captures, a server at the same address
// is asked for its name.
func TestWhoAnswersEchosBlind(t *testing.T) {
	for _, tc := range []struct {
		name, to string
		server   prober.Server
		got      string
		notes    int
	}{
		{"the pod", "rome/web", prober.Server{Cluster: "rome", Pod: "web", UID: "uid-10.1.1.2"}, "", 1},
		{"a pod of another cluster", "rome/web", prober.Server{Cluster: "milan", Pod: "web", UID: "uid-10.0.1.2"}, "milan/web answered (10.1.1.2)", 1},
		{"nothing listens on a gateway", "rome/gateway", prober.Server{}, "", 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			w.blind, w.server = true, &tc.server
			w.by = netip.MustParseAddr("10.1.1.2")
			res, err := (&expect.Reach{From: ref(t, row, "milan/web"), To: ref(t, row, tc.to), Proto: "icmp"}).Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.got == "", "%+v", res)
			if tc.got != "" {
				assert.Equal(t, res.Got, tc.got)
				return
			}
			assert.Equal(t, len(res.Notes), tc.notes, "%q", res.Notes)
			assert.Equal(t, len(row.Probes), 1, "steps are about the echo")
		})
	}
}

// TestWhoAnswersStreams: any process of the pod may answer, and nobody else.
func TestWhoAnswersStreams(t *testing.T) {
	pod := prober.Server{Cluster: "rome", Pod: "web", UID: "another", Process: "p2"}
	other := prober.Server{Cluster: "milan", Pod: "web", Process: "p3"}
	probe := prober.Server{Cluster: "rome", Pod: "probe", Process: "p4"}
	for _, tc := range []struct {
		name    string
		later   []prober.Server
		allowed []string
		why     string
	}{
		{"one process", nil, nil, ""},
		{"another process of the pod", []prober.Server{pod}, nil, ""},
		{"a pod of another cluster", []prober.Server{other}, nil, "milan/web answered (process p3), not rome/web"},
		{"another pod", []prober.Server{pod, probe}, nil, "rome/probe answered (process p4), not rome/web"},
		{"another pod that may", []prober.Server{probe}, []string{"rome/web", "rome/probe"}, ""},
		{"one of several that may not", []prober.Server{probe, other}, []string{"rome/web", "rome/probe"}, "milan/web answered (process p3), not rome/web or rome/probe"},
		{"the pod that it is to may not", nil, []string{"rome/probe"}, "rome/web answered (process p1), not rome/probe"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			w.later = tc.later
			f, err := row.OpenFlow(t.Context(), expect.Stream{From: ref(t, row, "milan/web").Operand, To: ref(t, row, "rome/web").Operand, Proto: "udp"})
			assert.NilError(t, err)
			defer f.Close()
			row.Flows["f"] = f
			e := &expect.Flow{Name: "f", Alive: true}
			for _, name := range tc.allowed {
				e.AnsweredBy = append(e.AnsweredBy, ref(t, row, name))
			}
			var res expect.Result
			for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
				res, err = e.Check(t.Context(), row)
				assert.NilError(t, err)
				if res.Final || res.OK && (len(tc.later) == 0 || strings.Contains(res.Notes[0], "processes")) {
					break
				}
			}
			assert.Equal(t, res.OK, tc.why == "", "%+v", res)
			assert.Equal(t, res.Why, tc.why)
		})
	}
}
