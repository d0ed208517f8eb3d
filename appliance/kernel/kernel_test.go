package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	"kernel.org/pub/linux/libs/security/libcap/cap"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// walkSteps is how far the random walks go: enough to see most pairs of
// states.
const walkSteps = 80

func TestMain(m *testing.M) { os.Exit(nettest.Main(m)) }

// open opens the namespace of the calling thread.
func open(t testing.TB, cfg Config) *NetNS {
	t.Helper()
	ns, err := Open(cfg)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, ns.Close()) })
	return ns
}

// openWith opens a new namespace and puts foreign links into it.
func openWith(t testing.TB, names ...string) (*NetNS, *nettest.NS) {
	t.Helper()
	test := nettest.NewNS(t)
	ns := open(t, Config{Implementation: Userspace, PrivateKey: testKey, StateDir: t.TempDir()})
	for i, name := range names {
		d := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: 1500}}
		assert.NilError(t, ns.nl.LinkAdd(d))
		addr, err := netlink.ParseAddr(fmt.Sprintf("192.0.2.%d/32", i+1))
		assert.NilError(t, err)
		assert.NilError(t, ns.nl.AddrAdd(d, addr))
		assert.NilError(t, ns.nl.LinkSetUp(d))
	}
	return ns, test
}

func need(t testing.TB, ns *NetNS, features ...string) {
	t.Helper()
	have := ns.Features(t.Context())
	for _, f := range features {
		if err := Missing(have, f); err != nil {
			nettest.SkipOrFail(t, f, err)
		}
	}
}

func observe(t testing.TB, ns *NetNS) netstate.State {
	t.Helper()
	s, err := ns.Observe(context.Background())
	assert.NilError(t, err)
	return s
}

// converge brings the namespace to the state and checks that a second pass
// finds nothing to do.
func converge(t testing.TB, ns *NetNS, want netstate.State) {
	t.Helper()
	assert.NilError(t, want.Validate())
	before := observe(t, ns)
	changes := netstate.Diff(before, want)
	assert.NilError(t, ns.Apply(context.Background(), changes), "%s", changes)
	left := netstate.Diff(observe(t, ns), want)
	assert.Assert(t, left.Empty(), "still to do:\n%s\nafter:\n%s\nfrom:\n%s", left, changes, before)
}

// applyOnceFree makes a state, and tries again while WireGuard's port is taken: a process that another test
// has just forked holds copies of all our sockets until it executes its program, also those of a link that is
// deleted.
func applyOnceFree(t testing.TB, ns *NetNS, want netstate.State) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		err := ns.Apply(context.Background(), netstate.Diff(observe(t, ns), want))
		switch {
		case err != nil && strings.Contains(err.Error(), unix.EADDRINUSE.Error()):
			return poll.Continue("%v", err)
		case err != nil:
			return poll.Error(err)
		}
		return poll.Success()
	}, poll.WithTimeout(20*time.Second), poll.WithDelay(time.Millisecond))
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }

// key returns the n-th key of a fixed row.
func key(n byte) wgtypes.Key {
	k := wgtypes.Key{n, 1: 1, 31: 64}
	k[0] &= 248
	k[1] = n
	return k
}

func public(n byte) netstate.Key { return netstate.Key(key(n).PublicKey()) }

func testKey(string) ([32]byte, error) { return key(1), nil }

// A route whose link goes becomes an unreachable one, before the link goes: what
// is for it must not leave another way in between.
func TestRouteOutlivesItsLink(t *testing.T) {
	t.Parallel()
	for _, family := range []struct{ name, dst, own, via string }{
		{"IPv4", "10.1.0.0/16", "10.80.0.2/32", "10.80.0.5"},
		{"IPv6", "fd01::/64", "fd80::2/128", "fd80::5"},
	} {
		t.Run(family.name, func(t *testing.T) {
			ns, _ := openWith(t)
			need(t, ns, FeatureVXLAN)
			link := netstate.Link{Name: "liqo.vxlan", Kind: netstate.KindVXLAN, VXLAN: netstate.VXLAN{VNI: 7, Local: addr("172.18.1.11"), Port: 4879}}
			if addr(family.via).Is6() {
				link.VXLAN.Local = addr("fd18::11")
			}
			with := netstate.State{
				Links:     []netstate.Link{link},
				Addresses: []netstate.Address{{Dev: link.Name, Prefix: prefix(family.own)}},
				Routes: []netstate.Route{
					{Table: 18952, Dst: prefix(family.dst), Via: addr(family.via), Dev: link.Name, OnLink: true},
					{Table: 18952, Dst: netip.PrefixFrom(addr(family.via), addr(family.via).BitLen()), Dev: link.Name, Scope: netstate.ScopeLink},
				},
			}
			without := netstate.State{Routes: []netstate.Route{{Table: 18952, Dst: prefix(family.dst), Type: netstate.Unreachable}}}
			for range 2 {
				converge(t, ns, with)
				converge(t, ns, without)
			}
			converge(t, ns, netstate.State{})
		})
	}
}

