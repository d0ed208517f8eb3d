package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// None is what the fields with NAT in their names say of networks that are
// known by their own CIDR.
const None = "None"

// BackendWireGuard is the one backendType.
const BackendWireGuard = "wireguard"

// Keys of backend_config.
const (
	BackendPort      = "port"
	BackendPublicKey = "publicKey"
	// BackendServiceType is for TunnelEndpoints without an endpointIP.
	BackendServiceType = "serviceType"
)

// Keys of status.connection.peerConfiguration, besides those of
// backend_config.
const (
	PeerEndpointIP = "endpointIP"
	PeerAllowedIPs = "allowedIPs"
)

// ClusterIdentity names a cluster.
type ClusterIdentity struct {
	// ClusterID of the cluster.
	//
	// +kubebuilder:validation:MinLength=1
	ClusterID string `json:"clusterID"`
	// ClusterName is how people call it. It is shown, and nothing else.
	// +optional
	ClusterName string `json:"clusterName,omitempty"`
}

// TunnelEndpointSpec describes a peering: both clusters' networks, and where
// the gateway of the remote one is.
//
// +kubebuilder:validation:XValidation:rule="has(self.clusterIdentity) || has(self.clusterID)",message="give clusterIdentity, or clusterID as before v0.6"
type TunnelEndpointSpec struct {
	// ClusterIdentity of the remote cluster. Installations before v0.6 have
	// clusterID in its place.
	// +optional
	ClusterIdentity *ClusterIdentity `json:"clusterIdentity,omitempty"`
	// ClusterID of the remote cluster, when clusterIdentity is absent.
	// +optional
	ClusterID string `json:"clusterID,omitempty"`

	// LocalPodCIDR is the pod network of this cluster.
	// +optional
	LocalPodCIDR string `json:"localPodCIDR,omitempty"`
	// LocalNATPodCIDR is the network by which the remote cluster reaches
	// localPodCIDR, when that is taken there. Nothing depends on it here: the
	// remote cluster's gateway translates.
	// +optional
	// +kubebuilder:default=None
	LocalNATPodCIDR string `json:"localNATPodCIDR,omitempty"`
	// LocalExternalCIDR is the external network of this cluster.
	// +optional
	LocalExternalCIDR string `json:"localExternalCIDR,omitempty"`
	// LocalNATExternalCIDR is the network by which the remote cluster reaches
	// localExternalCIDR.
	// +optional
	// +kubebuilder:default=None
	LocalNATExternalCIDR string `json:"localNATExternalCIDR,omitempty"`

	// RemotePodCIDR is the pod network of the remote cluster, as it calls it
	// itself.
	// +optional
	RemotePodCIDR string `json:"remotePodCIDR,omitempty"`
	// RemoteNATPodCIDR is the network, as large as remotePodCIDR, by which this
	// cluster reaches it. None: remotePodCIDR itself, or, where that is taken,
	// a network that the controller chooses.
	// +optional
	// +kubebuilder:default=None
	RemoteNATPodCIDR string `json:"remoteNATPodCIDR,omitempty"`
	// RemoteExternalCIDR is the external network of the remote cluster, as it
	// calls it itself.
	// +optional
	RemoteExternalCIDR string `json:"remoteExternalCIDR,omitempty"`
	// RemoteNATExternalCIDR is the network by which this cluster reaches
	// remoteExternalCIDR, as remoteNATPodCIDR for pods.
	// +optional
	// +kubebuilder:default=None
	RemoteNATExternalCIDR string `json:"remoteNATExternalCIDR,omitempty"`

	// EndpointIP is the address or the name to dial. Absent: the remote
	// cluster dials. Of the two TunnelEndpoints of a peering one has it and
	// the other has not.
	// +optional
	EndpointIP string `json:"endpointIP,omitempty"`
	// BackendType is what carries the packets between the clusters: wireguard.
	// +optional
	BackendType string `json:"backendType,omitempty"`
	// BackendConfig has port, the UDP port that is dialled; publicKey, that of
	// the remote gateway in base64; and, without an endpointIP, serviceType of
	// the Service that the remote cluster dials: LoadBalancer, NodePort or
	// ClusterIP.
	// +optional
	BackendConfig map[string]string `json:"backend_config,omitempty"`
}

// ConnectionStatus is the state of a tunnel.
type ConnectionStatus string

