package deploy

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// waitConverged waits until every host has applied the present generation of
// every object that is meant for it, in all clusters, and the pods are ready.
func (in *installer) waitConverged(ctx context.Context) error {
	if err := TunnelsAgree(ctx, in.cfg.Topology, in.cfg.Clusters, 2*time.Minute); err != nil {
		return err
	}
	return in.each(func(ctx context.Context, c topology.Cluster, cl client.Client) error {
		return Converged(ctx, in.cfg.Topology, in.cfg.Overlay, c.Name, cl, 2*time.Minute)
	})(ctx)
}

// TunnelsAgree waits until the two gateways of each peering report one MTU: each
// tells the other what its network has room for, and both take the lesser.
func TunnelsAgree(ctx context.Context, t *topology.Topology, clusters Clusters, timeout time.Duration) error {
	clients := map[string]client.Client{}
	for _, p := range t.PresentPeerings() {
		for _, name := range []string{p.Server, p.Client} {
			if clients[name] != nil {
				continue
			}
			cl, err := NewClient(clusters, name)
			if err != nil {
				return err
			}
			clients[name] = cl
		}
	}
	return Poll(ctx, timeout, func(ctx context.Context) (string, error) {
		for _, p := range t.PresentPeerings() {
			var mtus [2]int64
			for i, end := range [][2]string{{p.Server, p.Client}, {p.Client, p.Server}} {
				report := newUnstructured(networkingAPI, "GatewayReport")
				key := client.ObjectKey{Namespace: TenantNamespace(end[1]), Name: networkingv1beta1.GatewayNamePrefix + end[1]}
				if err := clients[end[0]].Get(ctx, key, report); err != nil {
					return err.Error(), nil
				}
				mtus[i], _, _ = unstructured.NestedInt64(report.Object, "status", "mtu")
			}
			if mtus[0] != mtus[1] {
				return fmt.Sprintf("the gateways of %s and %s report tunnels of %d and %d bytes", p.Server, p.Client, mtus[0], mtus[1]), nil
			}
		}
		return "", nil
	})
}

// Converged waits until one cluster has converged, at most for timeout. The
// error says what is missing.
func Converged(ctx context.Context, t *topology.Topology, overlay networkingv1beta1.Overlay, cluster string, cl client.Client, timeout time.Duration) error {
	c, ok := t.Cluster(cluster)
	if !ok {
		return fmt.Errorf("topology %s has no cluster %s", t.Name, cluster)
	}
	return Poll(ctx, timeout, func(ctx context.Context) (string, error) {
		if why, err := waitPods(ctx, t, cluster, cl); why != "" || err != nil {
			return why, err
		}
		if hasDNS(c) {
			if why := waitDNS(ctx, cl); why != "" {
				return why, nil
			}
		}
		peers := t.PresentPeers(cluster)
		if len(peers) == 0 {
			return "", nil
		}
		if why := waitLeader(ctx, cl); why != "" {
			return why, nil
		}
		s, why := readState(ctx, cl, peers)
		if why != "" {
			return why, nil
		}
		return s.notApplied(c, peers, overlay), nil
	})
}

const (
	routeKind    = "RouteConfiguration"
	firewallKind = "FirewallConfiguration"
)

// route and firewall name an object as state does.
func route(namespace, name string) string    { return routeKind + " " + namespace + "/" + name }
func firewall(namespace, name string) string { return firewallKind + " " + namespace + "/" + name }

// A state is what decides whether a cluster has converged.
type state struct {
	generations  map[string]int64 // of Route- and FirewallConfigurations, by kind namespace/name
	mappings     []mapping        // those of them that IPs have
	ips          []types.UID
	nodes        []unstructured.Unstructured
	reports      map[string]*unstructured.Unstructured // of gateways, by peer
	gatewayNodes map[string]string                     // where the pods of gateways are, by peer
	tunnelMTU    map[string]int64                      // that nodes know of gateways' tunnels, by peer
}

