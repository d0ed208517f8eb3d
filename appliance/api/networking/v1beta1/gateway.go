package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Endpoint is how the Service of a server gateway is to look.
//
// +kubebuilder:validation:XValidation:rule="!(has(self.port) && has(self.ports))",message="give port or ports, not both"
// +kubebuilder:validation:XValidation:rule="has(self.port) || (has(self.ports) && size(self.ports) > 0)",message="give at least one port in ports"
// +kubebuilder:validation:XValidation:rule="!(has(self.nodePort) && has(self.nodePorts))",message="give nodePort or nodePorts, not both"
// +kubebuilder:validation:XValidation:rule="!has(self.ports) || self.ports.all(p, self.ports.exists_one(q, q == p))",message="every port may be in ports only once"
// +kubebuilder:validation:XValidation:rule="!has(self.nodePorts) || self.nodePorts.all(p, self.nodePorts.exists_one(q, q == p))",message="every port may be in nodePorts only once"
type Endpoint struct {
	// Port of the Service. Deprecated: use ports.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port *int32 `json:"port,omitempty"`
	// Ports of the Service.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	Ports []int32 `json:"ports,omitempty"`
	// ServiceType is the type of the Service.
	// +optional
	// +kubebuilder:default=ClusterIP
	// +kubebuilder:validation:Enum=ClusterIP;NodePort;LoadBalancer;ExternalName
	ServiceType corev1.ServiceType `json:"serviceType,omitempty"`
	// NodePort to ask for; the cluster chooses when absent or 0. Deprecated: use nodePorts.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	NodePort *int32 `json:"nodePort,omitempty"`
	// NodePorts to ask for, index by index with ports.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Minimum=0
	// +kubebuilder:validation:items:Maximum=65535
	NodePorts []int32 `json:"nodePorts,omitempty"`
	// LoadBalancerIP to ask the load balancer for.
	// +optional
	LoadBalancerIP *string `json:"loadBalancerIP,omitempty"`
}

// EndpointStatus is where a server gateway can be reached.
//
// +kubebuilder:validation:XValidation:rule="!(has(self.port) && has(self.ports))",message="give port or ports, not both"
// +kubebuilder:validation:XValidation:rule="has(self.port) || (has(self.ports) && size(self.ports) > 0)",message="give at least one port in ports"
// +kubebuilder:validation:XValidation:rule="!has(self.ports) || self.ports.all(p, self.ports.exists_one(q, q == p))",message="every port may be in ports only once"
type EndpointStatus struct {
	// Addresses or names of the server.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Addresses []string `json:"addresses,omitempty"`
	// Port of the server. Deprecated: use ports.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port *int32 `json:"port,omitempty"`
	// Ports of the server.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	Ports []int32 `json:"ports,omitempty"`
	// Protocol of the tunnel's outer packets.
	// +optional
	// +kubebuilder:validation:Enum=TCP;UDP
	Protocol *corev1.Protocol `json:"protocol,omitempty"`
}

// GatewayServerSpec describes the gateway that waits for its peer.
type GatewayServerSpec struct {
	// MTU of the tunnel and of the links to the nodes; 0 or absent: derived
	// from the network underneath.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	MTU int `json:"mtu,omitempty"`
	// Endpoint is how the gateway is exposed.
	// +optional
	Endpoint Endpoint `json:"endpoint,omitempty"`
	// ServerTemplateRef is the template that the gateway is made from.
	// +optional
	ServerTemplateRef corev1.ObjectReference `json:"serverTemplateRef,omitempty"`
	// SecretRef names a Secret with keys of the user's own, in the same namespace.
	// +optional
	SecretRef corev1.LocalObjectReference `json:"secretRef,omitempty"`
	// ServiceAnnotations are added to those of the template's Service.
	// +optional
	ServiceAnnotations map[string]string `json:"serviceAnnotations,omitempty"`
	// ServiceLabels are added to those of the template's Service.
	// +optional
	ServiceLabels map[string]string `json:"serviceLabels,omitempty"`
}

