package kernel

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// everyOfLinkLayers returns the tables of a family whose packets are not known to
// be IP, with all that needs no further part of the kernel.
func everyOfLinkLayers(f netstate.Family) []netstate.Table {
	rule := func(name string, kind netstate.ActionKind, matches ...netstate.Match) netstate.FirewallRule {
		return netstate.FirewallRule{Name: name, Matches: matches, Action: netstate.Action{Kind: kind}}
	}
	counted := func(r netstate.FirewallRule) netstate.FirewallRule {
		r.Counter = true
		return r
	}
	if f == netstate.FamilyARP {
		return []netstate.Table{{Family: f, Name: "filter", Chains: []netstate.Chain{
			{Name: "in", Type: "filter", Hook: "input", Priority: 0, Policy: "drop", Rules: []netstate.FirewallRule{
				counted(rule("counted", netstate.Drop, source("10.0.0.0/8"), dest("10.1.2.3"))),
				rule("odd prefix", netstate.Accept, source("10.1.128.0/17")),
				rule("range", netstate.Accept, dest("10.0.0.5-10.0.0.9")),
				rule("not", netstate.Accept, not(source("10.0.0.0/16")), not(dest("10.0.0.1")), not(dest("10.0.0.5-10.0.0.9"))),
				rule("device", netstate.Accept, dev("in", "d0"), not(dev("in", "liqo.*"))),
				rule("", netstate.Accept),
			}},
			{Name: "out", Type: "filter", Hook: "output", Priority: 50, Rules: []netstate.FirewallRule{
				rule("device", netstate.Drop, not(dev("out", "d0")), dest("10.0.0.0/24")),
			}},
		}}}
	}
	mss := rule("mss", netstate.ClampMSS, proto("tcp"), dev("out", "d0"))
	mss.Action.MSS = 1200
	return []netstate.Table{{Family: f, Name: "filter", Chains: []netstate.Chain{
		{Name: "raw", Type: "filter", Hook: "prerouting", Priority: -300, Rules: []netstate.FirewallRule{
			rule("notrack", netstate.NoTrack, proto("udp"), ports("dst", 6091, 6091)),
		}},
		{Name: "forward", Type: "filter", Hook: "forward", Priority: -200, Policy: "drop", Rules: []netstate.FirewallRule{
			counted(rule("counted", netstate.Drop, source("10.0.0.0/8"), dest("10.1.2.3"))),
			counted(rule("counted", netstate.Drop, source("fd00::/8"), dest("fd00::1"))),
			rule("odd prefix", netstate.Accept, source("fd00:1:8000::/33")),
			rule("range", netstate.Accept, dest("10.0.0.5-10.0.0.9")),
			rule("not", netstate.Accept, not(source("10.0.0.0/16")), not(dest("10.0.0.1"))),
			rule("address and port", netstate.Accept, source("10.0.0.0/16"), proto("tcp"), ports("dst", 80, 80)),
			rule("port of tcp", netstate.Accept, proto("tcp"), ports("dst", 80, 80), ports("src", 1024, 65535)),
			rule("port of any", netstate.Accept, ports("dst", 53, 53)),
			rule("not proto", netstate.Accept, not(proto("tcp"))),
			rule("devices", netstate.Accept, dev("in", "d0"), not(dev("out", "liqo.*"))),
			mss,
			rule("", netstate.Accept),
		}},
		{Name: "in", Type: "filter", Hook: "input", Priority: 0, Rules: []netstate.FirewallRule{rule("in", netstate.Accept, dev("in", "d0"))}},
		{Name: "out", Type: "filter", Hook: "output", Priority: 0, Rules: []netstate.FirewallRule{rule("out", netstate.Accept, dev("out", "d0"))}},
		{Name: "last", Type: "filter", Hook: "postrouting", Priority: 300, Rules: []netstate.FirewallRule{rule("last", netstate.Accept, dev("out", "d0"))}},
	}}}
}

