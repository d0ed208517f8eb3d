package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	vnl "github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// remaps returns a table that translates destinations as the pairs of networks
// say.
func remaps(name string, pairs ...string) netstate.Table {
	c := netstate.Chain{Name: "outgoing", Type: "nat", Hook: "prerouting", Priority: -100}
	for i := 0; i+1 < len(pairs); i += 2 {
		c.Rules = append(c.Rules, netstate.FirewallRule{
			Name: pairs[i], Matches: []netstate.Match{dest(pairs[i]), not(dev("in", "liqo-tunnel"))},
			Action: netstate.Action{Kind: netstate.DNAT, To: prefix(pairs[i+1]), Prefix: true},
		})
	}
	return netstate.Table{Family: netstate.FamilyINET, Name: name, Chains: []netstate.Chain{c}}
}

// entriesTo returns the IDs of the entries of the connection table that were
// begun to a destination.
func entriesTo(t testing.TB, ns *NetNS, to netip.AddrPort) (ids []uint32) {
	t.Helper()
	family := byte(unix.AF_INET)
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	msgs, err := dump(ns.nft.read, ctnetlink|vnl.IPCTNL_MSG_CT_GET, []byte{family, unix.NFNETLINK_V0, 0, 0})
	assert.NilError(t, err)
	for _, m := range msgs {
		c, _ := parseConnection(m.Data)
		if netip.AddrPortFrom(c.Orig.Dst, c.Orig.DstPort) != to {
			continue
		}
		eachAttr(m.Data[nfgenmsgLen:], func(t uint16, v []byte) {
			if t == vnl.CTA_ID {
				ids = append(ids, binary.BigEndian.Uint32(v))
			}
		})
	}
	return ids
}

// answerTo sends from a socket until somebody answers, and returns who it is:
// servers answer with their own address.
func answerTo(t testing.TB, c *net.UDPConn, to netip.AddrPort) string {
	t.Helper()
	buf := make([]byte, 200)
	for range 100 {
		question := strconv.FormatInt(time.Now().UnixNano(), 10)
		_, err := c.WriteToUDPAddrPort([]byte(question), to)
		assert.NilError(t, err)
		assert.NilError(t, c.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				break
			}
			// Answers to earlier questions may have been on their way.
			if who, ok := strings.CutSuffix(string(buf[:n]), " "+question); ok {
				assert.Equal(t, from, to, "the answer's source is not translated back")
				return who
			}
		}
	}
	t.Fatalf("nobody answers at %s", to)
	return ""
}

