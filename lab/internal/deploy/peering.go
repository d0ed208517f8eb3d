package deploy

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

const (
	networkingAPI = "networking.liqo.io/v1beta1"
	ipamAPI       = "ipam.liqo.io/v1alpha1"
	wireGuardPort = int64(51840)
)

// TenantNamespace returns the namespace of the objects about a peer.
func TenantNamespace(peer string) string { return networkingv1beta1.TenantNamespacePfx + peer }

// connectPeerings applies the objects of every peering on both sides, as a
// user who keeps them in files would: what does not depend on the other
// side's status at once, the endpoint and the keys as soon as they are known.
func (in *installer) connectPeerings(ctx context.Context) error {
	peerings := in.cfg.Topology.PresentPeerings()
	if len(peerings) == 0 {
		return nil
	}
	in.mu.Lock()
	in.result.PeeringApplied = latest(in.result.PeeringApplied, time.Now())
	in.mu.Unlock()
	g, ctx := errgroup.WithContext(ctx)
	for _, p := range peerings {
		g.Go(func() error {
			if err := in.connect(ctx, p); err != nil {
				return fmt.Errorf("peering %s–%s: %w", p.Server, p.Client, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// Connect applies the objects of one peering on both sides and waits until both
// gateways have heard from each other. Of the Config it needs Topology and
// Clusters, and Reach if that is to be waited for, too.
func Connect(ctx context.Context, cfg Config, p topology.Peering) error {
	in := &installer{cfg: cfg, clients: map[string]client.Client{}}
	for _, cluster := range []string{p.Server, p.Client} {
		cl, err := NewClient(cfg.Clusters, cluster)
		if err != nil {
			return err
		}
		in.clients[cluster] = cl
	}
	if err := in.connect(ctx, p); err != nil {
		return fmt.Errorf("peering %s–%s: %w", p.Server, p.Client, err)
	}
	return nil
}

func (in *installer) connect(ctx context.Context, p topology.Peering) error {
	write := in.applyPeering
	if p.Objects == topology.ObjectsTunnelEndpoint {
		write = in.applyEndpoints
	}
	if err := write(ctx, p); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return in.firstReply(ctx, p) })
	g.Go(func() error { return waitConnected(ctx, in.clients[p.Server], p.Server, p.Client) })
	g.Go(func() error { return waitConnected(ctx, in.clients[p.Client], p.Client, p.Server) })
	return g.Wait()
}

// applyPeering applies the Configuration, the gateway and the PublicKey of both
// sides.
func (in *installer) applyPeering(ctx context.Context, p topology.Peering) error {
	server, dialler := in.clients[p.Server], in.clients[p.Client]
	serverCluster, _ := in.cfg.Topology.Cluster(p.Server)
	clientCluster, _ := in.cfg.Topology.Cluster(p.Client)

	if err := apply(ctx, server, append(describePeer(clientCluster), gatewayServer(p))); err != nil {
		return err
	}
	if err := apply(ctx, dialler, describePeer(serverCluster)); err != nil {
		return err
	}
	endpoint, err := waitEndpoint(ctx, server, p)
	if err != nil {
		return err
	}
	if p.Forward != nil {
		// Only who administers the router knows of its port.
		i := slices.IndexFunc(in.cfg.Topology.Clusters, func(c topology.Cluster) bool { return c.Name == p.Server })
		endpoint["addresses"] = []any{world.RouterWAN(i).String()}
		endpoint["port"] = int64(p.Forward.Port)
	}
	if err := applyOne(ctx, dialler, gatewayClient(p, endpoint)); err != nil {
		return err
	}
	if err := copyKey(ctx, server, dialler, p.Client, p.Server); err != nil {
		return err
	}
	return copyKey(ctx, dialler, server, p.Server, p.Client)
}

// firstReply waits until pods of the two sides have reached each other.
func (in *installer) firstReply(ctx context.Context, p topology.Peering) error {
	from, to, ok := EndsOf(in.cfg.Topology, p)
	if in.cfg.Reach == nil || !ok {
		return nil
	}
	if err := in.cfg.Reach(ctx, from, to); err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.result.FirstReply = time.Now()
	return nil
}

// EndsOf returns the pods of the two sides of a peering between which it is
// tried, or false when a side has none with an address of its own.
func EndsOf(t *topology.Topology, p topology.Peering) (client, server topology.Pod, ok bool) {
	client, ok = podOf(t, p.Client)
	server, ok2 := podOf(t, p.Server)
	return client, server, ok && ok2
}

// podOf returns the first pod of a cluster with an address of its own.
func podOf(t *topology.Topology, cluster string) (topology.Pod, bool) {
	i := slices.IndexFunc(t.Pods, func(p topology.Pod) bool { return p.Cluster == cluster && !p.HostNetwork })
	if i < 0 {
		return topology.Pod{}, false
	}
	return t.Pods[i], true
}

// describePeer returns the tenant namespace of a peer and the Configuration
// that describes it.
func describePeer(peer topology.Cluster) []*unstructured.Unstructured {
	cfg := peerObject("Configuration", peer.Name)
	cfg.Object["spec"] = map[string]any{"remote": map[string]any{"cidr": map[string]any{
		"pod":      []any{peer.PodCIDR.String()},
		"external": []any{peer.ExternalCIDR.String()},
	}}}
	return []*unstructured.Unstructured{tenantNamespace(peer.Name), cfg}
}

func tenantNamespace(peer string) *unstructured.Unstructured {
	ns := newUnstructured("v1", "Namespace")
	ns.SetName(TenantNamespace(peer))
	ns.SetLabels(map[string]string{
		networkingv1beta1.LabelTenantNamespace: "true",
		networkingv1beta1.LabelRemoteClusterID: peer,
	})
	return ns
}

func gatewayServer(p topology.Peering) *unstructured.Unstructured {
	o := peerObject("GatewayServer", p.Client)
	endpoint := map[string]any{"serviceType": p.Service, "ports": []any{wireGuardPort}}
	if p.Forward != nil {
		endpoint["nodePort"] = int64(p.Forward.NodePort)
	}
	spec := map[string]any{
		"serverTemplateRef": templateRef("WgGatewayServerTemplate", "wireguard-server"+templateSuffix(p)),
		"endpoint":          endpoint,
	}
	setMTU(spec, p.MTU)
	o.Object["spec"] = spec
	return o
}

func gatewayClient(p topology.Peering, endpoint map[string]any) *unstructured.Unstructured {
	o := peerObject("GatewayClient", p.Server)
	spec := map[string]any{
		"clientTemplateRef": templateRef("WgGatewayClientTemplate", "wireguard-client"+templateSuffix(p)),
		"endpoint":          endpoint,
	}
	setMTU(spec, p.MTU)
	o.Object["spec"] = spec
	return o
}

// templateSuffix tells the chart's templates apart.
func templateSuffix(p topology.Peering) string {
	if p.Gateways == topology.GatewaysNetNS {
		return "-netns"
	}
	return ""
}

func setMTU(spec map[string]any, mtu int) {
	if mtu > 0 {
		spec["mtu"] = int64(mtu)
	}
}

func templateRef(kind, name string) map[string]any {
	return map[string]any{"apiVersion": networkingAPI, "kind": kind, "name": name, "namespace": Namespace}
}

// peerObject is an object of a tenant namespace that is named like the peer.
func peerObject(kind, peer string) *unstructured.Unstructured {
	o := newUnstructured(networkingAPI, kind)
	o.SetName(peer)
	o.SetNamespace(TenantNamespace(peer))
	o.SetLabels(map[string]string{networkingv1beta1.LabelRemoteClusterID: peer})
	return o
}

// waitEndpoint returns the endpoint that the server's gateway published, in
// the form of a client's spec.
func waitEndpoint(ctx context.Context, cl client.Client, p topology.Peering) (endpoint map[string]any, err error) {
	o := peerObject("GatewayServer", p.Client)
	err = Poll(ctx, 3*time.Minute, func(ctx context.Context) (string, error) {
		if err := cl.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
			return err.Error(), nil
		}
		addresses, _, _ := unstructured.NestedStringSlice(o.Object, "status", "endpoint", "addresses")
		port, _, _ := unstructured.NestedInt64(o.Object, "status", "endpoint", "port")
		if len(addresses) == 0 || port == 0 {
			return fmt.Sprintf("%s in %s has no status.endpoint%s", describe(o), p.Server, conditionText(o)), nil
		}
		list := make([]any, len(addresses))
		for i, a := range addresses {
			list[i] = a
		}
		endpoint = map[string]any{"addresses": list, "port": port, "protocol": "UDP"}
		return "", nil
	})
	return endpoint, err
}

// copyKey brings the public key of the gateway that leads to peer, in the
// cluster behind from, to the other cluster, where it is the key of owner.
func copyKey(ctx context.Context, from, to client.Client, peer, owner string) error {
	key, err := waitKey(ctx, from, peer)
	if err != nil {
		return err
	}
	o := peerObject("PublicKey", owner)
	o.SetLabels(map[string]string{
		networkingv1beta1.LabelRemoteClusterID: owner,
		networkingv1beta1.LabelGatewayResource: "true",
	})
	o.Object["spec"] = map[string]any{
		"publicKey": base64.StdEncoding.EncodeToString(key),
	}
	return applyOne(ctx, to, o)
}

// waitKey returns the public key of the gateway that leads to peer.
func waitKey(ctx context.Context, cl client.Client, peer string) (public []byte, err error) {
	secret := &corev1.Secret{}
	key := client.ObjectKey{Namespace: TenantNamespace(peer), Name: networkingv1beta1.GatewayNamePrefix + peer}
	err = Poll(ctx, 3*time.Minute, func(ctx context.Context) (string, error) {
		if err := cl.Get(ctx, key, secret); err != nil {
			return err.Error(), nil
		}
		if public = secret.Data[networkingv1beta1.PublicKeyField]; len(public) == 0 {
			return fmt.Sprintf("Secret %s has no %s", key, networkingv1beta1.PublicKeyField), nil
		}
		return "", nil
	})
	return public, err
}

// waitConnected waits until a side's gateway has heard from the other one.
func waitConnected(ctx context.Context, cl client.Client, cluster, peer string) error {
	o := newUnstructured(networkingAPI, "Connection")
	o.SetNamespace(TenantNamespace(peer))
	o.SetName(networkingv1beta1.GatewayNamePrefix + peer)
	return Poll(ctx, 3*time.Minute, func(ctx context.Context) (string, error) {
		if err := cl.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
			return cluster + ": " + err.Error(), nil
		}
		value, _, _ := unstructured.NestedString(o.Object, "status", "value")
		if value == "Connected" {
			return "", nil
		}
		why := fmt.Sprintf("%s: %s is %q", cluster, describe(o), value)
		var pods corev1.PodList
		if err := cl.List(ctx, &pods, client.InNamespace(o.GetNamespace())); err == nil {
			for _, p := range pods.Items {
				if !podReady(&p) {
					why += fmt.Sprintf("; pod %s is not ready: %s", p.Name, whyNotReady(&p))
				}
			}
		}
		return why, nil
	})
}

// conditionText lists the conditions of an object that are not true, for
// messages about what is missing.
func conditionText(o *unstructured.Unstructured) string {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	var out []string
	for _, c := range conditions {
		if m, ok := c.(map[string]any); ok && m["status"] != "True" {
			out = append(out, fmt.Sprintf("%v: %v: %v", m["type"], m["reason"], m["message"]))
		}
	}
	if len(out) == 0 {
		return ""
	}
	return " (" + strings.Join(out, "; ") + ")"
}
