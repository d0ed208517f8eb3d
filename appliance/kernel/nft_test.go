package kernel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

func rangeOf(s string) netstate.AddrRange {
	if p, err := netip.ParsePrefix(s); err == nil {
		return netstate.RangeOf(p)
	}
	from, to, ok := strings.Cut(s, "-")
	if !ok {
		to = from
	}
	return netstate.AddrRange{From: addr(from), To: addr(to)}
}

func source(s string) netstate.Match { return netstate.Match{Dir: "src", Addr: rangeOf(s)} }
func dest(s string) netstate.Match   { return netstate.Match{Dir: "dst", Addr: rangeOf(s)} }
func proto(s string) netstate.Match  { return netstate.Match{L4Proto: s} }
func not(m netstate.Match) netstate.Match {
	m.Negate = true
	return m
}
func ports(dir string, from, to uint16) netstate.Match {
	return netstate.Match{Dir: dir, Ports: netstate.PortRange{From: from, To: to}}
}
func dev(dir, name string) netstate.Match { return netstate.Match{Dir: dir, Dev: name} }

func icmpErrorsMatch() netstate.Match { return netstate.Match{ICMPError: true} }
func redirectsMatch() netstate.Match  { return netstate.Match{ICMPRedirect: true} }

// every returns tables that have every match and every action, in a family.
func every(f netstate.Family) []netstate.Table {
	is6 := f == netstate.FamilyIPv6
	pick := func(v4, v6 string) string {
		if is6 {
			return v6
		}
		return v4
	}
	rule := func(name string, kind netstate.ActionKind, matches ...netstate.Match) netstate.FirewallRule {
		return netstate.FirewallRule{Name: name, Matches: matches, Action: netstate.Action{Kind: kind}}
	}
	to := func(r netstate.FirewallRule, dst string, isPrefix bool) netstate.FirewallRule {
		r.Action.To, r.Action.Prefix = prefix(dst), isPrefix
		return r
	}
	mapped := func(r netstate.FirewallRule, dir string, isPrefix bool, entries ...string) netstate.FirewallRule {
		r.Action.Prefix, r.Action.Map.Dir = isPrefix, dir
		for e := range slices.Chunk(entries, 3) {
			entry := netstate.MapEntry{Addr: rangeOf(e[0]), Name: e[2]}
			if e[1] != "" {
				entry.To = prefix(e[1])
			}
			r.Action.Map.Entries = append(r.Action.Map.Entries, entry)
		}
		return r
	}
	marks := rule("marks", netstate.SetCTMark, proto("tcp"))
	marks.Action.Map = netstate.AddrMap{Dir: "src", Entries: []netstate.MapEntry{
		{Addr: rangeOf(pick("10.0.4.0/24", "fd00:4::/64")), Mark: 7},
		{Addr: rangeOf(pick("10.0.5.1", "fd00:5::1")), Mark: 0x10000, Name: "one"},
	}}
	marksByLink := rule("marks by link", netstate.SetCTMark)
	marksByLink.Action.Map = netstate.AddrMap{Dir: "dst", ByLink: true, Entries: []netstate.MapEntry{
		{Link: "liqo.node-1", Addr: rangeOf(pick("10.80.0.2", "fd80::2")), Mark: 2, Name: "node-1"},
		{Link: "liqo.a-long-one", Addr: rangeOf(pick("10.80.0.3", "fd80::3")), Mark: 3},
	}}
	marksByLinkAlone := rule("marks by link alone", netstate.SetCTMark, source(pick("10.0.0.0/16", "fd00::/48")))
	marksByLinkAlone.Action.Map = netstate.AddrMap{ByLink: true, IPv6: is6, Entries: []netstate.MapEntry{
		{Link: "liqo.a-long-one", Mark: 3}, {Link: "liqo.node-1", Mark: 2, Name: "node-1"},
	}}
	counted := rule("counted", netstate.Drop, source(pick("10.0.0.0/8", "fd00::/8")), dest(pick("10.1.2.3", "fd00::1")))
	counted.Counter = true
	mark := rule("mark", netstate.SetCTMark, dev("in", "d0"))
	mark.Action.Mark = 2
	some := mark
	some.Name, some.Action.Mark, some.Action.Mask = "some bits", 0x40000000, 0x40000000
	masked := rule("restore some", netstate.RestoreCT)
	masked.Action.Mask = 0x3fffffff
	led := rule("led", netstate.SetMark, dest(pick("0.0.0.0/0", "::/0")), icmpErrorsMatch(), netstate.Match{CTDir: "reply"}, netstate.Match{CTMark: 0x40000000})
	led.Action.Mark, led.Counter = 0x20000000, true
	unled := rule("not led", netstate.SetMark, not(netstate.Match{CTDir: "original"}), not(netstate.Match{CTMark: 3}))
	mss := rule("mss", netstate.ClampMSS, dev("out", "d0"))
	mss.Action.MSS = 1200
	u := pick("10.70.0.1/32", "fd70::1/128")
	return append(edgeTables(f), []netstate.Table{
		{Family: f, Name: "filter", Chains: []netstate.Chain{
			{Name: "raw", Type: "filter", Hook: "prerouting", Priority: -300, Rules: []netstate.FirewallRule{
				rule("notrack", netstate.NoTrack, proto("udp"), ports("dst", 6091, 6091)),
			}},
			{Name: "forward", Type: "filter", Hook: "forward", Priority: 0, Policy: "drop", Rules: []netstate.FirewallRule{
				counted,
				rule("odd prefix", netstate.Accept, source(pick("10.1.128.0/17", "fd00:1:8000::/33"))),
				rule("range", netstate.Accept, dest(pick("10.0.0.5-10.0.0.9", "fd00::5-fd00::9"))),
				rule("not", netstate.Accept, not(source(pick("10.0.0.0/16", "fd00:2::/32"))), not(dest(pick("10.0.0.1", "fd00::3"))), not(dest(pick("10.0.0.5-10.0.0.9", "fd00::5-fd00::9")))),
				rule("port of tcp", netstate.Accept, proto("tcp"), ports("dst", 80, 80), ports("src", 1024, 65535)),
				rule("port of any", netstate.Accept, ports("dst", 53, 53)),
				rule("not port", netstate.Accept, not(ports("dst", 22, 23)), proto("tcp")),
				rule("not proto", netstate.Accept, not(proto("tcp"))),
				rule("devices", netstate.Accept, dev("in", "d0"), not(dev("out", "liqo.*"))),
				rule("any device", netstate.Accept, dev("in", netstate.AnyDev), not(dev("out", netstate.AnyDev))),
				rule("reject", netstate.Reject, proto("udp")),
				mark, marks, marksByLink, marksByLinkAlone,
				rule("no name match", netstate.Accept),
				rule("", netstate.Drop),
				mss,
				rule("mss of route", netstate.ClampMSS, proto("tcp")),
			}},
			{Name: "mangle", Type: "filter", Hook: "prerouting", Priority: -150, Rules: []netstate.FirewallRule{
				rule("restore", netstate.RestoreCT, dev("in", "d0")),
				some, masked,
			}},
			{Name: "errors", Type: "filter", Hook: "postrouting", Priority: 150, Rules: []netstate.FirewallRule{
				to(rule("icmp errors", netstate.SetSource, dev("out", "d0"), icmpErrorsMatch()), u, false),
			}},
			{Name: "redirects", Type: "filter", Hook: "output", Priority: 0, Rules: []netstate.FirewallRule{
				rule("redirects", netstate.Drop, dest(pick("10.0.0.0/8", "fd00::/8")), redirectsMatch()),
				rule("not redirects", netstate.Accept, source(pick("10.0.0.0/8", "fd00::/8")), not(redirectsMatch())),
			}},
			{Name: "output", Type: "route", Hook: "output", Priority: -150, Rules: []netstate.FirewallRule{led, unled}},
		}},
		{Family: f, Name: "nat", Chains: []netstate.Chain{
			{Name: "prerouting", Type: "nat", Hook: "prerouting", Priority: -100, Rules: []netstate.FirewallRule{
				to(rule("dnat", netstate.DNAT, dest(pick("10.70.0.2", "fd70::2"))), pick("10.0.0.9/32", "fd00::9/128"), false),
				to(rule("dnat prefix", netstate.DNAT, dest(pick("10.61.0.0/16", "fd61::/64"))), pick("10.0.0.0/16", "fd00::/64"), true),
				mapped(rule("dnat map", netstate.DNAT), "dst", false,
					pick("10.70.1.1", "fd70::1:1"), pick("192.168.40.10/32", "fd40::10/128"), "ip-1",
					pick("10.70.1.2", "fd70::1:2"), pick("192.168.40.9/32", "fd40::9/128"), ""),
				mapped(rule("dnat prefix map", netstate.DNAT, dev("in", "d0")), "dst", true,
					pick("10.71.1.0/24", "fd71:1::/64"), pick("10.1.1.0/24", "fd01:1::/64"), "first",
					pick("10.71.2.0/24", "fd71:1:0:1::/64"), pick("10.1.9.0/24", "fd01:9::/64"), "",
					pick("10.71.7.7", "fd71:7::7"), pick("10.1.7.8/32", "fd01:7::8/128"), "one address"),
			}},
			{Name: "postrouting", Type: "nat", Hook: "postrouting", Priority: 100, Rules: []netstate.FirewallRule{
				to(rule("snat", netstate.SNAT, dev("out", "d0"), not(source(pick("10.0.0.0/16", "fd00::/64")))), u, false),
				to(rule("snat prefix", netstate.SNAT, source(pick("10.0.0.0/16", "fd00::/64"))), pick("10.61.0.0/16", "fd61::/64"), true),
				mapped(rule("snat map", netstate.SNAT, dev("out", "d0")), "src", false,
					pick("10.2.0.0/24", "fd02::/64"), u, "many to one",
					pick("10.2.1.4", "fd02:0:0:1::4"), u, ""),
				mapped(rule("masquerade of some", netstate.Masquerade, source(pick("10.3.0.0/16", "fd03::/32"))), "dst", false,
					pick("192.168.40.10", "fd40::10"), "", "host", pick("192.168.41.0/24", "fd41::/64"), "", ""),
				rule("masquerade", netstate.Masquerade, dev("out", "d0")),
			}},
		}},
	}...)
}

