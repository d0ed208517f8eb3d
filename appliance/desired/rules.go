package desired

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// fewerRules returns a state that does with every packet what s does, with
// fewer rules: the kernel asks them one after the other for every packet, while
// a table of any size is one lookup. Objects keep their rules as they are
// written. A lookup that finds nothing goes on to the next rule (ip-rule(8)), so
//
//   - a rule that selects a destination is one that does not, if its table holds
//     no routes but to there;
//   - two rules that select the same packets are one, and so are their tables,
//     unless a rule between them sends some of these packets elsewhere;
//   - a rule by the mark of a node's connections is none where the destination
//     names the node already (see impliedBy).
//
// What is not known to be the same stays: rules that lead to tables of the
// kernel or of users, for one, whose routes are not all known here.
//
// Tables of rules that became one are never those that an object names: they
// hold what is right for all packets that are looked up there, at any time, so
// the kernel can be led from one state to another without a packet going astray
// in between (routes are added first, then rules; then rules go, then routes).
//
// s is normalised.
func (h *host) fewerRules(s netstate.State) netstate.State {
	c := newCompaction(h, s)
	var ofConnections uint32
	if h.gateway {
		ofConnections = ReservedMarks
	}
	implied := impliedBy(s.Tables, ofConnections)
	before := map[uint32]bool{}
	for _, r := range s.Rules {
		before[r.Table], c.taken[r.Table] = true, true
	}
	var rules []netstate.Rule
	for _, v6 := range []bool{false, true} {
		family := slices.DeleteFunc(slices.Clone(s.Rules), func(r netstate.Rule) bool { return r.Is6() != v6 })
		family = c.withoutMarks(family, implied)
		rules = append(rules, c.emit(c.merge(family))...)
	}
	after := map[uint32]bool{}
	for _, r := range rules {
		after[r.Table] = true
	}
	s.Rules = rules
	s.Routes = slices.DeleteFunc(slices.Clone(s.Routes), func(r netstate.Route) bool {
		// Who else looks into a table that has a number is not known here.
		return before[r.Table] && !after[r.Table] && !h.numbered[r.Table] && !kernelTable(r.Table)
	})
	s.Routes = append(s.Routes, c.routes...)
	return s
}

// destinations are the routes of a table.
type destinations map[netip.Prefix]netstate.Route

// longest returns the longest prefix of a set that contains p.
func longest[V any](set map[netip.Prefix]V, p netip.Prefix) (netip.Prefix, bool) {
	for bits := p.Bits(); bits >= 0; bits-- {
		q := netip.PrefixFrom(p.Addr(), bits).Masked()
		if _, ok := set[q]; ok {
			return q, true
		}
	}
	return netip.Prefix{}, false
}

// contains reports whether q is p or a part of it.
func contains(p, q netip.Prefix) bool { return p.Bits() <= q.Bits() && p.Contains(q.Addr()) }

// A compaction makes rules fewer.
type compaction struct {
	*host
	tables map[uint32]destinations
	opaque map[uint32]bool   // tables that are not, or not only, what tables says
	taken  map[uint32]bool   // numbers of tables
	named  map[string]uint32 // numbers of new tables
	routes []netstate.Route  // of new tables
}

func newCompaction(h *host, s netstate.State) *compaction {
	c := compaction{
		host: h, tables: map[uint32]destinations{}, opaque: map[uint32]bool{},
		taken: map[uint32]bool{}, named: map[string]uint32{},
	}
	c.readTables(s)
	return &c
}

// readTables collects the routes of the tables that are known in full.
func (c *compaction) readTables(s netstate.State) {
	for _, r := range s.Routes {
		c.taken[r.Table] = true
		table := c.tables[r.Table]
		if table == nil {
			table = destinations{}
			c.tables[r.Table] = table
		}
		if _, twice := table[r.Dst]; twice || r.Type == netstate.Throw {
			c.opaque[r.Table] = true
		}
		table[r.Dst] = r
	}
	for n := range c.numbered {
		if n != vxlanVNI { // the overlay's own table
			c.opaque[n] = true
		}
	}
}

