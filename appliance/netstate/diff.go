package netstate

import (
	"cmp"
	"net/netip"
	"slices"
)

// Changes turns one State into another. The kernel carries out what adds or
// changes first, in the order of the fields, then what deletes, in reverse.
type Changes struct {
	AddLinks []Link
	// ChangeLinks are changed in place, RecreateLinks deleted and made anew
	// because the kernel can't change what differs; what hung on them is
	// among the things to add.
	ChangeLinks, RecreateLinks []Link
	SetWireGuard               []WireGuard
	SetSettings                []Setting
	AddAddresses               []Address
	SetNeighbors               []Neighbor // added, or replaced where they are
	SetFDB                     []FDBEntry // likewise
	// AddPassRules are rules that lead behind others, and where they lead to: they
	// keep packets from the routes that follow.
	AddPassRules             []Rule
	AddRoutes, ReplaceRoutes []Route
	AddRules                 []Rule
	SetTables                []Table
	Evict                    []Eviction // of SetTables and DeleteTables, after both

	DeleteTables    []TableID
	DeleteRules     []Rule
	DeleteRoutes    []Route
	DeletePassRules []Rule
	DeleteFDB       []FDBEntry
	DeleteNeighbors []Neighbor
	DeleteAddresses []Address
	DeleteLinks     []Link
}

// A TableID identifies an nftables table.
type TableID struct {
	Family Family
	Name   string
}

// ID returns what identifies the table.
func (t Table) ID() TableID { return TableID{t.Family, t.Name} }

// Empty reports whether there is nothing to do.
func (c Changes) Empty() bool { return c.Len() == 0 }

// Len returns the number of single changes. What is evicted is not counted: it
// is part of the change of a table.
func (c Changes) Len() int {
	return len(c.AddLinks) + len(c.ChangeLinks) + len(c.RecreateLinks) + len(c.SetWireGuard) +
		len(c.SetSettings) + len(c.AddAddresses) + len(c.SetNeighbors) + len(c.SetFDB) + len(c.AddPassRules) + len(c.AddRoutes) + len(c.ReplaceRoutes) + len(c.AddRules) + len(c.SetTables) +
		len(c.DeleteTables) + len(c.DeleteRules) + len(c.DeleteRoutes) + len(c.DeletePassRules) +
		len(c.DeleteFDB) + len(c.DeleteNeighbors) + len(c.DeleteAddresses) + len(c.DeleteLinks)
}

// Diff returns the changes that lead from observed to desired, in a fixed
// order. Neither has to be normalised or sorted.
func Diff(observed, desired State) Changes {
	var c Changes
	fresh, flushed := diffLinks(&c, observed.Links, desired.Links)
	// What hung on a link that is deleted or made anew goes with it.
	onFresh := func(dev string) bool { return fresh[dev] }

	diffWireGuard(&c, observed.WireGuard, desired.WireGuard, fresh)
	diffSettings(&c, observed.Settings, desired.Settings)
	c.AddAddresses, c.DeleteAddresses = diffSets(
		without(observed.Addresses, func(a Address) bool { return onFresh(a.Dev) }),
		desired.Addresses, Address.normal, compareAddresses)
	diffNeighbors(&c, without(observed.Neighbors, func(n Neighbor) bool { return onFresh(n.Dev) || flushed[n.Dev] }), desired.Neighbors)
	diffFDB(&c, without(observed.FDB, func(e FDBEntry) bool { return onFresh(e.Dev) }), desired.FDB)
	standing := standingRoutes(c.DeleteLinks, desired.Routes)
	diffRoutes(&c, without(observed.Routes, func(r Route) bool { return r.Dev != "" && onFresh(r.Dev) && !standing(r) }), desired.Routes)
	diffRules(&c, observed.Rules, desired.Rules)
	diffTables(&c, observed.Tables, desired.Tables)
	diffTranslations(&c, observed.Tables, desired.Tables)
	return c
}

