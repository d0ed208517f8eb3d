package cli

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"helm.sh/helm/v3/pkg/chartutil"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// rendered returns the chart for values of --set.
func rendered(t *testing.T, set ...string) (manifest, error) {
	t.Helper()
	c, err := loadChart()
	assert.NilError(t, err)
	v, err := (&values{set: append([]string{
		"discovery.config.clusterID=milan", "ipam.podCIDRs={10.0.0.0/16}", "ipam.serviceCIDR=10.96.0.0/16",
	}, set...)}).merged(strings.NewReader(""))
	assert.NilError(t, err)
	return render(c, "liqo", v, nil, chartutil.DefaultCapabilities)
}

func messages(list []Problem) string {
	var out []string
	for _, p := range list {
		out = append(out, p.Object+": "+p.Message)
	}
	return strings.Join(out, "\n")
}

func TestNetworks(t *testing.T) {
	for _, tt := range []struct{ name, set, want string }{
		{"sound", "ipam.externalCIDR=10.71.0.0/16", ""},
		{"an octet too large", "ipam.externalCIDR=10.271.0.0/16", `ipam.externalCIDR: "10.271.0.0/16" is not a network`},
		{"a mask too long", "ipam.serviceCIDR=10.96.0.0/77", `ipam.serviceCIDR: "10.96.0.0/77" is not a network`},
		{"ours inside the pods'", "ipam.internalCIDR=10.0.128.0/20", "ipam.internalCIDR: 10.0.128.0/20 overlaps ipam.podCIDRs (10.0.0.0/16)"},
		{"ours in each other", "ipam.externalCIDR=10.80.0.0/16,ipam.internalCIDR=10.80.4.0/24", "ipam.internalCIDR: 10.80.4.0/24 overlaps ipam.externalCIDR (10.80.0.0/16)"},
		{"IPv6", "ipam.reservedSubnets={fd00::/48}", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, err := rendered(t, tt.set)
			assert.NilError(t, err)
			got := messages(checkNetworks(m.objects))
			if tt.want == "" {
				assert.Equal(t, got, "")
				return
			}
			assert.Assert(t, is.Contains(got, tt.want))
		})
	}
}

// What Helm says of wrong values is said by the name of the value.
func TestValues(t *testing.T) {
	for _, tt := range []struct{ set, want string }{
		{"networking.genevePort=0", "genevePort"},
		{"networking.genevaPort=6091", "genevaPort"},
		{"networking.overlay=ipip", "overlay"},
		{"discovery.config.clusterID=Mi.lan", "clusterID"},
		{"ipam.serviceCIDR=", "values: ipam.serviceCIDR: the network of the Services is not given"},
		{"ipam.podCIDRs={}", "/ipam/podCIDRs/0"},
	} {
		t.Run(tt.set, func(t *testing.T) {
			_, err := rendered(t, tt.set)
			assert.ErrorContains(t, err, tt.want)
			assert.Check(t, strings.HasPrefix(err.Error(), "values: "), err)
		})
	}
}

func TestNodes(t *testing.T) {
	for _, tt := range []struct {
		release, os string
		refused     bool
	}{
		{"6.1.0-18-cloud-amd64", "linux", false},
		{"5.10.0", "linux", false},
		{"5.9.16-200.fc33.x86_64", "linux", true},
		{"4.18.0-553.el8_10.x86_64", "", true},
		{"10.0.20348.2340", "windows", false},
		{"", "linux", false},
		{"custom", "linux", false},
	} {
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
		n.Status.NodeInfo = corev1.NodeSystemInfo{KernelVersion: tt.release, OperatingSystem: tt.os}
		got := checkNodes([]corev1.Node{n})
		assert.Check(t, is.Equal(len(got) > 0, tt.refused), tt.release)
		if tt.refused {
			assert.Check(t, is.Contains(messages(got), "Node n1: it runs Linux "+tt.release+", and 5.10 is needed"))
		}
	}
}

func TestPublicSystem(t *testing.T) {
	named := func(name string, labels map[string]string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "liqo", Name: name, Labels: labels}
	}
	daemons := []appsv1.DaemonSet{
		{ObjectMeta: named("liqo-fabric", map[string]string{"app.kubernetes.io/part-of": "liqo", "app.kubernetes.io/name": "fabric"})},
		{ObjectMeta: named("isthmus-node", map[string]string{"app.kubernetes.io/part-of": "isthmus"})},
	}
	deployments := []appsv1.Deployment{
		{ObjectMeta: named("liqo-crd-replicator", map[string]string{"app.kubernetes.io/part-of": "liqo"})}, // another module
		{ObjectMeta: named("gw-rome", map[string]string{"networking.liqo.io/component": "gateway"})},
		{ObjectMeta: named("gw-oslo", map[string]string{"networking.liqo.io/component": "gateway", "app.kubernetes.io/managed-by": "isthmus"})},
	}
	var found []string
	for _, p := range checkPublicSystem(daemons, deployments) {
		found = append(found, p.Object)
	}
	assert.DeepEqual(t, found, []string{"DaemonSet liqo/liqo-fabric", "Deployment liqo/gw-rome"})
}

