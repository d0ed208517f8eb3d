package v1beta1

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ConnectionType is the role of the local end of a connection.
// +kubebuilder:validation:Enum=Server;Client
type ConnectionType string

// Values of ConnectionType.
const (
	ConnectionTypeServer ConnectionType = "Server"
	ConnectionTypeClient ConnectionType = "Client"
)

// ConnectionStatusValue is the state of a connection.
type ConnectionStatusValue string

// Values of ConnectionStatusValue.
const (
	Connected       ConnectionStatusValue = "Connected"
	Connecting      ConnectionStatusValue = "Connecting"
	ConnectionError ConnectionStatusValue = "Error"
)

// ConnectionSpec says which connection it is.
type ConnectionSpec struct {
	// Type is the role of the local gateway.
	Type ConnectionType `json:"type"`
	// GatewayRef is the WgGatewayServer or WgGatewayClient behind it.
	GatewayRef corev1.ObjectReference `json:"gatewayRef"`
}

// ConnectionLatency is the round-trip time through the tunnel.
type ConnectionLatency struct {
	// Value with its unit, for example 12ms; N/A when it is not known.
	// +optional
	Value string `json:"value,omitempty"`
	// Timestamp of the measurement.
	// +optional
	Timestamp metav1.Time `json:"timestamp,omitempty"`
}

// RotationStatus is how far a change of keys is.
type RotationStatus struct {
	// ID of the change.
	ID string `json:"id"`
	// By says which side changes its key pair.
	// +kubebuilder:validation:Enum=Us;Peer
	By string `json:"by"`
	// Phase is Waiting, Trying, Ready, Committed or Aborted.
	Phase string `json:"phase"`
	// Message says why it was aborted.
	// +optional
	Message string `json:"message,omitempty"`
	// Silence is how long there was no session, once both have the new keys.
	// +optional
	Silence string `json:"silence,omitempty"`
}

// FeatureKeys is among the features of a peer whose gateway takes part in changes of keys.
const FeatureKeys = "keys"

// Values of RotationStatus.By.
const (
	RotationByUs   = "Us"
	RotationByPeer = "Peer"
)

// ConnectionEndpoint is where a peer says that its gateway can be dialled.
type ConnectionEndpoint struct {
	// Addresses or names of the gateway.
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MaxLength=253
	Addresses []string `json:"addresses"`
	// Port of WireGuard, UDP.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
}

// ConnectionPeer is what the gateway of the peer tells of its cluster, through the tunnel.
type ConnectionPeer struct {
	// Version of Isthmus that the gateway of the peer runs.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Version string `json:"version,omitempty"`
	// Features of the peer's gateway.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=32
	// +listType=set
	Features []string `json:"features,omitempty"`
	// Networks of the peer's cluster, as it calls them itself. Absent: it does not say.
	// +optional
	Networks *ClusterConfigCIDR `json:"networks,omitempty"`
	// Endpoint has all the places where the peer's gateway can be dialled, the best first.
	// Absent: it dials.
	// +optional
	Endpoint *ConnectionEndpoint `json:"endpoint,omitempty"`
	// MTU that the peer alone would give the tunnel.
	// +optional
	MTU int `json:"mtu,omitempty"`
	// ObservedGeneration of the spec of this cluster's GatewayServer or GatewayClient when
	// the peer told this. Its endpoint counts for this generation.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Since when the peer tells this.
	// +optional
	Since metav1.Time `json:"since,omitempty"`
}

// ConnectionStatus is what the gateway sees of its peer.
type ConnectionStatus struct {
	// Value is Connected, Connecting or Error.
	// +optional
	Value ConnectionStatusValue `json:"value,omitempty"`
	// Latency of the tunnel.
	// +optional
	Latency ConnectionLatency `json:"latency,omitempty"`
	// Rotation is the last change of keys.
	// +optional
	Rotation *RotationStatus `json:"rotation,omitempty"`
	// Peer is what the gateway of the peer tells of its cluster. Absent: it has told
	// nothing, as the gateways of other systems do.
	// +optional
	Peer *ConnectionPeer `json:"peer,omitempty"`
	// Conditions of the connection.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Connection is the state of the tunnel between two gateways.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=conn
// +kubebuilder:printcolumn:name="Type",type=string,JSONPath=`.spec.type`
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.value`
// +kubebuilder:printcolumn:name="Latency",type=string,priority=1,JSONPath=`.status.latency.value`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Connection struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ConnectionSpec   `json:"spec"`
	Status ConnectionStatus `json:"status,omitempty"`
}

// AgreesOnKeys reports whether the gateways can agree on new keys: they are connected, and
// the peer's has said that it takes part.
func (c *Connection) AgreesOnKeys() bool {
	return c.Status.Value == Connected && c.Status.Peer != nil && slices.Contains(c.Status.Peer.Features, FeatureKeys)
}

// ConnectionList is a list of Connections.
//
// +kubebuilder:object:root=true
type ConnectionList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Connection `json:"items"`
}