// diffRules orders the changes of rules so that no packet takes a way that is
// neither the old nor the new one. Rules come in the order in which they are asked
// and go in reverse: no packet meets a rule that others before it were to keep it
// from. What ends a lookup goes last: without it, packets would leave by the main
// table. Rules that lead behind others are there before these and their routes
// are, and as long; where they lead to is there before them.
func diffRules(c *Changes, observed, desired []Rule) {
	add, remove := diffSets(observed, desired, Rule.normal, compareRules)
	for _, r := range add {
		if r.passes() {
			c.AddPassRules = append(c.AddPassRules, r)
		} else {
			c.AddRules = append(c.AddRules, r)
		}
	}
	for _, r := range remove {
		if r.passes() {
			c.DeletePassRules = append(c.DeletePassRules, r)
		} else {
			c.DeleteRules = append(c.DeleteRules, r)
		}
	}
	slices.SortStableFunc(c.AddPassRules, func(a, b Rule) int { return compareBools(b.Nop, a.Nop) })
	slices.SortFunc(c.DeleteRules, func(a, b Rule) int {
		return cmp.Or(compareBools(a.Unreachable, b.Unreachable), compareRules(b, a))
	})
	slices.SortStableFunc(c.DeletePassRules, func(a, b Rule) int { return compareBools(a.Nop, b.Nop) })
}

// diffLinks returns the names of the observed links that will not be there
// any more as they are: deleted, or deleted and made anew. It also returns
// those that get another MAC: the kernel forgets their neighbours.
func diffLinks(c *Changes, observed, desired []Link) (fresh, flushed map[string]bool) {
	have := make(map[string]Link, len(observed))
	for _, l := range observed {
		have[l.Name] = l.normal()
	}
	fresh, flushed = map[string]bool{}, map[string]bool{}
	seen := map[string]bool{}
	for _, want := range desired {
		want = want.normal()
		if seen[want.Name] {
			continue
		}
		seen[want.Name] = true
		got, ok := have[want.Name]
		delete(have, want.Name)
		if want.MTU == 0 {
			got.MTU = 0
		}
		if want.MAC == (MAC{}) {
			got.MAC = MAC{}
		}
		switch {
		case !ok:
			c.AddLinks = append(c.AddLinks, want)
		case got.Kind != want.Kind || !got.Geneve.changesTo(want.Geneve) || got.VXLAN != want.VXLAN || got.Peer != want.Peer:
			c.RecreateLinks = append(c.RecreateLinks, want)
			fresh[want.Name] = true
		case got != want:
			c.ChangeLinks = append(c.ChangeLinks, want)
			flushed[want.Name] = got.MAC != want.MAC
		}
	}
	for _, l := range have {
		c.DeleteLinks = append(c.DeleteLinks, l)
		fresh[l.Name] = true
	}
	for _, ls := range [][]Link{c.AddLinks, c.ChangeLinks, c.RecreateLinks, c.DeleteLinks} {
		slices.SortFunc(ls, compareLinks)
	}
	return fresh, flushed
}

// changesTo reports whether a Geneve link with the settings g can be given
// the settings w without being made anew: only the remote address can change,
// and only within its family.
func (g Geneve) changesTo(w Geneve) bool {
	return g.VNI == w.VNI && g.Port == w.Port && g.Remote.Is4() == w.Remote.Is4()
}

func diffWireGuard(c *Changes, observed, desired []WireGuard, fresh map[string]bool) {
	have := make(map[string]WireGuard, len(observed))
	for _, w := range observed {
		if !fresh[w.Dev] {
			have[w.Dev] = w.normal()
		}
	}
	for _, want := range desired {
		want = want.normal()
		if got, ok := have[want.Dev]; !ok || !got.equal(want) {
			c.SetWireGuard = append(c.SetWireGuard, want)
		}
	}
	slices.SortFunc(c.SetWireGuard, func(a, b WireGuard) int { return cmp.Compare(a.Dev, b.Dev) })
}

// equal reports whether w, as observed, is what want asks for.
func (w WireGuard) equal(want WireGuard) bool {
	return w.PublicKey == want.PublicKey &&
		(want.ListenPort == 0 || w.ListenPort == want.ListenPort) &&
		slices.EqualFunc(w.Peers, want.Peers, func(a, b WireGuardPeer) bool {
			return a.PublicKey == b.PublicKey && a.PresharedKey == b.PresharedKey && a.Endpoint == b.Endpoint && a.Keepalive == b.Keepalive &&
				slices.Equal(a.AllowedIPs, b.AllowedIPs)
		})
}

