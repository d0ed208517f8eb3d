// Package world is where the nodes of a lab live: it plans a topology as
// values, builds it from network namespaces and links, runs a kubelet and a
// kube-proxy per node in it, and answers questions about it over HTTP.
//
// The agent (Serve) is inside: in a network namespace of the lab natively, or
// in the virtual machine. The Client is outside and speaks to the supervisor's
// control socket, which passes on what only the agent knows. Package world
// knows nothing of scenarios and nothing of what Isthmus does.
package world

import (
	"cmp"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// A Spec is a world as values: what Plan makes of a topology, and all that the
// agent needs to know to build it.
type Spec struct {
	Name     string        `json:"name"`
	WAN      netip.Prefix  `json:"wan"` // the network that joins the clusters
	Clusters []ClusterSpec `json:"clusters"`
	Outside  []HostSpec    `json:"outside,omitempty"`
}

// A ClusterSpec is one cluster: a LAN bridge with a router, a control plane
// and nodes on it.
type ClusterSpec struct {
	Name         string       `json:"name"`
	Index        int          `json:"index"` // from 1
	LAN          netip.Prefix `json:"lan"`
	Router       netip.Addr   `json:"router"`       // on the LAN
	RouterWAN    netip.Addr   `json:"routerWAN"`    // on the WAN
	ControlPlane netip.Addr   `json:"controlPlane"` // on the LAN; the API server is at APIServerPort
	Nodes        []NodeSpec   `json:"nodes"`
	PodCIDR      netip.Prefix `json:"podCIDR"`
	ServiceCIDR  netip.Prefix `json:"serviceCIDR"`
	ExternalCIDR netip.Prefix `json:"externalCIDR"`
	InternalCIDR netip.Prefix `json:"internalCIDR"`
	// LoadBalancer are the addresses of Services of that type. The router sends
	// each to one node; see LoadBalancerNode.
	LoadBalancer netip.Prefix `json:"loadBalancer"`
	CNI          string       `json:"cni"`        // a profile of package topology
	Masquerade   string       `json:"masquerade"` // who masquerades pods that leave the cluster; empty: nobody
	KubeProxy    string       `json:"kubeProxy"`  // its mode
	Runtime      string       `json:"runtime"`    // of containers, one of package topology
	MTU          int          `json:"mtu"`        // of the LAN
	WANMTU       int          `json:"wanMTU"`     // of the router's link to the WAN
	// Impairment is of what the router sends to the WAN.
	Impairment topology.Impairment `json:"impairment,omitzero"`
	// BlocksICMP: the router drops all ICMP, what it would send itself included.
	BlocksICMP bool `json:"blocksICMP,omitempty"`
	NAT        bool `json:"nat,omitempty"`
	// Forwards are ports of the router's address on the WAN that lead to nodes.
	Forwards []ForwardSpec `json:"forwards,omitempty"`
	// RoutedServices: other clusters' routers have a route to the service
	// addresses.
	RoutedServices bool `json:"routedServices,omitempty"`
	RPFilter       int  `json:"rpFilter"` // of the nodes' links, as in ip-sysctl
	// NodeGracePeriod is how long a node may be silent before it is not ready.
	NodeGracePeriod time.Duration `json:"nodeGracePeriod"`
	// SourceCheck drops what leaves a node with a source that is neither the
	// node's address nor in its podCIDRs.
	SourceCheck bool `json:"sourceCheck,omitempty"`
	// ID is the cluster ID, where the lab has not given it; see ClusterID.
	ID string `json:"id,omitempty"`
}

// ClusterID is what the appliance calls the cluster.
func (c ClusterSpec) ClusterID() string { return cmp.Or(c.ID, c.Name) }

// ObjectNode is the name, in the cluster, of the node whose objects have a name in
// the API.
func (c ClusterSpec) ObjectNode(object string) string {
	for _, n := range c.Nodes {
		if n.ObjectName() == object {
			return n.Name
		}
	}
	return object
}

// A NodeSpec is one node: a host on its cluster's LAN.
type NodeSpec struct {
	Name string     `json:"name"` // in its cluster, "node-1"
	Addr netip.Addr `json:"addr"`
	// PodAddr is the address of PodInterface, a second link to the LAN that is for
	// the node's pods; none with most CNIs.
	PodAddr netip.Addr `json:"podAddr,omitzero"`
	Absent  bool       `json:"absent,omitempty"` // at the start; it may join later
	// Object is the name of its Node, where the lab has not named it; see ObjectName.
	Object string `json:"object,omitempty"`
}

// ObjectName is the name of the node's objects in the API: its Node and what is made
// for it.
func (n NodeSpec) ObjectName() string { return cmp.Or(n.Object, n.Name) }

// A HostSpec is a host of no cluster: on the WAN, or behind a cluster's router.
type HostSpec struct {
	Name string       `json:"name"`
	Addr netip.Addr   `json:"addr"`
	LAN  netip.Prefix `json:"lan,omitzero"` // its network behind the router
	Via  string       `json:"via,omitempty"`
	// Impairment is of what the host sends to the WAN.
	Impairment topology.Impairment `json:"impairment,omitzero"`
}

// A ForwardSpec is a port forwarding: UDP to the router's address on the WAN at
// Port goes to To.
type ForwardSpec struct {
	Port int            `json:"port"`
	To   netip.AddrPort `json:"to"`
}

// APIServerPort is where every cluster's API server listens.
const APIServerPort = 6443

// NodeInterface is the link of a host to its network, PodInterface that of a node
// for its pods, where there is one.
const (
	NodeInterface = "eth0"
	PodInterface  = "eth1"
)

// Names of hosts that are not nodes. In a cluster they follow its name:
// "milan/router".
const (
	RouterHost       = "router"
	ControlPlaneHost = "control-plane"
	GatewayHost      = "gateway"
	WANHost          = "wan" // the namespace that has the bridges: WAN and LANs
)

// Node returns the node of that name, and its number in the cluster, from 1.
func (c ClusterSpec) Node(name string) (n NodeSpec, number int, ok bool) {
	for i, n := range c.Nodes {
		if n.Name == name {
			return n, i + 1, true
		}
	}
	return NodeSpec{}, 0, false
}

// blocks are where the pods of each node have their addresses, by the name of
// the node, where the CNI has an IPAM of its own; empty: in their podCIDRs.
func (c ClusterSpec) blocks() map[string]netip.Prefix {
	if c.CNI != topology.CNIIPPool {
		return nil
	}
	out := map[string]netip.Prefix{}
	for i, n := range c.Nodes {
		out[n.Name] = topology.PodBlock(c.PodCIDR, i+1)
	}
	return out
}

// LoadBalancerNode is the node that the router sends a load balancer's address
// to, the i-th of the range from 1: one that is there from the start.
func (c ClusterSpec) LoadBalancerNode(i int) (NodeSpec, bool) {
	var there []NodeSpec
	for _, n := range c.Nodes {
		if !n.Absent {
			there = append(there, n)
		}
	}
	if len(there) == 0 {
		return NodeSpec{}, false
	}
	return there[(i-1)%len(there)], true
}

// LoadBalancerAddress is the i-th address of the range, from 1; false: there
// are not so many.
func (c ClusterSpec) LoadBalancerAddress(i int) (netip.Addr, bool) {
	a := nth(c.LoadBalancer, i)
	return a, c.LoadBalancer.Contains(a) && c.LoadBalancer.Contains(a.Next())
}

// ClusterOf is the name of the cluster with an ID; of an ID that none of them has it is
// no cluster's name.
func (s Spec) ClusterOf(id string) string {
	named := false
	for _, c := range s.Clusters {
		if c.ClusterID() == id {
			return c.Name
		}
		named = named || c.Name == id
	}
	if named { // a further peer's ID is the name that scenarios have for another cluster
		return "cluster-id:" + id
	}
	return id
}

// Cluster returns the cluster of that name.
func (s Spec) Cluster(name string) (ClusterSpec, bool) {
	for _, c := range s.Clusters {
		if c.Name == name {
			return c, true
		}
	}
	return ClusterSpec{}, false
}