func TestForeignThingsStay(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t, "d0", "liqo.rome")
	need(t, ns, FeatureNFTables)
	nettest.Need(t, "ip", "nft")
	test.Run("ip", "link", "set", "lo", "up")
	test.Run("ip", "addr", "add", "198.51.100.1/24", "dev", "d0")
	test.Run("ip", "route", "add", "10.9.0.0/16", "dev", "d0", "table", "90")
	test.Run("ip", "-6", "route", "add", "fd09::/64", "dev", "d0", "table", "90", "proto", "static")
	test.Run("ip", "rule", "add", "from", "10.9.0.0/16", "lookup", "90", "priority", "310")
	test.Run("nft", "table ip others { chain c { accept; }; }")
	foreign := func() string {
		return strings.ReplaceAll(test.Run("ip", "addr"), " tentative", "") + test.Run("ip", "-br", "link") + test.Run("ip", "route", "show", "table", "90") +
			test.Run("ip", "-6", "route", "show", "table", "90") + test.Run("ip", "rule") + test.Run("nft", "list", "ruleset")
	}
	before := foreign()

	converge(t, ns, netstate.State{
		Routes: []netstate.Route{{Table: 90, Dst: prefix("10.8.0.0/16"), Dev: "d0"}},
		// The second is the same as a foreign one.
		Rules:  []netstate.Rule{{Priority: 310, Src: prefix("10.8.0.0/16"), Table: 90}, {Priority: 310, Src: prefix("10.9.0.0/16"), Table: 90}},
		Tables: []netstate.Table{{Family: netstate.FamilyIPv4, Name: "mine"}},
	})
	assert.Assert(t, foreign() != before)
	converge(t, ns, netstate.State{})
	assert.Equal(t, foreign(), before)

	// What stands where ours should be is an error that names it, and stays.
	for _, tt := range []struct {
		name string
		want netstate.State
		err  string
	}{
		{"link", netstate.State{Links: []netstate.Link{{Name: "liqo.rome", Kind: netstate.KindWireGuard}}}, "link liqo.rome: there is a link of this name that is not ours"},
		{"route", netstate.State{Routes: []netstate.Route{{Table: 90, Dst: prefix("10.9.0.0/16"), Dev: "liqo.rome"}}}, "route to 10.9.0.0/16 in table 90 that is not ours"},
		{"IPv6 route", netstate.State{Routes: []netstate.Route{{Table: 90, Dst: prefix("fd09::/64"), Dev: "liqo.rome"}}}, "route to fd09::/64 in table 90 that is not ours"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := ns.Apply(t.Context(), netstate.Diff(netstate.State{}, tt.want))
			assert.ErrorContains(t, err, tt.err)
			assert.Equal(t, foreign(), before)
		})
	}
}

