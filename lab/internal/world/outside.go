package world

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
)

// setMTU sets the MTU of a cable: of the port and of the host's end. 0 leaves
// the default.
func (n *network) setMTU(port string, h *host, link string, mtu int) error {
	if mtu == 0 {
		return nil
	}
	if err := n.root.setMTU(port, mtu); err != nil {
		return err
	}
	return h.ns.setMTU(link, mtu)
}

// reachable are the clusters whose LAN can be routed to from a cluster, or
// from outside when its name is empty: LANs that overlap with its own, or with
// one before, have no unique way, and nobody knows what is behind a NAT.
func (s Spec) reachable(from string) []ClusterSpec {
	own, _ := s.Cluster(from)
	taken := []netip.Prefix{own.LAN}
	var out []ClusterSpec
	for _, c := range s.Clusters {
		overlaps := false
		for _, p := range taken {
			overlaps = overlaps || p.IsValid() && p.Overlaps(c.LAN)
		}
		if c.Name == from || overlaps || c.NAT {
			continue
		}
		taken = append(taken, c.LAN)
		out = append(out, c)
	}
	return out
}

// routeWAN gives a router, or a host of the WAN (with an empty cluster), its
// routes to the clusters: to their machines, their load balancers and, where
// the network knows of them, to their services.
func (n *network) routeWAN(ns *Namespace, own ClusterSpec) error {
	add := func(dst netip.Prefix, peer ClusterSpec) error {
		if mtu := narrowest(own.WANMTU, peer.WANMTU); mtu > 0 {
			return ns.addNarrowRoute(dst, peer.RouterWAN, mtu)
		}
		return ns.AddRoute(dst, peer.RouterWAN)
	}
	for _, peer := range n.spec.reachable(own.Name) {
		if err := add(peer.LAN, peer); err != nil {
			return err
		}
	}
	for _, peer := range n.spec.Clusters {
		if peer.Name == own.Name {
			continue
		}
		if mtu := narrowest(own.WANMTU, peer.WANMTU); mtu > 0 { // its router's own address, which it gives to pods
			if err := ns.addNarrowNeighbour(peer.RouterWAN, mtu); err != nil {
				return err
			}
		}
		if peer.LoadBalancer.IsValid() {
			if err := add(peer.LoadBalancer, peer); err != nil {
				return err
			}
		}
		if !peer.RoutedServices || peer.NAT {
			continue
		}
		if err := add(peer.ServiceCIDR, peer); err != nil {
			return err
		}
	}
	return nil
}

// narrowest is the least MTU on the way between two links of the WAN, when it
// is less than Ethernet's; 0: it is not, or not known.
func narrowest(mtus ...int) int {
	least := ethernetMTU
	for _, m := range mtus {
		if m > 0 {
			least = min(least, m)
		}
	}
	if least == ethernetMTU {
		return 0
	}
	return least
}

const ethernetMTU = 1500

// routeLoadBalancer gives a router the routes to its cluster's load balancers:
// each address leads to one node. Routed services all lead to the first.
func (n *network) routeLoadBalancer(ns *Namespace, c ClusterSpec) error {
	if first, ok := c.LoadBalancerNode(1); ok && c.RoutedServices {
		if err := ns.AddRoute(c.ServiceCIDR, first.Addr); err != nil {
			return err
		}
	}
	for i := 1; ; i++ {
		a, ok := c.LoadBalancerAddress(i)
		if !ok {
			return nil
		}
		node, ok := c.LoadBalancerNode(i)
		if !ok || node.Addr.Is4() != a.Is4() {
			return nil
		}
		if err := ns.AddRoute(netip.PrefixFrom(a, a.BitLen()), node.Addr); err != nil {
			return err
		}
	}
}

// buildOutside makes the i-th host of no cluster, from 1.
func (n *network) buildOutside(o HostSpec, i int, add func(*host) error) error {
	if o.Via != "" {
		return n.buildBehind(o, i, add)
	}
	port := fmt.Sprintf("w-out%d", i)
	h, err := n.newHost(o.Name, "", port, WANHost, netip.PrefixFrom(o.Addr, n.spec.WAN.Bits()), 0)
	if err != nil {
		return err
	}
	n.wanPorts = append(n.wanPorts, port)
	if err := h.ns.impair(NodeInterface, o.Impairment); err != nil {
		return err
	}
	if err := n.routeWAN(h.ns, ClusterSpec{}); err != nil {
		return err
	}
	return add(h)
}

