package kernel

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

func vxlan(name string, vni uint32, local string) netstate.Link {
	return netstate.Link{
		Name: name, Kind: netstate.KindVXLAN, MTU: 1450, MAC: station(1), Description: "to other nodes", Forwarding: true, RPFilter: 2,
		VXLAN: netstate.VXLAN{VNI: vni, Local: addr(local), Port: 4879},
	}
}

// station returns the n-th MAC of a fixed row.
func station(n int) netstate.MAC { return netstate.MAC{2, 0, 0, 0, byte(n >> 8), byte(n)} }

func entry(dev string, n int, remote string) netstate.FDBEntry {
	return netstate.FDBEntry{Dev: dev, MAC: station(n), Remote: addr(remote)}
}

func neighbor(dev, a string, n int) netstate.Neighbor {
	return netstate.Neighbor{Dev: dev, Addr: addr(a), MAC: station(n)}
}

// overlay is the state of a node with two others.
func overlay() netstate.State {
	return netstate.State{
		Links:     []netstate.Link{vxlan("x1", 1, "192.0.2.1")},
		Settings:  []netstate.Setting{{Dev: "d0", Forwarding: true}},
		Addresses: []netstate.Address{{Dev: "x1", Prefix: prefix("10.80.0.1/32")}},
		Neighbors: []netstate.Neighbor{neighbor("x1", "10.80.0.2", 2), neighbor("x1", "10.80.0.3", 3), neighbor("x1", "fd80::2", 2)},
		FDB:       []netstate.FDBEntry{entry("x1", 2, "192.0.2.102"), entry("x1", 3, "192.0.2.103")},
		Routes:    []netstate.Route{{Table: 90, Dst: prefix("10.2.0.0/16"), Dev: "x1", Via: addr("10.80.0.2"), OnLink: true}},
	}
}

// change returns the state with something changed.
func change(s netstate.State, f func(*netstate.State)) netstate.State {
	f(&s)
	return s
}

// TestVXLANWalk goes in random order through states of links, what hangs on
// them and the settings of links that are not ours.
func TestVXLANWalk(t *testing.T) {
	t.Parallel()
	ns, _ := openWith(t, "d0")
	need(t, ns, FeatureVXLAN)
	over6 := vxlan("x1", 1, "2001:db8::1")
	states := []netstate.State{
		{},
		overlay(),
		// In place, although the kernel forgets the neighbours of a link that
		// gets another MAC.
		change(overlay(), func(s *netstate.State) { s.Links[0].MAC = station(9) }),
		change(overlay(), func(s *netstate.State) {
			s.Links[0].MTU, s.Links[0].RPFilter, s.Links[0].AcceptLocal, s.Settings = 1400, 0, true, nil
		}),
		change(overlay(), func(s *netstate.State) { s.Settings[0].Forwarding, s.Neighbors, s.Addresses = false, nil, nil }),
		change(overlay(), func(s *netstate.State) { s.FDB, s.Routes = nil, nil }),
		// Entries that move, that go and that come.
		change(overlay(), func(s *netstate.State) {
			s.FDB = []netstate.FDBEntry{entry("x1", 2, "192.0.2.103"), entry("x1", 4, "192.0.2.104")}
			s.Neighbors = []netstate.Neighbor{neighbor("x1", "10.80.0.2", 4), neighbor("x1", "fd80::2", 4), neighbor("x1", "fd80::4", 4)}
		}),
		// Anew, with all that hangs on the link.
		change(overlay(), func(s *netstate.State) { s.Links[0].VXLAN.VNI = 2 }),
		change(overlay(), func(s *netstate.State) { s.Links[0].VXLAN.Local = addr("192.0.2.9") }),
		change(overlay(), func(s *netstate.State) { s.Links[0].VXLAN.Port = 4880 }),
		{Links: []netstate.Link{over6}, FDB: []netstate.FDBEntry{entry("x1", 2, "2001:db8::2")}, Neighbors: overlay().Neighbors},
		// The id of a link that goes.
		{Links: []netstate.Link{vxlan("x2", 1, "192.0.2.1")}, FDB: []netstate.FDBEntry{entry("x2", 2, "192.0.2.102")}, Neighbors: []netstate.Neighbor{neighbor("x2", "10.80.0.2", 2)}},
		{Links: []netstate.Link{vxlan("x1", 2, "192.0.2.1"), vxlan("x2", 1, "192.0.2.1")}, FDB: []netstate.FDBEntry{entry("x1", 2, "192.0.2.102"), entry("x2", 2, "192.0.2.102")}},
	}
	if Missing(ns.Features(t.Context()), FeatureGeneve) == nil {
		states = append(states, netstate.State{Links: []netstate.Link{geneve("x1", 1, "192.0.2.100")}})
	}
	for i := range walkSteps {
		n := rand.IntN(len(states))
		t.Logf("step %d: state %d", i, n)
		converge(t, ns, states[n])
	}
}

