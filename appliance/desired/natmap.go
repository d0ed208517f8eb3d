package desired

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

const (
	// leastMapped is how many rules that differ in one address become one with
	// a map, and how many nodes share one rule of ip-rule(8) (nodesAtOnce). As "lab bench firewall" measures it, a rule that does not match
	// costs a new connection some 50 ns of 15 µs, and with 2 to 12 rules maps
	// and rules are within the noise of each other: below eight there is
	// nothing to win, and rules are easier to read.
	leastMapped = 8
	// maxLookBack bounds the work for a chain in which rules of many kinds
	// alternate: a rule is not moved past more than this many others.
	maxLookBack = 256
)

// withMaps returns the rules of a chain in which those that translate, or that mark
// connections, and differ in one address only have become one rule with a map. Those
// that mark may each be for packets of another link, too. A packet's fate stays the
// same, whatever the packet: of the rules that match it none comes before one that it
// came after. So keys that overlap are not in one map, and a rule moves up to its map
// only past rules that match no packet of its own.
//
// What the rules were called is kept with the entries of the map.
func withMaps(rules []netstate.FirewallRule, least int) []netstate.FirewallRule {
	if len(rules) < least {
		return rules
	}
	best := rules
	for _, dirs := range [][]string{{byLink, "dst", "src"}, {byLink, "src", "dst"}} {
		out := rules
		for _, dir := range dirs {
			out = mappedBy(out, dir, least)
		}
		if len(out) < len(best) {
			best = out
		}
		if len(best) == 1 {
			break
		}
	}
	return best
}

// byLink stands for rules that mark connections and differ in the link that their packets
// came in by, where others differ in one address.
const byLink = "link"

// A natUnit is rules that differ in the address dir only, or byLink, or one rule that
// nothing can join.
type natUnit struct {
	rules  []netstate.FirewallRule
	dir    string           // empty: nothing can join
	others []netstate.Match // of every rule, besides the key
	keys   []netstate.AddrRange
	links  []string // of the rules' keys
	sorted []int    // of rules, by key
}

// mappedBy merges rules that differ in their source, or destination, only.
func mappedBy(rules []netstate.FirewallRule, dir string, least int) []netstate.FirewallRule {
	keys := make([]natKey, len(rules))
	alike := map[string]int{} // by kind
	for i, r := range rules {
		keys[i] = keyOf(r, dir)
		if keys[i].ok {
			keys[i].kind = fmt.Sprint(r.Action.Kind, keys[i].addr.From.Is6(), keys[i].link != "", keys[i].others)
			alike[keys[i].kind]++
		}
	}
	var units []*natUnit
	last := map[string]int{} // place of the latest unit of a kind
	merged := false
	for i, r := range rules {
		k := keys[i]
		if alike[k.kind] < least {
			units = append(units, &natUnit{rules: []netstate.FirewallRule{r}, others: r.Matches})
			continue
		}
		at, known := last[k.kind]
		if known && len(units)-at <= maxLookBack &&
			!slices.ContainsFunc(units[at+1:], func(u *natUnit) bool { return !u.apart(r, k, dir) }) && units[at].join(r, k) {
			merged = merged || len(units[at].rules) >= least
			continue
		}
		last[k.kind] = len(units)
		u := &natUnit{dir: dir, others: k.others}
		u.join(r, k)
		units = append(units, u)
	}
	if !merged {
		return rules
	}
	var out []netstate.FirewallRule
	for _, u := range units {
		if len(u.rules) >= least && u.dir != "" {
			out = append(out, u.rule())
		} else {
			out = append(out, u.rules...)
		}
	}
	return out
}

// A natKey is what one rule would be in a map: its key, and what all rules of
// the map have in common.
type natKey struct {
	ok     bool // there is one
	addr   netstate.AddrRange
	link   string // that packets came in by; empty: it does not matter, or others says it
	others []netstate.Match
	kind   string // the same for rules that may share a map
}

func keyOf(r netstate.FirewallRule, dir string) natKey {
	var k natKey
	if r.Counter || len(r.Action.Map.Entries) > 0 {
		return k
	}
	marks := false
	switch r.Action.Kind {
	case netstate.SNAT, netstate.DNAT, netstate.Masquerade:
	case netstate.SetCTMark:
		if r.Action.Mask != 0 {
			return k
		}
		marks = true
	default:
		return k
	}
	found := 0
	for _, m := range r.Matches {
		if marks && k.link == "" && m.Dev != "" && m.Dir == "in" && !m.Negate && !strings.HasSuffix(m.Dev, "*") {
			k.link = m.Dev
			continue
		}
		if m.Addr.From.IsValid() && m.Dir == dir && !m.Negate {
			k.addr = m.Addr
			found++
			continue
		}
		k.others = append(k.others, m)
	}
	if dir == byLink {
		// The map has to know the family of its packets.
		i := slices.IndexFunc(k.others, func(m netstate.Match) bool { return m.Addr.From.IsValid() && !m.Negate })
		if k.ok = k.link != "" && i >= 0; k.ok {
			k.addr = k.others[i].Addr
		}
	} else {
		k.ok = found == 1 && (k.link == "" || k.addr.From == k.addr.To)
	}
	return k
}

