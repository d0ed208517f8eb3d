package k8s

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"
)

// render returns the chart's files for values, as one stream.
func render(t *testing.T, values map[string]any) (string, error) {
	t.Helper()
	chart, err := loader.Load("chart")
	assert.NilError(t, err)
	top, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{Name: "isthmus", Namespace: "liqo", IsInstall: true}, nil)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(chart, top)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	delete(files, "isthmus/templates/NOTES.txt")
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if text := strings.TrimSpace(files[name]); text != "" {
			out.WriteString("# " + name + "\n" + strings.TrimPrefix(text, "---\n") + "\n---\n")
		}
	}
	return out.String(), nil
}

// documents decodes a stream.
func documents(t *testing.T, text string) []map[string]any {
	t.Helper()
	var out []map[string]any
	for _, doc := range strings.Split(text, "\n---\n") {
		var o map[string]any
		assert.NilError(t, yaml.Unmarshal([]byte(doc), &o), "in\n%s", doc)
		if len(o) > 0 {
			out = append(out, o)
		}
	}
	return out
}

func minimal() map[string]any {
	return map[string]any{
		"discovery": map[string]any{"config": map[string]any{"clusterID": "milan"}},
		"ipam":      map[string]any{"podCIDRs": []any{"10.0.0.0/16"}, "serviceCIDR": "10.96.0.0/16"},
	}
}

func full() map[string]any {
	v := minimal()
	v["ipam"] = map[string]any{
		"podCIDRs": []any{"10.0.0.0/16", "fd00:10::/48"}, "serviceCIDR": "10.96.0.0/16",
		"externalCIDR": "10.71.0.0/16", "internalCIDR": "10.81.0.0/16", "reservedSubnets": []any{"172.18.0.0/16"},
	}
	v["image"] = map[string]any{"name": "isthmus", "version": "dev", "pullPolicy": "Never"}
	v["metrics"] = map[string]any{"enabled": true, "dashboard": map[string]any{"enabled": true}}
	v["networking"] = map[string]any{"directConnections": []any{[]any{"rome", "naples"}, []any{"rome", "oslo"}}, "gatewayTemplates": map[string]any{
		"wireguard": map[string]any{"implementation": "userspace"},
		"netns":     map[string]any{"enabled": true},
		"server": map[string]any{"service": map[string]any{
			"annotations": map[string]any{"lb.example.com/internal": "true"}, "allocateLoadBalancerNodePorts": false,
		}},
		"pod":       map[string]any{"nodeSelector": map[string]any{"edge": "true"}, "annotations": map[string]any{"example.com/team": "net"}},
		"container": map[string]any{"gateway": map[string]any{"resources": map[string]any{"requests": map[string]any{"cpu": "10m"}}}},
	}}
	return v
}

// -update refreshes the files; what changes in them is what changes in
// clusters.
func TestChartGolden(t *testing.T) {
	for name, values := range map[string]map[string]any{"minimal": minimal(), "full": full()} {
		t.Run(name, func(t *testing.T) {
			out, err := render(t, values)
			assert.NilError(t, err)
			documents(t, out)
			golden.Assert(t, out, name+".yaml")
		})
	}
}

func TestChartRefuses(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(v map[string]any)
		want   string
	}{
		{"no cluster ID", func(v map[string]any) { delete(v, "discovery") }, "clusterID"},
		{"cluster ID with a dot", func(v map[string]any) {
			v["discovery"] = map[string]any{"config": map[string]any{"clusterID": "mi.lan"}}
		}, "clusterID"},
		{"no pod network", func(v map[string]any) { v["ipam"] = map[string]any{"serviceCIDR": "10.96.0.0/16"} }, "podCIDRs"},
		{"service network that is an address", func(v map[string]any) {
			v["ipam"] = map[string]any{"podCIDRs": []any{"10.0.0.0/16"}, "serviceCIDR": "10.96.0.0"}
		}, "serviceCIDR"},
		{"no service network, and no cluster to ask", func(v map[string]any) { v["ipam"] = map[string]any{"podCIDRs": []any{"10.0.0.0/16"}} }, "ipam.serviceCIDR: the network of the Services is not given"},
		{"somebody else's IPAM", func(v map[string]any) {
			v["ipam"].(map[string]any)["external"] = map[string]any{"enabled": true}
		}, "/ipam/external/enabled"},
		{"nothing to install", func(v map[string]any) { v["networking"] = map[string]any{"enabled": false} }, "/networking/enabled"},
		{"pairs of peers, and all of them", func(v map[string]any) {
			v["networking"] = map[string]any{"denyDirectConnections": true, "directConnections": []any{[]any{"rome", "naples"}}}
		}, "networking.directConnections: names pairs of peers, and networking.denyDirectConnections: true is about all of them"},
		{"three peers in a pair", func(v map[string]any) {
			v["networking"] = map[string]any{"directConnections": []any{[]any{"rome", "naples", "oslo"}}}
		}, "/networking/directConnections/0"},
		{"a peer with itself", func(v map[string]any) {
			v["networking"] = map[string]any{"directConnections": []any{[]any{"rome", "rome"}}}
		}, "/networking/directConnections/0"},
		{"new keys all the time", func(v map[string]any) {
			v["networking"] = map[string]any{"keyRotation": map[string]any{"every": "30s"}}
		}, "/networking/keyRotation/every"},
		{"unknown key", func(v map[string]any) { v["networking"] = map[string]any{"genevaPort": 6091} }, "genevaPort"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := minimal()
			tt.change(v)
			_, err := render(t, v)
			assert.ErrorContains(t, err, tt.want)
		})
	}
}

