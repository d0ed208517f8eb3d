package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// GatewayReportStatus is what a gateway says of itself.
type GatewayReportStatus struct {
	// ObservedGeneration is the generation of the gateway object that the report is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Implementation of WireGuard that is in use: kernel or userspace.
	// +optional
	// +kubebuilder:validation:Enum=kernel;userspace
	Implementation string `json:"implementation,omitempty"`
	// MTU of the tunnel.
	// +optional
	MTU int `json:"mtu,omitempty"`
	// Endpoint of the peer, as it is now.
	// +optional
	Endpoint string `json:"endpoint,omitempty"`
	// LastHandshake is when the peer last proved who it is.
	// +optional
	LastHandshake *metav1.Time `json:"lastHandshake,omitempty"`
	// Applied lists the objects that the gateway was asked to apply.
	// +optional
	// +listType=map
	// +listMapKey=kind
	// +listMapKey=namespace
	// +listMapKey=name
	Applied []AppliedStatus `json:"applied,omitempty"`
	// Conditions of the gateway.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// GatewayReport is written by one gateway, about itself.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=gwr
// +kubebuilder:printcolumn:name="Implementation",type=string,JSONPath=`.status.implementation`
// +kubebuilder:printcolumn:name="MTU",type=integer,JSONPath=`.status.mtu`
// +kubebuilder:printcolumn:name="Peer",type=string,JSONPath=`.status.endpoint`
// +kubebuilder:printcolumn:name="Last Handshake",type=date,priority=1,JSONPath=`.status.lastHandshake`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GatewayReport struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Status GatewayReportStatus `json:"status,omitempty"`
}

// GatewayReportList is a list of GatewayReports.
//
// +kubebuilder:object:root=true
type GatewayReportList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GatewayReport `json:"items"`
}
