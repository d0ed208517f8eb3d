package desired

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Numbers and names of the VXLAN overlay, as the seed (liqo-route.md) and the
// public system have them.
const (
	// VXLANInterface is the link of every node in the VXLAN overlay.
	VXLANInterface = "liqo.vxlan"
	// VXLANPort is its UDP port. RFC 7348's own, 4789, is often taken by the
	// CNI.
	VXLANPort = 4879
	vxlanVNI  = 18952
	// PodInterface is the link that a kubelet gives to every pod.
	PodInterface = "eth0"
)

// The nftables tables that nodes have of themselves in the VXLAN overlay.
const (
	OverlayOnlyTable = "overlay-only"
	NoRedirectsTable = "no-redirects"
)

// A hop says how a host reaches an address of the internal CIDR that a route
// names as its next hop.
type hop struct {
	via    netip.Addr
	dev    string
	src    netip.Addr // preferred source; invalid: the kernel's choice
	onLink bool
	// problem says why there is no way. Packets are refused until there is
	// one: in the main table they would leave for somewhere else.
	problem string
}

// OwnVTEP returns a node's end of the VXLAN overlay as Node makes it; the zero
// value where there is none.
func OwnVTEP(in NodeInput) cluster.VTEP {
	own := in.own()
	if own.Overlay != cluster.OverlayVXLAN || !own.InternalIP.IsValid() || !in.NodeIP.IsValid() {
		return cluster.VTEP{}
	}
	return cluster.VTEP{IP: in.NodeIP.Unmap(), MAC: macOf(own.InternalIP)}
}

// Overlay returns the overlay that joins the node to gateways: Geneve as long
// as nothing says otherwise.
func (in NodeInput) Overlay() cluster.Overlay { return cmp.Or(in.own().Overlay, cluster.OverlayGeneve) }

// own returns the node's own InternalNode; the zero value if there is none.
func (in NodeInput) own() cluster.InternalNode {
	i := slices.IndexFunc(in.Nodes, func(n cluster.InternalNode) bool { return n.Name == in.Name && !n.Deleting })
	if i < 0 {
		return cluster.InternalNode{}
	}
	return in.Nodes[i]
}

// vxlan adds the node's link of the VXLAN overlay, the entries that lead to
// the other nodes, and the way to every gateway.
//
//	ip link add liqo.vxlan type vxlan id 18952 local 172.18.1.11 dstport 4879 nolearning
//	ip address add 10.80.0.4/32 dev liqo.vxlan
//	bridge fdb add 02:… dev liqo.vxlan dst 172.18.1.12
//	ip neighbour add 10.80.0.5 lladdr 02:… dev liqo.vxlan
func (h *host) vxlan(in NodeInput) {
	own := in.own()
	if own.Overlay != cluster.OverlayVXLAN {
		return
	}
	vtep := OwnVTEP(in)
	if vtep == (cluster.VTEP{}) {
		problem := "it has no address in the internal CIDR (spec.interface.node.ip)"
		if own.InternalIP.IsValid() {
			problem = "the address of this node is not known: start the daemon with --node-ip"
		}
		h.refuse(own.Meta, "%s", problem)
		for _, f := range in.Fabrics {
			h.hops[f.InternalIP] = hop{problem: fmt.Sprintf("%s: %s", own.Ref, problem)}
		}
		return
	}
	others := h.vteps(in, vtep)
	h.addDev(netstate.Link{
		Name:        VXLANInterface,
		Kind:        netstate.KindVXLAN,
		MTU:         h.vxlanMTU(in, others),
		MAC:         vtep.MAC,
		VXLAN:       netstate.VXLAN{VNI: vxlanVNI, Local: vtep.IP, Port: VXLANPort},
		Description: "overlay of the nodes",
		Forwarding:  true,
		RPFilter:    rpFilterLoose,
	})
	h.state.Addresses = append(h.state.Addresses, netstate.Address{Dev: VXLANInterface, Prefix: hostPrefix(own.InternalIP)})
	for _, n := range others {
		h.state.FDB = append(h.state.FDB, netstate.FDBEntry{Dev: VXLANInterface, MAC: n.VTEP.MAC, Remote: n.VTEP.IP})
		h.state.Neighbors = append(h.state.Neighbors, netstate.Neighbor{Dev: VXLANInterface, Addr: n.InternalIP, MAC: n.VTEP.MAC})
	}
	h.gatewayHops(in, own, others)
	h.overlayOnly(others)
}

