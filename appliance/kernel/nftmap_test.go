package kernel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// entries returns the entries of a map, written as in nft(8).
func entries(texts ...string) []netstate.MapEntry {
	var out []netstate.MapEntry
	for _, s := range texts {
		key, to, _ := strings.Cut(s, " : ")
		e := netstate.MapEntry{Addr: rangeOf(key)}
		if p, err := netip.ParsePrefix(to); err == nil {
			e.To = p
		} else if to != "" {
			e.To = netip.PrefixFrom(addr(to), addr(to).BitLen())
		}
		out = append(out, e)
	}
	return out
}

// mapTable is a table that has a map of addresses and one of prefixes in both
// directions.
func mapTable(f netstate.Family, ips, prefixes []netstate.MapEntry) netstate.Table {
	reverse := func(es []netstate.MapEntry) []netstate.MapEntry {
		var out []netstate.MapEntry
		for _, e := range es {
			p, _ := e.Addr.AsPrefix()
			out = append(out, netstate.MapEntry{Addr: netstate.RangeOf(e.To), To: p, Name: e.Name})
		}
		slices.SortFunc(out, func(a, b netstate.MapEntry) int { return a.Addr.From.Compare(b.Addr.From) })
		return out
	}
	nat := func(kind netstate.ActionKind, dir string, prefix bool, es []netstate.MapEntry, ms ...netstate.Match) netstate.FirewallRule {
		return netstate.FirewallRule{Matches: ms, Action: netstate.Action{Kind: kind, Prefix: prefix, Map: netstate.AddrMap{Dir: dir, Entries: es}}}
	}
	return netstate.Table{Family: f, Name: "maps", Chains: []netstate.Chain{
		{Name: "prerouting", Type: "nat", Hook: "prerouting", Priority: -100, Rules: []netstate.FirewallRule{
			nat(netstate.DNAT, "dst", false, ips), nat(netstate.DNAT, "dst", true, prefixes),
		}},
		{Name: "postrouting", Type: "nat", Hook: "postrouting", Priority: 100, Rules: []netstate.FirewallRule{
			nat(netstate.SNAT, "src", false, reverse(ips), dev("out", "v0")), nat(netstate.SNAT, "src", true, reverse(prefixes), dev("out", "v0")),
		}},
	}}
}

// TestMapsTranslate sends packets, and errors about them, through a router that
// translates by maps: peer, router, hosts.
func TestMapsTranslate(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name          string
		family        netstate.Family
		left, peer    string
		right, host   string
		ips, prefixes []string
		flows         map[string]string // mapped address: real one
	}{
		{
			"IPv4", netstate.FamilyIPv4, "192.0.2.1/24", "192.0.2.2/24", "198.51.100.1/24", "198.51.100.2/24",
			[]string{"10.70.0.6 : 192.168.40.9", "10.70.0.7 : 192.168.40.10"},
			[]string{"10.71.1.0/24 : 10.1.1.0/24", "10.71.2.0/24 : 10.9.2.0/24", "10.71.7.0-10.71.7.255 : 10.1.7.0/24"},
			map[string]string{
				"10.70.0.6": "192.168.40.9", "10.70.0.7": "192.168.40.10", "10.71.1.77": "10.1.1.77",
				"10.71.2.0": "10.9.2.0", "10.71.2.255": "10.9.2.255", "10.71.7.9": "10.1.7.9",
				"10.71.3.1": "10.71.3.1", // has no entry
			},
		},
		{
			"IPv6", netstate.FamilyINET, "2001:db8:1::1/64", "2001:db8:1::2/64", "2001:db8:2::1/64", "2001:db8:2::2/64",
			[]string{"fd70::6 : fd40::9", "fd70::7 : fd40::10"},
			[]string{"fd71:0:0:1::/64 : fd01:0:0:1::/64", "fd71:0:0:2::/64 : fd01:0:0:9::/64"},
			map[string]string{"fd70::6": "fd40::9", "fd70::7": "fd40::10", "fd71:0:0:1::7:8": "fd01:0:0:1::7:8", "fd71:0:0:2::1": "fd01:0:0:9::1", "fd71:0:0:3::1": "fd71:0:0:3::1"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns, router := openWith(t)
			need(t, ns, FeatureNAT)
			nettest.Need(t, "ip")
			peer, host := nettest.Another(t), nettest.Another(t)
			veth(t, router, peer, tt.left, tt.peer)
			vethNamed(t, router, host, "v1", tt.right, tt.host)
			router.Do(func() {
				writeSysctl(t, "net/ipv4/ip_forward", "1")
				writeSysctl(t, "net/ipv6/conf/all/forwarding", "1")
			})
			all := "0.0.0.0/0"
			if prefix(tt.left).Addr().Is6() {
				all = "::/0"
			}
			peer.Run("ip", "route", "add", all, "via", prefix(tt.left).Addr().String())
			host.Run("ip", "route", "add", all, "via", prefix(tt.right).Addr().String())
			for _, real := range tt.flows {
				p := netip.PrefixFrom(addr(real), addr(real).BitLen()).String()
				host.Run("ip", "addr", "add", p, "dev", "lo", "nodad")
				router.Run("ip", "route", "add", p, "via", prefix(tt.host).Addr().String())
			}
			want := netstate.State{Tables: []netstate.Table{mapTable(tt.family, entries(tt.ips...), entries(tt.prefixes...))}}
			converge(t, ns, want)

			from := prefix(tt.peer).Addr()
			client := listen(t, peer, netip.AddrPortFrom(from, 4000))
			for mapped, real := range tt.flows {
				server := listen(t, host, netip.AddrPortFrom(addr(real), 4001))
				src := deliver(t, client, server, netip.AddrPortFrom(addr(mapped), 4001))
				assert.Equal(t, src, netip.AddrPortFrom(from, 4000), mapped)
				send(t, server, src)
				assert.Equal(t, receive(t, client), netip.AddrPortFrom(addr(mapped), 4001), "the answer of %s", real)
				// A flow that the host begins is seen as the mapped address.
				other := listen(t, peer, netip.AddrPortFrom(from, 4002))
				src = deliver(t, server, other, netip.AddrPortFrom(from, 4002))
				assert.Equal(t, src.Addr(), addr(mapped), "%s", real)
				assert.NilError(t, other.Close())
				// The error about a packet to a closed port quotes the packet:
				// it reaches the socket only if the quote is translated, too.
				assert.NilError(t, refused(t, peer, netip.AddrPortFrom(addr(mapped), 9)))
			}
		})
	}
}

