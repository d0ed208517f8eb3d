package world

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
)

// UplinkName is the name, in the agent's namespace, of the link to the k-th
// cluster's control plane, from 1.
func UplinkName(k int) string { return fmt.Sprintf("cp%d", k) }

// UplinkMAC is the hardware address of that link in a virtual machine; 0 is
// the one of the management network.
func UplinkMAC(k int) net.HardwareAddr {
	return net.HardwareAddr{0x52, 0x54, 0x00, 0x15, 0x74, byte(k)}
}

// TapMAC is the hardware address of the other end of that link, outside of the
// virtual machine.
func TapMAC(k int) net.HardwareAddr {
	return net.HardwareAddr{0x52, 0x54, 0x00, 0x15, 0x75, byte(k)}
}

// A host is a namespace with a name: a node, a router, an outside host, or the
// one with the bridges.
type host struct {
	name    string // "milan/node-1"
	cluster string // empty outside
	ns      *Namespace
}

// network builds what a Spec says, without Kubernetes: bridges, routers, nodes
// and outside hosts, each in an anonymous namespace.
type network struct {
	spec Spec
	root *Namespace // has the bridges
	// wanPorts are the bridge ports of the WAN, which "wan" means in queries.
	wanPorts []string

	mu    sync.Mutex
	hosts []*host // root first; nodes come and go
}

// Settings of every namespace. The reverse-path filter is what systemd sets on
// the machines that clusters run on; a topology may want another one of its
// nodes. Bridged packets do not go through iptables: where br_netfilter is
// loaded a machine would behave otherwise than the others, for reasons that
// have nothing to do with the lab.
var (
	hostSettings = []string{
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=2",
		"net.ipv6.conf.all.accept_dad?=0", "net.ipv6.conf.default.accept_dad?=0",
		"net.bridge.bridge-nf-call-iptables?=0", "net.bridge.bridge-nf-call-ip6tables?=0", "net.bridge.bridge-nf-call-arptables?=0",
	}
	forwarding = []string{"net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding?=1"}
)

// buildNetwork builds in the calling thread's namespace, where the uplinks to
// the control planes must already be. It calls built for each host as soon as
// it has its name and links, so that captures see it from the start.
func buildNetwork(ctx context.Context, spec Spec, root *Namespace, built func(*host) error) (*network, error) {
	n := &network{spec: spec, root: root}
	add := func(h *host) error {
		n.add(h)
		return built(h)
	}
	if err := root.sysctl(hostSettings[len(hostSettings)-3:]...); err != nil {
		return n, err
	}
	if err := root.addBridge(WANHost); err != nil {
		return n, err
	}
	if err := add(&host{name: WANHost, ns: root}); err != nil {
		return n, err
	}
	for _, c := range spec.Clusters {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		if err := n.buildCluster(c, add); err != nil {
			return n, fmt.Errorf("cluster %s: %w", c.Name, err)
		}
	}
	for i, o := range spec.Outside {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		if err := n.buildOutside(o, i+1, add); err != nil {
			return n, fmt.Errorf("host %s: %w", o.Name, err)
		}
	}
	return n, nil
}

func (n *network) buildCluster(c ClusterSpec, add func(*host) error) error {
	lan := fmt.Sprintf("lan%d", c.Index)
	if err := n.root.addBridge(lan); err != nil {
		return err
	}
	if err := n.root.enslave(UplinkName(c.Index), lan); err != nil {
		return err
	}

	router, err := n.newHost(c.Name+"/"+RouterHost, c.Name, fmt.Sprintf("l%d-router", c.Index), lan, netip.PrefixFrom(c.Router, c.LAN.Bits()), c.MTU, forwarding...)
	if err != nil {
		return err
	}
	wanPort := fmt.Sprintf("w-router%d", c.Index)
	if err := Wire(n.root, wanPort, router.ns, routerWANInterface); err != nil {
		return err
	}
	if err := n.root.enslave(wanPort, WANHost); err != nil {
		return err
	}
	n.wanPorts = append(n.wanPorts, wanPort)
	if err := router.ns.AddAddress(routerWANInterface, netip.PrefixFrom(c.RouterWAN, n.spec.WAN.Bits())); err != nil {
		return err
	}
	if err := n.setMTU(wanPort, router, routerWANInterface, c.WANMTU); err != nil {
		return err
	}
	if err := router.ns.impair(routerWANInterface, c.Impairment); err != nil {
		return err
	}
	if err := n.routeWAN(router.ns, c); err != nil {
		return err
	}
	if err := n.routeLoadBalancer(router.ns, c); err != nil {
		return err
	}
	if err := router.ns.nft(routerRules(c)); err != nil {
		return err
	}
	if err := add(router); err != nil {
		return err
	}

	if c.SourceCheck {
		if err := n.root.nft(sourceCheck(c, nil)); err != nil {
			return fmt.Errorf("source check: %w", err)
		}
	}
	for _, node := range c.Nodes {
		if node.Absent {
			continue
		}
		h, err := n.newNode(c, node.Name)
		if err != nil {
			return err
		}
		if err := add(h); err != nil {
			return err
		}
	}
	return nil
}

