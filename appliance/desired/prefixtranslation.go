package desired

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// PrefixTranslationTable is the table in which a gateway translates between the
// networks of the peer as the peer calls them and as this cluster does.
const PrefixTranslationTable = "prefix-translation"

// Where the tunnel's edge is, as priorities of chains: between them and the tunnel
// nothing looks at addresses but WireGuard.
const (
	// edgeIn is after fragments were put together (NF_IP_PRI_CONNTRACK_DEFRAG, -400),
	// and before every chain of an object and conntrack.
	edgeIn = asReceived - 1
	// edgeOut is after all NAT, and after what changes sources as well.
	edgeOut = -edgeIn
)

// A prefixTranslation is one network of the peer. Both prefixes have one length.
type prefixTranslation struct {
	name        string
	here, there netip.Prefix
	object      cluster.Meta
}

// isPrefixTranslation reports whether the controller has written the object to
// translate networks of the peer. No one else may set the label.
func isPrefixTranslation(labels map[string]string) bool {
	return labels[LabelPrefixTranslation] == "true"
}

// prefixTranslation notes what a table of the controller translates. Its form is
//
//	prerouting: iif != liqo-tunnel daddr 11.0.0.0/16 dnat prefix to 10.0.0.0/16
//	postrouting: iif liqo-tunnel saddr 10.0.0.0/16 snat prefix to 11.0.0.0/16
func (h *host) prefixTranslation(object cluster.Meta, t netstate.Table) {
	var found []prefixTranslation
	for i, c := range t.Chains {
		for j, r := range c.Rules {
			field := fmt.Sprintf("spec.table.chains[%d].rules.natRules[%d]", i, j)
			p := prefixTranslation{name: r.Name, object: object}
			switch {
			case mapsPrefix(r, netstate.DNAT, "dst", netstate.Match{Negate: true, Dir: "in", Dev: TunnelInterface}):
				p.here, p.there = keyPrefix(r, "dst"), r.Action.To.Masked()
			case mapsPrefix(r, netstate.SNAT, "src", netstate.Match{Dir: "in", Dev: TunnelInterface}):
				p.there, p.here = keyPrefix(r, "src"), r.Action.To.Masked()
			default:
				h.refuse(object, "%s: does not translate a network of the remote cluster; remove the label %s, which is for the controller's own objects", field, LabelPrefixTranslation)
				return
			}
			if !slices.ContainsFunc(found, func(o prefixTranslation) bool { return o.here == p.here && o.there == p.there }) {
				found = append(found, p)
			}
			for _, o := range slices.Concat(h.translations, found) {
				if (o.here.Overlaps(p.here) || o.there.Overlaps(p.there)) && (o.here != p.here || o.there != p.there) {
					h.refuse(object, "%s: %s is translated to %s, but %s to %s by %s already; delete one of the two", field, p.there, p.here, o.there, o.here, o.object.Ref)
					return
				}
			}
		}
	}
	h.translations = append(h.translations, found...)
}

// mapsPrefix reports whether a rule translates one network of IPv4 to another one of
// the same length, given the other match.
func mapsPrefix(r netstate.FirewallRule, kind netstate.ActionKind, dir string, other netstate.Match) bool {
	k := keyOf(r, dir)
	p, ok := k.addr.AsPrefix()
	return r.Action.Kind == kind && r.Action.Prefix && k.ok && ok && p.Addr().Is4() && p.Bits() == r.Action.To.Bits() &&
		slices.Equal(k.others, []netstate.Match{other})
}

func keyPrefix(r netstate.FirewallRule, dir string) netip.Prefix {
	p, _ := keyOf(r, dir).addr.AsPrefix()
	return p
}