// TestTablesAreWhatTheySay compares what we write with what nft(8) makes of
// the text that a table prints.
func TestTablesAreWhatTheySay(t *testing.T) {
	tablesOf := map[netstate.Family]func(netstate.Family) []netstate.Table{
		netstate.FamilyIPv4: every, netstate.FamilyIPv6: every, netstate.FamilyINET: every,
		netstate.FamilyARP: everyOfLinkLayers, netstate.FamilyBridge: everyOfLinkLayers,
	}
	featureOf := map[netstate.Family]string{netstate.FamilyARP: FeatureNFTablesARP, netstate.FamilyBridge: FeatureNFTablesBridge}
	for f, every := range tablesOf {
		t.Run(string(f), func(t *testing.T) {
			t.Parallel()
			ns, test := openWith(t)
			need(t, ns, cmp.Or(featureOf[f], FeatureNAT))
			nettest.Need(t, "nft")
			tables := every(f)
			converge(t, ns, netstate.State{Tables: tables})
			ours := digestChain.ReplaceAllString(test.Run("nft", "list", "ruleset"), "")

			other := nettest.Another(t)
			for _, table := range tables {
				table.Name = TablePrefix + table.Name
				other.Run("nft", table.String())
			}
			theirs := other.Run("nft", "list", "ruleset")
			assert.Equal(t, ours, theirs)
			if there("/etc/protocols") && there("testdata") { // else nft prints numbers, or this is a virtual machine
				golden.Assert(t, ours, "every-"+string(f)+".nft")
			}
		})
	}
}

