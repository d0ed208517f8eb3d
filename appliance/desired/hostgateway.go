package desired

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// GatewayInterface is the gateway's end of the pair that joins a node and a
// gateway in a network namespace of it. The node's end is liqo.host.
const GatewayInterface = "liqo.gateway"

// hostGateway joins a gateway in a network namespace of its node to the node:
// what comes from there may be forwarded, and what is for nobody else goes
// there. It answers to its address of the internal CIDR. Without an InternalFabric
// there is no pair: the node would take it for what an earlier gateway has left.
//
//	ip link add liqo.gateway type veth peer name liqo.host netns …
//	ip address add 10.80.0.7/32 dev liqo.gateway
//	ip route add default via 10.80.0.4 dev liqo.gateway onlink
func (h *host) hostGateway(in GatewayInput) {
	if in.HostInterface == "" || in.fabric().Name == "" {
		return
	}
	h.addDev(netstate.Link{
		Name:        GatewayInterface,
		Kind:        netstate.KindVeth,
		MTU:         in.Underlay.MTU,
		Peer:        in.HostInterface,
		Description: "node " + in.NodeName,
		Forwarding:  true,
		RPFilter:    rpFilterLoose,
	})
	i := slices.IndexFunc(in.Nodes, func(n cluster.InternalNode) bool { return n.Name == in.NodeName && !n.Deleting })
	own := in.fabric().InternalIP
	if i < 0 || !own.IsValid() || !in.Nodes[i].InternalIP.IsValid() || own.Is4() != in.Nodes[i].InternalIP.Is4() {
		return // both are given addresses as soon as there is a pod
	}
	h.state.Addresses = append(h.state.Addresses, netstate.Address{Dev: GatewayInterface, Prefix: hostPrefix(own)})
	h.state.Routes = append(h.state.Routes, netstate.Route{
		Table: TableMain, Dst: anywhere(own.Is6()), Via: in.Nodes[i].InternalIP, Dev: GatewayInterface, OnLink: true,
	})
}

// hostHop is the way to a gateway in a namespace of this node: by the pair that
// the gateway has made. The route in the main table is for the reverse-path
// filter, and for who asks the gateway itself.
//
//	ip route add 10.80.0.7 dev liqo.host scope link src 10.80.0.4
func (h *host) hostHop(in NodeInput, own cluster.InternalNode, f cluster.InternalFabric) hop {
	dev := f.HostInterface
	switch {
	case !in.Underlay.Links[dev]:
		return hop{problem: fmt.Sprintf("%s: this node has no link %s yet: the gateway's pod makes it", f.Ref, dev)}
	case own.InternalIP.Is4() != f.InternalIP.Is4():
		return hop{problem: fmt.Sprintf("%s: its address %s is of another family than %s of this node: make the Network internal-cidr one of one family", f.Ref, f.InternalIP, own.InternalIP)}
	}
	h.state.Routes = append(h.state.Routes, netstate.Route{
		Table: TableMain, Dst: hostPrefix(f.InternalIP), Dev: dev, Scope: netstate.ScopeLink, Src: own.InternalIP,
	})
	return hop{via: f.InternalIP, dev: dev, src: own.InternalIP, onLink: true}
}

// fabric returns the gateway's own InternalFabric, the oldest of several; the
// zero value if there is none.
func (in GatewayInput) fabric() cluster.InternalFabric {
	for _, f := range living(in.Fabrics, func(f cluster.InternalFabric) cluster.Meta { return f.Meta }) {
		if f.RemoteID == in.RemoteID && f.Namespace == in.Namespace {
			return f
		}
	}
	return cluster.InternalFabric{}
}

// Overlay returns the overlay that joins the gateway to nodes: Geneve as long
// as nothing says otherwise.
func (in GatewayInput) Overlay() cluster.Overlay {
	return cmp.Or(in.fabric().Overlay, cluster.OverlayGeneve)
}

// ExpectedOverlay is Overlay, but for a gateway that has no InternalFabric, and may get
// none because its Configuration is refused: then it is what joins the nodes.
func (in GatewayInput) ExpectedOverlay() cluster.Overlay {
	if in.fabric().Name == "" {
		for _, n := range in.Nodes {
			if n.Overlay != "" && !n.Deleting {
				return n.Overlay
			}
		}
	}
	return in.Overlay()
}
