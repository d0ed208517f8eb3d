package trace

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// loopback is what rules call the place that a host's own packets come from.
const loopback = "lo"

// A flow is what a routing decision looks at.
type flow struct {
	src, dst netip.Addr // src invalid: not chosen yet
	iif      string
	mark     uint32
}

// A decision is what came of a lookup: a route, and the rule that led to it.
type decision struct {
	rule  netstate.Rule
	route netstate.Route
	err   string // why there is no way; empty: there is one
}

// String returns the decision in one line.
func (d decision) String() string {
	if d.err != "" {
		return d.err
	}
	return "rule " + d.rule.String() + ": " + d.route.String()
}

// next is who the packet is handed to on the link.
func (d decision) next(dst netip.Addr) netip.Addr {
	if d.route.Via.IsValid() {
		return d.route.Via
	}
	return dst
}

// lookup asks the rules in the order of their priorities for a route. The
// kernel's rule 0, which leads to the host's own addresses, has been asked
// before.
func (h *host) lookup(f flow) decision {
	skipTo := uint32(0) // the priority that a rule has led to
	for _, r := range h.rules {
		if r.Priority < skipTo || !selects(r, f) || r.Nop {
			continue
		}
		switch {
		case r.Unreachable:
			return decision{rule: r, err: fmt.Sprintf("unreachable by rule %s", r)}
		case r.Goto != 0:
			if h.hasRule(r.Goto, r.Is6()) {
				skipTo = r.Goto
			}
			continue
		}
		route, ok := longest(h.tables[r.Table], f.dst)
		switch {
		case !ok || route.Type == netstate.Throw: // the next rule
		case route.Type == netstate.Unreachable:
			return decision{rule: r, route: route, err: fmt.Sprintf("unreachable by route %s, rule %s", route, r)}
		default:
			return decision{rule: r, route: route}
		}
	}
	return decision{err: "unreachable: no route to " + f.dst.String()}
}

// hasRule reports whether there is a rule of a priority. The kernel ignores one
// that leads to a priority without rules (fib_rules_lookup).
func (h *host) hasRule(priority uint32, v6 bool) bool {
	return slices.ContainsFunc(h.rules, func(r netstate.Rule) bool { return r.Priority == priority && r.Is6() == v6 })
}

// selects reports whether a rule is for a packet (fib_rule_match).
func selects(r netstate.Rule, f flow) bool {
	return r.Is6() == f.dst.Is6() && fits(r, f) != r.Not
}

// fits reports whether a packet is what the selectors of a rule say.
func fits(r netstate.Rule, f flow) bool {
	if r.OIF != "" || r.IIF != "" && r.IIF != f.iif {
		return false
	}
	if r.Dst.IsValid() && !r.Dst.Contains(f.dst) {
		return false
	}
	if r.Src.IsValid() && r.Src.Bits() > 0 && !r.Src.Contains(f.src) {
		return false
	}
	mask := r.Mask
	if mask == 0 && r.Mark != 0 {
		mask = ^uint32(0)
	}
	return f.mark&mask == r.Mark
}

// longest returns the route of the longest prefix; of several, that of the
// lowest metric.
func longest(routes []netstate.Route, dst netip.Addr) (best netstate.Route, ok bool) {
	for _, r := range routes {
		if !r.Dst.Contains(dst) {
			continue
		}
		if !ok || r.Dst.Bits() > best.Dst.Bits() || r.Dst.Bits() == best.Dst.Bits() && r.Metric < best.Metric {
			best, ok = r, true
		}
	}
	return best, ok
}

// mtu is the size of what the route lets through.
func (h *host) mtu(r netstate.Route) int {
	if r.MTU > 0 {
		return r.MTU
	}
	return h.links[r.Dev].MTU
}

// sourceFor chooses the source of a packet that the host itself sends, or
// masquerades.
func (h *host) sourceFor(d decision, dst netip.Addr) netip.Addr {
	if d.route.Src.IsValid() {
		return d.route.Src
	}
	return h.addressOf(d.route.Dev, d.next(dst))
}

// addressOf returns the address of a link that is best for a next hop: one of
// its network, else the link's first, else the first of any link
// (inet_select_addr).
func (h *host) addressOf(dev string, next netip.Addr) netip.Addr {
	var first, any netip.Addr
	for _, a := range h.addrs {
		addr := a.Prefix.Addr()
		switch {
		case addr.Is6() != next.Is6() || addr.IsLoopback():
			continue
		case a.Dev != dev:
			if !any.IsValid() {
				any = addr
			}
		case a.Prefix.Contains(next):
			return addr
		case !first.IsValid():
			first = addr
		}
	}
	if first.IsValid() {
		return first
	}
	return any
}

// spoofed says why the reverse-path filter of a link drops a packet; empty:
// it does not (__fib_validate_source). out is the link that the packet is
// about to leave by, "lo" where it is for the host itself.
func (h *host) spoofed(p Packet, in, out string) string {
	if p.Is6() {
		return "" // the kernel has no such filter for IPv6
	}
	if dev, own := h.local[p.Src]; own {
		if h.links[in].AcceptLocal {
			return ""
		}
		return fmt.Sprintf("its source %s is an address of this host (%s)", p.Src, dev)
	}
	mode := h.links[in].rpFilter
	if mode == 0 {
		return ""
	}
	back := h.lookup(flow{src: p.Dst, dst: p.Src, iif: out})
	switch {
	case back.err != "":
		return fmt.Sprintf("rp_filter %d of %s: no way back to %s: %s", mode, in, p.Src, back.err)
	case mode == 1 && back.route.Dev != in:
		return fmt.Sprintf("rp_filter 1 of %s: the way back to %s is by %s", in, p.Src, back.route.Dev)
	}
	return ""
}

// forwards reports whether a link's packets may go on to another host.
func (h *host) forwards(dev string, v6 bool) bool {
	if v6 {
		return h.Around.Forwarding6
	}
	return h.links[dev].forwarding
}
