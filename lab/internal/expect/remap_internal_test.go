package expect

import (
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// clusterWith is a cluster with these networks of pods, Services, external and
// internal addresses, and nodes.
func clusterWith(name string, networks ...string) world.ClusterSpec {
	var p []netip.Prefix
	for _, n := range networks {
		p = append(p, netip.MustParsePrefix(n))
	}
	return world.ClusterSpec{Name: name, PodCIDR: p[0], ServiceCIDR: p[1], ExternalCIDR: p[2], InternalCIDR: p[3], LAN: p[4]}
}

// TestRemapsOf: a cluster calls networks what its Configuration says, and what it follows by
// the peer's own name.
func TestRemapsOf(t *testing.T) {
	cidrs := func(pod ...any) map[string]any { return map[string]any{"cidr": map[string]any{"pod": pod}} }
	c := unstructured.Unstructured{Object: map[string]any{
		"spec": map[string]any{"remote": cidrs("10.0.0.0/24")},
		"status": map[string]any{"remote": cidrs("10.2.0.0/24"), "follow": map[string]any{"networks": []any{
			map[string]any{"type": "pod", "cidr": "10.0.1.0/24"}, map[string]any{"type": "external", "cidr": "x"},
		}}},
	}}
	var got []string
	for _, r := range remapsOf("rome", "milan", c) {
		got = append(got, r.kind+" "+r.original.String()+" is "+r.remapped.String())
	}
	assert.DeepEqual(t, got, []string{"pod 10.0.0.0/24 is 10.2.0.0/24", "pod 10.0.1.0/24 is 10.0.1.0/24"})
}

// TestCheckRemap: milan calls a network of rome by another one.
func TestCheckRemap(t *testing.T) {
	milan := clusterWith("milan", "10.0.0.0/16", "10.96.0.0/16", "10.70.0.0/16", "10.80.0.0/16", "172.18.1.0/24")
	milan6 := clusterWith("milan", "fd00:10::/56", "fd00:96::/112", "fd00:70::/112", "fd00:80::/112", "2001:db8:1::/64")
	rome := func(pod string) world.ClusterSpec {
		return clusterWith("rome", pod, "10.97.0.0/16", "10.70.0.0/16", "10.80.0.0/16", "172.18.2.0/24")
	}
	for _, tc := range []struct {
		name               string
		of                 world.ClusterSpec
		original, remapped string
		other              string // what milan calls naples' 10.5.0.0/16; empty: naples is no peer
		want               string // part of the message; empty: it keeps the rules
	}{
		{"nothing overlaps, nothing is remapped", milan, "10.1.0.0/16", "10.1.0.0/16", "", ""},
		{"outside of the pools, nothing overlaps", milan, "100.64.0.0/16", "100.64.0.0/16", "", ""},
		{"the same networks, remapped", milan, "10.0.0.0/16", "10.2.0.0/16", "", ""},
		{"part of the own network, remapped", milan, "10.0.128.0/17", "10.2.128.0/17", "", ""},
		{"the own network is part of it, remapped", milan, "10.0.0.0/12", "10.16.0.0/12", "", ""},
		{"the same as the Services, remapped", milan, "10.96.0.0/16", "192.168.0.0/16", "", ""},
		{"a reserved range, remapped", milan, "169.254.0.0/16", "172.20.0.0/16", "", ""},
		{"the same as another peer's, which has kept it", milan, "10.5.0.0/16", "10.6.0.0/16", "10.5.0.0/16", ""},
		{"the same as another peer's, which is remapped", milan, "10.5.0.0/16", "10.5.0.0/16", "10.6.0.0/16", ""},
		{"the same as another peer's, both remapped", milan, "10.5.0.0/16", "10.7.0.0/16", "10.6.0.0/16", ""},
		{"what another peer's is remapped to", milan, "10.6.0.0/16", "10.7.0.0/16", "10.6.0.0/16", ""},

		{"the same networks, not remapped", milan, "10.0.0.0/16", "10.0.0.0/16", "", "Configuration liqo-tenant-rome/rome of milan: status.remote.cidr.pod, for rome's 10.0.0.0/16, is 10.0.0.0/16, which overlaps its own pod CIDR, 10.0.0.0/16"},
		{"a part of the own network, not remapped", milan, "10.0.128.0/17", "10.0.128.0/17", "", "overlaps its own pod CIDR"},
		{"the Services, not remapped", milan, "10.96.0.0/24", "10.96.0.0/24", "", "overlaps its own service CIDR"},
		{"remapped to the own Services", milan, "10.0.0.0/16", "10.96.0.0/16", "", "overlaps its own service CIDR"},
		{"remapped to the own external addresses", milan, "10.0.0.0/16", "10.70.0.0/16", "", "overlaps its own external CIDR"},
		{"remapped to the own internal addresses", milan, "10.0.0.0/16", "10.80.0.0/16", "", "overlaps its own internal CIDR"},
		{"remapped to the nodes", milan, "10.0.0.0/16", "172.18.0.0/16", "", "overlaps the network of its nodes"},
		{"remapped to nobody's", milan, "10.0.0.0/16", "169.254.0.0/16", "", "overlaps the reserved range, 169.254.0.0/16"},
		{"remapped to another peer's", milan, "10.0.0.0/16", "10.6.0.0/16", "10.6.0.0/16", "overlaps what it calls naples's 10.5.0.0/16, 10.6.0.0/16"},
		{"another peer's, not remapped", milan, "10.5.0.0/16", "10.5.0.0/16", "10.5.0.0/16", "overlaps what it calls naples's 10.5.0.0/16, 10.5.0.0/16"},
		{"remapped to a longer prefix", milan, "10.0.0.0/16", "10.2.0.0/17", "", "not as long as the original"},
		{"remapped to a shorter prefix", milan, "10.0.0.0/16", "10.16.0.0/12", "", "not as long as the original"},
		{"remapped to somebody's public addresses", milan, "10.0.0.0/16", "11.0.0.0/16", "", "in none of the pools"},
		{"remapped to more than a pool", milan, "10.0.0.0/11", "192.160.0.0/11", "", "in none of the pools"},
		{"remapped for no reason", milan, "10.1.0.0/16", "10.2.0.0/16", "", "although nothing of milan overlaps the original"},
		{"remapped for no reason, with another peer", milan, "10.1.0.0/16", "10.2.0.0/16", "10.5.0.0/16", "although nothing of milan overlaps the original"},

		{"IPv6, nothing overlaps", milan6, "fd00:11::/56", "fd00:11::/56", "", ""},
		{"IPv6, the same networks, remapped", milan6, "fd00:10::/56", "fd12:3456:789a::/56", "", ""},
		{"IPv6, the same networks, not remapped", milan6, "fd00:10::/56", "fd00:10::/56", "", "overlaps its own pod CIDR, fd00:10::/56"},
		{"IPv6, remapped to public addresses", milan6, "fd00:10::/56", "2001:db8::/56", "", "in none of the pools"},
		{"IPv6, remapped for no reason", milan6, "fd00:11::/56", "fd12:3456:789a::/56", "", "although nothing of milan overlaps the original"},
		{"IPv6, remapped to IPv4", milan6, "fd00:10::/24", "10.2.0.0/24", "", "not as long as the original"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := remap{
				cluster: "milan", remote: "rome", object: "Configuration liqo-tenant-rome/rome", kind: "pod",
				original: netip.MustParsePrefix(tc.original), remapped: netip.MustParsePrefix(tc.remapped),
			}
			// A second Configuration of the same peer says the same.
			again := r
			again.object = "Configuration liqo-tenant-rome/rome-again"
			all, peers := []remap{r, again}, []world.ClusterSpec{rome(tc.original)}
			if tc.other != "" {
				all = append(all, remap{
					cluster: "milan", remote: "naples", kind: "pod",
					original: netip.MustParsePrefix("10.5.0.0/16"), remapped: netip.MustParsePrefix(tc.other),
				})
				naples := rome("10.5.0.0/16")
				naples.Name = "naples"
				peers = append(peers, naples)
			}
			err := checkRemap(r, tc.of, all, peers)
			if tc.want == "" {
				assert.NilError(t, err)
				return
			}
			assert.ErrorIs(t, err, ErrChoice)
			assert.ErrorContains(t, err, tc.want)
		})
	}
}