// TestVXLANByHand changes what is ours behind our back.
func TestVXLANByHand(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t, "d0")
	need(t, ns, FeatureVXLAN)
	nettest.Need(t, "ip", "bridge")
	want := overlay()
	converge(t, ns, want)
	quiet(t, ns, want)
	other, second := station(7).String(), station(2).String()
	for _, tt := range []string{
		"ip neigh del 10.80.0.2 dev x1",
		"ip neigh del fd80::2 dev x1",
		"ip neigh flush dev x1 nud permanent",
		"ip neigh replace 10.80.0.2 dev x1 lladdr " + other + " nud permanent",
		"ip neigh replace 10.80.0.2 dev x1 lladdr " + second + " nud reachable",
		"ip neigh add 10.80.0.7 dev x1 lladdr " + other + " nud permanent",
		"ip neigh add fd80::7 dev x1 lladdr " + other + " nud permanent",
		"bridge fdb del " + second + " dev x1",
		"bridge fdb replace " + second + " dev x1 dst 192.0.2.107 self permanent",
		"bridge fdb replace " + second + " dev x1 dst 192.0.2.102 port 9 self permanent",
		"bridge fdb replace " + second + " dev x1 dst 192.0.2.102 self dynamic",
		"bridge fdb add " + other + " dev x1 dst 192.0.2.107 self permanent",
		"bridge fdb append 00:00:00:00:00:00 dev x1 dst 192.0.2.107 self permanent",
		"ip link set x1 address " + other,
		"ip link set x1 mtu 1300",
		"ip link set x1 down",
		"ip link set x1 type vxlan id 1 learning",
		"ip link set x1 type vxlan id 1 remote 192.0.2.107",
		"ip link set x1 type vxlan id 1 dev d0",
		"ip link del x1",
		"sysctl net/ipv4/conf/d0/forwarding 0",
		"sysctl net/ipv4/conf/x1/forwarding 0",
		"sysctl net/ipv4/conf/x1/rp_filter 0",
		"sysctl net/ipv4/ip_forward 0", // of all links
	} {
		t.Run(tt, func(t *testing.T) {
			if argv := strings.Fields(tt); argv[0] == "sysctl" {
				test.Do(func() {
					writeSysctl(t, "net/ipv4/ip_forward", "1") // so that it can go
				})
				converge(t, ns, want)
				quiet(t, ns, want)
				test.Do(func() { writeSysctl(t, argv[1], argv[2]) })
			} else {
				test.Run(argv...)
			}
			select {
			case <-ns.Changed():
			case <-time.After(30 * time.Second):
				t.Fatal("the change was not announced")
			}
			assert.Assert(t, !netstate.Diff(observe(t, ns), want).Empty(), "the change was not seen")
			converge(t, ns, want)
			quiet(t, ns, want)
			assert.Assert(t, !strings.Contains(test.Run("ip", "-d", "link", "show", "x1"), "remote"))
		})
	}
	// Two hosts for what nobody knows go in one pass.
	for _, dst := range []string{"192.0.2.107", "192.0.2.108"} {
		test.Run("bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "x1", "dst", dst, "self", "permanent")
	}
	converge(t, ns, want)
}

