package plan_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"text/tabwriter"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestSizes counts what a node and a gateway have, by the number of nodes and
// of peerings: testdata/sizes.golden is the table.
func TestSizes(t *testing.T) {
	nettest.Slow(t, "plans for up to 1,000 nodes and 100 peerings, which takes 40 s")
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "\t\ta node:\t\t\t\t\ta gateway:\t\t\t\t\t\n")
	fmt.Fprint(w, "nodes\tpeerings\tlinks\tip rules\troutes\tnft tables\tnft rules\tlinks\tip rules\troutes\tnft tables\tnft rules\t\n")
	rules := map[int]int{} // of a node, by peerings
	for _, peerings := range []int{1, 10, 100} {
		for _, nodes := range []int{10, 100, 1000} {
			s := large(t, nodes, peerings)
			for i := range s.InternalNodes {
				n := &s.InternalNodes[i]
				n.Local = netip.AddrFrom4([4]byte{172, 18, byte(i / 250), byte(i%250 + 1)})
				n.Remote = n.Local
			}
			node, gateway := sizeOfNode(t, s), sizeOfGateway(t, s)
			fmt.Fprintf(w, "%d\t%d\t%s%s\n", nodes, peerings, node, gateway)
			if before, known := rules[peerings]; known {
				assert.Equal(t, node.rules, before, "ip rules of a node grow with the nodes: %d", nodes)
			}
			rules[peerings] = node.rules
		}
	}
	assert.NilError(t, w.Flush())
	golden.Assert(t, table.String(), "sizes.golden")
}

// A size is how many things a host has.
type size struct{ links, rules, routes, tables, firewall int }

func (s size) String() string {
	return fmt.Sprintf("%d\t%d\t%d\t%d\t%d\t", s.links, s.rules, s.routes, s.tables, s.firewall)
}

func sizeOf(t *testing.T, s netstate.State, results []desired.Result) size {
	t.Helper()
	assert.NilError(t, s.Validate())
	for _, r := range results {
		assert.Assert(t, r.OK, "%s: %s", r.Object, r.Message)
	}
	out := size{links: len(s.Links), rules: len(s.Rules), routes: len(s.Routes), tables: len(s.Tables)}
	for _, table := range s.Tables {
		for _, c := range table.Chains {
			out.firewall += len(c.Rules)
		}
	}
	return out
}

// sizeOfNode is that of a node without gateways.
func sizeOfNode(t *testing.T, s cluster.Snapshot) size {
	t.Helper()
	const name = "node-0007"
	state, results := desired.Node(desired.NodeInput{
		Name: name, NodeIP: netip.MustParseAddr("172.18.0.8"), Underlay: desired.Underlay{MTU: 1500},
		Fabrics: s.Fabrics, Tunnels: s.Tunnels, Nodes: s.InternalNodes, Routes: s.Routes, Firewalls: s.Firewalls,
	})
	return sizeOf(t, state, results)
}

func sizeOfGateway(t *testing.T, s cluster.Snapshot) size {
	t.Helper()
	g := s.GatewayServers[0]
	var f cluster.InternalFabric
	for _, f = range s.Fabrics {
		if f.RemoteID == g.RemoteID {
			break
		}
	}
	state, results := desired.Gateway(desired.GatewayInput{
		Name: g.Name, Namespace: g.Namespace, RemoteID: g.RemoteID, Mode: g.Role, NodeName: f.GatewayNode,
		PodIP: f.GatewayIP, PublicKey: netstate.Key{1}, Underlay: desired.Underlay{MTU: 1500},
		Configurations: s.Configurations, PublicKeys: s.PublicKeys, Fabrics: s.Fabrics, Tunnels: s.Tunnels,
		Nodes: s.InternalNodes, Routes: s.Routes, Firewalls: s.Firewalls,
	})
	return sizeOf(t, state, results)
}