// GatewayServerStatus is what became of a GatewayServer.
type GatewayServerStatus struct {
	// ServerRef is the object that the template made.
	// +optional
	ServerRef *corev1.ObjectReference `json:"serverRef,omitempty"`
	// Endpoint that the peer's gateway has to dial.
	// +optional
	Endpoint *EndpointStatus `json:"endpoint,omitempty"`
	// SecretRef is the Secret with the keys of the gateway.
	// +optional
	SecretRef *corev1.ObjectReference `json:"secretRef,omitempty"`
	// InternalEndpoint is the gateway pod that carries the traffic.
	// +optional
	InternalEndpoint *InternalGatewayEndpoint `json:"internalEndpoint,omitempty"`
	// Conditions of the gateway.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// GatewayServer is a gateway that its peer dials.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=gws;gwserver
// +kubebuilder:printcolumn:name="Template Kind",type=string,priority=1,JSONPath=`.spec.serverTemplateRef.kind`
// +kubebuilder:printcolumn:name="Template Name",type=string,JSONPath=`.spec.serverTemplateRef.name`
// +kubebuilder:printcolumn:name="Template Namespace",type=string,priority=1,JSONPath=`.spec.serverTemplateRef.namespace`
// +kubebuilder:printcolumn:name="IP",type=string,JSONPath=`.status.endpoint.addresses[*]`
// +kubebuilder:printcolumn:name="Port",type=string,JSONPath=`.status.endpoint.port`
// +kubebuilder:printcolumn:name="Protocol",type=string,priority=1,JSONPath=`.status.endpoint.protocol`
// +kubebuilder:printcolumn:name="MTU",type=integer,priority=1,JSONPath=`.spec.mtu`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GatewayServer struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   GatewayServerSpec   `json:"spec,omitempty"`
	Status GatewayServerStatus `json:"status,omitempty"`
}

// GatewayServerList is a list of GatewayServers.
//
// +kubebuilder:object:root=true
type GatewayServerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GatewayServer `json:"items"`
}

// GatewayClientSpec describes the gateway that dials its peer.
type GatewayClientSpec struct {
	// MTU of the tunnel and of the links to the nodes; 0 or absent: derived
	// from the network underneath.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	MTU int `json:"mtu,omitempty"`
	// Endpoint of the server to dial.
	// +optional
	Endpoint EndpointStatus `json:"endpoint,omitempty"`
	// ClientTemplateRef is the template that the gateway is made from.
	// +optional
	ClientTemplateRef corev1.ObjectReference `json:"clientTemplateRef,omitempty"`
	// SecretRef names a Secret with keys of the user's own, in the same namespace.
	// +optional
	SecretRef corev1.LocalObjectReference `json:"secretRef,omitempty"`
}

// GatewayClientStatus is what became of a GatewayClient.
type GatewayClientStatus struct {
	// ClientRef is the object that the template made.
	// +optional
	ClientRef *corev1.ObjectReference `json:"clientRef,omitempty"`
	// SecretRef is the Secret with the keys of the gateway.
	// +optional
	SecretRef *corev1.ObjectReference `json:"secretRef,omitempty"`
	// InternalEndpoint is the gateway pod that carries the traffic.
	// +optional
	InternalEndpoint *InternalGatewayEndpoint `json:"internalEndpoint,omitempty"`
	// Conditions of the gateway.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// GatewayClient is a gateway that dials its peer.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=gwc;gwclient
// +kubebuilder:printcolumn:name="Template Kind",type=string,priority=1,JSONPath=`.spec.clientTemplateRef.kind`
// +kubebuilder:printcolumn:name="Template Name",type=string,JSONPath=`.spec.clientTemplateRef.name`
// +kubebuilder:printcolumn:name="Template Namespace",type=string,priority=1,JSONPath=`.spec.clientTemplateRef.namespace`
// +kubebuilder:printcolumn:name="IP",type=string,JSONPath=`.spec.endpoint.addresses[*]`
// +kubebuilder:printcolumn:name="Port",type=string,JSONPath=`.spec.endpoint.port`
// +kubebuilder:printcolumn:name="Protocol",type=string,priority=1,JSONPath=`.spec.endpoint.protocol`
// +kubebuilder:printcolumn:name="MTU",type=integer,priority=1,JSONPath=`.spec.mtu`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GatewayClient struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   GatewayClientSpec   `json:"spec,omitempty"`
	Status GatewayClientStatus `json:"status,omitempty"`
}

// GatewayClientList is a list of GatewayClients.
//
// +kubebuilder:object:root=true
type GatewayClientList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GatewayClient `json:"items"`
}
