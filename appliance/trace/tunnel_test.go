package trace_test

import (
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/trace"
)

// twoEnds are two hosts on one network, each with one end of a tunnel and a
// route to 10.9.0.0/16, or 10.8.0.0/16, through it.
func twoEnds(link func(i int) netstate.Link, edit func(a, b *netstate.State)) []trace.Host {
	var states [2]netstate.State
	for i := range states {
		s := &states[i]
		l := link(i)
		s.Links = []netstate.Link{l}
		s.Addresses = []netstate.Address{{Dev: l.Name, Prefix: netip.PrefixFrom(addr([]string{"10.8.0.1", "10.9.0.1"}[i]), 32)}}
		s.Routes = []netstate.Route{{
			Table: 254, Dst: prefix([]string{"10.9.0.0/16", "10.8.0.0/16"}[i]), Dev: l.Name, Via: addr([]string{"10.9.0.1", "10.8.0.1"}[i]), OnLink: true,
		}}
	}
	if edit != nil {
		edit(&states[0], &states[1])
	}
	hosts := make([]trace.Host, 2)
	for i, name := range []string{"a", "b"} {
		hosts[i] = trace.Host{Name: name, State: states[i], Around: trace.Around{
			Links:     []trace.Link{{Name: "eth0", Segment: "net"}},
			Addresses: []netstate.Address{{Dev: "eth0", Prefix: netip.PrefixFrom(at(prefix("192.0.2.0/24"), i+1), 24)}},
		}}
	}
	return hosts
}

func geneve(i int) netstate.Link {
	return netstate.Link{Name: "g", Kind: netstate.KindGeneve, MTU: 1450, Geneve: netstate.Geneve{VNI: 7, Remote: at(prefix("192.0.2.0/24"), 2-i), Port: 6091}}
}

func vxlan(i int) netstate.Link {
	return netstate.Link{Name: "v", Kind: netstate.KindVXLAN, MTU: 1450, MAC: netstate.MAC{2, 5: byte(i)}, VXLAN: netstate.VXLAN{VNI: 7, Local: at(prefix("192.0.2.0/24"), 1+i), Port: 4879}}
}

func wireguard(int) netstate.Link {
	return netstate.Link{Name: "w", Kind: netstate.KindWireGuard, MTU: 1440}
}

// peered gives both ends of a WireGuard tunnel each other's keys; a dials.
func peered(a, b *netstate.State) {
	key := func(n byte) netstate.Key { return netstate.Key{n} }
	a.WireGuard = []netstate.WireGuard{{Dev: "w", PublicKey: key(1), Peers: []netstate.WireGuardPeer{{
		PublicKey: key(2), Endpoint: netip.MustParseAddrPort("192.0.2.2:51840"), AllowedIPs: []netip.Prefix{prefix("10.9.0.0/16")},
	}}}}
	b.WireGuard = []netstate.WireGuard{{Dev: "w", PublicKey: key(2), ListenPort: 51840, Peers: []netstate.WireGuardPeer{{
		PublicKey: key(1), AllowedIPs: []netip.Prefix{prefix("10.8.0.0/16")},
	}}}}
}

func stations(a, b *netstate.State) {
	for i, s := range []*netstate.State{a, b} {
		other := vxlan(1 - i)
		s.Neighbors = []netstate.Neighbor{{Dev: "v", Addr: addr([]string{"10.9.0.1", "10.8.0.1"}[i]), MAC: other.MAC}}
		s.FDB = []netstate.FDBEntry{{Dev: "v", MAC: other.MAC, Remote: other.VXLAN.Local}}
	}
}