// The controller deletes what carries its label and is not in its plan.
func TestChartIsNotPruned(t *testing.T) {
	out, err := render(t, full())
	assert.NilError(t, err)
	for _, o := range documents(t, out) {
		labels, _ := o["metadata"].(map[string]any)["labels"].(map[string]any)
		assert.Check(t, is.Equal(labels["app.kubernetes.io/managed-by"], "Helm"), "%v %v", o["kind"], o["metadata"])
	}
}

// liqoctl version and liqoctl info show a version when exactly one Deployment has
// these two labels, a container named controller-manager and a tag in its image
// (pkg/utils/getters of Liqo v1.2.0: GetLiqoVersion). Pods keep the label that the
// selector, the PodDisruptionBudget and the NetworkPolicy have.
func TestChartShowsVersion(t *testing.T) {
	for _, tt := range []struct {
		name, image, want string
	}{
		{"the chart's", "", "0.1.0"},
		{"another", "v0.2.0-rc.1", "v0.2.0-rc.1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := minimal()
			v["image"] = map[string]any{"name": "registry.example.com:5000/isthmus", "version": tt.image}
			out, err := render(t, v)
			assert.NilError(t, err)
			var versions []string
			for _, o := range documents(t, out) {
				var d appsv1.Deployment
				if o["kind"] != "Deployment" {
					continue
				}
				assert.NilError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o, &d))
				if d.Labels["app.kubernetes.io/name"] != "controller-manager" || d.Labels["app.kubernetes.io/component"] != "controller-manager" {
					continue
				}
				assert.Equal(t, d.Spec.Template.Labels["app.kubernetes.io/name"], "isthmus-controller")
				for _, c := range d.Spec.Template.Spec.Containers {
					if c.Name == "controller-manager" {
						versions = append(versions, c.Image[strings.LastIndex(c.Image, ":")+1:])
					}
				}
			}
			assert.DeepEqual(t, versions, []string{tt.want})
		})
	}
}

// Helm follows the link to the generated CRDs.
func TestChartHasCRDs(t *testing.T) {
	chart, err := loader.Load("chart")
	assert.NilError(t, err)
	assert.Check(t, is.Len(chart.CRDObjects(), 19))
}

// Which FirewallConfigurations there are depends on the overlay and on what is
// switched off.
func TestChartFirewall(t *testing.T) {
	const mss, node, gw, vxlan = "gw-mss-clamping", "fabric-notrack", "gw-notrack", "fabric-notrack-vxlan"
	for _, tt := range []struct {
		name       string
		networking map[string]any
		want       []string
	}{
		{"default", nil, []string{mss, node, gw}},
		{"VXLAN", map[string]any{"overlay": "vxlan"}, []string{mss, vxlan}},
		{"auto", map[string]any{"overlay": "auto"}, []string{mss, node, gw, vxlan}},
		{"no notrack", map[string]any{"notrack": map[string]any{"enabled": false}}, []string{mss}},
		{"no clamping", map[string]any{"gateway": map[string]any{"mssclamp": map[string]any{"enabled": false}}}, []string{node, gw}},
		{"fixed", map[string]any{"genevePort": 6081, "gateway": map[string]any{"mssclamp": map[string]any{"value": 1200}}}, []string{mss, node, gw}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := minimal()
			if tt.networking != nil {
				v["networking"] = tt.networking
			}
			out, err := render(t, v)
			assert.NilError(t, err)
			got := []string{}
			for _, o := range documents(t, out) {
				if o["kind"] == "FirewallConfiguration" {
					got = append(got, o["metadata"].(map[string]any)["name"].(string))
				}
			}
			assert.DeepEqual(t, got, tt.want)
			if tt.name == "fixed" {
				assert.Equal(t, strings.Count(out, `value: "1200"`), 2)
				assert.Equal(t, strings.Count(out, `value: "6081"`), 8)
			}
		})
	}
	v := minimal()
	v["networking"] = map[string]any{"gateway": map[string]any{"mssclamp": map[string]any{"value": "route"}}}
	_, err := render(t, v)
	assert.ErrorContains(t, err, "/networking/gateway/mssclamp/value")
}