// A CRD that would drop a field is older; one that has more is not.
func TestOlderCRDs(t *testing.T) {
	m, err := rendered(t)
	assert.NilError(t, err)
	assert.Equal(t, len(m.crds), 19)
	for _, d := range m.crds {
		crd, err := d.crd()
		assert.NilError(t, err)
		assert.Equal(t, lacks(crd, crd), "", crd.Name)
	}
	find := func(name string) *apiextensionsv1.CustomResourceDefinition {
		for _, d := range m.crds {
			if d.object.GetName() == name {
				crd, err := d.crd()
				assert.NilError(t, err)
				return crd
			}
		}
		t.Fatalf("no CRD %s", name)
		return nil
	}
	for _, tt := range []struct {
		name   string
		change func(c *apiextensionsv1.CustomResourceDefinition)
		want   string
	}{
		{"another version", func(c *apiextensionsv1.CustomResourceDefinition) { c.Spec.Versions[0].Name = "v1alpha1" }, "the version v1beta1"},
		{"not served", func(c *apiextensionsv1.CustomResourceDefinition) { c.Spec.Versions[0].Served = false }, "the version v1beta1"},
		{"a field less", func(c *apiextensionsv1.CustomResourceDefinition) {
			delete(c.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"].Properties, "overlays")
		}, "the field status.overlays"},
		{"a field more", func(c *apiextensionsv1.CustomResourceDefinition) {
			c.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"].Properties["color"] = apiextensionsv1.JSONSchemaProps{Type: "string"}
		}, ""},
		{"whatever is kept", func(c *apiextensionsv1.CustomResourceDefinition) {
			keep := true
			c.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"] = apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: &keep}
		}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := find("internalnodes.networking.liqo.io")
			have := want.DeepCopy()
			tt.change(have)
			assert.Equal(t, lacks(have, want), tt.want)
		})
	}
}

// The manifests that are printed are the chart's, objects in Helm's order.
func TestPrintYAML(t *testing.T) {
	for _, tt := range []struct {
		crds       string
		first      string
		namespaces int
		kinds      int
	}{{"include", "kind: Namespace", 1, 19}, {"only", "kind: CustomResourceDefinition", 0, 19}, {"skip", "kind: Namespace", 1, 0}} {
		var out, errs strings.Builder
		code := Run(t.Context(), "devel", []string{"install", "--dry-run", "--output", "yaml", "--crds", tt.crds, "--kubeconfig", "/does/not/exist",
			"--values", "-", "--set", "ipam.serviceCIDR=10.96.0.0/16"},
			strings.NewReader("discovery: {config: {clusterID: milan}}\nipam: {podCIDRs: [10.0.0.0/16]}\n"), &out, &errs)
		assert.Equal(t, code, 0, errs.String())
		var docs []document
		assert.NilError(t, decode(&docs, out.String()))
		count := map[string]int{}
		for _, d := range docs {
			count[d.object.GetKind()]++
		}
		assert.Check(t, is.Contains(docs[0].text, tt.first))
		assert.Check(t, is.Equal(count["Namespace"], tt.namespaces))
		assert.Check(t, is.Equal(count["CustomResourceDefinition"], tt.kinds))
		assert.Check(t, is.Equal(count["Job"], 0), "the hook is for helm")
		assert.Check(t, is.Equal(count["DaemonSet"], tt.namespaces))
	}
}

func TestUsageErrors(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"install --output json", `--output "json": only yaml`},
		{"install --crds none", `--crds "none"`},
		{"install --set overlay", "--set overlay"},
		{"install --values /does/not/exist", "--values /does/not/exist"},
		{"install extra", "unknown command"},
		{"install --kubeconfig /does/not/exist", "/does/not/exist"},
		{"remove", "unknown command"},
		{"peer invite", "name the cluster to invite by its ID, or give --list"},
		{"peer invite rome --list", "give --list and no ID"},
		{"peer invite rome --expires 200h", "--expires 200h0m0s: write a time up to 168h0m0s"},
		{"peer accept", "give the invitation: a file that has its text"},
		{"peer accept /does/not/exist", "a file that has it, or - for standard input"},
		{"peer accept -", "this is not an invitation"},
		{"peer remove", "accepts 1 arg"},
		{"peer remove Rome", `"Rome" is not the ID of a cluster`},
		{"peer invite ../rome", `"../rome" is not the ID of a cluster`},
		{"peer remove rome --timeout 0s", "--timeout 0s"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			var out, errs strings.Builder
			assert.Equal(t, Run(t.Context(), "devel", strings.Fields(tt.args), strings.NewReader(""), &out, &errs), 1)
			assert.Check(t, is.Contains(errs.String(), tt.want))
			assert.Equal(t, out.String(), "")
		})
	}
	// For a program, on standard output.
	var out, errs strings.Builder
	assert.Equal(t, Run(t.Context(), "devel", []string{"install", "--json", "--crds", "none"}, strings.NewReader(""), &out, &errs), 1)
	assert.Check(t, is.Contains(out.String(), `"error": "--crds`))
}

// What can't be found has to be given.
func TestPodNetworksAreAskedFor(t *testing.T) {
	c, err := loadChart()
	assert.NilError(t, err)
	_, err = render(c, "liqo", map[string]any{"discovery": map[string]any{"config": map[string]any{"clusterID": "milan"}}}, nil, chartutil.DefaultCapabilities)
	assert.ErrorContains(t, err, "values: ipam.podCIDRs: the networks of the pods are not given")
}
