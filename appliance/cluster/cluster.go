// Package cluster holds what one cluster knows about itself and its peers, as
// plain values read at one moment. Every address in it has been parsed;
// nothing past this point sees a string that may not be a CIDR.
//
// An object whose text did not parse is still there, with its Ref, and has an
// entry in [Snapshot.Invalid]: whoever needs it can say why it is unusable.
package cluster

import (
	"fmt"
	"net/netip"
	"time"
)

// A Ref names an object. Namespace is empty for cluster-scoped kinds.
type Ref struct {
	APIVersion, Kind, Namespace, Name, UID string
}

// Meta is what all parsed objects share.
type Meta struct {
	Ref
	Generation  int64
	Labels      map[string]string
	Annotations map[string]string
	Deleting    bool
	Created     time.Time
}

// An InvalidError says that a field of an object can't be used as written.
type InvalidError struct {
	Object Ref
	Field  string // path as kubectl explain prints it, e.g. spec.remote.cidr.pod[1]
	Value  string
	Reason string // what is wrong and what to write instead
	// Note says that the value is used all the same, as Reason says it was
	// read: a CIDR with host bits, for one, is masked.
	Note bool
}

// Error says which field of which object it is, and what to do.
func (e InvalidError) Error() string {
	return fmt.Sprintf("%s: %s", e.Object, e.Message())
}

// Message is Error without the object.
func (e InvalidError) Message() string {
	return fmt.Sprintf("%s: %q %s", e.Field, e.Value, e.Reason)
}

// String returns Kind namespace/name.
func (r Ref) String() string {
	if r.Namespace == "" {
		return r.Kind + " " + r.Name
	}
	return r.Kind + " " + r.Namespace + "/" + r.Name
}

// A Snapshot is one consistent view of all objects that the controller reads.
// Slices are sorted by namespace and name.
type Snapshot struct {
	ID        string // cluster ID, from the ConfigMap
	Namespace string // system namespace
	Options   Options
	// Now is when this was so: what is to happen in time is decided by it. Zero: no
	// time passes.
	Now time.Time

	Nodes       []Node
	Pods        []Pod
	Pulls       []Pull
	NodeDaemons []Pod // those of the appliance itself
	Services    []Service
	// OtherServices are those that the controller did not make.
	OtherServices []Ref
	// OtherNodePorts are the ports of nodes that these have.
	OtherNodePorts map[uint16]Ref
	Deployments    []Deployment
	Secrets        []KeySecret
	Invitations    []Invitation // that are not done
	Namespaces     []Namespace

	Configurations  []Configuration
	Connections     []Connection
	GatewayServers  []Gateway
	GatewayClients  []Gateway
	ServerTemplates []Template
	ClientTemplates []Template
	PublicKeys      []PublicKey
	BlockedKeys     BlockedKeys
	Fabrics         []InternalFabric
	InternalNodes   []InternalNode
	Tunnels         []GeneveTunnel
	Routes          []RouteConfiguration
	Firewalls       []FirewallConfiguration
	Reports         []GatewayReport
	Networks        []Network
	IPs             []IP
	ForeignClusters []ForeignCluster
	TunnelEndpoints []TunnelEndpoint

	// APIServers are the addresses of the API server itself, to which the
	// Service default/kubernetes leads.
	APIServers []netip.Addr

	// Invalid lists what did not parse. The field is left at its zero value
	// in the object, and dropped from a list.
	Invalid []InvalidError
	// Notes lists what was read differently than it is written.
	Notes []InvalidError
}

// Options are settings of the installation that the plan depends on.
type Options struct {
	GenevePort   uint16         // default 6091
	RulePriority uint32         // first priority of the band on nodes; 0: default
	Pools        []netip.Prefix // where remapped networks are taken from
	Overlay      Overlay        // empty: Geneve
	// IPv6 lets peerings carry IPv6, which needs gateways' namespaces that forward it. No
	// setting of the controller switches it on: a namespace forwards no IPv6
	// (net.ipv6.conf.all.forwarding is 0 in a new one, and a container can't write it).
	IPv6 bool
	// Transit says that any two peers reach each other through this cluster, and
	// TransitPairs which do where it is false. What comes from one peer never
	// goes on to another otherwise.
	Transit      bool
	TransitPairs [][2]string // remote cluster IDs, either way round
	// Revision tells the controller that plans from those before it: the
	// pod-template-hash of its pod. Empty: it is in none.
	Revision string
}