// Peers do not reach each other through this cluster unless a value says so.
func TestChartTransit(t *testing.T) {
	for name, tt := range map[string]struct {
		networking map[string]any
		want       string
	}{
		"default": {nil, ""},
		"denied":  {map[string]any{"denyDirectConnections": true}, ""},
		"all":     {map[string]any{"denyDirectConnections": false}, "--direct-connections=all"},
		"pairs":   {map[string]any{"directConnections": []any{[]any{"rome", "naples"}, []any{"rome", "oslo"}}}, "--direct-connections=rome:naples,rome:oslo"},
	} {
		t.Run(name, func(t *testing.T) {
			v := minimal()
			if tt.networking != nil {
				v["networking"] = tt.networking
			}
			out, err := render(t, v)
			assert.NilError(t, err)
			assert.Check(t, is.Contains(out, tt.want))
			assert.Equal(t, strings.Contains(out, "--direct-connections"), tt.want != "")
		})
	}
}

// Keys change by themselves where a value says so, and peers may change theirs until one
// does not.
func TestChartKeyRotation(t *testing.T) {
	for name, tt := range map[string]struct {
		rotation map[string]any
		want     []string
	}{
		"default":    {nil, nil},
		"monthly":    {map[string]any{"every": "720h"}, []string{"--rotate-keys-every=720h"}},
		"not at all": {map[string]any{"accept": false, "every": ""}, []string{"--refuse-key-rotation"}},
	} {
		t.Run(name, func(t *testing.T) {
			v := minimal()
			if tt.rotation != nil {
				v["networking"] = map[string]any{"keyRotation": tt.rotation}
			}
			out, err := render(t, v)
			assert.NilError(t, err)
			for _, want := range tt.want {
				assert.Check(t, is.Contains(out, want))
			}
			assert.Check(t, is.Equal(strings.Count(out, "--rotate-keys-every")+strings.Count(out, "--refuse-key-rotation"), len(tt.want)))
		})
	}
}

// Every daemon has two minutes to start, and is seen within a second or two when
// it has; liveness and readiness come after that.
func TestChartProbes(t *testing.T) {
	out, err := render(t, minimal())
	assert.NilError(t, err)
	var containers int
	var walk func(node any)
	walk = func(node any) {
		switch n := node.(type) {
		case []any:
			for _, v := range n {
				walk(v)
			}
		case map[string]any:
			if live, ok := n["livenessProbe"].(map[string]any); ok {
				containers++
				ready, _ := n["readinessProbe"].(map[string]any)
				startup, _ := n["startupProbe"].(map[string]any)
				assert.Check(t, is.DeepEqual(ready["httpGet"], map[string]any{"path": "/readyz", "port": "health"}))
				assert.Check(t, is.DeepEqual(live["httpGet"], map[string]any{"path": "/healthz", "port": "health"}))
				assert.Check(t, is.DeepEqual(startup["httpGet"], live["httpGet"]))
				period, _ := startup["periodSeconds"].(float64)
				failures, _ := startup["failureThreshold"].(float64)
				assert.Check(t, period <= 2 && period*failures == 120, "%v times %v s", failures, period)
			}
			for _, v := range n {
				walk(v)
			}
		}
	}
	for _, o := range documents(t, out) {
		walk(o)
	}
	assert.Equal(t, containers, 4)
}

// No container asks for more than NET_ADMIN, but for the two of a gateway in a
// network namespace of its node, which are only there when somebody asks for
// them: the one that mounts that is privileged, and talks to nobody, and the
// gateway has SYS_ADMIN to enter it.
func TestChartPrivileges(t *testing.T) {
	for name, tt := range map[string]struct {
		values                       map[string]any
		containers, holders, inNetNS int
	}{
		"minimal": {minimal(), 5, 0, 0},
		"full":    {full(), 9, 2, 2},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := render(t, tt.values)
			assert.NilError(t, err)
			var containers, holders, inNetNS int
			for _, p := range pods(documents(t, out)) {
				for _, c := range p.containers {
					containers++
					security, _ := c["securityContext"].(map[string]any)
					assert.Check(t, is.Equal(security["readOnlyRootFilesystem"], true))
					if c["name"] == "netns" {
						holders++
						assert.Check(t, is.Equal(security["privileged"], true))
						assert.Check(t, is.Equal(c["args"].([]any)[0], "netns"))
						continue
					}
					assert.Check(t, is.Equal(security["privileged"], false))
					assert.Check(t, is.Equal(security["allowPrivilegeEscalation"], false))
					capabilities := security["capabilities"].(map[string]any)
					assert.Check(t, is.DeepEqual(capabilities["drop"], []any{"ALL"}))
					if add, ok := capabilities["add"]; ok {
						want := []any{"NET_ADMIN"}
						if strings.Contains(fmt.Sprint(c["args"]), "--netns=") {
							inNetNS++
							want = append(want, "SYS_ADMIN")
						}
						assert.Check(t, is.DeepEqual(add, want))
					}
				}
			}
			assert.Equal(t, containers, tt.containers)
			assert.Equal(t, holders, tt.holders)
			assert.Equal(t, inNetNS, tt.inNetNS)
		})
	}
}