// translatePrefixes adds the table that translates at the tunnel's edge: the source
// of what comes out of the tunnel, the destination of what goes into it. All else in
// this gateway, routes, conntrack, NAT and users' rules, sees the names that this
// cluster has for the peer's networks. So an address of the peer that the gateway,
// its subnet or the internal CIDR has too is nothing special, and nothing has to be
// remembered of a connection.
//
// ICMP errors have a second address to translate, in the packet that they quote:
//
//	in:  nft add rule … iifname liqo-tunnel ip saddr 10.0.0.0/16 ip saddr set ip saddr & 0.0.255.255 | 11.0.0.0 accept
//	     … of errors about our packets, the quoted destination
//	out: nft add rule … oifname liqo-tunnel ip daddr 11.0.0.0/16 ip daddr set ip daddr & 0.0.255.255 | 10.0.0.0 accept
//	     … of errors about the peer's packets, the quoted source
//
// Errors that this host makes about a packet that has been translated already go to
// its sender here, who does not know the address in them: WireGuard in the kernel makes
// such an error when it does not know where its peer is. A rule for them asks for the
// connection's own address of the peer as well. An error about a packet that has not
// been translated quotes that address itself, so no rule is about it.
func (h *host) translatePrefixes(in GatewayInput, c *cluster.Configuration) {
	if len(h.translations) == 0 {
		return
	}
	var local []netip.Prefix
	if c != nil {
		local = c.Ours().All()
	}
	for _, a := range in.internal() {
		local = append(local, hostPrefix(a))
	}
	for _, fc := range living(in.Firewalls, func(fc cluster.FirewallConfiguration) cluster.Meta { return fc.Meta }) {
		ours := isPrefixTranslation(fc.Labels) || fc.Labels[labelFirewallSubcategory] == subcategoryIPMapping
		if gatewaySelectsFirewall(fc.Labels, in.RemoteID) && !ours {
			h.warnOfOriginals(fc, local)
		}
	}
	incoming, inErrors := edgeChain("incoming", "prerouting", edgeIn), edgeChain("incoming-errors", "prerouting", edgeIn)
	outgoing, outErrors := edgeChain("outgoing", "postrouting", edgeOut), edgeChain("outgoing-errors", "postrouting", edgeOut)
	own := edgeChain("own-errors", "output", edgeIn)
	fromTunnel, toTunnel := netstate.Match{Dir: "in", Dev: TunnelInterface}, netstate.Match{Dir: "out", Dev: TunnelInterface}
	isError := netstate.Match{ICMPError: true}
	for _, t := range h.translations {
		add := func(c *netstate.Chain, of netstate.Header, dir string, from, to netip.Prefix, matches ...netstate.Match) {
			matches = append(matches, netstate.Match{Dir: dir, Addr: netstate.RangeOf(from), Of: of})
			c.Rules = append(c.Rules, netstate.FirewallRule{
				Name: t.name, Matches: matches, Counter: true,
				Action: netstate.Action{Kind: netstate.SetPrefix, Dir: dir, Of: of, To: to},
			})
		}
		add(&incoming, netstate.OfPacket, "src", t.there, t.here, fromTunnel)
		add(&inErrors, netstate.OfQuoted, "dst", t.there, t.here, fromTunnel, isError)
		add(&outgoing, netstate.OfPacket, "dst", t.here, t.there, toTunnel)
		add(&outErrors, netstate.OfQuoted, "src", t.here, t.there, toTunnel, isError)
		ofConnection := func(dir string) netstate.Match {
			return netstate.Match{Dir: dir, Addr: netstate.RangeOf(t.here), Of: netstate.OfConnection}
		}
		add(&own, netstate.OfQuoted, "dst", t.there, t.here, isError, netstate.Match{CTDir: "reply"}, ofConnection("dst"))
		add(&own, netstate.OfQuoted, "dst", t.there, t.here, isError, netstate.Match{CTDir: "original"}, ofConnection("src"))
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyIPv4, Name: PrefixTranslationTable,
		Chains: []netstate.Chain{incoming, inErrors, outgoing, outErrors, own},
	})
}

func edgeChain(name, hook string, priority int32) netstate.Chain {
	return netstate.Chain{Name: name, Type: "filter", Hook: hook, Priority: priority, Policy: "accept"}
}

// warnOfOriginals tells users whose rules look for an address as the peer calls it
// what this gateway sees instead. Where this cluster has such addresses too, only
// the tunnel tells whose is meant.
func (h *host) warnOfOriginals(fc cluster.FirewallConfiguration, local []netip.Prefix) {
	for i, c := range fc.Chains {
		if c.Hook == "prerouting" && c.Priority <= edgeIn || c.Hook == "postrouting" && c.Priority >= edgeOut {
			continue // there it is so
		}
		warn := func(field string, matches []cluster.Match) {
			for j, m := range matches {
				if t, write, ok := h.original(m, matches, local); ok {
					h.warn(fc.Meta, "spec.table.chains[%d].rules.%s.match[%d].ip: this gateway sees the remote cluster's %s as %s; write %s",
						i, field, j, t.there, t.here, write)
				}
			}
		}
		for j, r := range c.Filter {
			warn(fmt.Sprintf("filterRules[%d]", j), r.Match)
		}
		for j, r := range c.NAT {
			warn(fmt.Sprintf("natRules[%d]", j), r.Match)
		}
	}
}

// original returns the network of the peer that a match means by its original
// addresses, and what to write instead.
func (h *host) original(m cluster.Match, all []cluster.Match, local []netip.Prefix) (t prefixTranslation, write netstate.AddrRange, ok bool) {
	if !m.IP.From.IsValid() {
		return t, write, false
	}
	p, isPrefix := netstate.AddrRange(m.IP).AsPrefix()
	theirs, ours := "in", "out"
	if m.Position == "dst" {
		theirs, ours = ours, theirs
	}
	tunnel := func(position string) bool {
		return slices.Contains(all, cluster.Match{Dev: TunnelInterface, Position: position})
	}
	if tunnel(ours) {
		return t, write, false
	}
	byTunnel := tunnel(theirs)
	for _, t := range h.translations {
		known := func(n netip.Prefix) bool { return n.Contains(m.IP.From) || n.Contains(m.IP.To) }
		ambiguous := slices.ContainsFunc(local, known) || slices.ContainsFunc(h.translations, func(o prefixTranslation) bool { return known(o.here) })
		if !t.there.Contains(m.IP.From) || !t.there.Contains(m.IP.To) || isPrefix && p.Bits() < t.there.Bits() || ambiguous && !byTunnel {
			continue
		}
		return t, netstate.AddrRange{From: netstate.WithHostBits(t.here, m.IP.From), To: netstate.WithHostBits(t.here, m.IP.To)}, true
	}
	return t, write, false
}