// TestVXLANOfOthers: what the kernel has learned on a link of ours stays, and
// so does all that is on links that are not ours.
func TestVXLANOfOthers(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t, "d0", "d1")
	need(t, ns, FeatureVXLAN)
	nettest.Need(t, "ip", "bridge")
	mac := station(7).String()
	test.Run("ip", "link", "add", "others", "type", "vxlan", "id", "7", "dstport", "4879", "local", "192.0.2.1", "remote", "192.0.2.99")
	test.Run("ip", "link", "set", "others", "up")
	test.Run("bridge", "fdb", "add", mac, "dev", "others", "dst", "192.0.2.107", "self", "permanent")
	for _, dev := range []string{"d0", "others"} {
		test.Run("ip", "neigh", "add", "198.51.100.7", "lladdr", mac, "dev", dev, "nud", "permanent")
		test.Run("ip", "neigh", "add", "2001:db8::7", "lladdr", mac, "dev", dev, "nud", "permanent")
	}
	// The kernel joins the multicast groups of its own addresses when it comes to it.
	joined := regexp.MustCompile(`(?m)^(33:33|01:00:5e):.*\n`)
	foreign := func() string {
		out := []string{test.Run("ip", "-d", "link", "show", "dev", "others")}
		for _, dev := range []string{"d0", "d1", "others", "lo"} {
			out = append(out, test.Run("ip", "neigh", "show", "dev", dev, "nud", "permanent"), test.Run("bridge", "fdb", "show", "dev", dev),
				test.Run("ip", "netconf", "show", "dev", dev), strings.ReplaceAll(test.Run("ip", "addr", "show", "dev", dev), " tentative", ""))
		}
		return joined.ReplaceAllString(strings.Join(out, ""), "")
	}
	start := observe(t, ns)
	before := foreign()
	want := overlay()
	want.Settings[0].Forwarding = !settingOf(t, start, "d0").Forwarding
	assert.Check(t, is.Len(start.Neighbors, 0))
	assert.Check(t, is.Len(start.FDB, 0))
	converge(t, ns, want)
	quiet(t, ns, want)

	t.Run("the setting alone", func(t *testing.T) {
		for _, v := range observe(t, ns).Settings {
			assert.Assert(t, v.Dev != "x1")
		}
		now := foreign()
		assert.Assert(t, now != before)
		off := change(want, func(s *netstate.State) { s.Settings = []netstate.Setting{settingOf(t, start, "d0")} })
		converge(t, ns, off)
		assert.Equal(t, foreign(), before)
		converge(t, ns, want)
		assert.Equal(t, foreign(), now)
	})
	t.Run("what is learned", func(t *testing.T) {
		learned := []string{
			"10.80.0.8 lladdr 02:00:00:00:00:08 STALE", "10.80.0.9 lladdr 02:00:00:00:00:09 REACHABLE", "fd80::8 lladdr 02:00:00:00:00:08 STALE",
		}
		for _, n := range learned {
			w := strings.Fields(n)
			test.Run("ip", "neigh", "add", w[0], "lladdr", w[2], "dev", "x1", "nud", strings.ToLower(w[3]))
		}
		assert.Assert(t, netstate.Diff(observe(t, ns), want).Empty())
		converge(t, ns, change(want, func(s *netstate.State) { s.Neighbors = s.Neighbors[:1] }))
		converge(t, ns, want)
		now := test.Run("ip", "neigh", "show", "dev", "x1")
		for _, n := range learned {
			assert.Check(t, is.Contains(now, n))
		}
		// Until we know better.
		known := change(want, func(s *netstate.State) {
			s.Neighbors = append(slices.Clone(s.Neighbors), neighbor("x1", "10.80.0.8", 5))
		})
		converge(t, ns, known)
		assert.Check(t, is.Contains(test.Run("ip", "neigh", "show", "dev", "x1"), "10.80.0.8 lladdr 02:00:00:00:00:05 PERMANENT"))
		converge(t, ns, want)
	})
	t.Run("removal", func(t *testing.T) {
		now := foreign()
		converge(t, ns, netstate.State{})
		assert.Equal(t, foreign(), now) // with the setting, which nobody takes back
	})
	t.Run("in the way", func(t *testing.T) {
		now := foreign()
		for _, tt := range []struct {
			link netstate.Link
			err  string
		}{
			{vxlan("others", 1, "192.0.2.1"), "link others: there is a link of this name that is not ours (type vxlan"},
			{vxlan("x1", 7, "192.0.2.1"), "link x1: another link has vxlan id 7 and dstport 4879 already"},
		} {
			err := ns.Apply(t.Context(), netstate.Diff(netstate.State{}, netstate.State{Links: []netstate.Link{tt.link}}))
			assert.Check(t, is.ErrorContains(err, tt.err))
			assert.Equal(t, foreign(), now)
		}
		var taken net.PacketConn
		test.Do(func() {
			var err error
			taken, err = net.ListenPacket("udp4", ":4881")
			assert.NilError(t, err)
		})
		defer taken.Close()
		l := vxlan("x1", 1, "192.0.2.1")
		l.VXLAN.Port = 4881
		err := ns.Apply(t.Context(), netstate.Diff(observe(t, ns), netstate.State{Links: []netstate.Link{l}}))
		assert.Check(t, is.ErrorContains(err, "link x1: dstport 4881: a program has this UDP port"))
		err = ns.Apply(t.Context(), netstate.Changes{
			SetSettings: []netstate.Setting{{Dev: "absent"}}, SetNeighbors: []netstate.Neighbor{neighbor("absent", "10.80.0.2", 2)},
			SetFDB: []netstate.FDBEntry{entry("absent", 2, "192.0.2.102")},
			// What is gone is no error.
			DeleteNeighbors: []netstate.Neighbor{neighbor("absent", "10.80.0.2", 2), neighbor("d1", "10.80.0.2", 2)},
			DeleteFDB:       []netstate.FDBEntry{entry("absent", 2, "192.0.2.102"), entry("others", 2, "192.0.2.102")},
		})
		assert.Check(t, is.Error(err, `netconf dev absent forwarding off: there is no link absent
neigh 10.80.0.2 dev absent lladdr 02:00:00:00:00:02 nud permanent: there is no link absent
fdb 02:00:00:00:00:02 dev absent dst 192.0.2.102 self permanent: there is no link absent`))
		assert.Equal(t, foreign(), now)
	})
}

