package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
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

// addressing is that of one family in TestGatewayTellsThePeer. Both clusters have
// the same pods: peerPod is the sender, and a pod of this cluster as well.
type addressing struct {
	name                              string
	pods, external, remapped, reExt   string
	peerPod, peerPodHere, pod, nobody string
	tunnel, tunnelPeer                string // with prefix length
	gateway, node                     string // of eth0, with prefix length
	forwarding, ratelimit             string
	tooBig, expired, unreachable      byte
}

var addressings = []addressing{
	{
		"IPv4", "10.0.0.0/16", "10.70.0.0/16", "11.0.0.0/16", "11.70.0.0/16", "10.0.1.5", "11.0.1.5", "10.0.2.7", "10.70.3.3",
		"169.254.18.1/30", "169.254.18.2/30", "198.51.100.10/24", "198.51.100.1/24", "net/ipv4/ip_forward", "net/ipv4/icmp_ratelimit", 3, 11, 3,
	},
	{
		"IPv6", "fd01::/56", "fd70::/64", "fd11::/56", "fd71::/64", "fd01:0:0:1::5", "fd11:0:0:1::5", "fd01:0:0:2::7", "fd70::3:3",
		"fd18::1/64", "fd18::2/64", "fd51::10/64", "fd51::1/64", "net/ipv6/conf/all/forwarding", "net/ipv6/icmp/ratelimit", 2, 3, 1,
	},
}

// state is what desired says of the gateway, which has one node behind dev,
// without the links: the tunnel, and what leads to the node, are pairs here.
func (a addressing) state(t *testing.T, dev string) netstate.State {
	t.Helper()
	overlay := cluster.OverlayGeneve
	if dev == desired.PodInterface {
		overlay = cluster.OverlayVXLAN
	}
	own, there := prefix(a.pods), prefix(a.remapped)
	cidrs := cluster.CIDRs{Pod: []netip.Prefix{own}, External: []netip.Prefix{prefix(a.external)}}
	family := map[bool]string{false: "IPV4", true: "IPV6"}[own.Addr().Is6()]
	route := func(dst netip.Prefix) cluster.TableRoute {
		if dst.Addr().Is6() {
			return cluster.TableRoute{Dst: dst, Dev: desired.TunnelInterface, Scope: "link"}
		}
		return cluster.TableRoute{Dst: dst, Via: prefix(a.tunnelPeer).Addr(), Dev: desired.TunnelInterface, OnLink: true}
	}
	match := func(position string, p netip.Prefix, tunnel bool) []cluster.Match {
		r := rangeOf(p.String())
		return []cluster.Match{{IP: cluster.AddrRange{From: r.From, To: r.To}, Position: position}, {Dev: desired.TunnelInterface, Position: "in", Negate: !tunnel}}
	}
	in := desired.GatewayInput{
		Name: "rome", Namespace: "liqo-tenant-rome", RemoteID: "rome", Mode: cluster.Server, NodeName: "edge",
		PodIP: prefix(a.gateway).Addr(), PublicKey: public(1), Underlay: desired.Underlay{MTU: 1500},
		Configurations: []cluster.Configuration{{
			Meta: object("Configuration", "rome"), RemoteID: "rome", Configured: true, Local: cidrs, Remote: cidrs,
			Remapped: cluster.CIDRs{Pod: []netip.Prefix{there}, External: []netip.Prefix{prefix(a.reExt)}},
		}},
		Fabrics: []cluster.InternalFabric{{Meta: object("InternalFabric", "rome"), RemoteID: "rome", Overlay: overlay}},
		Routes: []cluster.RouteConfiguration{
			{Meta: object("RouteConfiguration", "rome-gw-ext", "route-category", "gateway", "route-unique", "rome"), Table: "rome-gw-ext", Rules: []cluster.RouteRule{
				{IIF: dev, Routes: []cluster.TableRoute{route(own), route(prefix(a.external))}},
			}},
			{Meta: object("RouteConfiguration", "gw-pods", "route-category", "gateway", "route-subcategory", "fabric"), Table: "254", Rules: []cluster.RouteRule{
				{IIF: desired.TunnelInterface, Dst: own},
			}},
		},
		Firewalls: []cluster.FirewallConfiguration{
			{Meta: object("FirewallConfiguration", "remap", "firewall-category", "gateway", "firewall-unique", "rome"), Table: "remap", Family: family, Chains: []cluster.Chain{
				{Name: "outgoing", Type: "nat", Hook: "prerouting", Priority: -100, NAT: []cluster.NATRule{{Name: "out", Type: "dnat", To: own, ToIsPrefix: true, Match: match("dst", there, false)}}},
				{Name: "incoming", Type: "nat", Hook: "postrouting", Priority: 100, NAT: []cluster.NATRule{{Name: "in", Type: "snat", To: there, ToIsPrefix: true, Match: match("src", own, true)}}},
			}},
			{Meta: object("FirewallConfiguration", "users", "firewall-category", "gateway", "firewall-unique", "rome"), Table: "users", Family: family, Chains: []cluster.Chain{
				// Its marks change nothing.
				{Name: "prerouting", Type: "filter", Hook: "prerouting", Priority: -140, Filter: []cluster.FilterRule{{Name: "mark", Action: "ctmark", Value: "77"}, {Name: "restore", Action: "metamarkfromctmark"}}},
				{Name: "forward", Type: "filter", Hook: "forward", Filter: []cluster.FilterRule{{
					Name: "reject", Action: "reject", Match: []cluster.Match{{Proto: "udp"}, {Ports: cluster.PortRange{From: 4444, To: 4444}, Position: "dst"}},
				}}},
			}},
		},
	}
	s, results := desired.Gateway(in)
	for _, r := range results {
		assert.Assert(t, r.OK, "%s: %s", r.Object, r.Message)
	}
	s.Links, s.Neighbors, s.Settings, s.Addresses, s.WireGuard = nil, nil, nil, nil, nil
	return s
}

