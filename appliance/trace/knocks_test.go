package trace_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/trace"
)

// checkKnocks sends from pods of one site to whatever of the other has a socket and is
// no pod: nodes by their addresses on the bridge of pods and, in a flat network, below the
// tunnels, their NodePorts, and gateways, those to other peers too. Nothing arrives, nor does it in what
// a NodePort leads to; what an IP stands for does. It returns how many packets it sent.
func (w *world) checkKnocks(t *testing.T, from, to *site) (sent int) {
	t.Helper()
	inside := map[string]bool{}
	var doors []netip.Addr
	for j := range to.nodes {
		inside[to.host(j)] = true
		doors = append(doors, at(to.nodePods(j), 1))
		if to.flat && j != 1 { // for which there is an IP
			doors = append(doors, to.nodeAddr(j))
		}
	}
	for _, p := range to.peers {
		inside[to.id+"/"+p.gatewayName()] = true
		doors = append(doors, p.gatewayAddr())
	}
	web := from.to(to).other().web("web", false)
	for n, door := range doors {
		dst := from.calls(to, door)
		for _, source := range []struct {
			host string
			addr netip.Addr
		}{{from.podName(0), from.pod(0)}, {from.podName(1), from.pod(1)}, {from.host(0), netip.Addr{}}} {
			for i, p := range []trace.Packet{
				trace.Connect(netip.AddrPortFrom(source.addr, uint16(20000+n)), netip.AddrPortFrom(dst, 10250)),
				trace.Connect(netip.AddrPortFrom(source.addr, uint16(20100+n)), netip.AddrPortFrom(dst, web.NodePort)),
				trace.Datagram(netip.AddrPortFrom(source.addr, uint16(20200+n)), netip.AddrPortFrom(dst, 4879), 100),
				trace.Ping(source.addr, dst),
			} {
				tr := w.Walk(w.memory, source.host, p)
				sent++
				there := tr.End.Kind == trace.Delivered && strings.HasPrefix(tr.End.Host, to.id+"/")
				assert.Assert(t, !there || !inside[tr.End.Host] && i != 1, "%v", tr)
			}
		}
	}
	return sent
}

// Peers reach pods and what IPs stand for, and nothing that listens on nodes or gateways,
// also where nodes have addresses of the pods' network.
func TestKnocks(t *testing.T) {
	for _, overlay := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
		for _, flat := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s-flat-%v", overlay, flat), func(t *testing.T) {
				milan, rome := site4("milan", 1, "10.1.0.0/16", "10.71.0.0/16", overlay), site4("rome", 2, "10.2.0.0/16", "10.72.0.0/16", overlay)
				naples := site4("naples", 3, "10.3.0.0/16", "10.73.0.0/16", overlay)
				sites := []*site{milan, rome, naples}
				for i, s := range sites {
					if s.flat = flat; flat {
						s.underlay = netip.MustParsePrefix(fmt.Sprintf("10.%d.200.1/24", i+1))
					}
				}
				w := build(t, sites, [2]int{0, 1}, [2]int{2, 0})
				for _, s := range sites {
					o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "IP"}}
					o.Namespace, o.Name, o.Spec.IP, o.Spec.Masquerade = "default", "node", v1beta1.IP(s.nodeAddr(1).String()), new(true)
					s.api.add(o)
					s.api.settle()
				}
				w = assemble(t, sites)
				sent := 0
				w.pairs(func(from, to *site) { sent += w.checkKnocks(t, from, to) })
				assert.Assert(t, sent > 100, "only %d packets were sent", sent)
				w.pairs(func(from, to *site) {
					dst := netip.AddrPortFrom(to.mapped("node", from), 22)
					w.check(t, w.Flow(w.memory, from.podName(0), trace.Connect(netip.AddrPortFrom(from.pod(0), 9900), dst)), to.host(1))
				})
			})
		}
	}
}