// join adds a rule, if its key has no address in common with those that are
// here.
func (u *natUnit) join(r netstate.FirewallRule, k natKey) bool {
	at, free := u.place(k)
	if !free {
		return false
	}
	u.sorted = slices.Insert(u.sorted, at, len(u.rules))
	u.rules = append(u.rules, r)
	u.keys = append(u.keys, k.addr)
	u.links = append(u.links, k.link)
	return true
}

// place says where a key belongs, and whether no other has an address of it.
func (u *natUnit) place(k natKey) (at int, free bool) {
	if u.dir == byLink {
		at, taken := slices.BinarySearchFunc(u.sorted, k.link, func(i int, link string) int { return strings.Compare(u.links[i], link) })
		return at, !taken
	}
	a := k.addr
	at, _ = slices.BinarySearchFunc(u.sorted, a.From, func(i int, from netip.Addr) int { return u.keys[i].From.Compare(from) })
	free = (at == len(u.sorted) || a.To.Less(u.keys[u.sorted[at]].From)) &&
		(at == 0 || u.keys[u.sorted[at-1]].To.Less(a.From))
	return at, free
}

// apart reports whether no packet matches both the rule and one of the unit.
func (u *natUnit) apart(r netstate.FirewallRule, k natKey, dir string) bool {
	if contradict(u.others, r.Matches) {
		return true
	}
	if u.dir != dir {
		return false
	}
	_, free := u.place(k)
	return free
}

// rule returns the unit as one rule.
func (u *natUnit) rule() netstate.FirewallRule {
	a := netstate.Action{Kind: u.rules[0].Action.Kind, Map: netstate.AddrMap{Dir: u.dir, ByLink: u.links[0] != ""}}
	if u.dir == byLink {
		a.Map.Dir, a.Map.IPv6 = "", u.keys[0].From.Is6()
	}
	name := u.rules[0].Name
	for _, i := range u.sorted {
		r := u.rules[i]
		e := netstate.MapEntry{Addr: u.keys[i], Link: u.links[i], Name: r.Name}
		if u.dir == byLink {
			e.Addr = netstate.AddrRange{}
		}
		switch {
		case a.Kind == netstate.SetCTMark:
			e.Mark = r.Action.Mark
		case a.Kind == netstate.Masquerade:
		case r.Action.Prefix:
			e.To = r.Action.To.Masked()
			a.Prefix = a.Prefix || !e.To.IsSingleIP()
		default:
			e.To = hostPrefix(r.Action.To.Addr())
		}
		a.Map.Entries = append(a.Map.Entries, e)
		if r.Name != name {
			name = ""
		}
	}
	if name != "" { // of all: once is enough
		for i := range a.Map.Entries {
			a.Map.Entries[i].Name = ""
		}
	}
	return netstate.FirewallRule{Name: name, Matches: u.others, Action: a}
}

// contradict reports whether no packet can satisfy both lists of matches. It
// may not see that, but never errs the other way.
func contradict(a, b []netstate.Match) bool {
	for _, x := range a {
		for _, y := range b {
			if opposed(x, y) || opposed(y, x) {
				return true
			}
		}
	}
	return false
}

// opposed reports whether no packet satisfies both matches, of which y is not
// negated, or is about the other IP family.
func opposed(x, y netstate.Match) bool {
	if x.Addr.From.IsValid() && y.Addr.From.IsValid() && x.Addr.From.Is6() != y.Addr.From.Is6() {
		return true
	}
	if y.Negate || x.Dir != y.Dir {
		return false
	}
	switch {
	case x.Addr.From.IsValid() && y.Addr.From.IsValid():
		if x.Negate {
			return !y.Addr.From.Less(x.Addr.From) && !x.Addr.To.Less(y.Addr.To)
		}
		return x.Addr.To.Less(y.Addr.From) || y.Addr.To.Less(x.Addr.From)
	case x.Ports != netstate.PortRange{} && y.Ports != netstate.PortRange{}:
		if x.Negate {
			return x.Ports.From <= y.Ports.From && y.Ports.To <= x.Ports.To
		}
		return x.Ports.To < y.Ports.From || y.Ports.To < x.Ports.From
	case x.L4Proto != "" && y.L4Proto != "":
		return (x.L4Proto == y.L4Proto) == x.Negate
	case x.Dev != "" && y.Dev != "":
		pattern := strings.HasSuffix(x.Dev, "*") || strings.HasSuffix(y.Dev, "*")
		return x.Negate && x.Dev == y.Dev || !x.Negate && !pattern && x.Dev != y.Dev
	}
	return false
}