// TestWalk goes in random order through states of routes, rules and tables:
// from any to any in one pass.
func TestWalk(t *testing.T) {
	t.Parallel()
	ns, _ := openWith(t, "d0", "d1")
	need(t, ns, FeatureNFTables, FeatureRules)
	route := func(dst, dev string) netstate.Route { return netstate.Route{Table: 90, Dst: prefix(dst), Dev: dev} }
	via := route("10.2.0.0/16", "d0")
	via.Via, via.OnLink = addr("10.80.0.1"), true
	scoped := route("10.80.0.1/32", "d0")
	scoped.Scope = netstate.ScopeLink
	withSrc := route("10.2.0.0/16", "d1")
	withSrc.Src, withSrc.MTU = addr("192.0.2.2"), 1300
	gone := netstate.Route{Table: 90, Dst: prefix("10.2.0.0/16"), Type: netstate.Unreachable}
	gone6 := netstate.Route{Table: 70000, Dst: prefix("fd00:1::/64"), Type: netstate.Unreachable}
	thrown, thrown6 := gone, gone6
	thrown.Type, thrown6.Type = netstate.Throw, netstate.Throw
	moved6 := gone6
	moved6.Type, moved6.Dev = netstate.Unicast, "d1"
	table := func(name string, rules ...netstate.FirewallRule) netstate.Table {
		return netstate.Table{Family: netstate.FamilyIPv4, Name: name, Chains: []netstate.Chain{{Name: "c", Type: "filter", Hook: "forward", Rules: rules}}}
	}
	drop := netstate.FirewallRule{Name: "drop", Action: netstate.Action{Kind: netstate.Drop}}
	accept := netstate.FirewallRule{Name: "accept", Action: netstate.Action{Kind: netstate.Accept}}

	states := []netstate.State{
		{},
		{Routes: []netstate.Route{scoped, via, route("fd00:1::/64", "d0")}, Rules: []netstate.Rule{{Priority: 300, Src: prefix("10.0.0.7/32"), Table: 254}}},
		{Routes: []netstate.Route{withSrc, gone6, route("0.0.0.0/0", "d1"), route("::/0", "d1")}},
		{Routes: []netstate.Route{gone, moved6}},
		{Routes: []netstate.Route{thrown, thrown6}},
		{Routes: []netstate.Route{route("10.2.0.0/16", "d0"), route("10.2.0.0/24", "d1")}},
		// A rule without selectors among those with them.
		{Rules: []netstate.Rule{{Priority: 310, Table: 90}, {Priority: 310, Src: prefix("10.0.0.0/8"), Table: 90}, {Priority: 310, IPv6: true, Table: 90}}},
		{Rules: []netstate.Rule{{Priority: 310, Src: prefix("10.0.0.0/8"), Table: 90}, {Priority: 310, Mark: 2, Table: 90}, {Priority: 310, Mark: 2, Mask: 0xff, Table: 90}}},
		{Rules: []netstate.Rule{{Priority: 310, IIF: "d0", Table: 90}, {Priority: 390, IIF: "absent", Unreachable: true}, {Priority: 390, IIF: "d0", Unreachable: true, IPv6: true}}},
		{Rules: []netstate.Rule{{Priority: 300, Src: prefix("10.0.0.7/32"), Goto: 391}, {Priority: 310, Table: 90}, {Priority: 391, Nop: true}, {Priority: 300, Src: prefix("fd00::7/128"), Goto: 391}}},
		{Rules: []netstate.Rule{{Priority: 300, Src: prefix("10.0.0.7/32"), Goto: 392}, {Priority: 391, Nop: true}, {Priority: 392, Nop: true}, {Priority: 391, IPv6: true, Nop: true}}},
		{Rules: []netstate.Rule{{Priority: 310, IIF: "d0", OIF: "d1", Dst: prefix("fd00::/8"), Table: 100000}}},
		{Tables: []netstate.Table{table("a", drop), table("b", accept, drop)}},
		{Tables: []netstate.Table{table("a", accept), table("b", drop, accept), table("c")}},
		{Tables: []netstate.Table{table("a", drop), many(2)}},
		{Tables: []netstate.Table{many(3000), table("b", drop)}},
	}
	for i := range walkSteps {
		n := rand.IntN(len(states))
		t.Logf("step %d: state %d", i, n)
		converge(t, ns, states[n])
	}
}

