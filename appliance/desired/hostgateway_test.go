package desired_test

import (
	"net/netip"
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// hostFabric is that of a gateway in a network namespace of node-2.
func hostFabric() cluster.InternalFabric {
	f := overlayFabric()
	f.GatewayIP, f.HostInterface = addr("172.18.1.12"), "liqo.host"
	return f
}

// hostNode is a node of a cluster with such a gateway.
func hostNode(name string) desired.NodeInput {
	in := overlayNode(name)
	in.Fabrics = []cluster.InternalFabric{hostFabric()}
	// What comes from the gateway itself goes to other nodes as what comes
	// from the peer does.
	in.Routes[1].Rules = append(in.Routes[1].Rules, cluster.RouteRule{Src: netip.PrefixFrom(in.Fabrics[0].InternalIP, 32)})
	in.Underlay.Devs = map[netip.Addr]string{in.Fabrics[0].GatewayIP: "lo"}
	in.Underlay.Links = map[string]bool{"liqo.host": true}
	return in
}

// hostGateway is the gateway itself.
func hostGateway() desired.GatewayInput {
	in := overlayGateway()
	in.Fabrics, in.PodIP, in.HostInterface = []cluster.InternalFabric{hostFabric()}, addr("172.18.1.12"), "liqo.host"
	in.Routes[0].Rules[0].IIF = "liqo.gateway"
	return in
}

func TestHostGatewayGolden(t *testing.T) {
	node, nodeResults := desired.Node(hostNode("node-2"))
	assert.NilError(t, node.Validate())
	golden.Assert(t, text(node, nodeResults), "netns-gateway-node.golden")
	gateway, gatewayResults := desired.Gateway(hostGateway())
	assert.NilError(t, gateway.Validate())
	golden.Assert(t, text(gateway, gatewayResults), "netns-gateway.golden")

	// The other nodes do not notice.
	other, _ := desired.Node(hostNode("node-1"))
	pod, _ := desired.Node(overlayNode("node-1"))
	pod.Rules = slices.DeleteFunc(pod.Rules, func(r netstate.Rule) bool { return r.Goto != 0 || r.Nop })
	assert.Equal(t, text(other, nil), text(pod, nil))
}

// A packet takes the pair to the gateway and back.
func TestHostGatewayFate(t *testing.T) {
	node, _ := desired.Node(hostNode("node-2"))
	gateway, _ := desired.Gateway(hostGateway())
	const pod, podAtGateway, peer, peersOwn = "10.127.65.7", "10.127.66.7", "10.127.128.7", "10.127.64.7"
	for _, tt := range []struct {
		name, host string
		packet
		want string
	}{
		{"a pod of another node to the peer", "node-2", packet{"liqo.vxlan", pod, peer}, "liqo.host"},
		{"a pod of this node to the peer", "node-2", packet{"cni0", podAtGateway, peer}, "liqo.host"},
		{"the node to the peer", "node-2", packet{"lo", "10.80.0.3", peer}, "liqo.host"},
		{"the node's own address to the peer", "node-2", packet{"lo", "172.18.1.12", peer}, "liqo.host"},
		{"the peer to a pod of another node", "node-2", packet{"liqo.host", peer, pod}, "liqo.vxlan"},
		{"the peer to a pod of this node", "node-2", packet{"liqo.host", peer, podAtGateway}, "main"},
		{"the gateway's error to a pod of another node", "node-2", packet{"liqo.host", "10.80.0.5", pod}, "liqo.vxlan"},
		{"a pod to the peer", "gateway", packet{"liqo.gateway", pod, peersOwn}, "liqo-tunnel"},
		{"a pod to somebody else", "gateway", packet{"liqo.gateway", pod, "10.96.0.1"}, "unreachable"},
		{"the peer to a pod", "gateway", packet{"liqo-tunnel", peersOwn, pod}, "main"},
		{"the peer to a Service", "gateway", packet{"liqo-tunnel", peersOwn, "10.96.0.1"}, "unreachable"},
		{"the peer to the node", "gateway", packet{"liqo-tunnel", peersOwn, "172.18.1.12"}, "unreachable"},
		{"the peer to the gateway", "gateway", packet{"liqo-tunnel", peersOwn, "10.80.0.5"}, "dropped by internal-cidr"},
	} {
		t.Run(tt.host+" "+tt.name, func(t *testing.T) {
			state := node
			if tt.host == "gateway" {
				state = gateway
			}
			assert.Equal(t, fate(state, tt.packet), tt.want)
		})
	}
}

// As long as the pair is not there, what is for the peer is refused, and the
// object says why.
func TestHostGatewayIsNotThereYet(t *testing.T) {
	in := hostNode("node-2")
	assert.DeepEqual(t, in.HostInterfaces(), []string{"liqo.host"})
	assert.Equal(t, len(hostNode("node-1").HostInterfaces()), 0)
	in.Underlay.Links = nil
	state, results := desired.Node(in)
	assert.Equal(t, fate(state, packet{"cni0", "10.127.66.7", "10.127.128.7"}), "unreachable")
	i := slices.IndexFunc(results, func(r desired.Result) bool { return r.Object.Name == "rome-node-gw" })
	assert.Assert(t, i >= 0 && !results[i].OK)
	assert.Assert(t, cmp.Contains(results[i].Message, "no link liqo.host yet"))

	// A gateway without an address yet makes the pair all the same, but none that
	// nodes have not been told of.
	gw := hostGateway()
	gw.Fabrics = slices.Clone(gw.Fabrics)
	for i := range gw.Fabrics {
		gw.Fabrics[i].InternalIP = netip.Addr{}
	}
	pair := func() bool {
		state, _ := desired.Gateway(gw)
		assert.NilError(t, state.Validate())
		return slices.ContainsFunc(state.Links, func(l netstate.Link) bool { return l.Name == "liqo.gateway" && l.Peer == "liqo.host" })
	}
	assert.Assert(t, pair())
	gw.Fabrics = nil
	assert.Assert(t, !pair())
}

// A gateway whose Configuration is refused has no InternalFabric: what joins the nodes
// says whether its kernel needs Geneve.
func TestExpectedOverlay(t *testing.T) {
	in := overlayGateway()
	assert.Equal(t, in.ExpectedOverlay(), cluster.OverlayVXLAN)
	in.Nodes = overlayNodes()
	in.Fabrics = nil
	assert.Equal(t, in.ExpectedOverlay(), cluster.OverlayVXLAN)
	assert.Equal(t, romeGateway().ExpectedOverlay(), cluster.OverlayGeneve)
	assert.Equal(t, desired.GatewayInput{}.ExpectedOverlay(), cluster.OverlayGeneve)
}
