package desired_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// overlayNodes are three nodes of the VXLAN overlay.
func overlayNodes() []cluster.InternalNode {
	var out []cluster.InternalNode
	for i := range 3 {
		n := internalNode(fmt.Sprintf("node-%d", i+1), fmt.Sprintf("liqo.node-%d", i+1), fmt.Sprintf("10.80.0.%d", i+2), "", "")
		n.Overlay = cluster.OverlayVXLAN
		n.PodCIDRs = prefixes(fmt.Sprintf("10.127.%d.0/24", 65+i))
		n.VTEP = cluster.VTEP{IP: addr(fmt.Sprintf("172.18.1.%d", 11+i)), MAC: [6]byte{2, 0, 0, 0, 0, byte(i + 1)}}
		out = append(out, n)
	}
	return out
}

// overlayRoutes are what the controller plans for nodes about rome, whose
// gateway is on node-2.
func overlayRoutes(f cluster.InternalFabric, nodes []cluster.InternalNode) []cluster.RouteConfiguration {
	to := nodeGW(f)
	to.Table, to.Rules = "18952", to.Rules[1:]
	for i := range to.Rules {
		to.Rules[i].Routes[0].Dev, to.Rules[i].Routes[0].OnLink = "", false
	}
	back := cluster.RouteConfiguration{
		Meta:  meta("RouteConfiguration", f.Namespace, f.Name+"-symmetric", routeCategory, "fabric", routeSubcategory, "single-node", routeUnique, "node-2"),
		Table: "18952",
	}
	var routes []cluster.TableRoute
	for i, n := range nodes {
		if n.Name == "node-2" {
			continue
		}
		for _, dst := range []netip.Prefix{netip.PrefixFrom(n.InternalIP, 32), prefix(fmt.Sprintf("10.127.%d.0/24", 65+i))} {
			routes = append(routes, cluster.TableRoute{Dst: dst, Via: n.InternalIP, Dev: "liqo.vxlan", OnLink: true})
		}
	}
	for _, cidr := range f.RemoteCIDRs {
		back.Rules = append(back.Rules, cluster.RouteRule{Src: cidr, Routes: routes})
		routes = nil
	}
	return []cluster.RouteConfiguration{to, back}
}

func overlayFabric() cluster.InternalFabric {
	f := fabric("rome", "liqo.rome", "10.127.66.9", "10.80.0.5", "10.127.128.0/18", "10.71.0.0/16")
	f.Overlay, f.GatewayNode = cluster.OverlayVXLAN, "node-2"
	return f
}

// overlayNode is a node of the overlay.
func overlayNode(name string) desired.NodeInput {
	nodes := overlayNodes()
	f := overlayFabric()
	i := slices.IndexFunc(nodes, func(n cluster.InternalNode) bool { return n.Name == name })
	return desired.NodeInput{
		Name: name, NodeIP: nodes[i].VTEP.IP,
		Underlay: desired.Underlay{MTU: 1500, Devs: map[netip.Addr]string{f.GatewayIP: "cni0"}},
		Fabrics:  []cluster.InternalFabric{f}, Nodes: nodes, Routes: overlayRoutes(f, nodes),
	}
}

// overlayGateway is the gateway to rome in the VXLAN overlay.
func overlayGateway() desired.GatewayInput {
	in := romeGateway()
	in.PodIP, in.NodeName, in.Tunnels = addr("10.127.66.9"), "node-2", nil
	in.Fabrics, in.Nodes = []cluster.InternalFabric{overlayFabric()}, overlayNodes()
	ext := gwExt("rome", "169.254.18.2", in.Nodes[:1], "10.127.64.0/18", "10.70.0.0/16")
	ext.Rules[0].IIF = "eth0"
	pods := cluster.RouteConfiguration{
		Meta:  meta("RouteConfiguration", "liqo", "milan-gw-pods", routeCategory, "gateway", routeSubcategory, "fabric"),
		Table: "254",
		Rules: []cluster.RouteRule{{Dst: prefix("10.127.64.0/18"), IIF: "liqo-tunnel"}, {Dst: prefix("10.80.0.0/16"), IIF: "liqo-tunnel"}},
	}
	in.Routes = []cluster.RouteConfiguration{ext, pods}
	return in
}