func readState(ctx context.Context, cl client.Client, peers []string) (state, string) {
	s := state{generations: map[string]int64{}, reports: map[string]*unstructured.Unstructured{}, gatewayNodes: map[string]string{}, tunnelMTU: map[string]int64{}}
	for _, kind := range []string{routeKind, firewallKind} {
		list := newList(networkingAPI, kind)
		if err := cl.List(ctx, list); err != nil {
			return s, err.Error()
		}
		for _, o := range list.Items {
			s.generations[kind+" "+o.GetNamespace()+"/"+o.GetName()] = o.GetGeneration()
			s.mappings = append(s.mappings, ownedByIP(&o)...)
		}
	}
	ips := newList(ipamAPI, "IP")
	if err := cl.List(ctx, ips); err != nil {
		return s, err.Error()
	}
	for _, ip := range ips.Items {
		s.ips = append(s.ips, ip.GetUID())
	}
	nodes := newList(networkingAPI, "InternalNode")
	if err := cl.List(ctx, nodes); err != nil {
		return s, err.Error()
	}
	s.nodes = nodes.Items
	for _, peer := range peers {
		report := newUnstructured(networkingAPI, "GatewayReport")
		key := client.ObjectKey{Namespace: TenantNamespace(peer), Name: networkingv1beta1.GatewayNamePrefix + peer}
		if err := cl.Get(ctx, key, report); err != nil {
			return s, err.Error()
		}
		s.reports[peer] = report
		fabric := newUnstructured(networkingAPI, "InternalFabric")
		if err := cl.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: peer}, fabric); err != nil {
			return s, err.Error()
		}
		s.tunnelMTU[peer], _, _ = unstructured.NestedInt64(fabric.Object, "spec", "tunnelMTU")
		var pods corev1.PodList
		if err := cl.List(ctx, &pods, client.InNamespace(key.Namespace), client.MatchingLabels{
			networkingv1beta1.LabelComponent: networkingv1beta1.ComponentGateway, networkingv1beta1.LabelActive: "true",
		}); err != nil {
			return s, err.Error()
		}
		for _, p := range pods.Items {
			if p.DeletionTimestamp == nil {
				s.gatewayNodes[peer] = p.Spec.NodeName
			}
		}
	}
	return s, ""
}

// A mapping is an object that the controller has made of an IP.
type mapping struct {
	name string
	ip   types.UID
}

// ownedByIP returns an object as a mapping, if it is one.
func ownedByIP(o *unstructured.Unstructured) []mapping {
	for _, owner := range o.GetOwnerReferences() {
		if owner.Kind == "IP" && owner.APIVersion == ipamAPI {
			return []mapping{{describe(o), owner.UID}}
		}
	}
	return nil
}

// leftover names a mapping whose IP is deleted: the controller has not heard of
// that yet.
func (s state) leftover() string {
	for _, m := range s.mappings {
		if !slices.Contains(s.ips, m.ip) {
			return m.name + " is there, and its IP is deleted"
		}
	}
	return ""
}

// notApplied returns the first object that some host has not applied in its
// present generation, or what else a host has not said.
func (s state) notApplied(c topology.Cluster, peers []string, overlay networkingv1beta1.Overlay) string {
	if why := s.leftover(); why != "" {
		return why
	}
	if want := len(c.Present()); len(s.nodes) != want {
		return fmt.Sprintf("%d of %d InternalNodes exist", len(s.nodes), want)
	}
	for _, n := range s.nodes {
		says := "nodeIP"
		if overlay == networkingv1beta1.OverlayVXLAN {
			says = "vtep"
		}
		if v, _, _ := unstructured.NestedMap(n.Object, "status", says); len(v) == 0 {
			return describe(&n) + " has no status." + says + conditionText(&n)
		}
		if why := s.missing(&n, s.ofNode(n.GetName(), peers, overlay)); why != "" {
			return why
		}
	}
	for _, peer := range peers {
		if why := s.missing(s.reports[peer], s.ofGateway(c, peer, overlay)); why != "" {
			return why
		}
		// The controller tells nodes after the gateway has told it.
		if mtu, _, _ := unstructured.NestedInt64(s.reports[peer].Object, "status", "mtu"); s.tunnelMTU[peer] != mtu {
			return fmt.Sprintf("InternalFabric %s/%s has the tunnelMTU %d; its gateway reports %d", TenantNamespace(peer), peer, s.tunnelMTU[peer], mtu)
		}
	}
	return ""
}

