package kube_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// documents returns the objects of a file, up to the first comment after the
// one at its beginning.
func documents(t *testing.T, path string) []runtime.Object {
	data, err := os.ReadFile(path)
	assert.NilError(t, err)
	text := strings.TrimPrefix(string(data), "# Objects\n")
	text, _, _ = strings.Cut(text, "\n# ")
	var out []runtime.Object
	for doc := range strings.SplitSeq(text, "---\n") {
		if strings.TrimSpace(doc) == "" {
			continue
		}
		var m metav1.TypeMeta
		assert.NilError(t, yaml.Unmarshal([]byte(doc), &m))
		o, err := kube.Scheme().New(m.GroupVersionKind())
		assert.NilError(t, err)
		assert.NilError(t, yaml.UnmarshalStrict([]byte(doc), o))
		out = append(out, o)
	}
	return out
}

// What the controller plans, the hosts understand: every object that package
// plan makes parses, is addressed to somebody, and compiles.
func TestPlannedObjectsCompile(t *testing.T) {
	files, err := filepath.Glob("../../plan/testdata/*.yaml")
	assert.NilError(t, err)
	assert.Assert(t, len(files) > 0)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			var objects kube.Objects
			for _, o := range documents(t, file) {
				switch o := o.(type) {
				case *v1beta1.InternalFabric:
					objects.Fabrics = append(objects.Fabrics, *o)
				case *v1beta1.InternalNode:
					address := v1beta1.IP("172.18.1.1" + o.Name[len(o.Name)-1:])
					o.Status.NodeIP = v1beta1.InternalNodeStatusNodeIP{Local: &address, Remote: &address}
					o.Status.VTEP = &v1beta1.VTEP{IP: address, MAC: "02:00:00:00:00:0" + o.Name[len(o.Name)-1:]}
					objects.InternalNodes = append(objects.InternalNodes, *o)
				case *v1beta1.GeneveTunnel:
					objects.Tunnels = append(objects.Tunnels, *o)
				case *v1beta1.RouteConfiguration:
					objects.Routes = append(objects.Routes, *o)
				case *v1beta1.FirewallConfiguration:
					objects.Firewalls = append(objects.Firewalls, *o)
				}
			}
			s := kube.Snapshot(objects)
			assert.Equal(t, len(s.Invalid)+len(s.Notes), 0)
			assert.Assert(t, len(s.Fabrics) > 0 && len(s.Routes) > 0)
			assert.Equal(t, len(s.Tunnels) > 0, s.Fabrics[0].Overlay == cluster.OverlayGeneve)

			applied := map[cluster.Ref]bool{}
			check := func(state netstate.State, results []desired.Result) {
				assert.NilError(t, state.Validate())
				for _, r := range results {
					assert.Assert(t, r.OK && r.Message == "", "%s: %s", r.Object, r.Message)
					applied[r.Object] = true
				}
			}
			for _, n := range s.InternalNodes {
				check(desired.Node(desired.NodeInput{
					Name: n.Name, Label: plan.Label(n.Name), NodeIP: n.VTEP.IP,
					Underlay: desired.Underlay{MTU: 1500, Devs: map[netip.Addr]string{s.Fabrics[0].GatewayIP: "cni0"}},
					Fabrics:  s.Fabrics, Tunnels: s.Tunnels, Nodes: s.InternalNodes, Routes: s.Routes, Firewalls: s.Firewalls,
				}))
			}
			for _, f := range s.Fabrics {
				for _, mode := range []string{cluster.Server, cluster.Client} {
					if !strings.HasPrefix(filepath.Base(file), mode) {
						continue
					}
					check(desired.Gateway(desired.GatewayInput{
						Name: f.Name, Namespace: f.Namespace, RemoteID: f.RemoteID, Mode: mode, NodeName: s.InternalNodes[0].Name,
						PodIP: f.GatewayIP, PublicKey: netstate.Key{1}, Underlay: desired.Underlay{MTU: 1500},
						PeerEndpoint: netip.MustParseAddrPort("203.0.113.2:30000"),
						Fabrics:      s.Fabrics, Tunnels: s.Tunnels, Nodes: s.InternalNodes, Routes: s.Routes, Firewalls: s.Firewalls,
					}))
				}
			}
			for _, rc := range s.Routes {
				assert.Assert(t, applied[rc.Ref], "%s is addressed to nobody", rc.Ref)
			}
		})
	}
}

