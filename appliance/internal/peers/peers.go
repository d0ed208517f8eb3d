// Package peers says what peerings a cluster has: with whom, how far each has come,
// by whom its objects were made, and what is missing. It only looks.
package peers

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// Objects are those of all peerings of a cluster.
type Objects struct {
	ForeignClusters []corev1beta1.ForeignCluster
	Configurations  []v1beta1.Configuration
	GatewayServers  []v1beta1.GatewayServer
	GatewayClients  []v1beta1.GatewayClient
	PublicKeys      []v1beta1.PublicKey
	Connections     []v1beta1.Connection
	TunnelEndpoints []netv1alpha1.TunnelEndpoint
}

// controller is the field manager of the controller.
const controller = "isthmus-controller"

// Roles of this cluster's gateway.
const (
	Server = "server"
	Client = "client"
)

// A Peer is one peering.
type Peer struct {
	ID         string    `json:"clusterID"`
	Role       string    `json:"role,omitempty"`       // of this cluster's gateway: Server or Client; empty: it has none
	Connection string    `json:"connection,omitempty"` // Connected, Connecting or Error; empty: nobody has reported
	RTT        string    `json:"rtt,omitempty"`        // of the tunnel, with its unit
	Version    string    `json:"version,omitempty"`    // of Isthmus at the peer's gateway; empty: it tells nothing
	Endpoint   string    `json:"endpoint,omitempty"`   // of the server's gateway, which the client's dials
	Networks   []Network `json:"networks,omitempty"`   // of the peer
	MadeBy     []string  `json:"madeBy,omitempty"`     // the programs that wrote the objects
	Missing    []string  `json:"missing,omitempty"`    // sentences; empty: all is well
	Blocked    bool      `json:"blocked,omitempty"`    // this cluster cuts the peer off
	Block      string    `json:"block,omitempty"`      // by whom, when and why
}

// A Network is a range of a peer's.
type Network struct {
	Kind string `json:"kind"` // pod or external
	// CIDR is the range in the peer's own cluster, Here what this cluster calls it;
	// empty: not known yet.
	CIDR string `json:"cidr"`
	Here string `json:"here,omitempty"`
}

// String is the network with what it is called here, where that is something else.
func (n Network) String() string {
	if n.Here == "" || n.Here == n.CIDR {
		return n.CIDR
	}
	return n.CIDR + " as " + n.Here
}

// List returns the peerings by the IDs of the peers.
func List(o Objects) []Peer {
	ids := map[string]bool{}
	for _, fc := range o.ForeignClusters {
		ids[string(fc.Spec.ClusterID)] = fc.Status.Modules.Networking != nil && fc.Status.Modules.Networking.Enabled
	}
	for _, object := range o.written() {
		if id := remoteOf(object); id != "" {
			ids[id] = true
		}
	}
	maps.DeleteFunc(ids, func(_ string, enabled bool) bool { return !enabled })
	var out []Peer
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		out = append(out, o.peer(id))
	}
	return out
}

// written are the objects that users write.
func (o Objects) written() []client.Object {
	var out []client.Object
	for i := range o.TunnelEndpoints {
		out = append(out, &o.TunnelEndpoints[i])
	}
	for i := range o.Configurations {
		out = append(out, &o.Configurations[i])
	}
	for i := range o.GatewayServers {
		out = append(out, &o.GatewayServers[i])
	}
	for i := range o.GatewayClients {
		out = append(out, &o.GatewayClients[i])
	}
	for i := range o.PublicKeys {
		out = append(out, &o.PublicKeys[i])
	}
	return out
}

// remoteOf is the ID of the peer that an object is about.
func remoteOf(o client.Object) string {
	t, ok := o.(*netv1alpha1.TunnelEndpoint)
	switch {
	case !ok:
		return o.GetLabels()[v1beta1.LabelRemoteClusterID]
	case t.Spec.ClusterIdentity != nil:
		return t.Spec.ClusterIdentity.ClusterID
	}
	return t.Spec.ClusterID
}

func (o Objects) peer(id string) Peer {
	of := func(object client.Object) bool { return remoteOf(object) == id }
	p := Peer{ID: id, MadeBy: o.madeBy(id)}
	var said []string // what the objects themselves say is wrong
	for _, c := range o.Configurations {
		if of(&c) {
			p.Networks = append(p.Networks, networks(c)...)
			if text, blocked := c.Annotations[v1beta1.AnnotationBlocked]; blocked {
				p.Blocked, p.Block = true, text
			}
			said = append(said, notTrue("Configuration", &c, c.Status.Conditions)...)
		}
	}
	for _, g := range o.GatewayServers {
		if of(&g) {
			p.Role = Server
			if e := g.Status.Endpoint; e != nil {
				p.Endpoint = endpoint(*e)
			}
			said = append(said, notTrue("GatewayServer", &g, g.Status.Conditions)...)
		}
	}
	for _, g := range o.GatewayClients {
		if of(&g) {
			p.Role, p.Endpoint = Client, endpoint(g.Spec.Endpoint)
			said = append(said, notTrue("GatewayClient", &g, g.Status.Conditions)...)
		}
	}
	if text, blocked := o.blockedKey(id); blocked && !p.Blocked {
		p.Blocked, p.Block = true, text
	}
	for _, c := range o.Connections {
		if of(&c) {
			p.Connection, p.RTT = string(c.Status.Value), c.Status.Latency.Value
			if c.Status.Peer != nil {
				p.Version = c.Status.Peer.Version
			}
			// Why it is not connected says the ForeignCluster.
			differ := apimeta.FindStatusCondition(c.Status.Conditions, v1beta1.ConditionNetworksMatch)
			if differ != nil {
				p.Missing = notTrue("Connection", &c, []metav1.Condition{*differ})
			}
		}
	}
	if p.RTT == "N/A" {
		p.RTT = ""
	}
	p.Missing = slices.Concat(said, o.missing(id, len(said) > 0), p.Missing)
	return p
}

