package desired_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

func TestGolden(t *testing.T) {
	for name, compile := range map[string]func() (netstate.State, []desired.Result){
		"node":                func() (netstate.State, []desired.Result) { return desired.Node(milanNode()) },
		"node-without-api":    func() (netstate.State, []desired.Result) { return desired.Node(desired.NodeInput{Name: "node-1"}) },
		"gateway-server":      func() (netstate.State, []desired.Result) { return desired.Gateway(romeGateway()) },
		"gateway-client-ipv6": func() (netstate.State, []desired.Result) { return desired.Gateway(sixGateway()) },
	} {
		t.Run(name, func(t *testing.T) {
			state, results := compile()
			assert.NilError(t, state.Validate())
			golden.Assert(t, text(state, results), name+".golden")
		})
	}
}

func shuffle[T any](r *rand.Rand, s []T) {
	r.Shuffle(len(s), func(i, j int) { s[i], s[j] = s[j], s[i] })
}

// The order in which objects come out of a cache is nobody's decision.
func TestOrderDoesNotMatter(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	node, nodeResults := desired.Node(milanNode())
	gateway, gatewayResults := desired.Gateway(crowded())
	for range 50 {
		n := milanNode()
		shuffle(r, n.Fabrics)
		shuffle(r, n.Tunnels)
		shuffle(r, n.Nodes)
		shuffle(r, n.Routes)
		shuffle(r, n.Firewalls)
		state, results := desired.Node(n)
		assert.DeepEqual(t, state, node, comparers)
		assert.DeepEqual(t, results, nodeResults)

		g := crowded()
		shuffle(r, g.Configurations)
		shuffle(r, g.PublicKeys)
		shuffle(r, g.Fabrics)
		shuffle(r, g.Tunnels)
		shuffle(r, g.Nodes)
		shuffle(r, g.Routes)
		shuffle(r, g.Firewalls)
		shuffle(r, g.Problems)
		state, results = desired.Gateway(g)
		assert.DeepEqual(t, state, gateway, comparers)
		assert.DeepEqual(t, results, gatewayResults)
	}
}

// crowded is a gateway with objects that contradict each other.
func crowded() desired.GatewayInput {
	in := romeGateway()
	older := in.Configurations[0]
	older.Name, older.Created = "zzz-older", epoch.Add(-1)
	in.Configurations = append(in.Configurations, older)

	other := in.Routes[1]
	other.Name, other.Namespace = "by-hand", "liqo-tenant-rome"
	third := in.Routes[2]
	third.Name = "zzz"
	in.Routes = append(in.Routes, other, third)

	fw := in.Firewalls[0]
	fw.Name = "aaa"
	in.Firewalls = append(in.Firewalls, fw)

	in.Tunnels = append(in.Tunnels, tunnel("rome", "node-9", 9), tunnel("oslo", "node-1", 7))
	twin := tunnel("rome", "node-1", 8)
	twin.Name = "twin"
	in.Tunnels = append(in.Tunnels, twin)
	in.Problems = []cluster.InvalidError{
		{Object: in.Routes[3].Ref, Field: "spec.table.rules[1].routes[0].dst", Value: "x", Reason: "is not a CIDR"},
		{Object: in.Routes[3].Ref, Field: "spec.table.rules[0].dst", Value: "y", Reason: "is not a CIDR"},
		{Object: in.Routes[0].Ref, Field: "spec.table.rules[0].dst", Value: "10.0.0.1/8", Reason: "has host bits", Note: true},
	}
	return in
}

func TestContradictions(t *testing.T) {
	state, results := desired.Gateway(crowded())
	assert.NilError(t, state.Validate())
	golden.Assert(t, text(state, results), "contradictions.golden")
}

// What one object gets wrong must not change what others get.
func TestBadObjectsDisturbNobody(t *testing.T) {
	want, _ := desired.Node(milanNode())
	in := milanNode()
	for _, rc := range badRoutes() {
		rc.RouteConfiguration.Meta = meta("RouteConfiguration", "liqo", "bad-"+rc.name, routeCategory, "fabric")
		rc.Created = epoch.Add(1)
		in.Routes = append(in.Routes, rc.RouteConfiguration)
	}
	for _, fc := range badFirewalls() {
		fc.FirewallConfiguration.Meta = meta("FirewallConfiguration", "liqo", "bad-"+fc.name, fwCategory, "fabric", fwSubcategory, "all-nodes")
		in.Firewalls = append(in.Firewalls, fc.FirewallConfiguration)
	}
	got, _ := desired.Node(in)
	assert.DeepEqual(t, got, want, comparers)
}

// TestRouteByThePodsLink: what comes out of the tunnel has its way back by links
// to nodes, so a user's route by the pod's own link says that it leads nothing of
// it. In force it is: the gateway's own packets go there.
func TestRouteByThePodsLink(t *testing.T) {
	const says = "spec.table.rules[0].routes[0].dev: what comes out of liqo-tunnel is not led out by eth0"
	byPod, byNode := desired.PodInterface, "liqo.node-1"
	for _, tt := range []struct {
		name string
		in   desired.GatewayInput
		rule cluster.RouteRule
		dst  string
		dev  string
		says bool
	}{
		{"all packets", romeGateway(), cluster.RouteRule{}, "10.99.0.0/16", byPod, true},
		{"of the tunnel", romeGateway(), cluster.RouteRule{IIF: desired.TunnelInterface}, "10.99.0.0/16", byPod, true},
		{"its own", romeGateway(), cluster.RouteRule{IIF: "lo"}, "10.99.0.0/16", byPod, false},
		{"of a socket", romeGateway(), cluster.RouteRule{OIF: byPod}, "10.99.0.0/16", byPod, false},
		{"by a node", romeGateway(), cluster.RouteRule{}, "10.99.0.0/16", byNode, false},
		{"IPv6 has no such filter", romeGateway(), cluster.RouteRule{}, "fd99::/64", byPod, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.rule.Routes = []cluster.TableRoute{{Dst: prefix(tt.dst), Dev: tt.dev, Scope: "link"}}
			tt.in.Routes = append(tt.in.Routes, cluster.RouteConfiguration{
				Meta:  meta("RouteConfiguration", "liqo-tenant-rome", "users-own", routeCategory, "gateway", routeUnique, "rome"),
				Table: "users-own", Rules: []cluster.RouteRule{tt.rule},
			})
			_, results := desired.Gateway(tt.in)
			i := slices.IndexFunc(results, func(r desired.Result) bool { return r.Object.Name == "users-own" })
			assert.Assert(t, results[i].OK, results[i].Message)
			assert.Equal(t, strings.Contains(results[i].Message, says), tt.says, results[i].Message)
		})
	}
}
