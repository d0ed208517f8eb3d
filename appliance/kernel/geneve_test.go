package kernel

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

func geneve(name string, vni uint32, remote string) netstate.Link {
	return netstate.Link{
		Name: name, Kind: netstate.KindGeneve, MTU: 1450, Description: "to " + remote, Forwarding: true, RPFilter: 2,
		Geneve: netstate.Geneve{VNI: vni, Remote: addr(remote), Port: 6091},
	}
}

// TestGeneveWalk goes in random order through states of links and what
// hangs on them.
func TestGeneveWalk(t *testing.T) {
	t.Parallel()
	ns, _ := openWith(t, "d0")
	need(t, ns, FeatureGeneve)
	at := func(dev, a string) netstate.Address { return netstate.Address{Dev: dev, Prefix: prefix(a)} }
	route := func(dst, dev string) netstate.Route { return netstate.Route{Table: 90, Dst: prefix(dst), Dev: dev} }
	via := netstate.Route{Table: 90, Dst: prefix("10.2.0.0/16"), Dev: "g1", Via: addr("10.80.0.9"), OnLink: true}
	larger := geneve("g1", 1, "192.0.2.100")
	larger.MTU, larger.RPFilter, larger.MAC = 1400, 0, netstate.MAC{2, 0, 0, 0, 0, 1}
	other := larger
	other.MAC = netstate.MAC{2, 0, 0, 0, 0, 2}
	states := []netstate.State{
		{},
		{Links: []netstate.Link{geneve("g1", 1, "192.0.2.100")}},
		{Links: []netstate.Link{geneve("g1", 1, "192.0.2.100")}, Addresses: []netstate.Address{at("g1", "10.80.0.1/32"), at("g1", "fd80::1/128")}, Routes: []netstate.Route{route("10.1.0.0/16", "g1"), via, route("fd01::/64", "g1")}},
		{Links: []netstate.Link{larger}, Addresses: []netstate.Address{at("g1", "10.80.0.2/32")}, Routes: []netstate.Route{route("10.1.0.0/16", "g1"), via}},
		{Links: []netstate.Link{other}, Addresses: []netstate.Address{at("g1", "10.80.0.2/32")}, Neighbors: []netstate.Neighbor{neighbor("g1", "10.80.0.9", 9), neighbor("g1", "fd80::9", 9)}},
		{Links: []netstate.Link{larger}, Addresses: []netstate.Address{at("g1", "10.80.0.2/32")}, Routes: []netstate.Route{via}, Neighbors: []netstate.Neighbor{neighbor("g1", "10.80.0.9", 8)}},
		// In place: another remote. Anew: another id, another family.
		{Links: []netstate.Link{geneve("g1", 1, "192.0.2.101")}, Addresses: []netstate.Address{at("g1", "10.80.0.1/32")}, Routes: []netstate.Route{via}},
		{Links: []netstate.Link{geneve("g1", 2, "192.0.2.100")}, Addresses: []netstate.Address{at("g1", "10.80.0.1/32")}, Routes: []netstate.Route{via}},
		{Links: []netstate.Link{geneve("g1", 1, "2001:db8::100")}, Addresses: []netstate.Address{at("g1", "10.80.0.1/32")}, Routes: []netstate.Route{route("10.1.0.0/16", "g1")}},
		// Two links that exchange their ids, and the id of a link that goes.
		{Links: []netstate.Link{geneve("g1", 1, "192.0.2.100"), geneve("g2", 2, "192.0.2.100")}, Addresses: []netstate.Address{at("g1", "10.80.0.1/32"), at("g2", "10.80.0.1/32")}},
		{Links: []netstate.Link{geneve("g1", 2, "192.0.2.100"), geneve("g2", 1, "192.0.2.100")}, Addresses: []netstate.Address{at("g1", "10.80.0.1/32"), at("g2", "10.80.0.1/24"), at("g2", "10.80.0.2/24")}},
		{Links: []netstate.Link{geneve("g3", 1, "192.0.2.100")}, Addresses: []netstate.Address{at("g3", "10.80.0.2/24"), at("g3", "10.80.0.3/24")}, Routes: []netstate.Route{route("10.1.0.0/16", "g3")}},
		{Links: []netstate.Link{geneve("g3", 1, "192.0.2.100")}, Addresses: []netstate.Address{at("g3", "10.80.0.3/24")}, Routes: []netstate.Route{route("10.1.0.0/16", "g3")}},
		{Links: []netstate.Link{geneve("g3", 1, "192.0.2.100")}, Routes: []netstate.Route{route("10.1.0.0/16", "g3")}},
	}
	for i := range walkSteps {
		n := rand.IntN(len(states))
		t.Logf("step %d: state %d", i, n)
		converge(t, ns, states[n])
	}
}

// TestGeneveRemoteChangesInPlace looks at the index of the link.
func TestGeneveRemoteChangesInPlace(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t)
	need(t, ns, FeatureGeneve)
	nettest.Need(t, "ip")
	converge(t, ns, netstate.State{Links: []netstate.Link{geneve("g1", 1, "192.0.2.100")}})
	index := func() string { i, _, _ := strings.Cut(test.Run("ip", "-o", "link", "show", "g1"), ":"); return i }
	before := index()
	converge(t, ns, netstate.State{Links: []netstate.Link{geneve("g1", 1, "192.0.2.101")}})
	assert.Equal(t, index(), before)
	assert.Assert(t, strings.Contains(test.Run("ip", "-d", "link", "show", "g1"), "remote 192.0.2.101"))
}

