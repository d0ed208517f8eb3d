package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestUplinks makes the links and routes of a node as CNIs do.
func TestUplinks(t *testing.T) {
	t.Parallel()
	nettest.Need(t, "ip")
	ns, a := openWith(t)
	pod := func(name string) {
		a.Run("ip", "link", "add", name, "type", "veth", "peer", "name", "p-"+name)
		for _, dev := range []string{name, "p-" + name} {
			a.Run("ip", "link", "set", dev, "up")
		}
	}
	for _, name := range []string{"eth0", "eth1", "eth2", "cali1", "gateway", "port0"} {
		pod(name)
	}
	a.Run("ip", "address", "add", "172.18.1.11/24", "dev", "eth0")
	a.Run("ip", "address", "add", "172.19.1.11/24", "dev", "eth1")
	a.Run("ip", "address", "add", "172.20.1.11/24", "dev", "eth2")
	a.Run("ip", "route", "add", "default", "via", "172.20.1.1")                                                               // by eth2
	a.Run("ip", "route", "add", "default", "via", "172.19.1.1", "dev", "eth1", "table", "2")                                  // the VPC CNI's way for pods
	a.Run("ip", "route", "add", "10.0.4.65", "dev", "cali1", "scope", "link")                                                 // a pod
	a.Run("ip", "route", "add", "10.1.0.0/16", "via", "10.0.4.66", "dev", "gateway", "onlink", "table", "90", "proto", "158") // ours
	a.Run("ip", "link", "add", "vxlan.calico", "type", "vxlan", "id", "4096", "dstport", "4789", "local", "172.18.1.11")
	a.Run("ip", "link", "add", "cni0", "up", "type", "bridge")
	a.Run("ip", "address", "add", "10.0.4.1/24", "dev", "cni0")
	a.Run("ip", "link", "set", "port0", "master", "cni0", "up")
	a.Run("ip", "link", "add", "br0", "type", "bridge")
	a.Run("ip", "link", "add", "vxlan0", "type", "vxlan", "id", "4097", "dstport", "4790", "local", "172.18.1.11")
	a.Run("ip", "link", "set", "vxlan0", "master", "br0")

	uplinks := func(node string) []string {
		list, err := ns.Uplinks(addr(node))
		assert.NilError(t, err)
		// A kernel makes devices of some tunnels in every namespace.
		want := []string{"br0", "cali1", "cni0", "eth0", "eth1", "eth2", "gateway", "port0", "vxlan.calico", "vxlan0"}
		return slices.DeleteFunc(list, func(name string) bool { return !slices.Contains(want, name) })
	}
	assert.DeepEqual(t, uplinks("172.18.1.11"), []string{"br0", "eth0", "eth1", "eth2", "vxlan.calico", "vxlan0"})
	assert.DeepEqual(t, uplinks("172.18.1.99"), []string{"br0", "eth1", "eth2", "vxlan.calico", "vxlan0"})
	a.Run("ip", "route", "add", "10.0.5.0/24", "nexthop", "via", "10.0.4.7", "dev", "cni0", "onlink", "nexthop", "via", "172.18.1.12", "dev", "eth0", "onlink")
	assert.DeepEqual(t, uplinks("172.18.1.99"), []string{"br0", "cni0", "eth0", "eth1", "eth2", "vxlan.calico", "vxlan0"})
}

