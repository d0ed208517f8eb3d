package kernel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// A half is one cluster of a chain: a node with a pod, another node with a
// gateway, and the gateway. Both halves have the same networks.
type half struct {
	pod, node, edge, gateway *nettest.NS
	lan                      int  // MTU between the nodes
	podMTU                   int  // of the link to the pod
	gatewayMTU               int  // of what the gateway knows of its cluster; 0: nothing special
	tunnelMTU                bool // the nodes know that of the tunnel
}

// Addresses of a half. The gateway's pod has an address that the other half can
// dial.
const (
	chainPods, chainExternal         = "10.0.0.0/16", "10.70.0.0/16"
	chainRemapped, chainRemappedExt  = "11.0.0.0/16", "11.70.0.0/16"
	chainPod, chainPodThere          = "10.0.1.5", "11.0.1.5"
	chainNodeIP, chainEdgeIP, chainG = "10.80.0.1", "10.80.0.2", "10.80.0.9"
)

func (n half) gatewayIP(i int) string { return fmt.Sprintf("198.51.100.%d", 10+i) }

// object returns the Meta of an object of the peering.
func object(kind, name string, labels ...string) cluster.Meta {
	m := cluster.Meta{Ref: cluster.Ref{Kind: kind, Namespace: "liqo-tenant-rome", Name: name}, Labels: map[string]string{}}
	for i := 0; i+1 < len(labels); i += 2 {
		m.Labels["networking.liqo.io/"+labels[i]] = labels[i+1]
	}
	return m
}