// likeTunnel joins a gateway and its peer by a veth pair that is called like the tunnel
// and, like WireGuard, asks nobody for neighbours: for the addresses of both ends, and
// another one that the peer has.
func likeTunnel(t testing.TB, gw, peer *nettest.NS, addrGateway, addrPeer, another string) {
	t.Helper()
	vethNamed(t, gw, peer, desired.TunnelInterface, addrGateway, addrPeer)
	for _, n := range []struct {
		at, of *nettest.NS
		addr   string
	}{{gw, peer, prefix(addrPeer).Addr().String()}, {gw, peer, another}, {peer, gw, prefix(addrGateway).Addr().String()}} {
		mac := strings.Fields(n.of.Run("ip", "-br", "link", "show", "dev", desired.TunnelInterface))[2]
		n.at.Run("ip", "neigh", "replace", n.addr, "lladdr", mac, "dev", desired.TunnelInterface, "nud", "permanent")
	}
}

// TestGatewayTellsThePeer: the errors that a gateway makes about packets out of
// the tunnel go into the tunnel, although this cluster has a pod with the
// sender's address; and they come from where the peer expects packets from.
func TestGatewayTellsThePeer(t *testing.T) {
	t.Parallel()
	for _, a := range addressings {
		t.Run(a.name, func(t *testing.T) {
			t.Parallel()
			is6 := addr(a.pod).Is6()
			host := func(s string) string { return fmt.Sprintf("%s/%d", s, addr(s).BitLen()) }
			ns, gw := openWith(t)
			need(t, ns, FeatureNAT)
			nettest.Need(t, "ip")
			peer, node := nettest.Another(t), nettest.Another(t)
			likeTunnel(t, gw, peer, a.tunnel, a.tunnelPeer, a.peerPod)
			vethNamed(t, gw, node, desired.PodInterface, a.gateway, a.node)
			for _, n := range []*nettest.NS{gw, peer, node} {
				n.Do(func() { writeSysctl(t, "net/ipv4/conf/all/rp_filter", "0") })
			}
			gw.Do(func() {
				writeSysctl(t, a.forwarding, "1")
				writeSysctl(t, a.ratelimit, "0")
			})
			nodad := []string(nil)
			if is6 {
				nodad = []string{"nodad"}
			}
			toNode, toGateway := prefix(a.node).Addr().String(), prefix(a.gateway).Addr().String()
			gw.Run("ip", "route", "add", "default", "via", toNode)
			gw.Run("ip", "route", "add", host(a.pod), "via", toNode, "mtu", "1300")
			node.Run(append([]string{"ip", "addr", "add", host(a.pod), "dev", desired.PodInterface}, nodad...)...)
			node.Run(append([]string{"ip", "addr", "add", host(a.peerPod), "dev", desired.PodInterface}, nodad...)...) // a pod of this cluster
			node.Run("ip", "route", "add", a.remapped, "via", toGateway)
			peer.Run(append([]string{"ip", "addr", "add", host(a.peerPod), "dev", desired.TunnelInterface}, nodad...)...)
			for _, dst := range []string{host(a.pod), a.external, host(toGateway)} {
				peer.Run("ip", "route", "add", dst, "via", prefix(a.tunnel).Addr().String())
			}
			converge(t, ns, a.state(t, desired.PodInterface))

			heard, here := listenICMP(t, peer, is6), listenICMP(t, node, is6)
			sender := listen(t, peer, netip.AddrPortFrom(addr(a.peerPod), 4001))
			pod := listen(t, node, netip.AddrPortFrom(addr(a.pod), 4000))
			deliver(t, sender, pod, netip.AddrPortFrom(addr(a.pod), 4000))
			answering := listen(t, peer, netip.AddrPortFrom(addr(a.peerPod), 4002))
			asking := listen(t, node, netip.AddrPortFrom(addr(a.pod), 4003))
			deliver(t, asking, answering, netip.AddrPortFrom(addr(a.peerPodHere), 4002))

			option := func(c *net.UDPConn, v4, v6, value int) {
				assert.NilError(t, onSocket(c, func(fd int) error {
					if is6 {
						return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, v6, value)
					}
					return unix.SetsockoptInt(fd, unix.IPPROTO_IP, v4, value)
				}))
			}
			const whole, hops = 1400, 64
			for _, tt := range []struct {
				name string
				from *net.UDPConn
				to   netip.AddrPort
				size int
				ttl  int
				typ  byte
			}{
				{"too large", sender, netip.AddrPortFrom(addr(a.pod), 4000), whole, hops, a.tooBig},
				{"too large, the first of its connection", sender, netip.AddrPortFrom(addr(a.pod), 4009), whole, hops, a.tooBig},
				{"an answer that is too large", answering, netip.AddrPortFrom(addr(a.pod), 4003), whole, hops, a.tooBig},
				{"TTL", sender, netip.AddrPortFrom(addr(a.pod), 4000), 10, 1, a.expired},
				{"an answer's TTL", answering, netip.AddrPortFrom(addr(a.pod), 4003), 10, 1, a.expired},
				{"nobody", sender, netip.AddrPortFrom(addr(a.nobody), 4000), 10, hops, a.unreachable},
				{"rejected", sender, netip.AddrPortFrom(addr(a.pod), 4444), 10, hops, a.unreachable},
			} {
				option(tt.from, unix.IP_MTU_DISCOVER, unix.IPV6_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE) // DF, whatever is known of the path
				option(tt.from, unix.IP_TTL, unix.IPV6_UNICAST_HOPS, tt.ttl)
				poll.WaitOn(t, func(poll.LogT) poll.Result {
					_, _ = tt.from.WriteToUDPAddrPort(make([]byte, tt.size), tt.to) // may say what an earlier error said
					typ, quoted, from, ok := nextError(heard, is6)
					switch {
					case !ok:
						return poll.Continue("%s: nobody tells the peer", tt.name)
					case typ != tt.typ || quoted != tt.to.Addr():
						return poll.Continue("%s: told of %s, type %d", tt.name, quoted, typ) // of the one before
					case !prefix(a.pods).Contains(from) && !prefix(a.external).Contains(from):
						return poll.Error(fmt.Errorf("%s: told by %s, which the peer's WireGuard does not let in", tt.name, from))
					}
					return poll.Success()
				}, poll.WithTimeout(10*time.Second), poll.WithDelay(time.Millisecond))
			}
			typ, quoted, from, ok := nextError(here, is6)
			assert.Assert(t, !ok, "this cluster's pod with the sender's address was told: type %d about %s, from %s", typ, quoted, from)

			// What the gateway tells its own pods does not go into the tunnel.
			option(asking, unix.IP_TTL, unix.IPV6_UNICAST_HOPS, 1)
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				_, _ = asking.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(addr(a.peerPodHere), 4002))
				if typ, quoted, _, ok := nextError(here, is6); !ok || typ != a.expired || quoted != addr(a.peerPodHere) {
					return poll.Continue("the pod is not told")
				}
				return poll.Success()
			}, poll.WithTimeout(10*time.Second), poll.WithDelay(time.Millisecond))
		})
	}
}

