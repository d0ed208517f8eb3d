package trace_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/trace"
)

// randomWorld returns some sites that are peers, with whatever networks and
// overlays they happen to have.
func randomWorld(t testing.TB, seed uint64) *world {
	d := dice{rand.New(rand.NewPCG(seed, 3))}
	var sites []*site
	for i := range 2 + d.IntN(3) {
		s := site4(fmt.Sprintf("site-%d", i), i+1, pick(d, "10.1.0.0/16", "10.1.0.0/16", "10.2.0.0/16", "10.80.0.0/16", "10.16.0.0/12", "192.168.0.0/17"),
			pick(d, "10.70.0.0/16", "10.71.0.0/16", "10.99.4.0/22"), pick(d, cluster.OverlayGeneve, cluster.OverlayVXLAN))
		s.internal = netip.MustParsePrefix(pick(d, "10.80.0.0/16", "10.81.0.0/24"))
		if d.IntN(3) == 0 {
			s.pods = append(s.pods, netip.MustParsePrefix(pick(d, "10.3.0.0/16", "100.64.0.0/16")))
		}
		s.nodes, s.rpFilter, s.mtu = 2+d.IntN(3), d.IntN(3), pick(d, 0, 1450, 1400)
		s.blocks = d.IntN(3) == 0
		if i == 0 && seed%4 == 3 { // so many that a gateway does not ask a rule for each
			s.nodes = 9
		}
		sites = append(sites, s)
	}
	var pairs [][2]int
	for i := range sites {
		for j := range i {
			if j == i-1 || d.IntN(2) == 0 {
				pairs = append(pairs, pick(d, [2]int{i, j}, [2]int{j, i}))
			}
		}
	}
	return build(t, sites, pairs...)
}

func TestRandomWorlds(t *testing.T) {
	worlds := uint64(12)
	if testing.Short() {
		worlds = 3
	}
	for seed := range worlds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := randomWorld(t, seed)
			d := dice{rand.New(rand.NewPCG(seed, 4))}
			w.pairs(func(from, to *site) {
				w.checkTwins(t, from, to)
				w.checkKnocks(t, from, to)
				if from.blocks {
					w.checkFresh(t, from, to)
				}
				for n := range 6 {
					i, j := d.IntN(from.nodes), d.IntN(to.nodes)
					dst := netip.AddrPortFrom(from.calls(to, to.pod(j)), 80)
					f := w.Flow(w.memory, from.podName(i), trace.Connect(netip.AddrPortFrom(from.pod(i), uint16(3000+n)), dst))
					w.check(t, f, to.podName(j))
					assert.Equal(t, f.Request.End.Packet.Src, to.calls(from, from.pod(i)))
					f = w.Flow(w.memory, from.host(i), trace.Connect(netip.AddrPortFrom(netip.Addr{}, uint16(3100+n)), dst))
					w.check(t, f, to.podName(j))
					assert.Equal(t, f.Request.End.Packet.Src, from.unknown(to))
					web := from.to(to).web("web", d.IntN(2) == 0)
					f = w.Flow(w.memory, "client", trace.Connect(netip.AddrPortFrom(beyond(false), uint16(3200+n)), netip.AddrPortFrom(from.nodeAddr(i), web.NodePort)))
					w.check(t, f, to.podName(to.nodes-1))
					f = w.Flow(w.memory, from.podName(i), trace.Connect(netip.AddrPortFrom(from.pod(i), uint16(3300+n)), netip.AddrPortFrom(to.mapped("lan", from), 443)))
					w.check(t, f, to.id+"/lan")
				}
			})
		})
	}
}

// The marks of a gateway tell the nodes apart, and each leads to its own. Where
// there is a link to each node, the destination of what has a mark does so, and
// no rule has to, unless the destination may be a pod that nobody knows yet.
func TestMarks(t *testing.T) {
	for seed := range uint64(4) {
		w := randomWorld(t, seed)
		for _, s := range w.sites {
			for _, h := range s.compile() {
				if !slices.ContainsFunc(s.peers, func(p *peering) bool { return h.Name == s.id+"/"+p.gatewayName() }) {
					continue
				}
				marks := map[uint32]string{}
				given := ^uint32(0) // the bits that a connection's mark gives to packets
				for _, table := range h.State.Tables {
					for _, c := range table.Chains {
						for _, r := range c.Rules {
							switch {
							case r.Action.Kind == netstate.RestoreCT:
								given = r.Action.Mask
							case r.Action.Kind == netstate.SetCTMark && len(r.Action.Map.Entries) > 0:
								for _, e := range r.Action.Map.Entries { // once for each combination of the gateway's bits
									mark := e.Mark &^ desired.ReservedMarks
									node, _, _ := strings.Cut(e.Name, "-pods-")
									assert.Assert(t, mark != 0 && (marks[mark] == "" || marks[mark] == node), "%s: mark %d of %s and %s", h.Name, mark, e.Name, marks[mark])
									marks[mark] = node
								}
							case r.Action.Kind == netstate.SetCTMark && table.Name != desired.ICMPErrorTable:
								node, _, _ := strings.Cut(r.Name, "-pods-")
								assert.Assert(t, r.Action.Mark != 0 && (marks[r.Action.Mark] == "" || marks[r.Action.Mark] == node), "%s: mark %d of %s and %s", h.Name, r.Action.Mark, r.Name, marks[r.Action.Mark])
								marks[r.Action.Mark] = node
							}
						}
					}
				}
				// The bits of the gateway itself are no part of any other mark, and
				// the mark of what it leads into the tunnel is given to nothing else.
				ownMarks, led := uint32(0), uint32(0)
				for _, table := range h.State.Tables {
					for _, c := range table.Chains {
						for _, r := range c.Rules {
							if table.Name == desired.ICMPErrorTable && r.Action.Kind == netstate.SetCTMark {
								ownMarks |= r.Action.Mask
							} else if r.Action.Kind == netstate.SetMark {
								led = r.Action.Mark
							}
						}
					}
				}
				assert.Assert(t, ownMarks != 0 && led != 0 && given&ownMarks == 0 && given&led == 0, "%s: 0x%x, 0x%x, 0x%x", h.Name, ownMarks, led, given)
				for mark, name := range marks {
					assert.Assert(t, mark&ownMarks == 0, "%s: %s", h.Name, name)
				}
				rules := map[uint32]bool{}
				for _, r := range h.State.Rules {
					if r.Mark != 0 && r.Mark != led {
						assert.Assert(t, marks[r.Mark] != "" && (!rules[r.Mark] || s.blocks), "%s: %s", h.Name, r)
						rules[r.Mark] = true
					}
				}
				assert.Equal(t, len(marks), s.nodes)
				if s.overlay == cluster.OverlayVXLAN || s.blocks {
					assert.Equal(t, len(rules), s.nodes)
				} else {
					assert.Equal(t, len(rules), 0)
				}
			}
		}
	}
}

