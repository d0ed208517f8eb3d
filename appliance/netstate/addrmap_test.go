package netstate

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// entry is written as in nft(8), without the new address for masquerade.
func entry(key, to string) MapEntry {
	e := MapEntry{Addr: RangeOf(prefix(key))}
	if to != "" {
		e.To = prefix(to)
	}
	return e
}

// marked is an entry of a map for marks.
func marked(key, link string, mark uint32) MapEntry {
	return MapEntry{Addr: RangeOf(prefix(key)), Link: link, Mark: mark}
}

// natTable is a table with one rule, in a chain of type nat if that is what the
// action is for.
func natTable(f Family, hook string, a Action, ms ...Match) Table {
	kind := "nat"
	if a.Kind == SetCTMark {
		kind = "filter"
	}
	return Table{Family: f, Name: "t", Chains: []Chain{{Name: "c", Type: kind, Hook: hook, Rules: []FirewallRule{{Name: "r", Matches: ms, Action: a}}}}}
}

func TestMapText(t *testing.T) {
	one, two := entry("10.70.0.7/32", "192.168.40.10/32"), entry("10.70.0.8/32", "192.168.40.11/32")
	one.Name = "ip-1"
	for _, tt := range []struct {
		family Family
		hook   string
		action Action
		want   string
	}{
		{FamilyIPv4, "prerouting", Action{Kind: DNAT, Map: AddrMap{Dir: "dst", Entries: []MapEntry{one, two}}},
			`dnat to ip daddr map { 10.70.0.7 comment "ip-1" : 192.168.40.10, 10.70.0.8 : 192.168.40.11 }`},
		{FamilyINET, "postrouting", Action{Kind: SNAT, Map: AddrMap{Dir: "src", Entries: []MapEntry{entry("fd00::/64", "fd70::1/128")}}},
			`snat ip6 to ip6 saddr map { fd00::/64 : fd70::1 }`},
		{FamilyIPv4, "prerouting", Action{Kind: DNAT, Prefix: true, Map: AddrMap{Dir: "dst", Entries: []MapEntry{entry("10.71.1.0/24", "10.1.1.0/24"), entry("10.71.2.7/32", "10.1.2.7/32")}}},
			`dnat ip prefix to ip daddr map { 10.71.1.0/24 : 10.1.1.0/24, 10.71.2.7 : 10.1.2.7/32 }`},
		{FamilyIPv4, "forward", Action{Kind: SetCTMark, Map: AddrMap{Dir: "src", Entries: []MapEntry{marked("10.80.0.2/32", "", 2), marked("10.80.0.3/32", "", 3)}}},
			`ct mark set ip saddr map { 10.80.0.2 : 0x2, 10.80.0.3 : 0x3 }`},
		{FamilyIPv4, "forward", Action{Kind: SetCTMark, Map: AddrMap{Dir: "src", ByLink: true, Entries: []MapEntry{marked("10.80.0.2/32", "liqo.a", 2)}}},
			`ct mark set iifname . ip saddr map { "liqo.a" . 10.80.0.2 : 0x2 }`},
		{FamilyIPv6, "postrouting", Action{Kind: Masquerade, Map: AddrMap{Dir: "dst", Entries: []MapEntry{entry("fd40::1/128", ""), entry("fd40::2/128", "")}}},
			`ip6 daddr { fd40::1, fd40::2 } masquerade`},
	} {
		table := natTable(tt.family, tt.hook, tt.action)
		assert.NilError(t, table.Validate())
		assert.Check(t, is.Contains(table.String(), "\t\t"+tt.want+` comment "r"`+"\n"))
	}
}

