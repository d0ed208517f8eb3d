package desired_test

import (
	"testing"

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
