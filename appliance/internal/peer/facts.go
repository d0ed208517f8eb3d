package peer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Identity is what a cluster is, for as long as a command runs.
type Identity struct {
	ID  string
	UID types.UID // of Namespace kube-system: one per cluster
	// Pod and External are the cluster's own networks.
	Pod, External []v1beta1.CIDR
	// Pending names a Network that has none yet; empty: all have.
	Pending string
	// Template is what the gateway of this side is made from; nil: it is not
	// there. Templates are the names of those that are.
	Template  *unstructured.Unstructured
	Templates []string
}

// Facts are what is known of the peering on one side.
type Facts struct {
	Identity
	Cluster Cluster

	// Namespace is that of the peering's objects; its UID is empty while it is
	// not there.
	Namespace corev1.Namespace

	Configurations []v1beta1.Configuration
	Servers        []v1beta1.GatewayServer
	Clients        []v1beta1.GatewayClient
	Keys           []v1beta1.PublicKey
	Connections    []v1beta1.Connection
	// PublicKey is that of this side's gateway.
	PublicKey []byte
	// Starting says why this side's gateway does not run as it is written; empty: it
	// does, or that may not be read.
	Starting string
	// Invitation is the Secret of one, and Record what it says; nil: there is none. Reply is
	// what this side's gateway was told.
	Invitation *corev1.Secret
	Record     invitation.Record
	Reply      *invitation.Reply
	// Made are what a gateway consists of that is not gone yet.
	Made []string
}

// Both are the facts of the two sides.
type Both [2]Facts

// A ReadError says what could not be read.
type ReadError struct {
	Cluster Cluster
	Err     error
}

// Unwrap returns what the API server said.
func (e *ReadError) Unwrap() error { return e.Err }

// Error names the cluster and what to do.
func (e *ReadError) Error() string {
	switch {
	case apierrors.IsForbidden(e.Err):
		return fmt.Sprintf("%s: %v: ask an administrator of that cluster for this right, or use a kubeconfig that has it", e.Cluster.Name, e.Err)
	case apierrors.IsUnauthorized(e.Err):
		return fmt.Sprintf("%s: %v: the kubeconfig's credentials are not accepted; renew them, and try %s auth whoami", e.Cluster.Name, e.Err, e.Cluster.Kubectl)
	case meta.IsNoMatchError(e.Err):
		return notInstalled(e.Cluster, e.Err.Error())
	}
	var status apierrors.APIStatus
	if !errors.As(e.Err, &status) {
		return fmt.Sprintf("%s: the API server does not answer: %v: see whether %s version does", e.Cluster.Name, e.Err, e.Cluster.Kubectl)
	}
	return fmt.Sprintf("%s: %v", e.Cluster.Name, e.Err)
}

func notInstalled(c Cluster, why string) string {
	return fmt.Sprintf("%s: Isthmus is not installed in namespace %s (%s): install it by %s install --set discovery.config.clusterID=NAME, or name its namespace by %s",
		c.Name, c.System, why, c.Isthmusctl, cmp.Or(c.SystemFlag, "--namespace"))
}

// A NotInstalledError names the cluster that lacks the installation.
type NotInstalledError struct {
	Cluster Cluster
	Why     string
}

// Error says how to install it.
func (e *NotInstalledError) Error() string { return notInstalled(e.Cluster, e.Why) }

