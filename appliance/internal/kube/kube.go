// Package kube is where objects of the Kubernetes API become values: the only
// place where a string becomes an address. [Snapshot] does so for everything
// that the controller knows, [NodeSource] and [GatewaySource] for what one
// daemon knows; the functions named after a kind do so for one object.
//
// What does not parse becomes a [cluster.InvalidError] that names the object
// and the field, as kubectl explain prints it, and says what to write instead.
// Private keys do not pass.
package kube

import (
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// Scheme returns a scheme with all kinds that the appliance reads or writes.
func Scheme() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme,
		networkingv1beta1.AddToScheme, ipamv1alpha1.AddToScheme, corev1beta1.AddToScheme, netv1alpha1.AddToScheme,
	} {
		if err := add(s); err != nil {
			panic("kube: the scheme contradicts itself: " + err.Error())
		}
	}
	return s
}

// A kind is a kind of object with its place in the API.
type kind struct {
	version    schema.GroupVersion
	name       string
	resource   string
	namespaced bool
}

// kinds are those that the daemons use.
var kinds = []kind{
	{corev1.SchemeGroupVersion, "Pod", "pods", true},
	{corev1.SchemeGroupVersion, "Event", "events", true},
	{corev1.SchemeGroupVersion, "Secret", "secrets", true},
	{corev1.SchemeGroupVersion, "ConfigMap", "configmaps", true},
	{networkingv1beta1.GroupVersion, "Configuration", "configurations", true},
	{networkingv1beta1.GroupVersion, "Connection", "connections", true},
	{networkingv1beta1.GroupVersion, "GatewayServer", "gatewayservers", true},
	{networkingv1beta1.GroupVersion, "GatewayClient", "gatewayclients", true},
	{networkingv1beta1.GroupVersion, "GatewayReport", "gatewayreports", true},
	{networkingv1beta1.GroupVersion, "PublicKey", "publickeies", true},
	{networkingv1beta1.GroupVersion, "InternalFabric", "internalfabrics", true},
	{networkingv1beta1.GroupVersion, "InternalNode", "internalnodes", false},
	{networkingv1beta1.GroupVersion, "GeneveTunnel", "genevetunnels", true},
	{networkingv1beta1.GroupVersion, "RouteConfiguration", "routeconfigurations", true},
	{networkingv1beta1.GroupVersion, "FirewallConfiguration", "firewallconfigurations", true},
}

// mapper returns the places of the daemons' kinds. It needs no discovery: a
// daemon that starts while the API server is away must not fail.
func mapper() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper([]schema.GroupVersion{corev1.SchemeGroupVersion, networkingv1beta1.GroupVersion})
	for _, k := range kinds {
		scope := meta.RESTScopeRoot
		if k.namespaced {
			scope = meta.RESTScopeNamespace
		}
		plural := k.version.WithResource(k.resource)
		m.AddSpecific(k.version.WithKind(k.name), plural, plural, scope)
		m.AddSpecific(k.version.WithKind(k.name+"List"), plural, plural, scope) // what caches of several namespaces ask for
	}
	return m
}

// Objects is everything that the controller knows, as the API server gave it.
// Objects that do not matter may be among them.
type Objects struct {
	ClusterID string // of this cluster
	Namespace string // system namespace
	Options   cluster.Options
	Now       time.Time // when all this was read

	Nodes       []corev1.Node
	Pods        []corev1.Pod
	Services    []corev1.Service // of which those that nobody here made need only a name
	Deployments []appsv1.Deployment
	Secrets     []corev1.Secret
	Namespaces  []corev1.Namespace
	APIServers  []discoveryv1.EndpointSlice // of the Service default/kubernetes

	Configurations  []networkingv1beta1.Configuration
	Connections     []networkingv1beta1.Connection
	GatewayServers  []networkingv1beta1.GatewayServer
	GatewayClients  []networkingv1beta1.GatewayClient
	ServerTemplates []networkingv1beta1.WgGatewayServerTemplate
	ClientTemplates []networkingv1beta1.WgGatewayClientTemplate
	PublicKeys      []networkingv1beta1.PublicKey
	BlockedKeys     []corev1.ConfigMap
	Fabrics         []networkingv1beta1.InternalFabric
	InternalNodes   []networkingv1beta1.InternalNode
	Tunnels         []networkingv1beta1.GeneveTunnel
	Routes          []networkingv1beta1.RouteConfiguration
	Firewalls       []networkingv1beta1.FirewallConfiguration
	Reports         []networkingv1beta1.GatewayReport
	Networks        []ipamv1alpha1.Network
	IPs             []ipamv1alpha1.IP
	ForeignClusters []corev1beta1.ForeignCluster
	TunnelEndpoints []netv1alpha1.TunnelEndpoint
}

// metaOf returns what all objects share. Objects out of a cache do not say
// their kind.
func metaOf(o metav1.Object, version schema.GroupVersion, kind string) cluster.Meta {
	return cluster.Meta{
		Ref: cluster.Ref{
			APIVersion: version.String(), Kind: kind,
			Namespace: o.GetNamespace(), Name: o.GetName(), UID: string(o.GetUID()),
		},
		Generation:  o.GetGeneration(),
		Labels:      o.GetLabels(),
		Annotations: o.GetAnnotations(),
		Deleting:    o.GetDeletionTimestamp() != nil,
		Created:     o.GetCreationTimestamp().Time,
	}
}
