// Package peer connects two clusters and takes that back: it makes the objects
// of a peering on both sides, in the order and with the names, namespaces and
// labels of the public system's CLI, so that either tool goes on where the other
// has stopped.
//
// What is to be done is computed from what is there, values from values, then done,
// then looked at again until nothing is left to do or to wait for ([Run]). A run
// that was ended at any point is therefore made good by the next, and one that finds
// everything in place does nothing.
//
// Objects of others are taken as they are. Where one contradicts what was asked
// for, it is named with the field and its writer, and nothing is overwritten.
package peer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

// FieldOwner is who writes objects, in their managed fields.
const FieldOwner = client.FieldOwner("isthmusctl")

// A Cluster is one of the two.
type Cluster struct {
	// Client knows the kinds of internal/kube.
	Client client.Client
	// Name is what the operator calls the cluster, before its ID is known.
	Name string
	// Kubectl is kubectl with the flags that lead there, for messages.
	Kubectl string
	// Isthmusctl is isthmusctl with these flags, for messages.
	Isthmusctl string
	// System is the namespace of the installation, and SystemFlag the flag that names it.
	System, SystemFlag string
	// Namespace is where the objects of the peering are; empty: in the tenant
	// namespace of the peer.
	Namespace string
}

// An Action is what is to be done, in the words of the command line.
type Action string

// The actions.
const (
	// Init exchanges Configurations.
	Init Action = "init"
	// Connect does that and makes the gateways, which have each other's key.
	Connect Action = "connect"
	// Disconnect deletes the gateways and their keys.
	Disconnect Action = "disconnect"
	// Reset does that and deletes the Configurations and the tenant namespaces.
	Reset Action = "reset"
)

// Names of the flags by which an existing object may be asked to be different.
const (
	FlagServerTemplate          = "gw-server-template-name"
	FlagServerTemplateNamespace = "gw-server-template-namespace"
	FlagServiceType             = "gw-server-service-type"
	FlagServicePort             = "gw-server-service-port"
	FlagNodePort                = "gw-server-service-nodeport"
	FlagLoadBalancerIP          = "gw-server-service-loadbalancerip"
	FlagClientTemplate          = "gw-client-template-name"
	FlagClientTemplateNamespace = "gw-client-template-namespace"
	FlagClientAddress           = "gw-client-address"
	FlagClientPort              = "gw-client-port"
	FlagMTU                     = "mtu"
	FlagFollow                  = "follow"
	FlagRemoteFollow            = "remote-follow"
	FlagFollowMax               = "follow-max"
)

// A Template is what gateways are made from. An empty Namespace is that of the
// installation on the side of the gateway.
type Template struct {
	APIVersion, Kind string
	Namespace, Name  string
}

func (t Template) of(c *Cluster) Template {
	t.Namespace = cmp.Or(t.Namespace, c.System)
	return t
}

// Options say what a peering is to be like. New objects get all of it; one that
// is there has to agree only with what was given by a flag.
type Options struct {
	Server, Client Template
	ServiceType    corev1.ServiceType
	Port, NodePort int32
	LoadBalancerIP string
	Address        string // to dial in place of the server's own
	DialPort       int32
	MTU            int
	// Follow says, by side, what its Configuration lets the other side add.
	Follow [2]Follow
	// Given are the flags that were given.
	Given map[string]bool

	// Invitation is what Invite and Accept make, and Endpoint where Accept has the gateway
	// dial.
	Invitation invitation.Record
	Endpoint   *v1beta1.EndpointStatus
	sealed     map[string][]byte // the data of its Secret
	began      bool              // this run has changed something
	// Now tells the time, for messages.
	Now func() time.Time

	KeepKeys       bool // do not exchange public keys
	SkipValidation bool // of templates
	Labels         map[string]string
	Annotations    map[string]string

	// Wait until the gateways have heard from each other, or are gone.
	Wait bool
	// Atomic takes back what was made when not all of it can be.
	Atomic bool
	// Timeout is the longest time of a run, without that in which somebody in the cluster
	// that has invited has to say yes: ApprovalTimeout; 0: until the invitation expires.
	Timeout         time.Duration
	ApprovalTimeout time.Duration
}

// Defaults of the public system.
const (
	DefaultServerTemplate = "wireguard-server"
	DefaultClientTemplate = "wireguard-client"
	DefaultServerResource = "networking.liqo.io/v1beta1/wggatewayservertemplates"
	DefaultClientResource = "networking.liqo.io/v1beta1/wggatewayclienttemplates"
	DefaultServiceType    = corev1.ServiceTypeLoadBalancer
	DefaultPort           = 51840
	DefaultMTU            = 1340
	DefaultTimeout        = 2 * time.Minute
)

