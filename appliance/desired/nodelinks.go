package desired

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// NodesOnlyTable is the nftables table of a gateway with many nodes that refuses
// what came in by no node's link and would go to the peer.
const NodesOnlyTable = "nodes-only"

// NodeLinkPrefix is how the names of links to nodes begin, where the controller has
// chosen them.
const NodeLinkPrefix = "liqo."

// nodesAtOnce lets one ip rule stand for many. A gateway has a rule for each node's link,
// which leads to the peer what comes in there, and the kernel asks them one after the other
// for every packet. ip-rule(8) can't select several links, so the one rule is for all
// packets but the gateway's own:
//
//	ip rule add not iif lo priority 330 lookup 332001600
//	nft add rule … oifname liqo-tunnel iifname != "liqo.*" ip daddr 10.1.0.0/16 counter drop
//	nft add rule … oifname != "liqo.*" ip saddr 10.1.0.0/16 counter drop
//
// A table of nftables refuses those of them that the rule at the end of the lookup refused
// before (see close). The first is what came in by another link and would go to the peer.
// The second claims to be from the peer and would go out by another link: the reverse-path
// filter, which IPv4 has, asked the rules for a way back by that link.
//
// It asks for all packets and not for marked ones, because the reverse-path filter knows
// a link but no mark. While the rule is there and the table is not yet, or somebody has
// deleted it, forwarding is off for the link of the gateway's pod all the same.
//
// With fewer than least nodes the rules stay. s is normalised.
func (h *host) nodesAtOnce(s netstate.State, least int) netstate.State {
	nodes := map[string]bool{}
	for _, l := range s.Links {
		if l.Kind == netstate.KindGeneve {
			nodes[l.Name] = true
			if !strings.HasPrefix(l.Name, NodeLinkPrefix) {
				return s
			}
		}
	}
	if !h.gateway || len(nodes) < least {
		return s
	}
	c := newCompaction(h, s)
	var refused []refusal
	for _, v6 := range []bool{false, true} {
		for _, one := range forEach(nodes, s.Rules, v6) {
			more, ok := c.refused(one, s)
			if !ok {
				continue
			}
			refused = append(refused, more...)
			s.Rules = slices.DeleteFunc(slices.Clone(s.Rules), func(r netstate.Rule) bool {
				return r.IIF != "" && one == anyLink(r)
			})
			s.Rules = append(s.Rules, netstate.Rule{Priority: one.Priority, IPv6: v6, IIF: loopback, Not: true, Table: one.Table})
		}
	}
	if len(refused) == 0 {
		return s
	}
	slices.SortFunc(refused, func(a, b refusal) int {
		return cmp.Or(comparePrefix(a.network, b.network), strings.Compare(a.back, b.back))
	})
	var rules []netstate.FirewallRule
	drop := func(name string, matches ...netstate.Match) {
		rules = append(rules, netstate.FirewallRule{Name: name, Matches: matches, Counter: true, Action: netstate.Action{Kind: netstate.Drop}})
	}
	for _, r := range slices.Compact(refused) {
		drop("from-no-node", netstate.Match{Dir: "out", Dev: TunnelInterface}, netstate.Match{Dir: "in", Dev: NodeLinkPrefix + "*", Negate: true},
			netstate.Match{Dir: "dst", Addr: netstate.RangeOf(r.network)})
		if r.network.Addr().Is6() {
			continue
		}
		back := []netstate.Match{{Dir: "out", Dev: NodeLinkPrefix + "*", Negate: true}}
		for link := range strings.FieldsSeq(r.back) {
			back = append(back, netstate.Match{Dir: "out", Dev: link, Negate: true})
		}
		drop("to-no-node", append(back, netstate.Match{Dir: "src", Addr: netstate.RangeOf(r.network)})...)
	}
	s.Tables = append(slices.Clone(s.Tables), netstate.Table{
		Family: netstate.FamilyINET, Name: NodesOnlyTable,
		Chains: []netstate.Chain{{Name: "forward", Type: "filter", Hook: "forward", Priority: beforeDestinationNAT, Policy: "accept", Rules: rules}},
	})
	return s
}