func TestOverlayGolden(t *testing.T) {
	for name, compile := range map[string]func() (netstate.State, []desired.Result){
		"vxlan-node":         func() (netstate.State, []desired.Result) { return desired.Node(overlayNode("node-1")) },
		"vxlan-gateway-node": func() (netstate.State, []desired.Result) { return desired.Node(overlayNode("node-2")) },
		"vxlan-gateway":      func() (netstate.State, []desired.Result) { return desired.Gateway(overlayGateway()) },
	} {
		t.Run(name, func(t *testing.T) {
			state, results := compile()
			assert.NilError(t, state.Validate())
			golden.Assert(t, text(state, results), name+".golden")
		})
	}
}

// A packet takes the overlay to the gateway and back, and every host that it
// passes would send the answer where it came from: a strict reverse-path filter
// lets it through.
func TestOverlayFate(t *testing.T) {
	states := map[string]netstate.State{}
	for _, name := range []string{"node-1", "node-2", "node-3"} {
		states[name], _ = desired.Node(overlayNode(name))
	}
	states["gateway"], _ = desired.Gateway(overlayGateway())
	const pod, podAtGateway, peer = "10.127.65.7", "10.127.66.7", "10.127.128.7" // as milan calls it
	const peersOwn = "10.127.64.7"                                               // as rome calls it
	for _, tt := range []struct {
		host, name string
		packet
		want string
		back string // where the answer leaves by; empty: nothing of ours says so
	}{
		{"node-1", "a pod to the peer", packet{"cni0", pod, peer}, "liqo.vxlan", ""},
		{"node-3", "a node to the peer", packet{"lo", "10.80.0.4", peer}, "liqo.vxlan", ""},
		{"node-2", "a pod to the peer, from another node", packet{"liqo.vxlan", pod, peer}, "cni0", "liqo.vxlan"},
		{"node-2", "a pod of this node to the peer", packet{"cni0", podAtGateway, peer}, "cni0", ""},
		{"gateway", "a pod to the peer", packet{"eth0", pod, peersOwn}, "liqo-tunnel", "main"},
		{"gateway", "a pod to somebody else", packet{"eth0", pod, "10.96.0.1"}, "unreachable", ""},

		{"gateway", "the peer to a pod", packet{"liqo-tunnel", peersOwn, pod}, "main", "liqo-tunnel"},
		{"gateway", "the peer to a Service", packet{"liqo-tunnel", peersOwn, "10.96.0.1"}, "unreachable", ""},
		{"gateway", "the peer to a node", packet{"liqo-tunnel", peersOwn, "172.18.1.11"}, "unreachable", ""},
		{"gateway", "the peer to a node, by its internal address", packet{"liqo-tunnel", peersOwn, "10.80.0.2"}, "dropped by internal-cidr", ""},
		{"node-2", "the peer to a pod of another node", packet{"cni0", peer, pod}, "liqo.vxlan", "cni0"},
		{"node-2", "the peer to a pod of this node", packet{"cni0", peer, podAtGateway}, "main", "cni0"},
		{"node-2", "the peer to another node", packet{"cni0", peer, "10.80.0.2"}, "liqo.vxlan", "cni0"},
		{"node-1", "the peer to a pod", packet{"liqo.vxlan", peer, pod}, "main", "liqo.vxlan"},
		{"node-2", "WireGuard, into itself", packet{"cni0", "10.127.66.9", peer}, "main", ""},
	} {
		t.Run(tt.host+" "+tt.name, func(t *testing.T) {
			assert.Equal(t, fate(states[tt.host], tt.packet), tt.want)
			if tt.back == "" {
				return
			}
			// As fib_validate_source asks, but for the NAT in a gateway.
			got := lookup(states[tt.host], packet{"lo", tt.dst, tt.src})
			if tt.back == "liqo.vxlan" && tt.host == "node-2" { // it is the local pod's
				got = lookup(states[tt.host], packet{"cni0", tt.dst, tt.src})
			}
			if tt.host == "gateway" {
				got = lookup(states[tt.host], packet{tt.iifBack(), tt.dst, tt.src})
			}
			assert.Equal(t, got, tt.back)
		})
	}
}

// iifBack is the link that the answer to a packet of a gateway comes in by.
func (p packet) iifBack() string {
	if p.iif == "eth0" {
		return "liqo-tunnel"
	}
	return "eth0"
}