// vteps returns the other nodes that can be reached, the oldest first. Of two
// with the same address the younger one is left out, as the controller says
// on its InternalNode.
func (h *host) vteps(in NodeInput, own cluster.VTEP) []cluster.InternalNode {
	macs, ips := map[netstate.MAC]bool{own.MAC: true}, map[netip.Addr]bool{own.IP: true, in.own().InternalIP: true}
	var out []cluster.InternalNode
	for _, n := range living(in.Nodes, func(n cluster.InternalNode) cluster.Meta { return n.Meta }) {
		v := n.VTEP
		if n.Name == in.Name || !v.IP.IsValid() || !n.InternalIP.IsValid() || macs[v.MAC] || ips[v.IP] || ips[n.InternalIP] || v.IP.Is4() != own.IP.Is4() {
			continue
		}
		macs[v.MAC], ips[v.IP], ips[n.InternalIP] = true, true, true
		out = append(out, n)
	}
	return out
}

// vxlanMTU returns the MTU of the link: the least that one of the gateways
// asks for, else what fits on the way to every other node.
func (h *host) vxlanMTU(in NodeInput, others []cluster.InternalNode) int {
	explicit, underlay, remote := 0, in.Underlay.MTU, in.NodeIP
	for _, n := range others {
		if mtu := in.Underlay.To(n.VTEP.IP); mtu > 0 && (underlay == 0 || mtu < underlay) {
			underlay = mtu
		}
	}
	for _, f := range in.Fabrics {
		if !f.Deleting && f.MTU > 0 && (explicit == 0 || f.MTU < explicit) {
			explicit = f.MTU
		}
	}
	mtu, problem := ChooseMTU(explicit, VXLANMTU(underlay, remote))
	for _, f := range in.Fabrics {
		if problem != "" && !f.Deleting && f.MTU == explicit {
			h.warn(f.Meta, "%s", problem)
		}
	}
	return mtu
}

// gatewayHops finds the way to every gateway: straight to its pod where that
// runs on this node, else to the node where it runs.
func (h *host) gatewayHops(in NodeInput, own cluster.InternalNode, others []cluster.InternalNode) {
	redirects := map[bool]bool{} // by family, IPv6 or not
	taken := map[netip.Addr]cluster.Ref{own.InternalIP: own.Ref}
	for _, n := range others {
		taken[n.InternalIP] = n.Ref
	}
	for _, f := range living(in.Fabrics, func(f cluster.InternalFabric) cluster.Meta { return f.Meta }) {
		if !f.InternalIP.IsValid() {
			continue
		}
		if other, ok := taken[f.InternalIP]; ok {
			h.refuse(f.Meta, "spec.interface.gateway.ip: %s is the address of %s; each needs one of its own", f.InternalIP, other)
			continue
		}
		taken[f.InternalIP] = f.Ref
		if f.GatewayNode == in.Name && f.HostInterface != "" {
			h.hops[f.InternalIP] = h.hostHop(in, own, f)
			continue
		}
		if f.GatewayNode == in.Name {
			h.hops[f.InternalIP] = podHop(in, own, f)
			redirects[f.GatewayIP.Is6()] = true
			continue
		}
		i := slices.IndexFunc(others, func(n cluster.InternalNode) bool { return n.Name == f.GatewayNode })
		switch {
		case f.GatewayNode == "":
			h.hops[f.InternalIP] = hop{problem: fmt.Sprintf("%s has no gatewayNode yet: the node of the gateway's pod", f.Ref)}
		case i < 0:
			h.hops[f.InternalIP] = hop{problem: fmt.Sprintf("the VXLAN overlay does not lead to node %s yet, where the gateway runs: its daemon writes status.vtep of its InternalNode, whose conditions say what is wrong with it", f.GatewayNode)}
		default:
			h.hops[f.InternalIP] = hop{via: f.InternalIP, dev: VXLANInterface, onLink: true}
			h.state.Neighbors = append(h.state.Neighbors, netstate.Neighbor{Dev: VXLANInterface, Addr: f.InternalIP, MAC: others[i].VTEP.MAC})
		}
	}
	for _, v6 := range []bool{false, true} {
		if redirects[v6] {
			h.noRedirects(v6)
		}
	}
}