func there(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

var digestChain = regexp.MustCompile(`(?s)\n\tchain digest \{.*?\n\t\}\n`)

// TestTablesAreReplacedWhole replaces a table again and again: nobody ever sees it
// absent.
func TestTablesAreReplacedWhole(t *testing.T) {
	t.Parallel()
	ns, _ := openWith(t)
	need(t, ns, FeatureNFTables)
	table := func(n int) netstate.State {
		var rules []netstate.FirewallRule
		for i := range n {
			rules = append(rules, netstate.FirewallRule{Name: fmt.Sprint(i), Action: netstate.Action{Kind: netstate.Accept}})
		}
		return netstate.State{Tables: []netstate.Table{{Family: netstate.FamilyIPv4, Name: "t", Chains: []netstate.Chain{
			{Name: "c", Type: "filter", Hook: "forward", Rules: rules}}}}}
	}
	converge(t, ns, table(3))
	watcher, err := openNFT()
	assert.NilError(t, err)
	defer watcher.close()
	ctx, cancel := context.WithCancel(t.Context())
	odd := make(chan string, 1)
	done := make(chan struct{})
	var observed atomic.Int64
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			tables, err := watcher.observe()
			if err != nil {
				continue // changed too often while read
			}
			observed.Add(1)
			if len(tables) != 1 || len(tables[0].Chains) != 1 || len(tables[0].Chains[0].Rules) < 3 {
				select {
				case odd <- fmt.Sprint(tables):
				default:
				}
			}
		}
	}()
	start := time.Now()
	for i := 0; i < 100 || observed.Load() < 10; i++ {
		assert.NilError(t, ns.Apply(t.Context(), netstate.Diff(netstate.State{}, table(3+i%2))))
		assert.Assert(t, time.Since(start) < 5*time.Minute, "it could be read %d times only", observed.Load())
	}
	cancel()
	<-done
	select {
	case s := <-odd:
		t.Fatal(s)
	default:
	}
}