// TestTranslationsOfEstablishedFlows changes translations under flows that go
// on: they follow. Flows that the change is not about keep their entries, a
// second pass evicts nothing, and a daemon that starts anew knows what the one
// before it has written.
func TestTranslationsOfEstablishedFlows(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name                          string
		router, far, client           string
		one, two                      string // servers in networks that are remapped
		here, other, oneNet, twoNet   string
		remapped, kept, direct, moved string
	}{
		{"IPv4", "192.0.2.1/24", "192.0.2.2/24", "10.0.0.5", "10.1.0.5", "10.2.0.5", "11.0.0.0/16", "12.0.0.0/16", "10.1.0.0/16", "10.2.0.0/16",
			"11.0.0.5", "12.0.0.5", "10.1.0.5", "13.0.0.5"},
		{"IPv6", "2001:db8::1/64", "2001:db8::2/64", "fd00::5", "fd01::5", "fd02::5", "fd11::/64", "fd12::/64", "fd01::/64", "fd02::/64",
			"fd11::5", "fd12::5", "fd01::5", "fd13::5"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns, router := openWith(t)
			need(t, ns, FeatureNAT)
			far, client := nettest.Another(t), nettest.Another(t)
			veth(t, router, far, tt.router, tt.far)
			router.Run("ip", "link", "add", "v1", "type", "veth", "peer", "name", "v1", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), client.FD()))
			client.Run("ip", "link", "set", "lo", "up")
			client.Run("ip", "link", "set", "v1", "up")
			client.Run("ip", "addr", "add", tt.client, "dev", "v1", "nodad")
			router.Run("ip", "link", "set", "v1", "up")
			router.Run("ip", "route", "add", tt.client, "dev", "v1")
			if addr(tt.client).Is6() {
				router.Run("ip", "addr", "add", "fe80::1/64", "dev", "v1", "nodad")
				client.Run("ip", "route", "add", "default", "via", "fe80::1", "dev", "v1")
			} else {
				client.Run("ip", "route", "add", "default", "via", prefix(tt.router).Addr().String(), "dev", "v1", "onlink")
			}
			far.Run("ip", "route", "add", tt.client, "via", prefix(tt.router).Addr().String())
			for _, a := range []string{tt.one, tt.two} {
				far.Run("ip", "addr", "add", a, "dev", "lo", "nodad")
				router.Run("ip", "route", "add", a, "via", prefix(tt.far).Addr().String())
				server := listen(t, far, netip.AddrPortFrom(addr(a), 4000))
				go func() {
					buf := make([]byte, 200)
					for {
						n, from, err := server.ReadFromUDPAddrPort(buf)
						if err != nil {
							return
						}
						_, _ = server.WriteToUDPAddrPort([]byte(a+" "+string(buf[:n])), from)
					}
				}()
			}
			router.Do(func() {
				writeSysctl(t, "net/ipv4/ip_forward", "1")
				writeSysctl(t, "net/ipv6/conf/all/forwarding", "1")
			})
			at := func(a string) netip.AddrPort { return netip.AddrPortFrom(addr(a), 4000) }
			state := func(pairs ...string) netstate.State {
				return netstate.State{Tables: []netstate.Table{remaps("a", pairs...), remaps("b", tt.other, tt.oneNet)}}
			}
			first := state(tt.here, tt.oneNet)
			converge(t, ns, first)

			flow, kept, direct := listen(t, client, at(tt.client)), listen(t, client, netip.AddrPortFrom(addr(tt.client), 4001)), listen(t, client, netip.AddrPortFrom(addr(tt.client), 4002))
			assert.Equal(t, answerTo(t, flow, at(tt.remapped)), tt.one)
			assert.Equal(t, answerTo(t, kept, at(tt.kept)), tt.one)
			assert.Equal(t, answerTo(t, direct, at(tt.direct)), tt.one)
			ids := func() [][]uint32 { return [][]uint32{entriesTo(t, ns, at(tt.kept)), entriesTo(t, ns, at(tt.direct))} }
			before := ids()
			assert.Assert(t, len(before[0]) == 1 && len(before[1]) == 1, "%v", before)

			// Nothing is evicted when nothing has changed.
			was := entriesTo(t, ns, at(tt.remapped))
			assert.Assert(t, netstate.Diff(observe(t, ns), first).Empty())
			converge(t, ns, first)
			assert.DeepEqual(t, entriesTo(t, ns, at(tt.remapped)), was)

			second := state(tt.here, tt.twoNet)
			converge(t, ns, second)
			assert.Equal(t, answerTo(t, flow, at(tt.remapped)), tt.two)
			assert.DeepEqual(t, ids(), before)

			// A daemon that starts: the tables are as they should be.
			was = entriesTo(t, ns, at(tt.remapped))
			again := openIn(t, router)
			assert.Assert(t, netstate.Diff(observe(t, again), second).Empty())
			assert.DeepEqual(t, entriesTo(t, ns, at(tt.remapped)), was)
			// And it knows what they do, when they go.
			none := netstate.State{Tables: second.Tables[1:]}
			changes := netstate.Diff(observe(t, again), none)
			assert.Equal(t, len(changes.Evict), 1, "%s", changes)
			assert.NilError(t, again.Apply(t.Context(), changes))
			assert.Equal(t, len(entriesTo(t, ns, at(tt.remapped))), 0)
			assert.DeepEqual(t, ids(), before)

			// What went untranslated in the meantime is translated again.
			send(t, flow, at(tt.remapped))
			converge(t, again, first)
			assert.Equal(t, answerTo(t, flow, at(tt.remapped)), tt.one)
			assert.DeepEqual(t, ids(), before)
		})
	}
}

// openIn opens a second handle on a namespace.
func openIn(t testing.TB, in *nettest.NS) (ns *NetNS) {
	t.Helper()
	var err error
	in.Do(func() { ns, err = Open(Config{}) })
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, ns.Close()) })
	return ns
}

