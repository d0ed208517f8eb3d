package desired

import (
	"net/netip"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// impliedBy returns the addresses that marks stand for: connections get such a
// mark from packets with this source alone, and what comes back in such a
// connection, and is given its mark, has that destination. It is known when the
// packet is routed, as conntrack has restored it by then. A mark that says less
// than that has no address. Some bits of marks may be for connections only: no packet
// is given them.
func impliedBy(tables []netstate.Table, ofConnections uint32) map[uint32]netip.Addr {
	out := map[uint32]netip.Addr{}
	for _, t := range tables {
		for _, chain := range t.Chains {
			for _, r := range chain.Rules {
				for _, m := range markings(chain.Hook, r) {
					m.mark &^= ofConnections
					if other, known := out[m.mark]; known && other != m.source {
						m.source = netip.Addr{}
					}
					out[m.mark] = m.source
				}
			}
		}
	}
	return out
}

// A marking gives connections a mark.
type marking struct {
	mark   uint32
	source netip.Addr // that every packet has which does so; invalid: they have several
}

// markings returns what a rule of a hook gives to connections.
func markings(hook string, r netstate.FirewallRule) []marking {
	if r.Action.Kind != netstate.SetCTMark {
		return nil
	}
	source := func(dir string, a netstate.AddrRange) netip.Addr {
		// Before source NAT, and after the destination has been translated.
		if hook == "forward" && dir == "src" && a.From == a.To {
			return a.From
		}
		return netip.Addr{}
	}
	if m := r.Action.Map; len(m.Entries) > 0 {
		var out []marking
		for _, e := range m.Entries {
			out = append(out, marking{e.Mark, source(m.Dir, e.Addr)})
		}
		return out
	}
	out := marking{mark: r.Action.Mark}
	for _, m := range r.Matches {
		if a := source(m.Dir, m.Addr); !m.Negate && a.IsValid() {
			out.source = a
		}
	}
	return []marking{out}
}

// withoutMarks leaves out rules by a mark that make no difference: the mark
// stands for a destination, and what is sent there goes the same way without the
// rule. The nodes' own addresses are such marks (corrections A1b, B2).
func (c *compaction) withoutMarks(rules []netstate.Rule, implied map[uint32]netip.Addr) []netstate.Rule {
	var unmarked, out []netstate.Rule
	for _, r := range rules {
		if r.Mark == 0 && r.Mask == 0 {
			unmarked = append(unmarked, r)
		}
	}
	for _, r := range rules {
		a := implied[r.Mark]
		if r.Mark == 0 || r.Mask != 0 || r.Src.IsValid() || r.OIF != "" || !a.IsValid() || a.Is6() != r.Is6() || r.Dst.IsValid() && !r.Dst.Contains(a) {
			out = append(out, r)
			continue
		}
		marked, known := c.way(r, a)
		if plain, found := c.wayWithout(unmarked, r.IIF, a); !known || !found || marked != plain {
			out = append(out, r)
		}
	}
	return out
}

// A step is where a packet goes next.
type step struct {
	kind netstate.RouteType
	dev  string
	via  netip.Addr // the destination itself, if it is on the link
}

// way returns where a rule sends what is for an address; false if it is not
// known whether, or where.
func (c *compaction) way(r netstate.Rule, a netip.Addr) (step, bool) {
	if r.Unreachable || kernelTable(r.Table) || c.opaque[r.Table] {
		return step{}, false
	}
	p, ok := longest(c.tables[r.Table], hostPrefix(a))
	if !ok {
		return step{}, false
	}
	route := c.tables[r.Table][p]
	s := step{route.Type, route.Dev, route.Via}
	if !s.via.IsValid() && s.kind != netstate.Unreachable {
		s.via = a
	}
	return s, true
}

// wayWithout returns where rules send what came by a link and is for an
// address, from wherever; false if that is not known.
func (c *compaction) wayWithout(rules []netstate.Rule, iif string, a netip.Addr) (step, bool) {
	for _, r := range rules {
		switch {
		case r.Not:
			return step{}, false // all but some of these packets
		case r.Dst.IsValid() && !r.Dst.Contains(a) || r.IIF != "" && iif != "" && r.IIF != iif:
			continue
		case r.Src.IsValid() || r.OIF != "" || r.IIF != "" && r.IIF != iif:
			return step{}, false // some of these packets
		}
		if s, found := c.way(r, a); found {
			return s, true
		}
		if r.Unreachable || kernelTable(r.Table) || c.opaque[r.Table] {
			return step{}, false
		}
	}
	return step{}, false
}
