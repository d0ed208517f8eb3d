package desired

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// TableNumbers gives every name of a routing table a number. The number is a
// function of the name alone, except for names that collide: of those, the
// first in the alphabet has it. The numbers of the kernel's own tables (0, 253
// to 255) and all that fit into one byte are not given. A name that is a
// number is the table of that number, which several objects may share.
func TableNumbers(names []string) map[string]uint32 {
	names = slices.Clone(names)
	slices.Sort(names)
	numbers := make(map[string]uint32, len(names))
	taken := make(map[uint32]bool, len(names))
	for _, name := range names {
		if n, ok := numbered(name); ok {
			numbers[name], taken[n] = n, true
		}
	}
	for _, name := range slices.Compact(names) {
		if _, ok := numbers[name]; ok {
			continue
		}
		n := TableNumber(name)
		for i := 1; taken[n]; i++ {
			n = TableNumber(name + "#" + strconv.Itoa(i))
		}
		taken[n] = true
		numbers[name] = n
	}
	return numbers
}

// TableNumber returns the number of a routing table whose name collides with
// no other.
func TableNumber(name string) uint32 {
	sum := sha256.Sum256([]byte(name))
	return binary.BigEndian.Uint32(sum[:])&0x7fffffff | 0x100 // 31 bits, and above 255
}

// numbered returns the number of a table whose name is one.
func numbered(name string) (uint32, bool) {
	n, err := strconv.ParseUint(name, 10, 32)
	return uint32(n), err == nil && strconv.FormatUint(n, 10) == name
}

// kernelTable reports whether a table belongs to the kernel (ip-route(8)).
func kernelTable(n uint32) bool { return n == 0 || n >= 253 && n <= 255 }

// A routeObject is a RouteConfiguration that has been compiled.
type routeObject struct {
	cluster.RouteConfiguration
	rules   []routeRule
	without []string // why there is no way for some of its packets
}

// shares reports whether the table is one that other objects write to, too.
func (o routeObject) shares() bool {
	_, ok := numbered(o.Table)
	return ok
}

// A routeRule is a rule, its routes, and the families that it stands for.
type routeRule struct {
	netstate.Rule // without family, priority and table
	explicit      uint32
	routes        []netstate.Route // without table
	ipv4, ipv6    bool
}

// routes adds the rules and routes of the RouteConfigurations that are
// selected.
//
// Every RouteConfiguration has a table of its own and one priority for all of
// its rules, so their order among each other does not matter. Where rules of
// several objects select the same packets (all that comes out of the tunnel,
// say), these rules become one and their routes share a table: then the
// longest prefix wins, and a pod with an address out of another node's range
// is found, whatever the objects are called.
func (h *host) routes(all []cluster.RouteConfiguration, selects func(map[string]string) bool) {
	var objects []routeObject
	tables := map[string]cluster.Ref{}
	for _, rc := range living(all, func(rc cluster.RouteConfiguration) cluster.Meta { return rc.Meta }) {
		if !selects(rc.Labels) || !h.accept(rc.Meta) {
			continue
		}
		_, shared := numbered(rc.Table)
		if other, taken := tables[rc.Table]; taken && !shared {
			h.refuse(rc.Meta, "spec.table.name: %q is the table of %s already; choose another name", rc.Table, other)
			continue
		}
		o, problems := guarded(func() (routeObject, []string) { return h.compileRoutes(rc) })
		if len(problems) > 0 {
			h.refuse(rc.Meta, "%s", strings.Join(problems, "; "))
			continue
		}
		tables[rc.Table] = rc.Ref
		for _, text := range o.without {
			h.impair(rc.Meta, text)
		}
		objects = append(objects, o)
	}
	objects = h.withoutConflicts(objects)
	for _, o := range objects {
		if text := h.filtered(o); text != "" {
			h.warn(o.Meta, "%s", text)
		}
	}
	slices.SortFunc(objects, func(a, b routeObject) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Namespace, b.Namespace))
	})

	shared := sharedSelectors(objects)
	var names []string
	for _, o := range objects {
		names = append(names, o.Table)
	}
	for s := range shared {
		names = append(names, s.tableName())
	}
	numbers := TableNumbers(append(names, mappedHostsTable, forPeerTable, unknownPodsTable))
	h.mappedTable, h.forPeerTable, h.unknownPodsTable = numbers[mappedHostsTable], numbers[forPeerTable], numbers[unknownPodsTable]

	for i, o := range objects {
		priority := h.base + firstRoutes + uint32(i)
		if n := lastRoutes - firstRoutes + 1; len(objects) > n {
			priority = h.base + firstRoutes + uint32(i*n/len(objects))
		}
		if o.shares() {
			h.numbered[numbers[o.Table]] = true
		}
		for _, r := range o.rules {
			table := numbers[o.Table]
			prio := cmp.Or(r.explicit, priority)
			if r.explicit != 0 {
				h.explicit[r.explicit] = true
			}
			if first, ok := shared[selectorOf(r)]; ok {
				table = numbers[selectorOf(r).tableName()]
				prio = h.base + firstRoutes
				if n := lastRoutes - firstRoutes + 1; len(objects) > n {
					prio += uint32(first * n / len(objects))
				} else {
					prio += uint32(first)
				}
			}
			for _, route := range r.routes {
				route.Table = table
				h.state.Routes = append(h.state.Routes, route)
			}
			for _, v6 := range []bool{false, true} {
				if v6 && !r.ipv6 || !v6 && !r.ipv4 {
					continue
				}
				rule := r.Rule
				rule.IPv6, rule.Priority, rule.Table = v6, prio, table
				h.state.Rules = append(h.state.Rules, rule)
			}
		}
	}
}