// Check returns what is wrong with options by themselves.
func (o *Options) Check() []Problem {
	var out []Problem
	bad := func(flag, format string, args ...any) {
		out = append(out, Problem{Check: "flags", Object: "--" + flag, Message: fmt.Sprintf(format, args...), Fix: "correct the flag, or leave it out"})
	}
	types := []corev1.ServiceType{corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort, corev1.ServiceTypeClusterIP}
	if !slices.Contains(types, o.ServiceType) {
		bad(FlagServiceType, "%q is not LoadBalancer, NodePort or ClusterIP", o.ServiceType)
	}
	if o.Port < 1 || o.Port > 65535 {
		bad(FlagServicePort, "%d is not a port", o.Port)
	}
	if o.NodePort < 0 || o.NodePort > 65535 {
		bad(FlagNodePort, "%d is not a port", o.NodePort)
	}
	if o.NodePort != 0 && o.ServiceType == corev1.ServiceTypeClusterIP {
		bad(FlagNodePort, "a Service of the type ClusterIP has no node port")
	}
	if o.LoadBalancerIP != "" && o.ServiceType != corev1.ServiceTypeLoadBalancer {
		bad(FlagLoadBalancerIP, "a Service of the type %s has no load balancer", o.ServiceType)
	}
	if o.DialPort < 0 || o.DialPort > 65535 {
		bad(FlagClientPort, "%d is not a port", o.DialPort)
	}
	if o.MTU != 0 && (o.MTU < 576 || o.MTU > 65535) {
		bad(FlagMTU, "%d is not an MTU; write 576 to 65535, or 0 to have it derived from the network underneath", o.MTU)
	}
	return out
}

// A Side is one of the two clusters: 0 is the local one, 1 the remote one.
type Side int

// The two sides.
const (
	Local Side = iota
	Remote
)

func (s Side) other() Side { return 1 - s }

// A Ref names an object of one of the clusters.
type Ref struct {
	Cluster    string `json:"cluster"` // its ID
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Namespace  string `json:"namespace,omitempty"`
	Name       string `json:"name"`
}

// String is how messages name it.
func (r Ref) String() string {
	name := r.Name
	if r.Namespace != "" {
		name = r.Namespace + "/" + name
	}
	return fmt.Sprintf("%s %s in %s", r.Kind, name, r.Cluster)
}

// A Problem is something for which nothing is changed.
type Problem struct {
	Check   string `json:"check"`
	Object  string `json:"object"`
	Message string `json:"message"`
	Fix     string `json:"fix"`
}

// A RefusedError says why something can't be done.
type RefusedError struct {
	Problems []Problem
	Changed  bool // something had been done before
	// TakenBack: that was taken back.
	TakenBack bool
}

// Error lists the problems, one a line.
func (e *RefusedError) Error() string {
	var out strings.Builder
	switch {
	case e.TakenBack:
		out.WriteString("refused, and what this run had made was taken back:")
	case e.Changed:
		out.WriteString("refused, what was done before stays:")
	default:
		out.WriteString("refused, nothing was changed:")
	}
	for _, p := range e.Problems {
		fmt.Fprintf(&out, "\n  %s: %s", p.Object, p.Message)
		if p.Fix != "" {
			out.WriteString(": " + p.Fix)
		}
	}
	return out.String()
}

// A TimeoutError says what was waited for in vain.
type TimeoutError struct {
	After time.Duration
	// Waits are what was waited for, and Look what to look at, a line each.
	Waits, Look []string
}

// Error says it, and what to do.
func (e *TimeoutError) Error() string {
	var out strings.Builder
	fmt.Fprintf(&out, "not all was done within %v:", e.After.Round(time.Second))
	for _, l := range slices.Concat(e.Waits, e.Look) {
		fmt.Fprintf(&out, "\n  %s", l)
	}
	return out.String()
}

// tenantLabels are those of a tenant namespace, as the public CLI sets them. The
// level of Pod Security is what gateways need.
func tenantLabels(peer string) map[string]string {
	return map[string]string{
		v1beta1.LabelTenantNamespace: "true", v1beta1.LabelRemoteClusterID: peer,
		"pod-security.kubernetes.io/enforce": "privileged",
		"pod-security.kubernetes.io/audit":   "privileged",
		"pod-security.kubernetes.io/warn":    "privileged",
	}
}
