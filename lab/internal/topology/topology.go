// Package topology reads the files of topologies/: which clusters exist, who
// peers with whom, which hosts and pods there are. It says nothing about how
// that is built; see package world.
package topology

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"
)

// A Topology is what exists in a lab, as written, defaults filled in.
type Topology struct {
	Name     string // of the file, without .yaml
	File     string
	Drawing  string // the comment at the top of the file
	Clusters []Cluster
	Peerings []Peering
	Outside  []Outside
	Pods     []Pod
	// Overlay is OverlayAuto where the installation chooses; empty: the run
	// says which.
	Overlay string
	// Install is how the appliance comes into the clusters; default
	// InstallChart.
	Install string
	// OfOthers: no file says so, but the run: somebody else has made the clusters,
	// and works with them.
	OfOthers bool
}

// How the appliance comes into the clusters.
const (
	// InstallChart applies what the chart renders to, beside the start of
	// everything else. Helm has no release of it.
	InstallChart = "chart"
	// InstallCLI runs isthmusctl in every cluster, as an operator does.
	InstallCLI = "isthmusctl"
	// InstallNone leaves it to scenarios. The API has nothing of the appliance.
	InstallNone = "none"
)

// OverlayAuto leaves it to the installation by which overlay nodes and gateways
// are joined.
const OverlayAuto = "auto"

// A Cluster is one Kubernetes cluster. Its name is its cluster ID.
type Cluster struct {
	Name         string
	Nodes        int
	PodCIDR      netip.Prefix // no default: required
	ServiceCIDR  netip.Prefix // no default: required
	NodeCIDR     netip.Prefix // default 172.18.<index from 1>.0/24
	ExternalCIDR netip.Prefix // default 10.70.0.0/16
	InternalCIDR netip.Prefix // default 10.80.0.0/16
	CNI          string       // default CNIBridge
	Masquerade   string       // of pods that leave the cluster, on their nodes; empty: none
	KubeProxy    string       // default ProxyNFTables
	Runtime      string       // what runs containers; default RuntimeProcess
	LoadBalancer netip.Prefix // of Services of that type; default 198.51.100.<16 × index from 0>/28
	MTU          int          // of the machines' network; default DefaultMTU
	WANMTU       int          // of the router's link to the wide area network; default DefaultMTU
	Impairment   Impairment   // of what the router sends to the wide area network
	BlocksICMP   bool         // the router drops all ICMP, what it would send itself included
	NAT          bool         // the router hides the nodes behind its own address, as a home router does
	// RoutedServices: other networks have a route to the serviceCIDR, as
	// inside of a company.
	RoutedServices  bool
	Flat            bool          // nodes have addresses of the podCIDR, as pods of flat networks do
	Controllers     int           // replicas of the appliance's controller; default 1
	NodeGracePeriod time.Duration // after which a node that is silent is not ready; default DefaultNodeGracePeriod
	Absent          []int         // nodes, from 1, that join later: no host, no Node object
	RPFilter        int           // of the nodes' links; default RPFilterLoose
	SourceCheck     bool          // the LAN drops packets with a source that is not their node's
}

// Reverse-path filters of a node's links, as the kernel counts them
// (ip-sysctl: rp_filter).
const (
	RPFilterOff    = 0
	RPFilterStrict = 1
	RPFilterLoose  = 2
)

// Present returns the numbers of the nodes that are there from the start.
func (c Cluster) Present() []int {
	var out []int
	for n := 1; n <= c.Nodes; n++ {
		if !slices.Contains(c.Absent, n) {
			out = append(out, n)
		}
	}
	return out
}

// dnsHost is the host part of the address of a cluster's DNS, as kubeadm has it
// (kubeadm's constants.GetDNSIP).
const dnsHost = 10

