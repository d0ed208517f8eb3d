package controllers

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// read returns everything that the plan depends on, from the informers.
func (r *reconciler) read(ctx context.Context) (kube.Objects, error) {
	o := kube.Objects{Namespace: r.cfg.Namespace, Options: r.cfg.Options, Now: time.Now()}
	var err error
	if o.ClusterID, err = r.clusterID(ctx); err != nil {
		return o, err
	}
	if o.BlockedKeys, err = r.blockedKeys(ctx); err != nil {
		return o, err
	}
	l, endpoints := &lister{ctx: ctx, from: r.cache}, &lister{ctx: ctx, from: r.apiServers}
	o.Nodes = items(l, &corev1.NodeList{}, func(x *corev1.NodeList) []corev1.Node { return x.Items })
	o.Pods = items(l, &corev1.PodList{}, func(x *corev1.PodList) []corev1.Pod { return x.Items })
	o.Services = items(l, &corev1.ServiceList{}, func(x *corev1.ServiceList) []corev1.Service { return x.Items })
	o.Deployments = items(l, &appsv1.DeploymentList{}, func(x *appsv1.DeploymentList) []appsv1.Deployment { return x.Items })
	o.Secrets = items(l, &corev1.SecretList{}, func(x *corev1.SecretList) []corev1.Secret { return x.Items })
	o.Namespaces = items(l, &corev1.NamespaceList{}, func(x *corev1.NamespaceList) []corev1.Namespace { return x.Items })
	o.APIServers = items(endpoints, &discoveryv1.EndpointSliceList{}, func(x *discoveryv1.EndpointSliceList) []discoveryv1.EndpointSlice { return x.Items })
	o.Configurations = items(l, &v1beta1.ConfigurationList{}, func(x *v1beta1.ConfigurationList) []v1beta1.Configuration { return x.Items })
	o.Connections = items(l, &v1beta1.ConnectionList{}, func(x *v1beta1.ConnectionList) []v1beta1.Connection { return x.Items })
	o.GatewayServers = items(l, &v1beta1.GatewayServerList{}, func(x *v1beta1.GatewayServerList) []v1beta1.GatewayServer { return x.Items })
	o.GatewayClients = items(l, &v1beta1.GatewayClientList{}, func(x *v1beta1.GatewayClientList) []v1beta1.GatewayClient { return x.Items })
	o.ServerTemplates = items(l, &v1beta1.WgGatewayServerTemplateList{}, func(x *v1beta1.WgGatewayServerTemplateList) []v1beta1.WgGatewayServerTemplate { return x.Items })
	o.ClientTemplates = items(l, &v1beta1.WgGatewayClientTemplateList{}, func(x *v1beta1.WgGatewayClientTemplateList) []v1beta1.WgGatewayClientTemplate { return x.Items })
	o.PublicKeys = items(l, &v1beta1.PublicKeyList{}, func(x *v1beta1.PublicKeyList) []v1beta1.PublicKey { return x.Items })
	o.Fabrics = items(l, &v1beta1.InternalFabricList{}, func(x *v1beta1.InternalFabricList) []v1beta1.InternalFabric { return x.Items })
	o.InternalNodes = items(l, &v1beta1.InternalNodeList{}, func(x *v1beta1.InternalNodeList) []v1beta1.InternalNode { return x.Items })
	o.Tunnels = items(l, &v1beta1.GeneveTunnelList{}, func(x *v1beta1.GeneveTunnelList) []v1beta1.GeneveTunnel { return x.Items })
	o.Routes = items(l, &v1beta1.RouteConfigurationList{}, func(x *v1beta1.RouteConfigurationList) []v1beta1.RouteConfiguration { return x.Items })
	o.Firewalls = items(l, &v1beta1.FirewallConfigurationList{}, func(x *v1beta1.FirewallConfigurationList) []v1beta1.FirewallConfiguration { return x.Items })
	o.Reports = items(l, &v1beta1.GatewayReportList{}, func(x *v1beta1.GatewayReportList) []v1beta1.GatewayReport { return x.Items })
	o.Networks = items(l, &ipamv1alpha1.NetworkList{}, func(x *ipamv1alpha1.NetworkList) []ipamv1alpha1.Network { return x.Items })
	o.IPs = items(l, &ipamv1alpha1.IPList{}, func(x *ipamv1alpha1.IPList) []ipamv1alpha1.IP { return x.Items })
	o.ForeignClusters = items(l, &corev1beta1.ForeignClusterList{}, func(x *corev1beta1.ForeignClusterList) []corev1beta1.ForeignCluster { return x.Items })
	o.TunnelEndpoints = items(l, &netv1alpha1.TunnelEndpointList{}, func(x *netv1alpha1.TunnelEndpointList) []netv1alpha1.TunnelEndpoint { return x.Items })
	return o, errors.Join(l.err, endpoints.err)
}

// A lister reads lists until one fails.
type lister struct {
	ctx  context.Context
	from client.Reader
	err  error
}

func items[L client.ObjectList, T any](l *lister, list L, get func(L) []T) []T {
	if l.err != nil {
		return nil
	}
	if err := l.from.List(l.ctx, list); err != nil {
		l.err = fmt.Errorf("read %T: %w", list, err)
		return nil
	}
	return get(list)
}

// blockedKeys returns the ConfigMap of the keys that are blocked, if there is one.
func (r *reconciler) blockedKeys(ctx context.Context) ([]corev1.ConfigMap, error) {
	var o corev1.ConfigMap
	err := r.cache.Get(ctx, client.ObjectKey{Namespace: r.cfg.Namespace, Name: v1beta1.BlockedKeysConfigMap}, &o)
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return []corev1.ConfigMap{o}, nil
}

// clusterID returns the ID of this cluster. Without it nothing may be planned.
func (r *reconciler) clusterID(ctx context.Context) (string, error) {
	var maps corev1.ConfigMapList
	if err := r.cache.List(ctx, &maps, client.InNamespace(r.cfg.Namespace), client.MatchingLabels{v1beta1.LabelAppName: v1beta1.ClusterIDConfigMap}); err != nil {
		return "", fmt.Errorf("cluster ID: %w", err)
	}
	want := fmt.Sprintf("ConfigMap in namespace %s with the label %s=%s and the key %s", r.cfg.Namespace, v1beta1.LabelAppName, v1beta1.ClusterIDConfigMap, v1beta1.ClusterIDKey)
	switch {
	case len(maps.Items) == 0:
		return "", fmt.Errorf("cluster ID: there is no %s: install the chart, or create it", want)
	case len(maps.Items) > 1:
		return "", fmt.Errorf("cluster ID: there is more than one %s: %s and %s; delete one", want, maps.Items[0].Name, maps.Items[1].Name)
	}
	id := maps.Items[0].Data[v1beta1.ClusterIDKey]
	if id == "" {
		return "", fmt.Errorf("cluster ID: ConfigMap %s/%s has no %s: set it to the name of this cluster", r.cfg.Namespace, maps.Items[0].Name, v1beta1.ClusterIDKey)
	}
	return id, nil
}