// TestChangesOfStations: what a process does to a link of ours is announced,
// and what the kernel learns and forgets there is not.
func TestChangesOfStations(t *testing.T) {
	t.Parallel()
	ns, _ := openWith(t, "d0")
	need(t, ns, FeatureVXLAN)
	want := overlay()
	converge(t, ns, want)
	quiet(t, ns, want)
	links, err := ns.listLinks()
	assert.NilError(t, err)
	netconf := func(dev string, attributes ...uint16) []byte {
		a := attrs{[]byte{unix.AF_INET, 0, 0, 0}}
		a.u32(1, uint32(links.index[dev]))
		for _, typ := range attributes {
			a.u32(typ, 1)
		}
		return a.b
	}
	for _, tt := range []struct {
		name string
		typ  nl.HeaderType
		from uint32 // the port ID of who did it; 0: the kernel
		data []byte
		want bool
	}{
		{"neighbour by somebody", unix.RTM_NEWNEIGH, 1, neighborHeader(unix.AF_INET, links.index["x1"], unix.NUD_PERMANENT, 0), true},
		{"neighbour deleted by somebody", unix.RTM_NEWNEIGH, 1, neighborHeader(unix.AF_INET6, links.index["x1"], unix.NUD_FAILED, 0), true},
		{"neighbour learned", unix.RTM_NEWNEIGH, 0, neighborHeader(unix.AF_INET, links.index["x1"], unix.NUD_REACHABLE, 0), false},
		{"neighbour not found", unix.RTM_NEWNEIGH, 0, neighborHeader(unix.AF_INET, links.index["x1"], unix.NUD_FAILED, 0), false},
		{"neighbour forgotten", unix.RTM_DELNEIGH, 0, neighborHeader(unix.AF_INET6, links.index["x1"], unix.NUD_STALE, 0), false},
		{"neighbour on another link", unix.RTM_NEWNEIGH, 1, neighborHeader(unix.AF_INET, links.index["d0"], unix.NUD_PERMANENT, 0), false},
		{"entry", unix.RTM_NEWNEIGH, 0, neighborHeader(unix.AF_BRIDGE, links.index["x1"], unix.NUD_PERMANENT, unix.NTF_SELF), true},
		{"entry deleted", unix.RTM_DELNEIGH, 0, neighborHeader(unix.AF_BRIDGE, links.index["x1"], unix.NUD_PERMANENT, unix.NTF_SELF), true},
		{"entry of another link", unix.RTM_NEWNEIGH, 0, neighborHeader(unix.AF_BRIDGE, links.index["d0"], unix.NUD_REACHABLE, 0), false},
		{"short", unix.RTM_NEWNEIGH, 1, []byte{unix.AF_INET}, false},
		{"forwarding", unix.RTM_NEWNETCONF, 0, netconf("x1", 2), true},
		{"forwarding of another link", unix.RTM_NEWNETCONF, 0, netconf("d0", 2), true},
		{"rp_filter", unix.RTM_NEWNETCONF, 0, netconf("x1", 3), true},
		{"rp_filter of another link", unix.RTM_NEWNETCONF, 0, netconf("d0", 3), false},
		{"a new link", unix.RTM_NEWNETCONF, 0, netconf("d0", 2, 3, 4), false},
		{"no link", unix.RTM_NEWNETCONF, 0, netconf("absent", 2), false},
		{"short", unix.RTM_NEWNETCONF, 0, []byte{unix.AF_INET}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns.mon.route(nl.Message{Header: nl.Header{Type: tt.typ, PID: tt.from}, Data: tt.data})
			select {
			case <-ns.Changed():
				assert.Assert(t, tt.want)
			default:
				assert.Assert(t, !tt.want)
			}
		})
	}
}

