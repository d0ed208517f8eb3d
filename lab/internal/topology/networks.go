package topology

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// WAN is the network that joins the clusters: TEST-NET-3, which no lab needs for
// anything else.
var WAN = netip.MustParsePrefix("203.0.113.0/24")

// FirstNodeHost is the host part of the address of node-1. Below are the router
// and the control plane.
const FirstNodeHost = 11

// BehindRouter is the length of the network of a host behind a router. The
// router has its first address.
const BehindRouter = 24

// maxOutside is how many hosts outside the WAN has addresses for, behind those of
// the routers.
const maxOutside = 150

// kept are networks that no host of a lab can be in, with what they are.
var kept = []struct {
	prefix netip.Prefix
	what   string
}{
	{WAN, "the wide area network"},
	{netip.MustParsePrefix("0.0.0.0/8"), "no host's"},
	{netip.MustParsePrefix("127.0.0.0/8"), "every host's own"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local"},
	{netip.MustParsePrefix("224.0.0.0/3"), "multicast or reserved"},
}

// A network is one of a cluster's, by its key.
type network struct {
	key      string
	prefix   netip.Prefix
	min, max int // least and greatest length
}

// networks are those of a cluster. A length that depends on how many nodes there
// are is checked by itself.
func networksOf(c Cluster) []network {
	return []network{
		{"podCIDR", c.PodCIDR, 8, 24},          // the controller-manager gives a /24 to each node, and counts to 2^16
		{"serviceCIDR", c.ServiceCIDR, 12, 28}, // the API server's bounds are 12 and 29; its DNS has the tenth address
		{"nodeCIDR", c.NodeCIDR, 8, 32},
		{"externalCIDR", c.ExternalCIDR, 8, 28},
		{"internalCIDR", c.InternalCIDR, 8, 32},
		{"loadBalancerCIDR", c.LoadBalancer, 20, 30}, // the router has a route for each address
	}
}

// checkNetworks checks the networks of one cluster. What is wrong with a default
// is told at another network that was written.
func checkNetworks(f *yamlfile.File, in *clusterFile, c Cluster) {
	all := networksOf(c)
	written := []*netip.Prefix{&in.PodCIDR, &in.ServiceCIDR, &in.NodeCIDR, &in.ExternalCIDR, &in.InternalCIDR, &in.LoadBalancer}
	for i, a := range all {
		if !a.prefix.IsValid() || !checkNetwork(f, f.At(written[i]), a) {
			continue
		}
		for j, b := range all[:i] {
			if !b.prefix.IsValid() || !a.prefix.Overlaps(b.prefix) || c.Flat && a.key == "nodeCIDR" && b.key == "podCIDR" {
				continue
			}
			at := f.At(written[i])
			if at.Line == 0 {
				at = f.At(written[j])
			}
			f.Problem(at, "inside a cluster the ranges must differ; those of two clusters may overlap",
				"%s %s overlaps %s %s of cluster %s", a.key, a.prefix, b.key, b.prefix, c.Name)
		}
	}
	checkRoom(f, &in.PodCIDR, "podCIDR", c.PodCIDR, 24, c.Nodes, fmt.Sprintf("%d nodes: each takes a /24 of it", c.Nodes))
	addresses := FirstNodeHost + c.Nodes + 1
	if c.CNI == CNIVPC {
		addresses += c.Nodes
	}
	checkRoom(f, &in.NodeCIDR, "nodeCIDR", c.NodeCIDR, 32, addresses, fmt.Sprintf("%d nodes: the first one has the address %d", c.Nodes, FirstNodeHost))
	checkRoom(f, &in.InternalCIDR, "internalCIDR", c.InternalCIDR, 32, c.Nodes+2, fmt.Sprintf("%d nodes and a gateway: each takes an address of it", c.Nodes))
}

// checkNetwork checks a network by itself.
func checkNetwork(f *yamlfile.File, at yamlfile.Pos, n network) bool {
	if !n.prefix.Addr().Is4() {
		f.Problem(at, "write an IPv4 network, such as 10.0.0.0/16", "%s %s is IPv6: all networks of a lab are IPv4", n.key, n.prefix)
		return false
	}
	if b := n.prefix.Bits(); b < n.min || b > n.max {
		f.Problem(at, fmt.Sprintf("take a length from /%d to /%d", n.min, n.max), "%s %s: a network of the length /%d can't be used for that", n.key, n.prefix, b)
		return false
	}
	for _, k := range kept {
		if n.prefix.Overlaps(k.prefix) {
			f.Problem(at, "take a private one, such as 10.0.0.0/16 or 192.168.0.0/24", "%s %s overlaps %s, which is %s", n.key, n.prefix, k.prefix, k.what)
			return false
		}
	}
	return true
}

// checkRoom checks that a network has room for so many parts of a length.
func checkRoom(f *yamlfile.File, field *netip.Prefix, key string, p netip.Prefix, length, parts int, what string) {
	if at := f.At(field); at.Line > 0 && p.Addr().Is4() && p.Bits() <= length && length-p.Bits() < 31 && parts > 1<<(length-p.Bits()) {
		f.Problem(at, "take a larger one", "%s %s is too small for %s", key, p, what)
	}
}

// checkRoutes checks that the wide area network has one way to what each cluster
// shows there.
func (t *Topology) checkRoutes(f *yamlfile.File, in []clusterFile) {
	for i, c := range t.Clusters {
		for j, other := range t.Clusters[:i] {
			if c.LoadBalancer.Overlaps(other.LoadBalancer) {
				at := f.At(&in[i].LoadBalancer)
				if at.Line == 0 {
					at = f.At(&in[j].LoadBalancer)
				}
				f.Problem(at, "leave it out, or take another range", "loadBalancerCIDR %s overlaps that of cluster %s: the wide area network knows one way to each address", c.LoadBalancer, other.Name)
			}
			if c.RoutedServices && other.RoutedServices && c.ServiceCIDR.Overlaps(other.ServiceCIDR) {
				f.Problem(f.At(&in[i].RoutedServices), "give them serviceCIDRs of their own", "the services of %s and %s, %s and %s, overlap: the wide area network knows one way to each address", c.Name, other.Name, c.ServiceCIDR, other.ServiceCIDR)
			}
		}
	}
}

// checkEndpoint checks that the client of a peering can reach the gateway of its
// server.
func (t *Topology) checkEndpoint(f *yamlfile.File, in *peeringFile, p Peering) {
	server, ok := t.Cluster(p.Server)
	client, known := t.Cluster(p.Client)
	if !ok || !known || p.Server == p.Client {
		return
	}
	if p.Forward != nil {
		return // the client dials the router, which the wide area network knows
	}
	if server.NAT && p.Service != ServiceLoadBalancer {
		f.Problem(f.At(&in.Server), fmt.Sprintf("write server: %s, client: %s, or forward, or service: LoadBalancer, or remove nat", p.Client, p.Server), "%s is behind a NAT: nobody can dial its nodes", p.Server)
		return
	}
	at := f.At(&in.Service)
	if at.Line == 0 {
		at = f.At(in)
	}
	endpoint, key := server.NodeCIDR, "nodeCIDR"
	switch p.Service {
	case ServiceLoadBalancer:
		endpoint, key = server.LoadBalancer, "loadBalancerCIDR"
	case ServiceClusterIP:
		endpoint, key = server.ServiceCIDR, "serviceCIDR"
		if !server.RoutedServices {
			f.Problem(at, "write routedServices: true into cluster "+p.Server+", or service: NodePort here", "nobody outside %s has a route to its ClusterIPs", p.Server)
			return
		}
	}
	if !endpoint.IsValid() {
		return
	}
	for _, own := range networksOf(client) {
		if own.prefix.IsValid() && own.prefix.Overlaps(endpoint) && slices.Contains([]string{"podCIDR", "serviceCIDR", "nodeCIDR", "loadBalancerCIDR"}, own.key) {
			f.Problem(at, "take other ranges, or service: LoadBalancer", "%s can't dial %s by %s: the %s %s is in its own %s %s", p.Client, p.Server, p.Service, key, endpoint, own.key, own.prefix)
			return
		}
	}
	if p.Service != ServiceNodePort {
		return
	}
	// Of machines with the same addresses the WAN leads to the first ones only.
	for _, c := range t.Clusters {
		if c.Name != p.Server && c.Name != p.Client && !c.NAT && c.NodeCIDR.IsValid() && c.NodeCIDR.Overlaps(endpoint) {
			f.Problem(at, "give them nodeCIDRs of their own, or take service: LoadBalancer", "%s can't dial %s by NodePort: the nodeCIDR %s is %s's, too", p.Client, p.Server, endpoint, c.Name)
			return
		}
	}
}

// checkOutside checks where a host of no cluster is.
func (t *Topology) checkOutside(f *yamlfile.File, o *outsideFile, before []Outside) {
	if len(before) >= maxOutside {
		f.Problem(f.At(&o.Name), "", "at most %d hosts outside", maxOutside)
	}
	if !o.Address.IsValid() {
		return
	}
	at := f.At(&o.Address)
	if !o.Address.Is4() {
		f.Problem(at, "write an IPv4 address, such as 192.168.40.10", "%s is IPv6: all networks of a lab are IPv4", o.Address)
		return
	}
	lan := netip.PrefixFrom(o.Address, BehindRouter).Masked()
	if !checkNetwork(f, at, network{"the network of " + o.Name, lan, BehindRouter, BehindRouter}) {
		return
	}
	if last := o.Address.As4()[3]; last < 2 || last > 254 {
		f.Problem(at, "take one that ends with 2 to 254", "%s can't be a host's: the router has the first address of %s, and the last one is everybody's", o.Address, lan)
	}
	if c, ok := t.Cluster(o.Via); ok {
		for _, own := range networksOf(c) {
			if own.prefix.IsValid() && own.prefix.Overlaps(lan) {
				f.Problem(at, "take another network", "the network of %s, %s, overlaps the %s %s of cluster %s", o.Name, lan, own.key, own.prefix, c.Name)
				return
			}
		}
	}
	for _, other := range before {
		if other.Via == o.Via && lan.Contains(other.Address) {
			f.Problem(at, "take another network", "%s is behind the router of %s already, in the same network %s", other.Name, o.Via, lan)
		}
	}
}
