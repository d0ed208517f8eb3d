package controllers

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// What watched and cacheOptions read. RBAC can't be limited to labels: of other
// people's objects the informers ask for none, or take a few fields only.
//
// +kubebuilder:rbac:groups="",resources=namespaces;nodes;pods;secrets;serviceaccounts;services,verbs=list;watch
// +kubebuilder:rbac:groups="",namespace=system,resources=configmaps,verbs=list;watch
// +kubebuilder:rbac:groups=apps,resources=deployments,verbs=list;watch
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=list;watch
// +kubebuilder:rbac:groups=rbac.authorization.k8s.io,resources=clusterrolebindings;rolebindings;roles,verbs=list;watch
// +kubebuilder:rbac:groups=networking.liqo.io,resources=configurations;connections;firewallconfigurations;gatewayclients;gatewayreports;gatewayservers;genevetunnels;internalfabrics;internalnodes;publickeies;routeconfigurations;wggatewayclients;wggatewayclienttemplates;wggatewayservers;wggatewayservertemplates,verbs=list;watch
// +kubebuilder:rbac:groups=ipam.liqo.io,resources=ips;networks,verbs=list;watch
// +kubebuilder:rbac:groups=core.liqo.io,resources=foreignclusters,verbs=list;watch
// +kubebuilder:rbac:groups=net.liqo.io,resources=tunnelendpoints,verbs=list;watch

// watched are the kinds that the controller reads.
func watched() []client.Object {
	return []client.Object{
		&corev1.ConfigMap{}, &corev1.Namespace{}, &corev1.Node{}, &corev1.Pod{}, &corev1.Secret{}, &corev1.Service{}, &corev1.ServiceAccount{},
		&appsv1.Deployment{}, &discoveryv1.EndpointSlice{}, &rbacv1.Role{}, &rbacv1.RoleBinding{}, &rbacv1.ClusterRoleBinding{},
		&v1beta1.Configuration{}, &v1beta1.Connection{}, &v1beta1.FirewallConfiguration{}, &v1beta1.GatewayClient{},
		&v1beta1.GatewayReport{}, &v1beta1.GatewayServer{}, &v1beta1.GeneveTunnel{}, &v1beta1.InternalFabric{},
		&v1beta1.InternalNode{}, &v1beta1.PublicKey{}, &v1beta1.RouteConfiguration{}, &v1beta1.WgGatewayClient{},
		&v1beta1.WgGatewayClientTemplate{}, &v1beta1.WgGatewayServer{}, &v1beta1.WgGatewayServerTemplate{},
		&ipamv1alpha1.IP{}, &ipamv1alpha1.Network{}, &corev1beta1.ForeignCluster{}, &netv1alpha1.TunnelEndpoint{},
	}
}

// cacheOptions limits the informers to what matters: of Kubernetes' own kinds
// what the controller made, of pods and nodes the few fields that are read, and of
// other people's Services the names and the ports of nodes.
func cacheOptions(namespace string, newInformer kube.InformerFunc) cache.Options {
	ours := cache.ByObject{Label: labels.SelectorFromSet(labels.Set{v1beta1.LabelManagedBy: v1beta1.ManagedBy})}
	return cache.Options{
		ByObject: map[client.Object]cache.ByObject{
			&corev1.ConfigMap{}: {Namespaces: map[string]cache.Config{namespace: {}}, Transform: stripConfigMap},
			&corev1.Secret{}:    {Label: labels.SelectorFromSet(labels.Set{v1beta1.LabelGatewayResource: "true"})},
			&discoveryv1.EndpointSlice{}: {Label: labels.SelectorFromSet(labels.Set{
				v1beta1.LabelManagedBy: v1beta1.ManagedBy, discoveryv1.LabelManagedBy: v1beta1.ManagedBy,
			})},
			&corev1.ServiceAccount{}:     ours,
			&appsv1.Deployment{}:         ours,
			&rbacv1.Role{}:               ours,
			&rbacv1.RoleBinding{}:        ours,
			&rbacv1.ClusterRoleBinding{}: ours,
			&corev1.Pod{}:                {Transform: stripPod},
			&corev1.Node{}:               {Transform: stripNode},
			&corev1.Service{}:            {Transform: stripService},
		},
		DefaultTransform:            cache.TransformStripManagedFields(),
		ReaderFailOnMissingInformer: true,
		NewInformer:                 newInformer,
	}
}

// apiServerEndpoints returns informers of where the Service default/kubernetes leads:
// to the API server's own addresses. They are apart, since those of the manager
// ask for EndpointSlices of ours, and a selector can't say "or".
func apiServerEndpoints(mgr manager.Manager, newInformer kube.InformerFunc) (cache.Cache, error) {
	return cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		ByObject: map[client.Object]cache.ByObject{
			&discoveryv1.EndpointSlice{}: {Namespaces: map[string]cache.Config{
				metav1.NamespaceDefault: {LabelSelector: labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: "kubernetes"})},
			}},
		},
		DefaultTransform:            cache.TransformStripManagedFields(),
		ReaderFailOnMissingInformer: true,
		NewInformer:                 newInformer,
	})
}

// stripPod keeps what says where a pod is and whether it runs.
func stripPod(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	out := kube.BarePod(p)
	if mac, ok := p.Annotations[v1beta1.AnnotationVTEPMAC]; ok {
		out.Annotations = map[string]string{v1beta1.AnnotationVTEPMAC: mac}
	}
	return out, nil
}

