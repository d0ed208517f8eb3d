package desired

import (
	"cmp"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// PeersRefusedTable is the nftables table of nodes and gateways that drops what peers
// send to the host itself. Its rules with counters have the names of the peers, but for
// those of gateways that look at the networks of all peers.
const PeersRefusedTable = "peers-refused"

// refusePeersAtNode drops what peers send to the node: to the address that it has on
// the CNI's bridge, which is one of a network of pods, to its own address in a network
// where pods have such addresses too, and to NodePorts at any of them. What the
// node has asked for itself comes back, and so does what is an error about that.
//
//	nft add rule … ct direction reply accept
//	nft add rule … ip daddr 172.18.1.11 accept
//	nft add rule … meta l4proto udp udp dport 30840 accept
//	nft add rule … ip saddr 11.0.0.0/16 fib daddr type != unicast counter drop comment "rome"
//
// The chain is after connection tracking, which tells answers from the rest, and before
// destination NAT, by which a packet to a NodePort is one to a pod. In the VXLAN overlay
// a peer's packet comes in by whatever link the CNI has, so it is its source that tells it.
//
// A peer's gateway may be inside the peer's networks, where it sends WireGuard's packets
// from. The ports of the node that lead to gateways are open.
func (h *host) refusePeersAtNode(in NodeInput) {
	rules := []netstate.FirewallRule{answers()}
	accept := func(name string, matches ...netstate.Match) {
		rules = append(rules, netstate.FirewallRule{Name: name, Matches: matches, Action: netstate.Action{Kind: netstate.Accept}})
	}
	for _, p := range in.own().OpenToPeers {
		accept("open", netstate.Match{Dir: "dst", Addr: netstate.RangeOf(p)})
	}
	var ports []uint16
	var drops []netstate.FirewallRule
	for _, f := range living(in.Fabrics, func(f cluster.InternalFabric) cluster.Meta { return f.Meta }) {
		ports = append(ports, f.EndpointPorts...)
		for _, p := range f.RemoteCIDRs {
			drops = append(drops, netstate.FirewallRule{
				Name:    cmp.Or(f.RemoteID, f.Name),
				Matches: []netstate.Match{{Dir: "src", Addr: netstate.RangeOf(p)}, {ToHost: true}},
				Counter: true, Action: netstate.Action{Kind: netstate.Drop},
			})
		}
	}
	if len(drops) == 0 {
		return
	}
	slices.Sort(ports)
	for _, p := range slices.Compact(ports) {
		accept("gateway", netstate.Match{L4Proto: "udp"}, netstate.Match{Dir: "dst", Ports: netstate.PortRange{From: p, To: p}})
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET, Name: PeersRefusedTable,
		Chains: []netstate.Chain{{
			Name: "prerouting", Type: "filter", Hook: "prerouting", Priority: beforeDestinationNAT, Policy: "accept",
			Rules: append(rules, drops...),
		}},
	})
}

