package desired_test

import (
	"net/netip"
	"slices"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// tableOf returns the table of that name; nil if there is none.
func tableOf(s netstate.State, name string) *netstate.Table {
	i := slices.IndexFunc(s.Tables, func(t netstate.Table) bool { return t.Name == name })
	if i < 0 {
		return nil
	}
	return &s.Tables[i]
}

// TestNodeAddress: what is from no pod of the node gets the node's address, as
// soon as its pods are known; what comes by the overlay has got one already.
func TestNodeAddress(t *testing.T) {
	const rest = ` ip saddr != 10.80.0.2 ip saddr != 10.127.65.0/24 ip saddr != 10.127.66.200 ip daddr 10.1.0.0/16 snat ip to 10.80.0.2 comment "unknown-source"`
	for _, tt := range []struct {
		name string
		edit func(*desired.NodeInput)
		want string // rule towards oslo; empty: no table
	}{
		{"pods of the node and the node itself keep theirs", func(*desired.NodeInput) {}, rest},
		{"pods not known yet: nobody's address is taken", func(in *desired.NodeInput) { in.Nodes[0].PodCIDRs = nil }, ""},
		{"a node without pods", func(in *desired.NodeInput) { in.Nodes[0].PodCIDRs = []netip.Prefix{} },
			` ip saddr != 10.80.0.2 ip daddr 10.1.0.0/16 snat ip to 10.80.0.2 comment "unknown-source"`},
		{"VXLAN", func(in *desired.NodeInput) { in.Nodes[0].Overlay = "vxlan" }, ` iifname != "liqo.vxlan"` + rest},
		{"no peer", func(in *desired.NodeInput) { in.Fabrics = nil }, ""},
		{"a peer of the other family", func(in *desired.NodeInput) {
			in.Fabrics = in.Fabrics[:1]
			in.Fabrics[0].RemoteCIDRs = prefixes("fd10::/56")
		}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := milanNode()
			tt.edit(&in)
			state, _ := desired.Node(in)
			assert.NilError(t, state.Validate())
			table := tableOf(state, desired.NodeAddressTable)
			if tt.want == "" {
				assert.Assert(t, table == nil, "%v", table)
				return
			}
			assert.Assert(t, table != nil)
			want := "table inet node-address {\n\tchain postrouting {\n\t\ttype nat hook postrouting priority -160; policy accept;\n\t\t" + tt.want[1:] + "\n"
			assert.Equal(t, table.String()[:len(want)], want)
		})
	}
}