// A Node is a Kubernetes Node that is not a virtual one.
type Node struct {
	Meta
	Addresses []netip.Addr // InternalIPs, in the order of the status
	// Reached are the names and addresses at which the node can be reached, the
	// best first: ExternalDNS, ExternalIP, InternalDNS, InternalIP.
	Reached  []string
	PodCIDRs []netip.Prefix // of spec
	Ready    bool
	// Lost says that the node's kubelet has reported once and is not ready, or has
	// not been heard of. Unschedulable: it takes no new pods.
	Lost, Unschedulable bool
}

// A Pod is a running pod that matters to routing: a gateway, or a pod whose
// address is outside the podCIDRs of its node. Of host-network pods only those
// of gateways are here.
type Pod struct {
	Meta
	Node        string
	IPs         []netip.Addr
	HostNetwork bool // IPs are those of the node
	Running     bool // phase Running, not being deleted
	Ready       bool
	Started     time.Time // by the clock of its node; zero: its node has not seen it
}

// A Pull is a pod that pulls the images of a gateway's new template, and ends.
type Pull struct {
	Meta
	Node   string // empty: no node has taken it
	Pulled bool   // all images are there
	// Over says that it has ended, or that its node wanted no more pods: it says
	// nothing more.
	Over bool
	// Image is one that can't be pulled, and Why is the reason. Both are empty until the
	// node reports it.
	Image, Why string
}

// A Service is a Service that exposes a gateway.
type Service struct {
	Meta
	Type       string // ClusterIP, NodePort, LoadBalancer
	ClusterIPs []netip.Addr
	Ports      []ServicePort
	Ingress    []string // load balancer addresses, IPs before names
}

// A ServicePort is a port of a Service.
type ServicePort struct {
	Protocol       string
	Port, NodePort uint16
}

// A Deployment is the Deployment of a gateway.
type Deployment struct {
	Meta
	Owner                   string   // UID of the GatewayServer or GatewayClient that it was made for
	Secrets                 []string // that its pods mount
	Images                  []string // of its pods, each once and sorted
	Strategy                string   // Recreate or RollingUpdate
	Replicas, ReadyReplicas int32
	// Observed says that the status is about the spec as it is, Updated that pods are there
	// for the present template and for no other.
	Observed, Updated bool
}

// A KeySecret is a Secret with WireGuard keys, without the private one.
type KeySecret struct {
	Meta
	PublicKey  []byte
	HasPrivate bool
}

// An Invitation is one of this cluster to another, or one that this cluster has accepted.
type Invitation struct {
	Meta
	RemoteID  string
	Accepting bool // this cluster is the one that was invited
	Asks      bool // somebody here has to say yes to the answer, or no
	Used      bool // both sides have agreed
	// Expires is when it can't be used any more, by the clock of the inviting cluster.
	Expires time.Time
}

// A Namespace is a tenant namespace, the system namespace, or another one with a gateway.
type Namespace struct{ Meta }

// CIDRs are the networks of one cluster.
type CIDRs struct{ Pod, External []netip.Prefix }

// A Configuration says what the networks of a remote cluster are.
type Configuration struct {
	Meta
	RemoteID string // label liqo.io/remote-cluster-id
	Local    CIDRs  // spec.local
	Remote   CIDRs  // spec.remote: as the peer calls them
	Remapped CIDRs  // status.remote: as we call them, index by index; empty until decided
	Own      CIDRs  // status.local: this cluster's as they are, to be told the peer; empty: not known
	// Configured is the condition NetworkCIDRsConfigured, true for this
	// generation.
	Configured bool
	// Follow is what the peer may add to Remote by telling it; nil: nothing.
	Follow *Follow
	// Followed are the networks that it has added, and Refused those that it may not.
	Followed []Followed
	Refused  []Refused
	// Blocked says that the peer is cut off, and Block by whom, when and why, as it is
	// written; it may be empty.
	Blocked bool
	Block   string
}

// Ours are the networks of this cluster: as they are, where that is known, and as spec.local
// says otherwise. That is written once, so it does not have what was added later.
func (c *Configuration) Ours() CIDRs {
	ours := c.Own
	if len(ours.Pod) == 0 {
		ours.Pod = c.Local.Pod
	}
	if len(ours.External) == 0 {
		ours.External = c.Local.External
	}
	return ours
}

