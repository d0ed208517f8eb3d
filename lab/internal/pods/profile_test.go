package pods

import (
	"encoding/json"
	"net/netip"
	"strings"
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

// TestMasquerade: each kind says what it leaves alone: the cluster's own pods.
func TestMasquerade(t *testing.T) {
	own, cluster := netip.MustParsePrefix("10.0.1.0/24"), netip.MustParsePrefix("10.0.0.0/16")
	argv, _ := Masquerade("", own, cluster)
	assert.Assert(t, argv == nil)
	argv, _ = Masquerade(MasqueradeIPTables, own, cluster)
	assert.Assert(t, len(argv) == 3)
	const rule = "POSTROUTING -s 10.0.1.0/24 ! -d 10.0.0.0/16 -m comment --comment lab-cni -j MASQUERADE"
	assert.Equal(t, argv[2], "iptables -w -t nat -C "+rule+" 2>/dev/null || iptables -w -t nat -A "+rule)
	for how, want := range map[string]string{
		MasqueradeNFTables: "ip saddr 10.0.1.0/24 ip daddr != 10.0.0.0/16 masquerade",
		MasqueradeKindnet:  "ip daddr 10.0.0.0/16 accept",
	} {
		argv, input := Masquerade(how, own, cluster)
		assert.DeepEqual(t, argv, []string{"nft", "-f", "-"})
		assert.Assert(t, strings.Contains(input, want), input)
	}
}