// TestPrefixNATKeepsHostBits sends a packet through the NAT of two prefixes.
func TestPrefixNATKeepsHostBits(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, local, remote, mapped, from, to, want, seen string }{
		{"IPv4", "192.0.2.1/24", "192.0.2.2/24", "10.61.0.0/16", "10.0.3.4/32", "10.61.3.4/32", "10.0.3.4", "10.0.0.0/16"},
		{"IPv6", "2001:db8::1/64", "2001:db8::2/64", "fd61::/64", "fd00::3:4/128", "fd61::3:4/128", "fd00::3:4", "fd00::/64"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns, a := openWith(t)
			need(t, ns, FeatureNAT)
			b := nettest.Another(t)
			veth(t, a, b, tt.local, tt.remote)
			local, remote := prefix(tt.local).Addr(), prefix(tt.remote).Addr()
			a.Run("ip", "addr", "add", tt.from, "dev", "lo", "nodad")
			b.Run("ip", "route", "add", tt.mapped, "via", local.String())
			fam := netstate.FamilyINET
			converge(t, ns, netstate.State{Tables: []netstate.Table{{Family: fam, Name: "remap", Chains: []netstate.Chain{
				{Name: "in", Type: "nat", Hook: "prerouting", Priority: -100, Rules: []netstate.FirewallRule{{
					Name: "in", Matches: []netstate.Match{dest(tt.mapped)}, Action: netstate.Action{Kind: netstate.DNAT, To: prefix(tt.seen), Prefix: true}}}},
				{Name: "out", Type: "nat", Hook: "postrouting", Priority: 100, Rules: []netstate.FirewallRule{{
					Name: "out", Matches: []netstate.Match{source(tt.seen)}, Action: netstate.Action{Kind: netstate.SNAT, To: prefix(tt.mapped), Prefix: true}}}},
			}}}})

			server := listen(t, a, netip.AddrPortFrom(addr(tt.want), 4000))
			client := listen(t, b, netip.AddrPortFrom(remote, 4001))
			from := deliver(t, client, server, netip.AddrPortFrom(prefix(tt.to).Addr(), 4000))
			assert.Equal(t, from.Addr().Unmap(), remote)
			// From the other side: a new flow of ours is seen as the prefix.
			server2 := listen(t, b, netip.AddrPortFrom(remote, 4002))
			from = deliver(t, server, server2, netip.AddrPortFrom(remote, 4002))
			assert.Equal(t, from.Addr().Unmap(), prefix(tt.to).Addr())
		})
	}
}