func TestTunnels(t *testing.T) {
	type states = func(a, b *netstate.State)
	both := func(fs ...states) states {
		return func(a, b *netstate.State) {
			for _, f := range fs {
				f(a, b)
			}
		}
	}
	for _, tt := range []struct {
		name string
		link func(int) netstate.Link
		edit states
		want string // |-separated parts of the trace; "ok": there and back
	}{
		{"geneve", geneve, nil, "ok|geneve vni 7 to 192.0.2.2"},
		{"geneve: another vni", geneve, func(_, b *netstate.State) { b.Links[0].Geneve.VNI = 8 }, "dropped at b: no Geneve link for vni 7 from 192.0.2.1 at port 6091"},
		{"geneve: another remote", geneve, func(_, b *netstate.State) { b.Links[0].Geneve.Remote = addr("192.0.2.9") }, "dropped at b: no Geneve link"},
		{"geneve: another port", geneve, func(_, b *netstate.State) { b.Links[0].Geneve.Port = 6081 }, "dropped at b: no Geneve link"},
		{"geneve: nobody has the next hop", geneve, func(a, _ *netstate.State) { a.Routes[0].Via = addr("10.9.0.77") }, "lost at b: nobody on g answers for 10.9.0.77"},
		{"geneve: a neighbour", geneve, func(a, b *netstate.State) {
			b.Links[0].MAC = netstate.MAC{2, 5: 9}
			a.Neighbors = []netstate.Neighbor{{Dev: "g", Addr: addr("10.9.0.1"), MAC: b.Links[0].MAC}}
		}, "ok|geneve vni 7 to 192.0.2.2"},
		{"geneve: a neighbour that has become another", geneve, func(a, b *netstate.State) {
			b.Links[0].MAC = netstate.MAC{2, 5: 9}
			a.Neighbors = []netstate.Neighbor{{Dev: "g", Addr: addr("10.9.0.1"), MAC: netstate.MAC{2, 5: 8}}}
		}, "dropped at b: g has another address than 02:00:00:00:00:08"},
		{"vxlan", vxlan, stations, "ok|vxlan vni 7 to 192.0.2.2"},
		{"vxlan: no neighbour", vxlan, both(stations, func(a, _ *netstate.State) { a.Neighbors = nil }), "lost at a: v has no neighbour 10.9.0.1"},
		{"vxlan: no entry", vxlan, both(stations, func(a, _ *netstate.State) { a.FDB = nil }), "lost at a: v has no fdb entry for 02:00:00:00:00:01, the neighbour 10.9.0.1"},
		{"vxlan: another station", vxlan, both(stations, func(_, b *netstate.State) { b.Links[0].MAC = netstate.MAC{2, 9} }), "dropped at b: v has another address than 02:00:00:00:00:01"},
		{"vxlan: nobody at the other host", vxlan, both(stations, func(a, _ *netstate.State) { a.FDB[0].Remote = addr("192.0.2.9") }), "lost at a: nobody on eth0 answers for 192.0.2.9"},
		{"wireguard", wireguard, peered, "ok|wireguard w to 192.0.2.2:51840"},
		{"wireguard: not for this peer", wireguard, both(peered, func(a, _ *netstate.State) { a.WireGuard[0].Peers[0].AllowedIPs = nil }), "dropped at a: no peer of w has 10.9.0.1 in its AllowedIPs"},
		{"wireguard: not from this peer", wireguard, both(peered, func(_, b *netstate.State) { b.WireGuard[0].Peers[0].AllowedIPs = []netip.Prefix{prefix("10.8.1.0/24")} }), "dropped at b: the peer of w may not send from 10.8.0.1 (AllowedIPs)"},
		{"wireguard: an unknown key", wireguard, both(peered, func(_, b *netstate.State) { b.WireGuard[0].Peers[0].PublicKey = netstate.Key{9} }), "dropped at b: w of b does not know the sender's key"},
		{"wireguard: a wrong key", wireguard, both(peered, func(_, b *netstate.State) { b.WireGuard[0].PublicKey = netstate.Key{9} }), "dropped at b: w of b has another key than the sender thinks"},
		{"wireguard: another port", wireguard, both(peered, func(_, b *netstate.State) { b.WireGuard[0].ListenPort = 51841 }), "dropped at b: no WireGuard device listens at port 51840"},
		{"wireguard: where is the peer", wireguard, both(peered, func(a, _ *netstate.State) { a.WireGuard[0].Peers[0].Endpoint = netip.AddrPort{} }), "dropped at a: w does not know yet where its peer is"},
		{"wireguard into itself", wireguard, both(peered, func(a, _ *netstate.State) {
			a.WireGuard[0].Peers[0].Endpoint = netip.MustParseAddrPort("10.9.0.9:51840")
		}), "loop at a: a tunnel inside itself"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, err := trace.New(twoEnds(tt.link, tt.edit)...)
			assert.NilError(t, err)
			m := &trace.Memory{}
			f := w.Flow(m, "a", trace.Ping(addr("10.8.0.1"), addr("10.9.0.1")))
			want, ok := strings.CutPrefix(tt.want, "ok|")
			assert.Check(t, is.Contains(f.Request.String(), want))
			if ok {
				assert.Check(t, is.Equal(f.Problem(), ""), "%v\n%v", f.Request, f.Reply)
				assert.Check(t, is.Equal(f.Detour(), ""))
				assert.Check(t, is.DeepEqual(f.Request.Hosts(), []string{"a", "b"}))
			}
			if ok && f.Request.MTU != 1440 {
				assert.Check(t, is.Equal(f.Request.MTU, 1450))
			}
		})
	}
}

