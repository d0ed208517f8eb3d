package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A Cluster describes the hosts of one cluster and what its CNI gives them: a
// bridge on every node with the node's pods on it, routes between nodes, and
// masquerading of what leaves the cluster, if it does that.
type Cluster struct {
	Name     string
	Nodes    []Node
	Pods     []Pod
	Gateways []Gateway
	// PodCIDRs are those of the cluster, which the CNI does not masquerade
	// between.
	PodCIDRs []netip.Prefix
	// Underlay is the network of the nodes, Routers the way out of it, one
	// for each family.
	Underlay   string
	Routers    []netip.Addr
	MTU        int // of the underlay and of pods; 0: 1500
	Masquerade bool
	RPFilter   int  // conf/all of nodes
	NoBridgeNF bool // see Link.Bridge
	Services   []Service
	// Forwarding6 says that gateways forward IPv6, see Around: in a new network namespace
	// they don't.
	Forwarding6 bool
	Names       map[netip.Prefix]string
}

// A Node is a node of a Cluster.
type Node struct {
	Name     string
	Addrs    []netip.Prefix // on the underlay, with host bits
	PodCIDRs []netip.Prefix
	State    netstate.State
}

// A Pod is a pod with a network of its own.
type Pod struct {
	Name, Node string
	Addrs      []netip.Addr
}

// A Gateway is the pod of a gateway, or a network namespace of its node.
type Gateway struct {
	Name, Node string
	Addr       netip.Addr // of a pod; invalid: it is a namespace of its node
	State      netstate.State
}

// The CNI's links.
const (
	// Bridge is the link of a node to its pods.
	Bridge = "cni0"
	// Eth0 is the link of a node to the underlay, and that of a pod.
	Eth0 = "eth0"
)

// Hosts returns the hosts of the cluster; each is called after the cluster and
// itself, with a slash between.
func (c Cluster) Hosts() []Host {
	var out []Host
	for _, n := range c.Nodes {
		out = append(out, c.node(n))
	}
	for _, g := range c.Gateways {
		out = append(out, c.gateway(g))
	}
	for _, p := range c.Pods {
		h := c.pod(p.Name, p.Node, p.Addrs)
		out = append(out, h)
	}
	return out
}

func (c Cluster) host(name string) Host {
	return Host{Name: c.Name + "/" + name, Cluster: c.Name, Names: c.Names}
}

// pods is the name of the bridge of a node.
func (c Cluster) pods(node string) string { return c.Name + "/" + node + "/pods" }

func (c Cluster) node(n Node) Host {
	h := c.host(n.Name)
	h.State = n.State
	h.Around = Around{
		Links: []Link{
			{Name: Eth0, MTU: c.MTU, Segment: c.Underlay},
			{Name: Bridge, MTU: c.MTU, Segment: c.pods(n.Name), Bridge: !c.NoBridgeNF},
		},
		Services:   c.Services,
		Forwarding: true, Forwarding6: true,
		RPFilter: c.RPFilter,
	}
	for _, a := range n.Addrs {
		h.Around.Addresses = append(h.Around.Addresses, netstate.Address{Dev: Eth0, Prefix: a})
	}
	for _, cidr := range n.PodCIDRs {
		h.Around.Addresses = append(h.Around.Addresses, netstate.Address{Dev: Bridge, Prefix: netip.PrefixFrom(cidr.Masked().Addr().Next(), cidr.Bits())})
	}
	for _, router := range c.Routers {
		h.Around.Routes = append(h.Around.Routes, netstate.Route{Dst: anywhere(router), Via: router, Dev: Eth0})
	}
	for _, other := range c.Nodes {
		for _, cidr := range other.PodCIDRs {
			i := slices.IndexFunc(other.Addrs, func(a netip.Prefix) bool { return a.Addr().Is6() == cidr.Addr().Is6() })
			if other.Name != n.Name && i >= 0 {
				h.Around.Routes = append(h.Around.Routes, netstate.Route{Dst: cidr.Masked(), Via: other.Addrs[i].Addr(), Dev: Eth0})
			}
		}
	}
	if c.Masquerade {
		h.Around.Tables = append(h.Around.Tables, c.masquerade(n))
	}
	return h
}

// masquerade is what CNIs do with what pods send out of the cluster.
func (c Cluster) masquerade(n Node) netstate.Table {
	chain := netstate.Chain{Name: "postrouting", Type: "nat", Hook: "postrouting", Priority: sourceNATPriority}
	for _, cidr := range n.PodCIDRs {
		r := netstate.FirewallRule{
			Name:    "masquerade",
			Matches: []netstate.Match{{Dir: "src", Addr: netstate.RangeOf(cidr)}},
			Action:  netstate.Action{Kind: netstate.Masquerade},
		}
		for _, inside := range c.PodCIDRs {
			if inside.Addr().Is6() == cidr.Addr().Is6() {
				r.Matches = append(r.Matches, netstate.Match{Negate: true, Dir: "dst", Addr: netstate.RangeOf(inside)})
			}
		}
		chain.Rules = append(chain.Rules, r)
	}
	return netstate.Table{Family: netstate.FamilyINET, Name: "cni", Chains: []netstate.Chain{chain}}
}

func (c Cluster) pod(name, node string, addrs []netip.Addr) Host {
	h := c.host(name)
	h.Around.Links = []Link{{Name: Eth0, MTU: c.MTU, Segment: c.pods(node)}}
	i := slices.IndexFunc(c.Nodes, func(n Node) bool { return n.Name == node })
	for _, a := range addrs {
		bits, router := a.BitLen(), netip.Addr{}
		for _, cidr := range c.Nodes[i].PodCIDRs {
			if first := cidr.Masked().Addr().Next(); first.Is6() == a.Is6() {
				router = first
				if cidr.Contains(a) {
					bits = cidr.Bits()
				}
			}
		}
		h.Around.Addresses = append(h.Around.Addresses, netstate.Address{Dev: Eth0, Prefix: netip.PrefixFrom(a, bits)})
		h.Around.Routes = append(h.Around.Routes, netstate.Route{Dst: anywhere(a), Via: router, Dev: Eth0, OnLink: true})
	}
	return h
}

func (c Cluster) gateway(g Gateway) Host {
	if !g.Addr.IsValid() {
		h := c.host(g.Name)
		h.State, h.Around.Outside, h.Around.Forwarding6 = g.State, c.Name+"/"+g.Node, c.Forwarding6
		return h
	}
	h := c.pod(g.Name, g.Node, []netip.Addr{g.Addr})
	h.State, h.Around.Forwarding6 = g.State, c.Forwarding6
	return h
}

// A Router is a host that joins networks, one by each of its addresses.
func Router(name string, networks map[netip.Prefix]string) Host {
	h := Host{Name: name, Around: Around{Forwarding: true, Forwarding6: true}}
	addrs := make([]netip.Prefix, 0, len(networks))
	for a := range networks {
		addrs = append(addrs, a)
	}
	slices.SortFunc(addrs, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	devs := map[string]string{}
	for _, a := range addrs {
		network := networks[a]
		dev, known := devs[network]
		if !known {
			dev = fmt.Sprintf("eth%d", len(devs))
			devs[network] = dev
			h.Around.Links = append(h.Around.Links, Link{Name: dev, Segment: network})
		}
		h.Around.Addresses = append(h.Around.Addresses, netstate.Address{Dev: dev, Prefix: a})
	}
	return h
}

// anywhere is the default route's destination in the family of an address.
func anywhere(a netip.Addr) netip.Prefix {
	if a.Is6() {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}