// TestCheckMapped: milan gives the host 192.168.40.10 an address.
func TestCheckMapped(t *testing.T) {
	milan := clusterWith("milan", "10.0.0.0/16", "10.96.0.0/16", "10.70.0.0/16", "10.80.0.0/16", "172.18.1.0/24")
	for _, tc := range []struct {
		given     string
		ofNetwork bool
		want      string
	}{
		{"10.70.0.1", false, ""},
		{"10.70.255.1", false, ""},
		{"10.99.0.1", true, ""},
		{"10.70.0.0", false, "which stands for unknown sources"},
		{"10.71.0.1", false, "which is not in the external CIDR 10.70.0.0/16"},
		{"10.70.0.9", false, "which IP default/other has, too"},
		{"192.168.40.10", true, "IP default/db of milan: status.ip, for 192.168.40.10, is 192.168.40.10, the host's own"},
	} {
		m := mapped{"milan", "IP default/db", netip.MustParseAddr("192.168.40.10"), netip.MustParseAddr(tc.given), tc.ofNetwork}
		other := mapped{"milan", "IP default/other", netip.MustParseAddr("192.168.40.11"), netip.MustParseAddr("10.70.0.9"), false}
		err := checkMapped(m, milan, []mapped{m, other})
		if tc.want == "" {
			assert.NilError(t, err)
			continue
		}
		assert.ErrorIs(t, err, ErrChoice)
		assert.ErrorContains(t, err, tc.want)
	}
}

// TestCheckInternal: two clusters may use the same internal addresses, two hosts
// of one may not.
func TestCheckInternal(t *testing.T) {
	milan := clusterWith("milan", "10.0.0.0/16", "10.96.0.0/16", "10.70.0.0/16", "10.80.0.0/16", "172.18.1.0/24")
	all := map[string]netip.Addr{"rome/node-1": netip.MustParseAddr("10.80.0.1"), "milan/gateway.rome": netip.MustParseAddr("10.80.0.3")}
	for a, want := range map[string]string{
		"10.80.0.1": "",
		"10.80.0.0": "the address of the network itself",
		"10.81.0.1": "not in the internal CIDR 10.80.0.0/16",
		"10.80.0.3": "which milan/gateway.rome has, too",
	} {
		all["milan/node-1"] = netip.MustParseAddr(a)
		err := checkInternal("milan/node-1", all["milan/node-1"], milan, all)
		if want == "" {
			assert.NilError(t, err)
			continue
		}
		assert.ErrorIs(t, err, ErrChoice)
		assert.Assert(t, strings.Contains(err.Error(), want), "%v", err)
	}
}