// TestBridgeTablesDrop has two hosts on a bridge: a table of the bridge's family
// stops what one sends the other, and nothing else.
func TestBridgeTablesDrop(t *testing.T) {
	t.Parallel()
	nettest.Need(t, "ip")
	for _, tt := range []struct {
		name, hook, a, b string
		matches          []netstate.Match
	}{
		{"IPv4 by address and port", "forward", "192.0.2.1/24", "192.0.2.2/24", []netstate.Match{dest("192.0.2.2"), proto("udp"), ports("dst", 4000, 4000)}},
		{"IPv6 by address and port", "forward", "2001:db8::1/64", "2001:db8::2/64", []netstate.Match{dest("2001:db8::2"), proto("udp"), ports("dst", 4000, 4000)}},
		{"by devices", "forward", "192.0.2.1/24", "192.0.2.2/24", []netstate.Match{dev("in", "v0"), dev("out", "v1"), ports("dst", 4000, 4000)}},
		{"before the bridge decides", "prerouting", "192.0.2.1/24", "192.0.2.2/24", []netstate.Match{dev("in", "v0"), ports("dst", 4000, 4000)}},
		{"at its end", "postrouting", "192.0.2.1/24", "192.0.2.2/24", []netstate.Match{dev("out", "v1"), ports("dst", 4000, 4000)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns, a, b := bridged(t, tt.a, tt.b)
			need(t, ns, FeatureNFTablesBridge)
			out := listen(t, a, netip.AddrPortFrom(prefix(tt.a).Addr(), 0))
			before := listen(t, b, netip.AddrPortFrom(prefix(tt.b).Addr(), 4000))
			other := listen(t, b, netip.AddrPortFrom(prefix(tt.b).Addr(), 4001))
			deliver(t, out, before, netip.AddrPortFrom(prefix(tt.b).Addr(), 4000)) // the bridge works
			assert.NilError(t, before.Close())                                     // with what came late

			table := netstate.Table{Family: netstate.FamilyBridge, Name: "lan", Chains: []netstate.Chain{{
				Name: "c", Type: "filter", Hook: tt.hook, Rules: []netstate.FirewallRule{
					{Name: "drop", Matches: tt.matches, Counter: true, Action: netstate.Action{Kind: netstate.Drop}}}}}}
			converge(t, ns, netstate.State{Tables: []netstate.Table{table}})
			in := listen(t, b, netip.AddrPortFrom(prefix(tt.b).Addr(), 4000))
			send(t, out, netip.AddrPortFrom(prefix(tt.b).Addr(), 4000))
			waitCounted(t, ns, table.ID())
			deliver(t, out, other, netip.AddrPortFrom(prefix(tt.b).Addr(), 4001))
			// What was sent before the other has come, so it would be here.
			assert.NilError(t, in.SetReadDeadline(time.Now().Add(time.Millisecond)))
			_, _, err := in.ReadFromUDPAddrPort(make([]byte, 2000))
			var timeout net.Error
			assert.Assert(t, errors.As(err, &timeout) && timeout.Timeout(), "%v", err)

			converge(t, ns, netstate.State{})
			deliver(t, out, in, netip.AddrPortFrom(prefix(tt.b).Addr(), 4000))
		})
	}
}

// TestARPTablesDrop has a host that nobody finds: a table of ARP drops what asks
// for its address, at either end.
func TestARPTablesDrop(t *testing.T) {
	t.Parallel()
	nettest.Need(t, "ip")
	for _, tt := range []struct {
		name, hook string
		matches    []netstate.Match
	}{
		{"who is asked", "input", []netstate.Match{source("192.0.2.2"), dest("192.0.2.1"), dev("in", "v0")}},
		{"who asks", "output", []netstate.Match{not(source("192.0.2.9")), dest("192.0.2.0/24"), dev("out", "v0")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns, a := openWith(t)
			need(t, ns, FeatureNFTablesARP)
			b := nettest.Another(t)
			table := netstate.Table{Family: netstate.FamilyARP, Name: "nobody", Chains: []netstate.Chain{{
				Name: "c", Type: "filter", Hook: tt.hook, Rules: []netstate.FirewallRule{
					{Name: "drop", Matches: tt.matches, Counter: true, Action: netstate.Action{Kind: netstate.Drop}}}}}}
			converge(t, ns, netstate.State{Tables: []netstate.Table{table}})
			veth(t, a, b, "192.0.2.1/24", "192.0.2.2/24")
			asking, asked := b, a
			if tt.hook == "output" {
				asking, asked = a, b
			}
			addrs := map[*nettest.NS]netip.Addr{a: addr("192.0.2.1"), b: addr("192.0.2.2")}
			out := listen(t, asking, netip.AddrPortFrom(addrs[asking], 0))
			in := listen(t, asked, netip.AddrPortFrom(addrs[asked], 4000))
			send(t, out, netip.AddrPortFrom(addrs[asked], 4000))
			waitCounted(t, ns, table.ID())
			assert.Check(t, !strings.Contains(asking.Run("ip", "neigh", "show", addrs[asked].String()), "lladdr"))

			converge(t, ns, netstate.State{})
			deliver(t, out, in, netip.AddrPortFrom(addrs[asked], 4000))
			assert.Check(t, is.Contains(asking.Run("ip", "neigh", "show", addrs[asked].String()), "lladdr"))
		})
	}
}