// A lookup is a rule, or several that became one.
type lookup struct {
	netstate.Rule
	// routes is where its packets go; nil where that is not known: then it may
	// be anywhere, for all packets that the rule selects.
	routes destinations
	merged bool
}

// read returns a rule as a lookup.
func (c *compaction) read(r netstate.Rule) lookup {
	l := lookup{Rule: r}
	if r.Unreachable || r.Goto != 0 || r.Nop || kernelTable(r.Table) || c.opaque[r.Table] {
		return l
	}
	table := c.tables[r.Table]
	if !r.Dst.IsValid() {
		l.routes = table
		return l
	}
	if wider, ok := longest(table, r.Dst); ok && wider != r.Dst {
		return l // and its other half is not for this rule
	}
	l.routes = destinations{}
	for dst, route := range table {
		if contains(r.Dst, dst) {
			l.routes[dst] = route
		}
	}
	return l
}

// selects returns what a lookup selects but for the destination; all, if it is
// for all but something.
func (l lookup) selects() selector {
	if l.Not {
		return selector{}
	}
	return selector{src: l.Src, iif: l.IIF, oif: l.OIF, mark: l.Mark}
}

// meets reports whether there may be packets that both select, whatever their
// destination.
func (s selector) meets(o selector) bool {
	differ := func(a, b string) bool { return a != "" && b != "" && a != b }
	return !differ(s.iif, o.iif) && !differ(s.oif, o.oif) &&
		(s.mark == 0 || o.mark == 0 || s.mark == o.mark) &&
		(!s.src.IsValid() || !o.src.IsValid() || s.src.Overlaps(o.src))
}

// conflicts reports whether the order of two lookups may matter to some packet.
func (l lookup) conflicts(o lookup) bool {
	return l.selects().meets(o.selects()) && l.differs(o)
}

// differs reports whether there are destinations that both may have a way to,
// and not the same one.
func (l lookup) differs(o lookup) bool {
	known := func(routes destinations, of lookup) bool {
		for dst := range routes {
			if !of.Dst.IsValid() || of.Dst.Overlaps(dst) {
				return true
			}
		}
		return false
	}
	switch {
	case l.routes == nil && o.routes == nil:
		return !l.Dst.IsValid() || !o.Dst.IsValid() || l.Dst.Overlaps(o.Dst)
	case l.routes == nil:
		return known(o.routes, l)
	case o.routes == nil:
		return known(l.routes, o)
	}
	return l.routes.take(o.routes) || o.routes.take(l.routes)
}

// few is a number of routes up to which it is quicker to look at each of them.
const few = 8

// take reports whether there are destinations, or parts of such, that o has a
// route to and d sends another way.
func (d destinations) take(o destinations) bool {
	other := func(p, dst netip.Prefix) bool {
		route, has := d[dst]
		return contains(p, dst) && !(has && sameWay(route, o[dst]))
	}
	if len(d) > few {
		for dst := range o {
			if p, ok := longest(d, dst); ok && other(p, dst) {
				return true
			}
		}
		return false
	}
	for p := range d {
		if _, has := o[p]; has && other(p, p) {
			return true
		}
		if p.IsSingleIP() {
			continue
		}
		for dst := range o {
			if other(p, dst) {
				return true
			}
		}
	}
	return false
}

// sameWay reports whether two routes to the same destination, of whatever
// tables, are equal.
func sameWay(a, b netstate.Route) bool {
	a.Table, b.Table = 0, 0
	return a == b
}

