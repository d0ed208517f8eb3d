package desired

import (
	"net/netip"
	"slices"
	"strconv"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// The marks that gateways need themselves. Those of nodes are positions in the
// internal CIDR, far below (plan), and users can't write one with these bits.
const (
	// originalByTunnel and replyByTunnel say of a connection that its packets of
	// this direction come out of the tunnel.
	originalByTunnel = 1 << 29
	replyByTunnel    = 1 << 30
	// ReservedMarks are these bits: of a connection's mark the rest says what
	// the node is.
	ReservedMarks = originalByTunnel | replyByTunnel
	// forPeer is the mark of a packet that goes into the tunnel, whatever its
	// destination. No connection's mark is ever given to a packet with these bits.
	forPeer = 1 << 30
)

// forPeerTable is the name that the number of the routing table into the tunnel
// is derived from. No table of the API can be called so.
const forPeerTable = "\x00errors for the peer"

// beforeDestinationNAT is the priority of chains that see packets after
// connection tracking and before destination NAT (NF_IP_PRI_MANGLE).
const beforeDestinationNAT = -150

// reservedMark says which field of an object writes a mark that gateways need
// themselves; empty: none does.
func reservedMark(fc cluster.FirewallConfiguration) (field string) {
	for i, c := range fc.Chains {
		for j, r := range c.Filter {
			mark, err := strconv.ParseUint(r.Value, 0, 32)
			if err == nil && filterActions[r.Action] == netstate.SetCTMark && uint32(mark)&ReservedMarks != 0 {
				return "spec.table.chains[" + strconv.Itoa(i) + "].rules.filterRules[" + strconv.Itoa(j) + "].value"
			}
		}
	}
	return ""
}

// keepMarks lets the rules of objects leave alone the bits of connections' marks
// that are reserved, and not give them to packets.
func (h *host) keepMarks() {
	for _, t := range h.state.Tables {
		for i, c := range t.Chains {
			var rules []netstate.FirewallRule
			for _, r := range c.Rules {
				switch {
				case r.Action.Kind == netstate.SetCTMark && len(r.Action.Map.Entries) > 0:
					rules = append(rules, keptByMap(r)...)
					continue
				case r.Action.Kind == netstate.SetCTMark || r.Action.Kind == netstate.RestoreCT:
					r.Action.Mask = ^uint32(ReservedMarks)
				}
				rules = append(rules, r)
			}
			t.Chains[i].Rules = rules
		}
	}
}

// keptByMap returns a rule that takes marks out of a map as rules that leave the
// reserved bits alone. nftables can't put what a map says and what a connection has
// together (before Linux 6.13), so there is a rule for connections with each
// combination of the bits, and each connection matches one of them.
func keptByMap(r netstate.FirewallRule) []netstate.FirewallRule {
	var out []netstate.FirewallRule
	for _, bits := range []uint32{0, originalByTunnel, replyByTunnel, ReservedMarks} {
		kept := r
		kept.Matches = slices.Clone(r.Matches)
		for _, bit := range []uint32{originalByTunnel, replyByTunnel} {
			kept.Matches = append(kept.Matches, netstate.Match{CTMark: bit, Negate: bits&bit == 0})
		}
		kept.Action.Map.Entries = slices.Clone(r.Action.Map.Entries)
		for i := range kept.Action.Map.Entries {
			kept.Action.Map.Entries[i].Mark |= bits
		}
		out = append(out, kept)
	}
	return out
}

// icmpErrors sees to it that the peer gets the ICMP errors about its packets,
// and believes them: those that this gateway makes itself are led into the
// tunnel, and those from addresses that the peer does not expect get another one.
func (h *host) icmpErrors(in GatewayInput, c *cluster.Configuration) {
	if c == nil {
		return
	}
	chains := h.ownErrors(c)
	if rules := h.errorSources(in, c); len(rules) > 0 {
		chains = append(chains, netstate.Chain{
			Name: "postrouting", Type: "filter", Hook: "postrouting",
			Priority: afterSourceNAT, Policy: "accept", Rules: rules,
		})
	}
	if len(chains) > 0 {
		h.state.Tables = append(h.state.Tables, netstate.Table{Family: netstate.FamilyINET, Name: ICMPErrorTable, Chains: chains})
	}
}

// ownErrors leads the ICMP errors that this gateway makes about packets out of
// the tunnel back into it: that a packet is too large for the way to the node,
// that its TTL is used up, that nobody has its destination. Their destination is
// the peer's pod as the peer calls it, which may be a pod of this cluster too, so
// it does not say where to go. The connection does: the kernel gives the error
// the connection of the packet that it is about, with the other direction.
//
//	nft add rule … iifname liqo-tunnel ct direction original ct mark set ct mark & 0xdfffffff | 0x20000000
//	nft add rule … icmp type { errors } ct direction reply ct mark & 0x20000000 != 0 meta mark set 0x40000000
//	ip rule add iif lo fwmark 0x40000000 priority 305 lookup 90
//	ip route add default dev liqo-tunnel table 90
//
// net.ipv4.fwmark_reflect would do it, but a pod can't write sysctls.
func (h *host) ownErrors(c *cluster.Configuration) []netstate.Chain {
	type direction struct {
		packets, errors string
		mark            uint32
	}
	directions := []direction{{"original", "reply", originalByTunnel}, {"reply", "original", replyByTunnel}}
	var note, lead []netstate.FirewallRule
	for _, d := range directions {
		note = append(note, netstate.FirewallRule{
			Name:    d.packets + "-by-tunnel",
			Matches: []netstate.Match{{Dir: "in", Dev: TunnelInterface}, {CTDir: d.packets}},
			Action:  netstate.Action{Kind: netstate.SetCTMark, Mark: d.mark, Mask: d.mark},
		})
	}
	for _, v6 := range []bool{false, true} {
		if !slices.ContainsFunc(c.Remote.All(), func(p netip.Prefix) bool { return p.Addr().Is6() == v6 }) {
			continue
		}
		h.state.Rules = append(h.state.Rules, netstate.Rule{
			Priority: h.base + toPeer, IPv6: v6, IIF: loopback, Mark: forPeer, Table: h.forPeerTable,
		})
		h.state.Routes = append(h.state.Routes, netstate.Route{
			Table: h.forPeerTable, Dst: anywhere(v6), Dev: TunnelInterface, Scope: netstate.ScopeLink,
		})
		for _, d := range directions {
			lead = append(lead, netstate.FirewallRule{
				Name: "about-" + d.packets + "-by-tunnel",
				Matches: []netstate.Match{
					{Dir: "src", Addr: netstate.RangeOf(anywhere(v6))}, // keeps the families apart
					{ICMPError: true}, {CTDir: d.errors}, {CTMark: d.mark},
				},
				Counter: true,
				Action:  netstate.Action{Kind: netstate.SetMark, Mark: forPeer},
			})
		}
	}
	if len(lead) == 0 {
		return nil
	}
	return []netstate.Chain{
		{Name: "prerouting", Type: "filter", Hook: "prerouting", Priority: beforeDestinationNAT, Policy: "accept", Rules: note},
		{Name: "output", Type: "route", Hook: "output", Priority: beforeDestinationNAT, Policy: "accept", Rules: lead},
	}
}

// errorSources gives ICMP errors that routers on our side send to the peer a
// source that the peer lets in: the first address of the external CIDR. A node
// that can't forward a large packet, for one, answers from an address that
// the peer's WireGuard does not expect, and the sender would never learn the
// path's MTU. NAT does not see these packets, for they belong to a connection
// that it knows.
//
//	nft add rule … oifname liqo-tunnel ip saddr != { ours } icmp type { errors } ip saddr set 10.70.0.0
func (h *host) errorSources(in GatewayInput, c *cluster.Configuration) []netstate.FirewallRule {
	own, _ := TunnelAddresses(in.Mode)
	local := c.Ours()
	var rules []netstate.FirewallRule
	for _, v6 := range []bool{false, true} {
		is := func(p netip.Prefix) bool { return p.Addr().Is6() == v6 }
		i := slices.IndexFunc(local.External, is)
		if i < 0 {
			if slices.ContainsFunc(c.Remote.All(), is) {
				h.warn(c.Meta, "spec.local.cidr.external: is empty, so path MTU discovery towards the remote cluster does not work; write the external CIDR of this cluster")
			}
			continue
		}
		ours := append(local.All(), hostPrefix(own.Addr()))
		ours = slices.DeleteFunc(ours, func(p netip.Prefix) bool { return !is(p) })
		slices.SortFunc(ours, comparePrefix)
		rule := netstate.FirewallRule{
			Name: "icmp-errors",
			Matches: []netstate.Match{
				{Dir: "out", Dev: TunnelInterface},
				{ICMPError: true},
			},
			Counter: true,
			Action:  netstate.Action{Kind: netstate.SetSource, To: hostPrefix(local.External[i].Masked().Addr())},
		}
		if v6 {
			rule.Name = "icmpv6-errors"
		}
		for _, p := range slices.Compact(ours) {
			rule.Matches = append(rule.Matches, netstate.Match{Negate: true, Dir: "src", Addr: netstate.RangeOf(p)})
		}
		rules = append(rules, rule)
	}
	return rules
}
