package netstate

import (
	"net/netip"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// vxlan returns a link as it is desired.
func vxlan(name string, change ...func(*Link)) Link {
	l := Link{
		Name: name, Kind: KindVXLAN, MTU: 1450, MAC: MAC{2, 0, 10, 80, 0, 1}, Description: "to other nodes",
		VXLAN: VXLAN{VNI: 18952, Local: addr("172.18.1.11"), Port: 4879},
	}
	for _, f := range change {
		f(&l)
	}
	return l
}

func TestDiffOfStations(t *testing.T) {
	mac, other := MAC{2, 0, 0, 0, 0, 1}, MAC{2, 0, 0, 0, 0, 2}
	n, n6 := Neighbor{"x", addr("10.80.0.2"), mac}, Neighbor{"x", addr("fd80::2"), mac}
	moved := Neighbor{"x", n.Addr, other}
	e := FDBEntry{"x", mac, addr("172.18.1.12")}
	elsewhere := FDBEntry{"x", mac, addr("172.18.1.13")}
	unknown1, unknown2 := FDBEntry{"x", MAC{}, e.Remote}, FDBEntry{"x", MAC{}, elsewhere.Remote}
	group1, group2 := FDBEntry{"x", MAC{1, 0, 0x5e}, e.Remote}, FDBEntry{"x", MAC{1, 0, 0x5e}, elsewhere.Remote}
	a := Address{"x", prefix("10.80.0.1/32")}
	on := func(change ...func(*Link)) State {
		return State{Links: []Link{vxlan("x", change...)}, Addresses: []Address{a}, Neighbors: []Neighbor{n, n6}, FDB: []FDBEntry{e}}
	}

	for _, tt := range []struct {
		name              string
		observed, desired State
		want              Changes
	}{
		{"link", State{}, on(), Changes{AddLinks: []Link{vxlan("x")}, AddAddresses: []Address{a}, SetNeighbors: []Neighbor{n, n6}, SetFDB: []FDBEntry{e}}},
		{"as it should be", on(), on(), Changes{}},
		{"the same in other words",
			on(), State{Links: []Link{vxlan("x", func(l *Link) { l.VXLAN.Local = addr("::ffff:172.18.1.11") })}, Addresses: []Address{a},
				Neighbors: []Neighbor{n6, n6, {"x", addr("::ffff:10.80.0.2"), mac}}, FDB: []FDBEntry{{"x", mac, addr("::ffff:172.18.1.12")}, e}}, Changes{}},
		{"link removed, what is on it goes by itself", on(), State{}, Changes{DeleteLinks: []Link{vxlan("x")}}},
		{"link of another id", on(func(l *Link) { l.VXLAN.VNI = 1 }), on(),
			Changes{RecreateLinks: []Link{vxlan("x")}, AddAddresses: []Address{a}, SetNeighbors: []Neighbor{n, n6}, SetFDB: []FDBEntry{e}}},
		{"link with another local address", on(func(l *Link) { l.VXLAN.Local = addr("172.18.1.99") }), on(),
			Changes{RecreateLinks: []Link{vxlan("x")}, AddAddresses: []Address{a}, SetNeighbors: []Neighbor{n, n6}, SetFDB: []FDBEntry{e}}},
		{"link with another port", on(func(l *Link) { l.VXLAN.Port = 4789 }), on(),
			Changes{RecreateLinks: []Link{vxlan("x")}, AddAddresses: []Address{a}, SetNeighbors: []Neighbor{n, n6}, SetFDB: []FDBEntry{e}}},
		{"link of another kind", on(func(l *Link) { l.Kind, l.VXLAN = KindGeneve, VXLAN{} }), on(),
			Changes{RecreateLinks: []Link{vxlan("x")}, AddAddresses: []Address{a}, SetNeighbors: []Neighbor{n, n6}, SetFDB: []FDBEntry{e}}},
		{"link with another MTU", on(func(l *Link) { l.MTU = 1400 }), on(), Changes{ChangeLinks: []Link{vxlan("x")}}},
		{"link with another MAC: the kernel forgets the neighbours", on(func(l *Link) { l.MAC = other }), on(),
			Changes{ChangeLinks: []Link{vxlan("x")}, SetNeighbors: []Neighbor{n, n6}}},
		{"any MAC is good", on(), on(func(l *Link) { l.MAC = MAC{} }), Changes{}},

		{"neighbour moved", State{Neighbors: []Neighbor{n, n6}}, State{Neighbors: []Neighbor{moved, n6}}, Changes{SetNeighbors: []Neighbor{moved}}},
		{"neighbour lost", State{Neighbors: []Neighbor{n}}, State{Neighbors: []Neighbor{n, n6}}, Changes{SetNeighbors: []Neighbor{n6}}},
		{"neighbour too many", State{Neighbors: []Neighbor{n, n6}}, State{Neighbors: []Neighbor{n6}}, Changes{DeleteNeighbors: []Neighbor{n}}},
		{"neighbour on another link", State{Neighbors: []Neighbor{n}}, State{Neighbors: []Neighbor{{"y", n.Addr, mac}}},
			Changes{SetNeighbors: []Neighbor{{"y", n.Addr, mac}}, DeleteNeighbors: []Neighbor{n}}},

		{"station moved", State{FDB: []FDBEntry{e}}, State{FDB: []FDBEntry{elsewhere}}, Changes{SetFDB: []FDBEntry{elsewhere}}},
		{"station lost", State{}, State{FDB: []FDBEntry{e}}, Changes{SetFDB: []FDBEntry{e}}},
		{"station too many", State{FDB: []FDBEntry{e}}, State{}, Changes{DeleteFDB: []FDBEntry{e}}},
		{"hosts for all that is not known, and for a group", State{FDB: []FDBEntry{group2, unknown2, e, unknown1, group1}}, State{FDB: []FDBEntry{e}},
			Changes{DeleteFDB: []FDBEntry{unknown1, unknown2, group1, group2}}},

		{"setting as it should be", State{Settings: []Setting{{"eth0", true}, {"lo", true}}}, State{Settings: []Setting{{"eth0", true}}}, Changes{}},
		{"setting differs", State{Settings: []Setting{{"eth0", false}, {"lo", true}}}, State{Settings: []Setting{{"eth0", true}}}, Changes{SetSettings: []Setting{{"eth0", true}}}},
		{"setting of a link that is not there", State{}, State{Settings: []Setting{{"eth0", false}, {"eth0", false}}}, Changes{SetSettings: []Setting{{"eth0", false}}}},
		{"setting is not taken back", State{Settings: []Setting{{"eth0", true}}}, State{}, Changes{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Diff(tt.observed, tt.desired)
			assert.Equal(t, got.String(), tt.want.String())
			assert.Equal(t, got.Empty(), tt.want.Empty())
			assert.Equal(t, got.Len(), tt.want.Len())
		})
	}
}

func TestLenOfStations(t *testing.T) {
	assert.Equal(t, Changes{SetSettings: make([]Setting, 1), SetNeighbors: make([]Neighbor, 2), SetFDB: make([]FDBEntry, 3)}.Len(), 6)
	assert.Equal(t, Changes{DeleteNeighbors: make([]Neighbor, 1), DeleteFDB: make([]FDBEntry, 2)}.Len(), 3)
}

func TestValidateStations(t *testing.T) {
	mac := MAC{2, 0, 0, 0, 0, 1}
	link := func(f func(*Link)) State { return State{Links: []Link{vxlan("x", f)}} }
	fdb := func(es ...FDBEntry) State { return State{Links: []Link{vxlan("x"), geneve("g")}, FDB: es} }
	neighbors := func(ns ...Neighbor) State {
		return State{Links: []Link{vxlan("x"), geneve("g")}, Neighbors: ns}
	}
	host := addr("172.18.1.12")
	for _, tt := range []struct {
		state State
		want  string
	}{
		{link(func(l *Link) { l.VXLAN.VNI = 1<<24 - 1 }), ""},
		{link(func(l *Link) { l.VXLAN.VNI = 1 << 24 }), "link x: vxlan id 16777216: must be less than 16777216"},
		{link(func(l *Link) { l.VXLAN.Local = netip.Addr{} }), "link x: vxlan local invalid IP: must be a unicast address"},
		{link(func(l *Link) { l.VXLAN.Local = addr("0.0.0.0") }), "vxlan local 0.0.0.0"},
		{link(func(l *Link) { l.VXLAN.Local = addr("ff02::1") }), "vxlan local ff02::1"},
		{link(func(l *Link) { l.VXLAN.Port = 0 }), "link x: vxlan dstport: must not be 0"},
		{link(func(l *Link) { l.MAC = MAC{1} }), "link x: address 01:00:00:00:00:00: must be that of one station"},

		{fdb(FDBEntry{"x", mac, host}, FDBEntry{"x", MAC{2}, host}), ""},
		{fdb(FDBEntry{"x", mac, addr("::ffff:172.18.1.12")}), ""},
		{fdb(FDBEntry{"g", mac, host}), "fdb 02:00:00:00:00:01 dev g dst 172.18.1.12 self permanent: dev is not a vxlan link"},
		{fdb(FDBEntry{"eth0", mac, host}), "dev is not a vxlan link of this state"},
		{fdb(FDBEntry{"x", mac, host}, FDBEntry{"x", mac, addr("172.18.1.13")}), "fdb 02:00:00:00:00:01 dev x dst 172.18.1.13 self permanent: contradicts 02:00:00:00:00:01 dev x dst 172.18.1.12"},
		{fdb(FDBEntry{"x", MAC{}, host}), "the MAC must be that of one station"},
		{fdb(FDBEntry{"x", MAC{1, 0, 0x5e}, host}), "the MAC must be that of one station"},
		{fdb(FDBEntry{"x", mac, addr("224.0.0.1")}), "dst must be the unicast address"},
		{fdb(FDBEntry{"x", mac, netip.Addr{}}), "dst must be the unicast address"},
		{fdb(FDBEntry{"x", mac, addr("2001:db8::2")}), "dst is not of the family of the link's local address 172.18.1.11"},

		{neighbors(Neighbor{"x", addr("10.80.0.2"), mac}, Neighbor{"x", addr("fd80::2"), mac}), ""},
		{neighbors(Neighbor{"g", addr("10.80.0.2"), mac}), ""},
		{neighbors(Neighbor{"eth0", addr("10.80.0.2"), mac}), "neigh 10.80.0.2 dev eth0 lladdr 02:00:00:00:00:01 nud permanent: dev is not a geneve or vxlan link"},
		{neighbors(Neighbor{"x", addr("10.80.0.2"), mac}, Neighbor{"x", addr("::ffff:10.80.0.2"), MAC{2}}), "contradicts 10.80.0.2 dev x lladdr 02:00:00:00:00:01"},
		{neighbors(Neighbor{"x", addr("ff02::1"), mac}), "must be a unicast address"},
		{neighbors(Neighbor{"x", netip.Addr{}, mac}), "must be a unicast address"},
		{neighbors(Neighbor{"x", addr("10.80.0.2"), MAC{}}), "lladdr must be that of one station"},
		{neighbors(Neighbor{"x", addr("10.80.0.2"), MAC{3}}), "lladdr must be that of one station"},

		{State{Settings: []Setting{{"eth0", true}, {"eth1", true}}}, ""},
		{State{Links: []Link{vxlan("x")}, Settings: []Setting{{"x", true}}}, "setting dev x forwarding on: dev is a link of this state"},
		{State{Settings: []Setting{{"eth0", true}, {"eth0", true}}}, "setting dev eth0 forwarding on: there is another of this dev"},
		{State{Settings: []Setting{{"", true}}}, "a link's name has 1 to 15 bytes"},
	} {
		if tt.want == "" {
			assert.Check(t, tt.state.Validate())
			continue
		}
		assert.Check(t, is.ErrorContains(tt.state.Validate(), tt.want))
	}
}

func TestRedirects(t *testing.T) {
	rule := func(f Family, negate bool, ms ...Match) Table {
		ms = append(ms, Match{ICMPRedirect: true, Negate: negate})
		return Table{Family: f, Name: "t", Chains: []Chain{{Name: "c", Type: "filter", Hook: "output", Rules: []FirewallRule{
			{Name: "r", Matches: ms, Action: Action{Kind: Drop}},
		}}}}
	}
	to6 := Match{Dir: "dst", Addr: RangeOf(prefix("fd00::/8"))}
	for _, tt := range []struct {
		table Table
		want  string
	}{
		{rule(FamilyIPv4, false), "icmp type redirect drop"},
		{rule(FamilyIPv4, true), "icmp type != redirect drop"},
		{rule(FamilyIPv6, false), "icmpv6 type nd-redirect drop"},
		{rule(FamilyINET, false, to6), "ip6 daddr fd00::/8 icmpv6 type nd-redirect drop"},
	} {
		assert.Check(t, tt.table.Validate())
		assert.Check(t, is.Contains(tt.table.String(), "\t\t"+tt.want))
	}
	assert.ErrorContains(t, rule(FamilyINET, false).Validate(), "needs an address that tells IPv4 from IPv6")
	both := rule(FamilyIPv4, false)
	both.Chains[0].Rules[0].Matches[0].ICMPError = true
	assert.ErrorContains(t, both.Validate(), "must look at exactly one of")
}

// FuzzDiffStations: whatever is observed and desired, the changes make the one
// of the other.
func FuzzDiffStations(f *testing.F) {
	f.Add(uint64(0), uint64(0))
	f.Add(uint64(0x1234), uint64(0xff00ff))
	// Four bits for each of 16 stations: where it is, 0 for nowhere.
	state := func(bits uint64) (s State) {
		for i := range 16 {
			n := byte(bits >> (4 * i) & 15)
			if n == 0 {
				continue
			}
			s.FDB = append(s.FDB, FDBEntry{"x", MAC{2, byte(i)}, netip.AddrFrom4([4]byte{172, 18, 0, n})})
			s.Neighbors = append(s.Neighbors, Neighbor{"x", netip.AddrFrom4([4]byte{10, 80, 0, byte(i)}), MAC{2, n}})
		}
		return s
	}
	f.Fuzz(func(t *testing.T, observed, desired uint64) {
		have, want := state(observed), state(desired)
		c := Diff(have, want)
		assert.Equal(t, c.Empty(), observed == desired)
		// As the kernel does it: set by key, then delete by key.
		fdb, neighbors := map[fdbKey]FDBEntry{}, map[neighborKey]Neighbor{}
		for _, e := range append(have.FDB, c.SetFDB...) {
			fdb[e.key()] = e
		}
		for _, n := range append(have.Neighbors, c.SetNeighbors...) {
			neighbors[n.key()] = n
		}
		for _, e := range c.DeleteFDB {
			delete(fdb, e.key())
		}
		for _, n := range c.DeleteNeighbors {
			delete(neighbors, n.key())
		}
		var got State
		for _, e := range fdb {
			got.FDB = append(got.FDB, e)
		}
		for _, n := range neighbors {
			got.Neighbors = append(got.Neighbors, n)
		}
		assert.DeepEqual(t, got.Normalized().String(), want.Normalized().String())
	})
}