// listen tries again while the address is taken: a process that another test
// starts holds a copy of a closed socket from its fork until its exec.
func listen(t testing.TB, ns *nettest.NS, at netip.AddrPort) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		var err error
		ns.Do(func() { c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at)) })
		switch {
		case errors.Is(err, unix.EADDRINUSE):
			return poll.Continue("%v", err)
		case err != nil:
			return poll.Error(err)
		}
		return poll.Success()
	}, poll.WithTimeout(20*time.Second), poll.WithDelay(time.Millisecond))
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func send(t testing.TB, c *net.UDPConn, to netip.AddrPort) {
	t.Helper()
	_, err := c.WriteToUDPAddrPort([]byte("hello"), to)
	assert.NilError(t, err)
}

// deliver sends until something arrives, and returns its source: what is sent
// before neighbours are known may be lost.
func deliver(t testing.TB, out, in *net.UDPConn, to netip.AddrPort) (from netip.AddrPort) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if _, err := out.WriteToUDPAddrPort([]byte("hello"), to); err != nil {
			return poll.Continue("%v", err)
		}
		if err := in.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			return poll.Error(err)
		}
		var err error
		if _, from, err = in.ReadFromUDPAddrPort(make([]byte, 2000)); err != nil {
			return poll.Continue("%v", err)
		}
		return poll.Success()
	}, poll.WithTimeout(20*time.Second), poll.WithDelay(time.Millisecond))
	return from
}

