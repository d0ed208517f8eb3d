package world

import (
	"net/netip"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

func TestDoctorNamesWhatIsMissing(t *testing.T) {
	nettest.NeedRoot(t)
	t.Setenv("PATH", "/nowhere")
	found := map[string]Probe{}
	for _, p := range Doctor(t.Context(), t.TempDir()) {
		found[p.Name] = p
		t.Logf("%-20s %-5v %s", p.Name, p.OK, p.Detail)
		assert.Check(t, p.Detail != "", "%s has no detail", p.Name)
		assert.Check(t, p.OK || p.Fix != "", "%s is missing and has no fix", p.Name)
	}
	assert.Check(t, !found["qemu-system-x86_64"].OK)
	assert.Check(t, is.Contains(found["qemu-system-x86_64"].Fix, "apt-get install qemu-system-x86"))
	assert.Check(t, !found["binaries"].OK)
	assert.Check(t, is.Contains(found["binaries"].Detail, "kubernetes"))
	assert.Check(t, found["veth"].OK)
	for _, program := range Programs() {
		assert.Check(t, !found[program].OK)
		assert.Check(t, is.Equal(found[program].Fix, "make "+program))
		assert.Check(t, is.Len(found[program].Needed, 0))
	}
}

func TestDoctorLooksWhereImagesAreKept(t *testing.T) {
	nettest.NeedRoot(t)
	dir := t.TempDir()
	assert.NilError(t, syscall.Mount("small", dir, "tmpfs", 0, "size=1g"))
	t.Cleanup(func() { assert.Check(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	t.Setenv("XDG_CACHE_HOME", filepath.Join(dir, "not", "made", "yet"))
	p := probeDisk([]string{worldVM})
	assert.Check(t, !p.OK)
	assert.Check(t, is.Equal(p.Detail, "1.0 GiB free at "+dir+", images need 3"))
	assert.Check(t, is.Equal(p.Fix, "make room, or set XDG_CACHE_HOME to a place that has it"))
}

func TestPlan(t *testing.T) {
	cidr := netip.MustParsePrefix
	s := Plan(&topology.Topology{
		Name: "demo",
		Clusters: []topology.Cluster{
			{Name: "milan", Nodes: 2, Absent: []int{2}, PodCIDR: cidr("10.0.0.0/16"), ServiceCIDR: cidr("10.96.0.0/16")},
			{Name: "rome", Nodes: 1, NodeCIDR: cidr("192.168.255.0/23"), PodCIDR: cidr("10.0.0.0/16"), ServiceCIDR: cidr("10.96.0.0/16"), RPFilter: 1, SourceCheck: true},
			{Name: "oslo", Nodes: 1, NodeCIDR: cidr("fd00:3::/64"), PodCIDR: cidr("fd00:30::/48"), ServiceCIDR: cidr("fd00:31::/112")},
		},
		Outside: []topology.Outside{{Name: "user"}, {Name: "other"}, {Name: "db", Address: netip.MustParseAddr("192.168.40.10"), Via: "rome"}},
	})
	type place struct{ lan, router, wan, controlPlane, lastNode string }
	var got []place
	for _, c := range s.Clusters {
		got = append(got, place{c.LAN.String(), c.Router.String(), c.RouterWAN.String(), c.ControlPlane.String(), c.Nodes[len(c.Nodes)-1].Addr.String()})
	}
	assert.DeepEqual(t, got, []place{
		{"172.18.1.0/24", "172.18.1.1", "203.0.113.1", "172.18.1.2", "172.18.1.12"},
		{"192.168.255.0/23", "192.168.254.1", "203.0.113.2", "192.168.254.2", "192.168.254.11"},
		{"fd00:3::/64", "fd00:3::1", "203.0.113.3", "fd00:3::2", "fd00:3::b"},
	}, cmp.AllowUnexported(place{}))
	assert.Equal(t, s.Outside[1].Addr.String(), "203.0.113.102")
	assert.Equal(t, s.Outside[2], HostSpec{Name: "db", Addr: netip.MustParseAddr("192.168.40.10"), LAN: cidr("192.168.40.0/24"), Via: "rome"})
	assert.DeepEqual(t, []bool{s.Clusters[0].Nodes[0].Absent, s.Clusters[0].Nodes[1].Absent}, []bool{false, true})
	assert.Check(t, s.Clusters[1].RPFilter == 1 && s.Clusters[1].SourceCheck)
}

// TestSourceCheck: a node may send with its own address and from its podCIDRs,
// and IPv6's neighbour discovery goes on.
func TestSourceCheck(t *testing.T) {
	for _, tt := range []struct {
		lan, node, podCIDR string
		want               []string
	}{
		{"172.18.1.0/24", "172.18.1.11", "10.0.3.0/24", []string{
			"table bridge source-check-milan\ndelete table bridge source-check-milan\n",
			"set l1_node1 { type ipv4_addr; flags interval; elements = { 172.18.1.11, 10.0.3.0/24 }; }",
			`iifname "l1-node1" ip saddr != @l1_node1 counter drop`,
		}},
		{"172.18.1.0/24", "172.18.1.11", "", []string{"elements = { 172.18.1.11 }"}},
		{"fd00:1::/64", "fd00:1::b", "fd00:30:1::/64", []string{
			"type ipv6_addr; flags interval; elements = { ::, fe80::/10, fd00:1::b, fd00:30:1::/64 }",
			`iifname "l1-node1" ip6 saddr != @l1_node1 counter drop`,
		}},
	} {
		c := ClusterSpec{Name: "milan", Index: 1, LAN: netip.MustParsePrefix(tt.lan), Nodes: []NodeSpec{{Name: "node-1", Addr: netip.MustParseAddr(tt.node)}}}
		podCIDRs := map[netip.Addr][]netip.Prefix{}
		if tt.podCIDR != "" {
			podCIDRs[c.Nodes[0].Addr] = []netip.Prefix{netip.MustParsePrefix(tt.podCIDR)}
		}
		got := sourceCheck(c, podCIDRs)
		for _, want := range tt.want {
			assert.Check(t, is.Contains(got, want))
		}
	}
}

// TestSourceChanges: what changes is told of the node that it is about, and of nobody else.
func TestSourceChanges(t *testing.T) {
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	c := ClusterSpec{Name: "milan", Index: 1, LAN: prefix("172.18.1.0/24"), Nodes: []NodeSpec{{Name: "node-1", Addr: addr("172.18.1.11")}, {Name: "node-2", Addr: addr("172.18.1.12")}}}
	was := map[netip.Addr][]netip.Prefix{addr("172.18.1.11"): {prefix("10.0.1.0/24")}, addr("172.18.1.12"): {prefix("10.0.2.0/24")}}
	is := map[netip.Addr][]netip.Prefix{addr("172.18.1.11"): {prefix("10.0.1.0/24")}, addr("172.18.1.12"): {prefix("10.0.3.0/24"), prefix("10.0.4.0/24")}}
	assert.Equal(t, sourceChanges(c, was, is), `delete element bridge source-check-milan l1_node2 { 10.0.2.0/24 }
add element bridge source-check-milan l1_node2 { 10.0.3.0/24 }
add element bridge source-check-milan l1_node2 { 10.0.4.0/24 }
`)
	assert.Equal(t, sourceChanges(c, is, is), "")
	delete(is, addr("172.18.1.12"))
	assert.Equal(t, sourceChanges(c, was, is), "delete element bridge source-check-milan l1_node2 { 10.0.2.0/24 }\n")
	assert.Equal(t, sourceChanges(c, nil, was), `add element bridge source-check-milan l1_node1 { 10.0.1.0/24 }
add element bridge source-check-milan l1_node2 { 10.0.2.0/24 }
`)
}

// TestLoadBalancer: the addresses lead to the nodes that are there, in turn.
func TestLoadBalancer(t *testing.T) {
	c := ClusterSpec{LoadBalancer: netip.MustParsePrefix("198.51.100.16/29"), Nodes: []NodeSpec{{Name: "node-1"}, {Name: "node-2", Absent: true}, {Name: "node-3"}}}
	var got []string
	for i := 1; ; i++ {
		a, ok := c.LoadBalancerAddress(i)
		if !ok {
			break
		}
		n, ok := c.LoadBalancerNode(i)
		assert.Assert(t, ok)
		got = append(got, a.String()+" "+n.Name)
	}
	assert.DeepEqual(t, got, []string{
		"198.51.100.17 node-1", "198.51.100.18 node-3", "198.51.100.19 node-1", "198.51.100.20 node-3", "198.51.100.21 node-1", "198.51.100.22 node-3",
	})
	_, ok := (ClusterSpec{}).LoadBalancerAddress(1)
	assert.Assert(t, !ok)
}

// TestRouterMasquerade: pods have the router's address outside, nodes their
// own, unless the router hides them.
func TestRouterMasquerade(t *testing.T) {
	c := ClusterSpec{PodCIDR: netip.MustParsePrefix("10.0.0.0/16"), LAN: netip.MustParsePrefix("10.0.200.0/24")}
	assert.Check(t, is.Contains(routerRules(c), `oifname "eth1" ip saddr 10.0.0.0/16 ip saddr != 10.0.200.0/24 masquerade`))
	c.NAT = true
	assert.Check(t, is.Contains(routerRules(c), `oifname "eth1"  masquerade`))
}

func TestNarrowest(t *testing.T) {
	for _, tt := range []struct{ a, b, want int }{{0, 0, 0}, {1500, 1500, 0}, {1500, 1400, 1400}, {1450, 0, 1450}} {
		assert.Check(t, is.Equal(narrowest(tt.a, tt.b), tt.want))
	}
}

func TestOverlappingLANsHaveNoRoute(t *testing.T) {
	lan := func(name, p string) ClusterSpec { return ClusterSpec{Name: name, LAN: netip.MustParsePrefix(p)} }
	s := Spec{Clusters: []ClusterSpec{lan("a", "172.18.1.0/24"), lan("b", "172.18.1.0/24"), lan("c", "172.18.3.0/24"), lan("d", "172.18.0.0/16")}}
	for from, want := range map[string][]string{"": {"a", "c"}, "a": {"c"}, "c": {"a"}, "d": nil} {
		var got []string
		for _, c := range s.reachable(from) {
			got = append(got, c.Name)
		}
		assert.Check(t, is.DeepEqual(got, want), "from %q", from)
	}
}
