package kubeconfig

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// there is a cluster with so many nodes, as Read returns it.
func there(name, id, pods string, nodes int, peers ...string) Cluster {
	c := Cluster{Access: Access{Name: name, File: name + ".yaml"}, Overlay: netv1beta1.OverlayVXLAN, Peers: peers}
	c.Spec = world.ClusterSpec{Name: name, ID: id, PodCIDR: netip.MustParsePrefix(pods), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16")}
	c.Spec.Nodes = make([]world.NodeSpec, nodes)
	return c
}

func parse(t *testing.T, top, body string) *scenario.Scenario {
	t.Helper()
	src := "description: x\ntopology: " + top + "\n" + body +
		"\nsabotage: [ { withhold: routeconfiguration/rome-node-gw, in: milan, fails: that } ]\n"
	s, err := scenario.Parse("test.yaml", []byte(src), "../../../topologies")
	assert.NilError(t, err)
	return s
}

// TestCannotRun: what a topology is about, and what a row's own steps do, name and
// expect, decides.
func TestCannotRun(t *testing.T) {
	apart := []Cluster{there("milan", "eu-1", "10.0.0.0/16", 2, "us-1"), there("rome", "us-1", "10.1.0.0/16", 3, "eu-1")}
	mixed := slices.Clone(apart)
	mixed[1].Overlay = "geneve"
	tainted := slices.Clone(apart)
	tainted[0].Gateways = map[string]string{"us-1": "control-plane"}
	same := []Cluster{there("milan", "milan", "10.0.0.0/16", 2, "rome"), there("rome", "rome", "10.0.0.0/16", 2, "milan")}
	const reach = "expect: { reach: { from: milan/web, to: rome/web, proto: tcp } }"
	step := func(body string) string { return "{ name: it, " + body + " }" }
	after := func(body string) string { return "{ name: before, " + reach + " }, " + step(body) }
	apply := func(object string) string {
		return step("do: { apply: { in: milan, objects: '" + object + "' } }, " + reach)
	}
	for _, tt := range []struct {
		name, top, steps string
		have             []Cluster
		want             string // empty: it can
	}{
		{"a probe from pod to pod", "two-clusters", step(reach), apart, ""},
		{"from a node", "two-clusters", step("expect: { reach: { from: milan/gateway.node, to: rome/web } }"), apart, ""},
		{"from the node of a gateway that takes no pods", "two-clusters", step("expect: { reach: { from: milan/gateway.node, to: rome/web } }"), tainted, "the gateway of milan for rome runs on node control-plane, which has a taint"},
		{"to it", "two-clusters", step("expect: { reach: { from: rome/web, to: milan/gateway.node } }"), tainted, "runs on node control-plane"},
		{"from another node than that", "two-clusters", step("expect: { reach: { from: milan/gateway.othernode, to: rome/web } }"), tainted, ""},
		{"from the node of the peer's gateway", "two-clusters", step("expect: { reach: { from: rome/gateway.node, to: milan/web } }"), tainted, ""},
		{"a stream", "two-clusters", step("do: { flow: { name: s, from: milan/web, to: rome/web } }, expect: { flow: { name: s, alive: true } }"), apart, ""},
		{"the source of a connection", "two-clusters", after("expect: { source: { seenBy: rome/web, is: milan/web } }"), apart, ""},
		{"the source where ranges overlap", "two-clusters", after("expect: { source: { seenBy: rome/web, is: milan/web } }"), same, "pods of milan are seen with other addresses in rome"},
		{"the remapped source there", "two-clusters", after("expect: { source: { seenBy: rome/web, is: 'remapped(milan/web, rome)' } }"), same, ""},
		{"the source of an echo", "two-clusters", "{ name: it, expect: { reach: { from: milan/web, to: rome/web, proto: icmp }, source: { seenBy: rome/web, is: milan/web } } }", apart, "an echo's source"},
		{"a path MTU", "two-clusters", step("expect: { mtu: { from: milan/web, to: rome/web } }"), apart, ""},
		{"a Service", "two-clusters", apply("{ apiVersion: v1, kind: Service, metadata: { name: a }, spec: { ports: [ { port: 80 } ] } }"), apart, ""},
		{"an object of the product", "two-clusters", apply("{ apiVersion: networking.liqo.io/v1beta1, kind: RouteConfiguration, metadata: { name: a, namespace: default } }"), apart, "such as a RouteConfiguration"},
		{"an object of a cluster with another ID", "two-clusters", after("expect: { kubectl: { in: milan, get: configuration/rome, namespace: liqo-tenant-rome } }"), apart, "that of rome is us-1"},
		{"an object of a cluster with its own name", "two-clusters", after("expect: { kubectl: { in: milan, get: configuration/rome, namespace: liqo-tenant-rome } }"), same, ""},
		{"a command of an administrator", "two-clusters", step("do: { kubectl: { in: milan, run: rollout restart -n liqo daemonset/isthmus-node } }, " + reach), apart, noChange},
		{"a command on a node", "two-clusters", step("do: { exec: { on: milan/node-1, run: ip rule } }, " + reach), apart, noHost},
		{"a container that is killed", "two-clusters", step("do: { kill: milan/gateway }, " + reach), apart, noChange},
		{"a path", "two-clusters", after("expect: { path: { via: [milan/web, rome/web] } }"), apart, noCapture},
		{"an absence on the wire", "two-clusters", after("expect: { never: { payload: token, on: wan } }"), apart, noCapture},
		{"conntrack of a gateway", "two-clusters", after("expect: { conntrack: { on: rome/gateway, seenBy: rome/web } }"), apart, noHost},
		{"a host outside", "two-clusters", step("expect: { reach: { from: milan/web, to: user } }"), apart, "knows of no routers"},
		{"a topology about something else", "flat", step(reach), apart, "of topology flat, clusters.milan."},
		{"ranges that are the same", "overlap", step(reach), same, ""},
		{"ranges that are the same, and here are not", "overlap", step(reach), apart, "here they are 10.1.0.0/16 and 10.0.0.0/16"},
		{"a third cluster", "hub-joins", step(reach), apart, "has a cluster naples, which no --kubeconfig names"},
		{"a node less", "two-clusters", step(reach), []Cluster{there("milan", "a", "10.0.0.0/16", 1, "b"), there("rome", "b", "10.1.0.0/16", 2, "a")}, "2 nodes in milan; milan=milan.yaml has 1"},
		{"no peering", "two-clusters", step(reach), []Cluster{there("milan", "a", "10.0.0.0/16", 2, "b"), there("rome", "b", "10.1.0.0/16", 2, "c")}, "are not peered"},
		{"nothing installed by scenarios", "bare-clusters", step(reach), apart, "keep their installation"},
		{"another overlay", "two-clusters", step(reach), apart, "the overlay of milan is vxlan"},
		{"a peer with another overlay", "two-clusters", step(reach), mixed, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := parse(t, tt.top, "steps: [ "+tt.steps+", { name: that, expect: { reach: { from: milan/web, to: rome/web } } } ]")
			overlay := "vxlan"
			if tt.name == "another overlay" {
				overlay = "geneve"
			}
			lack, ok := CannotRun(s, s.Rows[0], overlay, tt.have)
			assert.Equal(t, ok, tt.want != "", lack.What)
			assert.Check(t, is.Contains(lack.What, tt.want))
			if lack.At != "" {
				assert.Check(t, strings.HasPrefix(lack.At, `step "it": `), lack.At)
			}
		})
	}
}

