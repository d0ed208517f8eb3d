package expect_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A fakeWorld is a lab in memory: probes are packets that pass the hosts of a
// path, and every host on it has captured them.
type fakeWorld struct {
	topology *topology.Topology
	pods     map[string][]world.PodStatus

	// hops are the hosts that a request passes; host!geneve saw it inside
	// Geneve only. back are those of the reply; nil means the same, reversed.
	hops, back []string
	answers    bool   // the server answers
	fails      string // how a probe fails otherwise
	mute       bool   // flows have no answers
	translate  map[string]netip.Addr
	onlyOn     map[string]string // the interface of a host by which packets pass; default eth0
	clearText  bool              // the payload is readable on the wide area network
	lost       int               // packets overwritten in the rings
	blind      bool              // nothing is captured
	udpOnWAN   int               // packets of the gateways' own, too

	sealedOnWAN int  // encrypted packets of a packet of a probe
	unsealed    bool // gateways send nothing encrypted for it

	later  []prober.Server // who answers streams as well, after a while
	server *prober.Server  // who answers; nil: the last of hops
	by     netip.Addr      // the address that the server says it has
	prints string          // what other programs print
	mss    map[string]int  // of SYNs, by the host that saw them

	api     string   // of the API servers; empty: there are none
	objects []object // that they have

	// answersAfter, where it is not 0, is the number of probes after which the
	// server answers.
	answersAfter int

	mu   sync.Mutex // probes may be sent at once
	seen []tokenSighting
	logs []world.Log
	now  time.Time
	ran  [][]string
	sent []time.Time // probes
}

type tokenSighting struct {
	token string
	world.Sighting
}

func (w *fakeWorld) Status(context.Context) (world.Status, error) {
	s := world.Status{Spec: world.Plan(w.topology)}
	for _, c := range w.topology.Clusters {
		cs := world.ClusterStatus{Name: c.Name, Pods: w.pods[c.Name]}
		for _, n := range c.Present() {
			cs.Nodes = append(cs.Nodes, operand.NodeName(n))
		}
		s.Clusters = append(s.Clusters, cs)
	}
	return s, nil
}

func (w *fakeWorld) Exec(_ context.Context, req world.ExecRequest) (world.ExecResult, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ran = append(w.ran, append([]string{req.Target}, req.Argv...))
	arg := func(name string) string {
		i := slices.Index(req.Argv, name)
		if i < 0 {
			return ""
		}
		return req.Argv[i+1]
	}
	if !slices.Contains(req.Argv, "dial") && w.prints != "" {
		return world.ExecResult{Stdout: []byte(w.prints)}, nil
	}
	if !slices.Contains(req.Argv, "dial") {
		return world.ExecResult{Stdout: []byte("NAME     NODE IP LOCAL   NODE IP REMOTE   AGE\nnode-1   10.0.1.1                         5m2s\n")}, nil
	}
	w.sent = append(w.sent, time.Now())
	if w.answersAfter > 0 && len(w.sent) > w.answersAfter {
		w.answers = true
	}
	res := prober.Result{OK: w.answers, RTT: 1500 * time.Microsecond}
	src := w.send(arg("--token"), arg("--proto"), w.hops, prober.MarkRequest, req.Target, arg("--to"))
	if w.answers {
		back := w.back
		if back == nil {
			back = slices.Clone(w.hops)
			slices.Reverse(back)
		}
		w.send(arg("--token"), arg("--proto"), back, prober.MarkReply, arg("--to"), req.Target)
		if arg("--proto") != "icmp" {
			res.SeenAs = netip.AddrPortFrom(src, 40000)
			res.Server, res.By = w.answerer()
		}
	} else {
		res.Error, res.Message = w.fails, "as told"
	}
	b, err := json.Marshal(res)
	return world.ExecResult{Stdout: b}, err
}

// answerer is the server that answers, and its address.
func (w *fakeWorld) answerer() (prober.Server, netip.AddrPort) {
	cluster, name, _ := strings.Cut(w.hops[len(w.hops)-1], "/")
	s := prober.Server{Cluster: cluster, Pod: name, Process: "p1"}
	by := w.by
	for _, p := range w.pods[cluster] {
		if p.Name == name {
			s.UID, s.Node, s.HostNetwork = p.UID, p.Node, p.HostNet
			by = cmp.Or(by, p.IP)
		}
	}
	if w.server != nil {
		s = *w.server
	}
	return s, netip.AddrPortFrom(by, prober.Port)
}