// TestTablesTheKernelLacks asks for what not every kernel has: it is there, or its
// table says what is missing. The other tables are there in either case.
func TestTablesTheKernelLacks(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t)
	need(t, ns, FeatureNFTables, FeatureNFTablesBridge)
	nettest.Need(t, "nft")
	with := func(name string, f netstate.Family, hook string, a netstate.Action) netstate.Table {
		return netstate.Table{Family: f, Name: name, Chains: []netstate.Chain{{Name: "c", Type: "filter", Hook: hook, Rules: []netstate.FirewallRule{{Name: "r", Action: a}}}}}
	}
	accept := netstate.Action{Kind: netstate.Accept}
	for _, tt := range []struct {
		name   string
		hook   string
		action netstate.Action
	}{
		{"reject", "prerouting", netstate.Action{Kind: netstate.Reject}},
		{"mark", "forward", netstate.Action{Kind: netstate.SetCTMark, Mark: 1}},
		{"restore", "forward", netstate.Action{Kind: netstate.RestoreCT}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			special := with("special", netstate.FamilyBridge, tt.hook, tt.action)
			others := []netstate.Table{
				with("special", netstate.FamilyIPv4, "forward", accept),
				with("plain", netstate.FamilyBridge, "forward", accept),
			}
			want := netstate.State{Tables: append(others, special)}
			assert.NilError(t, want.Validate())
			err := ns.Apply(t.Context(), netstate.Diff(observe(t, ns), want))
			left := netstate.Diff(observe(t, ns), want)
			if err == nil {
				t.Log("this kernel has it")
				assert.Assert(t, left.Empty(), "%s", left)
				// As nft(8) reads the text that the table prints.
				list := []string{"nft", "list", "chain", "bridge", TablePrefix + "special", "c"}
				other := nettest.Another(t)
				text := special
				text.Name = TablePrefix + text.Name
				other.Run("nft", text.String())
				assert.Equal(t, test.Run(list...), other.Run(list...))
			} else {
				t.Log(err)
				assert.ErrorIs(t, err, ErrUnsupported)
				assert.ErrorContains(t, err, "table bridge special: ")
				assert.ErrorContains(t, err, "modules nft_reject_bridge for reject, nf_conntrack_bridge for marks of connections")
				assert.Equal(t, left.String(), netstate.Diff(netstate.State{Tables: others}, want).String())
				assert.Assert(t, netstate.Diff(observe(t, ns), netstate.State{Tables: others}).Empty())
			}
			converge(t, ns, netstate.State{})
		})
	}
}

// TestFamiliesTheKernelLacks are the errors of a kernel that is built without a
// family, or without what a rule needs, each about its table.
func TestFamiliesTheKernelLacks(t *testing.T) {
	for _, tt := range []struct {
		family netstate.Family
		err    error
		want   string
	}{
		{netstate.FamilyARP, unix.EOPNOTSUPP, "table arp t: not supported here: the kernel lacks nftables for ARP (CONFIG_NF_TABLES_ARP)"},
		{netstate.FamilyBridge, unix.EOPNOTSUPP, "table bridge t: not supported here: the kernel lacks nftables for bridges (CONFIG_NF_TABLES_BRIDGE)"},
		{netstate.FamilyBridge, unix.EPROTO, "table bridge t: not supported here: the kernel lacks nftables for bridges"},
		{netstate.FamilyIPv4, unix.ENOENT, "table ip t: not supported here: the kernel lacks nftables (module nf_tables) or one of the expressions used (modules nft_ct, "},
	} {
		err := explainNFT([]netstate.Table{{Family: tt.family, Name: "t"}}, nil, tt.err)
		assert.Check(t, is.ErrorContains(err, tt.want))
		assert.Check(t, is.ErrorIs(err, ErrUnsupported))
		assert.Check(t, is.ErrorIs(err, tt.err))
	}
}

// bridged returns a namespace with a bridge, and two others at its ports v0 and
// v1.
func bridged(t testing.TB, addrA, addrB string) (ns *NetNS, a, b *nettest.NS) {
	t.Helper()
	ns, _ = openWith(t, "br0")
	bridge, err := ns.nl.LinkByName("br0")
	assert.NilError(t, err)
	a, b = nettest.Another(t), nettest.Another(t)
	for _, end := range []struct {
		port string
		ns   *nettest.NS
		addr string
	}{{"v0", a, addrA}, {"v1", b, addrB}} {
		port := &netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: end.port, MasterIndex: bridge.Attrs().Index},
			PeerName:  "eth0", PeerNamespace: netlink.NsFd(end.ns.FD()),
		}
		assert.NilError(t, ns.nl.LinkAdd(port))
		assert.NilError(t, ns.nl.LinkSetUp(port))
		end.ns.Run("ip", "link", "set", "eth0", "up")
		end.ns.Run("ip", "addr", "add", end.addr, "dev", "eth0", "nodad")
	}
	return ns, a, b
}

// waitCounted waits until a table's counters have seen a packet.
func waitCounted(t testing.TB, ns *NetNS, id netstate.TableID) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		n, err := ns.Counted(id)
		if err != nil {
			return poll.Error(err)
		}
		if n == 0 {
			return poll.Continue("no packet")
		}
		return poll.Success()
	}, poll.WithTimeout(20*time.Second), poll.WithDelay(time.Millisecond))
}