// nextError reads ICMP messages until one is an error, and returns its type, the
// destination of the packet that it is about, and who sent it; false if there is
// none within 100 ms.
func nextError(c net.PacketConn, is6 bool) (typ byte, quoted, from netip.Addr, ok bool) {
	buf := make([]byte, 2000)
	errors, header, dst := icmpErrors, 20, 16
	if is6 {
		errors, header, dst = icmpv6Errors, 40, 24
	}
	_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	for {
		n, sender, err := c.ReadFrom(buf)
		if err != nil {
			return 0, quoted, from, false
		}
		for _, e := range errors {
			if n >= 8+header && buf[0] == e {
				from, _ = netip.AddrFromSlice(sender.(*net.IPAddr).IP)
				quoted, _ = netip.AddrFromSlice(buf[8+dst : 8+dst+addr(map[bool]string{false: "0.0.0.0", true: "::"}[is6]).BitLen()/8])
				return buf[0], quoted, from.Unmap(), true
			}
		}
	}
}

// TestWhatIsForNobodyIsCounted: with either overlay, what comes by a link and is
// for nobody is refused, and counted.
func TestWhatIsForNobodyIsCounted(t *testing.T) {
	t.Parallel()
	for _, a := range addressings {
		for _, dev := range []string{desired.PodInterface, "liqo.node-1"} {
			t.Run(a.name+" "+dev, func(t *testing.T) {
				t.Parallel()
				ns, gw := openWith(t)
				need(t, ns, FeatureNAT)
				nettest.Need(t, "ip")
				peer, node := nettest.Another(t), nettest.Another(t)
				likeTunnel(t, gw, peer, a.tunnel, a.tunnelPeer, a.peerPod)
				vethNamed(t, gw, node, dev, a.gateway, a.node)
				gw.Do(func() {
					writeSysctl(t, "net/ipv4/conf/all/rp_filter", "0")
					writeSysctl(t, a.forwarding, "1")
				})
				gw.Run("ip", "route", "add", "default", "via", prefix(a.node).Addr().String()) // what it must not get to
				bits := fmt.Sprintf("/%d", addr(a.nobody).BitLen())
				for _, from := range []struct {
					at  *nettest.NS
					via string
				}{{peer, a.tunnel}, {node, a.gateway}} {
					nobody := addr(a.nobody)
					if from.at == node { // whose own networks these are
						nobody = addr(map[bool]string{false: "192.0.2.9", true: "2001:db8::9"}[nobody.Is6()])
					}
					from.at.Run("ip", "route", "add", nobody.String()+bits, "via", prefix(from.via).Addr().String())
					converge(t, ns, a.state(t, dev))
					out := dial(t, from.at, netip.AddrPortFrom(nobody, 9))
					before, err := ns.InNoRoutes()
					assert.NilError(t, err)
					poll.WaitOn(t, func(poll.LogT) poll.Result {
						_, _ = out.Write([]byte("lost")) // may say what an earlier error said
						if n, err := ns.InNoRoutes(); err != nil || n <= before {
							return poll.Continue("by %s: %d packets counted, %v", from.via, n, err)
						}
						return poll.Success()
					}, poll.WithTimeout(10*time.Second), poll.WithDelay(10*time.Millisecond))
				}
			})
		}
	}
}
