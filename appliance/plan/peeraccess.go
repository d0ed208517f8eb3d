package plan

import (
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// maxOpen is how many networks InternalNode.spec.openToPeers has room for.
const maxOpen = 256

// mappedAddresses returns the addresses that IPs stand for, and that gateways lead to.
func (p *planner) mappedAddresses() map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	for _, x := range p.ips {
		if x.given.IsValid() && p.sound(x.Meta) && x.Labels[v1beta1.LabelHostUnreachable] != "true" {
			out[x.IP.IP] = true
		}
	}
	return out
}

// openToPeers returns what peers may reach of the addresses of a node: those that are
// mapped, and the networks of Services, whose addresses all nodes have where kube-proxy
// runs in its mode ipvs.
func (p *planner) openToPeers(n cluster.Node, mapped map[netip.Addr]bool) []netip.Prefix {
	has := slices.Clone(n.Addresses)
	x := p.internalNode(n.Name)
	if x != nil {
		has = append(append(has, x.Local, x.Remote, x.VTEP.IP), x.Addresses...)
	}
	out := slices.Clone(p.local.ofType(v1beta1.NetworkTypeService))
	for _, a := range has {
		if mapped[a] {
			out = append(out, host(a))
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	out = slices.Compact(out)
	if len(out) > maxOpen {
		if x != nil {
			p.remark(x.Meta, Warning, ReasonNotUsed, "spec.openToPeers has room for %d of the %d networks that peers may reach on this node (addresses that IPs map, and those of Services): peers do not reach %v and what follows it; delete IPs that map addresses of this node",
				maxOpen, len(out), out[maxOpen])
		}
		out = out[:maxOpen]
	}
	return out
}

// peerCIDRs returns the networks of all peers, as this cluster calls them.
func (p *planner) peerCIDRs() []netip.Prefix {
	var out []netip.Prefix
	for _, peer := range p.peerings {
		if peer.ready {
			out = append(out, peer.remapped()...)
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}

// endpointPorts returns the UDP ports of nodes by which the peer reaches the gateway of a
// peering: those that its Service has on nodes, and that of WireGuard where the gateway
// is in the network of its node.
func (p *planner) endpointPorts(peer *peering) []int32 {
	g := peer.gateway
	if g.Role != cluster.Server {
		return nil
	}
	var out []int32
	if s := p.gatewayService(g); s != nil {
		for _, port := range s.Ports {
			if port.NodePort != 0 {
				out = append(out, int32(port.NodePort))
			}
		}
	}
	if peer.pod != nil && peer.pod.HostNetwork {
		if number, ok := hostNumber(peer.pod.Labels[v1beta1.LabelHostInterface]); ok {
			out = append(out, int32(listenPort+number))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