// stripConfigMap keeps what the two ConfigMaps say that are read. One is found by its label
// and the other by its name, and a selector can't say "or".
func stripConfigMap(o any) (any, error) {
	c, ok := o.(*corev1.ConfigMap)
	switch {
	case !ok:
		return o, nil
	case ownConfigMap(c):
		return cache.TransformStripManagedFields()(c)
	}
	return &corev1.ConfigMap{ObjectMeta: kube.BareMeta(c.ObjectMeta)}, nil
}

// ownConfigMap reports whether a ConfigMap is the one of the cluster's ID, or that of the
// keys that are blocked.
func ownConfigMap(c *corev1.ConfigMap) bool {
	return c.Name == v1beta1.BlockedKeysConfigMap || c.Labels[v1beta1.LabelAppName] == v1beta1.ClusterIDConfigMap
}

// stripService keeps the names and the ports of nodes of Services that the
// controller did not make: they are taken.
func stripService(o any) (any, error) {
	s, ok := o.(*corev1.Service)
	if !ok {
		return o, nil
	}
	if kube.Made(s) {
		return cache.TransformStripManagedFields()(s)
	}
	out := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: s.Namespace, Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion, DeletionTimestamp: s.DeletionTimestamp,
	}}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 {
			out.Spec.Ports = append(out.Spec.Ports, corev1.ServicePort{Protocol: p.Protocol, NodePort: p.NodePort})
		}
	}
	if p := s.Spec.HealthCheckNodePort; p != 0 {
		out.Spec.Ports = append(out.Spec.Ports, corev1.ServicePort{Protocol: corev1.ProtocolTCP, NodePort: p})
	}
	return out, nil
}

// stripNode keeps the addresses of a node, whether it is ready, and whether it
// takes pods.
func stripNode(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	out := &corev1.Node{ObjectMeta: kube.BareMeta(n.ObjectMeta)}
	out.Spec.PodCIDR, out.Spec.PodCIDRs, out.Spec.Unschedulable = n.Spec.PodCIDR, n.Spec.PodCIDRs, n.Spec.Unschedulable
	out.Status.Addresses = n.Status.Addresses
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out.Status.Conditions = []corev1.NodeCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return out, nil
}

// watch starts an informer for every kind, and has changes lead to a pass.
func (r *reconciler) watch(ctx context.Context, informers cache.Cache) error {
	for _, o := range watched() {
		if err := r.follow(ctx, informers, o); err != nil {
			return err
		}
	}
	return r.follow(ctx, r.apiServers, &discoveryv1.EndpointSlice{})
}

// follow has changes of one kind lead to a pass. What comes and goes with every pod
// is none.
func (r *reconciler) follow(ctx context.Context, informers cache.Cache, o client.Object) error {
	informer, err := informers.GetInformer(ctx, o, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("informer for %T: %w", o, err)
	}
	kind, err := apiutil.GVKForObject(o, r.scheme)
	if err != nil {
		return fmt.Errorf("informer for %T: %w", o, err)
	}
	if _, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(is any) {
			if r.planned(ctx, is) {
				r.notify()
			}
		},
		DeleteFunc: func(was any) {
			if o, ok := was.(client.Object); ok {
				r.writes.deleted(objectKey{kind, client.ObjectKeyFromObject(o)}, o.GetResourceVersion())
			}
			if r.planned(ctx, was) {
				r.notify()
			}
		},
		UpdateFunc: func(was, is any) {
			if matters(was, is) && (r.planned(ctx, was) || r.planned(ctx, is)) {
				r.notify()
			}
		},
	}); err != nil {
		return fmt.Errorf("informer for %T: %w", o, err)
	}
	return nil
}

func (r *reconciler) notify() {
	select {
	case r.changed <- struct{}{}:
	default: // a pass is due already
	}
}

// planned reports whether an object is one that a plan depends on. Most pods are not:
// those whose addresses are in the podCIDRs of their node. Nor are other people's ConfigMaps.
func (r *reconciler) planned(ctx context.Context, o any) bool {
	if c, ok := o.(*corev1.ConfigMap); ok {
		return ownConfigMap(c)
	}
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return true
	}
	on := &corev1.Node{}
	err := r.cache.Get(ctx, client.ObjectKey{Name: pod.Spec.NodeName}, on)
	switch {
	case apierrors.IsNotFound(err):
		on = nil // a node that comes leads to a pass itself
	case err != nil:
		return true
	}
	return kube.PodMatters(pod, on, r.cfg.Namespace)
}

// matters reports whether an update can change the plan. Kubelets and gateways
// write heartbeats.
func matters(was, is any) bool {
	a, ok := was.(client.Object)
	b, ok2 := is.(client.Object)
	if !ok || !ok2 {
		return true
	}
	if a.GetResourceVersion() == b.GetResourceVersion() {
		return false
	}
	a, b = forPlan(a), forPlan(b)
	return !equality.Semantic.DeepEqual(a, b)
}

// forPlan returns a copy without what the plan does not read and changes often.
func forPlan(o client.Object) client.Object {
	o = o.DeepCopyObject().(client.Object)
	o.SetResourceVersion("")
	o.SetManagedFields(nil)
	switch o := o.(type) {
	case *v1beta1.Connection:
		o.Status.Latency = v1beta1.ConnectionLatency{}
	case *v1beta1.GatewayReport:
		o.Status.LastHandshake = nil
	}
	return o
}

func uid(s string) types.UID { return types.UID(s) }