func TestDriftIsSeenAndRepaired(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t, "d0")
	need(t, ns, FeatureNFTables, FeatureRules)
	nettest.Need(t, "ip", "nft")
	want := netstate.State{
		Routes: []netstate.Route{{Table: 90, Dst: prefix("10.1.0.0/16"), Dev: "d0"}, {Table: 90, Dst: prefix("fd01::/64"), Dev: "d0"}},
		Rules: []netstate.Rule{
			{Priority: 300, Src: prefix("10.8.0.9/32"), Goto: 391}, {Priority: 310, Src: prefix("10.8.0.0/16"), Table: 90}, {Priority: 391, Nop: true},
		},
		Tables: []netstate.Table{{Family: netstate.FamilyIPv4, Name: "mine", Chains: []netstate.Chain{{
			Name: "c", Type: "filter", Hook: "forward", Rules: []netstate.FirewallRule{
				{Name: "one", Action: netstate.Action{Kind: netstate.Drop}, Counter: true},
				{Name: "two", Action: netstate.Action{Kind: netstate.Accept}},
			},
		}}}},
	}
	converge(t, ns, want)
	quiet(t, ns, want)
	for _, tt := range [][]string{
		{"ip", "route", "del", "10.1.0.0/16", "table", "90"},
		{"ip", "-6", "route", "del", "fd01::/64", "table", "90"},
		{"ip", "route", "replace", "unreachable", "10.1.0.0/16", "table", "90", "proto", "158"},
		{"ip", "route", "add", "10.3.0.0/16", "dev", "d0", "table", "91", "proto", "158"},
		{"ip", "route", "append", "10.1.0.0/16", "dev", "d0", "table", "90", "metric", "7", "proto", "158"},
		{"ip", "rule", "del", "priority", "310"},
		{"ip", "rule", "del", "priority", "391"},
		{"ip", "rule", "add", "priority", "301", "from", "10.8.0.9", "goto", "391", "proto", "158"},
		{"ip", "rule", "add", "priority", "391", "goto", "400", "proto", "158"},
		{"ip", "rule", "add", "priority", "311", "from", "10.8.0.0/16", "lookup", "90", "proto", "158"},
		{"ip", "rule", "add", "priority", "310", "from", "10.8.0.0/16", "ipproto", "17", "lookup", "90", "proto", "158"},
		{"nft", "delete table ip isthmus-mine"},
		{"nft", "flush chain ip isthmus-mine c"},
		{"nft", "add rule ip isthmus-mine c accept"},
		{"nft", "insert rule ip isthmus-mine c accept"},
		{"nft", "add chain ip isthmus-mine d"},
		{"nft", `replace rule ip isthmus-mine c handle 2 accept comment "one"`},
		{"nft", "add table ip6 isthmus-other"},
	} {
		t.Run(strings.Join(tt, " "), func(t *testing.T) {
			if tt[1] == `replace rule ip isthmus-mine c handle 2 accept comment "one"` {
				tt = []string{"nft", strings.Replace(tt[1], "handle 2", "handle "+handle(test, "one"), 1)}
			}
			test.Run(tt...)
			select {
			case <-ns.Changed():
			case <-time.After(30 * time.Second):
				t.Fatal("the change was not announced")
			}
			assert.Assert(t, !netstate.Diff(observe(t, ns), want).Empty(), "the change was not seen")
			converge(t, ns, want)
			quiet(t, ns, want)
		})
	}
}

// handle returns the handle of the rule with the comment.
func handle(test *nettest.NS, comment string) string {
	for line := range strings.Lines(test.Run("nft", "-a", "list", "table", "ip", "isthmus-mine")) {
		if strings.Contains(line, `"`+comment+`"`) {
			_, h, _ := strings.Cut(line, "# handle ")
			return strings.TrimSpace(h)
		}
	}
	return "none"
}

// quiet checks that passes end: what we do ourselves is announced at most
// for one pass that finds nothing to do.
func quiet(t *testing.T, ns *NetNS, want netstate.State) {
	t.Helper()
	for range 10 { // the kernel announces an addition in several steps
		select {
		case <-ns.Changed():
			assert.Assert(t, netstate.Diff(observe(t, ns), want).Empty())
		case <-time.After(50 * time.Millisecond):
			return
		}
	}
	t.Fatal("changes are announced without end")
}

func TestOneBadThingDoesNotHoldBackTheOthers(t *testing.T) {
	t.Parallel()
	ns, _ := openWith(t, "d0")
	need(t, ns, FeatureNFTables)
	good := netstate.State{
		Routes: []netstate.Route{{Table: 90, Dst: prefix("10.1.0.0/16"), Dev: "d0"}},
		Rules:  []netstate.Rule{{Priority: 310, Table: 90}},
		Tables: []netstate.Table{{Family: netstate.FamilyIPv4, Name: "good"}},
	}
	bad := netstate.State{
		Links: []netstate.Link{{Name: "odd", Kind: "odd"}},
		Routes: append(slices.Clone(good.Routes),
			netstate.Route{Table: 90, Dst: prefix("10.2.0.0/16"), Dev: "absent"},
			netstate.Route{Table: 90, Dst: prefix("10.3.0.0/16"), Dev: "d0", Via: addr("10.99.0.1")},
			netstate.Route{Table: 90, Dst: prefix("10.4.0.0/16"), Dev: "d0", Src: addr("10.99.0.1")}),
		Rules:     good.Rules,
		Addresses: []netstate.Address{{Dev: "absent", Prefix: prefix("10.80.0.1/32")}},
		Tables: append(slices.Clone(good.Tables), netstate.Table{Family: netstate.FamilyIPv4, Name: "bad", Chains: []netstate.Chain{
			{Name: "c", Type: "nat", Hook: "forward"}}}),
	}
	err := ns.Apply(t.Context(), netstate.Diff(netstate.State{}, bad))
	for _, want := range []string{
		`link odd: kind "odd": unknown`,
		"route 10.2.0.0/16 dev absent table 90: there is no link absent",
		"10.99.0.1", "add a route to it or set onlink",
		"is 10.99.0.1 an address of this host?",
		"address 10.80.0.1/32 dev absent: there is no link absent",
		`table ip bad: chain c: hook "forward": a nat chain may be at`,
	} {
		assert.ErrorContains(t, err, want)
	}
	assert.Assert(t, netstate.Diff(observe(t, ns), good).Empty())
	// What is gone already is no failure.
	all := observe(t, ns)
	converge(t, ns, netstate.State{})
	assert.NilError(t, ns.Apply(t.Context(), netstate.Diff(all, netstate.State{})))
}