// Identify reads what a cluster is: its ID, networks and the template. It
// returns a ReadError or a NotInstalledError.
func Identify(ctx context.Context, c Cluster, t Template) (Identity, error) {
	var out Identity
	failed := func(err error) (Identity, error) { return out, &ReadError{c, err} }
	var ids corev1.ConfigMapList
	if err := c.Client.List(ctx, &ids, client.InNamespace(c.System), client.MatchingLabels{v1beta1.LabelAppName: v1beta1.ClusterIDConfigMap}); err != nil {
		return failed(err)
	}
	switch n := len(ids.Items); {
	case n == 0:
		return out, &NotInstalledError{c, "no ConfigMap there has the label " + v1beta1.LabelAppName + "=" + v1beta1.ClusterIDConfigMap}
	case n > 1:
		return out, &NotInstalledError{c, fmt.Sprintf("%d ConfigMaps there say what the cluster's ID is", n)}
	}
	if out.ID = ids.Items[0].Data[v1beta1.ClusterIDKey]; out.ID == "" {
		return out, &NotInstalledError{c, fmt.Sprintf("ConfigMap %s has no %s", ids.Items[0].Name, v1beta1.ClusterIDKey)}
	}
	var kubeSystem corev1.Namespace
	// Who may not see it loses one check.
	if err := c.Client.Get(ctx, client.ObjectKey{Name: "kube-system"}, &kubeSystem); err != nil && !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err) {
		return failed(err)
	}
	out.UID = kubeSystem.UID
	var networks v1alpha1.NetworkList
	if err := c.Client.List(ctx, &networks, client.InNamespace(c.System), client.HasLabels{v1beta1.LabelNetworkType}); err != nil {
		return failed(err)
	}
	slices.SortFunc(networks.Items, func(a, b v1alpha1.Network) int { return strings.Compare(a.Name, b.Name) })
	for _, n := range networks.Items {
		list := &out.Pod
		switch n.Labels[v1beta1.LabelNetworkType] {
		case v1beta1.NetworkTypePod:
		case v1beta1.NetworkTypeExternal:
			list = &out.External
		default:
			continue
		}
		if n.Status.CIDR == "" {
			out.Pending = fmt.Sprintf("Network %s/%s", n.Namespace, n.Name)
			continue
		}
		*list = append(*list, n.Status.CIDR)
	}
	if out.Pending == "" && (len(out.Pod) == 0 || len(out.External) == 0) {
		out.Pending = fmt.Sprintf("Networks of the types %s and %s in namespace %s", v1beta1.NetworkTypePod, v1beta1.NetworkTypeExternal, c.System)
	}
	if t.Kind == "" {
		return out, nil
	}
	if err := out.findTemplate(ctx, c, t); err != nil {
		return failed(err)
	}
	return out, nil
}

// findTemplate looks for a template, and where it is not for those that are.
func (id *Identity) findTemplate(ctx context.Context, c Cluster, t Template) error {
	list := &unstructured.UnstructuredList{}
	list.SetAPIVersion(t.APIVersion)
	list.SetKind(t.Kind + "List")
	if err := c.Client.List(ctx, list, client.InNamespace(t.Namespace)); err != nil {
		return err
	}
	for _, item := range list.Items {
		if item.GetName() == t.Name {
			id.Template = &item
			return nil
		}
	}
	// Who may not see those of all namespaces is told of this one's.
	if err := c.Client.List(ctx, list); err != nil && !apierrors.IsForbidden(err) {
		return err
	}
	for _, item := range list.Items {
		id.Templates = append(id.Templates, item.GetNamespace()+"/"+item.GetName())
	}
	slices.Sort(id.Templates)
	return nil
}

// Look reads what is there of a peering, on the side of a cluster that has been
// identified. It returns a ReadError.
func Look(ctx context.Context, c Cluster, own Identity, peer string) (Facts, error) {
	f := Facts{Identity: own, Cluster: c}
	if err := f.findNamespace(ctx, peer); err != nil {
		return f, &ReadError{c, err}
	}
	if f.Namespace.UID == "" {
		return f, nil
	}
	var configurations v1beta1.ConfigurationList
	var servers v1beta1.GatewayServerList
	var clients v1beta1.GatewayClientList
	var keys v1beta1.PublicKeyList
	var connections v1beta1.ConnectionList
	g, gctx := errgroup.WithContext(ctx)
	for _, list := range []client.ObjectList{&configurations, &servers, &clients, &keys, &connections} {
		g.Go(func() error {
			return c.Client.List(gctx, list, client.InNamespace(f.Namespace.Name), client.MatchingLabels{v1beta1.LabelRemoteClusterID: peer})
		})
	}
	if err := g.Wait(); err != nil {
		return f, &ReadError{c, err}
	}
	f.Configurations, f.Servers, f.Clients, f.Keys, f.Connections = configurations.Items, servers.Items, clients.Items, keys.Items, connections.Items
	for i := range f.Connections {
		f.Made = append(f.Made, "Connection "+f.Connections[i].Name)
	}
	if err := f.readGateway(ctx); err != nil {
		return f, &ReadError{c, err}
	}
	return f, nil
}