// All returns the pod networks and the external networks.
func (c CIDRs) All() []netip.Prefix {
	return append(append([]netip.Prefix{}, c.Pod...), c.External...)
}

// Roles of a gateway.
const (
	Server = "server"
	Client = "client"
)

// A Gateway is a GatewayServer or a GatewayClient.
type Gateway struct {
	Meta
	Role        string // Server or Client
	RemoteID    string
	TemplateRef Ref
	MTU         int    // 0: derive from the underlay
	SecretName  string // spec.secretRef; empty: ours
	// ServiceType, Port and NodePort are for servers.
	ServiceType    string
	Port, NodePort uint16
	LoadBalancerIP string
	// Addresses and Port are the endpoint to dial, for clients.
	Addresses []string
	// Reached is where the peer can dial, of servers; nil: that is not known.
	Reached *Endpoint
	// Raw is the whole object as JSON, for templates (.Spec …).
	Raw []byte
}

// An Endpoint is where a gateway can be dialled.
type Endpoint struct {
	Addresses []string // or names, the best first
	Port      uint16   // UDP
}

// A Template is a WgGatewayServerTemplate or WgGatewayClientTemplate.
type Template struct {
	Meta
	ObjectAPIVersion, ObjectKind string
	JSON                         []byte // spec.template
}

// A Connection is the Connection of a peering, with the status that the
// gateway reported.
type Connection struct {
	Meta
	RemoteID string
	Type     string // Server or Client
	Value    string // Connected, Connecting, Error
	Why      string // of its condition Connected; empty: not known
	Blocked  bool   // the gateway has cut the peer off, as it says
	Peer     *Told  // by the peer's gateway; nil: nothing
	Reported time.Time
}

// Told is what the gateway of a peer has told of its cluster.
type Told struct {
	Version    string // of its Isthmus
	Features   []string
	Networks   *CIDRs    // nil: it does not say
	Endpoint   *Endpoint // nil: it dials
	MTU        int       // 0: it does not say
	Generation int64     // of the spec of this cluster's own gateway, for which the endpoint counts
	Since      time.Time
}

// A PublicKey is the public key of a remote gateway.
type PublicKey struct {
	Meta
	RemoteID string
	Key      []byte
	// PresharedKey is the fingerprint of the key that the gateways of the peering have
	// besides; empty: they have none.
	PresharedKey string
	// Learned says that Key and PresharedKey are not what the spec and the annotation
	// say, but what the gateways have agreed on since.
	Learned bool
}

// An InternalFabric is what nodes need to know about one gateway.
type InternalFabric struct {
	Meta
	RemoteID      string
	MTU           int            // of the links; 0: derive from the underlay
	TunnelMTU     int            // of the gateway's tunnel; 0: not known yet
	RemoteCIDRs   []netip.Prefix // remapped
	NodeInterface string         // name of the Geneve link on every node
	GatewayIP     netip.Addr     // address of the gateway pod
	InternalIP    netip.Addr     // the gateway's address of the internal CIDR
	GatewayNode   string         // Node of the gateway pod
	GatewayGone   bool           // that pod has ended, and there is no other one yet
	Overlay       Overlay        // empty: Geneve
	HostInterface string         // link of GatewayNode to a gateway in a namespace of it; empty: the gateway is a pod
	PeerCIDRs     []netip.Prefix // of all peers of the cluster, remapped
	EndpointPorts []uint16       // UDP ports of nodes that lead to the gateway
}

// An InternalNode is what gateways need to know about one node.
type InternalNode struct {
	Meta
	GatewayInterface string         // name of the Geneve link on every gateway
	InternalIP       netip.Addr     // the node's address of the internal CIDR
	PodCIDRs         []netip.Prefix // of the pods on the node; nil: not known yet
	// PodNetworks are those of all pods of the cluster, where pods are outside of
	// the podCIDRs of their nodes.
	PodNetworks []netip.Prefix
	OpenToPeers []netip.Prefix // addresses of the node that peers may reach
	Addresses   []netip.Addr   // that the node has, as it says
	// Local and Remote are the node's underlay addresses as seen by a
	// gateway on the same node and on another one; invalid: not known yet.
	Local, Remote netip.Addr
	Overlay       Overlay   // that joins it to gateways; empty: not decided
	Overlays      []Overlay // that its kernel has; empty: not known yet
	WireGuard     *bool     // whether its kernel has it; nil: not known yet
	VTEP          VTEP      // of the VXLAN overlay; zero: not known
	Needs         []Needed  // addresses that the node can't do without
	Applied       []Applied
	Conditions    []Condition
}

