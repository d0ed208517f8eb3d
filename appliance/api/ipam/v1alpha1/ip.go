package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// ServiceTemplate is a Service to make for an IP.
type ServiceTemplate struct {
	// Metadata of the Service.
	// +optional
	Metadata networkingv1beta1.ObjectMeta `json:"metadata,omitempty"`
	// Spec of the Service.
	// +optional
	Spec corev1.ServiceSpec `json:"spec,omitempty"`
}

// IPSpec says which address is to be exposed.
//
// +kubebuilder:validation:XValidation:rule="has(self.networkRef) == has(oldSelf.networkRef) && (!has(self.networkRef) || self.networkRef == oldSelf.networkRef)",message="networkRef can't be changed; delete the IP and create it anew"
type IPSpec struct {
	// IP is the address as this cluster reaches it.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="ip can't be changed; delete the IP and create it anew"
	IP networkingv1beta1.IP `json:"ip"`
	// Masquerade is true when the host must see the node's address as the source.
	// +optional
	Masquerade *bool `json:"masquerade,omitempty"`
	// NetworkRef is the Network to take the address from; the first external
	// network when absent.
	// +optional
	NetworkRef *corev1.ObjectReference `json:"networkRef,omitempty"`
	// ServiceTemplate is a Service to make, whose only endpoint is the address.
	// +optional
	ServiceTemplate *ServiceTemplate `json:"serviceTemplate,omitempty"`
}

// IPStatus has the address that remote clusters use.
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.ip) || has(self.ip)",message="ip can't be taken back"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.cidr) || has(self.cidr)",message="cidr can't be taken back"
type IPStatus struct {
	// IP that stands for the address of the spec.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="ip can't be changed once it is set"
	IP networkingv1beta1.IP `json:"ip,omitempty"`
	// CIDR that it was taken from.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="cidr can't be changed once it is set"
	CIDR networkingv1beta1.CIDR `json:"cidr,omitempty"`
	// Conditions of the address.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// IP is an address that remote clusters can reach under another one, which
// belongs to the external network.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo
// +kubebuilder:printcolumn:name="Local IP",type=string,JSONPath=`.spec.ip`
// +kubebuilder:printcolumn:name="Remapped IP",type=string,JSONPath=`.status.ip`
// +kubebuilder:printcolumn:name="Remapped IP CIDR",type=string,JSONPath=`.status.cidr`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type IP struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   IPSpec   `json:"spec"`
	Status IPStatus `json:"status,omitempty"`
}

// IPList is a list of IPs.
//
// +kubebuilder:object:root=true
type IPList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []IP `json:"items"`
}
