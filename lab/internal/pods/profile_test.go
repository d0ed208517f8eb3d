package pods

import (
	"encoding/json"
	"net/netip"
	"testing"

	"gotest.tools/v3/assert"
)

// TestConflist: what a profile's CNI configuration names.
func TestConflist(t *testing.T) {
	for _, tt := range []struct {
		cni, plugin, version string
		mtu                  any
	}{
		{CNIBridge, "bridge", "1.0.0", 1400.0},
		{CNIPtP, "ptp", "1.0.0", 1400.0},
		{CNIFlannel, "flannel", "0.3.1", nil}, // flanneld knows
	} {
		n := &node{cfg: NodeConfig{CNI: tt.cni, MTU: 1400, Dir: "/lab"}}
		b, err := n.conflist("/lab/cni", []netip.Prefix{netip.MustParsePrefix("10.0.1.0/24")})
		assert.NilError(t, err)
		var got struct {
			CNIVersion string
			Plugins    []map[string]any
		}
		assert.NilError(t, json.Unmarshal(b, &got))
		assert.Equal(t, got.CNIVersion, tt.version)
		assert.Equal(t, got.Plugins[0]["type"], tt.plugin)
		assert.DeepEqual(t, got.Plugins[0]["mtu"], tt.mtu)
		assert.Equal(t, got.Plugins[1]["type"], "portmap")
	}
}

// TestMasqueradeCommand: each kind says what it leaves alone: the cluster's own
// pods.
func TestMasqueradeCommand(t *testing.T) {
	own, cluster := netip.MustParsePrefix("10.0.1.0/24"), netip.MustParsePrefix("10.0.0.0/16")
	assert.Assert(t, masqueradeCommand("", own, cluster) == nil)
	iptables := masqueradeCommand(MasqueradeIPTables, own, cluster)
	assert.Assert(t, len(iptables.Args) == 3)
	const rule = "POSTROUTING -s 10.0.1.0/24 ! -d 10.0.0.0/16 -m comment --comment lab-cni -j MASQUERADE"
	assert.Equal(t, iptables.Args[2], "iptables -w -t nat -C "+rule+" 2>/dev/null || iptables -w -t nat -A "+rule)
	for _, how := range []string{MasqueradeNFTables, MasqueradeKindnet} {
		assert.DeepEqual(t, masqueradeCommand(how, own, cluster).Args, []string{"nft", "-f", "-"})
	}
}