// As long as there is no way to a gateway, what is for its peer is refused, the
// object says why, and other peers are not disturbed.
func TestNoWayToGateway(t *testing.T) {
	const peer = "10.127.128.7"
	for _, tt := range []struct {
		name, host string
		change     func(*desired.NodeInput)
		want       string
	}{
		{"its node is not known", "node-1", func(in *desired.NodeInput) { in.Fabrics[0].GatewayNode = "" }, "gatewayNode"},
		{"its node has no VTEP", "node-1", func(in *desired.NodeInput) { in.Nodes[1].VTEP = cluster.VTEP{} }, "does not lead to node node-2 yet"},
		{"its node has the address of another one", "node-1", func(in *desired.NodeInput) {
			in.Nodes[1].VTEP.IP, in.Nodes[1].Created = in.Nodes[2].VTEP.IP, epoch.Add(1)
		}, "does not lead to node node-2 yet"},
		{"its node is gone", "node-1", func(in *desired.NodeInput) { in.Nodes = slices.Delete(in.Nodes, 1, 2) }, "does not lead to node node-2 yet"},
		{"its pod has no link", "node-2", func(in *desired.NodeInput) { in.Underlay.Devs = nil }, "no route to the gateway's pod, 10.127.66.9"},
		{"its pod is of another family", "node-2", func(in *desired.NodeInput) { in.Fabrics[0].GatewayIP = addr("fd00::9") }, "of another family"},
		{"this node has no address", "node-1", func(in *desired.NodeInput) { in.NodeIP = netip.Addr{} }, "--node-ip"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := overlayNode(tt.host)
			oslo := overlayFabric()
			oslo.Meta, oslo.RemoteID, oslo.InternalIP, oslo.RemoteCIDRs = meta("InternalFabric", "liqo-tenant-oslo", "oslo"), "oslo", addr("10.80.0.6"), prefixes("10.1.0.0/16")
			oslo.GatewayNode = "node-3"
			in.Fabrics = append(in.Fabrics, oslo)
			in.Routes = append(in.Routes, overlayRoutes(oslo, in.Nodes)[0])
			tt.change(&in)
			state, results := desired.Node(in)
			assert.NilError(t, state.Validate())
			assert.Equal(t, fate(state, packet{"cni0", "10.127.65.7", peer}), "unreachable")
			if in.NodeIP.IsValid() {
				assert.Equal(t, fate(state, packet{"cni0", "10.127.65.7", "10.1.0.7"}), "liqo.vxlan")
			}
			i := slices.IndexFunc(results, func(r desired.Result) bool { return r.Object.Name == "rome-node-gw" })
			assert.Assert(t, !results[i].OK)
			assert.Assert(t, cmp.Contains(results[i].Message, tt.want))
		})
	}
}

// Objects may share a table that has a number, unless they contradict each
// other in it; the kernel's own tables are not theirs to write to.
func TestNumberedTables(t *testing.T) {
	rc := func(name, table, dst, dev string) cluster.RouteConfiguration {
		o := cluster.RouteConfiguration{Meta: meta("RouteConfiguration", "liqo", name, routeCategory, "fabric"), Table: table}
		r := cluster.RouteRule{Src: prefix("10.9.0.0/16")}
		if dst != "" {
			r.Routes = []cluster.TableRoute{{Dst: prefix(dst), Dev: dev}}
		}
		o.Rules = []cluster.RouteRule{r}
		return o
	}
	for _, tt := range []struct {
		name    string
		objects []cluster.RouteConfiguration
		refused string
		tables  []uint32
	}{
		{"two share one", []cluster.RouteConfiguration{rc("a", "18952", "10.1.0.0/16", "x"), rc("b", "18952", "10.2.0.0/16", "y")}, "", []uint32{18952, 18952}},
		{"they say the same", []cluster.RouteConfiguration{rc("a", "18952", "10.1.0.0/16", "x"), rc("b", "18952", "10.1.0.0/16", "x")}, "", []uint32{18952}},
		{"a table of its own takes the same packets elsewhere", []cluster.RouteConfiguration{rc("a", "18952", "10.1.0.0/16", "x"), rc("b", "mine", "10.1.0.0/16", "y")}, "b", []uint32{18952}},
		{"they contradict each other", []cluster.RouteConfiguration{rc("a", "18952", "10.1.0.0/16", "x"), rc("b", "18952", "10.1.0.0/16", "y")}, "b", []uint32{18952}},
		{"a name with a zero in front is a name", []cluster.RouteConfiguration{rc("a", "018952", "10.1.0.0/16", "x")}, "", []uint32{desired.TableNumber("018952")}},
		{"rules may lead to the main table", []cluster.RouteConfiguration{rc("a", "254", "", "")}, "", nil},
		{"routes may not", []cluster.RouteConfiguration{rc("a", "254", "10.1.0.0/16", "x")}, "a", nil},
		{"nor may anything lead to the local one", []cluster.RouteConfiguration{rc("a", "255", "", "")}, "a", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			state, results := desired.Node(desired.NodeInput{Name: "node-1", Routes: tt.objects})
			assert.NilError(t, state.Validate())
			for _, r := range results {
				assert.Equal(t, r.OK, r.Object.Name != tt.refused, r.Message)
			}
			var tables []uint32
			for _, r := range state.Routes {
				tables = append(tables, r.Table)
			}
			assert.DeepEqual(t, tables, tt.tables)
		})
	}
}