func TestValidateMap(t *testing.T) {
	key := entry("10.70.0.7/32", "192.168.40.10/32")
	with := func(kind ActionKind, es ...MapEntry) Action {
		return Action{Kind: kind, Map: AddrMap{Dir: "dst", Entries: es}}
	}
	odd := func(f func(*Action)) Action {
		a := with(DNAT, key)
		f(&a)
		return a
	}
	byLink := func(es ...MapEntry) Action {
		return Action{Kind: SetCTMark, Map: AddrMap{Dir: "src", ByLink: true, Entries: es}}
	}
	alone := func(es ...MapEntry) Action {
		return Action{Kind: SetCTMark, Map: AddrMap{ByLink: true, Entries: es}}
	}
	for _, tt := range []struct {
		action Action
		want   string
	}{
		{with(DNAT, key, key), "map: 10.70.0.7: must come before 10.70.0.7, and have no address in common with it"},
		{with(DNAT, entry("10.70.0.0/24", "10.1.0.1/32"), key), "must come before 10.70.0.0/24"},
		{with(DNAT, entry("10.70.0.9/32", "10.1.0.1/32"), key), "must come before 10.70.0.9"},
		{with(DNAT, entry("10.70.0.7/32", "fd00::1/128")), "10.70.0.7 to fd00::1/128: not of one IP family"},
		{with(DNAT, entry("fd00::7/128", "fd00::1/128")), "fd00::7: the rule is about the other IP family"},
		{with(DNAT, entry("10.70.0.7/32", "")), "10.70.0.7: no new address"},
		{with(Masquerade, key), "only at postrouting"},
		{with(Drop, key), "map: drop takes no map"},
		{with(SetCTMark, entry("10.70.0.7/32", "10.1.0.1/32")), "10.70.0.7: ct mark set takes no address"},
		{with(DNAT, MapEntry{Addr: key.Addr, To: key.To, Mark: 1}), "10.70.0.7: dnat takes no mark"},
		{with(SetCTMark, marked("10.70.0.7/32", "liqo.a", 1)), `10.70.0.7: link "liqo.a": must be the name of one link where the map is by link, and empty elsewhere`},
		{odd(func(a *Action) { a.Map.ByLink = true }), "map: dnat in prerouting takes no map by link"},
		{byLink(marked("10.70.0.7/32", "", 1)), `10.70.0.7: link "": must be`},
		{byLink(marked("10.70.0.7/32", "liqo.*", 1)), `10.70.0.7: link "liqo.*": must be`},
		{byLink(marked("10.70.0.0/24", "liqo.a", 1)), "10.70.0.0/24: must be one address where the map is by link"},
		{alone(MapEntry{Link: "liqo.b", Mark: 1}, MapEntry{Link: "liqo.a", Mark: 2}), "liqo.a: must come before liqo.b, and be there once"},
		{alone(MapEntry{Link: "liqo.a", Mark: 1}, MapEntry{Link: "liqo.a", Mark: 2}), "liqo.a: must come before liqo.a"},
		{alone(MapEntry{Link: "liqo.*", Mark: 1}), `link "liqo.*": must be the name of one link`},
		{alone(MapEntry{Mark: 1}), `link "": must be the name of one link`},
		{alone(marked("10.70.0.7/32", "liqo.a", 1)), "liqo.a: a map by the link alone has no addresses"},
		{alone(MapEntry{Link: "liqo.a", Name: "a\"b"}), "without quote"},
		{Action{Kind: SetCTMark, Map: AddrMap{Entries: []MapEntry{{Link: "liqo.a"}}}}, `map: position "": must be src or dst`},
		{Action{Kind: SetCTMark, Mark: 1, Map: AddrMap{Dir: "src", Entries: []MapEntry{marked("10.70.0.7/32", "", 1)}}}, "map: mark 0x1: the map says it"},
		{with(DNAT, MapEntry{Addr: AddrRange{addr("10.0.0.2"), addr("10.0.0.1")}}), "map: 10.0.0.2-10.0.0.1: not a range"},
		{odd(func(a *Action) { a.Map.Dir = "in" }), `map: position "in": must be src or dst`},
		{odd(func(a *Action) { a.To = prefix("10.0.0.1/32") }), "map: to 10.0.0.1/32: the map says it"},
		{odd(func(a *Action) { a.Map.Entries[0].Name = "a\"b" }), "without quote"},
	} {
		assert.Check(t, is.ErrorContains(natTable(FamilyIPv4, "prerouting", tt.action).Validate(), tt.want))
	}
	masquerade := with(Masquerade, key)
	assert.Check(t, is.ErrorContains(natTable(FamilyIPv4, "postrouting", masquerade).Validate(), "10.70.0.7: masquerade takes no address"))
	assert.Check(t, is.ErrorContains(natTable(FamilyIPv4, "output", byLink(marked("10.70.0.7/32", "liqo.a", 1))).Validate(), "ct mark set in output takes no map by link"))
	assert.Check(t, is.ErrorContains(natTable(FamilyBridge, "forward", Action{Kind: SetCTMark, Map: AddrMap{Dir: "src", Entries: []MapEntry{marked("10.70.0.7/32", "", 1)}}}).Validate(), "takes no map in a table of family bridge"))
	counted := natTable(FamilyIPv4, "prerouting", with(DNAT, key))
	counted.Chains[0].Rules[0].Counter = true
	assert.Check(t, is.ErrorContains(counted.Validate(), "counter: it would count what is not in the map"))
}