// A routeKey is what the kernel allows only once.
type routeKey struct {
	table  uint32
	dst    netip.Prefix
	metric uint32
}

func (r Route) key() routeKey { return routeKey{r.Table, r.Dst, r.Metric} }

// standingRoutes tells which routes by links that are deleted are in the way of
// others: links are deleted last, so these are replaced.
func standingRoutes(deleted []Link, desired []Route) func(Route) bool {
	if len(deleted) == 0 {
		return func(Route) bool { return false }
	}
	wanted := make(map[routeKey]bool, len(desired))
	for _, r := range desired {
		wanted[r.normal().key()] = true
	}
	return func(r Route) bool {
		return wanted[r.normal().key()] && slices.ContainsFunc(deleted, func(l Link) bool { return l.Name == r.Dev })
	}
}

func diffRoutes(c *Changes, observed, desired []Route) {
	c.AddRoutes, c.ReplaceRoutes, c.DeleteRoutes = diffKeyed(observed, desired, Route.normal, Route.key)
	for _, rs := range [][]Route{c.AddRoutes, c.ReplaceRoutes, c.DeleteRoutes} {
		slices.SortFunc(rs, compareRoutes)
	}
	// A gateway is valid only when there is a route to it already: routes
	// without one go first. Compared last, so that the order stays fixed.
	for _, rs := range [][]Route{c.AddRoutes, c.ReplaceRoutes} {
		slices.SortStableFunc(rs, func(a, b Route) int { return cmp.Compare(indirect(a), indirect(b)) })
	}
}

func indirect(r Route) int {
	if r.Via.IsValid() {
		return 1
	}
	return 0
}

func diffTables(c *Changes, observed, desired []Table) {
	have := make(map[TableID]Table, len(observed))
	for _, t := range observed {
		have[t.ID()] = t
	}
	for _, want := range desired {
		got, ok := have[want.ID()]
		delete(have, want.ID())
		if !ok || !got.holds(want) {
			c.SetTables = append(c.SetTables, want)
		}
	}
	for id := range have {
		c.DeleteTables = append(c.DeleteTables, id)
	}
	slices.SortFunc(c.SetTables, func(a, b Table) int { return compareTableIDs(a.ID(), b.ID()) })
	slices.SortFunc(c.DeleteTables, compareTableIDs)
}

// diffKeyed compares two sets of values of which a key allows only one. The
// results are in no order.
func diffKeyed[T, K comparable](observed, desired []T, normal func(T) T, key func(T) K) (add, replace, del []T) {
	have := make(map[K]T, len(observed))
	for _, v := range observed {
		v = normal(v)
		have[key(v)] = v
	}
	seen := make(map[K]bool, len(desired))
	for _, want := range desired {
		want = normal(want)
		k := key(want)
		if seen[k] {
			continue
		}
		seen[k] = true
		got, ok := have[k]
		delete(have, k)
		switch {
		case !ok:
			add = append(add, want)
		case got != want:
			replace = append(replace, want)
		}
	}
	for _, v := range have {
		del = append(del, v)
	}
	return add, replace, del
}

// diffSets compares two sets of comparable values.
func diffSets[T comparable](observed, desired []T, normal func(T) T, compare func(a, b T) int) (add, del []T) {
	have := make(map[T]bool, len(observed))
	for _, v := range observed {
		have[normal(v)] = true
	}
	seen := make(map[T]bool, len(desired))
	for _, v := range desired {
		v = normal(v)
		if !have[v] && !seen[v] {
			add = append(add, v)
		}
		seen[v] = true
	}
	for v := range have {
		if !seen[v] {
			del = append(del, v)
		}
	}
	slices.SortFunc(add, compare)
	slices.SortFunc(del, compare)
	return add, del
}

func without[T any](s []T, drop func(T) bool) []T {
	out := make([]T, 0, len(s))
	for _, v := range s {
		if !drop(v) {
			out = append(out, v)
		}
	}
	return out
}