// send lets a packet pass hosts and returns the source it arrived with.
func (w *fakeWorld) send(token, proto string, hops []string, marker rune, _, _ string) netip.Addr {
	src := netip.MustParseAddr("10.0.1.2")
	for i, h := range hops {
		host, outer, _ := strings.Cut(h, "!")
		if to, ok := w.translate[host]; ok {
			src = to
		}
		for _, direction := range []world.Direction{world.In, world.Out} {
			if i == 0 && direction == world.In || i == len(hops)-1 && direction == world.Out {
				continue
			}
			w.now = w.now.Add(10 * time.Microsecond)
			w.seen = append(w.seen, tokenSighting{token, world.Sighting{
				Time: w.now, Host: host, Interface: cmp.Or(w.onlyOn[host], "eth0"), Direction: direction, Outer: outer,
				Src: netip.AddrPortFrom(src, 40000), Proto: proto, Marker: string(marker),
			}})
		}
	}
	return src
}

func (w *fakeWorld) ExecStream(ctx context.Context, req world.ExecRequest, _ io.Reader, stdout, _ io.Writer, _ <-chan world.Resize) (int, error) {
	e := json.NewEncoder(stdout)
	for i := 1; ctx.Err() == nil; i++ {
		r := prober.FlowReport{Time: time.Now().Add(2 * time.Second), Sent: i * 10, Received: i * 10, Alive: true, Gap: 60 * time.Millisecond}
		r.Newest = r.Time
		by, _ := w.answerer()
		r.By = []prober.Server{by}
		if w.mute {
			r.Received, r.By, r.Newest = 0, nil, time.Time{}
		}
		if i > 2 {
			r.By = append(r.By, w.later...)
		}
		if w.fails != "" {
			r.Alive, r.Error, r.Message = false, w.fails, "connection reset by peer"
		}
		if err := e.Encode(r); err != nil {
			return 0, err
		}
	}
	return 0, ctx.Err()
}

func (w *fakeWorld) RESTConfig(_ context.Context, cluster string) (*rest.Config, error) {
	if w.api == "" {
		return nil, errors.New("no API server in this test")
	}
	return &rest.Config{Host: w.api + "/" + cluster}, nil
}

