package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
)

// MaxNodes is how many nodes a case may have.
const MaxNodes = 10_000

// NodeCases returns what is measured of gateways with these numbers of nodes: as
// gateways are, and with rules for each node. The first is what the others are compared
// with.
func NodeCases(nodes []int) []FirewallCase {
	var out []FirewallCase
	for _, linear := range []bool{false, true} {
		for _, n := range nodes {
			out = append(out, FirewallCase{Nodes: n, Linear: linear})
		}
	}
	return out
}

// otherNode returns the i-th of the nodes that send nothing. The one that does is the
// last by name, whose rules are asked last.
func otherNode(i int) cluster.InternalNode {
	name := fmt.Sprintf("node-0%04d", i) // "liqo." before it makes 14 of the 15 bytes of a link's name
	a := netip.AddrFrom4([4]byte{10, 81, byte(i >> 8), byte(i)})
	return cluster.InternalNode{
		Meta: object("InternalNode", "", name), GatewayInterface: "liqo." + name, InternalIP: a, Local: a, Remote: a,
	}
}

// withNodes adds what the controller writes for a gateway of n nodes: how it reaches
// each, what each sends to the peer and as whom, and the marks that lead answers back.
func withNodes(in *desired.GatewayInput, n int) {
	for i := range n - 1 {
		node := otherNode(i)
		in.Nodes = append(in.Nodes, node)
		in.Tunnels = append(in.Tunnels, cluster.GeneveTunnel{
			Meta: object("GeneveTunnel", in.Namespace, node.Name), VNI: uint32(2 + i), Node: node.Name,
			Fabric: cluster.Ref{Namespace: in.Namespace, Name: firewallPeer},
		})
	}
	out := cluster.RouteConfiguration{
		Meta:  object("RouteConfiguration", in.Namespace, firewallPeer+"-gw-ext", "route-category", "gateway", "route-unique", firewallPeer),
		Table: firewallPeer + "-gw-ext",
	}
	mark := cluster.Chain{Name: "mark-to-conntrack", Type: "filter", Hook: "forward", Policy: "accept"}
	for i, node := range in.Nodes {
		host := netip.PrefixFrom(node.InternalIP, node.InternalIP.BitLen())
		out.Rules = append(out.Rules, cluster.RouteRule{IIF: node.GatewayInterface, Routes: []cluster.TableRoute{
			{Dst: original(0), Via: peerAddr(), Dev: desired.TunnelInterface},
		}})
		for _, rc := range []cluster.RouteConfiguration{
			{Table: node.Name + "-gw-node", Rules: []cluster.RouteRule{
				{Dst: host, Routes: []cluster.TableRoute{{Dst: host, Dev: node.GatewayInterface, Scope: "link"}}},
			}},
			{Table: node.Name + "-service-nodeport-routing", Rules: []cluster.RouteRule{
				{IIF: desired.TunnelInterface, Mark: uint32(i + 1), Routes: []cluster.TableRoute{
					{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Via: node.InternalIP, Dev: node.GatewayInterface, OnLink: true},
				}},
			}},
		} {
			rc.Meta = object("RouteConfiguration", "liqo", rc.Table, "route-category", "gateway", "route-subcategory", "fabric")
			in.Routes = append(in.Routes, rc)
		}
		mark.Filter = append(mark.Filter, cluster.FilterRule{
			Name: node.Name, Action: "ctmark", Value: strconv.Itoa(i + 1),
			Match: []cluster.Match{
				{Dev: node.GatewayInterface, Position: "in"}, {IP: cluster.AddrRange{From: node.InternalIP, To: node.InternalIP}, Position: "src"},
			},
		})
	}
	in.Routes = append(in.Routes, out)
	in.Firewalls = append(in.Firewalls, cluster.FirewallConfiguration{
		Meta:  object("FirewallConfiguration", in.Namespace, firewallPeer+"-unknown-source", "firewall-category", "gateway", "firewall-unique", firewallPeer),
		Table: "unknown-source", Family: "IPV4", Chains: []cluster.Chain{{
			Name: "postrouting", Type: "nat", Hook: "postrouting", Priority: 110, Policy: "accept", NAT: []cluster.NATRule{{
				Name: "hosts", Type: "snat", To: netip.PrefixFrom(mappedAddr(0), 32),
				Match: []cluster.Match{{Dev: desired.TunnelInterface, Position: "out"}, {IP: cluster.AddrRange(netstate.RangeOf(original(0))), Position: "dst"}},
			}},
		}},
	}, cluster.FirewallConfiguration{
		Meta:  object("FirewallConfiguration", "liqo", "service-nodeport-routing", "firewall-category", "gateway", "firewall-subcategory", "fabric"),
		Table: "service-nodeport-routing", Family: "IPV4", Chains: []cluster.Chain{mark, {
			Name: "restore", Type: "filter", Hook: "prerouting", Policy: "accept", Filter: []cluster.FilterRule{
				{Name: "restore", Action: "metamarkfromctmark", Match: []cluster.Match{{Dev: desired.TunnelInterface, Position: "in"}}},
			},
		}},
	})
}

