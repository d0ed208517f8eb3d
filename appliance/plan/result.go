// Package plan decides what must exist in a cluster: given everything that the
// cluster knows (a [cluster.Snapshot]), it returns all objects that the
// controller owns, the status of those that it does not own, and what it has
// to say about objects that are wrong.
//
// It is a pure function. It reads no clock, asks no API server, and gives the
// same answer for the same snapshot whatever the order of its slices; fed with
// its own answer, it changes nothing. What has been given to somebody once (an
// address, a number, a name) stays theirs as long as the object that says so
// exists.
//
// An object that contradicts itself or another one gets a condition and an
// event that says what to do. Nothing else is disturbed by it.
package plan

import (
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// An Object is an object of the API. It is what controller-runtime calls
// client.Object.
type Object interface {
	metav1.Object
	runtime.Object
}

// A Result is what must be so in a cluster. Everything in it is ordered: by
// kind, namespace and name. Parts of an object may be shared within it: copy
// it deeply before changing it.
type Result struct {
	// Objects must exist, with these labels, owners and specs, and without
	// regard to their status. Each carries the label
	// app.kubernetes.io/managed-by=isthmus; an object of one of [Kinds]
	// with that label that is neither here nor in Keep must go.
	Objects []Object
	// Keep names objects that stay as they are, if they exist: what the
	// template made of a gateway whose object has since been changed to
	// something that can't be.
	Keep []cluster.Ref
	// Incomplete says that objects were left out of the plan ([Result.LeaveOut]): what
	// is not in Objects may be theirs, and nothing goes.
	Incomplete bool
	// Statuses are existing objects, or ones in Objects, with the status
	// that the controller wants. Only the fields that the controller owns
	// are set: what a host reports about itself is not here. Conditions have
	// no lastTransitionTime, except those that were aggregated from reports:
	// whoever writes them keeps the old time if the status is the same.
	Statuses []Object
	// Applies are objects of others of which the controller owns a few
	// fields: a label of tenant namespaces, spec.local of Configurations that
	// do not have it, and an annotation of the pods of nodes' daemons. They are to be written by server-side apply.
	Applies []Object
	// Pulls are pods that must exist, with the component
	// v1beta1.ComponentGatewayPull, until they have pulled their images: those
	// that are not among them must go.
	Pulls []*corev1.Pod
	// Due is when another plan is to be made although nothing has changed, because
	// something takes too long by then. Zero: never.
	Due time.Time
	// Keys are the Secrets that must exist with a key pair.
	Keys []KeySecret
	// Events tell the user what is wrong.
	Events []Event
}

// A KeySecret is a Secret that must exist with a WireGuard key pair in the
// fields privateKey and publicKey. A Secret that has one is never overwritten.
type KeySecret struct {
	Namespace, Name string
	Labels          map[string]string
	Owner           metav1.OwnerReference // the GatewayServer or GatewayClient
}

// Types of events.
const (
	Warning = "Warning"
	Normal  = "Normal"
)

// An Event is something to tell about an object.
type Event struct {
	Object          cluster.Ref
	Type            string // Warning or Normal
	Reason, Message string
	// Reported is true of what hosts say. While things come up they say much
	// that is over a moment later, so it is to be told only when it lasts.
	Reported bool
}

// Kinds are the kinds of Objects: what carries our label and is of one of
// these is deleted when the plan does not have it. Secrets with keys are not
// among them; they go with the gateway that owns them. Configurations,
// GatewayServers, GatewayClients, PublicKeys and IPs that users write lack the label.
func Kinds() []schema.GroupVersionKind {
	networking := v1beta1.GroupVersion
	return []schema.GroupVersionKind{
		rbacv1.SchemeGroupVersion.WithKind("ClusterRoleBinding"),
		networking.WithKind("Configuration"),
		networking.WithKind("Connection"),
		appsv1.SchemeGroupVersion.WithKind("Deployment"),
		discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"),
		corev1beta1.GroupVersion.WithKind("ForeignCluster"),
		networking.WithKind("FirewallConfiguration"),
		networking.WithKind("GatewayClient"),
		networking.WithKind("GatewayReport"),
		networking.WithKind("GatewayServer"),
		networking.WithKind("GeneveTunnel"),
		networking.WithKind("InternalFabric"),
		networking.WithKind("InternalNode"),
		ipamv1alpha1.GroupVersion.WithKind("IP"),
		ipamv1alpha1.GroupVersion.WithKind("Network"),
		networking.WithKind("PublicKey"),
		rbacv1.SchemeGroupVersion.WithKind("Role"),
		rbacv1.SchemeGroupVersion.WithKind("RoleBinding"),
		networking.WithKind("RouteConfiguration"),
		corev1.SchemeGroupVersion.WithKind("Service"),
		corev1.SchemeGroupVersion.WithKind("ServiceAccount"),
		networking.WithKind("WgGatewayClient"),
		networking.WithKind("WgGatewayServer"),
	}
}
