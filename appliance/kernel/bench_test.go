package kernel

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// BenchmarkRoutes measures the first pass for 10,000 routes and a pass that
// finds nothing to do.
func BenchmarkRoutes(b *testing.B) {
	ns, _ := openWith(b, "d0")
	var want netstate.State
	for i := range 10_000 {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0})
		want.Routes = append(want.Routes, netstate.Route{Table: 90, Dst: netip.PrefixFrom(a, 24), Dev: "d0"})
	}
	benchmarkPasses(b, ns, want)
}

// BenchmarkFirewall measures the same for one table with 5,000 rules.
func BenchmarkFirewall(b *testing.B) {
	ns, _ := openWith(b)
	need(b, ns, FeatureNFTables, FeatureNAT)
	c := netstate.Chain{Name: "prerouting", Type: "nat", Hook: "prerouting", Priority: -100}
	for i := range 5_000 {
		external := netip.AddrFrom4([4]byte{10, 70, byte(i >> 8), byte(i)})
		internal := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		c.Rules = append(c.Rules, netstate.FirewallRule{
			Name:    fmt.Sprintf("ip-%d", i),
			Matches: []netstate.Match{{Dir: "dst", Addr: netstate.AddrRange{From: external, To: external}}},
			Action:  netstate.Action{Kind: netstate.DNAT, To: netip.PrefixFrom(internal, 32)},
		})
	}
	benchmarkPasses(b, ns, netstate.State{Tables: []netstate.Table{{Family: netstate.FamilyIPv4, Name: "ips", Chains: []netstate.Chain{c}}}})
}

// BenchmarkStations measures the same for the neighbours, forwarding entries
// and routes of a node with 1,000 others.
func BenchmarkStations(b *testing.B) {
	ns, _ := openWith(b)
	need(b, ns, FeatureVXLAN)
	benchmarkPasses(b, ns, stations(1_000))
}

// stations is the state of a node with n others.
func stations(n int) netstate.State {
	want := netstate.State{
		Links:     []netstate.Link{vxlan("x1", 1, "192.0.2.1")},
		Addresses: []netstate.Address{{Dev: "x1", Prefix: prefix("10.80.255.1/32")}},
	}
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, 80, byte(i >> 8), byte(i)})
		want.Neighbors = append(want.Neighbors, netstate.Neighbor{Dev: "x1", Addr: a, MAC: station(i)})
		want.FDB = append(want.FDB, netstate.FDBEntry{Dev: "x1", MAC: station(i), Remote: netip.AddrFrom4([4]byte{172, 18, byte(i >> 8), byte(i)})})
		want.Routes = append(want.Routes, netstate.Route{
			Table: 90, Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(128 + i>>8), byte(i), 0}), 24), Dev: "x1", Via: a, OnLink: true,
		})
	}
	return want
}

func benchmarkPasses(b *testing.B, ns *NetNS, want netstate.State) {
	pass := func(s netstate.State) int {
		have, err := ns.Observe(context.Background())
		assert.NilError(b, err)
		c := netstate.Diff(have, s)
		assert.NilError(b, ns.Apply(context.Background(), c))
		return c.Len()
	}
	b.Run("first", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			pass(netstate.State{})
			b.StartTimer()
			assert.Assert(b, pass(want) > 0)
		}
	})
	b.Run("no-op", func(b *testing.B) {
		pass(want)
		for b.Loop() {
			assert.Equal(b, pass(want), 0)
		}
	})
	b.Run("remove", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			pass(want)
			b.StartTimer()
			pass(netstate.State{})
		}
	})
}