func TestQueries(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t, "d0")
	nettest.Need(t, "ip")
	test.Run("ip", "link", "set", "d0", "mtu", "1450")
	test.Run("ip", "addr", "add", "198.51.100.7/24", "dev", "d0")
	test.Run("ip", "route", "add", "203.0.113.0/24", "dev", "d0", "src", "198.51.100.7", "mtu", "1400")

	p, err := ns.RouteTo(addr("198.51.100.9"))
	assert.NilError(t, err)
	assert.Equal(t, p, Path{Src: addr("198.51.100.7"), Dev: "d0", MTU: 1450})
	p, err = ns.RouteTo(addr("203.0.113.9"))
	assert.NilError(t, err)
	assert.Equal(t, p, Path{Src: addr("198.51.100.7"), Dev: "d0", MTU: 1400})
	test.Run("ip", "route", "add", "203.0.113.128/25", "via", "198.51.100.1")
	p, err = ns.RouteTo(addr("203.0.113.129"))
	assert.NilError(t, err)
	assert.Equal(t, p, Path{Src: addr("198.51.100.7"), Dev: "d0", MTU: 1450, Via: addr("198.51.100.1")})
	test.Run("ip", "route", "add", "203.0.113.64/26", "via", "inet6", "fe80::1", "dev", "d0", "src", "198.51.100.7")
	p, err = ns.RouteTo(addr("203.0.113.65"))
	assert.NilError(t, err)
	assert.Equal(t, p, Path{Src: addr("198.51.100.7"), Dev: "d0", MTU: 1450, Via: addr("fe80::1")})
	test.Run("ip", "link", "set", "d0", "group", strconv.Itoa(linkGroup))
	p, err = ns.RouteTo(addr("198.51.100.9"))
	assert.NilError(t, err)
	assert.Check(t, p.Ours)
	_, err = ns.RouteTo(addr("192.0.2.99"))
	assert.ErrorContains(t, err, "route to 192.0.2.99: network is unreachable")

	mtu, err := ns.LinkMTU("d0")
	assert.NilError(t, err)
	assert.Equal(t, mtu, 1450)
	_, err = ns.LinkMTU("absent")
	assert.Error(t, err, "there is no link absent")

	n, err := ns.InNoRoutes()
	assert.NilError(t, err)
	assert.Equal(t, n, uint64(0))
}

func TestFeatures(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t)
	before := test.Run("ip", "link")
	for _, f := range ns.Features(t.Context()) {
		t.Logf("%s: %v", f.Name, f.Err)
		if f.Err != nil {
			assert.ErrorIs(t, f.Err, ErrUnsupported)
		}
	}
	assert.Equal(t, test.Run("ip", "link"), before)
	assert.ErrorContains(t, ns.probeLink("no-such-kind"), "the kernel has no no-such-kind links")
	assert.ErrorIs(t, ns.probeLink("no-such-kind"), ErrNotInKernel)
	assert.NilError(t, ns.probeLink("bridge"))
}

func TestCheckRelease(t *testing.T) {
	for release, want := range map[string]string{
		"5.10.0-8-amd64": "", "6.1.0": "", "5.9.16": "kernel 5.9.16 is too old: 5.10 or newer is needed", "4.19.0": "too old", "odd": "not understood",
	} {
		err := checkRelease(release)
		if want == "" {
			assert.Check(t, err, release)
			continue
		}
		assert.Check(t, is.ErrorContains(err, want))
	}
}