// refusePeersAtGateway drops what peers send to the gateway itself: by the tunnel all
// but the probe, the exchange and pings of the peer's gateway, and, from the networks of all peers, by
// whatever link, all but WireGuard's own packets. Pods of another peer reach the
// gateway's pod as they reach any pod. By the temporary tunnel of an invitation there is
// one port, of a server, and nothing else.
//
//	nft add rule … ct direction reply accept
//	nft add rule … iifname liqo-tunnel ip saddr 169.254.18.2 ip daddr 169.254.18.1 udp dport 12345 accept
//	nft add rule … iifname liqo-tunnel ip saddr 169.254.18.2 ip daddr 169.254.18.1 tcp dport 12347 accept
//	nft add rule … iifname liqo-tunnel ip saddr 169.254.18.6 ip daddr 169.254.18.5 tcp dport 12347 accept; a peer with a former key
//	nft add rule … iifname liqo-tunnel ip saddr 169.254.18.2 ip daddr 169.254.18.1 meta l4proto icmp accept
//	nft add rule … iifname liqo-tunnel counter drop
//	nft add rule … udp dport 51840 accept; a client: udp sport 30840
//	nft add rule … ip saddr 11.0.0.0/16 counter drop
func (h *host) refusePeersAtGateway(in GatewayInput) {
	own, peer := TunnelAddresses(in.Mode)
	fromTunnel := netstate.Match{Dir: "in", Dev: TunnelInterface}
	ends := []netstate.Match{
		fromTunnel, {Dir: "src", Addr: netstate.AddrRange{From: peer, To: peer}}, {Dir: "dst", Addr: netstate.AddrRange{From: own.Addr(), To: own.Addr()}},
	}
	accept := func(name string, matches ...netstate.Match) netstate.FirewallRule {
		return netstate.FirewallRule{Name: name, Matches: matches, Action: netstate.Action{Kind: netstate.Accept}}
	}
	drop := func(name string, match netstate.Match) netstate.FirewallRule {
		return netstate.FirewallRule{Name: name, Matches: []netstate.Match{match}, Counter: true, Action: netstate.Action{Kind: netstate.Drop}}
	}
	rules := []netstate.FirewallRule{answers()}
	switch {
	case in.Handover != nil && in.Mode == cluster.Client: // who dials only asks
	case in.Handover != nil:
		port := netstate.Match{Dir: "dst", Ports: netstate.PortRange{From: HandoverPort, To: HandoverPort}}
		rules = append(rules, accept("handover", append(slices.Clone(ends), netstate.Match{L4Proto: "tcp"}, port)...))
	case in.ProbePort != 0:
		probe := netstate.Match{Dir: "dst", Ports: netstate.PortRange{From: in.ProbePort, To: in.ProbePort}}
		rules = append(rules, accept("probe", append(slices.Clone(ends), netstate.Match{L4Proto: "udp"}, probe)...))
	}
	if in.Handover == nil {
		exchange := netstate.Match{Dir: "dst", Ports: netstate.PortRange{From: ExchangePort, To: ExchangePort}}
		rules = append(rules, accept("exchange", append(slices.Clone(ends), netstate.Match{L4Proto: "tcp"}, exchange)...))
		if in.former() != nil {
			own, peer := ControlAddresses(in.Mode)
			rules = append(rules, accept("control", fromTunnel, netstate.Match{Dir: "src", Addr: netstate.AddrRange{From: peer, To: peer}},
				netstate.Match{Dir: "dst", Addr: netstate.AddrRange{From: own.Addr(), To: own.Addr()}}, netstate.Match{L4Proto: "tcp"}, exchange))
		}
		rules = append(rules, accept("ping", append(slices.Clone(ends), netstate.Match{L4Proto: "icmp"})...))
	}
	rules = append(rules, drop(in.RemoteID, fromTunnel))
	// Not by their connection: outer packets have none (see outerPackets).
	dir, ports := "dst", []uint16{cmp.Or(in.ListenPort, WireGuardPort)}
	if in.Mode == cluster.Client {
		dir, ports = "src", append([]uint16{in.PeerEndpoint.Port()}, in.LearnedPorts...)
		slices.Sort(ports)
	}
	for _, port := range slices.Compact(ports) {
		if port != 0 {
			rules = append(rules, accept("wireguard", netstate.Match{L4Proto: "udp"}, netstate.Match{Dir: dir, Ports: netstate.PortRange{From: port, To: port}}))
		}
	}
	refused := slices.Clone(in.fabric().PeerCIDRs)
	slices.SortFunc(refused, comparePrefix)
	for _, p := range slices.Compact(refused) {
		rules = append(rules, drop("any-peer", netstate.Match{Dir: "src", Addr: netstate.RangeOf(p)}))
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET, Name: PeersRefusedTable,
		Chains: []netstate.Chain{{Name: "input", Type: "filter", Hook: "input", Policy: "accept", Rules: rules}},
	})
}

// answers accepts what travels in the other direction than the first packet of its
// connection, and errors about what was sent in that one.
func answers() netstate.FirewallRule {
	return netstate.FirewallRule{Name: "answers", Matches: []netstate.Match{{CTDir: "reply"}}, Action: netstate.Action{Kind: netstate.Accept}}
}
