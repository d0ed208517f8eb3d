package kernel

import (
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
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// gateway is what a gateway with one node wants, except for its links.
func gateway(edit func(*desired.GatewayInput)) netstate.State {
	const dev = "liqo.node-1"
	host, peer := prefix("10.80.0.1/32"), prefix("10.20.0.0/16")
	m := func(kind, name string) cluster.Meta {
		return cluster.Meta{Ref: cluster.Ref{Kind: kind, Namespace: "liqo-tenant-rome", Name: name}, Labels: map[string]string{
			"networking.liqo.io/route-category": "gateway", "networking.liqo.io/route-unique": "rome",
		}}
	}
	in := desired.GatewayInput{
		Name: "rome", Namespace: "liqo-tenant-rome", RemoteID: "rome", Mode: cluster.Server, NodeName: "node-1", PublicKey: public(1),
		Nodes:   []cluster.InternalNode{{Meta: m("InternalNode", "node-1"), GatewayInterface: dev, InternalIP: host.Addr(), Local: addr("192.0.2.1")}},
		Fabrics: []cluster.InternalFabric{{Meta: m("InternalFabric", "rome"), RemoteID: "rome", InternalIP: addr("10.80.0.2")}},
		Tunnels: []cluster.GeneveTunnel{{Meta: m("GeneveTunnel", "t"), VNI: 1, Node: "node-1", Fabric: m("InternalFabric", "rome").Ref}},
		Routes: []cluster.RouteConfiguration{
			{Meta: m("RouteConfiguration", "gw-node"), Table: "gw-node", Rules: []cluster.RouteRule{
				{Dst: host, Routes: []cluster.TableRoute{{Dst: host, Dev: dev, Scope: "link"}}},
				{IIF: desired.TunnelInterface, Routes: []cluster.TableRoute{{Dst: prefix("10.10.0.0/24"), Via: host.Addr(), Dev: dev, OnLink: true}}},
			}},
			{Meta: m("RouteConfiguration", "gw-ext"), Table: "gw-ext", Rules: []cluster.RouteRule{
				{IIF: dev, Routes: []cluster.TableRoute{{Dst: peer, Via: addr("169.254.18.2"), Dev: desired.TunnelInterface, OnLink: true}}},
			}},
		},
	}
	if edit != nil {
		edit(&in)
	}
	s, _ := desired.Gateway(in)
	s.Links, s.Neighbors, s.Addresses, s.WireGuard = nil, nil, nil, nil
	return s
}

// gatewayBetween joins a gateway to a node with a pod, and to a peer, by veth
// pairs that are called like its tunnels.
func gatewayBetween(t *testing.T) (ns *NetNS, gw, node, peer *nettest.NS) {
	t.Helper()
	ns, gw = openWith(t, "eth0")
	need(t, ns, FeatureNFTables)
	nettest.Need(t, "ip")
	node, peer = nettest.Another(t), nettest.Another(t)
	join := func(dev string, far *nettest.NS, near string, addrs ...string) {
		gw.Run("ip", "link", "add", dev, "type", "veth", "peer", "name", "gw", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), far.FD()))
		gw.Run("ip", "addr", "add", near, "dev", dev)
		gw.Run("ip", "link", "set", dev, "up")
		far.Run("ip", "link", "set", "lo", "up")
		far.Run("ip", "link", "set", "gw", "up")
		for _, a := range addrs {
			far.Run("ip", "addr", "add", a, "dev", "gw")
		}
		far.Run("ip", "route", "add", "default", "via", prefix(near).Addr().String(), "dev", "gw", "onlink")
	}
	gw.Run("ip", "link", "set", "lo", "up")
	gw.Run("ip", "route", "add", "default", "dev", "eth0")
	join("liqo.node-1", node, "10.80.0.2/32", "10.80.0.1/32", "10.10.0.5/32")
	join(desired.TunnelInterface, peer, "169.254.18.1/30", "169.254.18.2/30", "10.20.0.5/32")
	gw.Do(func() {
		writeSysctl(t, "net/ipv4/ip_forward", "1")
		for _, dev := range []string{"liqo.node-1", desired.TunnelInterface} { // as the links of a gateway are
			writeSysctl(t, "net/ipv4/conf/"+dev+"/rp_filter", "2")
		}
	})
	return ns, gw, node, peer
}

