package desired

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// TunnelInterface is the WireGuard link of a gateway.
const TunnelInterface = "liqo-tunnel"

// The nftables tables that every gateway has of itself.
const (
	ICMPErrorTable    = "icmp-errors"
	InternalOnlyTable = "internal-only"
	OuterTable        = "outer-packets"
)

const (
	// asReceived is the priority of a chain in prerouting that sees packets
	// as they came in, before conntrack and NAT (NF_IP_PRI_RAW).
	asReceived = -300
	// afterSourceNAT is the priority of a chain in postrouting that sees
	// packets as they go out: one after NF_IP_PRI_NAT_SRC.
	afterSourceNAT = 101
)

// keepalive is how often, in seconds, a client that is silent says something,
// so that a NAT on the way does not forget it. 25 is what wg(8) advises.
const keepalive = 25

// TunnelAddresses returns the addresses of both ends of the tunnel between a
// server and a client.
func TunnelAddresses(mode string) (own netip.Prefix, peer netip.Addr) {
	server, client := netip.AddrFrom4([4]byte{169, 254, 18, 1}), netip.AddrFrom4([4]byte{169, 254, 18, 2})
	if mode == cluster.Client {
		return netip.PrefixFrom(client, 30), server
	}
	return netip.PrefixFrom(server, 30), client
}

// Gateway returns the state of a gateway: a Geneve link to every node, the
// WireGuard link to the peer, and the routes, rules and tables of the
// configurations addressed to it. Objects that would cut the gateway off from its
// API server are left out.
func Gateway(in GatewayInput) (netstate.State, []Result) {
	label := cmp.Or(in.NodeLabel, in.NodeName)
	return reachable(in.vicinity(), in.LeftOut, in.Routes, in.Firewalls,
		func(labels map[string]string) bool { return GatewaySelects(labels, in.RemoteID, label) },
		func(routes []cluster.RouteConfiguration, firewalls []cluster.FirewallConfiguration) (netstate.State, []Result) {
			in.Routes, in.Firewalls = routes, firewalls
			return compileGateway(in).finish()
		})
}

func compileGateway(in GatewayInput) *host {
	h := newHost(in.RulePriority, in.Problems)
	h.gateway = true
	label := cmp.Or(in.NodeLabel, in.NodeName)

	configuration := h.configuration(in)
	h.tunnel(in, configuration)
	h.gatewayLinks(in)
	h.podGateway(in)
	h.hostGateway(in)
	h.routes(in.Routes, func(labels map[string]string) bool { return gatewaySelectsRoute(labels, in.RemoteID, label) })
	h.tables(in.Firewalls, func(labels map[string]string) bool { return gatewaySelectsFirewall(labels, in.RemoteID) },
		[]string{ICMPErrorTable, InternalOnlyTable, OuterTable, PrefixTranslationTable, NodesOnlyTable, UnknownPodsTable, PeersRefusedTable, HandoverTable, ControlTable})
	h.translatePrefixes(in, configuration)
	h.keepMarks()
	h.clampToTunnel()
	h.mappedHosts(in)
	h.unknownPods(in)
	h.close(configuration)
	h.internalOnly(in)
	h.refusePeersAtGateway(in)
	h.handOver(in)
	h.outerPackets()
	h.icmpErrors(in, configuration)
	return h
}

// Configuration returns the Configuration of the peer that is in force; nil: none is.
func (in GatewayInput) Configuration() *cluster.Configuration {
	return newHost(in.RulePriority, in.Problems).configuration(in)
}

// configuration returns the Configuration of the peer. If there are several,
// it is the oldest one.
func (h *host) configuration(in GatewayInput) *cluster.Configuration {
	var chosen *cluster.Configuration
	for _, c := range living(in.Configurations, func(c cluster.Configuration) cluster.Meta { return c.Meta }) {
		switch {
		case c.RemoteID != in.RemoteID || !h.accept(c.Meta):
		case chosen != nil:
			h.refuse(c.Meta, "%s is for the same remote cluster and older; delete one of the two", chosen.Ref)
		default:
			chosen = &c
		}
	}
	return chosen
}