// One leaf reaches pods of another through the hub, by addresses that the hub
// gives them, where the hub says that it may: the others it drops, though the
// address is there. The other leaf sees the hub.
func TestTransit(t *testing.T) {
	for _, overlay := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
		for name, pods := range map[string]string{"disjoint": "10.3.0.0/16", "overlapping": "10.1.0.0/16"} {
			for allowed, tt := range map[string]struct {
				all   bool
				pairs [][2]string
				may   map[string]bool // who reaches other
			}{
				"nobody": {},
				"all":    {all: true, may: map[string]bool{"leaf": true, "third": true}},
				"a pair": {pairs: [][2]string{{"other", "leaf"}}, may: map[string]bool{"leaf": true}},
			} {
				t.Run(string(overlay)+"-"+name+"-"+allowed, func(t *testing.T) {
					hub, leaf, other := site4("hub", 1, "10.1.0.0/16", "10.70.0.0/16", overlay), site4("leaf", 2, "10.2.0.0/16", "10.70.0.0/16", overlay), site4("other", 3, pods, "10.70.0.0/16", overlay)
					third := site4("third", 4, "10.2.0.0/16", "10.70.0.0/16", overlay)
					hub.transit, hub.transitPairs = tt.all, tt.pairs
					w := build(t, []*site{hub, leaf, other, third}, [2]int{0, 1}, [2]int{0, 2}, [2]int{0, 3})
					for j := range other.nodes {
						o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "IP"}}
						o.Namespace, o.Name, o.Spec.IP = "default", fmt.Sprintf("of-other-%d", j), v1beta1.IP(hub.calls(other, other.pod(j)).String())
						hub.api.add(o)
					}
					hub.api.settle()
					w = assemble(t, w.sites)
					for _, from := range []*site{leaf, third} {
						for i := range from.nodes {
							for j := range other.nodes {
								dst := netip.AddrPortFrom(hub.mapped(fmt.Sprintf("of-other-%d", j), from), 80)
								f := w.Flow(w.memory, from.podName(i), trace.Connect(netip.AddrPortFrom(from.pod(i), 9000), dst))
								if !tt.may[from.id] {
									end := f.Request.End
									assert.Assert(t, end.Kind == trace.Dropped && end.Host == "hub/"+hub.to(from).gatewayName() && strings.Contains(end.Why, "no-transit"), "%v", f.Request)
									continue
								}
								w.check(t, f, other.podName(j))
								assert.Equal(t, f.Request.End.Packet.Src, hub.unknown(other))
							}
						}
					}
				})
			}
		}
	}
}

// Where a peer's endpoint is inside the peer's pod network, as in a cloud's flat
// network, the tunnel's packets do not go into the tunnel.
func TestEndpointInsidePeerCIDR(t *testing.T) {
	for _, overlay := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
		t.Run(string(overlay), func(t *testing.T) {
			milan, rome := site4("milan", 1, "10.1.0.0/16", "10.71.0.0/16", overlay), site4("rome", 2, "10.2.0.0/16", "10.72.0.0/16", overlay)
			milan.flat, rome.flat = true, true
			milan.underlay, rome.underlay = netip.MustParsePrefix("10.1.200.1/24"), netip.MustParsePrefix("10.2.200.1/24")
			w := build(t, []*site{milan, rome}, [2]int{0, 1})
			w.pairs(func(from, to *site) {
				for i := range from.nodes {
					for j := range to.nodes {
						f := w.Flow(w.memory, from.podName(i), trace.Ping(from.pod(i), from.calls(to, to.pod(j))))
						w.check(t, f, to.podName(j))
					}
				}
			})
		})
	}
}