// A selector is what a rule looks at.
type selector struct {
	src, dst netip.Prefix
	iif, oif string
	mark     uint32
}

func selectorOf(r routeRule) selector {
	return selector{r.Src, r.Dst, r.IIF, r.OIF, r.Mark}
}

// tableName is the name that the number of a shared table is derived from. No
// table of the API can be called so.
func (s selector) tableName() string {
	return fmt.Sprintf("\x00from %v to %v iif %q oif %q fwmark %d", s.src, s.dst, s.iif, s.oif, s.mark)
}

// sharedSelectors returns the selectors that rules of several objects have,
// with the position of the first of these objects. A rule with a priority of
// its own stands where its author put it, and shares nothing; so does one that
// leads to a table with a number.
func sharedSelectors(objects []routeObject) map[selector]int {
	first := map[selector]int{}
	shared := map[selector]int{}
	for i, o := range objects {
		for _, r := range o.rules {
			if r.explicit != 0 || o.shares() {
				continue
			}
			s := selectorOf(r)
			if j, ok := first[s]; !ok {
				first[s] = i
			} else if j != i {
				shared[s] = j
			}
		}
	}
	return shared
}

// withoutConflicts leaves out objects that want to send the same packets
// elsewhere than an older one does. The objects are in the order of their age.
func (h *host) withoutConflicts(objects []routeObject) []routeObject {
	type target struct {
		table string // of those that have a number: all packets that come there
		s     selector
		dst   netip.Prefix
		// priority that the rule's author chose; another one is another place
		// in the order.
		priority uint32
	}
	type owner struct {
		route netstate.Route
		ref   cluster.Ref
	}
	owners := map[target]owner{}
	targetsOf := func(o routeObject, r routeRule, route netstate.Route) []target {
		targets := []target{{s: selectorOf(r), dst: route.Dst, priority: r.explicit}}
		if o.shares() {
			targets = append(targets, target{table: o.Table, dst: route.Dst})
		}
		return targets
	}
	return slices.DeleteFunc(objects, func(o routeObject) bool {
		var problems []string
		for _, r := range o.rules {
			for _, route := range r.routes {
				for _, t := range targetsOf(o, r, route) {
					if other, taken := owners[t]; taken && other.route != route {
						problems = append(problems, fmt.Sprintf("spec.table.rules: %s sends the same packets to %s another way; change or delete one of the two",
							other.ref, route.Dst))
					}
				}
			}
		}
		if len(problems) > 0 {
			h.refuse(o.Meta, "%s", strings.Join(slices.Compact(problems), "; "))
			return true
		}
		for _, r := range o.rules {
			for _, route := range r.routes {
				for _, t := range targetsOf(o, r, route) {
					if _, taken := owners[t]; !taken {
						owners[t] = owner{route, o.Ref}
					}
				}
			}
		}
		return false
	})
}