// tunnel adds the WireGuard link.
//
//	ip link add liqo-tunnel type wireguard
//	ip address add 169.254.18.1/30 dev liqo-tunnel
//	wg set liqo-tunnel listen-port 51840 peer … allowed-ips …
func (h *host) tunnel(in GatewayInput, c *cluster.Configuration) {
	own, peer := TunnelAddresses(in.Mode)
	mtu, problem := in.TunnelMTU()
	if problem != "" && c != nil {
		h.warn(c.Meta, "%s: %s", TunnelInterface, problem)
	}
	h.addDev(netstate.Link{
		Name:        TunnelInterface,
		Kind:        netstate.KindWireGuard,
		MTU:         mtu,
		Description: "peer " + in.RemoteID,
		Forwarding:  true,
		RPFilter:    rpFilterLoose,
	})
	h.state.Addresses = append(h.state.Addresses, netstate.Address{Dev: TunnelInterface, Prefix: own})
	h.control(in)
	h.hops[peer] = hop{via: peer, dev: TunnelInterface, onLink: true}

	wg := netstate.WireGuard{Dev: TunnelInterface, PublicKey: in.PublicKey}
	if in.Mode != cluster.Client {
		wg.ListenPort = cmp.Or(in.ListenPort, WireGuardPort)
	}
	_, cutOff := in.Blocked()
	p, ok := h.peer(in, peer)
	// A temporary tunnel has its key from an invitation, not from a PublicKey.
	_, blocked := in.BlockedKeys.Of(p.PublicKey[:])
	if ok && !cutOff && !blocked {
		if in.PeerEndpoint.IsValid() {
			p.Endpoint = netip.AddrPortFrom(in.PeerEndpoint.Addr().Unmap(), in.PeerEndpoint.Port())
		}
		if in.Mode == cluster.Client {
			p.Keepalive = keepalive
		}
		// What the peer may send: nothing but what is its own.
		if c != nil && in.Handover == nil {
			p.AllowedIPs = append(p.AllowedIPs, c.Peer().All()...)
		}
		slices.SortFunc(p.AllowedIPs, comparePrefix)
		p.AllowedIPs = slices.Compact(p.AllowedIPs)
		wg.Peers = in.formerKey(in.eitherKey(p))
	}
	h.state.WireGuard = append(h.state.WireGuard, wg)
}

// peer returns the one at the other end, with its address in the tunnel, if it is known.
func (h *host) peer(in GatewayInput, addr netip.Addr) (netstate.WireGuardPeer, bool) {
	if in.Handover != nil {
		return in.temporary(addr), true
	}
	key, shared, ok := h.peerKey(in)
	return netstate.WireGuardPeer{PublicKey: key, PresharedKey: shared, AllowedIPs: []netip.Prefix{hostPrefix(addr)}}, ok
}