// blockedKey returns what the controller says of the peer's key where it is blocked, and
// the peer has no other one.
func (o Objects) blockedKey(id string) (text string, blocked bool) {
	for _, k := range o.PublicKeys {
		if remoteOf(&k) != id {
			continue
		}
		i := slices.IndexFunc(k.Status.Conditions, func(c metav1.Condition) bool { return c.Reason == v1beta1.ReasonBlocked })
		if i < 0 {
			return "", false
		}
		text, blocked = k.Status.Conditions[i].Message, true
	}
	return text, blocked
}

// madeBy are the programs that wrote the objects of a peering, by the names under
// which the API server knows them. What the controller writes into them, such as
// finalizers, makes nobody their author, and neither does an annotation, as peer block
// and peer rotate write it.
func (o Objects) madeBy(id string) []string {
	by := map[string]bool{}
	for _, object := range o.written() {
		if remoteOf(object) != id {
			continue
		}
		for _, f := range object.GetManagedFields() {
			if f.Subresource == "" && f.Manager != controller && !annotates(f) {
				by[f.Manager] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(by))
}

// annotates tells whether a program wrote nothing but metadata of an object.
func annotates(f metav1.ManagedFieldsEntry) bool {
	if f.FieldsV1 == nil {
		return false
	}
	var wrote map[string]json.RawMessage
	if err := json.Unmarshal(f.FieldsV1.GetRawBytes(), &wrote); err != nil {
		return false // a newer form
	}
	delete(wrote, "f:metadata")
	return len(wrote) == 0
}

// missing is what the ForeignCluster says is not ready. Where an object has said why
// already, that its peering is not ready is no news.
func (o Objects) missing(id string, said bool) []string {
	var out []string
	for _, fc := range o.ForeignClusters {
		if string(fc.Spec.ClusterID) != id || fc.Status.Modules.Networking == nil {
			continue
		}
		for _, c := range fc.Status.Modules.Networking.Conditions {
			well := c.Status == corev1beta1.ConditionStatusReady || c.Status == corev1beta1.ConditionStatusEstablished
			if well || said && c.Reason == "ConfigurationNotReady" || c.Reason == "ConnectionMissing" {
				continue
			}
			out = append(out, c.Message)
		}
	}
	if len(out) == 0 && !slices.ContainsFunc(o.ForeignClusters, func(fc corev1beta1.ForeignCluster) bool { return string(fc.Spec.ClusterID) == id }) {
		out = append(out, fmt.Sprintf("the controller has not made a ForeignCluster %s yet: does it run (kubectl get pods -n %s)", id, v1beta1.DefaultNamespace))
	}
	return out
}

// notTrue are the messages of the conditions of an object that are False, each with
// the object's name.
func notTrue(kind string, o client.Object, conditions []metav1.Condition) []string {
	var out []string
	for _, c := range conditions {
		if c.Status == metav1.ConditionFalse {
			out = append(out, fmt.Sprintf("%s %s/%s: %s", kind, o.GetNamespace(), o.GetName(), c.Message))
		}
	}
	return out
}

// networks are those of a Configuration, with the names that this cluster has for
// them, index by index, and those that are followed.
func networks(c v1beta1.Configuration) []Network {
	var out []Network
	var here v1beta1.ClusterConfigCIDR
	if c.Status.Remote != nil {
		here = c.Status.Remote.CIDR
	}
	for _, part := range []struct {
		kind         string
		remote, here []v1beta1.CIDR
	}{{"pod", c.Spec.Remote.CIDR.Pod, here.Pod}, {"external", c.Spec.Remote.CIDR.External, here.External}} {
		for i, cidr := range part.remote {
			n := Network{Kind: part.kind, CIDR: string(cidr)}
			if i < len(part.here) {
				n.Here = string(part.here[i])
			}
			out = append(out, n)
		}
	}
	if f := c.Status.Follow; f != nil {
		for _, n := range f.Networks {
			out = append(out, Network{Kind: n.Type, CIDR: string(n.CIDR), Here: string(n.CIDR)})
		}
	}
	return out
}

// endpoint is an endpoint as people write it: addresses, and ports with their
// protocol.
func endpoint(e v1beta1.EndpointStatus) string {
	var ports []string
	for _, p := range e.Ports {
		ports = append(ports, fmt.Sprint(p))
	}
	if len(ports) == 0 && e.Port != nil {
		ports = []string{fmt.Sprint(*e.Port)}
	}
	if len(e.Addresses) == 0 || len(ports) == 0 {
		return ""
	}
	return strings.Join(e.Addresses, ", ") + " port " + strings.Join(ports, ", ")
}