// merge makes one of rules that select the same packets. Rules come in the order
// in which they are asked; of those with the same priority the kernel asks first
// what was added first, so there the order must not matter.
func (c *compaction) merge(rules []netstate.Rule) []lookup {
	var out []lookup
	at := map[uint32][]lookup{} // all rules, by priority
	for _, r := range rules {
		at[r.Priority] = append(at[r.Priority], c.read(r))
	}
	type place struct {
		priority uint32
		selector
	}
	stands := map[place]bool{} // alone among those with its priority
	alone := func(p place) bool {
		if _, known := stands[p]; !known {
			stands[p] = !slices.ContainsFunc(at[p.priority], func(l lookup) bool {
				return l.merges() && l.selects() == p.selector && !l.mayPass(at[p.priority])
			})
		}
		return stands[p]
	}
	heads := map[selector]int{}
	for _, r := range rules {
		l := c.read(r)
		if !l.merges() {
			out = append(out, l)
			continue
		}
		s := l.selects()
		if i, ok := heads[s]; ok && c.mayMove(out[i].Priority, r.Priority) && alone(place{out[i].Priority, s}) &&
			l.mayPass(at[out[i].Priority]) && l.mayPass(out[i+1:]) {
			out[i] = out[i].with(l)
			continue
		}
		heads[s] = len(out)
		out = append(out, l)
	}
	return out
}

// merges reports whether a rule may become one with others.
func (l lookup) merges() bool { return len(l.routes) > 0 && l.Mask == 0 && !l.Not && l.Other == "" }

// mayPass reports whether l may be asked before others as well as after them,
// except for those that it could become one with.
func (l lookup) mayPass(others []lookup) bool {
	passed := uint32(0) // a table, which many rules in a row may lead to
	for _, o := range others {
		whole := o.routes != nil && !o.merged && !o.Dst.IsValid()
		if whole && o.Table == passed || o.merges() && o.selects() == l.selects() {
			continue
		}
		if l.conflicts(o) {
			return false
		}
		if whole && l.selects().meets(o.selects()) {
			passed = o.Table
		}
	}
	return true
}

// mayMove reports whether a rule may be asked at another place than its own, as
// long as that makes no difference to our rules: not if a user chose the place.
func (c *compaction) mayMove(from, to uint32) bool {
	return from == to || !c.explicit[from] && !c.explicit[to]
}

// with returns l with the routes of another lookup, which comes after it.
func (l lookup) with(next lookup) lookup {
	if !l.merged && !l.Dst.IsValid() && !next.Dst.IsValid() && l.Table == next.Table {
		return l // which has been asked
	}
	var fresh []netstate.Route
	for dst, route := range next.routes {
		if _, known := longest(l.routes, dst); !known {
			fresh = append(fresh, route)
		}
	}
	if !l.merged {
		l.routes = maps.Clone(l.routes)
	}
	for _, route := range fresh {
		l.routes[route.Dst] = route
	}
	l.IPv6 = l.Is6()
	l.Dst, l.merged = netip.Prefix{}, true
	return l
}

// emit returns the lookups as rules, and notes the routes of new tables.
func (c *compaction) emit(list []lookup) []netstate.Rule {
	var out []netstate.Rule
	numbers := map[string]uint32{} // of new tables of this family, by name
	count := map[string]int{}
	add := func(name string, routes destinations) uint32 {
		if n, ok := numbers[name]; ok {
			return n
		}
		n := c.number(name)
		numbers[name] = n
		for _, r := range routes {
			r.Table = n
			c.routes = append(c.routes, r)
		}
		return n
	}
	for _, l := range list {
		r := l.Rule
		if l.merged {
			name := l.selects().tableName()
			count[name]++ // several, if a rule in between keeps them apart
			r.Table = add("\x00merged "+name+"\x00"+strconv.Itoa(count[name]), l.routes)
		}
		out = append(out, r)
	}
	return out
}

// number returns the number of a table that no object names. Both families
// have the same one.
func (c *compaction) number(name string) uint32 {
	if n, ok := c.named[name]; ok {
		return n
	}
	n := TableNumber(name)
	for i := 1; c.taken[n]; i++ {
		n = TableNumber(name + "#" + strconv.Itoa(i))
	}
	c.taken[n], c.named[name] = true, n
	return n
}

// anywhere is the destination of a default route.
func anywhere(v6 bool) netip.Prefix {
	if v6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}
