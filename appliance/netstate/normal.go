package netstate

import (
	"cmp"
	"net/netip"
	"slices"
)

// Normalized returns the state in the one form in which equal states are
// deeply equal: sorted, without duplicates, prefixes masked, and without the
// differences in writing that mean the same to the kernel. The original is
// not changed.
func (s State) Normalized() State {
	out := State{
		Links:     normalize(s.Links, Link.normal, compareLinks),
		Settings:  normalize(s.Settings, func(v Setting) Setting { return v }, compareSettings),
		Addresses: normalize(s.Addresses, Address.normal, compareAddresses),
		FDB:       normalize(s.FDB, FDBEntry.normal, compareFDB),
		Neighbors: normalize(s.Neighbors, Neighbor.normal, compareNeighbors),
		Routes:    normalize(s.Routes, Route.normal, compareRoutes),
		Rules:     normalize(s.Rules, Rule.normal, compareRules),
	}
	for _, w := range s.WireGuard {
		out.WireGuard = append(out.WireGuard, w.normal())
	}
	slices.SortFunc(out.WireGuard, func(a, b WireGuard) int { return cmp.Compare(a.Dev, b.Dev) })
	out.Tables = slices.Clone(s.Tables) // the order of chains and rules has a meaning
	slices.SortFunc(out.Tables, func(a, b Table) int { return compareTableIDs(a.ID(), b.ID()) })
	return out
}

func normalize[T comparable](s []T, normal func(T) T, compare func(a, b T) int) []T {
	if len(s) == 0 {
		return nil
	}
	out := make([]T, len(s))
	for i, v := range s {
		out[i] = normal(v)
	}
	slices.SortFunc(out, compare)
	return slices.Compact(out)
}

func (l Link) normal() Link {
	if l.Kind != KindGeneve {
		l.Geneve = Geneve{}
	}
	if l.Kind != KindVXLAN {
		l.VXLAN = VXLAN{}
	}
	l.Geneve.Remote, l.VXLAN.Local = l.Geneve.Remote.Unmap(), l.VXLAN.Local.Unmap()
	return l
}

func (a Address) normal() Address {
	a.Prefix = unmap(a.Prefix)
	return a
}

// normal writes a route as the kernel reports it.
func (r Route) normal() Route {
	r.Dst = unmap(r.Dst).Masked()
	r.Via = r.Via.Unmap()
	r.Src = r.Src.Unmap()
	if r.Type == Unreachable || r.Type == Throw {
		r.Dev, r.Via, r.Scope = "", netip.Addr{}, ScopeGlobal
	}
	if !r.Via.IsValid() {
		r.OnLink = false
	}
	if r.Dst.Addr().Is6() {
		r.Scope = ScopeGlobal // IPv6 knows no scopes of routes
	}
	return r
}

// normal writes a rule as the kernel reports it.
func (r Rule) normal() Rule {
	for _, p := range []*netip.Prefix{&r.Src, &r.Dst} {
		if !p.IsValid() {
			continue
		}
		*p = unmap(*p).Masked()
		r.IPv6 = p.Addr().Is6()
		if p.Bits() == 0 {
			*p = netip.Prefix{}
		}
	}
	if r.Src.IsValid() || r.Dst.IsValid() {
		r.IPv6 = false
	}
	if r.Mask == ^uint32(0) {
		r.Mask = 0
	}
	if !r.looksUp() {
		r.Table = 0
	}
	return r
}

// looksUp reports whether the rule leads to a table.
func (r Rule) looksUp() bool { return !r.Unreachable && !r.passes() }

// passes reports whether the rule leads behind others, or is where one leads to.
func (r Rule) passes() bool { return r.Goto != 0 || r.Nop }

// Is6 reports whether the rule is one of IPv6.
func (r Rule) Is6() bool {
	switch {
	case r.Src.IsValid():
		return r.Src.Addr().Is6()
	case r.Dst.IsValid():
		return r.Dst.Addr().Is6()
	default:
		return r.IPv6
	}
}

func (w WireGuard) normal() WireGuard {
	w.Peers = slices.Clone(w.Peers)
	for i := range w.Peers {
		p := &w.Peers[i]
		p.Endpoint = netip.AddrPortFrom(p.Endpoint.Addr().Unmap(), p.Endpoint.Port())
		if !p.Endpoint.Addr().IsValid() {
			p.Endpoint = netip.AddrPort{}
		}
		p.AllowedIPs = normalize(p.AllowedIPs, func(p netip.Prefix) netip.Prefix { return unmap(p).Masked() }, netip.Prefix.Compare)
	}
	slices.SortFunc(w.Peers, func(a, b WireGuardPeer) int { return slices.Compare(a.PublicKey[:], b.PublicKey[:]) })
	return w
}

// unmap turns an IPv4-mapped IPv6 prefix into an IPv4 one.
func unmap(p netip.Prefix) netip.Prefix {
	if !p.Addr().Is4In6() {
		return p
	}
	return netip.PrefixFrom(p.Addr().Unmap(), max(p.Bits()-96, 0))
}

func compareLinks(a, b Link) int { return cmp.Compare(a.Name, b.Name) }

func compareAddresses(a, b Address) int {
	return cmp.Or(cmp.Compare(a.Dev, b.Dev), a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
}

func compareRoutes(a, b Route) int {
	return cmp.Or(cmp.Compare(a.Table, b.Table), a.Dst.Compare(b.Dst), cmp.Compare(a.Metric, b.Metric),
		cmp.Compare(a.Dev, b.Dev), a.Via.Compare(b.Via), a.Src.Compare(b.Src), cmp.Compare(a.Other, b.Other))
}

func compareRules(a, b Rule) int {
	return cmp.Or(cmp.Compare(a.Priority, b.Priority), compareBools(a.Is6(), b.Is6()),
		a.Src.Compare(b.Src), a.Dst.Compare(b.Dst), cmp.Compare(a.IIF, b.IIF), cmp.Compare(a.OIF, b.OIF),
		cmp.Compare(a.Mark, b.Mark), cmp.Compare(a.Mask, b.Mask), cmp.Compare(a.Table, b.Table),
		compareBools(a.Unreachable, b.Unreachable), cmp.Compare(a.Goto, b.Goto), compareBools(a.Nop, b.Nop),
		compareBools(a.Not, b.Not), cmp.Compare(a.Other, b.Other))
}

func compareTableIDs(a, b TableID) int {
	return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Name, b.Name))
}

func compareBools(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	default:
		return 1
	}
}