// filtered says which route of an object leads packets of the tunnel where its
// reverse-path filter, which the kernel has for IPv4, drops them. Those of the
// gateway itself may go there.
func (h *host) filtered(o routeObject) string {
	for i, r := range o.rules {
		if r.OIF != "" || r.IIF != "" && r.IIF != TunnelInterface {
			continue
		}
		for j, route := range r.routes {
			if h.noWayBack != "" && route.Dev == h.noWayBack && route.Dst.Addr().Is4() {
				return fmt.Sprintf("spec.table.rules[%d].routes[%d].dev: what comes out of %s is not led out by %s: nothing comes back there (rp_filter); "+
					"for that write the link to a node, liqo.NODE, with the node's address in the internal CIDR as gw and onlink: true",
					i, j, TunnelInterface, h.noWayBack)
			}
		}
	}
	return ""
}

// compileRoutes compiles the rules of one object, as far as that needs no
// other object.
func (h *host) compileRoutes(rc cluster.RouteConfiguration) (routeObject, []string) {
	o := routeObject{RouteConfiguration: rc}
	var problems []string
	complain := func(field, format string, args ...any) {
		problems = append(problems, field+": "+fmt.Sprintf(format, args...))
	}
	if rc.Table == "" {
		complain("spec.table.name", "is empty; write a name, that of the object for instance")
	}
	if n, ok := numbered(rc.Table); ok && kernelTable(n) {
		hasRoutes := slices.ContainsFunc(rc.Rules, func(r cluster.RouteRule) bool { return len(r.Routes) > 0 })
		if hasRoutes || n != TableMain {
			complain("spec.table.name", "%s is a table of the kernel; rules without routes may lead to the main table, %d, for all else write another name", rc.Table, TableMain)
		}
	}
	type place struct {
		field string
		route netstate.Route
	}
	places := map[netip.Prefix]place{} // the table holds one route to each
	var anyIPv4, anyIPv6 bool
	for i, rule := range rc.Rules {
		field := fmt.Sprintf("spec.table.rules[%d]", i)
		r := routeRule{
			Rule: netstate.Rule{
				Src: selecting(rule.Src), Dst: selecting(rule.Dst),
				IIF: rule.IIF, OIF: rule.OIF, Mark: rule.Mark,
			},
			explicit: rule.Priority,
		}
		for _, d := range []struct{ name, dev string }{{"iif", rule.IIF}, {"oif", rule.OIF}} {
			if p := linkNameProblem(d.dev); d.dev != "" && p != "" {
				complain(field+"."+d.name, "%q %s", d.dev, p)
			}
		}
		if rule.IIF != "" && rule.IIF != loopback && rule.OIF != "" {
			complain(field+".oif", "%q is for packets of this host, and iif %q is for those of others: no packet is both; leave one of the two out", rule.OIF, rule.IIF)
		}
		family := 0 // bits of an address; 0: both
		switch {
		case rule.Src.IsValid() && rule.Dst.IsValid() && rule.Src.Addr().BitLen() != rule.Dst.Addr().BitLen():
			complain(field, "src %s and dst %s are of different families; write two rules", rule.Src, rule.Dst)
		case rule.Dst.IsValid():
			family = rule.Dst.Addr().BitLen()
		case rule.Src.IsValid():
			family = rule.Src.Addr().BitLen()
		}
		for j, tr := range rule.Routes {
			field := fmt.Sprintf("%s.routes[%d]", field, j)
			route, text := h.compileRoute(tr)
			if text != "" {
				problems = append(problems, field+text)
				continue
			}
			if why := h.noWay(tr); why != "" && !slices.Contains(o.without, why) {
				o.without = append(o.without, why)
			}
			if family != 0 && route.Dst.Addr().BitLen() != family {
				complain(field+".dst", "%s is not of the family of its rule; move it to a rule of its own", route.Dst)
				continue
			}
			if other, taken := places[route.Dst]; taken && other.route != route {
				complain(field+".dst", "%s is in %s too, with another next hop; a table has one route to a destination", route.Dst, other.field)
				continue
			}
			places[route.Dst] = place{field, route}
			r.routes = append(r.routes, route)
			r.ipv4 = r.ipv4 || route.Dst.Addr().Is4()
			r.ipv6 = r.ipv6 || route.Dst.Addr().Is6()
		}
		anyIPv4, anyIPv6 = anyIPv4 || r.ipv4, anyIPv6 || r.ipv6
		if family != 0 {
			r.ipv4, r.ipv6 = family == 32, family == 128
		}
		o.rules = append(o.rules, r)
	}
	// A rule without routes leads to those of the others.
	for i := range o.rules {
		if r := &o.rules[i]; !r.ipv4 && !r.ipv6 {
			r.ipv4, r.ipv6 = anyIPv4 || !anyIPv6, anyIPv6
		}
	}
	return o, problems
}

