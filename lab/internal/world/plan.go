package world

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// Where things are in the networks of the lab.
const (
	routerHostPart       = 1
	controlPlaneHostPart = 2
	firstOutsideHostPart = 101 // below are the routers
)

// Plan lays out a topology: who has which address where. It is pure.
func Plan(t *topology.Topology) Spec {
	s := Spec{Name: t.Name, WAN: topology.WAN}
	for i, c := range t.Clusters {
		lan := c.NodeCIDR
		if !lan.IsValid() {
			lan = netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 18, byte(i + 1), 0}), 24)
		}
		cs := ClusterSpec{
			Name: c.Name, Index: i + 1, LAN: lan,
			Router: nth(lan, routerHostPart), RouterWAN: RouterWAN(i), ControlPlane: nth(lan, controlPlaneHostPart),
			PodCIDR: c.PodCIDR, ServiceCIDR: c.ServiceCIDR, ExternalCIDR: c.ExternalCIDR, InternalCIDR: c.InternalCIDR,
			LoadBalancer: c.LoadBalancer,
			CNI:          c.CNI, Masquerade: c.Masquerade, KubeProxy: c.KubeProxy, Runtime: c.Runtime,
			MTU: c.MTU, WANMTU: c.WANMTU, NAT: c.NAT, RoutedServices: c.RoutedServices,
			Impairment: c.Impairment, BlocksICMP: c.BlocksICMP, Forwards: forwards(t, c, lan),
			RPFilter: c.RPFilter, SourceCheck: c.SourceCheck, NodeGracePeriod: c.NodeGracePeriod,
		}
		for n := range c.Nodes {
			node := NodeSpec{
				Name: fmt.Sprintf("node-%d", n+1), Addr: nth(lan, topology.FirstNodeHost+n), Absent: slices.Contains(c.Absent, n+1),
			}
			if c.CNI == topology.CNIVPC {
				node.PodAddr = nth(lan, topology.FirstNodeHost+c.Nodes+n)
			}
			cs.Nodes = append(cs.Nodes, node)
		}
		s.Clusters = append(s.Clusters, cs)
	}
	for i, o := range t.Outside {
		h := HostSpec{Name: o.Name, Addr: nth(s.WAN, firstOutsideHostPart+i), Impairment: o.Impairment}
		if o.Via != "" {
			// The router has the first address of the host's own network.
			h = HostSpec{Name: o.Name, Addr: o.Address, LAN: netip.PrefixFrom(o.Address, topology.BehindRouter).Masked(), Via: o.Via}
		}
		s.Outside = append(s.Outside, h)
	}
	return s
}

// forwards are the port forwardings of a cluster's router: to the gateways that
// its peerings say.
func forwards(t *topology.Topology, c topology.Cluster, lan netip.Prefix) []ForwardSpec {
	var out []ForwardSpec
	for _, p := range t.Peerings {
		if p.Server == c.Name && p.Forward != nil {
			node := nth(lan, topology.FirstNodeHost+p.Forward.Node-1)
			out = append(out, ForwardSpec{p.Forward.Port, netip.AddrPortFrom(node, uint16(p.Forward.NodePort))})
		}
	}
	return out
}

// RouterWAN is the address of the router of the i-th cluster, from 0, on the
// WAN.
func RouterWAN(i int) netip.Addr { return nth(topology.WAN, i+1) }

// nth is the n-th address of a network.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := len(b) - 1; n > 0 && i >= 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