// TestOnlyPodsOfTheNodeKeepTheirs sends packets with addresses of one network through the
// rules of a node: from its own pod, from a pod of another node, and from the node itself.
func TestOnlyPodsOfTheNodeKeepTheirs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, pods, bridge, pod, other, node, remote string }{
		{"IPv4", "10.0.0.0/16", "10.0.4.1/24", "10.0.4.65/24", "10.0.5.7/32", "10.80.0.4/32", "10.1.0.9/32"},
		{"IPv6", "fd00::/48", "fd00:0:0:4::1/64", "fd00:0:0:4::65/64", "fd00:0:0:5::7/128", "fd80::4/128", "fd01::9/128"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns, a := openWith(t)
			need(t, ns, FeatureNAT)
			pod, neighbour, peer := nettest.Another(t), nettest.Another(t), nettest.Another(t)
			is6 := addr(prefix(tt.pod).Addr().String()).Is6()
			net := func(n int) (node, there string) {
				if is6 {
					return fmt.Sprintf("2001:db8:%d::1/64", n), fmt.Sprintf("2001:db8:%d::2/64", n)
				}
				return fmt.Sprintf("172.18.%d.1/24", n), fmt.Sprintf("172.18.%d.2/24", n)
			}
			vethNamed(t, a, pod, "cali1", tt.bridge, tt.pod)
			up, there := net(1)
			vethNamed(t, a, neighbour, "eth0", up, there)
			out, far := net(2)
			vethNamed(t, a, peer, "out", out, far)
			a.Do(func() {
				writeSysctl(t, "net/ipv4/ip_forward", "1")
				writeSysctl(t, "net/ipv6/conf/all/forwarding", "1")
				writeSysctl(t, "net/ipv4/conf/all/rp_filter", "0")
				writeSysctl(t, "net/ipv4/conf/eth0/rp_filter", "0")
			})
			neighbour.Run("ip", "addr", "add", tt.other, "dev", "lo", "nodad")
			peer.Run("ip", "addr", "add", tt.remote, "dev", "lo", "nodad")
			pod.Run("ip", "route", "add", tt.remote, "via", prefix(tt.bridge).Addr().String())
			neighbour.Run("ip", "route", "add", tt.remote, "via", prefix(up).Addr().String())
			a.Run("ip", "route", "add", tt.remote, "via", prefix(far).Addr().String())
			converge(t, ns, netstate.State{Tables: []netstate.Table{{Family: netstate.FamilyINET, Name: "node-address", Chains: []netstate.Chain{{
				Name: "postrouting", Type: "nat", Hook: "postrouting", Priority: -160, Rules: []netstate.FirewallRule{
					{Name: "own-pods", Matches: []netstate.Match{dev("in", netstate.AnyDev), not(dev("in", "eth0")), source(tt.pods)}, Action: netstate.Action{Kind: netstate.Accept}},
					{Name: "unknown-source", Matches: []netstate.Match{dest(prefix(tt.remote).Addr().String())}, Action: netstate.Action{Kind: netstate.SNAT, To: prefix(tt.node)}},
				},
			}}}}})

			for i, from := range []struct {
				who  string
				ns   *nettest.NS
				addr netip.Addr
				want string
			}{
				{"a pod of the node", pod, prefix(tt.pod).Addr(), prefix(tt.pod).Addr().String()},
				{"a pod of another node", neighbour, prefix(tt.other).Addr(), prefix(tt.node).Addr().String()},
				{"the node itself", a, prefix(tt.bridge).Addr(), prefix(tt.node).Addr().String()},
			} {
				// Each has a port of its own: what was sent again may come late.
				at := netip.AddrPortFrom(prefix(tt.remote).Addr(), uint16(4000+i))
				server := listen(t, peer, at)
				client := listen(t, from.ns, netip.AddrPortFrom(from.addr, 0))
				seen := deliver(t, client, server, at)
				assert.Equal(t, seen.Addr().Unmap().String(), from.want, from.who)
			}
		})
	}
}

// TestHostAddresses: the addresses that a host has of its own, and none of ours, of
// loopback, or of Services with kube-proxy in its mode ipvs.
func TestHostAddresses(t *testing.T) {
	t.Parallel()
	ns, host := openWith(t, "eth0")
	nettest.Need(t, "ip")
	for _, dev := range []string{"kube-ipvs0", "vip"} {
		host.Run("ip", "link", "add", dev, "type", "bridge")
		host.Run("ip", "link", "set", dev, "up")
	}
	for _, a := range [][]string{
		{"172.18.1.11/24", "eth0"}, {"172.18.1.11/32", "vip"}, {"192.168.40.10/32", "vip"}, {"10.96.0.1/32", "kube-ipvs0"},
		{"127.0.0.1/8", "lo"}, {"169.254.20.10/32", "lo"}, {"fd00::11/64", "eth0"},
	} {
		host.Run("ip", "addr", "add", a[0], "dev", a[1])
	}
	host.Run("ip", "link", "set", "eth0", "up") // which gives it a link-local address
	converge(t, ns, netstate.State{
		Links:     []netstate.Link{{Name: "liqo.vxlan", Kind: netstate.KindVXLAN, MTU: 1400, MAC: netstate.MAC{2, 0, 0, 0, 0, 4}, VXLAN: netstate.VXLAN{VNI: 1, Local: addr("172.18.1.11"), Port: 4879}}},
		Addresses: []netstate.Address{{Dev: "liqo.vxlan", Prefix: prefix("10.80.0.4/32")}},
	})
	got, err := ns.HostAddresses()
	assert.NilError(t, err)
	assert.Equal(t, fmt.Sprint(got), "[169.254.20.10 172.18.1.11 192.0.2.1 192.168.40.10 fd00::11]")
}