// anyLink is a rule without its link.
func anyLink(r netstate.Rule) netstate.Rule {
	r.IPv6, r.IIF = r.Is6(), ""
	return r
}

// forEach returns the rules, without their link, that there are for each of the nodes'
// links: they look at nothing else and lead to one table.
func forEach(nodes map[string]bool, rules []netstate.Rule, v6 bool) []netstate.Rule {
	count := map[netstate.Rule]int{}
	var out []netstate.Rule
	for _, r := range rules {
		one := anyLink(r)
		if r.Is6() != v6 || !nodes[r.IIF] || one != (netstate.Rule{Priority: r.Priority, IPv6: v6, Table: r.Table}) {
			continue
		}
		if count[one]++; count[one] == len(nodes) {
			out = append(out, one)
		}
	}
	return out
}

// A refusal is a network of the peer that only nodes may send to, and the links, besides
// those of nodes, by which there is a way to it: separated by spaces. The reverse-path
// filter lets what claims to be from there go out by these.
type refusal struct {
	network netip.Prefix
	back    string
}

// refused returns which of the destinations that a rule for each node's link leads to
// must be refused to others when it is for all links. It is not ok if the rule may not
// be for all: if it leads elsewhere than to the peer, or others have another way to one
// of these destinations.
func (c *compaction) refused(one netstate.Rule, s netstate.State) (out []refusal, ok bool) {
	routes := c.tables[one.Table]
	if len(routes) == 0 || kernelTable(one.Table) || c.opaque[one.Table] {
		return nil, false
	}
	refuse, all := map[netip.Prefix]bool{}, map[netip.Prefix]bool{}
	for dst, r := range routes {
		if r.Dev != TunnelInterface || r.Type != netstate.Unicast {
			return nil, false
		}
		refuse[dst], all[dst] = true, true
	}
	before := func(r netstate.Rule) bool { return r.Priority < one.Priority }
	for _, r := range s.Rules { // what all may reach
		if l := c.read(r); r.Is6() == one.IPv6 && before(r) && l.Mask == 0 && !l.Not && l.selects() == (selector{}) {
			maps.DeleteFunc(refuse, func(dst netip.Prefix, _ bool) bool {
				route, has := l.routes[dst]
				return has && sameWay(route, routes[dst])
			})
		}
	}
	meets := func(list map[netip.Prefix]bool, dst netip.Prefix) bool {
		for p := range list {
			if p.Overlaps(dst) {
				return true
			}
		}
		return false
	}
	closed := false
	back := map[netip.Prefix][]string{}
	for _, r := range s.Rules {
		if r.Is6() != one.IPv6 || r.Nop || !r.Not && (strings.HasPrefix(r.IIF, NodeLinkPrefix) || r.IIF == loopback) {
			continue // not for packets that came in by another link
		}
		if r.Priority > one.Priority && r == (netstate.Rule{Priority: r.Priority, IPv6: r.IPv6, IIF: loopback, Not: true, Unreachable: true}) {
			closed = true
			break
		}
		l := c.read(r)
		if r.Goto != 0 || l.routes == nil && !r.Unreachable || r.Unreachable && !before(r) {
			return nil, false
		}
		oneLink := before(r) && r.IIF != "" && r == (netstate.Rule{Priority: r.Priority, IPv6: r.IPv6, IIF: r.IIF, Table: r.Table})
		for dst, route := range l.routes {
			if !before(r) && meets(all, dst) || before(r) && meets(refuse, dst) && (!oneLink || route.Dev == TunnelInterface) {
				return nil, false
			}
			for network := range refuse {
				switch {
				case !before(r) || !network.Overlaps(dst):
				case !contains(dst, network): // of a part of it only
					return nil, false
				case !slices.Contains(back[network], r.IIF):
					back[network] = append(back[network], r.IIF)
				}
			}
		}
	}
	for network := range refuse {
		slices.Sort(back[network])
		out = append(out, refusal{network, strings.Join(back[network], " ")})
	}
	return out, closed
}