// Package desired may not import the labels of the API, so it has copies.
func TestLabelsAreTheSame(t *testing.T) {
	for _, tt := range []struct {
		labels        map[string]string
		node, gateway bool
	}{
		{map[string]string{v1beta1.LabelRouteCategory: v1beta1.CategoryFabric}, true, false},
		{map[string]string{v1beta1.LabelRouteCategory: v1beta1.CategoryFabric, v1beta1.LabelRouteSubcategory: v1beta1.SubcategorySingleNode, v1beta1.LabelRouteUnique: "node-1"}, true, false},
		{map[string]string{v1beta1.LabelRouteCategory: v1beta1.CategoryFabric, v1beta1.LabelRouteSubcategory: v1beta1.SubcategorySingleNode, v1beta1.LabelRouteUnique: "node-2"}, false, false},
		{map[string]string{v1beta1.LabelRouteCategory: v1beta1.CategoryGateway, v1beta1.LabelRouteUnique: "rome"}, false, true},
		{map[string]string{v1beta1.LabelRouteCategory: v1beta1.CategoryGateway, v1beta1.LabelRouteSubcategory: v1beta1.SubcategoryFabric}, false, true},
		{map[string]string{v1beta1.LabelRouteCategory: v1beta1.CategoryGateway, v1beta1.LabelRouteSubcategory: v1beta1.SubcategoryFabricNode, v1beta1.LabelRouteUnique: "node-1"}, false, true},
		{map[string]string{v1beta1.LabelFirewallCategory: v1beta1.CategoryFabric, v1beta1.LabelFirewallSubcategory: v1beta1.SubcategoryAllNodes}, true, false},
		{map[string]string{v1beta1.LabelFirewallCategory: v1beta1.CategoryFabric, v1beta1.LabelFirewallSubcategory: v1beta1.SubcategoryIPMapping}, true, false},
		{map[string]string{v1beta1.LabelFirewallCategory: v1beta1.CategoryFabric, v1beta1.LabelFirewallSubcategory: v1beta1.SubcategorySingleNode, v1beta1.LabelFirewallUnique: "node-1"}, true, false},
		{map[string]string{v1beta1.LabelFirewallCategory: v1beta1.CategoryGateway, v1beta1.LabelFirewallSubcategory: v1beta1.SubcategoryAllGateway}, false, true},
		{map[string]string{v1beta1.LabelFirewallCategory: v1beta1.CategoryGateway, v1beta1.LabelFirewallSubcategory: v1beta1.SubcategoryFabric}, false, true},
		{map[string]string{v1beta1.LabelFirewallCategory: v1beta1.CategoryGateway, v1beta1.LabelFirewallSubcategory: v1beta1.SubcategoryIPMapping}, false, true},
		{map[string]string{v1beta1.LabelFirewallCategory: v1beta1.CategoryGateway, v1beta1.LabelFirewallUnique: "rome"}, false, true},
	} {
		assert.Equal(t, desired.NodeSelects(tt.labels, "node-1"), tt.node, "%v", tt.labels)
		assert.Equal(t, desired.GatewaySelects(tt.labels, "rome", "node-1"), tt.gateway, "%v", tt.labels)
	}
	assert.Equal(t, desired.LabelPrefixTranslation, v1beta1.LabelPrefixTranslation)
	assert.Assert(t, !desired.OfUser(cluster.Meta{Labels: map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy}}))
	assert.Assert(t, desired.OfUser(cluster.Meta{Labels: map[string]string{v1beta1.LabelManagedBy: "Helm"}}))
	assert.Equal(t, desired.TunnelInterface, v1beta1.TunnelInterface)
	assert.Equal(t, desired.VXLANInterface, v1beta1.VXLANInterface)
	assert.Equal(t, desired.PodInterface, v1beta1.PodInterface)
}