// TestMapByLinkAlone: the link that a packet came in by says its mark, whatever its address.
func TestMapByLinkAlone(t *testing.T) {
	m := AddrMap{ByLink: true, Entries: []MapEntry{{Link: "liqo.a", Mark: 1}, {Link: "liqo.b", Mark: 2, Name: "b"}}}
	table := natTable(FamilyINET, "prerouting", Action{Kind: SetCTMark, Map: m})
	assert.NilError(t, table.Validate())
	assert.Assert(t, is.Contains(table.String(), `ct mark set iifname . meta protocol map { "liqo.a" . ip : 0x1, "liqo.b" . ip comment "b" : 0x2 }`))
	for link, want := range map[string]uint32{"liqo.a": 1, "liqo.b": 2, "liqo.c": 0, "": 0} {
		e, found := m.Find(addr("10.0.0.1"), link)
		assert.Equal(t, e.Mark, want)
		assert.Equal(t, found, want != 0)
	}
	_, found := m.Find(addr("fd00::1"), "liqo.a")
	assert.Assert(t, !found, "the other family")
}

// TestMapFinds compares the search in a map with a walk through it, and shows
// that a table with another map is another one: another digest, to be replaced
// whole.
func TestMapFinds(t *testing.T) {
	for range 300 {
		var m AddrMap
		m.Dir = "dst"
		next := 0
		for next < 60 {
			from, to := next+rand.IntN(6), 0
			to = from + rand.IntN(2)*rand.IntN(6)
			m.Entries = append(m.Entries, MapEntry{Addr: AddrRange{last(from), last(to)}, To: prefix(fmt.Sprintf("10.1.0.%d/32", from))})
			next = to + 1
		}
		table := natTable(FamilyIPv4, "prerouting", Action{Kind: DNAT, Map: m})
		assert.NilError(t, table.Validate())
		for i := range 80 {
			var want MapEntry
			for _, e := range m.Entries {
				if !last(i).Less(e.Addr.From) && !e.Addr.To.Less(last(i)) {
					want = e
				}
			}
			got, found := m.Find(last(i), "")
			assert.Equal(t, got, want)
			assert.Equal(t, found, want.To.IsValid())
		}
		other := table
		other.Chains = natTable(FamilyIPv4, "prerouting", Action{Kind: DNAT, Map: AddrMap{Dir: "dst", Entries: append([]MapEntry{}, m.Entries...)}}).Chains
		observed := table
		observed.Seen = table.Digest()
		assert.Assert(t, Diff(State{Tables: []Table{observed}}, State{Tables: []Table{other}}).Empty())
		other.Chains[0].Rules[0].Action.Map.Entries[rand.IntN(len(m.Entries))].To = prefix("10.2.0.1/32")
		assert.Equal(t, len(Diff(State{Tables: []Table{observed}}, State{Tables: []Table{other}}).SetTables), 1)
	}
}

func last(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}) }