// settingOf returns what is observed of a link that is not ours.
func settingOf(t *testing.T, s netstate.State, dev string) netstate.Setting {
	t.Helper()
	i := slices.IndexFunc(s.Settings, func(v netstate.Setting) bool { return v.Dev == dev })
	assert.Assert(t, i >= 0, "no setting of %s", dev)
	return s.Settings[i]
}

// TestVXLANLink: the link is what it should be in all that a State does not
// say.
func TestVXLANLink(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t)
	need(t, ns, FeatureVXLAN)
	nettest.Need(t, "ip", "bridge")
	for _, local := range []string{"192.0.2.1", "2001:db8::1"} {
		converge(t, ns, netstate.State{Links: []netstate.Link{vxlan("x1", 18952, local)}})
		now := test.Run("ip", "-d", "link", "show", "x1")
		for _, want := range []string{
			"<BROADCAST,MULTICAST,UP,LOWER_UP>", "mtu 1450", "link/ether 02:00:00:00:00:01", "alias isthmus: to other nodes",
			"vxlan id 18952 local " + local + " srcport 0 0 dstport 4879 nolearning ttl auto", "udpcsum noudp6zerocsumtx noudp6zerocsumrx",
		} {
			assert.Check(t, is.Contains(now, want))
		}
		assert.Check(t, is.Equal(test.Run("bridge", "fdb", "show", "dev", "x1"), ""))
	}
}

// TestVXLANOfManyNodes: more neighbours than the kernel keeps of those that it
// learns (net.ipv4.neigh.default.gc_thresh3, 1024), in one pass.
func TestVXLANOfManyNodes(t *testing.T) {
	t.Parallel()
	ns, _ := openWith(t)
	need(t, ns, FeatureVXLAN)
	want := stations(3_000)
	converge(t, ns, want)
	quiet(t, ns, want)
	converge(t, ns, stations(1_000))
	converge(t, ns, netstate.State{})
}