// refused sends until an ICMP error about it comes back.
func refused(t *testing.T, ns *nettest.NS, to netip.AddrPort) error {
	t.Helper()
	var c *net.UDPConn
	var err error
	ns.Do(func() { c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to)) })
	if err != nil {
		return err
	}
	defer c.Close()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if _, err := c.Write([]byte("hello")); errors.Is(err, unix.ECONNREFUSED) {
			return poll.Success()
		}
		if err := c.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			return poll.Error(err)
		}
		if _, err := c.Read(make([]byte, 100)); !errors.Is(err, unix.ECONNREFUSED) {
			return poll.Continue("port %s: %v", to, err)
		}
		return poll.Success()
	}, poll.WithTimeout(20*time.Second), poll.WithDelay(10*time.Millisecond)) // hosts send few errors a second
	return nil
}

// many is a table with n addresses and n prefixes.
func many(n int) netstate.Table {
	var ips, prefixes []netstate.MapEntry
	for i := range n {
		a, b := byte(i>>8), byte(i)
		host := netip.AddrFrom4([4]byte{10, 70, a, b})
		ips = append(ips, netstate.MapEntry{
			Addr: netstate.AddrRange{From: host, To: host}, To: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, a, b}), 32), Name: fmt.Sprintf("host-%d", i),
		})
		prefixes = append(prefixes, netstate.MapEntry{
			Addr: netstate.RangeOf(netip.PrefixFrom(netip.AddrFrom4([4]byte{11, a, b, 0}), 24)), To: netip.PrefixFrom(netip.AddrFrom4([4]byte{12, a, b, 0}), 24),
		})
	}
	return mapTable(netstate.FamilyIPv4, ips, prefixes)
}

// TestLargeMaps writes maps whose elements need several messages, all in one
// transaction.
func TestLargeMaps(t *testing.T) {
	nettest.Slow(t, "writes and lists 40,000 elements")
	t.Parallel()
	ns, test := openWith(t)
	need(t, ns, FeatureNAT)
	nettest.Need(t, "nft")
	converge(t, ns, netstate.State{Tables: []netstate.Table{many(10_000)}})
	list := test.Run("nft", "list", "table", "ip", "isthmus-maps")
	for text, n := range map[string]int{" : 192.168.": 10_000, " : 10.70.": 10_000, " : 12.": 10_000, " : 11.": 10_000, "comment \"host-": 20_000} {
		assert.Equal(t, strings.Count(list, text), n, text)
	}
	converge(t, ns, netstate.State{Tables: []netstate.Table{many(3)}})
	assert.Equal(t, strings.Count(test.Run("nft", "list", "table", "ip", "isthmus-maps"), " : 12."), 3)
	converge(t, ns, netstate.State{})
}

