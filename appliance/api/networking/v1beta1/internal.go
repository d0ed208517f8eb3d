package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Overlay is how packets get from nodes to gateways and back.
// +kubebuilder:validation:Enum=geneve;vxlan
type Overlay string

// Values of Overlay.
const (
	OverlayGeneve Overlay = "geneve"
	OverlayVXLAN  Overlay = "vxlan"
)

// InternalFabricNodeInterface is the nodes' end of the links to a gateway.
type InternalFabricNodeInterface struct {
	// Name of the link on every node.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=15
	Name string `json:"name"`
}

// InternalFabricGatewayInterface is the gateway's end of its links to nodes.
type InternalFabricGatewayInterface struct {
	// IP of the gateway, of the internal CIDR.
	IP IP `json:"ip"`
}

// InternalFabricSpecInterface has both ends of the links.
type InternalFabricSpecInterface struct {
	// Node is the nodes' end.
	Node InternalFabricNodeInterface `json:"node"`
	// Gateway is the gateway's end.
	Gateway InternalFabricGatewayInterface `json:"gateway"`
}

// InternalFabricSpec is what nodes need to know about one gateway.
type InternalFabricSpec struct {
	// MTU of the links; 0: derived from the network underneath.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	MTU int `json:"mtu,omitempty"`
	// TunnelMTU is the MTU of the gateway's tunnel, as the gateway reported it; 0: not known yet.
	// Routes of nodes to RemoteCIDRs have it where their link takes more.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	TunnelMTU int `json:"tunnelMTU,omitempty"`
	// RemoteCIDRs are the networks that the gateway leads to, as this cluster calls them.
	// +optional
	RemoteCIDRs []CIDR `json:"remoteCIDRs,omitempty"`
	// Interface describes the links between nodes and gateway.
	Interface InternalFabricSpecInterface `json:"interface"`
	// GatewayIP is the address of the gateway pod that carries the traffic.
	GatewayIP IP `json:"gatewayIP"`
	// GatewayNode is the node that this pod runs on.
	// +optional
	GatewayNode string `json:"gatewayNode,omitempty"`
	// GatewayGone says that this pod has ended, and that there is no other one yet. Somebody else
	// may have its address by now.
	// +optional
	GatewayGone bool `json:"gatewayGone,omitempty"`
	// Overlay between nodes and gateway; absent: geneve.
	// +optional
	Overlay Overlay `json:"overlay,omitempty"`
	// HostInterface is the link that leads from GatewayNode to a gateway in a network namespace
	// of that node (liqo.host, or liqo.host.1 and so on where there are several gateways); absent:
	// the gateway is a pod with a network of its own.
	// +optional
	// +kubebuilder:validation:MaxLength=15
	HostInterface string `json:"hostInterface,omitempty"`
	// PeerCIDRs are the networks of all peers of the cluster, as this cluster calls them. The gateway
	// drops what comes from there for itself, and not for a pod.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4096
	PeerCIDRs []CIDR `json:"peerCIDRs,omitempty"`
	// EndpointPorts are the UDP ports of nodes by which the peer's gateway reaches this one: those of
	// its Service, or of WireGuard itself where the gateway is in a network namespace of its node.
	// Nodes let the networks of peers reach nothing else of themselves.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	EndpointPorts []int32 `json:"endpointPorts,omitempty"`
}

// InternalFabric joins all nodes of the cluster to one gateway.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:categories=liqo,shortName=if;ifabric
// +kubebuilder:printcolumn:name="Gateway IP",type=string,JSONPath=`.spec.gatewayIP`
// +kubebuilder:printcolumn:name="Gateway Node",type=string,priority=1,JSONPath=`.spec.gatewayNode`
// +kubebuilder:printcolumn:name="Overlay",type=string,priority=1,JSONPath=`.spec.overlay`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type InternalFabric struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec InternalFabricSpec `json:"spec"`
}

// InternalFabricList is a list of InternalFabrics.
//
// +kubebuilder:object:root=true
type InternalFabricList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []InternalFabric `json:"items"`
}

// InternalNodeGatewayInterface is the gateways' end of the links to a node.
type InternalNodeGatewayInterface struct {
	// Name of the link on every gateway.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=15
	Name string `json:"name"`
}

// InternalNodeNodeInterface is the node's end of its links to gateways.
type InternalNodeNodeInterface struct {
	// IP of the node, of the internal CIDR.
	IP IP `json:"ip"`
}

// InternalNodeSpecInterface has both ends of the links.
type InternalNodeSpecInterface struct {
	// Gateway is the gateways' end.
	Gateway InternalNodeGatewayInterface `json:"gateway"`
	// Node is the node's end.
	Node InternalNodeNodeInterface `json:"node"`
}

// InternalNodeSpec is what gateways need to know about one node.
type InternalNodeSpec struct {
	// Interface describes the links between node and gateways.
	Interface InternalNodeSpecInterface `json:"interface"`
	// Overlay that joins the node to gateways: what the installation asks for, or what was found
	// to be there on all nodes. Absent: not decided yet.
	// +optional
	Overlay Overlay `json:"overlay,omitempty"`
	// PodCIDRs are the networks of the pods on the node. What the node sends to a peer and is from
	// none of them gets the address of the node, so that its answer comes back to it. Absent: not
	// known yet.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4096
	PodCIDRs []CIDR `json:"podCIDRs,omitzero"`
	// PodNetworks are the networks of all pods of the cluster. They are written where the CNI gives
	// pods addresses outside of the podCIDRs of their nodes: then what has such an address, and comes
	// in by a link of the node's own pods, is from a pod of the node before PodCIDRs say so.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	PodNetworks []CIDR `json:"podNetworks,omitempty"`
	// OpenToPeers are those addresses of the node that IPs stand for, and the networks of Services,
	// whose addresses nodes have with kube-proxy in its mode ipvs. Peers reach no other address of
	// the node.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	OpenToPeers []CIDR `json:"openToPeers,omitempty"`
}

