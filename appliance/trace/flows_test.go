package trace_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/trace"
)

// Every pod reaches every pod of a peer, and its answer comes back past the
// same hosts. The other side sees the address by which it knows the pod.
func TestPodToPod(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			for i := range from.nodes {
				for j := range to.nodes {
					f := w.Flow(w.memory, fmt.Sprintf("%s/pod-%d", from.id, i+1), trace.Ping(from.pod(i), from.calls(to, to.pod(j))))
					w.check(t, f, fmt.Sprintf("%s/pod-%d", to.id, j+1))
					assert.Equal(t, f.Request.End.Packet.Src, to.calls(from, from.pod(i)))
				}
			}
		})
	})
}

// A new network namespace forwards no IPv6, and nothing sees to it that a gateway's
// does. Peerings of IPv6 are refused for this reason.
func TestGatewaysForwardNoIPv6(t *testing.T) {
	for _, overlay := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
		milan, rome := site6("milan", 1, "fd01::/56", "fd71::/64", overlay), site6("rome", 2, "fd02::/56", "fd72::/64", overlay)
		milan.forwards6, rome.forwards6 = false, false
		w := build(t, []*site{milan, rome}, [2]int{0, 1})
		f := w.Flow(w.memory, milan.podName(0), trace.Ping(milan.pod(0), milan.calls(rome, rome.pod(0))))
		assert.Assert(t, strings.Contains(f.Problem(), "forwarding of IPv6 is off (net.ipv6.conf.all.forwarding)"), f.Problem())
		assert.Equal(t, f.Request.End.Host, "milan/"+milan.peers[0].gatewayName())
	}
}

// A pod of a peer is reached, and reaches others, whatever its address means to the
// gateway that leads to it. (Not with IPv6, whose networks connection tracking
// translates.)
func TestTwins(t *testing.T) {
	pairs := 0
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) { pairs += w.checkTwins(t, from, to) })
	})
	assert.Assert(t, pairs > 0)
}

// checkTwins sends packets to the pods of a peer that have such addresses and from
// them, and returns how many there are.
func (w *world) checkTwins(t *testing.T, from, to *site) int {
	t.Helper()
	if to.is6() {
		return 0
	}
	twins := to.twins()
	for a := range twins {
		twin := to.id + "/twin-" + a.String()
		for i := range from.nodes {
			for _, p := range []trace.Packet{
				trace.Ping(from.pod(i), from.calls(to, a)),
				trace.Connect(netip.AddrPortFrom(from.pod(i), 9500), netip.AddrPortFrom(from.calls(to, a), 80)),
				trace.Datagram(netip.AddrPortFrom(from.pod(i), 9500), netip.AddrPortFrom(from.calls(to, a), 53), 100),
			} {
				w.check(t, w.Flow(w.memory, from.podName(i), p), twin)
			}
			f := w.Flow(w.memory, twin, trace.Connect(netip.AddrPortFrom(a, 9600), netip.AddrPortFrom(to.calls(from, from.pod(i)), 80)))
			w.check(t, f, from.podName(i))
			assert.Equal(t, f.Request.End.Packet.Src, from.calls(to, a))
		}
		w.check(t, w.Flow(w.memory, from.host(0), trace.Connect(netip.AddrPortFrom(netip.Addr{}, 9700), netip.AddrPortFrom(from.calls(to, a), 80))), twin)
	}
	return len(twins)
}

// to returns the peering with a site.
func (s *site) to(peer *site) *peering {
	return s.peers[slices.IndexFunc(s.peers, func(p *peering) bool { return p.peer == peer })]
}

// check fails if a flow does not end at the host, does not come back, or is
// seen between clusters outside of the tunnel.
func (w *world) check(t testing.TB, f trace.Flow, host string) {
	t.Helper()
	problem := f.Problem()
	if problem == "" {
		problem = f.Detour()
	}
	if problem == "" && !f.Request.Delivered(host) {
		problem = "it is delivered to " + f.Request.End.Host
	}
	if problem == "" {
		problem = w.exposed(f.Request) + w.exposed(f.Reply)
	}
	assert.Assert(t, problem == "", "%s\n%v\n%v", problem, f.Request, f.Reply)
}

