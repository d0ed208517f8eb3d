package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CIDR is an IPv4 or IPv6 network, for example 10.0.0.0/16. Host bits are
// masked when it is read.
//
// +kubebuilder:validation:Format=cidr
type CIDR string

// IP is an IPv4 or IPv6 address. The format named here does not exist in
// OpenAPI: crdgen writes it out as "ipv4 or ipv6".
//
// +kubebuilder:validation:Format=ip
type IP string

// String returns the network as it was written.
func (c CIDR) String() string { return string(c) }

// String returns the address as it was written.
func (i IP) String() string { return string(i) }

// InternalGatewayEndpoint says where the gateway pod that carries the traffic
// runs.
type InternalGatewayEndpoint struct {
	// IP is the address of the gateway pod.
	// +optional
	IP *IP `json:"ip,omitempty"`
	// Node is the name of the node that it runs on.
	// +optional
	Node *string `json:"node,omitempty"`
}

// AppliedStatus is what one host reports on one object that it was asked to
// put into its kernel.
type AppliedStatus struct {
	// Kind of the object.
	Kind string `json:"kind"`
	// Namespace of the object.
	Namespace string `json:"namespace"`
	// Name of the object.
	Name string `json:"name"`
	// ObservedGeneration is the generation of the object that the report is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// OK is true when the kernel holds everything that the object asks for.
	OK bool `json:"ok"`
	// Message is the reason why not, when OK is false.
	// +optional
	Message string `json:"message,omitempty"`
	// LastTransitionTime is when OK or Message last changed.
	// +optional
	LastTransitionTime metav1.Time `json:"lastTransitionTime,omitempty"`
}

// HostConditionType is what a host says of a Route- or FirewallConfiguration.
// +kubebuilder:validation:Enum=Applied;Error
type HostConditionType string

// Values of HostConditionType.
const (
	HostApplied HostConditionType = "Applied"
	HostError   HostConditionType = "Error"
)

// HostCondition says whether one host has applied the object.
type HostCondition struct {
	// Host that the condition is about: a node, or a gateway.
	Host string `json:"host"`
	// Type is Applied or Error.
	Type HostConditionType `json:"type"`
	// Status of the condition.
	Status metav1.ConditionStatus `json:"status"`
	// LastTransitionTime is when the condition last changed.
	// +optional
	LastTransitionTime metav1.Time `json:"lastTransitionTime,omitempty"`
}