// InternalNodeStatusNodeIP has the addresses by which gateways see the node.
type InternalNodeStatusNodeIP struct {
	// Local is the node's address towards a gateway pod on the same node.
	// +optional
	Local *IP `json:"local,omitempty"`
	// Remote is the node's address towards a gateway pod on another node.
	// +optional
	Remote *IP `json:"remote,omitempty"`
}

// VTEP is the node's end of the VXLAN overlay: all that the other nodes need to reach it.
type VTEP struct {
	// IP is the address of the node below the overlay.
	IP IP `json:"ip"`
	// MAC is the address of the VXLAN link.
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{2}(:[0-9a-f]{2}){5}$`
	MAC string `json:"mac"`
}

// NeededFor says what an address is that a node can't do without.
//
// +kubebuilder:validation:Enum=APIServer;DNSServer;Router
type NeededFor string

// What a node needs addresses for.
const (
	NeededForAPIServer NeededFor = "APIServer" // it talks to the API server there
	NeededForDNS       NeededFor = "DNSServer" // its resolv.conf names it
	NeededForRouting   NeededFor = "Router"    // its packets to elsewhere, or to one of the others, go there
)

// NeededAddress is an address of another host that a node can't do without. No network of a peer
// may take it over.
type NeededAddress struct {
	// IP is the address.
	IP IP `json:"ip"`
	// For says what the address is.
	For NeededFor `json:"for"`
}

// InternalNodeStatus is what the node says of itself.
type InternalNodeStatus struct {
	// NodeIP has the addresses by which gateways see the node. Absent: none of them is known.
	// +optional
	NodeIP InternalNodeStatusNodeIP `json:"nodeIP,omitzero"`
	// Kernel is the release of the kernel that runs on the node.
	// +optional
	Kernel string `json:"kernel,omitempty"`
	// Overlays that the node's kernel has.
	// +optional
	// +listType=set
	Overlays []Overlay `json:"overlays,omitempty"`
	// WireGuard says whether the node's kernel has WireGuard. Where all kernels have it, gateways do
	// without /dev/net/tun. Absent: not known yet.
	// +optional
	WireGuard *bool `json:"wireGuard,omitempty"`
	// VTEP is the node's end of the VXLAN overlay, where that is in use.
	// +optional
	VTEP *VTEP `json:"vtep,omitempty"`
	// Needs lists the addresses of other hosts that the node can't do without: the API server's, if
	// the node reaches it by an address, DNS servers' and routers'.
	// +optional
	// +listType=map
	// +listMapKey=ip
	// +listMapKey=for
	// +kubebuilder:validation:MaxItems=64
	Needs []NeededAddress `json:"needs,omitempty"`
	// Addresses that the node has, without those of Isthmus, of loopback and of Services; the first
	// 256 of more.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	Addresses []IP `json:"addresses,omitempty"`
	// Applied lists the objects that the node was asked to apply.
	// +optional
	// +listType=map
	// +listMapKey=kind
	// +listMapKey=namespace
	// +listMapKey=name
	Applied []AppliedStatus `json:"applied,omitempty"`
	// Conditions of the node.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// InternalNode is a node as the gateways see it.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,categories=liqo,shortName=in;inode
// +kubebuilder:printcolumn:name="Node IP Local",type=string,JSONPath=`.status.nodeIP.local`
// +kubebuilder:printcolumn:name="Node IP Remote",type=string,JSONPath=`.status.nodeIP.remote`
// +kubebuilder:printcolumn:name="Overlay",type=string,priority=1,JSONPath=`.spec.overlay`
// +kubebuilder:printcolumn:name="VTEP",type=string,priority=1,JSONPath=`.status.vtep.ip`
// +kubebuilder:printcolumn:name="VTEP MAC",type=string,priority=1,JSONPath=`.status.vtep.mac`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type InternalNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   InternalNodeSpec   `json:"spec"`
	Status InternalNodeStatus `json:"status,omitempty"`
}

// InternalNodeList is a list of InternalNodes.
//
// +kubebuilder:object:root=true
type InternalNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []InternalNode `json:"items"`
}

// GeneveTunnelSpec says what a tunnel joins.
type GeneveTunnelSpec struct {
	// ID is the virtual network identifier, 24 bits.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=16777215
	ID uint32 `json:"id"`
	// InternalNodeRef is the node's end.
	InternalNodeRef *corev1.ObjectReference `json:"internalNodeRef"`
	// InternalFabricRef is the gateway's end.
	InternalFabricRef *corev1.ObjectReference `json:"internalFabricRef"`
}

// GeneveTunnel joins one node and one gateway.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:categories=liqo,shortName=gvtn
type GeneveTunnel struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec GeneveTunnelSpec `json:"spec"`
}

// GeneveTunnelList is a list of GeneveTunnels.
//
// +kubebuilder:object:root=true
type GeneveTunnelList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GeneveTunnel `json:"items"`
}