// receive waits long enough for WireGuard to try a handshake again, which it
// does after 5 s: one that comes 50 ms after another is not answered.
func receive(t testing.TB, c *net.UDPConn) netip.AddrPort {
	t.Helper()
	assert.NilError(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
	_, from, err := c.ReadFromUDPAddrPort(make([]byte, 2000))
	assert.NilError(t, err)
	return from
}

// edgeTables are tables that replace prefixes, which the families besides IPv4 have
// not.
func edgeTables(f netstate.Family) []netstate.Table {
	if f != netstate.FamilyIPv4 {
		return nil
	}
	set := func(name, dir string, of netstate.Header, to string, matches ...netstate.Match) netstate.FirewallRule {
		return netstate.FirewallRule{
			Name: name, Matches: matches, Counter: true,
			Action: netstate.Action{Kind: netstate.SetPrefix, Dir: dir, Of: of, To: prefix(to)},
		}
	}
	of := func(h netstate.Header, m netstate.Match) netstate.Match { m.Of = h; return m }
	return []netstate.Table{{Family: f, Name: "edge", Chains: []netstate.Chain{
		{Name: "in", Type: "filter", Hook: "prerouting", Priority: -301, Rules: []netstate.FirewallRule{
			set("source", "src", netstate.OfPacket, "10.61.0.0/16", dev("in", "d0"), source("10.0.0.0/16")),
			set("odd", "dst", netstate.OfPacket, "10.64.0.0/11", dest("10.32.0.0/11")),
			set("quoted destination", "dst", netstate.OfQuoted, "10.61.0.0/16", dev("in", "d0"), icmpErrorsMatch(), of(netstate.OfQuoted, dest("10.0.0.0/16"))),
			set("quoted source", "src", netstate.OfQuoted, "10.61.0.0/21", icmpErrorsMatch(), of(netstate.OfQuoted, source("10.0.8.0/21"))),
			set("not quoted", "src", netstate.OfQuoted, "10.61.0.0/16", icmpErrorsMatch(), not(of(netstate.OfQuoted, source("10.0.0.7")))),
		}},
		{Name: "own", Type: "filter", Hook: "output", Priority: -301, Rules: []netstate.FirewallRule{
			set("of connection", "dst", netstate.OfQuoted, "10.61.0.0/16", icmpErrorsMatch(), netstate.Match{CTDir: "reply"}, of(netstate.OfConnection, dest("10.61.0.0/16"))),
			set("range", "dst", netstate.OfQuoted, "10.61.0.0/16", icmpErrorsMatch(), not(of(netstate.OfConnection, source("10.61.0.1-10.61.0.9")))),
		}},
	}}}
}

// TestICMPErrorsGetASource sends an ICMP error through a rule that gives it
// another source, and looks at the checksum: the receiving kernel drops what
// has a wrong one.
func TestICMPErrorsGetASource(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, local, remote, peer, unreachable, source string }{
		{"IPv4", "192.0.2.1/24", "192.0.2.2/24", "192.0.2.2", "10.5.0.1", "10.70.0.1"},
		{"IPv6", "2001:db8::1/64", "2001:db8::2/64", "2001:db8::2", "fd05::1", "fd70::1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns, a := openWith(t)
			need(t, ns, FeatureNFTables)
			b := nettest.Another(t)
			veth(t, a, b, tt.local, tt.remote)
			a.Do(func() {
				writeSysctl(t, "net/ipv4/ip_forward", "1")
				writeSysctl(t, "net/ipv6/conf/all/forwarding", "1")
			})
			bits := addr(tt.unreachable).BitLen()
			b.Run("ip", "route", "add", fmt.Sprintf("%s/%d", tt.unreachable, bits), "via", prefix(tt.local).Addr().String())
			converge(t, ns, netstate.State{
				Rules: []netstate.Rule{{Priority: 390, IIF: "v0", Unreachable: true, IPv6: bits == 128}},
				Tables: []netstate.Table{{Family: netstate.FamilyINET, Name: "errors", Chains: []netstate.Chain{{
					Name: "c", Type: "filter", Hook: "postrouting", Priority: 150, Rules: []netstate.FirewallRule{{
						Name:    "source",
						Matches: []netstate.Match{dev("out", "v0"), icmpErrorsMatch()},
						Action:  netstate.Action{Kind: netstate.SetSource, To: netip.PrefixFrom(addr(tt.source), bits)},
					}}}}}},
			})
			in := listenICMP(t, b, bits == 128)
			out := listen(t, b, netip.AddrPortFrom(addr(tt.peer), 0))
			send(t, out, netip.AddrPortFrom(addr(tt.unreachable), 9))
			assert.NilError(t, in.SetReadDeadline(time.Now().Add(5*time.Second)))
			for {
				buf := make([]byte, 2000)
				n, from, err := in.ReadFrom(buf)
				assert.NilError(t, err)
				// Destination unreachable: 3 in ICMP, 1 in ICMPv6. Neighbour
				// discovery is heard too.
				if n > 0 && (bits == 32 && buf[0] == 3 || bits == 128 && buf[0] == 1) {
					assert.Equal(t, from.String(), tt.source)
					// A sum in the wrong place would be right as well.
					assert.DeepEqual(t, buf[4:8], []byte{0, 0, 0, 0})
					break
				}
			}
			// The kernel believed the error: its checksum is right.
			connected := dial(t, b, netip.AddrPortFrom(addr(tt.unreachable), 9))
			raw, err := connected.SyscallConn()
			assert.NilError(t, err)
			assert.NilError(t, raw.Control(func(fd uintptr) {
				if bits == 128 {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1)
				} else {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVERR, 1)
				}
			}))
			assert.NilError(t, err)
			_, err = connected.Write([]byte("x"))
			assert.NilError(t, err)
			assert.NilError(t, connected.SetReadDeadline(time.Now().Add(5*time.Second)))
			_, err = connected.Read(make([]byte, 1))
			assert.Assert(t, !errors.Is(err, os.ErrDeadlineExceeded), "the error was not believed")
		})
	}
}

func listenICMP(t testing.TB, ns *nettest.NS, is6 bool) (c net.PacketConn) {
	t.Helper()
	network := "ip4:icmp"
	if is6 {
		network = "ip6:ipv6-icmp"
	}
	var err error
	ns.Do(func() { c, err = net.ListenPacket(network, "") })
	assert.NilError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func dial(t testing.TB, ns *nettest.NS, to netip.AddrPort) (c *net.UDPConn) {
	t.Helper()
	var err error
	ns.Do(func() { c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to)) })
	assert.NilError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}