// buildBehind makes a host on a network of its own behind a cluster's router,
// whose address there is the network's first.
func (n *network) buildBehind(o HostSpec, i int, add func(*host) error) error {
	router, ok := n.host(o.Via + "/" + RouterHost)
	if !ok {
		return fmt.Errorf("there is no router of cluster %q", o.Via)
	}
	bridge, port, routerPort := fmt.Sprintf("out%d", i), fmt.Sprintf("o%d-host", i), fmt.Sprintf("o%d-router", i)
	if err := n.root.addBridge(bridge); err != nil {
		return err
	}
	h, err := n.newHost(o.Name, "", port, bridge, netip.PrefixFrom(o.Addr, o.LAN.Bits()), 0)
	if err != nil {
		return err
	}
	link := fmt.Sprintf("eth%d", 1+i) // eth0 and eth1 are those to the LAN and the WAN
	if err := Wire(n.root, routerPort, router.ns, link); err != nil {
		return err
	}
	if err := n.root.enslave(routerPort, bridge); err != nil {
		return err
	}
	first := nth(o.LAN, routerHostPart)
	if err := router.ns.AddAddress(link, netip.PrefixFrom(first, o.LAN.Bits())); err != nil {
		return err
	}
	if err := h.ns.AddRoute(defaultRoute(o.Addr), first); err != nil {
		return err
	}
	return add(h)
}

// routerRules is the ruleset of a cluster's router: pods reach the outside by
// the router's address; nodes are known there by their own, unless the router
// hides them, too. Some ports of its own lead to nodes.
func routerRules(c ClusterSpec) string {
	family := "ip"
	if c.PodCIDR.Addr().Is6() {
		family = "ip6"
	}
	// The nodes of a flat network have addresses of the podCIDR.
	source := fmt.Sprintf("%[1]s saddr %[2]s %[1]s saddr != %[3]s", family, c.PodCIDR, c.LAN)
	if c.NAT {
		source = ""
	}
	var forwards strings.Builder
	for _, f := range c.Forwards {
		fmt.Fprintf(&forwards, "\t\tiifname %q ip daddr %s udp dport %d dnat to %s\n", routerWANInterface, c.RouterWAN, f.Port, f.To)
	}
	rules := strings.NewReplacer("FAMILY", family, "SOURCE", source, "WAN", routerWANInterface, "FORWARDS", forwards.String()).Replace(`
table FAMILY lab {
	chain prerouting {
		type nat hook prerouting priority dstnat; policy accept;
FORWARDS	}
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		oifname "WAN" SOURCE masquerade
	}
}
`)
	if c.BlocksICMP {
		rules += blocksICMP
	}
	return rules
}

// blocksICMP drops what a router would forward or send of ICMP, and of ICMPv6
// what is not the business of the link alone.
const blocksICMP = `
table inet lab-icmp {
	chain forward {
		type filter hook forward priority filter; policy accept;
		meta l4proto icmp counter drop
		icmpv6 type { destination-unreachable, packet-too-big, time-exceeded, parameter-problem, echo-request, echo-reply } counter drop
	}
	chain output {
		type filter hook output priority filter; policy accept;
		meta l4proto icmp counter drop
		icmpv6 type { destination-unreachable, packet-too-big, time-exceeded, parameter-problem, echo-request, echo-reply } counter drop
	}
}
`

// serveOutside lets the hosts of no cluster answer probes until ctx ends.
func (a *agent) serveOutside(ctx context.Context, n *network) error {
	for _, o := range n.spec.Outside {
		h, ok := n.host(o.Name)
		if !ok {
			continue
		}
		cmd := exec.Command(filepath.Join(a.cfg.BinDir, "probe"), "serve", "--host", o.Name)
		if err := h.ns.Start(cmd); err != nil {
			return fmt.Errorf("host %s: answer probes: %w", o.Name, err)
		}
		stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
		a.nodes.background(func() {
			defer stop()
			if err := cmd.Wait(); err != nil && ctx.Err() == nil {
				a.cfg.Logger.Error("a host outside answers no probes any more", "host", o.Name, "err", err)
			}
		})
	}
	return nil
}
