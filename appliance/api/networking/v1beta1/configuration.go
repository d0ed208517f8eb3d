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

// ConfigurationStatus says how this cluster sees the other one.
type ConfigurationStatus struct {
	// Remote has, index by index, the networks by which this cluster reaches
	// those of spec.remote.
	// +optional
	Remote *ClusterConfig `json:"remote,omitempty"`
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
