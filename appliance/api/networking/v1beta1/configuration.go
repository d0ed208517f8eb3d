package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClusterConfigCIDR lists the networks of one cluster.
type ClusterConfigCIDR struct {
	// Pod networks.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	Pod []CIDR `json:"pod,omitempty"`
	// External networks: the pools of addresses that stand for hosts which
	// are not pods.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	External []CIDR `json:"external,omitempty"`
}

// ClusterConfig describes one cluster.
type ClusterConfig struct {
	// CIDR lists the networks of the cluster.
	// +optional
	CIDR ClusterConfigCIDR `json:"cidr,omitempty"`
}

// ConfigurationSpec says which networks the two clusters of a peering have.
type ConfigurationSpec struct {
	// Local is this cluster. The controller fills it in when it is absent.
	// +optional
	Local *ClusterConfig `json:"local,omitempty"`
	// Remote is the other cluster, with its networks as it calls them itself.
	// +optional
	Remote ClusterConfig `json:"remote,omitempty"`
}

// FollowedNetwork is a network that only the gateway of the peer has told, by which this
// cluster reaches it besides those of spec.remote.
type FollowedNetwork struct {
	// Type of the network: pod or external.
	// +kubebuilder:validation:Enum=pod;external
	Type string `json:"type"`
	// CIDR of it, as both clusters call it: it is never remapped.
	CIDR CIDR `json:"cidr"`
	// WithdrawnAt is when the peer was first seen to tell its networks without this one,
	// which is followed for 10 minutes more. Absent: the peer tells it.
	// +optional
	WithdrawnAt *metav1.Time `json:"withdrawnAt,omitempty"`
	// ObservedGeneration of the spec with which it is followed. What the peer has withdrawn
	// ends when that changes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// RefusedNetwork is a network that the peer tells and this cluster does not follow.
type RefusedNetwork struct {
	// CIDR of it, as the peer calls it.
	CIDR CIDR `json:"cidr"`
	// Message says why.
	Message string `json:"message"`
}

// ConfigurationFollow is what has come of the annotation networking.liqo.io/follow.
type ConfigurationFollow struct {
	// Networks of the peer besides those of spec.remote.
	// +optional
	// +kubebuilder:validation:MaxItems=128
	Networks []FollowedNetwork `json:"networks,omitempty"`
	// Refused are networks that the peer tells and that are neither in spec.remote nor
	// followed.
	// +optional
	// +kubebuilder:validation:MaxItems=128
	Refused []RefusedNetwork `json:"refused,omitempty"`
}

// ConfigurationStatus says how this cluster sees the other one.
type ConfigurationStatus struct {
	// Remote has, index by index, the networks by which this cluster reaches
	// those of spec.remote.
	// +optional
	Remote *ClusterConfig `json:"remote,omitempty"`
	// Local has the networks of this cluster as they are now, whatever spec.local says. The
	// gateway tells them its peer.
	// +optional
	Local *ClusterConfig `json:"local,omitempty"`
	// Follow is what this cluster has taken over of the networks that the peer tells. Absent:
	// the annotation networking.liqo.io/follow does not allow it any.
	// +optional
	Follow *ConfigurationFollow `json:"follow,omitempty"`
	// Conditions of the configuration, among them NetworkCIDRsConfigured.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Configuration holds the networks of a remote cluster and the networks by
// which this cluster reaches them.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=conf
// +kubebuilder:printcolumn:name="Desired Pod CIDR",type=string,JSONPath=`.spec.remote.cidr.pod`
// +kubebuilder:printcolumn:name="Remapped Pod CIDR",type=string,JSONPath=`.status.remote.cidr.pod`
// +kubebuilder:printcolumn:name="Desired External CIDR",type=string,priority=1,JSONPath=`.spec.remote.cidr.external`
// +kubebuilder:printcolumn:name="Remapped External CIDR",type=string,priority=1,JSONPath=`.status.remote.cidr.external`
// +kubebuilder:printcolumn:name="ClusterID",type=string,priority=1,JSONPath=`.metadata.labels.liqo\.io/remote-cluster-id`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Configuration struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ConfigurationSpec   `json:"spec,omitempty"`
	Status ConfigurationStatus `json:"status,omitempty"`
}

// ConfigurationList is a list of Configurations.
//
// +kubebuilder:object:root=true
type ConfigurationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Configuration `json:"items"`
}
