package plan_test

import (
	"net/netip"
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Hosts understand everything that the plan tells them: every object that is
// addressed to a host compiles, without a warning.
func TestHostsUnderstand(t *testing.T) {
	w := peered(t)
	w.namespace("paris")
	w.configure("paris", "10.10.0.0/16", "10.70.0.0/16")
	w.client("paris")
	publicKey(w, "rome", "key", 32)
	publicKey(w, "paris", "key", 32)
	w.settle()
	w.kubelet("node-1", "node-2")
	w.settle()
	for i, name := range []string{"node-1", "node-2"} {
		ip := v1beta1.IP([]string{"172.18.1.11", "172.18.1.12"}[i])
		get[*v1beta1.InternalNode](w, "", name).Status.NodeIP = v1beta1.InternalNodeStatusNodeIP{Local: &ip, Remote: &ip}
	}
	s := w.snapshot()
	understood := func(host string, results []desired.Result, kinds ...string) {
		t.Helper()
		seen := map[string]bool{}
		for _, r := range results {
			assert.Assert(t, r.OK && r.Message == "", "%s: %v: %s", host, r.Object, r.Message)
			seen[r.Object.Name] = true
		}
		for _, name := range kinds {
			assert.Assert(t, seen[name], "%s did not report %s: %v", host, name, results)
		}
	}
	for _, node := range []string{"node-1", "node-2"} {
		state, results := desired.Node(desired.NodeInput{
			Name: node, Underlay: desired.Underlay{MTU: 1500}, Fabrics: s.Fabrics, Tunnels: s.Tunnels, Nodes: s.InternalNodes, Routes: s.Routes, Firewalls: s.Firewalls, Problems: s.Invalid,
		})
		understood(node, results, "rome-node-gw", "paris-node-gw")
		assert.Equal(t, len(state.Links), 2)
	}
	for _, g := range []cluster.Gateway{s.GatewayServers[0], s.GatewayClients[0]} {
		pod := get[*corev1.Pod](w, g.Namespace, "gw-"+g.Name+"-0")
		state, results := desired.Gateway(desired.GatewayInput{
			Name: g.Name, Namespace: g.Namespace, RemoteID: g.RemoteID, Mode: g.Role, NodeName: pod.Spec.NodeName,
			PodIP: netip.MustParseAddr(pod.Status.PodIP), PublicKey: netstate.Key{1}, PeerEndpoint: netip.MustParseAddrPort("203.0.113.1:51840"),
			Underlay: desired.Underlay{MTU: 1500}, Configurations: s.Configurations, PublicKeys: s.PublicKeys, Fabrics: s.Fabrics, Tunnels: s.Tunnels,
			Nodes: s.InternalNodes, Routes: s.Routes, Firewalls: s.Firewalls, Problems: s.Invalid,
		})
		understood("gateway "+g.Name, results, g.RemoteID+"-gw-ext", "milan-node-1-gw-node", "milan-node-2-gw-node")
		assert.Equal(t, len(state.Links), 3)
		assert.Equal(t, len(state.WireGuard[0].Peers), 1)
		for _, n := range s.InternalNodes {
			assert.Assert(t, closedToPeer(state, n.InternalIP), "the peer of gateway %s reaches %s at %s", g.Name, n.Name, n.InternalIP)
		}
	}
}

// closedToPeer reports whether a gateway drops what its peer sends to a.
func closedToPeer(s netstate.State, a netip.Addr) bool {
	for _, t := range s.Tables {
		for _, r := range t.Chains[0].Rules {
			if t.Name == desired.InternalOnlyTable && r.Matches[1].Addr.From.Compare(a) <= 0 && a.Compare(r.Matches[1].Addr.To) <= 0 {
				return r.Action.Kind == netstate.Drop && r.Matches[0].Dev == desired.TunnelInterface
			}
		}
	}
	return false
}