// serveAPI starts the API servers of all clusters. They have what w.objects has.
func (w *fakeWorld) serveAPI(t *testing.T) {
	t.Helper()
	groups := map[string][]string{ // the kinds of a group and version
		"networking.liqo.io/v1beta1": {"InternalNode", "InternalFabric", "Configuration"},
		"ipam.liqo.io/v1alpha1":      {"IP"},
	}
	server := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, req *http.Request) {
		parts := strings.Split(strings.Trim(req.URL.Path, "/"), "/")
		answer := map[string]any{"kind": "APIVersions", "versions": []string{}}
		switch path := strings.Join(parts[1:], "/"); {
		case path == "apis":
			var list []any
			for gv := range groups {
				group, version, _ := strings.Cut(gv, "/")
				one := map[string]any{"groupVersion": gv, "version": version}
				list = append(list, map[string]any{"name": group, "versions": []any{one}, "preferredVersion": one})
			}
			answer = map[string]any{"kind": "APIGroupList", "apiVersion": "v1", "groups": list}
		case len(parts) == 4:
			var list []any
			for _, kind := range groups[parts[2]+"/"+parts[3]] {
				list = append(list, map[string]any{"name": strings.ToLower(kind) + "s", "kind": kind, "namespaced": true, "verbs": []string{"list"}})
			}
			answer = map[string]any{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": parts[2] + "/" + parts[3], "resources": list}
		case len(parts) == 5:
			items := []any{}
			for _, o := range w.objects {
				if o.cluster == parts[0] && strings.ToLower(o.kind)+"s" == parts[4] {
					items = append(items, map[string]any{
						"apiVersion": parts[2] + "/" + parts[3], "kind": o.kind, "spec": o.spec, "status": o.status,
						"metadata": map[string]any{"namespace": o.namespace, "name": o.name, "labels": o.labels},
					})
				}
			}
			answer = map[string]any{"kind": "List", "apiVersion": parts[2] + "/" + parts[3], "metadata": map[string]any{}, "items": items}
		}
		out.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(out).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	w.api = server.URL
}

// An object is what an API server of the fake world has.
type object struct {
	cluster, kind, namespace, name string
	labels                         map[string]string
	spec, status                   map[string]any
}

// configuration says how a cluster calls the pod network and the external one of
// another one: a pair each, as they are and as they are called. Of what is not
// called yet there is no status.
func configuration(cluster, remote string, pod, external [2]string) object {
	cidrs := func(i int) map[string]any {
		out := map[string]any{}
		for kind, pair := range map[string][2]string{"pod": pod, "external": external} {
			if pair[i] != "" {
				out[kind] = []any{pair[i]}
			}
		}
		return map[string]any{"remote": map[string]any{"cidr": out}}
	}
	return object{
		cluster: cluster, kind: "Configuration", namespace: "liqo-tenant-" + remote, name: remote,
		labels: map[string]string{"liqo.io/remote-cluster-id": remote}, spec: cidrs(0), status: cidrs(1),
	}
}

func (w *fakeWorld) Sightings(_ context.Context, q world.SightingQuery) ([]world.Sighting, error) {
	if w.blind {
		return nil, world.ErrNoCaptures
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []world.Sighting
	for _, host := range slices.Sorted(maps.Keys(w.mss)) {
		if q.SYN.IsValid() {
			out = append(out, world.Sighting{Host: host, Interface: "eth0", Direction: world.In, Src: q.SYN, MSS: w.mss[host]})
		}
	}
	for _, s := range w.seen {
		if s.token == q.Token {
			out = append(out, s.Sighting)
		}
	}
	return out, nil
}

func (w *fakeWorld) WirePackets(_ context.Context, q world.WireQuery) (world.WireReport, error) {
	r := world.WireReport{Packets: w.udpOnWAN, Lost: w.lost, Found: make([]int, len(q.Contains))}
	for i, token := range q.Contains {
		for _, s := range w.seen {
			if s.token == token && (s.Host == q.On || q.On == "wan" && w.clearText) {
				r.Found[i]++
			}
		}
	}
	if q.On == "wan" {
		r.Flows = []world.WireFlow{{Proto: "udp", Packets: w.udpOnWAN}, {Proto: "arp", Packets: 2}}
	}
	return r, nil
}

// Sealed is what gateways on the way sent into their tunnels.
func (w *fakeWorld) Sealed(_ context.Context, q world.SealedQuery) (world.SealedReport, error) {
	var r world.SealedReport
	for _, s := range w.seen {
		p := world.SealedPacket{Time: s.Time.UTC(), Host: s.Host, Sealed: !w.unsealed, Passed: w.sealedOnWAN}
		sender := map[string]string{string(prober.MarkRequest): "milan/gateway", string(prober.MarkReply): "rome/gateway"}[s.Marker]
		if s.token == q.Token && s.Direction == world.Out && s.Host == sender {
			r.Packets = append(r.Packets, p)
		}
	}
	return r, nil
}

func (w *fakeWorld) PodLogs(ctx context.Context, _ string, since map[string]world.LogMark) ([]world.Log, error) {
	return w.Logs(ctx, since)
}

func (w *fakeWorld) Logs(_ context.Context, since map[string]world.LogMark) ([]world.Log, error) {
	var out []world.Log
	for _, l := range w.logs {
		if mark, ok := since[l.Name]; ok {
			l = l.Since(mark)
		}
		out = append(out, l)
	}
	return out, nil
}

func (w *fakeWorld) Inventory(context.Context) ([]world.Inventory, error) { return nil, nil }

// seedsPath is the way of a packet from milan/web to rome/web when the
// gateways are on the second nodes.
func seedsPath() []string {
	return []string{"milan/web", "milan/node-1", "milan/node-2!geneve", "milan/gateway", "rome/gateway", "rome/node-2!geneve", "rome/node-1", "rome/web"}
}

func newFake(t *testing.T) (*fakeWorld, *expect.Row) {
	t.Helper()
	topo, err := topology.Load("../../../topologies/two-clusters.yaml")
	assert.NilError(t, err)
	gateway := map[string]string{"networking.liqo.io/component": "gateway", "networking.liqo.io/active": "true"}
	pod := func(namespace, name, node, ip string, labels ...string) world.PodStatus {
		p := world.PodStatus{Namespace: namespace, Name: name, UID: "uid-" + ip, Node: node, IP: netip.MustParseAddr(ip), Labels: map[string]string{}}
		if len(labels) > 0 {
			for k, v := range gateway {
				p.Labels[k] = v
			}
			p.Labels["liqo.io/remote-cluster-id"] = labels[0]
		}
		return p
	}
	w := &fakeWorld{
		topology: topo, answers: true, hops: seedsPath(), udpOnWAN: 100, sealedOnWAN: 1, now: time.Unix(1000, 0),
		pods: map[string][]world.PodStatus{
			"milan": {pod("default", "web", "node-1", "10.0.1.2"), pod("default", "probe", "node-2", "10.0.2.2"), pod("liqo-tenant-rome", "gw-rome-x", "node-2", "10.0.2.9", "rome")},
			"rome":  {pod("default", "web", "node-1", "10.1.1.2"), pod("default", "probe", "node-2", "10.1.2.2"), pod("liqo-tenant-milan", "gw-milan-x", "node-2", "10.1.2.9", "milan")},
		},
	}
	tokens := 0
	api := expect.NewAPI(w.RESTConfig)
	return w, &expect.Row{
		World: w, Topology: topo, API: api, Directory: expect.NewDirectory(w, api, topo),
		NewToken:    func() string { tokens++; return fmt.Sprintf("token%d", tokens) },
		Started:     w.now,
		StepStarted: time.Now().Add(-2 * time.Second),
		Flows:       map[string]*expect.FlowState{},
		Outputs:     map[string]expect.Ran{},
	}
}

func ref(t *testing.T, row *expect.Row, text string) expect.Ref {
	t.Helper()
	o, err := operand.Parse(text, row.Topology)
	assert.NilError(t, err)
	return expect.Ref{Text: text, Operand: o}
}