// TestCannotSabotage: objects are withheld by their names, which cluster IDs are
// part of.
func TestCannotSabotage(t *testing.T) {
	s, err := scenario.Parse("test.yaml", []byte(`
description: x
topology: two-clusters
steps: [ { name: it, expect: { reach: { from: milan/web, to: rome/web } } } ]
sabotage:
  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it }
  - { withhold: firewallconfiguration/service-nodeport-routing, in: milan, fails: it }
  - { plant: { on: milan/gateway, run: nft add table ip x, undo: nft delete table ip x }, fails: it }
`), "../../../topologies")
	assert.NilError(t, err)
	for _, tt := range []struct {
		id   string
		want []bool
	}{{"rome", []bool{false, false, true}}, {"us-1", []bool{true, false, true}}} {
		have := []Cluster{there("milan", "milan", "10.0.0.0/16", 2), there("rome", tt.id, "10.1.0.0/16", 2)}
		var got []bool
		for _, sab := range s.BuildSabotage(s.Rows[0]) {
			_, lacks := CannotSabotage(sab, have)
			got = append(got, lacks)
		}
		assert.DeepEqual(t, got, tt.want)
	}
}

// TestTake: rows are about the nodes and ranges that there are.
func TestTake(t *testing.T) {
	s := parse(t, "two-clusters", "steps: [ { name: that, expect: { reach: { from: milan/web, to: rome/web } } } ]")
	Take(s.Topology, []Cluster{there("milan", "a", "10.20.0.0/16", 5)})
	milan, _ := s.Topology.Cluster("milan")
	assert.Equal(t, milan.Nodes, 5)
	assert.Equal(t, milan.PodCIDR.String(), "10.20.0.0/16")
	rome, _ := s.Topology.Cluster("rome")
	assert.Equal(t, rome.Nodes, 2)
}

func TestParseAccess(t *testing.T) {
	at := filepath.Join(t.TempDir(), "me@home.yaml")
	assert.NilError(t, os.WriteFile(at, nil, 0o600))
	for _, tt := range []struct {
		text string
		want Access
		err  string
	}{
		{"milan=/a/b.yaml", Access{"milan", "/a/b.yaml", ""}, ""},
		{"milan=config@kubernetes-admin@kubernetes", Access{"milan", "config", "kubernetes-admin@kubernetes"}, ""},
		{"milan=" + at, Access{"milan", at, ""}, ""},
		{"milan=" + at + "@admin@milan", Access{"milan", at, "admin@milan"}, ""},
		{"milan", Access{}, "write the name"},
		{"=config", Access{}, "write the name"},
		{"milan=@context", Access{}, "write the name"},
	} {
		got, err := ParseAccess(tt.text)
		if tt.err != "" {
			assert.ErrorContains(t, err, tt.err, tt.text)
			continue
		}
		assert.NilError(t, err)
		assert.Equal(t, got, tt.want)
		assert.Equal(t, got.String(), tt.text)
	}
}