// nodePort is the name of a node's port of its cluster's LAN, in the namespace
// that has the bridges. Nodes are numbered from 1.
func nodePort(c ClusterSpec, number int) string { return fmt.Sprintf("l%d-node%d", c.Index, number) }

// podPort is the name of the port of a node's PodInterface.
func podPort(c ClusterSpec, number int) string { return fmt.Sprintf("l%d-pods%d", c.Index, number) }

// plugPods gives a node its PodInterface. Its address brings no route to the LAN:
// only pods leave there. Each of the node's links answers ARP for its own address
// alone.
func (n *network) plugPods(c ClusterSpec, h *host, node NodeSpec, number int) error {
	port := podPort(c, number)
	if err := h.ns.sysctl("net.ipv4.conf.all.arp_ignore=1", "net.ipv4.conf.all.arp_announce=2"); err != nil {
		return err
	}
	if err := Wire(n.root, port, h.ns, PodInterface); err != nil {
		return err
	}
	if err := n.setMTU(port, h, PodInterface, c.MTU); err != nil {
		return err
	}
	if err := h.ns.setMAC(PodInterface, hostMAC(node.PodAddr)); err != nil {
		return err
	}
	if err := n.root.enslave(port, fmt.Sprintf("lan%d", c.Index)); err != nil {
		return err
	}
	return h.ns.AddAddress(PodInterface, netip.PrefixFrom(node.PodAddr, node.PodAddr.BitLen()))
}

// newNode makes the host of a node.
func (n *network) newNode(c ClusterSpec, name string) (*host, error) {
	node, number, ok := c.Node(name)
	if !ok {
		return nil, fmt.Errorf("cluster %s has no node %s", c.Name, name)
	}
	// Links have it from "default" when they are made; "all" is 0, and the
	// kernel takes the larger of the two.
	settings := append(slices.Clone(forwarding), fmt.Sprintf("net.ipv4.conf.default.rp_filter=%d", c.RPFilter))
	h, err := n.newHost(c.Name+"/"+name, c.Name, nodePort(c, number), fmt.Sprintf("lan%d", c.Index), netip.PrefixFrom(node.Addr, c.LAN.Bits()), c.MTU, settings...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := h.ns.AddRoute(defaultRoute(c.Router), c.Router); err != nil {
		h.ns.Close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if node.PodAddr.IsValid() {
		if err := n.plugPods(c, h, node, number); err != nil {
			h.ns.Close()
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return h, nil
}

// newHost makes a namespace with eth0 on a bridge. An MTU of 0 leaves the
// default.
func (n *network) newHost(name, cluster, port, bridge string, addr netip.Prefix, mtu int, settings ...string) (*host, error) {
	ns, err := NewNamespace()
	if err != nil {
		return nil, err
	}
	h := &host{name: name, cluster: cluster, ns: ns}
	steps := []func() error{
		func() error { return ns.sysctl(slices.Concat(hostSettings, settings)...) },
		func() error { return Wire(n.root, port, ns, NodeInterface) },
		func() error { return n.setMTU(port, h, NodeInterface, mtu) },
		func() error { return ns.setMAC(NodeInterface, hostMAC(addr.Addr())) },
		func() error { return n.root.enslave(port, bridge) },
		func() error { return ns.AddAddress(NodeInterface, addr) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			ns.Close()
			return nil, err
		}
	}
	return h, nil
}

// hostMAC is the hardware address of a host's card. A node that comes back has
// the same card, and its neighbours need not learn a new one.
func hostMAC(addr netip.Addr) net.HardwareAddr {
	b := addr.AsSlice()
	return append(net.HardwareAddr{0x02, 0x15}, b[len(b)-4:]...)
}

func (n *network) add(h *host) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hosts = append(n.hosts, h)
}

// remove forgets a host; its namespace stays open.
func (n *network) remove(h *host) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hosts = slices.DeleteFunc(slices.Clone(n.hosts), func(other *host) bool { return other == h })
}

// all are the hosts that there are at the moment, root first.
func (n *network) all() []*host {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.hosts)
}

func (n *network) host(name string) (*host, bool) {
	for _, h := range n.all() {
		if h.name == name {
			return h, true
		}
	}
	return nil, false
}

// close lets go of all namespaces but the root.
func (n *network) close() {
	for _, h := range n.all() {
		if h.ns != n.root {
			h.ns.Close()
		}
	}
}

func (n *network) hostNames() string {
	var names []string
	for _, h := range n.all() {
		names = append(names, h.name)
	}
	return joinNames(names)
}

func joinNames(names []string) string {
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(names))), ", ")
}