// TestNotTrackedAnyMore: when packets are not tracked any more, the table forgets
// them, in both directions; others stay.
func TestNotTrackedAnyMore(t *testing.T) {
	t.Parallel()
	ns, a := openWith(t)
	need(t, ns, FeatureNAT)
	b := nettest.Another(t)
	veth(t, a, b, "192.0.2.1/24", "192.0.2.2/24")
	// So that anything is tracked at all.
	base := remaps("remap", "11.0.0.0/16", "10.1.0.0/16")
	converge(t, ns, netstate.State{Tables: []netstate.Table{base}})
	at := func(a string, port uint16) netip.AddrPort { return netip.AddrPortFrom(addr(a), port) }
	here, there := listen(t, a, at("192.0.2.1", 6091)), listen(t, b, at("192.0.2.2", 6091))
	other := listen(t, b, at("192.0.2.2", 53))
	near, distant := listen(t, a, at("192.0.2.1", 4000)), listen(t, b, at("192.0.2.2", 4000))
	deliver(t, near, there, at("192.0.2.2", 6091))
	deliver(t, distant, here, at("192.0.2.1", 6091))
	deliver(t, near, other, at("192.0.2.2", 53))
	kept := entriesTo(t, ns, at("192.0.2.2", 53))
	assert.Equal(t, len(kept), 1)
	assert.Equal(t, len(entriesTo(t, ns, at("192.0.2.2", 6091))), 1)
	assert.Equal(t, len(entriesTo(t, ns, at("192.0.2.1", 6091))), 1)

	notrack := netstate.Table{Family: netstate.FamilyINET, Name: "liqo-notrack-geneve"}
	for _, hook := range []string{"prerouting", "output"} {
		notrack.Chains = append(notrack.Chains, netstate.Chain{Name: hook, Type: "filter", Hook: hook, Priority: -300, Rules: []netstate.FirewallRule{{
			Name: "dst-port", Matches: []netstate.Match{proto("udp"), ports("dst", 6091, 6091)}, Action: netstate.Action{Kind: netstate.NoTrack},
		}}})
	}
	converge(t, ns, netstate.State{Tables: []netstate.Table{base, notrack}})
	deliver(t, near, there, at("192.0.2.2", 6091))
	deliver(t, distant, here, at("192.0.2.1", 6091))
	assert.Equal(t, len(entriesTo(t, ns, at("192.0.2.2", 6091))), 0)
	assert.Equal(t, len(entriesTo(t, ns, at("192.0.2.1", 6091))), 0)
	assert.DeepEqual(t, entriesTo(t, ns, at("192.0.2.2", 53)), kept)
}

// BenchmarkEvict changes one remap of a hundred while the table has 100,000
// entries, a thousand of which the remap has made.
func BenchmarkEvict(b *testing.B) {
	const flows, networks = 100_000, 100
	ns, _ := openWith(b)
	need(b, ns, FeatureNAT)
	pair := func(i, dest int) []string {
		return []string{fmt.Sprintf("11.%d.0.0/16", i), fmt.Sprintf("10.%d.0.0/16", dest)}
	}
	state := func(dest int) netstate.State {
		var pairs []string
		for i := range networks {
			if i == 0 {
				pairs = append(pairs, pair(i, dest)...)
			} else {
				pairs = append(pairs, pair(i, i)...)
			}
		}
		return netstate.State{Tables: []netstate.Table{remaps("remap", pairs...)}}
	}
	var reqs []request
	for i := range flows {
		network, n := i%networks, i/networks
		reqs = append(reqs, newConnection(netip.AddrFrom4([4]byte{10, 200, byte(n >> 8), byte(n)}),
			netip.AddrFrom4([4]byte{11, byte(network), 0, 1}), netip.AddrFrom4([4]byte{10, byte(network), 0, 1})))
	}
	socket := rtnl{ns.nft.read}
	add := func(reqs []request) {
		for _, err := range socket.batch(reqs) {
			if err != nil {
				nettest.SkipOrFail(b, "a connection table for 100,000 entries (net.netfilter.nf_conntrack_max)", err)
			}
		}
	}
	converge(b, ns, state(0))
	add(reqs)
	var mine []request
	for i := 0; i < flows; i += networks {
		mine = append(mine, reqs[i])
	}
	for b.Loop() {
		b.StopTimer()
		changes := netstate.Diff(observe(b, ns), state(200))
		b.StartTimer()
		assert.NilError(b, ns.Apply(b.Context(), changes))
		b.StopTimer()
		assert.Equal(b, len(entriesTo(b, ns, netip.MustParseAddrPort("11.0.0.1:2"))), 0)
		assert.Equal(b, len(entriesTo(b, ns, netip.MustParseAddrPort("11.1.0.1:2"))), flows/networks)
		converge(b, ns, state(0))
		add(mine)
		b.StartTimer()
	}
}

// newConnection is an entry that a translation of the destination has made.
func newConnection(src, dst, translated netip.Addr) request {
	var a attrs
	tuple := func(typ uint16, src, dst netip.Addr, sport, dport uint16) {
		a.nest(typ, func(a *attrs) {
			a.nest(ctaTupleIP, func(a *attrs) { a.ip(ctaIPv4Src, src); a.ip(ctaIPv4Dst, dst) })
			a.nest(ctaTupleProto, func(a *attrs) {
				a.u8(ctaProtoNum, unix.IPPROTO_UDP)
				a.bytes(ctaSrcPort, be16(sport))
				a.bytes(ctaDstPort, be16(dport))
			})
		})
	}
	tuple(vnl.CTA_TUPLE_ORIG, src, dst, 1, 2)
	tuple(vnl.CTA_TUPLE_REPLY, translated, src, 2, 1)
	a.bytes(vnl.CTA_TIMEOUT, binary.BigEndian.AppendUint32(nil, 600))
	return request{
		typ: ctnetlink | vnl.IPCTNL_MSG_CT_NEW, flags: unix.NLM_F_CREATE | unix.NLM_F_EXCL,
		data: append([]byte{unix.AF_INET, unix.NFNETLINK_V0, 0, 0}, a.b...),
	}
}
