package peer

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// remove returns what is next on the way to no gateways, or with Reset to no
// peering. Clients go before servers, which would otherwise be dialled in vain,
// and on both sides everything that is labelled as the peer's, and nothing else.
func remove(b *Both, action Action, o *Options) Step {
	var s Step
	checkPair(b, &s)
	checkTunnelEndpoints(b, &s)
	if s.busy() {
		return s
	}
	gone := func(on Side, object client.Object) {
		if object.GetDeletionTimestamp() != nil {
			s.wait(on, false, "the end of %s", b.ref(on, object))
			return
		}
		s.Changes = append(s.Changes, Change{On: on, Deed: Delete, Object: object})
	}
	for on := range b {
		for i := range b[on].Clients {
			gone(Side(on), &b[on].Clients[i])
		}
	}
	for on := range b {
		for i := range b[on].Servers {
			gone(Side(on), &b[on].Servers[i])
		}
	}
	for on := range b {
		for i := range b[on].Keys {
			gone(Side(on), &b[on].Keys[i])
		}
	}
	if s.busy() {
		return s
	}
	// The controller takes back what it made of gateways. A namespace goes with it.
	if o.Wait || action == Reset {
		for on := range b {
			if made := b[on].Made; len(made) > 0 {
				s.wait(Side(on), false, "the controller of %s to take back %s in namespace %s", b[on].ID, strings.Join(made, ", "), b[on].Namespace.Name)
			}
		}
	}
	if s.busy() || action != Reset {
		return s
	}
	for on := range b {
		for i := range b[on].Configurations {
			gone(Side(on), &b[on].Configurations[i])
		}
	}
	if s.busy() {
		return s
	}
	for i := range b {
		on, n := Side(i), &b[i].Namespace
		switch {
		case n.UID == "":
		case n.DeletionTimestamp != nil && o.Wait:
			s.wait(on, false, "the end of Namespace %s in %s", n.Name, b[i].ID)
		case n.DeletionTimestamp != nil:
		case n.Labels[v1beta1.LabelTenantNamespace] == "true" && n.Labels[v1beta1.LabelRemoteClusterID] == b[on.other()].ID:
			s.Changes = append(s.Changes, Change{On: on, Deed: Delete, Object: n, Emptied: true})
		default:
			s.Notes = append(s.Notes, fmt.Sprintf("%s stays: it is no tenant namespace, for it lacks the labels %s=true and %s=%s",
				b.ref(on, n), v1beta1.LabelTenantNamespace, v1beta1.LabelRemoteClusterID, b[on.other()].ID))
		}
	}
	return s
}

// lookMade adds to the facts of a side what the controller has made of gateways
// and has not taken back.
func (f *Facts) lookMade(ctx context.Context, peer string) error {
	if f.Namespace.UID == "" {
		return nil
	}
	var list appsv1.DeploymentList
	if err := f.Cluster.Client.List(ctx, &list, client.InNamespace(f.Namespace.Name), client.MatchingLabels{v1beta1.LabelRemoteClusterID: peer}); err != nil {
		return &ReadError{f.Cluster, err}
	}
	for _, d := range list.Items {
		f.Made = append(f.Made, "Deployment "+d.Name)
	}
	return nil
}

// comesAlong are kinds of objects that a namespace has by itself, or that are
// about others.
var comesAlong = map[string]bool{
	"Event": true, "Lease": true, "Endpoints": true, "EndpointSlice": true, "PodMetrics": true, "ControllerRevision": true,
}

// occupants names what is in the namespace of a peering and is not of it: what
// neither the namespace itself, nor another object that goes, nor our controller
// brought. What may not be seen may be anything.
func occupants(ctx context.Context, c Cluster, namespace string, kinds []schema.GroupVersionKind) ([]string, error) {
	var mu sync.Mutex
	var out []string
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(16)
	for _, kind := range kinds {
		if comesAlong[kind.Kind] {
			continue
		}
		g.Go(func() error {
			list := &metav1.PartialObjectMetadataList{}
			list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
			err := c.Client.List(ctx, list, client.InNamespace(namespace))
			switch {
			case apierrors.IsForbidden(err):
				mu.Lock()
				out = append(out, kind.Kind+" (which you may not list)")
				mu.Unlock()
				return nil
			case apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), meta.IsNoMatchError(err):
				return nil
			case err != nil:
				return &ReadError{c, err}
			}
			for _, o := range list.Items {
				if !belongs(kind.Kind, &o) {
					mu.Lock()
					out = append(out, kind.Kind+" "+o.Name)
					mu.Unlock()
				}
			}
			return nil
		})
	}
	err := g.Wait()
	slices.Sort(out)
	return slices.Compact(out), err
}

// belongs reports whether an object of a peering's namespace may go with it.
func belongs(kind string, o metav1.Object) bool {
	switch {
	case o.GetDeletionTimestamp() != nil, len(o.GetOwnerReferences()) > 0, o.GetLabels()[v1beta1.LabelManagedBy] == v1beta1.ManagedBy:
		return true
	case o.GetLabels()[v1beta1.LabelGatewayResource] == "true":
		return true
	case kind == "ConfigMap":
		return o.GetName() == "kube-root-ca.crt" || o.GetName() == "openshift-service-ca.crt"
	case kind == "ServiceAccount":
		return o.GetName() == "default"
	case kind == "Secret":
		return o.GetLabels()[v1beta1.LabelNonce] == "true" // nobody answers it
	}
	return false
}

// NamespacedKinds are the kinds of objects in namespaces, of what a cluster says
// that it serves.
func NamespacedKinds(lists []*metav1.APIResourceList) []schema.GroupVersionKind {
	var out []schema.GroupVersionKind
	for _, l := range lists {
		gv, err := schema.ParseGroupVersion(l.GroupVersion)
		if err != nil {
			continue
		}
		for _, r := range l.APIResources {
			if r.Namespaced && slices.Contains(r.Verbs, "list") && !strings.Contains(r.Name, "/") {
				out = append(out, gv.WithKind(r.Kind))
			}
		}
	}
	return out
}

// left says that a namespace stays.
func left(ref Ref, who []string) string {
	more := ""
	if len(who) > 3 {
		more, who = fmt.Sprintf(" and %d more", len(who)-3), who[:3]
	}
	return fmt.Sprintf("%s stays, for not all of it is of the peering: %s%s", ref, strings.Join(who, ", "), more)
}