// Who is dialled learns from where, and can send first afterwards.
func TestConnect(t *testing.T) {
	w, err := trace.New(twoEnds(wireguard, peered)...)
	assert.NilError(t, err)
	m := &trace.Memory{}
	back := trace.Ping(addr("10.9.0.1"), addr("10.8.0.1"))
	assert.Equal(t, w.Walk(m, "b", back).End.Why, "w does not know yet where its peer is")
	handshakes := w.Connect(m)
	assert.Equal(t, len(handshakes), 1)
	assert.Equal(t, handshakes[0].End.String(), "delivered at b: to w of b")
	assert.Assert(t, w.Walk(m, "b", back).Delivered("a"))
}

// A gateway in a namespace of its node has its sockets in the node's, and is
// joined to it by a pair.
func TestAround(t *testing.T) {
	hosts := twoEnds(wireguard, func(a, b *netstate.State) {
		peered(a, b)
		a.Links = append(a.Links, netstate.Link{Name: "liqo.gateway", Kind: netstate.KindVeth, Peer: "liqo.host", Forwarding: true})
		a.Routes = append(a.Routes, netstate.Route{Table: 254, Dst: prefix("10.7.0.0/16"), Dev: "liqo.gateway", Via: addr("10.7.0.1"), OnLink: true})
		a.Links[0].Forwarding = true
	})
	node := hosts[0]
	node.Name, node.State = "node", netstate.State{
		Addresses: []netstate.Address{{Dev: "liqo.host", Prefix: prefix("10.7.0.1/32")}},
		Routes:    []netstate.Route{{Table: 254, Dst: prefix("10.9.0.0/16"), Dev: "liqo.host", Via: addr("10.8.0.1"), OnLink: true}},
	}
	hosts[0].Around = trace.Around{Outside: "node"}
	hosts[1].State.WireGuard[0].Peers[0].AllowedIPs = append(hosts[1].State.WireGuard[0].Peers[0].AllowedIPs, prefix("10.7.0.0/16"))
	hosts[1].State.Routes = append(hosts[1].State.Routes, netstate.Route{Table: 254, Dst: prefix("10.7.0.0/16"), Dev: "w"})
	w, err := trace.New(append(hosts, node)...)
	assert.NilError(t, err)
	m := &trace.Memory{}
	f := w.Flow(m, "node", trace.Ping(addr("10.7.0.1"), addr("10.9.0.1")))
	assert.Assert(t, f.Problem() == "" && f.Detour() == "", "%v\n%v", f.Request, f.Reply)
	assert.DeepEqual(t, f.Request.Hosts(), []string{"node", "a", "b"})
	assert.DeepEqual(t, f.Request.AllHosts(), []string{"node", "a", "node", "b"})
}