// podHop is the way to a gateway whose pod runs on this node: by the CNI's
// link to it. What the node itself sends has the node's internal address, as
// on every other node.
func podHop(in NodeInput, own cluster.InternalNode, f cluster.InternalFabric) hop {
	dev := in.Underlay.Devs[f.GatewayIP]
	switch {
	case !f.GatewayIP.IsValid():
		return hop{problem: fmt.Sprintf("%s has no gatewayIP yet", f.Ref)}
	case f.GatewayIP.Is4() != f.InternalIP.Is4():
		return hop{problem: fmt.Sprintf("%s: the gateway's pod has the address %s, of another family than the internal CIDR: make the Network internal-cidr one of that family", f.Ref, f.GatewayIP)}
	case dev == "" || dev == VXLANInterface:
		return hop{problem: fmt.Sprintf("this node has no route to the gateway's pod, %s, yet: its CNI adds one", f.GatewayIP)}
	}
	return hop{via: f.GatewayIP, dev: dev, src: own.InternalIP, onLink: true}
}

// overlayOnly lets in by the overlay what comes from its nodes, and lets
// nothing go round in circles: what comes in by the overlay is for this node.
//
//	nft add rule … udp dport 4879 ip saddr 172.18.1.12 accept
//	nft add rule … udp dport 4879 counter drop
//	nft add rule … iifname liqo.vxlan oifname liqo.vxlan counter drop
func (h *host) overlayOnly(others []cluster.InternalNode) {
	ours := make([]netip.Addr, 0, len(others))
	for _, n := range others {
		ours = append(ours, n.VTEP.IP)
	}
	port := netstate.Match{Dir: "dst", Ports: netstate.PortRange{From: VXLANPort, To: VXLANPort}}
	udp := netstate.Match{L4Proto: "udp"}
	var rules []netstate.FirewallRule
	for _, r := range ranges(addrs(ours)) {
		rules = append(rules, netstate.FirewallRule{
			Name:    "nodes",
			Matches: []netstate.Match{udp, port, {Dir: "src", Addr: r}},
			Action:  netstate.Action{Kind: netstate.Accept},
		})
	}
	rules = append(rules, netstate.FirewallRule{
		Name: "not-a-node", Matches: []netstate.Match{udp, port}, Counter: true,
		Action: netstate.Action{Kind: netstate.Drop},
	})
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET, Name: OverlayOnlyTable,
		Chains: []netstate.Chain{
			{Name: "input", Type: "filter", Hook: "input", Policy: "accept", Rules: rules},
			{Name: "forward", Type: "filter", Hook: "forward", Policy: "accept", Rules: []netstate.FirewallRule{{
				Name:    "hairpin",
				Matches: []netstate.Match{{Dir: "in", Dev: VXLANInterface}, {Dir: "out", Dev: VXLANInterface}},
				Counter: true, Action: netstate.Action{Kind: netstate.Drop},
			}}},
		},
	})
}

// noRedirects keeps the node of a gateway from telling pods on it to send to
// the gateway's pod themselves, which is behind the same link (RFC 1812
// §5.2.7.2): they would go on doing so when the gateway is elsewhere.
func (h *host) noRedirects(v6 bool) {
	family := netstate.FamilyIPv4
	if v6 {
		family = netstate.FamilyIPv6
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: family, Name: NoRedirectsTable,
		Chains: []netstate.Chain{{
			Name: "output", Type: "filter", Hook: "output", Policy: "accept",
			Rules: []netstate.FirewallRule{{
				Name: "redirects", Matches: []netstate.Match{{ICMPRedirect: true}},
				Action: netstate.Action{Kind: netstate.Drop},
			}},
		}},
	})
}

// podGateway prepares the pod of a gateway that nodes reach by its own link:
// what comes in there may be forwarded. With links to nodes nothing may, and the
// reverse-path filter of the tunnel, which asks how a packet's source is reached
// from where the packet goes, finds no way from there (see close).
func (h *host) podGateway(in GatewayInput) {
	switch {
	case in.HostInterface != "":
	case in.Overlay() == cluster.OverlayVXLAN:
		h.state.Settings = append(h.state.Settings, netstate.Setting{Dev: PodInterface, Forwarding: true})
	default:
		h.noWayBack = PodInterface
	}
}

// macOf returns the link-layer address of who has an address of the internal
// CIDR: locally administered (IEEE 802, the second lowest bit of the first
// byte), the rest a hash of the address. A gateway that is replaced, or a link
// that is made anew, has the same one as before: with a random one the other
// end sends to the old one until its neighbour entry is given up, some ten
// seconds (arp(7): base_reachable_time, delay_first_probe_time and three
// probes).
func macOf(own netip.Addr) netstate.MAC {
	text := own.As16() // of an IPv4 address the mapped one
	sum := sha256.Sum256(text[:])
	mac := netstate.MAC(sum[:6])
	mac[0] = mac[0]&^1 | 2
	return mac
}