func TestCounterOfPacketsWithoutRoute(t *testing.T) {
	t.Parallel()
	ns, a := openWith(t)
	nettest.Need(t, "ip")
	b := nettest.Another(t)
	veth(t, a, b, "192.0.2.1/24", "192.0.2.2/24")
	a.Do(func() { writeSysctl(t, "net/ipv4/ip_forward", "1") })
	b.Run("ip", "route", "add", "10.5.0.0/16", "via", "192.0.2.1")
	converge(t, ns, netstate.State{Rules: []netstate.Rule{{Priority: 390, IIF: "v0", Unreachable: true}}})
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		b.Do(func() {
			c, err := net.Dial("udp", "10.5.0.1:9")
			assert.NilError(t, err)
			defer c.Close()
			_, _ = c.Write([]byte("lost")) // sent again and again: it is lost while its neighbour is not known
		})
		n, err := ns.InNoRoutes()
		if err != nil {
			return poll.Error(err)
		}
		if n == 0 {
			return poll.Continue("nothing counted")
		}
		return poll.Success()
	})
}

// veth joins two namespaces by links v0.
func veth(t testing.TB, a, b *nettest.NS, addrA, addrB string) {
	t.Helper()
	vethNamed(t, a, b, "v0", addrA, addrB)
}

func vethNamed(t testing.TB, a, b *nettest.NS, name, addrA, addrB string) {
	t.Helper()
	a.Do(func() {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		assert.NilError(t, err)
		defer h.Close()
		assert.NilError(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name, PeerNamespace: netlink.NsFd(b.FD())}))
	})
	for ns, addr := range map[*nettest.NS]string{a: addrA, b: addrB} {
		ns.Run("ip", "link", "set", "lo", "up")
		ns.Run("ip", "link", "set", name, "up")
		ns.Run("ip", "addr", "add", addr, "dev", name, "nodad")
	}
}

func writeSysctl(t testing.TB, name, value string) {
	t.Helper()
	err := os.WriteFile("/proc/sys/"+name, []byte(value), 0)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, unix.EROFS) {
		nettest.SkipOrFail(t, "writable /proc/sys", err)
	}
	assert.NilError(t, err)
}

// TestWithNetAdminAlone does all that a daemon does, in a process that has no
// other capability.
func TestWithNetAdminAlone(t *testing.T) {
	const helper = "ISTHMUS_TEST_NET_ADMIN_ALONE"
	want := netstate.State{
		Routes: []netstate.Route{{Table: 90, Dst: prefix("10.1.0.0/16"), Type: netstate.Unreachable}},
		Rules:  []netstate.Rule{{Priority: 310, Src: prefix("10.8.0.0/16"), Table: 90}},
		Tables: every(netstate.FamilyIPv4),
	}
	if os.Getenv(helper) != "" {
		caps := cap.NewSet()
		assert.NilError(t, caps.SetFlag(cap.Permitted, true, cap.NET_ADMIN))
		assert.NilError(t, caps.SetFlag(cap.Effective, true, cap.NET_ADMIN))
		assert.NilError(t, caps.SetProc())
		ns := open(t, Config{StateDir: t.TempDir(), PrivateKey: testKey})
		if Missing(ns.Features(t.Context()), FeatureGeneve) == nil {
			want.Links = append(want.Links, geneve("g1", 1, "192.0.2.100"))
			want.Addresses = append(want.Addresses, netstate.Address{Dev: "g1", Prefix: prefix("10.80.0.1/32")})
		}
		if Missing(ns.Features(t.Context()), FeatureVXLAN) == nil {
			want.Links = append(want.Links, vxlan("x1", 1, "192.0.2.1"))
			want.Neighbors = []netstate.Neighbor{neighbor("x1", "10.80.0.2", 2)}
			want.FDB = []netstate.FDBEntry{entry("x1", 2, "192.0.2.102")}
		}
		other := settingOf(t, observe(t, ns), "lo")
		other.Forwarding = !other.Forwarding
		want.Settings = []netstate.Setting{other}
		if ns.Implementation() == Kernel || probeTUN() == nil {
			s := serverState()
			want.Links, want.WireGuard = append(want.Links, s.Links...), s.WireGuard
		}
		converge(t, ns, want)
		return
	}
	t.Parallel()
	ns, test := openWith(t)
	need(t, ns, FeatureNAT)
	self, err := os.Executable()
	assert.NilError(t, err)
	out := test.Run("env", helper+"=1", self, "-test.run=^TestWithNetAdminAlone$", "-test.v")
	assert.Assert(t, strings.Contains(out, "--- PASS: TestWithNetAdminAlone"), out)
}
