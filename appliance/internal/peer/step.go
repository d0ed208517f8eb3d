package peer

import (
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// A Deed is what is done to an object.
type Deed string

// The deeds.
const (
	Create Deed = "created"
	Update Deed = "updated"
	Delete Deed = "deleted"
)

// A Change is one thing to do.
type Change struct {
	On     Side
	Deed   Deed
	Object client.Object // as it is to be; of a deletion, as it is
	Why    string        // of an update: what changes
	// Emptied: it is a namespace, which goes only when nobody else uses it.
	Emptied bool
}

// A Wait is something that others have to do first.
type Wait struct {
	On   Side
	Text string
	// Refused: it will not come by itself, as far as can be seen.
	Refused bool
	// Until is when somebody who has to decide will have done so. It is not in the time of
	// the run, Options.Timeout. Zero: nobody has to.
	Until time.Time
}

// A Step is what is to be done next. Nothing in it says that all is done.
type Step struct {
	Problems []Problem
	Changes  []Change
	Waits    []Wait
	Notes    []string // for the operator to know
	// InPlace are the objects of the peering that are there and are as they
	// should be.
	InPlace []Ref
}

func (s *Step) problem(check, object, fix, format string, args ...any) {
	s.Problems = append(s.Problems, Problem{Check: check, Object: object, Message: fmt.Sprintf(format, args...), Fix: fix})
}

func (s *Step) wait(on Side, refused bool, format string, args ...any) {
	s.Waits = append(s.Waits, Wait{On: on, Refused: refused, Text: fmt.Sprintf(format, args...)})
}

// busy reports whether something is left to do or to wait for before what comes
// next can be planned.
func (s *Step) busy() bool { return len(s.Problems)+len(s.Changes)+len(s.Waits) > 0 }

// kindOf returns the API version and the kind of an object that is of no list.
func kindOf(o client.Object) (version, kind string) {
	switch o.(type) {
	case *corev1.Namespace:
		return "v1", "Namespace"
	case *corev1.Secret:
		return "v1", "Secret"
	case *v1beta1.Configuration:
		kind = "Configuration"
	case *v1beta1.GatewayServer:
		kind = "GatewayServer"
	case *v1beta1.GatewayClient:
		kind = "GatewayClient"
	case *v1beta1.PublicKey:
		kind = "PublicKey"
	}
	return v1beta1.GroupVersion.String(), kind
}

// ref names an object of a side.
func (b *Both) ref(on Side, o client.Object) Ref {
	version, kind := kindOf(o)
	return Ref{Cluster: b[on].ID, APIVersion: version, Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName()}
}

// meta is the metadata of a new object about the peer of a side, in the public
// CLI's names.
func (b *Both) meta(on Side, o *Options) metav1.ObjectMeta {
	peer := b[on.other()].ID
	m := metav1.ObjectMeta{Namespace: b[on].Namespace.Name, Name: peer, Labels: map[string]string{}, Annotations: maps.Clone(o.Annotations)}
	for k, v := range o.Labels {
		m.Labels[k] = v
	}
	m.Labels[v1beta1.LabelRemoteClusterID] = peer
	return m
}

// made reports whether the controller made an object, of a TunnelEndpoint.
func made(o client.Object) bool { return o.GetLabels()[v1beta1.LabelManagedBy] == v1beta1.ManagedBy }

// checkPair finds what makes it impossible that two clusters are peers.
func checkPair(b *Both, s *Step) {
	local, remote := &b[Local], &b[Remote]
	switch {
	case local.UID != "" && local.UID == remote.UID:
		s.problem("clusters", local.Cluster.Name+" and "+remote.Cluster.Name, "name the other one by --remote-kubeconfig or --remote-context",
			"they are the same cluster, %s", local.ID)
	case local.ID == remote.ID && (local.UID == "" || remote.UID == ""):
		s.problem("clusters", local.Cluster.Name+" and "+remote.Cluster.Name, "if they are one, name the other cluster by --remote-kubeconfig or --remote-context; if they are two, give one of them another ID: "+
			fmt.Sprintf("%s upgrade --set discovery.config.clusterID=NAME", remote.Cluster.Isthmusctl),
			"both have the ID %s, and whether they are the same cluster can't be seen, since you may not read Namespace kube-system in both", local.ID)
	case local.ID == remote.ID:
		s.problem("clusters", local.Cluster.Name+" and "+remote.Cluster.Name,
			fmt.Sprintf("give one of them another ID, by which its peers will know it: %s upgrade --set discovery.config.clusterID=NAME", remote.Cluster.Isthmusctl),
			"they are two clusters with the same ID, %s", local.ID)
	}
}

// checkTunnelEndpoints finds what is not written as the objects that we make.
func checkTunnelEndpoints(b *Both, s *Step) {
	for on := range b {
		f := &b[on]
		var objects []client.Object
		for i := range f.Configurations {
			objects = append(objects, &f.Configurations[i])
		}
		for i := range f.Servers {
			objects = append(objects, &f.Servers[i])
		}
		for i := range f.Clients {
			objects = append(objects, &f.Clients[i])
		}
		for _, o := range objects {
			if made(o) {
				s.problem("objects", b.ref(Side(on), o).String(), fmt.Sprintf("change or delete that: %s get tunnelendpoints -A", f.Cluster.Kubectl),
					"the controller made it of a TunnelEndpoint, by which this peering is written")
				return
			}
		}
	}
}

// checkTwice finds objects of which a peering has one.
func checkTwice(b *Both, s *Step) {
	for on := range b {
		f := &b[on]
		names := func(kind string, n int, name func(int) string) {
			if n < 2 {
				return
			}
			var list []string
			for i := range n {
				list = append(list, name(i))
			}
			s.problem("objects", fmt.Sprintf("%s in namespace %s of %s", kind, f.Namespace.Name, f.ID),
				fmt.Sprintf("delete all but one: %s delete %s -n %s NAME", f.Cluster.Kubectl, plural(kind), f.Namespace.Name),
				"there are %d for one peering, %s", n, strings.Join(list, ", "))
		}
		names("Configuration", len(f.Configurations), func(i int) string { return f.Configurations[i].Name })
		names("PublicKey", len(f.Keys), func(i int) string { return f.Keys[i].Name })
		names("GatewayServer or GatewayClient", len(f.Servers)+len(f.Clients), func(i int) string {
			if i < len(f.Servers) {
				return "GatewayServer " + f.Servers[i].Name
			}
			return "GatewayClient " + f.Clients[i-len(f.Servers)].Name
		})
	}
	for _, twice := range []struct {
		kind string
		n    [2]int
	}{{"GatewayServer", [2]int{len(b[Local].Servers), len(b[Remote].Servers)}}, {"GatewayClient", [2]int{len(b[Local].Clients), len(b[Remote].Clients)}}} {
		if twice.n[Local] == 1 && twice.n[Remote] == 1 {
			f := &b[Remote]
			s.problem("objects", fmt.Sprintf("%s in %s and in %s", twice.kind, b[Local].ID, f.ID),
				fmt.Sprintf("delete one of them: %s delete %s -n %s -l %s=%s", f.Cluster.Kubectl, plural(twice.kind), f.Namespace.Name, v1beta1.LabelRemoteClusterID, b[Local].ID),
				"both sides have one, and a peering has a server on one side and a client on the other")
		}
	}
}

// plural is what kubectl calls a kind.
func plural(kind string) string {
	switch kind {
	case "PublicKey":
		return "publickeies"
	case "GatewayServer or GatewayClient":
		return "gatewayserver,gatewayclient"
	}
	return strings.ToLower(kind)
}