// The MTU of the one link is the least that a gateway asks for, else what fits
// on the narrowest way to another node.
func TestOverlayMTU(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*desired.NodeInput)
		want   int
	}{
		{"derived", func(*desired.NodeInput) {}, 1450},
		{"one way is narrow", func(in *desired.NodeInput) {
			in.Underlay.Paths = map[netip.Addr]int{addr("172.18.1.13"): 1400}
		}, 1350},
		{"written", func(in *desired.NodeInput) { in.Fabrics[0].MTU = 1340 }, 1340},
		{"nothing is known", func(in *desired.NodeInput) { in.Underlay.MTU = 0 }, desired.FallbackMTU},
		{"IPv6 below", func(in *desired.NodeInput) {
			in.NodeIP = addr("fd00::11")
			for i := range in.Nodes {
				in.Nodes[i].VTEP.IP = addr(fmt.Sprintf("fd00::%d", 11+i))
			}
		}, 1430},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := overlayNode("node-1")
			tt.change(&in)
			state, _ := desired.Node(in)
			assert.NilError(t, state.Validate())
			assert.Equal(t, len(state.Links), 1)
			assert.Equal(t, state.Links[0].MTU, tt.want)
			assert.Equal(t, len(state.FDB), 2)
			assert.Equal(t, len(state.Neighbors), 3)
		})
	}
}

// What is in the objects of the overlay, and in which order, does not decide
// whether the outcome is a state that a kernel can take.
func TestRandomOverlays(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		in := overlayNode(fmt.Sprintf("node-%d", 1+r.IntN(3)))
		pick := func(list ...string) netip.Addr {
			a, _ := netip.ParseAddr(list[r.IntN(len(list))])
			return a
		}
		for i := range in.Nodes {
			if r.IntN(3) == 0 {
				in.Nodes[i].VTEP.IP = pick("172.18.1.11", "172.18.1.12", "fd00::1", "")
			}
			if r.IntN(3) == 0 {
				in.Nodes[i].VTEP.MAC[5] = byte(r.IntN(3))
			}
			if r.IntN(4) == 0 {
				in.Nodes[i].InternalIP = pick("10.80.0.2", "10.80.0.5", "fd80::1", "")
			}
			if r.IntN(5) == 0 {
				in.Nodes[i].Overlay = []cluster.Overlay{"", cluster.OverlayGeneve}[r.IntN(2)]
			}
		}
		f := &in.Fabrics[0]
		f.GatewayIP, f.InternalIP = pick("10.127.66.9", "fd00::9", ""), pick("10.80.0.5", "10.80.0.2", "fd80::5", "")
		f.GatewayNode = fmt.Sprintf("node-%d", r.IntN(5))
		if r.IntN(3) == 0 {
			in.NodeIP = pick("fd00::2", "172.18.1.12", "")
		}
		state, results := desired.Node(in)
		assert.NilError(t, state.Validate(), "seed %d", seed)
		shuffle(r, in.Nodes)
		shuffle(r, in.Fabrics)
		shuffle(r, in.Routes)
		again, results2 := desired.Node(in)
		assert.DeepEqual(t, again, state, comparers)
		assert.DeepEqual(t, results2, results)
	}
}