// exposed says where a packet is between clusters without being encrypted.
func (w *world) exposed(tr trace.Trace) string {
	for _, h := range tr.Hops {
		wireGuard := func(port uint16) bool { return port == 51840 || port >= 30840 && port < 30850 || port >= 32768 }
		if h.Host == "router" && h.Depth == 0 && slices.Contains(tr.Hosts(), "client") { // outside is where it is to go
			continue
		}
		if h.Host == "router" && !(h.Depth == 1 && wireGuard(h.Packet.SrcPort) && wireGuard(h.Packet.DstPort)) {
			return fmt.Sprintf("the router sees %v", h)
		}
	}
	return ""
}

func (s *site) podName(i int) string { return fmt.Sprintf("%s/pod-%d", s.id, i+1) }

func (s *site) host(i int) string { return s.id + "/" + s.nodeName(i) }

// A pod that no object knows yet is seen as itself from its first packet, and its
// answers come back to it: with a link to each node past the same hosts. In VXLAN the way
// back to another node is the CNI's, which a strict reverse-path filter does not let through.
// What it sends by the port of another node comes back by that node, which no other
// connection with the same tuple can take.
func TestFreshPods(t *testing.T) {
	seen := 0
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			if from.blocks {
				seen += w.checkFresh(t, from, to)
			}
		})
	})
	assert.Assert(t, seen > 0)
}

// checkFresh sends packets of pods that no object knows, and returns how many.
func (w *world) checkFresh(t *testing.T, from, to *site) (sent int) {
	t.Helper()
	for i := range from.nodes {
		dst := netip.AddrPortFrom(from.calls(to, to.pod(0)), 80)
		for _, p := range []trace.Packet{
			trace.Ping(from.fresh(i), dst.Addr()),
			trace.Connect(netip.AddrPortFrom(from.fresh(i), 9800), dst),
			trace.Datagram(netip.AddrPortFrom(from.fresh(i), 9800), dst, 100),
		} {
			f := w.Flow(w.memory, from.freshName(i), p)
			sent++
			if f.Request.Delivered(to.podName(0)) {
				assert.Equal(t, f.Request.End.Packet.Src, to.calls(from, from.fresh(i)))
			}
			switch {
			case from.overlay == cluster.OverlayGeneve || from.to(to).node == i:
				w.check(t, f, to.podName(0))
			case from.rpFilter == 1:
				assert.Assert(t, f.Request.Delivered(to.podName(0)), "%v", f.Request)
			default:
				assert.Equal(t, f.Problem(), "", "%v\n%v", f.Request, f.Reply)
			}
		}
		backend, web := to.podName(to.nodes-1), from.to(to).web("web", true)
		var requests []trace.Trace
		for j := range from.nodes {
			p := trace.Connect(netip.AddrPortFrom(from.fresh(i), 9900), netip.AddrPortFrom(from.nodeAddr(j), web.NodePort))
			r := w.Walk(w.memory, from.freshName(i), p)
			assert.Assert(t, r.Delivered(backend), "%v", r)
			if i != j {
				assert.Equal(t, r.End.Packet.Src, from.unknown(to), "by node %d it is from another node's pod\n%v", j, r)
				requests = append(requests, r)
			}
			sent++
		}
		for _, r := range requests {
			w.check(t, trace.Flow{Request: r, Reply: w.Walk(w.memory, r.End.Host, r.End.Packet.Reply())}, backend)
		}
	}
	return sent
}

// A process in the network of a host reaches every pod of a peer, whatever
// address of the host it has, and is seen as the one address that the peer knows
// for such senders.
func TestHostToPod(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			for i := range from.nodes {
				for j := range to.nodes {
					for port, src := range []netip.Addr{{}, from.nodeAddr(i), from.nodeLocal(), at(from.nodePods(i), 1)} {
						dst := netip.AddrPortFrom(from.calls(to, to.pod(j)), 80)
						p := trace.Connect(netip.AddrPortFrom(src, uint16(5000+10*i+port)), dst)
						f := w.Flow(w.memory, from.host(i), p)
						w.check(t, f, to.podName(j))
						want := from.unknown(to)
						if from.podCIDR(i).Contains(src) { // the bridge's, which is one of its pods to everybody else
							want = to.calls(from, src)
						}
						assert.Equal(t, f.Request.End.Packet.Src, want)
					}
				}
			}
		})
	})
}