// An Overlay is how packets get from nodes to gateways and back.
type Overlay string

// The overlays. OverlayAuto is for Options alone: what all nodes have, Geneve
// first.
const (
	OverlayGeneve Overlay = "geneve"
	OverlayVXLAN  Overlay = "vxlan"
	OverlayAuto   Overlay = "auto"
)

// A VTEP is a node's end of the VXLAN overlay (RFC 7348): the address of the
// node and that of its VXLAN link.
type VTEP struct {
	IP  netip.Addr
	MAC [6]byte
}

// A Needed address is one of another host that a node can't do without.
type Needed struct {
	IP  netip.Addr
	For string // APIServer, DNSServer or Router
}

// A GeneveTunnel joins a node and a gateway.
type GeneveTunnel struct {
	Meta
	VNI    uint32
	Node   string // InternalNode
	Fabric Ref    // InternalFabric: namespace and name
}

// Applied is one host's report on one object.
type Applied struct {
	Object             Ref
	ObservedGeneration int64
	OK                 bool
	Message            string // of the error, when not OK
	Since              time.Time
}

// A Condition is one of what a host says of itself.
type Condition struct {
	Type, Reason, Message string
	OK                    bool // the status is not False
}

// A GatewayReport is what a gateway says of itself.
type GatewayReport struct {
	Meta
	MTU        int // of the tunnel; 0: not known
	Applied    []Applied
	Conditions []Condition
}

// A RouteConfiguration is a routing table with the rules that lead to it.
type RouteConfiguration struct {
	Meta
	Table string
	Rules []RouteRule
}

// A RouteRule selects packets; its routes are part of the one table.
type RouteRule struct {
	Dst, Src netip.Prefix
	IIF, OIF string
	Mark     uint32
	Priority uint32 // 0: by position in our band
	Routes   []TableRoute
}

// A TableRoute is a route of a RouteRule.
type TableRoute struct {
	Dst    netip.Prefix
	Src    netip.Addr
	Via    netip.Addr
	Dev    string
	OnLink bool
	Scope  string // as in the API; empty: global
}

// A FirewallConfiguration is an nftables table.
type FirewallConfiguration struct {
	Meta
	Table, Family string
	Chains        []Chain
}

// A Chain is a base chain of a FirewallConfiguration.
type Chain struct {
	Name, Type, Hook, Policy string
	Priority                 int32
	Filter                   []FilterRule
	NAT                      []NATRule
}

// A Match is one condition of a rule; a rule's matches are ANDed.
type Match struct {
	Negate bool // op neq
	// Exactly one of the following is set.
	IP    AddrRange
	Ports PortRange
	Proto string // tcp, udp
	Dev   string
	// Position is src or dst for IP and Ports, in or out for Dev.
	Position string
}

// An AddrRange is an inclusive range of addresses; a prefix or a single
// address is one too.
type AddrRange struct{ From, To netip.Addr }

// A PortRange is an inclusive range of ports.
type PortRange struct{ From, To uint16 }

// A FilterRule is a rule of a filter chain.
type FilterRule struct {
	Name    string // unique in the chain; empty: called by its place
	Match   []Match
	Action  string // ctmark, metamarkfromctmark, tcpmssclamp, accept, drop, reject, notrack
	Value   string
	Counter bool
}

// A NATRule is a rule of a nat chain.
type NATRule struct {
	Name  string // unique in the chain; empty: called by its place
	Match []Match
	Type  string       // dnat, snat, masquerade
	To    netip.Prefix // a single address is a full-length prefix; invalid for masquerade
	// ToIsPrefix says that To was written as a CIDR: host bits are kept.
	ToIsPrefix bool
}

// A Network is a range of addresses that is in use.
type Network struct {
	Meta
	CIDR         netip.Prefix // wanted
	Status       netip.Prefix // given; invalid: not yet
	PreAllocated int
}

// An IP is an address of the external CIDR that stands for another one.
type IP struct {
	Meta
	IP         netip.Addr
	NetworkRef Ref
	Masquerade bool
	// ServiceTemplate is the Service to make for it, as JSON; nil: none.
	ServiceTemplate []byte
	Status          netip.Addr
	CIDR            netip.Prefix
}

// A ForeignCluster is a remote cluster as the user sees it.
type ForeignCluster struct {
	Meta
	ClusterID string
}
