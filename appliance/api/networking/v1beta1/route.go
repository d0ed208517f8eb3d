package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Scope of a route, as in the kernel.
// +kubebuilder:validation:Enum=global;link;host;site;nowhere
type Scope string

// Values of Scope.
const (
	GlobalScope  Scope = "global"
	LinkScope    Scope = "link"
	HostScope    Scope = "host"
	SiteScope    Scope = "site"
	NowhereScope Scope = "nowhere"
)

// Route is one route of a table.
type Route struct {
	// Dst is where the route leads to.
	Dst *CIDR `json:"dst"`
	// Src is the source address that the host itself prefers.
	// +optional
	Src *IP `json:"src,omitempty"`
	// Gw is the next hop.
	// +optional
	Gw *IP `json:"gw,omitempty"`
	// Dev is the link to use.
	// +optional
	// +kubebuilder:validation:MaxLength=15
	Dev *string `json:"dev,omitempty"`
	// Onlink is true when the next hop is on the link even if no route says so.
	// +optional
	Onlink *bool `json:"onlink,omitempty"`
	// Scope of the route.
	// +optional
	Scope *Scope `json:"scope,omitempty"`
	// TargetRef is the object that the route stands for.
	// +optional
	TargetRef *corev1.ObjectReference `json:"targetRef,omitempty"`
}

// Rule sends packets to the table. At least one of its selectors should be
// given: a rule without any takes all packets.
type Rule struct {
	// Dst selects by destination.
	// +optional
	Dst *CIDR `json:"dst,omitempty"`
	// Src selects by source.
	// +optional
	Src *CIDR `json:"src,omitempty"`
	// Iif selects by the link that the packet came in on.
	// +optional
	// +kubebuilder:validation:MaxLength=15
	Iif *string `json:"iif,omitempty"`
	// Oif selects by the link that a local socket is bound to.
	// +optional
	// +kubebuilder:validation:MaxLength=15
	Oif *string `json:"oif,omitempty"`
	// FwMark selects by firewall mark. Packets without one have 0, which is
	// therefore no selector.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	FwMark *int `json:"fwmark,omitempty"`
	// Priority of the rule; chosen by its place in the list when absent. 0 is
	// that of the kernel's rule for the local table.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	Priority *int `json:"priority,omitempty"`
	// Routes to put into the table.
	// +listType=map
	// +listMapKey=dst
	// +kubebuilder:validation:MaxItems=10000
	Routes []Route `json:"routes"`
	// TargetRef is the object that the rule stands for.
	// +optional
	TargetRef *corev1.ObjectReference `json:"targetRef,omitempty"`
}

// RouteTable is a routing table and the rules that lead to it.
type RouteTable struct {
	// Name of the table. Its number is derived from it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the name of the table can't be changed; delete the object and create it anew"
	Name string `json:"name"`
	// Rules that lead to the table. The controller makes one for each node at most, and
	// Kubernetes is made for 5,000 nodes.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=10000
	Rules []Rule `json:"rules"`
	// TargetRef is the object that the table stands for.
	// +optional
	TargetRef *corev1.ObjectReference `json:"targetRef,omitempty"`
}

// RouteConfigurationSpec has one routing table.
type RouteConfigurationSpec struct {
	// Table to set up.
	Table RouteTable `json:"table"`
}

// RouteConfigurationStatus says which hosts have applied the object.
type RouteConfigurationStatus struct {
	// Conditions, one per host.
	// +optional
	Conditions []HostCondition `json:"conditions,omitempty"`
}

// RouteConfiguration is a routing table for the hosts that its labels address.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=rcnf;rcnfg;rcfg;routecfg
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type RouteConfiguration struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   RouteConfigurationSpec   `json:"spec"`
	Status RouteConfigurationStatus `json:"status,omitempty"`
}

// RouteConfigurationList is a list of RouteConfigurations.
//
// +kubebuilder:object:root=true
type RouteConfigurationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []RouteConfiguration `json:"items"`
}