// peerKey returns the public key of the peer, and the fingerprint of the pre-shared one
// if it says that there is one. If several PublicKeys disagree, it is that of the oldest
// one.
func (h *host) peerKey(in GatewayInput) (netstate.Key, netstate.Fingerprint, bool) {
	var chosen *cluster.PublicKey
	for _, k := range living(in.PublicKeys, func(k cluster.PublicKey) cluster.Meta { return k.Meta }) {
		if k.RemoteID != in.RemoteID || !h.accept(k.Meta) {
			continue
		}
		blocked, isBlocked := in.BlockedKeys.Of(k.Key)
		switch {
		case len(k.Key) != len(netstate.Key{}):
			h.refuse(k.Meta, "spec.publicKey: has %d bytes; a WireGuard key has %d", len(k.Key), len(netstate.Key{}))
		case netstate.Key(k.Key) == in.PublicKey:
			h.refuse(k.Meta, "spec.publicKey: is that of this gateway itself; write the remote gateway's")
		case isBlocked:
			h.refuse(k.Meta, "spec.publicKey: is %s", blocked)
		case k.PresharedKey != "" && k.PresharedKey != in.PresharedKey.String():
			h.refuse(k.Meta, "its gateway shares a key with the fingerprint %s with this one, and this gateway's Secret has no presharedKey with it: connect the two clusters again", k.PresharedKey)
		case chosen == nil:
			chosen = &k
		case !bytes.Equal(k.Key, chosen.Key):
			h.refuse(k.Meta, "%s is another key of the same remote cluster and older; delete one of the two", chosen.Ref)
		}
	}
	if chosen == nil {
		return netstate.Key{}, netstate.Fingerprint{}, false
	}
	if chosen.PresharedKey == "" {
		return netstate.Key(chosen.Key), netstate.Fingerprint{}, true
	}
	return netstate.Key(chosen.Key), in.PresharedKey, true
}

// gatewayLinks adds the Geneve links to the nodes.
func (h *host) gatewayLinks(in GatewayInput) {
	nodes := map[string]cluster.InternalNode{}
	for _, n := range living(in.Nodes, func(n cluster.InternalNode) cluster.Meta { return n.Meta }) {
		nodes[n.Name] = n
		if n.GatewayInterface != "" {
			h.missing[n.GatewayInterface] = fmt.Sprintf("no GeneveTunnel joins this gateway and %s yet", n.Ref)
		}
	}
	fabrics := map[[2]string]cluster.InternalFabric{}
	for _, f := range in.Fabrics {
		if !f.Deleting && f.RemoteID == in.RemoteID && f.Namespace == in.Namespace {
			h.accept(f.Meta)
			fabrics[[2]string{f.Namespace, f.Name}] = f
		}
	}
	for _, t := range living(in.Tunnels, func(t cluster.GeneveTunnel) cluster.Meta { return t.Meta }) {
		f, ours := fabrics[[2]string{cmp.Or(t.Fabric.Namespace, t.Namespace), t.Fabric.Name}]
		if !ours {
			continue // of another gateway
		}
		ok := h.accept(t.Meta)
		n, found := nodes[t.Node]
		side, remote := "remote", underlayOf(n, in.NodeName)
		if t.Node == in.NodeName {
			side = "local"
		}
		nodeProblem := ""
		if found && len(h.problems[key(n.Ref)]) > 0 {
			nodeProblem = h.problems[key(n.Ref)][0]
		}
		var problem string
		switch {
		case !ok:
			problem = h.results[key(t.Ref)].Message
		case !found:
			problem = fmt.Sprintf("spec.internalNodeRef: there is no InternalNode %q", t.Node)
		case nodeProblem != "":
			problem = fmt.Sprintf("%s: %s", n.Ref, nodeProblem)
		case !h.results[key(f.Ref)].OK:
			problem = fmt.Sprintf("%s: %s", f.Ref, h.results[key(f.Ref)].Message)
		case !f.InternalIP.IsValid():
			problem = fmt.Sprintf("%s has no address in the internal CIDR (spec.interface.gateway.ip)", f.Ref)
		case !remote.IsValid():
			problem = fmt.Sprintf("the address of node %s is not known yet: its daemon writes it to status.nodeIP.%s of its InternalNode", t.Node, side)
		}
		if problem != "" {
			if ok {
				h.refuse(t.Meta, "%s", problem)
			}
			if n.GatewayInterface != "" && !h.hasLink(n.GatewayInterface) {
				h.missing[n.GatewayInterface] = problem
			}
			continue
		}
		h.addLink(link{
			tunnel:      t,
			name:        n.GatewayInterface,
			description: "node " + n.Name,
			mtu:         cmp.Or(in.MTU, f.MTU),
			remote:      remote,
			own:         f.InternalIP,
			peer:        n.InternalIP,
		}, cmp.Or(in.GenevePort, GenevePort), in.Underlay)
	}
}

