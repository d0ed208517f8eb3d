package expect

import (
	"net/netip"
	"testing"

	"gotest.tools/v3/assert"
)

// TestMovable: two inventories of a host are alike when all that changed is
// which podCIDR a node has and which address a pod.
func TestMovable(t *testing.T) {
	m := movable{
		nodes: map[netip.Prefix]string{netip.MustParsePrefix("10.0.3.0/24"): "milan/node-3", netip.MustParsePrefix("fd00:3::/64"): "milan/node-3"},
		pods:  map[netip.Addr]string{netip.MustParseAddr("10.0.3.7"): "milan/web3"},
	}
	for line, want := range map[string]string{
		"IPv4 route 10.0.3.0/24 via 172.18.1.13 dev eth0": "IPv4 route <podCIDR of milan/node-3>+0.0.0.0/24 via 172.18.1.13 dev eth0",
		"address 10.0.3.1/24 dev cni0":                    "address <podCIDR of milan/node-3>+0.0.0.1/24 dev cni0",
		"address 10.0.3.7/24 dev eth0":                    "address <milan/web3>/24 dev eth0",
		"IPv4 route 10.1.0.0/16 via 10.0.3.7 table 18952": "IPv4 route 10.1.0.0/16 via <milan/web3> table 18952",
		"IPv4 route 10.0.0.0/16 dev liqo.rome":            "IPv4 route 10.0.0.0/16 dev liqo.rome", // wider than a podCIDR
		"IPv6 route fd00:3::1/128 dev lo":                 "IPv6 route <podCIDR of milan/node-3>+::1/128 dev lo",
		"IPv4 rule 300: from <nil> to 10.70.0.0/16":       "IPv4 rule 300: from <nil> to 10.70.0.0/16",
		"chain ip kube-proxy a:b":                         "chain ip kube-proxy a:b",
	} {
		assert.Equal(t, m.name(line), want)
	}
}
