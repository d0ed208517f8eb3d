package deploy

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// firewalls are those of every host, and what each kind of host applies.
var firewalls = map[string][]string{
	"InternalNode":  {"liqo-tenant-rome/rome-masquerade-bypass"},
	"GatewayReport": {"liqo-tenant-rome/rome-unknown-source", "liqo/service-nodeport-routing"},
}

// host is an InternalNode or a GatewayReport that has applied RouteConfigurations,
// and all FirewallConfigurations of its kind, in their first generation.
func host(kind, name string, says string, applied ...string) *unstructured.Unstructured {
	o := newUnstructured(networkingAPI, kind)
	o.SetName(name)
	var list []any
	for _, a := range applied {
		list = append(list, map[string]any{"kind": "RouteConfiguration", "namespace": "liqo-tenant-rome", "name": a, "ok": true, "observedGeneration": int64(1)})
		if a == "milan-gw-pods" || a == "milan-node-1-gw-node" || a == "milan-node-2-gw-node" {
			list[len(list)-1].(map[string]any)["namespace"] = "liqo"
		}
	}
	for _, f := range firewalls[kind] {
		namespace, name, _ := strings.Cut(f, "/")
		list = append(list, map[string]any{"kind": "FirewallConfiguration", "namespace": namespace, "name": name, "ok": true, "observedGeneration": int64(1)})
	}
	status := map[string]any{"applied": list}
	if says != "" {
		status[says] = map[string]any{"ip": "172.18.1.11"}
	}
	o.Object["status"] = status
	return o
}

// TestConverged: who must have applied what depends on the overlay, and in
// VXLAN on where the gateway runs.
func TestConverged(t *testing.T) {
	const node = "InternalNode node-"
	for _, tt := range []struct {
		name    string
		overlay networkingv1beta1.Overlay
		nodes   []*unstructured.Unstructured
		gateway *unstructured.Unstructured
		want    string
	}{
		{"Geneve", "geneve",
			[]*unstructured.Unstructured{host("InternalNode", "node-1", "nodeIP", "rome-node-gw"), host("InternalNode", "node-2", "nodeIP", "rome-node-gw")},
			host("GatewayReport", "gw-rome", "", "rome-gw-ext", "milan-node-1-gw-node", "milan-node-2-gw-node"), ""},
		{"Geneve, a node has no address for the gateway", "geneve",
			[]*unstructured.Unstructured{host("InternalNode", "node-1", "nodeIP", "rome-node-gw"), host("InternalNode", "node-2", "", "rome-node-gw")},
			host("GatewayReport", "gw-rome", "", "rome-gw-ext", "milan-node-1-gw-node", "milan-node-2-gw-node"), node + "2 has no status.nodeIP"},
		{"Geneve, the gateway does not know a node", "geneve",
			[]*unstructured.Unstructured{host("InternalNode", "node-1", "nodeIP", "rome-node-gw"), host("InternalNode", "node-2", "nodeIP", "rome-node-gw")},
			host("GatewayReport", "gw-rome", "", "rome-gw-ext", "milan-node-1-gw-node"),
			"GatewayReport gw-rome has not applied RouteConfiguration liqo/milan-node-2-gw-node is not in its report"},
		{"VXLAN: only the gateway's node sends replies on", "vxlan",
			[]*unstructured.Unstructured{host("InternalNode", "node-1", "vtep", "rome-node-gw"), host("InternalNode", "node-2", "vtep", "rome-node-gw", "rome-symmetric")},
			host("GatewayReport", "gw-rome", "", "rome-gw-ext", "milan-gw-pods"), ""},
		{"VXLAN: the wrong node does", "vxlan",
			[]*unstructured.Unstructured{host("InternalNode", "node-1", "vtep", "rome-node-gw", "rome-symmetric"), host("InternalNode", "node-2", "vtep", "rome-node-gw")},
			host("GatewayReport", "gw-rome", "", "rome-gw-ext", "milan-gw-pods"),
			node + "2 has not applied RouteConfiguration liqo-tenant-rome/rome-symmetric is not in its report"},
		{"VXLAN, a node has no VTEP", "vxlan",
			[]*unstructured.Unstructured{host("InternalNode", "node-1", "nodeIP", "rome-node-gw"), host("InternalNode", "node-2", "vtep", "rome-node-gw", "rome-symmetric")},
			host("GatewayReport", "gw-rome", "", "rome-gw-ext", "milan-gw-pods"), node + "1 has no status.vtep"},
		{"VXLAN, the gateway does not know the pods", "vxlan",
			[]*unstructured.Unstructured{host("InternalNode", "node-1", "vtep", "rome-node-gw"), host("InternalNode", "node-2", "vtep", "rome-node-gw", "rome-symmetric")},
			host("GatewayReport", "gw-rome", "", "rome-gw-ext"),
			"GatewayReport gw-rome has not applied RouteConfiguration liqo/milan-gw-pods is not in its report"},
		{"a node is missing", "vxlan", []*unstructured.Unstructured{host("InternalNode", "node-1", "vtep")}, nil, "1 of 2 InternalNodes exist"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := state{
				generations:  map[string]int64{route("liqo-tenant-rome", "rome-node-gw"): 1, route("liqo-tenant-rome", "rome-gw-ext"): 1},
				reports:      map[string]*unstructured.Unstructured{"rome": tt.gateway},
				gatewayNodes: map[string]string{"rome": "node-2"},
			}
			for _, list := range firewalls {
				for _, name := range list {
					s.generations["FirewallConfiguration "+name] = 1
				}
			}
			if tt.overlay == networkingv1beta1.OverlayVXLAN {
				s.generations[route("liqo-tenant-rome", "rome-symmetric")], s.generations[route("liqo", "milan-gw-pods")] = 1, 1
			} else {
				s.generations[route("liqo", "milan-node-1-gw-node")], s.generations[route("liqo", "milan-node-2-gw-node")] = 1, 1
			}
			for _, n := range tt.nodes {
				s.nodes = append(s.nodes, *n)
			}
			assert.Equal(t, s.notApplied(topology.Cluster{Name: "milan", Nodes: 2}, []string{"rome"}, tt.overlay), tt.want)
		})
	}
}

