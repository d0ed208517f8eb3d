package v1beta1

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// ObjectMeta is the part of an object's metadata that a template may set.
type ObjectMeta struct {
	// Name of the object.
	// +optional
	Name string `json:"name,omitempty"`
	// Namespace of the object.
	// +optional
	Namespace string `json:"namespace,omitempty"`
	// Labels of the object.
	// +optional
	Labels map[string]string `json:"labels,omitempty"`
	// Annotations of the object.
	// +optional
	Annotations map[string]string `json:"annotations,omitempty"`
	// Finalizers are taken and not used: nobody would remove them from what the
	// controller makes.
	// +optional
	// +listType=atomic
	Finalizers []string `json:"finalizers,omitempty"`
}

// DeploymentTemplate is the Deployment of a gateway.
type DeploymentTemplate struct {
	// Metadata of the Deployment.
	// +optional
	Metadata ObjectMeta `json:"metadata,omitempty"`
	// Spec of the Deployment.
	// +optional
	Spec appsv1.DeploymentSpec `json:"spec,omitempty"`
}

// ServiceTemplate is the Service of a gateway.
type ServiceTemplate struct {
	// Metadata of the Service.
	// +optional
	Metadata ObjectMeta `json:"metadata,omitempty"`
	// Spec of the Service.
	// +optional
	Spec corev1.ServiceSpec `json:"spec,omitempty"`
}

// ServiceMonitorTemplate is a ServiceMonitor of the Prometheus operator.
type ServiceMonitorTemplate struct {
	// Metadata of the ServiceMonitor.
	// +optional
	Metadata ObjectMeta `json:"metadata,omitempty"`
	// Spec of the ServiceMonitor, as its operator defines it.
	// +optional
	// +kubebuilder:pruning:PreserveUnknownFields
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=object
	Spec runtime.RawExtension `json:"spec,omitempty"`
}

// Metrics says how the metrics of a gateway are exposed.
type Metrics struct {
	// Enabled is true when a Service for the metrics is wanted.
	Enabled bool `json:"enabled"`
	// Service for the metrics.
	// +optional
	Service *ServiceTemplate `json:"service,omitempty"`
	// ServiceMonitor for the metrics.
	// +optional
	ServiceMonitor *ServiceMonitorTemplate `json:"serviceMonitor,omitempty"`
}

// WgGatewayServerSpec has the workload of a WireGuard server.
type WgGatewayServerSpec struct {
	// Deployment of the gateway.
	Deployment DeploymentTemplate `json:"deployment"`
	// Service that exposes the gateway.
	Service ServiceTemplate `json:"service"`
	// Metrics of the gateway.
	// +optional
	Metrics *Metrics `json:"metrics,omitempty"`
	// SecretRef names the Secret with the keys, when it is the user's own.
	// +optional
	SecretRef corev1.LocalObjectReference `json:"secretRef,omitempty"`
}

// WgGatewayServerStatus is what became of a WgGatewayServer.
type WgGatewayServerStatus struct {
	// SecretRef is the Secret with the keys of the gateway.
	// +optional
	SecretRef *corev1.ObjectReference `json:"secretRef,omitempty"`
	// Endpoint that the peer's gateway has to dial.
	// +optional
	Endpoint *EndpointStatus `json:"endpoint,omitempty"`
	// InternalEndpoint is the gateway pod that carries the traffic.
	// +optional
	InternalEndpoint *InternalGatewayEndpoint `json:"internalEndpoint,omitempty"`
}

// WgGatewayServer is the workload of a server gateway that uses WireGuard.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=wgs;wggs
type WgGatewayServer struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   WgGatewayServerSpec   `json:"spec"`
	Status WgGatewayServerStatus `json:"status,omitempty"`
}

// WgGatewayServerList is a list of WgGatewayServers.
//
// +kubebuilder:object:root=true
type WgGatewayServerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []WgGatewayServer `json:"items"`
}

// WgGatewayClientSpec has the workload of a WireGuard client.
type WgGatewayClientSpec struct {
	// Deployment of the gateway.
	Deployment DeploymentTemplate `json:"deployment"`
	// Metrics of the gateway.
	// +optional
	Metrics *Metrics `json:"metrics,omitempty"`
	// SecretRef names the Secret with the keys, when it is the user's own.
	// +optional
	SecretRef corev1.LocalObjectReference `json:"secretRef,omitempty"`
}

// WgGatewayClientStatus is what became of a WgGatewayClient.
type WgGatewayClientStatus struct {
	// SecretRef is the Secret with the keys of the gateway.
	// +optional
	SecretRef *corev1.ObjectReference `json:"secretRef,omitempty"`
	// InternalEndpoint is the gateway pod that carries the traffic.
	// +optional
	InternalEndpoint *InternalGatewayEndpoint `json:"internalEndpoint,omitempty"`
}

// WgGatewayClient is the workload of a client gateway that uses WireGuard.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=wgc;wggc
type WgGatewayClient struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   WgGatewayClientSpec   `json:"spec"`
	Status WgGatewayClientStatus `json:"status,omitempty"`
}

// WgGatewayClientList is a list of WgGatewayClients.
//
// +kubebuilder:object:root=true
type WgGatewayClientList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []WgGatewayClient `json:"items"`
}

// TemplateObjectKind is the kind that a template makes.
type TemplateObjectKind struct {
	// APIVersion of the kind.
	APIVersion string `json:"apiVersion"`
	// Kind itself.
	Kind string `json:"kind"`
}

// GatewayTemplateSpec is a gateway with blanks to fill in.
type GatewayTemplateSpec struct {
	// ObjectKind is the kind of object that the template makes.
	ObjectKind TemplateObjectKind `json:"objectKind"`
	// Template of the object. Its strings are Go templates over .Spec, .Name,
	// .Namespace, .GatewayUID, .ClusterID and .SecretName; a key that starts
	// with a question mark is left out when its value renders empty.
	// +kubebuilder:pruning:PreserveUnknownFields
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=object
	Template runtime.RawExtension `json:"template"`
}

// WgGatewayServerTemplate is what server gateways are made from.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:labels="networking.liqo.io/gatewaytemplate=true"
// +kubebuilder:resource:categories=liqo,shortName=wggst;wgst
type WgGatewayServerTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec GatewayTemplateSpec `json:"spec"`
}

// WgGatewayServerTemplateList is a list of WgGatewayServerTemplates.
//
// +kubebuilder:object:root=true
type WgGatewayServerTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []WgGatewayServerTemplate `json:"items"`
}

// WgGatewayClientTemplate is what client gateways are made from.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:labels="networking.liqo.io/gatewaytemplate=true"
// +kubebuilder:resource:categories=liqo,shortName=wggct;wgct
type WgGatewayClientTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec GatewayTemplateSpec `json:"spec"`
}

// WgGatewayClientTemplateList is a list of WgGatewayClientTemplates.
//
// +kubebuilder:object:root=true
type WgGatewayClientTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []WgGatewayClientTemplate `json:"items"`
}