// underlayOf returns the address of a node below the tunnels, as a gateway on
// the other node sees it.
func underlayOf(n cluster.InternalNode, gatewayNode string) netip.Addr {
	if n.Name == gatewayNode {
		return n.Local
	}
	return n.Remote
}

// close ends the lookup for whatever came by a link, of ours or of the pod, and
// was meant for nobody that the routes know. It would go on to the main table
// otherwise: to the cluster's Services, API server and nodes, with the address
// of a pod. What a rule refuses the kernel counts (IpInNoRoutes), what a route
// refuses it does not.
//
//	ip rule add not iif lo priority 390 unreachable
func (h *host) close(c *cluster.Configuration) {
	ipv6 := false
	for _, r := range h.state.Routes {
		ipv6 = ipv6 || r.Dst.Addr().Is6()
	}
	for _, a := range h.state.Addresses {
		ipv6 = ipv6 || a.Prefix.Addr().Is6()
	}
	if c != nil {
		for _, p := range append(c.Remote.All(), c.Ours().All()...) {
			ipv6 = ipv6 || p.Addr().Is6()
		}
	}
	for _, v6 := range []bool{false, true} {
		if v6 && !ipv6 {
			continue
		}
		h.state.Rules = append(h.state.Rules, netstate.Rule{
			Priority: h.base + closing, IPv6: v6, IIF: loopback, Not: true, Unreachable: true,
		})
	}
}

// internalOnly drops what the peer addresses to the internal CIDR: to nodes, or
// to the gateway where its nodes reach it. That is for this cluster alone.
//
// The rules that lead to nodes could say "iif lo" instead, and all else would
// be unreachable (see close), as long as no other rule leads to the same table.
// But they also answer the reverse-path filter, which asks how a node is reached
// from the tunnel before it lets a packet of the node's out into it: without an
// answer, the ICMP errors by which a node tells the peer the path's MTU are lost.
//
// What is dropped is what has such a destination as it comes in. The answer to
// a flow of a node's that was translated has another one then.
//
//	nft add rule … iifname liqo-tunnel ip daddr 10.80.0.1-10.80.0.3 counter drop
func (h *host) internalOnly(in GatewayInput) {
	var rules []netstate.FirewallRule
	for _, r := range ranges(in.internal()) {
		rules = append(rules, netstate.FirewallRule{
			Name: "internal-cidr",
			Matches: []netstate.Match{
				{Dir: "in", Dev: TunnelInterface},
				{Dir: "dst", Addr: r},
			},
			Counter: true,
			Action:  netstate.Action{Kind: netstate.Drop},
		})
	}
	if len(rules) == 0 {
		return
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET,
		Name:   InternalOnlyTable,
		Chains: []netstate.Chain{{
			Name: "prerouting", Type: "filter", Hook: "prerouting",
			Priority: asReceived, Policy: "accept", Rules: rules,
		}},
	})
}

// internal returns the addresses of the internal CIDR that nodes and gateways have.
func (in GatewayInput) internal() []netip.Addr {
	var all []netip.Addr
	for _, n := range in.Nodes {
		all = append(all, n.InternalIP)
	}
	for _, f := range in.Fabrics {
		all = append(all, f.InternalIP)
	}
	return addrs(all)
}

// ranges returns sorted addresses as the fewest ranges that hold them and
// nothing else. Those of nodes are given one after the other, so in a cluster of
// any size there are few.
func ranges(sorted []netip.Addr) []netstate.AddrRange {
	var out []netstate.AddrRange
	for _, a := range sorted {
		if last := len(out) - 1; last >= 0 && out[last].To.Next() == a {
			out[last].To = a
		} else {
			out = append(out, netstate.AddrRange{From: a, To: a})
		}
	}
	return out
}
