package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// NetworkSpec says which network is wanted.
//
// +kubebuilder:validation:XValidation:rule="(has(self.preAllocated) ? self.preAllocated : 0) == (has(oldSelf.preAllocated) ? oldSelf.preAllocated : 0)",message="preAllocated can't be changed; delete the Network and create it anew"
type NetworkSpec struct {
	// CIDR that is wanted.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="cidr can't be changed; delete the Network and create it anew"
	CIDR networkingv1beta1.CIDR `json:"cidr"`
	// PreAllocated is how many of the first addresses are never given out.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2147483647
	PreAllocated int64 `json:"preAllocated,omitempty"`
}

// NetworkStatus has the network that was given.
type NetworkStatus struct {
	// CIDR that was given: the wanted one, or another of the same size.
	// +optional
	CIDR networkingv1beta1.CIDR `json:"cidr,omitempty"`
	// Conditions of the network.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Network is a range of addresses that is in use.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=net
// +kubebuilder:printcolumn:name="Desired CIDR",type=string,JSONPath=`.spec.cidr`
// +kubebuilder:printcolumn:name="Remapped CIDR",type=string,JSONPath=`.status.cidr`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Network struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   NetworkSpec   `json:"spec"`
	Status NetworkStatus `json:"status,omitempty"`
}

// NetworkList is a list of Networks.
//
// +kubebuilder:object:root=true
type NetworkList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Network `json:"items"`
}