// TestGatewayBetweenNodeAndPeer sends packets through what a gateway wants: the
// peer reaches pods but not the node, and the node reaches the peer.
func TestGatewayBetweenNodeAndPeer(t *testing.T) {
	t.Parallel()
	ns, gw, node, peer := gatewayBetween(t)
	converge(t, ns, gateway(nil))

	at := func(a string) netip.AddrPort { return netip.AddrPortFrom(addr(a), 4000) }
	internal, pod, remote := listen(t, node, at("10.80.0.1")), listen(t, node, at("10.10.0.5")), listen(t, peer, at("10.20.0.5"))
	own := listen(t, gw, at("10.80.0.2"))
	assert.Equal(t, deliver(t, remote, pod, at("10.10.0.5")), at("10.20.0.5"))
	assert.Equal(t, deliver(t, pod, remote, at("10.20.0.5")), at("10.10.0.5"))
	// An ICMP error of the node's comes this way. What was delivered twice before is in another socket.
	errorsOf := netip.AddrPortFrom(addr("10.20.0.5"), 4001)
	assert.Equal(t, deliver(t, internal, listen(t, peer, errorsOf), errorsOf), at("10.80.0.1"))
	assert.Equal(t, deliver(t, own, internal, at("10.80.0.1")), at("10.80.0.2"))
	assert.Equal(t, deliver(t, internal, own, at("10.80.0.2")), at("10.80.0.1"))

	internalOnly := netstate.TableID{Family: netstate.FamilyINET, Name: desired.InternalOnlyTable}
	denied, err := ns.Counted(internalOnly)
	assert.NilError(t, err)
	assert.Equal(t, denied, uint64(0))

	// deliver may have sent more than was read; nothing of it is the peer's.
	send(t, remote, at("10.80.0.1"))
	send(t, remote, at("10.80.0.2"))
	deliver(t, remote, pod, at("10.10.0.5")) // what was sent before it has arrived by now, or never will
	for _, c := range []interface {
		SetReadDeadline(time.Time) error
		ReadFromUDPAddrPort([]byte) (int, netip.AddrPort, error)
	}{internal, own} {
		assert.NilError(t, c.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
		for {
			_, from, err := c.ReadFromUDPAddrPort(make([]byte, 2000))
			if err != nil {
				break
			}
			assert.Assert(t, from != at("10.20.0.5"), "the peer reached the internal CIDR")
		}
	}
	poll.WaitOn(t, func(poll.LogT) poll.Result { // a kernel thread or another processor may still have the packets
		if denied, err = ns.Counted(internalOnly); err != nil || denied < 2 {
			return poll.Continue("%d %v", denied, err)
		}
		return poll.Success()
	})
	assert.Equal(t, denied, uint64(2))
	_, err = ns.Counted(netstate.TableID{Family: netstate.FamilyIPv4, Name: "none"})
	assert.ErrorContains(t, err, "table ip none")
}

// clamping is a FirewallConfiguration as the chart has it.
func clamping(value string) cluster.FirewallConfiguration {
	rule := func(position string) cluster.FilterRule {
		return cluster.FilterRule{Name: position, Action: "tcpmssclamp", Value: value, Match: []cluster.Match{
			{Proto: "tcp"}, {Dev: desired.TunnelInterface, Position: position},
		}}
	}
	return cluster.FirewallConfiguration{
		Meta: cluster.Meta{Ref: cluster.Ref{Kind: "FirewallConfiguration", Namespace: "liqo", Name: "gw-mss-clamping"}, Labels: map[string]string{
			"networking.liqo.io/firewall-category": "gateway", "networking.liqo.io/firewall-subcategory": "all-gateways",
		}},
		Table: "mss-clamping", Family: "INET",
		Chains: []cluster.Chain{{Name: "mss-clamping", Type: "filter", Hook: "forward", Filter: []cluster.FilterRule{rule("out"), rule("in")}}},
	}
}

// TestSegmentsFitIntoTheTunnel connects a pod and a host of the peer, from either
// side, over links that know nothing of the tunnel between them: both ends send
// no more than fits into it. The gateway of this test has an MTU of 1340, what
// is derived when nothing is known.
func TestSegmentsFitIntoTheTunnel(t *testing.T) {
	t.Parallel()
	const timestamps = 12 // the option of RFC 7323, which counts as data
	for _, tt := range []struct {
		value string
		link  int // MTU of the link to the node
		want  uint32
	}{
		{"0", 1500, desired.FallbackMTU - 40 - timestamps},
		{"0", 1300, 1300 - 40 - timestamps},
		{"1000", 1500, 1000 - timestamps},
	} {
		t.Run(fmt.Sprintf("%s over %d", tt.value, tt.link), func(t *testing.T) {
			t.Parallel()
			ns, gw, node, peer := gatewayBetween(t)
			gw.Run("ip", "link", "set", "liqo.node-1", "mtu", fmt.Sprint(tt.link))
			converge(t, ns, gateway(func(in *desired.GatewayInput) {
				in.Firewalls = []cluster.FirewallConfiguration{clamping(tt.value)}
				in.Underlay.Paths = map[netip.Addr]int{addr("192.0.2.1"): tt.link + 50} // Geneve
			}))
			pod, remote := netip.MustParseAddrPort("10.10.0.5:5000"), netip.MustParseAddrPort("10.20.0.5:5000")
			for _, way := range []struct {
				name           string
				client, server *nettest.NS
				from, to       netip.AddrPort
			}{{"to peer", node, peer, pod, remote}, {"from peer", peer, node, remote, pod}} {
				out, in := connect(t, way.client, way.server, way.from.Addr(), way.to)
				assert.Equal(t, sendMSS(t, out), tt.want, "%s: client", way.name)
				assert.Equal(t, sendMSS(t, in), tt.want, "%s: server", way.name)
			}
		})
	}
}

// connect returns both ends of a TCP connection.
func connect(t testing.TB, client, server *nettest.NS, from netip.Addr, to netip.AddrPort) (out, in *net.TCPConn) {
	t.Helper()
	var l *net.TCPListener
	var err error
	server.Do(func() { l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(to)) })
	assert.NilError(t, err)
	defer l.Close()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: 20 * time.Second}
	var c net.Conn
	client.Do(func() { c, err = d.DialContext(t.Context(), "tcp", to.String()) })
	assert.NilError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	assert.NilError(t, l.SetDeadline(time.Now().Add(20*time.Second)))
	in, err = l.AcceptTCP()
	assert.NilError(t, err)
	t.Cleanup(func() { _ = in.Close() })
	return c.(*net.TCPConn), in
}

// sendMSS returns how much one segment of a connection carries.
func sendMSS(t testing.TB, c *net.TCPConn) uint32 {
	t.Helper()
	raw, err := c.SyscallConn()
	assert.NilError(t, err)
	var info *unix.TCPInfo
	assert.NilError(t, raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }))
	assert.NilError(t, err)
	return info.Snd_mss
}