// DNSAddress is the address of the Service kube-dns in a cluster with real nodes:
// where their kubelets send pods, and where CoreDNS is. services is the cluster's
// serviceCIDR.
func DNSAddress(services netip.Prefix) netip.Addr {
	a := services.Masked().Addr()
	for range dnsHost {
		a = a.Next()
	}
	return a
}

// What a cluster can be made of.
const (
	CNIBridge  = "bridge"  // bridge and host-local, routes between the nodes
	CNIPtP     = "ptp"     // ptp and host-local, routes between the nodes
	CNIFlannel = "flannel" // flanneld, VXLAN between the nodes
	// CNIIPPool is as Calico: addresses of blocks of a pool, a route per pod, and
	// links of pods that only carry what has the pod's own address.
	CNIIPPool = "ippool"
	// CNIVPC is as AWS's VPC CNI: a second interface of each node is for its pods,
	// rules by their addresses lead there, and the network drops what leaves by
	// an interface with an address that is not of it.
	CNIVPC = "vpc"

	ProxyNFTables = "nftables"
	ProxyIPTables = "iptables"
	ProxyIPVS     = "ipvs" // IP virtual servers, and ipset

	// RuntimeProcess is the lab's own kubelet, for which containers are
	// processes; RuntimeContainerd the real one with containerd.
	RuntimeProcess    = "process"
	RuntimeContainerd = "containerd"

	// Who masquerades pods that leave the cluster, as its CNI would: a rule of
	// iptables, one of nftables, or one of nftables as early as kindnet's.
	MasqueradeIPTables = "iptables"
	MasqueradeNFTables = "nftables"
	MasqueradeKindnet  = "kindnet"
)

// blockBits is the length of a block, Calico's default (IPPool: blockSize).
const blockBits = 26

// PodBlock is where the pods of a cluster's n-th node, from 1, have their
// addresses with CNIIPPool: blocks are given from the end of the podCIDR, so that
// they are in no node's own podCIDR, which Kubernetes gives from its beginning.
func PodBlock(podCIDR netip.Prefix, n int) netip.Prefix {
	b := podCIDR.Masked().Addr().As4()
	first := binary.BigEndian.Uint32(b[:])
	size := uint64(1) << (32 - podCIDR.Bits())
	binary.BigEndian.PutUint32(b[:], uint32(uint64(first)+size-uint64(n)<<(32-blockBits)))
	return netip.PrefixFrom(netip.AddrFrom4(b), blockBits)
}

// DefaultMTU is that of Ethernet.
const DefaultMTU = 1500

// DefaultNodeGracePeriod is far longer than that of Kubernetes (50 s since 1.32,
// kube-controller-manager's --node-monitor-grace-period): an emulated machine may
// stall for that long.
const DefaultNodeGracePeriod = 10 * time.Minute

// Features that a topology can need of the kernel.
const (
	FeatureNetem     = "netem"
	FeatureIPVS      = "ipvs"
	FeatureWireGuard = "wireguard" // the kernel's own
)

// Features are what a topology needs of the kernel, whatever runs in it.
func (t *Topology) Features() []string {
	var out []string
	need := func(feature string, is bool) {
		if is && !slices.Contains(out, feature) {
			out = append(out, feature)
		}
	}
	for _, p := range t.Peerings {
		need(FeatureWireGuard, p.Implementation == ImplementationKernel)
	}
	for _, c := range t.Clusters {
		need(FeatureNetem, c.Impairment != Impairment{})
		need(FeatureIPVS, c.KubeProxy == ProxyIPVS)
	}
	for _, o := range t.Outside {
		need(FeatureNetem, o.Impairment != Impairment{})
	}
	return out
}

// A Peering joins two clusters by a gateway each. The client dials.
type Peering struct {
	Server, Client string
	Service        string // of the server's gateway; default ServiceNodePort
	MTU            int    // 0: derived from the underlay
	Implementation string // of WireGuard; default ImplementationAuto
	Objects        string // that it is written as; default ObjectsConfiguration
	Gateways       string // where the gateways are; default GatewaysPod
	// Forward is the port of the server's router that the client dials; nil: it
	// dials what the server's gateway says.
	Forward *Forward
	Absent  bool // scenarios connect it: it has no objects from the start
}