// TestLargeMapsNeedLargeSockets: who may not have a large socket is told so,
// and has its other tables all the same.
func TestLargeMapsNeedLargeSockets(t *testing.T) {
	t.Parallel()
	ns, _ := openWith(t)
	need(t, ns, FeatureNAT)
	assert.NilError(t, ns.nft.write.SetWriteBuffer(64<<10))
	small := many(3)
	small.Name = "small"
	want := netstate.State{Tables: []netstate.Table{many(10_000), small}}
	err := ns.Apply(t.Context(), netstate.Diff(observe(t, ns), want))
	assert.ErrorContains(t, err, "table ip maps: ")
	assert.ErrorContains(t, err, "larger than the socket buffer: raise net.core.wmem_max")
	left := netstate.Diff(observe(t, ns), want)
	assert.Equal(t, len(left.SetTables), 1)
	assert.Equal(t, left.SetTables[0].Name, "maps")
}

// TestMapsDoNotDrift: the elements of a map can't be changed by anybody. What
// can be done, to delete the rule or to write another one, is repaired.
func TestMapsDoNotDrift(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t)
	need(t, ns, FeatureNAT)
	nettest.Need(t, "nft")
	want := netstate.State{Tables: []netstate.Table{many(20)}}
	converge(t, ns, want)
	quiet(t, ns, want)
	for _, verb := range []string{"delete", "add"} {
		out := test.Run("sh", "-c", fmt.Sprintf("nft %s element ip isthmus-maps __map0 '{ 10.70.0.3 : 192.168.0.3 }' 2>&1 && echo done || true", verb))
		assert.Assert(t, !strings.Contains(out, "done"), out)
	}
	list := test.Run("nft", "-a", "list", "chain", "ip", "isthmus-maps", "prerouting")
	var handle string
	for line := range strings.Lines(list) {
		if strings.Contains(line, "dnat to ip daddr map") {
			handle = strings.TrimSpace(line[strings.LastIndex(line, " "):])
		}
	}
	for _, command := range []string{
		"delete rule ip isthmus-maps prerouting handle " + handle,
		"flush chain ip isthmus-maps postrouting",
		"add rule ip isthmus-maps prerouting dnat to ip daddr map { 1.2.3.4 : 1.2.3.5 }",
	} {
		test.Run("nft", command)
		select {
		case <-ns.Changed():
		case <-time.After(30 * time.Second):
			t.Fatal("the change was not announced")
		}
		assert.Assert(t, !netstate.Diff(observe(t, ns), want).Empty(), "%s: the change was not seen", command)
		converge(t, ns, want)
	}
	assert.Equal(t, strings.Count(test.Run("nft", "list", "table", "ip", "isthmus-maps"), " : 192.168."), 20)
}

// TestMarksByLinkAlone: connections get the mark of the link that they came in by.
func TestMarksByLinkAlone(t *testing.T) {
	t.Parallel()
	ns, a := openWith(t)
	need(t, ns, FeatureNAT)
	one, two := nettest.Another(t), nettest.Another(t)
	vethNamed(t, a, one, "liqo.node-1", "192.0.2.1/24", "192.0.2.2/24")
	vethNamed(t, a, two, "liqo.node-2", "198.51.100.1/24", "198.51.100.2/24")
	table := netstate.Table{Family: netstate.FamilyIPv4, Name: "marks", Chains: []netstate.Chain{{
		Name: "input", Type: "filter", Hook: "input", Rules: []netstate.FirewallRule{
			{Name: "mark", Matches: []netstate.Match{source("192.0.0.0/2")}, Action: netstate.Action{Kind: netstate.SetCTMark, Map: netstate.AddrMap{
				ByLink: true, Entries: []netstate.MapEntry{{Link: "liqo.node-1", Mark: 1}, {Link: "liqo.node-2", Mark: 2}},
			}}},
			{Name: "of the second", Matches: []netstate.Match{{CTMark: 2}}, Counter: true, Action: netstate.Action{Kind: netstate.Accept}},
		},
	}}}
	converge(t, ns, netstate.State{Tables: []netstate.Table{table}})
	counted := func() bool {
		n, err := ns.Counted(table.ID())
		assert.NilError(t, err)
		return n > 0
	}
	at := netip.MustParseAddrPort("192.0.2.1:4000")
	deliver(t, listen(t, one, netip.MustParseAddrPort("192.0.2.2:0")), listen(t, a, at), at)
	assert.Assert(t, !counted(), "by the first link")
	at = netip.MustParseAddrPort("198.51.100.1:4000")
	deliver(t, listen(t, two, netip.MustParseAddrPort("198.51.100.2:0")), listen(t, a, at), at)
	assert.Assert(t, counted(), "by the second link")
}
