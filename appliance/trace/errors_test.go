package trace_test

import (
	"fmt"
	"net/netip"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/trace"
)

// told fails if the sender of a packet that does not arrive is not told, by the
// host where it ended, or does not know the packet that the error is about.
func (w *world) told(t *testing.T, from string, p trace.Packet, tr trace.Trace) {
	t.Helper()
	assert.Assert(t, tr.End.Answer != nil, "nobody tells\n%v", tr)
	back := w.Walk(w.memory, tr.End.Host, *tr.End.Answer)
	assert.Assert(t, back.Delivered(from), "the sender does not learn why\n%v\n%v", tr, back)
	q := back.End.Packet.Quoted
	assert.Assert(t, q.Src == p.Src && q.Dst == p.Dst && q.SrcPort == p.SrcPort && q.DstPort == p.DstPort,
		"the sender does not know this packet: %v, it sent %v\n%v\n%v", q, p, tr, back)
	problem := w.exposed(back)
	assert.Assert(t, problem == "", "%s\n%v", problem, back)
}

// expire sends a packet again and again, with a larger TTL each time, until it
// arrives, and returns the hosts that said where it was meanwhile.
func (w *world) expire(t *testing.T, from, to string, p trace.Packet, tells func(host string) bool) (by []string) {
	t.Helper()
	for p.TTL = 1; ; p.TTL++ {
		tr := w.Walk(w.memory, from, p)
		if tr.Delivered(to) {
			return by
		}
		assert.Assert(t, tr.End.Answer != nil && tr.End.Answer.ICMP == trace.TimeExceeded && p.TTL < 12, "%v", tr)
		if tells(tr.End.Host) {
			w.told(t, from, p, tr)
			by = append(by, tr.End.Host)
		}
	}
}

// What a gateway itself says about a packet out of the tunnel comes to the pod
// that sent it, also where this cluster has a pod of that address: about the
// first packet of a connection and about others, in either direction, that its
// TTL is used up, and that nobody has its destination.
func TestGatewaysTellThePeer(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			gateways := map[string]bool{from.id + "/" + from.to(to).gatewayName(): true, to.id + "/" + to.to(from).gatewayName(): true}
			theirs := func(own *site) func(string) bool {
				return func(host string) bool { return gateways[host] && host[:len(own.id)] != own.id }
			}
			for i := range from.nodes {
				for j := range to.nodes {
					src, dst := netip.AddrPortFrom(from.pod(i), uint16(7000+10*i+j)), netip.AddrPortFrom(from.calls(to, to.pod(j)), 80)
					for range 2 { // the second time the connection is there
						by := w.expire(t, from.podName(i), to.podName(j), trace.Connect(src, dst), theirs(from))
						assert.Equal(t, len(by), 1)
					}
					f := w.Flow(w.memory, from.podName(i), trace.Connect(src, dst))
					w.check(t, f, to.podName(j))
					by := w.expire(t, to.podName(j), from.podName(i), f.Request.End.Packet.Reply(), theirs(to))
					assert.Equal(t, len(by), 1)
				}
				nobody := netip.AddrPortFrom(from.calls(to, at(to.external, 200)), 80)
				p := trace.Connect(netip.AddrPortFrom(from.pod(i), 7500), nobody)
				tr := w.Walk(w.memory, from.podName(i), p)
				assert.Equal(t, tr.End.Kind, trace.Unreachable, "%v", tr)
				assert.Equal(t, tr.End.Host, to.id+"/"+to.to(from).gatewayName(), "%v", tr)
				w.told(t, from.podName(i), p, tr)
			}
		})
	})
}

// What a gateway says about a packet of this cluster stays in this cluster.
func TestGatewaysTellTheirOwn(t *testing.T) {
	for _, overlay := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
		for name, build := range sites(overlay, [2]int{1500, 1500}) {
			t.Run(fmt.Sprintf("%s-%s", overlay, name), func(t *testing.T) {
				w := build(t)
				w.pairs(func(from, to *site) {
					own := from.id + "/" + from.to(to).gatewayName()
					for i := range from.nodes {
						src, dst := netip.AddrPortFrom(from.pod(i), 7000), netip.AddrPortFrom(from.calls(to, to.pod(0)), 80)
						by := w.expire(t, from.podName(i), to.podName(0), trace.Connect(src, dst), func(host string) bool { return host == own })
						assert.Equal(t, len(by), 1)
					}
				})
			})
		}
	}
}

// A server that does not know yet where its client is has WireGuard say so, about a
// packet that has the peer's own address for its destination already. The sender
// recognises it as the one that it sent.
func TestWireGuardTellsTheSender(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			if from.to(to).mode != cluster.Server || from.is6() {
				return
			}
			w.memory = &trace.Memory{} // no handshake
			for i := range from.nodes {
				dst := netip.AddrPortFrom(from.calls(to, to.pod(0)), 80)
				p := trace.Connect(netip.AddrPortFrom(from.pod(i), 7600), dst)
				tr := w.Walk(w.memory, from.podName(i), p)
				assert.Equal(t, tr.End.Host, from.id+"/"+from.to(to).gatewayName(), "%v", tr)
				w.told(t, from.podName(i), p, tr)
			}
		})
	})
}