// NotApplied returns the first object that a host of a cluster says it has applied,
// and has not in its present generation; empty: there is none. Which objects a host
// must have it does not know.
func NotApplied(ctx context.Context, cl client.Client) string {
	s, why := readState(ctx, cl, nil)
	if why != "" {
		return why
	}
	reports := newList(networkingAPI, "GatewayReport")
	if err := cl.List(ctx, reports); err != nil {
		return err.Error()
	}
	if why := s.leftover(); why != "" {
		return why
	}
	for _, host := range slices.Concat(s.nodes, reports.Items) {
		var names []string
		for name := range applied(&host) {
			names = append(names, name)
		}
		slices.Sort(names)
		if why := s.missing(&host, names); why != "" {
			return why
		}
	}
	return ""
}

// ofNode names the objects that a node must have applied.
func (s state) ofNode(node string, peers []string, overlay networkingv1beta1.Overlay) []string {
	var names []string
	for _, peer := range peers {
		names = append(names, route(TenantNamespace(peer), peer+"-node-gw"), firewall(TenantNamespace(peer), peer+"-masquerade-bypass"))
		// Without another node there is nobody that it could lead to.
		if overlay == networkingv1beta1.OverlayVXLAN && s.gatewayNodes[peer] == node && len(s.nodes) > 1 {
			names = append(names, route(TenantNamespace(peer), peer+"-symmetric"))
		}
	}
	return names
}

// ofGateway names the objects that a gateway must have applied.
func (s state) ofGateway(c topology.Cluster, peer string, overlay networkingv1beta1.Overlay) []string {
	names := []string{
		route(TenantNamespace(peer), peer+"-gw-ext"), firewall(TenantNamespace(peer), peer+"-unknown-source"),
		firewall(Namespace, "service-nodeport-routing"),
	}
	if overlay == networkingv1beta1.OverlayVXLAN {
		return append(names, route(Namespace, c.Name+"-gw-pods"))
	}
	for _, n := range c.Present() {
		names = append(names, route(Namespace, c.Name+"-"+NodeName(n)+"-gw-node"))
	}
	return names
}

// missing returns which of the objects do not exist, or a host has not applied
// by the report in status.applied of its own object.
func (s state) missing(host *unstructured.Unstructured, want []string) string {
	got := applied(host)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if kind, _, _ := strings.Cut(name, " "); (kind == routeKind || kind == firewallKind) && s.generations[name] == 0 {
			return describe(host) + " has applied " + name + ", which is deleted"
		}
	}
	for _, name := range want {
		generation := s.generations[name]
		if generation == 0 {
			return name + " does not exist"
		}
		switch m := got[name]; {
		case m == nil:
			out = append(out, name+" is not in its report")
		case m["ok"] != true:
			out = append(out, fmt.Sprintf("%s: %v", name, m["message"]))
		case m["observedGeneration"] != generation:
			out = append(out, fmt.Sprintf("%s: generation %v of %d", name, m["observedGeneration"], generation))
		}
	}
	if len(out) == 0 {
		return ""
	}
	return describe(host) + " has not applied " + strings.Join(out, ", ")
}

// applied are the objects in the report of a host, by kind namespace/name.
func applied(host *unstructured.Unstructured) map[string]map[string]any {
	all, _, _ := unstructured.NestedSlice(host.Object, "status", "applied")
	out := map[string]map[string]any{}
	for _, a := range all {
		if m, ok := a.(map[string]any); ok {
			out[fmt.Sprintf("%v %v/%v", m["kind"], m["namespace"], m["name"])] = m
		}
	}
	return out
}

func newList(apiVersion, kind string) *unstructured.UnstructuredList {
	l := &unstructured.UnstructuredList{}
	l.SetAPIVersion(apiVersion)
	l.SetKind(kind + "List")
	return l
}
