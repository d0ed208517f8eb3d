package deploy

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// CoreDNS is where kubelets send pods, and nothing that pods run comes before
// what they need.
func TestDNSObjects(t *testing.T) {
	c := topology.Cluster{Name: "rome", ServiceCIDR: netip.MustParsePrefix("10.97.0.0/16"), Runtime: topology.RuntimeContainerd}
	objects, err := dnsObjects(c)
	assert.NilError(t, err)
	var names []string
	byKind := map[string]map[string]any{}
	for _, o := range objects {
		names = append(names, describe(o))
		byKind[o.GetKind()] = o.Object
	}
	assert.DeepEqual(t, names, []string{
		"ServiceAccount kube-system/coredns", "ClusterRole system:coredns", "ClusterRoleBinding system:coredns",
		"ConfigMap kube-system/coredns", "Service kube-system/kube-dns", "Deployment kube-system/coredns",
	})
	address, _, _ := unstructured.NestedString(byKind["Service"], "spec", "clusterIP")
	assert.Equal(t, address, "10.97.0.10")
	corefile, _, _ := unstructured.NestedString(byKind["ConfigMap"], "data", "Corefile")
	assert.Check(t, is.Contains(corefile, "kubernetes cluster.local in-addr.arpa ip6.arpa {"))
	assert.Check(t, !strings.Contains(corefile, "forward"), "there is nobody to forward to")
	containers, _, _ := unstructured.NestedSlice(byKind["Deployment"], "spec", "template", "spec", "containers")
	assert.Equal(t, containers[0].(map[string]any)["image"], DNSImage)
}

// It is brought to clusters of real nodes, whoever installs the appliance there.
func TestDNSPhase(t *testing.T) {
	real, plain := topology.Cluster{Name: "milan", Runtime: topology.RuntimeContainerd}, topology.Cluster{Name: "rome", Runtime: topology.RuntimeProcess}
	for _, install := range []string{topology.InstallChart, topology.InstallCLI, topology.InstallNone} {
		for want, clusters := range map[bool][]topology.Cluster{true: {plain, real}, false: {plain}} {
			in := &installer{cfg: Config{Topology: &topology.Topology{Install: install, Clusters: clusters}}}
			got := slices.ContainsFunc(in.phases()[0], func(p phase) bool { return p.name == "CoreDNS created" })
			assert.Equal(t, got, want, "%s: %v", install, clusters)
		}
	}
}
