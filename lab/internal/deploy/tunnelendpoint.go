package deploy

import (
	"context"
	"encoding/base64"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// applyEndpoints applies the TunnelEndpoints of a peering on both sides, first
// without what they do not know yet: where the server is, and each other's key.
func (in *installer) applyEndpoints(ctx context.Context, p topology.Peering) error {
	server, dialler := in.clients[p.Server], in.clients[p.Client]
	serverCluster, _ := in.cfg.Topology.Cluster(p.Server)
	clientCluster, _ := in.cfg.Topology.Cluster(p.Client)

	waits := tunnelEndpoint(serverCluster, clientCluster, map[string]any{netv1alpha1.BackendServiceType: p.Service})
	if err := apply(ctx, server, []*unstructured.Unstructured{tenantNamespace(p.Client), waits}); err != nil {
		return err
	}
	endpoint, err := waitEndpoint(ctx, server, p)
	if err != nil {
		return err
	}
	dials := tunnelEndpoint(clientCluster, serverCluster, map[string]any{netv1alpha1.BackendPort: fmt.Sprint(endpoint["port"])})
	if err := unstructured.SetNestedField(dials.Object, endpoint["addresses"].([]any)[0], "spec", "endpointIP"); err != nil {
		return err
	}
	if err := apply(ctx, dialler, []*unstructured.Unstructured{tenantNamespace(p.Server), dials}); err != nil {
		return err
	}
	if err := completeEndpoint(ctx, server, dialler, p.Client, dials); err != nil {
		return err
	}
	return completeEndpoint(ctx, dialler, server, p.Server, waits)
}

// completeEndpoint brings the public key of the gateway that leads to peer, in
// the cluster behind from, into the TunnelEndpoint of the other cluster.
func completeEndpoint(ctx context.Context, from, to client.Client, peer string, o *unstructured.Unstructured) error {
	key, err := waitKey(ctx, from, peer)
	if err != nil {
		return err
	}
	if err := unstructured.SetNestedField(o.Object, base64.StdEncoding.EncodeToString(key), "spec", "backend_config", netv1alpha1.BackendPublicKey); err != nil {
		return err
	}
	return applyOne(ctx, to, o)
}

// tunnelEndpoint describes a peering with another cluster in one object.
func tunnelEndpoint(own, peer topology.Cluster, backend map[string]any) *unstructured.Unstructured {
	o := newUnstructured(netv1alpha1.GroupVersion.String(), "TunnelEndpoint")
	o.SetName(peer.Name)
	o.SetNamespace(TenantNamespace(peer.Name))
	o.Object["spec"] = map[string]any{
		"clusterIdentity":    map[string]any{"clusterID": peer.Name, "clusterName": peer.Name},
		"localPodCIDR":       own.PodCIDR.String(),
		"localExternalCIDR":  own.ExternalCIDR.String(),
		"remotePodCIDR":      peer.PodCIDR.String(),
		"remoteExternalCIDR": peer.ExternalCIDR.String(),
		"backendType":        netv1alpha1.BackendWireGuard,
		"backend_config":     backend,
	}
	return o
}