// TestTunnelMTU: nodes write the MTU of the tunnel into their routes, which come
// later than the rest.
func TestTunnelMTU(t *testing.T) {
	report := host("GatewayReport", "gw-rome", "", "rome-gw-ext", "milan-gw-pods")
	report.Object["status"].(map[string]any)["mtu"] = int64(1440)
	s := state{
		generations: map[string]int64{}, reports: map[string]*unstructured.Unstructured{"rome": report}, tunnelMTU: map[string]int64{},
	}
	for _, name := range s.ofGateway(topology.Cluster{Name: "milan"}, "rome", "vxlan") {
		s.generations[name] = 1
	}
	why := func() string { return s.notApplied(topology.Cluster{Name: "milan"}, []string{"rome"}, "vxlan") }
	assert.Equal(t, why(), "InternalFabric liqo-tenant-rome/rome has the tunnelMTU 0; its gateway reports 1440")
	s.tunnelMTU["rome"] = 1440
	assert.Equal(t, why(), "")
}

// TestNotApplied: an object that does not exist, a stale generation and an error
// are told apart.
func TestNotApplied(t *testing.T) {
	s := state{generations: map[string]int64{
		route("liqo-tenant-rome", "a"): 1, route("liqo-tenant-rome", "b"): 2, route("liqo-tenant-rome", "c"): 1, firewall("liqo", "d"): 1,
		firewall("liqo-tenant-rome", "rome-masquerade-bypass"): 1,
	}}
	h := host("InternalNode", "node-1", "vtep", "a", "b", "c")
	applied, _, _ := unstructured.NestedSlice(h.Object, "status", "applied")
	applied[0].(map[string]any)["ok"], applied[0].(map[string]any)["message"] = false, "no such link"
	assert.NilError(t, unstructured.SetNestedSlice(h.Object, applied, "status", "applied"))
	assert.Equal(t, s.missing(h, []string{route("liqo-tenant-rome", "a"), route("liqo-tenant-rome", "b"), firewall("liqo", "d")}),
		"InternalNode node-1 has not applied RouteConfiguration liqo-tenant-rome/a: no such link, RouteConfiguration liqo-tenant-rome/b: generation 1 of 2, FirewallConfiguration liqo/d is not in its report")
	assert.Equal(t, s.missing(h, []string{route("liqo-tenant-rome", "e")}), "RouteConfiguration liqo-tenant-rome/e does not exist")
}

// What is deleted is gone only when no host has it any more, and what the controller
// makes of an IP when the controller has heard that the IP is gone.
func TestDeletedIsNotConverged(t *testing.T) {
	s := state{generations: map[string]int64{route("liqo-tenant-rome", "a"): 1, firewall("liqo-tenant-rome", "rome-masquerade-bypass"): 1}}
	assert.Equal(t, s.missing(host("InternalNode", "node-1", "vtep", "a"), nil), "")
	assert.Equal(t, s.missing(host("InternalNode", "node-1", "vtep", "a", "b"), nil),
		"InternalNode node-1 has applied RouteConfiguration liqo-tenant-rome/b, which is deleted")

	o := newUnstructured(networkingAPI, "FirewallConfiguration")
	o.SetNamespace("default")
	o.SetName("db-remap-ipmapping-gw")
	assert.Equal(t, len(ownedByIP(o)), 0)
	o.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: ipamAPI, Kind: "IP", Name: "db", UID: "7"}})
	s.mappings, s.ips = ownedByIP(o), []types.UID{"6", "7"}
	assert.Equal(t, s.leftover(), "")
	s.ips = s.ips[:1]
	assert.Equal(t, s.leftover(), "FirewallConfiguration default/db-remap-ipmapping-gw is there, and its IP is deleted")
}