// inputs returns what the controller plans for a half, as far as it matters to
// packets of pods.
func (n half) inputs(i int) (node, edge desired.NodeInput, gw desired.GatewayInput) {
	peer := addr("169.254.18.2")
	if i == 1 {
		peer = addr("169.254.18.1")
	}
	there, thereExt := prefix(chainRemapped), prefix(chainRemappedExt)
	fabric := cluster.InternalFabric{
		Meta: object("InternalFabric", "rome"), RemoteID: "rome", RemoteCIDRs: []netip.Prefix{there, thereExt},
		GatewayIP: addr(n.gatewayIP(i)), InternalIP: addr(chainG), GatewayNode: "edge", Overlay: cluster.OverlayVXLAN,
	}
	if n.tunnelMTU {
		fabric.TunnelMTU = 1440
	}
	nodes := []cluster.InternalNode{
		{Meta: object("InternalNode", "node"), InternalIP: addr(chainNodeIP), PodCIDRs: []netip.Prefix{prefix("10.0.1.0/24")}, Overlay: cluster.OverlayVXLAN},
		{Meta: object("InternalNode", "edge"), InternalIP: addr(chainEdgeIP), PodCIDRs: []netip.Prefix{prefix("10.0.2.0/24")}, Overlay: cluster.OverlayVXLAN},
	}
	route := func(dst netip.Prefix) cluster.RouteRule {
		return cluster.RouteRule{Dst: dst, Routes: []cluster.TableRoute{{Dst: dst, Via: addr(chainG)}}}
	}
	back := []cluster.TableRoute{
		{Dst: prefix(chainNodeIP + "/32"), Via: addr(chainNodeIP), Dev: desired.VXLANInterface, OnLink: true},
		{Dst: prefix("10.0.1.0/24"), Via: addr(chainNodeIP), Dev: desired.VXLANInterface, OnLink: true},
	}
	routes := []cluster.RouteConfiguration{
		{Meta: object("RouteConfiguration", "rome-node-gw", "route-category", "fabric"), Table: "18952", Rules: []cluster.RouteRule{route(there), route(thereExt)}},
		{
			Meta:  object("RouteConfiguration", "rome-symmetric", "route-category", "fabric", "route-subcategory", "single-node", "route-unique", "edge"),
			Table: "18952", Rules: []cluster.RouteRule{{Src: there, Routes: back}, {Src: thereExt}},
		},
		{
			Meta:  object("RouteConfiguration", "rome-gw-ext", "route-category", "gateway", "route-unique", "rome"),
			Table: "rome-gw-ext", Rules: []cluster.RouteRule{
				{Dst: netip.PrefixFrom(peer, 32), Routes: []cluster.TableRoute{{Dst: netip.PrefixFrom(peer, 32), Dev: desired.TunnelInterface, Scope: "link"}}},
				{IIF: desired.PodInterface, Routes: []cluster.TableRoute{
					{Dst: prefix(chainPods), Via: peer, Dev: desired.TunnelInterface, OnLink: true},
					{Dst: prefix(chainExternal), Via: peer, Dev: desired.TunnelInterface, OnLink: true},
				}},
			},
		},
		{
			Meta:  object("RouteConfiguration", "gw-pods", "route-category", "gateway", "route-subcategory", "fabric"),
			Table: "254", Rules: []cluster.RouteRule{{IIF: desired.TunnelInterface, Dst: prefix(chainPods)}},
		},
	}
	vtep := func(i, k int) netip.Addr { return addr(fmt.Sprintf("172.18.%d.%d", i, k)) }
	input := func(name string, k int) desired.NodeInput {
		in := desired.NodeInput{
			Name: name, NodeIP: vtep(i, k), Fabrics: []cluster.InternalFabric{fabric}, Nodes: nodes, Routes: routes,
			Underlay: desired.Underlay{MTU: n.lan, Devs: map[netip.Addr]string{fabric.GatewayIP: "cni"}},
		}
		nodes[k-1].VTEP = desired.OwnVTEP(in)
		return in
	}
	node, edge = input("node", 1), input("edge", 2)

	from := func(p netip.Prefix) []cluster.Match {
		r := rangeOf(p.String())
		return []cluster.Match{{IP: cluster.AddrRange{From: r.From, To: r.To}, Position: "src"}, {Dev: desired.TunnelInterface, Position: "in"}}
	}
	to := func(p netip.Prefix) []cluster.Match {
		r := rangeOf(p.String())
		return []cluster.Match{{IP: cluster.AddrRange{From: r.From, To: r.To}, Position: "dst"}, {Dev: desired.TunnelInterface, Position: "in", Negate: true}}
	}
	remap := func(name string, original, remapped netip.Prefix) cluster.FirewallConfiguration {
		return cluster.FirewallConfiguration{
			Meta:  object("FirewallConfiguration", "rome-"+name, "firewall-category", "gateway", "firewall-unique", "rome"),
			Table: name, Family: "IPV4", Chains: []cluster.Chain{
				{Name: "outgoing", Type: "nat", Hook: "prerouting", Priority: -100, NAT: []cluster.NATRule{{Name: "out", Type: "dnat", To: original, ToIsPrefix: true, Match: to(remapped)}}},
				{Name: "incoming", Type: "nat", Hook: "postrouting", Priority: 100, NAT: []cluster.NATRule{{Name: "in", Type: "snat", To: remapped, ToIsPrefix: true, Match: from(original)}}},
			},
		}
	}
	both := cluster.CIDRs{Pod: []netip.Prefix{prefix(chainPods)}, External: []netip.Prefix{prefix(chainExternal)}}
	theirs := public(byte(2 - i))
	gw = desired.GatewayInput{
		Name: "rome", Namespace: "liqo-tenant-rome", RemoteID: "rome", Mode: cluster.Server, NodeName: "edge",
		PodIP: fabric.GatewayIP, PublicKey: public(byte(1 + i)), Underlay: desired.Underlay{MTU: 1500},
		Configurations: []cluster.Configuration{{
			Meta: object("Configuration", "rome"), RemoteID: "rome", Configured: true, Local: both, Remote: both,
			Remapped: cluster.CIDRs{Pod: []netip.Prefix{there}, External: []netip.Prefix{thereExt}},
		}},
		PublicKeys: []cluster.PublicKey{{Meta: object("PublicKey", "rome"), RemoteID: "rome", Key: theirs[:]}},
		Fabrics:    []cluster.InternalFabric{fabric}, Nodes: nodes, Routes: routes,
		Firewalls: []cluster.FirewallConfiguration{
			remap("remap-podcidr", prefix(chainPods), there), remap("remap-externalcidr", prefix(chainExternal), thereExt),
		},
	}
	if i == 1 {
		gw.Mode, gw.PeerEndpoint = cluster.Client, netip.AddrPortFrom(addr(n.gatewayIP(0)), desired.WireGuardPort)
	}
	return node, edge, gw
}