// What reaches a peer through a Service comes back through the node that it
// came in by: from outside, from a pod by another node's port, and from a pod
// by the Service's own address, which hides no pod.
func TestServices(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			backend := to.podName(to.nodes - 1)
			client := beyond(from.is6())
			for _, local := range []bool{false, true} {
				web := from.to(to).web("web", local)
				for i := range from.nodes {
					f := w.Flow(w.memory, "client", trace.Connect(netip.AddrPortFrom(client, 7000), netip.AddrPortFrom(from.nodeAddr(i), web.NodePort)))
					w.check(t, f, backend)
					assert.Equal(t, f.Request.End.Packet.Src, from.unknown(to))
					for j := range from.nodes {
						f := w.Flow(w.memory, from.podName(j), trace.Connect(netip.AddrPortFrom(from.pod(j), uint16(7100+i)), netip.AddrPortFrom(from.nodeAddr(i), web.NodePort)))
						w.check(t, f, backend)
					}
					f = w.Flow(w.memory, from.podName(i), trace.Connect(netip.AddrPortFrom(from.pod(i), 7300), web.VIPs[0]))
					w.check(t, f, backend)
					assert.Equal(t, f.Request.End.Packet.Src, to.calls(from, from.pod(i)))
					f = w.Flow(w.memory, from.host(i), trace.Connect(netip.AddrPortFrom(netip.Addr{}, 7400), web.VIPs[0]))
					w.check(t, f, backend)
				}
			}
		})
	})
}

// A peer reaches hosts outside of a cluster, and pods, by the addresses that stand
// for them. What is to be masqueraded comes from a node, else the host sees the
// peer's pod as this cluster calls it.
func TestMappedAddresses(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			for i := range from.nodes {
				for name, host := range map[string]string{"lan": to.id + "/lan", "lan-again": to.id + "/lan", "beyond": "client", "pod": to.id + "/mapped"} {
					if name == "pod" && to.overlay == cluster.OverlayVXLAN && to.to(from).node != 1 {
						continue // its node does not know the way back to the address that masquerading takes
					}
					dst := netip.AddrPortFrom(to.mapped(name, from), 443)
					pod := w.Flow(w.memory, from.podName(i), trace.Connect(netip.AddrPortFrom(from.pod(i), 8000), dst))
					w.check(t, pod, host)
					w.check(t, w.Flow(w.memory, from.host(i), trace.Connect(netip.AddrPortFrom(netip.Addr{}, 8001), dst)), host)
				}
			}
		})
	})
}

// Nodes that send the same tuple at the same time get their own answers.
func TestSameTuple(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			dst := netip.AddrPortFrom(from.calls(to, to.pod(0)), 80)
			requests := make([]trace.Trace, from.nodes)
			for i := range from.nodes {
				requests[i] = w.Walk(w.memory, from.host(i), trace.Connect(netip.AddrPortFrom(from.nodeLocal(), 5555), dst))
				assert.Assert(t, requests[i].Delivered(to.podName(0)), "%v", requests[i])
			}
			for _, r := range requests {
				f := trace.Flow{Request: r, Reply: w.Walk(w.memory, r.End.Host, r.End.Packet.Reply())}
				w.check(t, f, to.podName(0))
			}
		})
	})
}

// A peer reaches pods and what is mapped for it, and nothing else: whatever else
// comes out of the tunnel ends at the gateway.
func TestPeerReachesPodsOnly(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.pairs(func(from, to *site) {
			src := from.pod(0) // as it calls itself
			targets := []netip.Addr{at(to.services(), 1), to.underlay.Addr(), to.external.Addr(), at(to.external, 9), to.nodeLocal(), at(to.internal, 9)}
			for i := range to.nodes {
				targets = append(targets, to.nodeAddr(i))
			}
			for _, n := range to.api.snapshot().InternalNodes {
				targets = append(targets, n.InternalIP)
			}
			for _, f := range to.api.snapshot().Fabrics {
				targets = append(targets, f.InternalIP)
			}
			if to.blocks && to.overlay == cluster.OverlayGeneve { // nobody, and a pod that has not sent anything
				targets = append(targets, at(to.nodePods(0), 99), at(to.piece(250), 1), to.fresh(to.nodes-1))
			}
			gateway := to.id + "/" + to.to(from).gatewayName()
			for _, dst := range targets {
				tr := w.Arrive(w.memory, gateway, desired.TunnelInterface, trace.Ping(src, dst))
				assert.Assert(t, tr.End.Host == gateway && (tr.End.Kind == trace.Dropped || tr.End.Kind == trace.Unreachable), "%v", tr)
			}
		})
	})
}

