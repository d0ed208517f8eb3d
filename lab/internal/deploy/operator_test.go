package deploy

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

func parse(t *testing.T, text string) map[string]any {
	t.Helper()
	var out map[string]any
	assert.NilError(t, yaml.Unmarshal([]byte(text), &out))
	return out
}

// TestRestoring: an upgrade with these values gives an installation the values
// that it had.
func TestRestoring(t *testing.T) {
	for _, tc := range []struct{ name, was, now, want string }{
		{"nothing has changed", "{a: 1, b: {c: 2}}", "{a: 1, b: {c: 2}}", "{a: 1, b: {c: 2}}"},
		{"another value", "{a: 1, b: {c: 2}}", "{a: 3, b: {c: 2}}", "{a: 1, b: {c: 2}}"},
		{"one that was not given", "{a: 1}", "{a: 1, logLevel: debug}", "{a: 1, logLevel: null}"},
		{"one inside", "{b: {c: 2}}", "{b: {c: 2, d: {e: 3}}}", "{b: {c: 2, d: null}}"},
		{"one that is gone", "{a: 1, b: {c: 2}}", "{b: {}}", "{a: 1, b: {c: 2}}"},
		{"nothing was given", "{}", "{a: 1}", "{a: null}"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := restoring(parse(t, tc.now), parse(t, tc.was))
			assert.DeepEqual(t, got, parse(t, tc.want))
			assert.DeepEqual(t, mergeValues(parse(t, tc.now), got), parse(t, tc.was))
		})
	}
}

// TestOperator: what it runs, where, and what it says of a command that failed.
func TestOperator(t *testing.T) {
	var ran []world.ExecRequest
	code := 0
	o := Operator{
		Topology: &topology.Topology{Name: "small", Clusters: []topology.Cluster{{
			Name: "milan", PodCIDR: netip.MustParsePrefix("10.0.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"),
			ExternalCIDR: netip.MustParsePrefix("10.70.0.0/16"), InternalCIDR: netip.MustParsePrefix("10.80.0.0/16"),
		}}},
		Overlay: networkingv1beta1.OverlayVXLAN,
		Exec: func(_ context.Context, req world.ExecRequest) (world.ExecResult, error) {
			ran = append(ran, req)
			return world.ExecResult{Code: code, Stderr: []byte("isthmusctl: no\n")}, nil
		},
	}
	assert.NilError(t, o.Install(t.Context(), "milan", parse(t, "{logLevel: debug, networking: {overlay: geneve}}")))
	assert.NilError(t, o.Upgrade(t.Context(), "milan", nil))
	assert.NilError(t, o.Uninstall(t.Context(), "milan", false))
	helm := o
	helm.By, helm.ChartDir = ByHelm, "/isthmus/k8s/chart"
	assert.NilError(t, helm.Install(t.Context(), "milan", parse(t, "{ipam: {podCIDRs: null}}")))
	assert.NilError(t, helm.Uninstall(t.Context(), "milan", false))
	assert.ErrorContains(t, helm.Uninstall(t.Context(), "milan", true), "helm leaves the kinds")
	code = 1
	// A gateway that stays what it was is the product's fault, too.
	err := o.Upgrade(t.Context(), "milan", nil)
	var failed *CommandError
	assert.Assert(t, errors.As(err, &failed))
	err = o.Uninstall(t.Context(), "milan", true)
	assert.Assert(t, errors.As(err, &failed))
	assert.Error(t, err, "isthmusctl uninstall --timeout 15m --purge: exit code 1: isthmusctl: no")
	assert.ErrorContains(t, o.Install(t.Context(), "rome", nil), "topology small has no cluster rome")

	var commands []string
	for _, r := range ran {
		commands = append(commands, r.Target+": "+strings.Join(r.Argv, " "))
	}
	assert.DeepEqual(t, commands, []string{
		"milan/control-plane: isthmusctl install --values - --timeout 15m",
		"milan/control-plane: isthmusctl upgrade --values - --timeout 15m",
		"milan/control-plane: isthmusctl uninstall --timeout 15m",
		"milan/control-plane: helm install isthmus /isthmus/k8s/chart --namespace liqo --create-namespace --wait --timeout 15m --values -",
		"milan/control-plane: helm uninstall isthmus --namespace liqo --wait --timeout 15m",
		"milan/control-plane: isthmusctl upgrade --values - --timeout 15m",
		"milan/control-plane: isthmusctl uninstall --timeout 15m --purge",
	})
	// A value that is null is not given.
	assert.DeepEqual(t, parse(t, string(ran[3].Stdin))["ipam"], map[string]any{
		"serviceCIDR": "10.96.0.0/16", "externalCIDR": "10.70.0.0/16", "internalCIDR": "10.80.0.0/16",
	})
	values := parse(t, string(ran[0].Stdin))
	assert.Equal(t, values["logLevel"], "debug")
	assert.Equal(t, values["networking"].(map[string]any)["overlay"], "geneve")
	assert.DeepEqual(t, values["discovery"], map[string]any{"config": map[string]any{"clusterID": "milan"}})
}

// TestFlannelObjects: the chart's own way to the network is in a cluster that
// has flannel, and in no other.
func TestFlannelObjects(t *testing.T) {
	c := topology.Cluster{Name: "milan", PodCIDR: netip.MustParsePrefix("10.0.0.0/16"), KubeProxy: topology.ProxyNFTables, CNI: topology.CNIBridge}
	assert.Equal(t, len(flannelObjects(c)), 0)
	c.CNI = topology.CNIFlannel
	objects := flannelObjects(c)
	assert.Equal(t, len(objects), 2)
	assert.Equal(t, describe(objects[1]), "ConfigMap kube-flannel/kube-flannel-cfg")
	text, _, err := unstructured.NestedString(objects[1].Object, "data", "net-conf.json")
	assert.NilError(t, err)
	assert.DeepEqual(t, parse(t, text), parse(t, `{Network: 10.0.0.0/16, EnableNFTables: true, Backend: {Type: vxlan}}`))
}