// findNamespace finds the namespace of the peering, and what it is to be called
// if there is none: by its labels, or where that is not allowed by its name.
func (f *Facts) findNamespace(ctx context.Context, peer string) error {
	name := f.Cluster.Namespace
	if name == "" {
		name = v1beta1.TenantNamespacePfx + peer
		var list corev1.NamespaceList
		err := f.Cluster.Client.List(ctx, &list, client.MatchingLabels{v1beta1.LabelRemoteClusterID: peer}, client.HasLabels{v1beta1.LabelTenantNamespace})
		if err != nil && !apierrors.IsForbidden(err) {
			return err
		}
		if err == nil && len(list.Items) > 0 {
			slices.SortFunc(list.Items, func(a, b corev1.Namespace) int { return strings.Compare(a.Name, b.Name) })
			if i := slices.IndexFunc(list.Items, func(n corev1.Namespace) bool { return n.Name == name }); i >= 0 {
				f.Namespace = list.Items[i]
			} else {
				f.Namespace = list.Items[0]
			}
			return nil
		}
	}
	f.Namespace.Name = name
	err := f.Cluster.Client.Get(ctx, client.ObjectKey{Name: name}, &f.Namespace)
	if apierrors.IsNotFound(err) {
		f.Namespace = corev1.Namespace{}
		f.Namespace.Name = name
		return nil
	}
	return err
}

// readGateway reads the public key of this side's gateway, once it says where that
// is, and how far its pods are.
func (f *Facts) readGateway(ctx context.Context) error {
	var ref *corev1.ObjectReference
	var g client.Object
	switch {
	case len(f.Servers) == 1:
		ref, g = f.Servers[0].Status.SecretRef, &f.Servers[0]
	case len(f.Clients) == 1:
		ref, g = f.Clients[0].Status.SecretRef, &f.Clients[0]
	default:
		return nil
	}
	var d appsv1.Deployment
	key := client.ObjectKey{Namespace: f.Namespace.Name, Name: plan.GatewayName(g.GetName())}
	switch err := f.Cluster.Client.Get(ctx, key, &d); {
	case err == nil:
		f.Starting = kube.DeploymentTrouble(&d)
	case apierrors.IsNotFound(err):
		f.Starting = "Deployment " + key.Name + " is not there yet"
	case !apierrors.IsForbidden(err):
		return err
	}
	if ref == nil || ref.Name == "" {
		return nil
	}
	var s corev1.Secret
	if err := f.Cluster.Client.Get(ctx, client.ObjectKey{Namespace: f.Namespace.Name, Name: ref.Name}, &s); err != nil {
		return client.IgnoreNotFound(err)
	}
	if !leftBehind(&s, g) {
		f.PublicKey = s.Data[v1beta1.PublicKeyField] // the private one goes no further
	}
	return nil
}

// leftBehind reports whether a Secret is that of a gateway of the same name that was
// there before: it may be on its way out.
func leftBehind(s *corev1.Secret, g client.Object) bool {
	return s.DeletionTimestamp != nil || slices.ContainsFunc(s.OwnerReferences, func(o metav1.OwnerReference) bool {
		return o.UID != g.GetUID() && (o.Kind == "GatewayServer" || o.Kind == "GatewayClient")
	})
}