// Packets that are too large are cut, or their sender learns what fits: the
// error comes to it, and it recognises the packet that it is about. Where the
// peer's network carries less, the peer's gateway may be who says so.
//
// Nodes have no strict reverse-path filter: an error that the gateway itself
// makes about its own cluster's packet leaves by its main table, so to another
// node of the VXLAN overlay it does not get.
func TestPathMTU(t *testing.T) {
	for _, mtus := range [][2]int{{1500, 1500}, {1450, 1450}, {1400, 1400}, {1280, 1280}, {1500, 1400}, {1400, 1500}, {1500, 1300}} {
		for _, overlay := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
			for name, build := range sites(overlay, mtus) {
				if strings.HasPrefix(name, "ipv6") && (mtus[0] != mtus[1] || mtus[0] < 1400) {
					continue // nobody cuts WireGuard's packets, and links must carry 1280 bytes
				}
				t.Run(fmt.Sprintf("%s-%s-%d-%d", overlay, name, mtus[0], mtus[1]), func(t *testing.T) {
					w := build(t)
					w.pairs(func(from, to *site) {
						for i := range from.nodes {
							for j := range to.nodes {
								dst := netip.AddrPortFrom(from.calls(to, to.pod(j)), 80)
								w.discover(t, from.podName(i), netip.AddrPortFrom(from.pod(i), 6000), dst, to.podName(j))
								if overlay == cluster.OverlayGeneve {
									w.discover(t, from.host(i), netip.AddrPortFrom(netip.Addr{}, 6001), dst, to.podName(j))
								}
							}
						}
					})
				})
			}
		}
	}
}

// discover sends smaller and smaller packets until one arrives, as an answer to
// a packet's sender says.
func (w *world) discover(t *testing.T, from string, src, dst netip.AddrPort, to string) {
	t.Helper()
	p := trace.Connect(src, dst)
	w.Walk(w.memory, from, p) // the connection is there before large packets are
	for p.Size = 1500; ; {
		tr := w.Walk(w.memory, from, p)
		if tr.End.Kind == trace.Delivered {
			assert.Equal(t, tr.End.Host, to)
			return
		}
		if tr.End.Host == from && strings.HasPrefix(tr.End.Why, "too big") { // the sender's own link
			p.Size = tr.Hops[0].MTU
			continue
		}
		assert.Assert(t, tr.End.Answer != nil, "nobody tells\n%v", tr)
		back := w.Walk(w.memory, tr.End.Host, *tr.End.Answer)
		assert.Assert(t, back.Delivered(from), "the sender does not learn why\n%v\n%v", tr, back)
		q := *back.End.Packet.Quoted
		assert.Assert(t, q.Dst == dst.Addr() && q.DstPort == dst.Port() && q.SrcPort == src.Port() && (q.Src == src.Addr() || !src.Addr().IsValid()),
			"the sender does not know this packet: %v\n%v\n%v", q, tr, back)
		mtu := back.End.Packet.MTU
		assert.Assert(t, mtu < p.Size)
		p.Size = mtu
	}
}

// sites are worlds of two peers with underlays of these sizes.
func sites(overlay cluster.Overlay, mtus [2]int) map[string]func(t testing.TB) *world {
	out := map[string]func(t testing.TB) *world{}
	for _, tt := range []struct {
		name      string
		site      func(id string, n int, pods, external string, overlay cluster.Overlay) *site
		here      string
		there     string
		externals [2]string
	}{
		{"disjoint", site4, "10.1.0.0/16", "10.2.0.0/16", [2]string{"10.71.0.0/16", "10.72.0.0/16"}},
		{"overlapping", site4, "10.1.0.0/16", "10.1.0.0/16", [2]string{"10.71.0.0/16", "10.72.0.0/16"}},
		{"ipv6-overlapping", site6, "fd01::/56", "fd01::/56", [2]string{"fd71::/64", "fd71::/64"}},
	} {
		out[tt.name] = func(t testing.TB) *world {
			list := []*site{
				tt.site("milan", 1, tt.here, tt.externals[0], overlay),
				tt.site("rome", 2, tt.there, tt.externals[1], overlay),
			}
			for i, s := range list {
				s.mtu, s.rpFilter = mtus[i], 2
			}
			return build(t, list, [2]int{0, 1})
		}
	}
	return out
}