// Values of ConnectionStatus.
const (
	Connected       ConnectionStatus = "Connected"
	Connecting      ConnectionStatus = "Connecting"
	ConnectionError ConnectionStatus = "Error"
)

// Connection is what is known about a tunnel.
type Connection struct {
	// Status is Connected, Connecting or Error.
	// +optional
	Status ConnectionStatus `json:"status,omitempty"`
	// StatusMessage says in words why.
	// +optional
	StatusMessage string `json:"statusMessage,omitempty"`
	// PeerConfiguration has endpointIP, port, publicKey and allowedIPs of the
	// remote gateway, as far as they are known.
	// +optional
	PeerConfiguration map[string]string `json:"peerConfiguration,omitempty"`
}

// Phase is how far a TunnelEndpoint has come.
type Phase string

// Values of Phase.
const (
	PhaseNew       Phase = "New"       // not everything is there yet
	PhaseProcessed Phase = "Processed" // all networks are known and the gateway runs
	PhaseError     Phase = "Error"     // see the condition Accepted
)

// TunnelEndpointStatus is what became of a TunnelEndpoint.
type TunnelEndpointStatus struct {
	// Phase is New, Processed or Error.
	// +optional
	Phase Phase `json:"phase,omitempty"`
	// LocalTunnelPublicIP is where the remote cluster dials, if it does.
	// +optional
	LocalTunnelPublicIP string `json:"localTunnelPublicIP,omitempty"`
	// RemoteTunnelPublicIP is where this cluster dials, if it does.
	// +optional
	RemoteTunnelPublicIP string `json:"remoteTunnelPublicIP,omitempty"`
	// LocalTunnelPrivateIP is the local gateway's address inside the tunnel.
	// +optional
	LocalTunnelPrivateIP string `json:"localTunnelPrivateIP,omitempty"`
	// RemoteTunnelPrivateIP is the remote gateway's address inside the tunnel.
	// +optional
	RemoteTunnelPrivateIP string `json:"remoteTunnelPrivateIP,omitempty"`
	// TunnelIFaceIndex of the tunnel's link. Not written: the link is in a pod.
	// +optional
	TunnelIFaceIndex int `json:"tunnelIFaceIndex,omitempty"`
	// TunnelIFaceName is the tunnel's link in the gateway's pod.
	// +optional
	TunnelIFaceName string `json:"tunnelIFaceName,omitempty"`
	// VethIFaceIndex of the host's link towards the gateway. Not written: the
	// gateway is a pod like others, and its link is the CNI's.
	// +optional
	VethIFaceIndex int `json:"vethIFaceIndex,omitempty"`
	// VethIFaceName of that link. Not written.
	// +optional
	VethIFaceName string `json:"vethIFaceName,omitempty"`
	// VethIP is the address of that link. Not written.
	// +optional
	VethIP string `json:"vethIP,omitempty"`
	// GatewayIP is the address of the gateway pod that carries the traffic.
	// +optional
	GatewayIP string `json:"gatewayIP,omitempty"`
	// Connection is the state of the tunnel.
	// +optional
	Connection Connection `json:"connection,omitempty"`
	// Conditions of the TunnelEndpoint, among them Accepted.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// TunnelEndpoint holds all about a peering, as older installations write it.
// For each of Configuration, GatewayServer or GatewayClient, and PublicKey of
// the remote cluster that nobody wrote, the controller makes one of the same
// name from it.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=tep
// +kubebuilder:printcolumn:name="Peering Cluster ID",type=string,JSONPath=`.spec['clusterID','clusterIdentity.clusterID']`
// +kubebuilder:printcolumn:name="Endpoint IP",type=string,JSONPath=`.spec.endpointIP`,priority=1
// +kubebuilder:printcolumn:name="Backend type",type=string,JSONPath=`.spec.backendType`
// +kubebuilder:printcolumn:name="Connection status",type=string,JSONPath=`.status.connection.status`
// +kubebuilder:printcolumn:name="Phase",type=string,priority=1,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type TunnelEndpoint struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   TunnelEndpointSpec   `json:"spec"`
	Status TunnelEndpointStatus `json:"status,omitempty"`
}

// TunnelEndpointList is a list of TunnelEndpoints.
//
// +kubebuilder:object:root=true
type TunnelEndpointList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []TunnelEndpoint `json:"items"`
}