// ruleForEach returns the ip rules with one for each node's link where a gateway has one
// for all.
func ruleForEach(nodes []cluster.InternalNode, rules []netstate.Rule) []netstate.Rule {
	var out []netstate.Rule
	for _, r := range rules {
		if !r.Not || r.Unreachable {
			out = append(out, r)
			continue
		}
		for _, n := range nodes {
			r.Not, r.IIF = false, n.GatewayInterface
			out = append(out, r)
		}
	}
	return out
}

// markForEach returns the rules with one for each entry of a map of marks, as gateways
// without a map have them.
func markForEach(rules []netstate.FirewallRule) []netstate.FirewallRule {
	var out []netstate.FirewallRule
	written := false
	for _, r := range rules {
		m := r.Action.Map
		if r.Action.Kind != netstate.SetCTMark || len(m.Entries) == 0 {
			out = append(out, r)
			continue
		}
		if written {
			continue // the same for other bits of the mark
		}
		written = true
		for _, e := range m.Entries {
			out = append(out, netstate.FirewallRule{
				Name:    e.Name,
				Matches: []netstate.Match{{Dir: "in", Dev: e.Link}, {Dir: m.Dir, Addr: e.Addr}},
				Action:  netstate.Action{Kind: netstate.SetCTMark, Mark: e.Mark, Mask: ^uint32(desired.ReservedMarks)},
			})
		}
	}
	return out
}

// addNodes makes the links to the nodes that send nothing, and lets the peer answer.
func (s *firewallSite) addNodes(ctx context.Context, peer string) error {
	var batch strings.Builder
	for i := range s.Nodes - 1 {
		fmt.Fprintf(&batch, "link add %s type bridge\nlink set %[1]s up\n", otherNode(i).GatewayInterface)
	}
	err := netns.Do(s.gateway, func() error { return runBatch(ctx, batch.String()) })
	if err != nil {
		return err
	}
	return netns.Do(s.sink, func() error {
		return runIP(ctx, []string{"link", "set", "lo", "up"}, []string{"address", "add", peer + "/32", "dev", "lo"})
	})
}

// echo is an echo request as it is sent, without the header of IP (RFC 792).
func echo(id, seq uint16) []byte {
	const request = 8
	b := make([]byte, 64)
	b[0] = request
	binary.BigEndian.PutUint16(b[4:], id)
	binary.BigEndian.PutUint16(b[6:], seq)
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum&0xffff+sum>>16))
	return b
}

// roundTrips returns how many requests are answered in a second, one sent after the
// other's answer.
func (s *firewallSite) roundTrips(d time.Duration) (float64, error) {
	const patience = time.Second
	var fd int
	err := netns.Do(s.sender, func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("socket for ICMP: %w", err)
	}
	defer unix.Close(fd)
	wait := unix.NsecToTimeval(patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return 0, err
	}
	to := unix.SockaddrInet4{Addr: s.destination(0).As4()}
	answer := make([]byte, 256)
	start := time.Now()
	for n := 1; ; n++ {
		request := echo(uint16(s.Nodes), uint16(n))
		if err := unix.Sendto(fd, request, 0, &to); err != nil {
			return 0, fmt.Errorf("send to %v: %w", to.Addr, err)
		}
		for {
			size, _, err := unix.Recvfrom(fd, answer, 0)
			if errors.Is(err, unix.EAGAIN) {
				return 0, fmt.Errorf("%v does not answer within %s", to.Addr, patience)
			}
			if err != nil && !errors.Is(err, unix.EINTR) {
				return 0, err
			}
			const header = 20 // of IPv4, without options
			if size == header+len(request) && answer[header] == 0 && slices.Equal(answer[header+4:size], request[4:]) {
				break
			}
		}
		if n%timeEvery == 0 {
			if elapsed := time.Since(start); elapsed >= d {
				return float64(n) / elapsed.Seconds(), nil
			}
		}
	}
}
