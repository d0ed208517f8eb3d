package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClusterID identifies a cluster.
//
// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
// +kubebuilder:validation:MaxLength=63
type ClusterID string

// RoleType says who uses whose resources.
// +kubebuilder:validation:Enum=Consumer;Provider;ConsumerAndProvider;Unknown
type RoleType string

// Values of RoleType.
const (
	ConsumerRole            RoleType = "Consumer"
	ProviderRole            RoleType = "Provider"
	ConsumerAndProviderRole RoleType = "ConsumerAndProvider"
	UnknownRole             RoleType = "Unknown"
)

// ConditionType is a condition of a module.
type ConditionType string

// The conditions of the network module.
const (
	NetworkConfigurationStatus ConditionType = "NetworkConfigurationStatus"
	NetworkGatewayPresence     ConditionType = "NetworkGatewayPresence"
	NetworkGatewayServerStatus ConditionType = "NetworkGatewayServerStatus"
	NetworkGatewayClientStatus ConditionType = "NetworkGatewayClientStatus"
	NetworkConnectionStatus    ConditionType = "NetworkConnectionStatus"
)

// ConditionStatusType is the state of a condition.
// +kubebuilder:validation:Enum=None;Pending;Established;Error;Ready;NotReady;SomeNotReady
type ConditionStatusType string

// Values of ConditionStatusType.
const (
	ConditionStatusNone         ConditionStatusType = "None"
	ConditionStatusPending      ConditionStatusType = "Pending"
	ConditionStatusEstablished  ConditionStatusType = "Established"
	ConditionStatusError        ConditionStatusType = "Error"
	ConditionStatusReady        ConditionStatusType = "Ready"
	ConditionStatusNotReady     ConditionStatusType = "NotReady"
	ConditionStatusSomeNotReady ConditionStatusType = "SomeNotReady"
)

// Condition is the state of one aspect of a peering.
type Condition struct {
	// Type of the condition.
	Type ConditionType `json:"type"`
	// Status of the condition.
	// +kubebuilder:default=None
	Status ConditionStatusType `json:"status"`
	// LastTransitionTime is when the status last changed.
	// +optional
	LastTransitionTime metav1.Time `json:"lastTransitionTime,omitempty"`
	// Reason is why, in one word.
	// +optional
	Reason string `json:"reason,omitempty"`
	// Message is why, for people.
	// +optional
	Message string `json:"message,omitempty"`
}

// Module is the state of one module.
//
// +kubebuilder:pruning:PreserveUnknownFields
type Module struct {
	// Enabled is true when the module is in use for this cluster.
	Enabled bool `json:"enabled"`
	// Conditions of the module.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []Condition `json:"conditions,omitempty"`
}

// Modules has the state of each module. Ours is networking.
//
// +kubebuilder:pruning:PreserveUnknownFields
type Modules struct {
	// Networking module.
	// +optional
	Networking *Module `json:"networking,omitempty"`
	// Authentication module; not ours.
	// +optional
	Authentication *Module `json:"authentication,omitempty"`
	// Offloading module; not ours.
	// +optional
	Offloading *Module `json:"offloading,omitempty"`
}

// ForeignClusterSpec says which cluster it is.
//
// +kubebuilder:pruning:PreserveUnknownFields
type ForeignClusterSpec struct {
	// ClusterID of the remote cluster.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="clusterID can't be changed"
	ClusterID ClusterID `json:"clusterID"`
}

// ForeignClusterStatus is the state of the peering.
//
// +kubebuilder:pruning:PreserveUnknownFields
type ForeignClusterStatus struct {
	// Role of the remote cluster.
	// +optional
	// +kubebuilder:default=Unknown
	Role RoleType `json:"role,omitempty"`
	// Modules of the peering.
	// +optional
	Modules Modules `json:"modules,omitempty"`
}

// ForeignCluster is a remote cluster.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,categories=liqo,shortName=fc
// +kubebuilder:printcolumn:name="Role",type=string,JSONPath=`.status.role`
// +kubebuilder:printcolumn:name="ClusterID",type=string,priority=1,JSONPath=`.spec.clusterID`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ForeignCluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ForeignClusterSpec   `json:"spec"`
	Status ForeignClusterStatus `json:"status,omitempty"`
}

// ForeignClusterList is a list of ForeignClusters.
//
// +kubebuilder:object:root=true
type ForeignClusterList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ForeignCluster `json:"items"`
}