// chain builds both halves and joins them: pod, node, node with the gateway,
// gateway, and the same on the other side. The daemons' part is done by what
// desired says of the planned objects.
func chain(t *testing.T, halves [2]half) (pods [2]*nettest.NS) {
	t.Helper()
	nettest.Need(t, "ip")
	pair := func(a *nettest.NS, devA string, b *nettest.NS, devB string, mtu int) {
		a.Run("ip", "link", "add", devA, "mtu", fmt.Sprint(mtu), "type", "veth", "peer", "name", devB, "mtu", fmt.Sprint(mtu), "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), b.FD()))
		a.Run("ip", "link", "set", devA, "up")
		b.Run("ip", "link", "set", devB, "up")
	}
	for i := range halves {
		n := &halves[i]
		for _, ns := range []**nettest.NS{&n.pod, &n.node, &n.edge, &n.gateway} {
			*ns = nettest.Another(t)
			(*ns).Run("ip", "link", "set", "lo", "up")
			(*ns).Do(func() {
				writeSysctl(t, "net/ipv4/ip_forward", "1")
				writeSysctl(t, "net/ipv4/conf/all/rp_filter", "0")
				writeSysctl(t, "net/ipv4/conf/default/rp_filter", "0")
			})
		}
		// The pod is as large as a CNI makes it that knows nothing of us.
		pair(n.node, "cni", n.pod, "eth0", 1500)
		n.pod.Run("ip", "addr", "add", chainPod+"/32", "dev", "eth0")
		n.pod.Run("ip", "route", "add", "169.254.1.1", "dev", "eth0")
		n.pod.Run("ip", "route", "add", "default", "via", "169.254.1.1")
		n.node.Run("ip", "addr", "add", "169.254.1.1/32", "dev", "cni")
		n.node.Run("ip", "route", "add", chainPod, "dev", "cni", "mtu", fmt.Sprint(n.podMTU))
		pair(n.node, "lan", n.edge, "lan", n.lan)
		n.node.Run("ip", "addr", "add", fmt.Sprintf("172.18.%d.1/24", i), "dev", "lan")
		n.edge.Run("ip", "addr", "add", fmt.Sprintf("172.18.%d.2/24", i), "dev", "lan")
		pair(n.edge, "cni", n.gateway, desired.PodInterface, 1500)
		n.edge.Run("ip", "addr", "add", "169.254.1.1/32", "dev", "cni")
		n.edge.Run("ip", "route", "add", n.gatewayIP(i), "dev", "cni")
		n.gateway.Run("ip", "addr", "add", n.gatewayIP(i)+"/32", "dev", desired.PodInterface)
		n.gateway.Run("ip", "route", "add", "169.254.1.1", "dev", desired.PodInterface)
		n.gateway.Run("ip", "route", "add", "default", "via", "169.254.1.1")
		if n.gatewayMTU > 0 {
			n.gateway.Run("ip", "route", "add", chainPods, "via", "169.254.1.1", "mtu", fmt.Sprint(n.gatewayMTU))
		}
	}
	pair(halves[0].edge, "wan", halves[1].edge, "wan", 1500)
	for i, n := range halves {
		n.edge.Run("ip", "addr", "add", fmt.Sprintf("172.31.0.%d/24", 1+i), "dev", "wan")
		n.edge.Run("ip", "route", "add", n.gatewayIP(1-i), "via", fmt.Sprintf("172.31.0.%d", 2-i))
	}
	for i, n := range halves {
		node, edge, gw := n.inputs(i)
		for _, host := range []struct {
			at  *nettest.NS
			cfg Config
			in  any
		}{
			{n.node, Config{}, node}, {n.edge, Config{}, edge},
			{n.gateway, Config{Implementation: Userspace, StateDir: t.TempDir(), PrivateKey: func(string) ([32]byte, error) { return key(byte(1 + i)), nil }}, gw},
		} {
			var ns *NetNS
			host.at.Do(func() { ns = open(t, host.cfg) })
			need(t, ns, FeatureVXLAN, FeatureNAT)
			if host.cfg.Implementation == Userspace {
				need(t, ns, FeatureTUN)
			}
			state, results := desired.Gateway(gw)
			if in, ok := host.in.(desired.NodeInput); ok {
				state, results = desired.Node(in)
			}
			for _, r := range results {
				assert.Assert(t, r.OK, "%s: %s", r.Object, r.Message)
			}
			converge(t, ns, state)
		}
		pods[i] = n.pod
	}
	return pods
}

// TestPathMTUThroughARemap: whoever on the way can't forward a large packet
// tells its sender, who believes it, although both clusters have the same
// networks and the packet that the error quotes has been translated: the
// sender's node, its gateway, the peer's gateway, the peer's node that it is on,
// and the one that the pod is on. What is as large as that arrives.
func TestPathMTUThroughARemap(t *testing.T) {
	t.Parallel()
	const lan, big = 1500, 1500
	for _, tt := range []struct {
		name     string
		here     half
		there    half
		expected []int // MTUs that the sender learns, one after the other
	}{
		{"own node", half{lan: lan, podMTU: big, tunnelMTU: true}, half{lan: lan, podMTU: big}, []int{1440}},
		{"own gateway", half{lan: 2000, podMTU: big}, half{lan: lan, podMTU: big}, []int{1440}},
		{"overlay, then own gateway", half{lan: lan, podMTU: big}, half{lan: lan, podMTU: big}, []int{1450, 1440}},
		{"peer's gateway", half{lan: lan, podMTU: big, tunnelMTU: true}, half{lan: lan, podMTU: big, gatewayMTU: 1320}, []int{1440, 1320}},
		{"node of the peer's gateway", half{lan: lan, podMTU: big, tunnelMTU: true}, half{lan: 1350, podMTU: big}, []int{1440, 1300}},
		{"node of the peer's pod", half{lan: lan, podMTU: big, tunnelMTU: true}, half{lan: 1350, podMTU: 1200}, []int{1440, 1300, 1200}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pods := chain(t, [2]half{tt.here, tt.there})
			there := netip.AddrPortFrom(addr(chainPodThere), 4000)
			server := listen(t, pods[1], netip.AddrPortFrom(addr(chainPod), 4000))
			deliver(t, listen(t, pods[0], netip.AddrPortFrom(addr(chainPod), 4001)), server, there)

			probe := dial(t, pods[0], there)
			assert.NilError(t, onSocket(probe, func(fd int) error {
				return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			}))
			mtu := func() (mtu int) {
				assert.NilError(t, onSocket(probe, func(fd int) (err error) {
					mtu, err = unix.GetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU)
					return err
				}))
				return mtu
			}
			const headers = 28 // of IPv4 and UDP
			assert.Equal(t, mtu(), 1500)
			for _, want := range tt.expected {
				was := mtu()
				poll.WaitOn(t, func(poll.LogT) poll.Result {
					if mtu() != was {
						return poll.Success()
					}
					if _, err := probe.Write(make([]byte, want+1-headers)); err != nil && !errors.Is(err, unix.EMSGSIZE) {
						return poll.Error(err)
					}
					return poll.Continue("a packet of %d bytes is lost, and nobody says so", want+1)
				}, poll.WithTimeout(10*time.Second), poll.WithDelay(20*time.Millisecond))
				assert.Equal(t, mtu(), want)
			}
			// What fits arrives whole.
			limit := tt.expected[len(tt.expected)-1] - headers
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				if _, err := probe.Write(make([]byte, limit)); err != nil {
					return poll.Continue("%v", err)
				}
				assert.NilError(t, server.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
				for {
					n, _, err := server.ReadFromUDPAddrPort(make([]byte, 2000))
					if err != nil {
						return poll.Continue("%v", err)
					}
					if n == limit {
						return poll.Success()
					}
				}
			}, poll.WithTimeout(10*time.Second), poll.WithDelay(time.Millisecond))
		})
	}
}

// onSocket calls f with the file descriptor of a socket.
func onSocket(c *net.UDPConn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}