// compileRoute compiles one route. The text is "" or what is wrong, beginning
// with the name of the field.
func (h *host) compileRoute(tr cluster.TableRoute) (netstate.Route, string) {
	r := netstate.Route{Dst: tr.Dst.Masked(), Via: tr.Via, Src: tr.Src, Dev: tr.Dev}
	if !tr.Dst.IsValid() {
		return r, ".dst: is empty; write a CIDR, 0.0.0.0/0 for all of IPv4"
	}
	family := tr.Dst.Addr().BitLen()
	switch tr.Scope {
	case "", "global":
	case "site", "link", "host", "nowhere":
		r.Scope = netstate.Scope(tr.Scope)
	default:
		return r, fmt.Sprintf(".scope: %q is not a scope; write global, site, link, host or nowhere", tr.Scope)
	}
	if tr.Via.IsValid() {
		if !station(tr.Via) {
			return r, fmt.Sprintf(".gw: %s is not the address of another host; write that of the next hop", tr.Via)
		}
		if tr.Via.BitLen() != family {
			return r, fmt.Sprintf(".gw: %s is not of the family of dst %s", tr.Via, tr.Dst)
		}
		if r.Scope == netstate.ScopeLink || r.Scope == netstate.ScopeHost || r.Scope == netstate.ScopeNowhere {
			return r, fmt.Sprintf(".scope: %s is for routes without gw; leave it out", tr.Scope)
		}
		r.OnLink = tr.OnLink
		if r.Dev == "" {
			// The other end of a link of ours, or who is behind it: there is
			// no other route to it.
			hop, ok := h.hops[tr.Via]
			switch {
			case !ok:
				return r, fmt.Sprintf(".gw: %s is not the other end of a link of this host; write dev, too", tr.Via)
			}
			r.Via, r.Dev, r.OnLink = hop.via, hop.dev, hop.onLink
			if !r.Src.IsValid() {
				r.Src = hop.src
			}
		}
	} else if tr.OnLink {
		return r, ".onlink: is for routes with gw; write gw, or leave onlink out"
	}
	if h.noWay(tr) != "" {
		return netstate.Route{Dst: r.Dst, Type: netstate.Unreachable}, ""
	}
	if tr.Src.IsValid() && tr.Src.BitLen() != family {
		return r, fmt.Sprintf(".src: %s is not of the family of dst %s", tr.Src, tr.Dst)
	}
	if tr.Src.IsValid() && (tr.Src.IsUnspecified() || tr.Src.IsMulticast()) {
		return r, fmt.Sprintf(".src: %s is nobody's address; write one of this host, or leave src out", tr.Src)
	}
	if r.Dev == "" {
		return r, ".dev: is empty; write dev, gw or both"
	}
	if p := linkNameProblem(r.Dev); p != "" {
		return r, fmt.Sprintf(".dev: %q %s", r.Dev, p)
	}
	if r.Dst.Addr().Is6() {
		r.Scope = netstate.ScopeGlobal // the kernel has no scopes for IPv6
	}
	return r, ""
}

// loopback is what rules call the link that the packets of this host's own
// programs come in by.
const loopback = "lo"

// station reports whether an address can be that of one other host.
func station(a netip.Addr) bool {
	return !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// noWay says why a route leads nowhere as yet: the link or the next hop that it
// names is one of ours that is not there. Its packets are refused until it is:
// in the main table they would leave for somewhere else, past the tunnel.
func (h *host) noWay(tr cluster.TableRoute) string {
	if tr.Dev == "" {
		return h.hops[tr.Via].problem
	}
	why, missing := h.missing[tr.Dev]
	if !missing && strings.HasPrefix(tr.Dev, linkPrefix) {
		// The object that asks for it may come a moment later than this one.
		why, missing = "no object that this host knows of asks for it", true
	}
	if missing && !h.hasLink(tr.Dev) {
		return fmt.Sprintf("the link %s is not there: %s", tr.Dev, why)
	}
	return ""
}

// linkPrefix is what the names of links between nodes and gateways begin with.
const linkPrefix = "liqo."

// selecting returns the prefix that a rule looks at: one of length 0 is true
// of all packets, and the kernel does not keep it.
func selecting(p netip.Prefix) netip.Prefix {
	if !p.IsValid() || p.Bits() == 0 {
		return netip.Prefix{}
	}
	return p.Masked()
}