// TestGeneveCarriesPackets joins two namespaces.
func TestGeneveCarriesPackets(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, a, b string }{{"over IPv4", "192.0.2.1", "192.0.2.2"}, {"over IPv6", "2001:db8::1", "2001:db8::2"}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			nsA, a := openWith(t)
			need(t, nsA, FeatureGeneve)
			b := nettest.Another(t)
			var nsB *NetNS
			b.Do(func() { nsB = open(t, Config{}) })
			bits := addr(tt.a).BitLen() - 8
			veth(t, a, b, fmt.Sprintf("%s/%d", tt.a, bits), fmt.Sprintf("%s/%d", tt.b, bits))
			state := func(remote, ours, theirs string) netstate.State {
				return netstate.State{
					Links:     []netstate.Link{geneve("liqo.x", 7, remote)},
					Addresses: []netstate.Address{{Dev: "liqo.x", Prefix: prefix(ours + "/32")}},
					Routes:    []netstate.Route{{Table: 254, Dst: prefix(theirs + "/32"), Dev: "liqo.x", Scope: netstate.ScopeLink}},
				}
			}
			converge(t, nsA, state(tt.b, "10.80.0.1", "10.80.0.2"))
			converge(t, nsB, state(tt.a, "10.80.0.2", "10.80.0.1"))
			in := listen(t, b, netip.MustParseAddrPort("10.80.0.2:4000"))
			out := listen(t, a, netip.MustParseAddrPort("10.80.0.1:0"))
			assert.Equal(t, deliver(t, out, in, netip.MustParseAddrPort("10.80.0.2:4000")).Addr(), addr("10.80.0.1"))
		})
	}
}

// TestGeneveNeighbour: nobody asks who has an address, and the other end of a link
// that was made anew is where it was.
func TestGeneveNeighbour(t *testing.T) {
	t.Parallel()
	nsA, a := openWith(t)
	need(t, nsA, FeatureGeneve)
	nettest.Need(t, "ip")
	b := nettest.Another(t)
	var nsB *NetNS
	b.Do(func() { nsB = open(t, Config{}) })
	veth(t, a, b, "192.0.2.1/24", "192.0.2.2/24")
	mac := netstate.MAC{2, 5: 9}
	state := func(mac netstate.MAC, remote, ours, theirs string) netstate.State {
		l := geneve("liqo.x", 7, remote)
		l.MAC = mac
		return netstate.State{
			Links:     []netstate.Link{l},
			Neighbors: []netstate.Neighbor{{Dev: "liqo.x", Addr: addr(theirs), MAC: netstate.MAC{2, 5: 11 - mac[5]}}},
			Addresses: []netstate.Address{{Dev: "liqo.x", Prefix: prefix(ours + "/32")}},
			Routes:    []netstate.Route{{Table: 254, Dst: prefix(theirs + "/32"), Dev: "liqo.x", Scope: netstate.ScopeLink}},
		}
	}
	converge(t, nsA, state(netstate.MAC{2, 5: 2}, "192.0.2.2", "10.80.0.1", "10.80.0.2"))
	converge(t, nsB, state(mac, "192.0.2.1", "10.80.0.2", "10.80.0.1"))
	for _, side := range []*nettest.NS{a, b} {
		side.Run("nft", "add table arp asked; add chain arp asked in { type filter hook input priority 0; }; add rule arp asked in iifname liqo.x counter drop")
	}
	for range 2 {
		in := listen(t, b, netip.MustParseAddrPort("10.80.0.2:4000"))
		out := listen(t, a, netip.MustParseAddrPort("10.80.0.1:0"))
		assert.Equal(t, deliver(t, out, in, netip.MustParseAddrPort("10.80.0.2:4000")).Addr(), addr("10.80.0.1"))
		in.Close()
		b.Run("ip", "link", "del", "liqo.x")
		converge(t, nsB, state(mac, "192.0.2.1", "10.80.0.2", "10.80.0.1"))
	}
}

// TestGeneveByHand changes links of ours behind our back.
func TestGeneveByHand(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t)
	need(t, ns, FeatureGeneve)
	nettest.Need(t, "ip")
	want := netstate.State{
		Links:     []netstate.Link{geneve("g1", 1, "192.0.2.100")},
		Neighbors: []netstate.Neighbor{neighbor("g1", "10.80.0.9", 9)},
		Addresses: []netstate.Address{{Dev: "g1", Prefix: prefix("10.80.0.1/32")}, {Dev: "g1", Prefix: prefix("fd80::1/128")}},
		Routes:    []netstate.Route{{Table: 90, Dst: prefix("10.1.0.0/16"), Dev: "g1"}, {Table: 90, Dst: prefix("fd01::/64"), Dev: "g1"}},
	}
	converge(t, ns, want)
	for _, argv := range [][]string{
		{"ip", "link", "del", "g1"},
		{"ip", "link", "set", "g1", "down"},
		{"ip", "link", "set", "g1", "type", "geneve", "id", "1", "remote", "192.0.2.200"},
		{"ip", "link", "set", "g1", "mtu", "1300"},
		{"ip", "addr", "del", "10.80.0.1/32", "dev", "g1"},
		{"ip", "addr", "add", "10.80.0.7/32", "dev", "g1"},
		{"ip", "neigh", "del", "10.80.0.9", "dev", "g1"},
		{"ip", "neigh", "replace", "10.80.0.9", "lladdr", "02:00:00:00:00:08", "dev", "g1", "nud", "permanent"},
		{"ip", "neigh", "add", "10.80.0.10", "lladdr", "02:00:00:00:00:0a", "dev", "g1", "nud", "permanent"},
	} {
		t.Run(strings.Join(argv, " "), func(t *testing.T) {
			test.Run(argv...)
			<-ns.Changed()
			assert.Assert(t, !netstate.Diff(observe(t, ns), want).Empty(), "the change was not seen")
			converge(t, ns, want)
			quiet(t, ns, want)
		})
	}
}
