package desired_test

import (
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// TestUnknownPods: a gateway has a way back to pods that no object names yet, which is the
// last one that is asked for and that nothing passes, and none where pods are in the podCIDRs of
// their nodes.
func TestUnknownPods(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*desired.GatewayInput)
		want bool
	}{
		{"pods anywhere", func(*desired.GatewayInput) {}, true},
		{"pods where podCIDRs say", func(in *desired.GatewayInput) {
			for i := range in.Nodes {
				in.Nodes[i].PodNetworks = nil
			}
		}, false},
		{"of IPv6, which has no such filter", func(in *desired.GatewayInput) {
			for i := range in.Nodes {
				in.Nodes[i].PodNetworks = prefixes("fd00::/48")
			}
		}, false},
		{"VXLAN: the main table knows", func(in *desired.GatewayInput) { in.Fabrics[0].Overlay = "vxlan" }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := romeGateway()
			for i := range in.Nodes {
				in.Nodes[i].PodNetworks = prefixes("10.127.64.0/18")
			}
			tt.edit(&in)
			state, _ := desired.Gateway(in)
			assert.NilError(t, state.Validate())
			state = desired.PlainGateway(in) // before its rules are made fewer
			i := slices.IndexFunc(state.Rules, func(r netstate.Rule) bool { return r.Priority == 389 })
			assert.Equal(t, tableOf(state, desired.UnknownPodsTable) != nil, tt.want)
			if !tt.want {
				assert.Assert(t, i < 0, "%v", state.Rules)
				return
			}
			assert.Assert(t, i >= 0, "%v", state.Rules)
			rule := state.Rules[i]
			assert.Equal(t, rule.IIF, desired.TunnelInterface)
			var ways []string
			for _, r := range state.Routes {
				if r.Table == rule.Table {
					ways = append(ways, r.Dst.String()+" "+r.Dev)
				}
			}
			assert.DeepEqual(t, ways, []string{"10.127.64.0/18 liqo-tunnel"})
			assert.Assert(t, strings.Contains(tableOf(state, desired.UnknownPodsTable).String(), `iifname "liqo-tunnel" oifname "liqo-tunnel" counter drop`))
			assert.Equal(t, rule.Dst, prefix("10.127.64.0/18"))
		})
	}
}
