package deploy

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// TestRender checks that the chart renders with what the lab says of a
// cluster, and that this arrives where it must.
func TestRender(t *testing.T) {
	cluster := topology.Cluster{
		Name:         "milan",
		PodCIDR:      netip.MustParsePrefix("10.0.0.0/16"),
		ServiceCIDR:  netip.MustParsePrefix("10.96.0.0/16"),
		ExternalCIDR: netip.MustParsePrefix("10.70.0.0/16"),
		InternalCIDR: netip.MustParsePrefix("10.80.0.0/16"),
	}
	m, err := Render(filepath.Join("..", "..", "..", "k8s", "chart"), Release, Namespace, Values(&topology.Topology{}, networkingv1beta1.OverlayVXLAN, cluster))
	assert.NilError(t, err)
	assert.Assert(t, len(m.CRDs) >= 17, "%d CRDs", len(m.CRDs))

	byKind := map[string][]*unstructured.Unstructured{}
	for _, o := range m.Objects {
		byKind[o.GetKind()] = append(byKind[o.GetKind()], o)
	}
	for kind, n := range map[string]int{
		"DaemonSet": 1, "Deployment": 1, "WgGatewayServerTemplate": 1, "WgGatewayClientTemplate": 1,
		"Network": 4, "ConfigMap": 1, "ServiceAccount": 2,
	} {
		assert.Assert(t, len(byKind[kind]) >= n, "%d objects of kind %s", len(byKind[kind]), kind)
	}
	id, _, _ := unstructured.NestedString(byKind["ConfigMap"][0].Object, "data", "CLUSTER_ID")
	assert.Equal(t, id, "milan")
	cidrs := map[string]bool{}
	for _, n := range byKind["Network"] {
		cidr, _, _ := unstructured.NestedString(n.Object, "spec", "cidr")
		cidrs[cidr] = true
	}
	assert.DeepEqual(t, cidrs, map[string]bool{"10.0.0.0/16": true, "10.96.0.0/16": true, "10.70.0.0/16": true, "10.80.0.0/16": true})

	controller, _, _ := unstructured.NestedSlice(byKind["Deployment"][0].Object, "spec", "template", "spec", "containers")
	args, _, _ := unstructured.NestedStringSlice(controller[0].(map[string]any), "args")
	assert.Assert(t, slices.Contains(args, "--overlay=vxlan"), "%q", args)

	containers, _, _ := unstructured.NestedSlice(byKind["DaemonSet"][0].Object, "spec", "template", "spec", "containers")
	assert.Equal(t, containers[0].(map[string]any)["image"], Image)
}

// TestRenderRefuses shows that a value the chart does not know is an error
// that names it.
func TestRenderRefuses(t *testing.T) {
	_, err := Render(filepath.Join("..", "..", "..", "k8s", "chart"), Release, Namespace, map[string]any{
		"ipam": map[string]any{"podCIDRs": "10.0.0.0/16"},
	})
	assert.ErrorContains(t, err, "podCIDRs")
}

// The templates of gateways in namespaces of nodes take a privileged container,
// so they are there in those clusters only that have such gateways.
func TestRenderNetNS(t *testing.T) {
	peerings := []topology.Peering{{Server: "milan", Client: "rome", Gateways: topology.GatewaysNetNS}}
	for want, cfg := range map[int]Config{
		1: {Topology: &topology.Topology{}, Overlay: networkingv1beta1.OverlayVXLAN},
		2: {Topology: &topology.Topology{Peerings: peerings}, Overlay: networkingv1beta1.OverlayVXLAN},
	} {
		m, err := Render(filepath.Join("..", "..", "..", "k8s", "chart"), Release, Namespace, Values(cfg.Topology, cfg.Overlay, topology.Cluster{
			Name: "milan", PodCIDR: netip.MustParsePrefix("10.0.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"),
			ExternalCIDR: netip.MustParsePrefix("10.70.0.0/16"), InternalCIDR: netip.MustParsePrefix("10.80.0.0/16"),
		}))
		assert.NilError(t, err)
		got := 0
		for _, o := range m.Objects {
			if o.GetKind() == "WgGatewayServerTemplate" {
				got++
			}
		}
		assert.Equal(t, got, want)
	}
}

// Gateways and controllers leave a lost node after 15 s, unless who installs says
// how long they tolerate it.
func TestRenderTolerations(t *testing.T) {
	const notReady, unreachable = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"
	say := func(pod map[string]any) map[string]any {
		return map[string]any{"networking": map[string]any{"gatewayTemplates": map[string]any{"pod": pod}}, "controllerManager": map[string]any{"pod": pod}}
	}
	own := func(tolerations ...any) map[string]any { return map[string]any{"tolerations": tolerations} }
	gpu := map[string]any{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
	for _, test := range []struct {
		name   string
		values map[string]any
		want   []string
	}{
		{"by default", nil, []string{notReady + " 15", unreachable + " 15"}},
		{"later", say(map[string]any{"unreachableSeconds": 60}), []string{notReady + " 60", unreachable + " 60"}},
		{"beside others", say(own(gpu)), []string{"gpu", notReady + " 15", unreachable + " 15"}},
		{"one of them", say(own(map[string]any{"key": unreachable, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5})), []string{unreachable + " 5", notReady + " 15"}},
		{"one of them, but not for ever", say(own(map[string]any{"key": unreachable, "operator": "Exists", "effect": "NoSchedule"})), []string{unreachable, notReady + " 15", unreachable + " 15"}},
		{"everything for ever", say(own(map[string]any{"operator": "Exists"})), []string{""}},
		{"all that does not evict", say(own(map[string]any{"operator": "Exists", "effect": "NoSchedule"})), []string{"", notReady + " 15", unreachable + " 15"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			values := mergeValues(Values(&topology.Topology{}, networkingv1beta1.OverlayVXLAN, topology.Cluster{
				Name: "milan", PodCIDR: netip.MustParsePrefix("10.0.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"),
				ExternalCIDR: netip.MustParsePrefix("10.70.0.0/16"), InternalCIDR: netip.MustParsePrefix("10.80.0.0/16"),
			}), test.values)
			m, err := Render(filepath.Join("..", "..", "..", "k8s", "chart"), Release, Namespace, values)
			assert.NilError(t, err)
			looked := 0
			for _, o := range m.Objects {
				var at []string
				switch o.GetKind() {
				case "Deployment":
					at = []string{"spec", "template", "spec", "tolerations"}
				case "WgGatewayServerTemplate", "WgGatewayClientTemplate":
					at = []string{"spec", "template", "spec", "deployment", "spec", "template", "spec", "tolerations"}
				default:
					continue
				}
				list, _, err := unstructured.NestedSlice(o.Object, at...)
				assert.NilError(t, err)
				var got []string
				for _, e := range list {
					entry := e.(map[string]any)
					text, _ := entry["key"].(string)
					if s, ok := entry["tolerationSeconds"]; ok {
						text = fmt.Sprint(text, " ", s)
					}
					got = append(got, text)
				}
				assert.DeepEqual(t, got, test.want)
				looked++
			}
			assert.Equal(t, looked, 3)
		})
	}
}