// TestVXLANCarriesPackets joins two namespaces by entries alone, and sends what
// nobody has an entry for.
func TestVXLANCarriesPackets(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, a, b, innerA, innerB string }{
		{"IPv4 over IPv4", "192.0.2.1", "192.0.2.2", "10.80.0.1", "10.80.0.2"},
		{"IPv6 over IPv4", "192.0.2.1", "192.0.2.2", "fd80::1", "fd80::2"},
		{"IPv4 over IPv6", "2001:db8::1", "2001:db8::2", "10.80.0.1", "10.80.0.2"},
		{"IPv6 over IPv6", "2001:db8::1", "2001:db8::2", "fd80::1", "fd80::2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			nsA, a := openWith(t)
			need(t, nsA, FeatureVXLAN)
			nettest.Need(t, "ip", "bridge")
			b := nettest.Another(t)
			var nsB *NetNS
			b.Do(func() { nsB = open(t, Config{}) })
			bits := addr(tt.a).BitLen() - 8
			veth(t, a, b, fmt.Sprintf("%s/%d", tt.a, bits), fmt.Sprintf("%s/%d", tt.b, bits))
			state := func(n int, local, ours string, far int, remote, theirs string) netstate.State {
				l := vxlan("liqo.vxlan", 18952, local)
				l.MAC = station(n)
				host := netip.PrefixFrom(addr(theirs), addr(theirs).BitLen())
				return netstate.State{
					Links:     []netstate.Link{l},
					Addresses: []netstate.Address{{Dev: "liqo.vxlan", Prefix: netip.PrefixFrom(addr(ours), addr(ours).BitLen())}},
					Neighbors: []netstate.Neighbor{neighbor("liqo.vxlan", theirs, far)},
					FDB:       []netstate.FDBEntry{entry("liqo.vxlan", far, remote)},
					Routes:    []netstate.Route{{Table: 254, Dst: host, Dev: "liqo.vxlan", Scope: netstate.ScopeLink}},
				}
			}
			stateA := state(1, tt.a, tt.innerA, 2, tt.b, tt.innerB)
			stateB := state(2, tt.b, tt.innerB, 1, tt.a, tt.innerA)
			converge(t, nsA, stateA)
			converge(t, nsB, stateB)
			atA, atB := netip.AddrPortFrom(addr(tt.innerA), 4000), netip.AddrPortFrom(addr(tt.innerB), 4000)
			inA, inB := listen(t, a, atA), listen(t, b, atB)
			assert.Equal(t, deliver(t, inA, inB, atB), atA)
			assert.Equal(t, deliver(t, inB, inA, atA), atB)

			// A station that A does not know is heard and not learned.
			stateB.Links[0].MAC = station(3)
			converge(t, nsB, stateB)
			drain(t, inA)
			assert.Equal(t, deliver(t, inB, inA, atA), atB)
			fdb := strings.TrimSpace(a.Run("bridge", "fdb", "show", "dev", "liqo.vxlan"))
			assert.Equal(t, fdb, fmt.Sprintf("%s dst %s self permanent", station(2), tt.b))
			assert.Assert(t, netstate.Diff(observe(t, nsA), stateA).Empty())

			// Without its entry nothing goes to a station.
			stateB.FDB = nil
			converge(t, nsB, stateB)
			before := transmitted(t, b, "liqo.vxlan")
			send(t, inB, atA)
			now := transmitted(t, b, "liqo.vxlan")
			assert.Check(t, is.Equal(now.Packets, before.Packets))
			assert.Check(t, now.Dropped > before.Dropped)
		})
	}
}

// drain reads what has arrived.
func drain(t *testing.T, c *net.UDPConn) {
	t.Helper()
	assert.NilError(t, c.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
	for {
		if _, _, err := c.ReadFromUDPAddrPort(make([]byte, 2000)); err != nil {
			return
		}
	}
}

// A transmission is what a link has sent, or not.
type transmission struct{ Packets, Dropped int }

func transmitted(t *testing.T, ns *nettest.NS, dev string) transmission {
	t.Helper()
	var out []struct{ Stats64 struct{ Tx transmission } }
	assert.NilError(t, json.Unmarshal([]byte(ns.Run("ip", "-s", "-j", "link", "show", "dev", dev)), &out))
	assert.Assert(t, is.Len(out, 1))
	return out[0].Stats64.Tx
}
