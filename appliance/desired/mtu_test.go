package desired_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/desired"
)

// TestPathMTU: a route to a peer has the MTU of the tunnel when its link takes
// more, and when nothing is known of the link; other routes have none.
func TestPathMTU(t *testing.T) {
	const pods, internal = "10.127.128.0/18", "10.80.0.5/32"
	geneve := func(linkMTU, tunnel int) desired.NodeInput {
		in := milanNode()
		in.Fabrics[0].MTU, in.Fabrics[0].TunnelMTU = linkMTU, tunnel
		return in
	}
	vxlan := func(node string) desired.NodeInput {
		in := overlayNode(node)
		in.Fabrics[0].TunnelMTU = 1440
		return in
	}
	leaving := geneve(1450, 1440)
	leaving.Fabrics = append(leaving.Fabrics, leaving.Fabrics[0])
	leaving.Fabrics[2].Meta = meta("InternalFabric", "liqo-tenant-old", "old")
	leaving.Fabrics[2].Deleting, leaving.Fabrics[2].TunnelMTU = true, 600
	for _, tt := range []struct {
		name string
		in   desired.NodeInput
		dst  string
		dev  string
		want int
	}{
		{"link takes more", geneve(1450, 1440), pods, "liqo.rome", 1440},
		{"all networks of the peer", geneve(1450, 1440), "10.71.0.0/16", "liqo.rome", 1440},
		{"the gateway itself is not behind the tunnel", geneve(1450, 1440), internal, "liqo.rome", 0},
		{"another peer", geneve(1450, 1440), "10.1.0.0/16", "liqo.oslo", 0},
		{"link takes less", geneve(1400, 1440), pods, "liqo.rome", 0},
		{"link takes as much", geneve(1340, 1340), pods, "liqo.rome", 0},
		{"not known yet", geneve(1450, 0), pods, "liqo.rome", 0},
		{"a fabric that goes", leaving, pods, "liqo.rome", 1440},
		{"VXLAN, another node", vxlan("node-1"), pods, "liqo.vxlan", 1440},
		{"VXLAN, node of the gateway", vxlan("node-2"), pods, "cni0", 1440},
		{"VXLAN, back to another node", vxlan("node-2"), "10.127.65.0/24", "liqo.vxlan", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, _ := desired.Node(tt.in)
			found := false
			for _, r := range s.Routes {
				if r.Dst == prefix(tt.dst) && r.Dev == tt.dev {
					found = true
					assert.Equal(t, r.MTU, tt.want, "%s", r)
				}
			}
			assert.Assert(t, found, "%s", s)
		})
	}
}

// TestTunnelMTU: a tunnel carries what the networks below both gateways have
// room for, whoever is heard or dialled where; what somebody wrote is as long as
// they have room for it.
func TestTunnelMTU(t *testing.T) {
	here, there := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("203.0.113.1")
	for _, tt := range []struct {
		name           string
		underlay, path int // of the default route, and to the peer
		peer, written  int
		room, want     int
		problem        string
	}{
		{name: "the peer says nothing", underlay: 1500, room: 1440, want: 1440},
		{name: "1500 here, 1450 there", underlay: 1500, peer: 1390, room: 1440, want: 1390},
		{name: "1500 here, 1400 there", underlay: 1500, peer: 1340, room: 1440, want: 1340},
		{name: "9000 here, 1500 there", underlay: 9000, peer: 1440, room: 8940, want: 1440},
		{name: "1380 here, 1420 there", underlay: 1380, peer: 1360, room: 1320, want: 1320},
		{name: "a narrower path between", underlay: 1500, path: 1420, peer: 1440, room: 1360, want: 1360},
		{name: "the peer talks nonsense", underlay: 1500, peer: 100, room: 1440, want: 1440},
		{name: "written, and there is room", underlay: 1500, peer: 1390, written: 1340, room: 1440, want: 1340},
		{name: "written, and too long for the peer", underlay: 1500, peer: 1390, written: 1420, room: 1440, want: 1390,
			problem: "mtu 1420 is more than the 1390 bytes that the peer has room for"},
		{name: "written, and too long for both", underlay: 1500, peer: 1390, written: 1450, room: 1440, want: 1390,
			problem: "mtu 1450 is more than the 1390 bytes that the peer has room for"},
		{name: "written, and too long here", underlay: 1500, written: 1450, room: 1440, want: 1450,
			problem: "mtu 1450 is more than the 1440 bytes that fit into the network below:"},
	} {
		for _, mode := range []string{"dialled", "heard"} {
			t.Run(tt.name+", "+mode, func(t *testing.T) {
				in := desired.GatewayInput{PodIP: here, MTU: tt.written, PeerMTU: tt.peer, Underlay: desired.Underlay{MTU: tt.underlay}}
				if mode == "heard" {
					in.PeerHeard = there
				} else {
					in.PeerEndpoint = netip.AddrPortFrom(there, 51840)
				}
				if tt.path > 0 {
					in.Underlay.Paths = map[netip.Addr]int{there: tt.path}
				}
				assert.DeepEqual(t, in.Remotes(), []netip.Addr{there}, cmpopts.EquateComparable(netip.Addr{}))
				mtu, problem := in.TunnelMTU()
				assert.Equal(t, mtu, tt.want)
				assert.Equal(t, in.Room(), tt.room)
				// What the peer is told has nothing of what it has told.
				own := tt.room
				if tt.written > 0 {
					own = min(tt.room, tt.written)
				}
				assert.Equal(t, in.OwnMTU(), own)
				assert.Assert(t, strings.Contains(problem, tt.problem) && (problem == "") == (tt.problem == ""), problem)
			})
		}
	}
}
