package desired_test

import (
	"net/netip"
	"slices"
	"strings"
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

// calico is a node whose CNI does not care for podCIDRs: a pod has one outside of the
// node's, and the way to it is by a link of its own.
func calico() desired.NodeInput {
	in := milanNode()
	in.Nodes[0].PodNetworks = prefixes("10.127.0.0/16", "fd01::/48")
	in.Underlay.Uplinks = []string{"eth0", "liqo.oslo", "vxlan.calico"}
	in.Underlay.Devs = map[netip.Addr]string{addr("10.127.66.200"): "cali1234"}
	return in
}

// TestNodeAddressOfUnknownPods: where pods are outside of podCIDRs, the link that a packet
// came in by tells whose it is, and pods that are known by their link are not named.
func TestNodeAddressOfUnknownPods(t *testing.T) {
	const (
		own    = `iif != 0 iifname != "liqo.*" iifname != "eth0" iifname != "vxlan.calico" ip saddr 10.127.0.0/16 accept comment "own-pods"`
		rest   = `ip saddr != 10.80.0.2 ip saddr != 10.127.65.0/24 ip daddr 10.1.0.0/16 snat ip to 10.80.0.2 comment "unknown-source"`
		listed = `ip saddr != 10.80.0.2 ip saddr != 10.127.65.0/24 ip saddr != 10.127.66.200 ip daddr 10.1.0.0/16 snat ip to 10.80.0.2 comment "unknown-source"`
	)
	for _, tt := range []struct {
		name string
		edit func(*desired.NodeInput)
		want []string // the first rules
	}{
		{"a pod that has just started is known by its link", func(*desired.NodeInput) {}, []string{own, rest}},
		{"podCIDRs not known yet", func(in *desired.NodeInput) { in.Nodes[0].PodCIDRs = nil }, nil},
		{"uplinks not known", func(in *desired.NodeInput) { in.Underlay.Uplinks = nil }, []string{listed}},
		{"no uplink", func(in *desired.NodeInput) { in.Underlay.Uplinks = []string{} },
			[]string{`iif != 0 iifname != "liqo.*" ip saddr 10.127.0.0/16 accept comment "own-pods"`, rest}},
		{"the way to a pod is not known", func(in *desired.NodeInput) { in.Underlay.Devs = nil }, []string{own, listed}},
		{"the way to a pod is an uplink", func(in *desired.NodeInput) { in.Underlay.Devs[addr("10.127.66.200")] = "vxlan.calico" }, []string{own, listed}},
		{"the way to a pod is a link of ours", func(in *desired.NodeInput) { in.Underlay.Devs[addr("10.127.66.200")] = "liqo.rome" }, []string{own, listed}},
		{"a pod that no network has", func(in *desired.NodeInput) { in.Nodes[0].PodNetworks = prefixes("10.127.65.0/24") },
			[]string{`iif != 0 iifname != "liqo.*" iifname != "eth0" iifname != "vxlan.calico" ip saddr 10.127.65.0/24 accept comment "own-pods"`, listed}},
		{"pods are where podCIDRs say", func(in *desired.NodeInput) { in.Nodes[0].PodNetworks = nil }, []string{listed}},
		{"no peer", func(in *desired.NodeInput) { in.Fabrics = nil }, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := calico()
			tt.edit(&in)
			state, _ := desired.Node(in)
			assert.NilError(t, state.Validate())
			table := tableOf(state, desired.NodeAddressTable)
			if tt.want == nil {
				assert.Assert(t, table == nil, "%v", table)
				return
			}
			assert.Assert(t, table != nil)
			want := "table inet node-address {\n\tchain postrouting {\n\t\ttype nat hook postrouting priority -160; policy accept;\n\t\t" + strings.Join(tt.want, "\n\t\t") + "\n"
			assert.Equal(t, table.String()[:min(len(want), len(table.String()))], want)
		})
	}
}

// TestPodsComeAndGo: a pod that starts or ends changes nothing on its node, so nothing is
// written there, and the connection table is not read.
func TestPodsComeAndGo(t *testing.T) {
	in := calico()
	before, _ := desired.Node(in)
	in.Nodes[0].PodCIDRs = append(slices.Clone(in.Nodes[0].PodCIDRs), prefix("10.127.99.7/32"))
	in.Underlay.Devs[addr("10.127.99.7")] = "cali5678"
	assert.Assert(t, slices.Contains(in.Remotes(), addr("10.127.99.7")), "the daemon asks for its link")
	after, _ := desired.Node(in)
	changes := netstate.Diff(before, after)
	assert.Assert(t, changes.Empty(), "%v", changes)
	// Where links do not tell, the connections that have begun are left alone.
	in.Underlay.Devs[addr("10.127.99.7")] = "vxlan.calico"
	after, _ = desired.Node(in)
	changes = netstate.Diff(before, after)
	assert.Assert(t, len(changes.Evict) > 0)
	pod := netstate.Tuple{Src: addr("10.127.99.7"), Dst: addr("10.1.0.5"), SrcPort: 4000, DstPort: 80}
	answer := netstate.Tuple{Src: addr("10.1.0.5"), Dst: addr("10.127.99.7"), SrcPort: 80, DstPort: 4000}
	for _, e := range changes.Evict {
		assert.Assert(t, !e.Evicts(netstate.Connection{L4Proto: 6, Orig: pod, Reply: answer}), "%v", e)
	}
}