// A Forward is a port forwarding of a server's router, as a home or an office
// router has it: UDP to the router's address on the wide area network at Port
// goes to a node at NodePort, the one of the gateway's Service.
type Forward struct {
	Port     int `lab:"port,required" min:"1" max:"65535" doc:"of the router's address on the wide area network"`
	NodePort int `lab:"nodePort,required" min:"30000" max:"32767" doc:"of the gateway's Service"`
	Node     int `lab:"node" min:"1" max:"200" doc:"number of the node that it leads to, from 1; default 1"`
}

// How the gateway of a server is exposed, and what encrypts.
const (
	ServiceClusterIP    = "ClusterIP"
	ServiceNodePort     = "NodePort"
	ServiceLoadBalancer = "LoadBalancer"

	ImplementationAuto      = "auto"
	ImplementationKernel    = "kernel"
	ImplementationUserspace = "userspace"

	// Gateways are pods with a network of their own, or in a network namespace
	// of their node.
	GatewaysPod   = "pod"
	GatewaysNetNS = "netns"

	// The objects of a peering: Configuration, GatewayServer or GatewayClient,
	// and PublicKey; or a TunnelEndpoint for all of them.
	ObjectsConfiguration  = "Configuration"
	ObjectsTunnelEndpoint = "TunnelEndpoint"
)

// An Outside is a host that is in no cluster: on the wide area network, or on a
// network of its own behind a cluster's router.
type Outside struct {
	Name    string
	Address netip.Addr // invalid: one of the wide area network
	Via     string     // the cluster whose router leads to it; empty: none
	// Impairment is of what the host sends to the wide area network.
	Impairment Impairment
}

// A Pod is a pod that scenarios talk to and from: it runs the lab's probe.
type Pod struct {
	Cluster, Name string
	Node          int // from 1
	HostNetwork   bool
}

// Containerd tells whether nodes of a cluster have the real kubelet with containerd.
func (t *Topology) Containerd() bool {
	return slices.ContainsFunc(t.Clusters, func(c Cluster) bool { return c.Runtime == RuntimeContainerd })
}

// Cluster returns the cluster of that name.
func (t *Topology) Cluster(name string) (Cluster, bool) {
	i := slices.IndexFunc(t.Clusters, func(c Cluster) bool { return c.Name == name })
	if i < 0 {
		return Cluster{}, false
	}
	return t.Clusters[i], true
}

// Pod returns the pod of that name in that cluster.
func (t *Topology) Pod(cluster, name string) (Pod, bool) {
	i := slices.IndexFunc(t.Pods, func(p Pod) bool { return p.Cluster == cluster && p.Name == name })
	if i < 0 {
		return Pod{}, false
	}
	return t.Pods[i], true
}

// Peers returns the names of the clusters that a cluster peers with, in the
// order of the file, those among them that scenarios connect.
func (t *Topology) Peers(cluster string) []string { return peersOf(t.Peerings, cluster) }

// PresentPeers returns the names of the clusters that a cluster peers with from
// the start.
func (t *Topology) PresentPeers(cluster string) []string {
	return peersOf(t.PresentPeerings(), cluster)
}

// PresentPeerings returns the peerings that are there from the start.
func (t *Topology) PresentPeerings() []Peering {
	return slices.DeleteFunc(slices.Clone(t.Peerings), func(p Peering) bool { return p.Absent })
}

func peersOf(peerings []Peering, cluster string) []string {
	var peers []string
	for _, p := range peerings {
		switch cluster {
		case p.Server:
			peers = append(peers, p.Client)
		case p.Client:
			peers = append(peers, p.Server)
		}
	}
	return peers
}
