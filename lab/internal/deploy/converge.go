package deploy

import (
	"context"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// waitConverged waits until every host has applied the present generation of
// every object that is meant for it, in all clusters, and the pods are ready.
func (in *installer) waitConverged(ctx context.Context) error {
	return in.each(func(ctx context.Context, c topology.Cluster, cl client.Client) error {
		return Converged(ctx, in.cfg.Topology, c.Name, cl, 2*time.Minute)
	})(ctx)
}

// Converged waits until one cluster has converged, at most for timeout. The
// error says what is missing.
func Converged(ctx context.Context, t *topology.Topology, cluster string, cl client.Client, timeout time.Duration) error {
	c, ok := t.Cluster(cluster)
	if !ok {
		return fmt.Errorf("topology %s has no cluster %s", t.Name, cluster)
	}
	return poll(ctx, timeout, func(ctx context.Context) (string, error) {
		if why, err := waitPods(ctx, t, cluster, cl); why != "" || err != nil {
			return why, err
		}
		peers := t.Peers(cluster)
		if len(peers) == 0 {
			return "", nil
		}
		return notApplied(ctx, cl, c, peers)
	})
}

// notApplied returns the first object that some host has not applied in its
// present generation.
func notApplied(ctx context.Context, cl client.Client, c topology.Cluster, peers []string) (string, error) {
	want, why := wanted(ctx, cl, c, peers)
	if why != "" {
		return why, nil
	}
	nodes := newList(networkingAPI, "InternalNode")
	if err := cl.List(ctx, nodes); err != nil {
		return err.Error(), nil
	}
	if len(nodes.Items) != c.Nodes {
		return fmt.Sprintf("%d of %d InternalNodes exist", len(nodes.Items), c.Nodes), nil
	}
	for _, n := range nodes.Items {
		if ip, _, _ := unstructured.NestedStringMap(n.Object, "status", "nodeIP"); len(ip) == 0 {
			return describe(&n) + " has no status.nodeIP" + conditionText(&n), nil
		}
		if why := missing(&n, want.nodes); why != "" {
			return why, nil
		}
	}
	for _, peer := range peers {
		report := newUnstructured(networkingAPI, "GatewayReport")
		key := client.ObjectKey{Namespace: TenantNamespace(peer), Name: networkingv1beta1.GatewayNamePrefix + peer}
		if err := cl.Get(ctx, key, report); err != nil {
			return err.Error(), nil
		}
		if why := missing(report, want.gateways[peer]); why != "" {
			return why, nil
		}
	}
	return "", nil
}

// expected lists the objects that hosts must have applied, by namespace/name
// of RouteConfigurations, with their generations.
type expected struct {
	nodes    map[string]int64
	gateways map[string]map[string]int64 // by peer
}

func wanted(ctx context.Context, cl client.Client, c topology.Cluster, peers []string) (expected, string) {
	want := expected{nodes: map[string]int64{}, gateways: map[string]map[string]int64{}}
	routes := newList(networkingAPI, "RouteConfiguration")
	if err := cl.List(ctx, routes); err != nil {
		return want, err.Error()
	}
	generations := map[string]int64{}
	for _, r := range routes.Items {
		generations[r.GetNamespace()+"/"+r.GetName()] = r.GetGeneration()
	}
	for _, peer := range peers {
		want.gateways[peer] = map[string]int64{}
		names := []string{TenantNamespace(peer) + "/" + peer + "-gw-ext"}
		for n := range c.Nodes {
			names = append(names, Namespace+"/"+c.Name+"-"+NodeName(n+1)+"-gw-node")
		}
		for _, name := range names {
			if generations[name] == 0 {
				return want, "RouteConfiguration " + name + " does not exist"
			}
			want.gateways[peer][name] = generations[name]
		}
		name := TenantNamespace(peer) + "/" + peer + "-node-gw"
		if generations[name] == 0 {
			return want, "RouteConfiguration " + name + " does not exist"
		}
		want.nodes[name] = generations[name]
	}
	return want, ""
}

// missing returns which of the objects a host has not applied, by the report
// in status.applied of its own object.
func missing(host *unstructured.Unstructured, want map[string]int64) string {
	applied, _, _ := unstructured.NestedSlice(host.Object, "status", "applied")
	got := map[string]map[string]any{}
	for _, a := range applied {
		if m, ok := a.(map[string]any); ok && m["kind"] == "RouteConfiguration" {
			got[fmt.Sprintf("%v/%v", m["namespace"], m["name"])] = m
		}
	}
	var out []string
	for name, generation := range want {
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
	return describe(host) + " has not applied RouteConfiguration " + strings.Join(out, ", ")
}

func newList(apiVersion, kind string) *unstructured.UnstructuredList {
	l := &unstructured.UnstructuredList{}
	l.SetAPIVersion(apiVersion)
	l.SetKind(kind + "List")
	return l
}
