package kind

import (
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"sigs.k8s.io/kind/pkg/apis/config/v1alpha4"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// load reads a topology file of the repository.
func load(t *testing.T, name string) *topology.Topology {
	t.Helper()
	top, err := topology.Load(filepath.Join("..", "..", "..", "topologies", name+".yaml"))
	assert.NilError(t, err)
	return top
}

// parse reads a topology of a test.
func parse(t *testing.T, src string) *topology.Topology {
	t.Helper()
	top, err := topology.Parse("test.yaml", []byte("# drawing\n"+src))
	assert.NilError(t, err)
	return top
}

// Configurations are what kind's own types say, defaults filled in.
func TestConfig(t *testing.T) {
	worker := func(name string) v1alpha4.Node {
		return v1alpha4.Node{Role: v1alpha4.WorkerRole, Image: "localhost/node:1", KubeadmConfigPatches: []string{"kind: JoinConfiguration\nnodeRegistration:\n  name: " + name + "\n"}}
	}
	controlPlane := v1alpha4.Node{Role: v1alpha4.ControlPlaneRole, Image: "localhost/node:1"}
	base := func() *v1alpha4.Cluster {
		return &v1alpha4.Cluster{
			TypeMeta: v1alpha4.TypeMeta{Kind: "Cluster", APIVersion: "kind.x-k8s.io/v1alpha4"},
			Name:     ClusterName("some-kind-geneve", "milan"),
			Nodes:    []v1alpha4.Node{controlPlane, worker("node-1"), worker("node-2")},
			Networking: v1alpha4.Networking{
				IPFamily: v1alpha4.IPv4Family, APIServerAddress: "127.0.0.1",
				PodSubnet: "10.0.0.0/16", ServiceSubnet: "10.96.0.0/16",
				DisableDefaultCNI: true, KubeProxyMode: v1alpha4.NFTablesProxyMode,
			},
			KubeadmConfigPatches: []string{"kind: KubeletConfiguration\nfailCgroupV1: false\n", patience("InitConfiguration"), patience("JoinConfiguration")},
		}
	}
	for _, tt := range []struct {
		name     string
		topology *topology.Topology
		change   func(*v1alpha4.Cluster)
	}{
		{"the first topology of the lab", load(t, "two-clusters"), func(*v1alpha4.Cluster) {}},
		{"another kube-proxy", parse(t, "clusters: { milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16, kubeProxy: iptables } }"),
			func(c *v1alpha4.Cluster) { c.Networking.KubeProxyMode = v1alpha4.IPTablesProxyMode }},
		{"kindnet is the lab's", parse(t, "clusters: { milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16, cni: ptp, masquerade: kindnet } }"),
			func(*v1alpha4.Cluster) {}},
		{"one node", parse(t, "clusters: { milan: { nodes: 1, podCIDR: 10.1.0.0/16, serviceCIDR: 10.97.0.0/16 } }"),
			func(c *v1alpha4.Cluster) {
				c.Nodes = []v1alpha4.Node{controlPlane, worker("node-1")}
				c.Networking.PodSubnet, c.Networking.ServiceSubnet = "10.1.0.0/16", "10.97.0.0/16"
			}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := base()
			tt.change(want)
			got := Config("some-kind-geneve", "localhost/node:1", "", tt.topology.Clusters[0])
			assert.DeepEqual(t, got, want)
			again := got.DeepCopy()
			v1alpha4.SetDefaultsCluster(again)
			assert.DeepEqual(t, again, got) // nothing is left to kind's defaults
			for _, n := range Config("some-kind-geneve", "localhost/node:1", "/run/lab/shared", tt.topology.Clusters[0]).Nodes {
				assert.DeepEqual(t, n.ExtraMounts, []v1alpha4.Mount{{HostPath: "/run/lab/shared", ContainerPath: "/kind/shared"}})
			}
		})
	}
}

// Two labs of one topology can be up at once, and hosts have names that fit.
func TestClusterName(t *testing.T) {
	a, b := ClusterName("two-clusters-kind-geneve", "milan"), ClusterName("two-clusters-kind-vxlan", "milan")
	assert.Check(t, a != b)
	assert.Check(t, strings.HasPrefix(a, "milan-"))
	longest := ClusterName("any", strings.Repeat("x", maxName)) + "-control-plane"
	assert.Equal(t, len(longest), 63)
}

// What kind can't give is refused by the name of the field.
func TestRefuse(t *testing.T) {
	cluster := func(more string) string {
		return "clusters:\n  milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16" + more + " }\n  rome: { nodes: 1, podCIDR: 10.1.0.0/16, serviceCIDR: 10.97.0.0/16 }\n"
	}
	for _, tt := range []struct {
		name, source string
		want         []string // fields; none: it can be made
	}{
		{"plain", cluster(""), nil},
		{"ptp", cluster(", cni: ptp"), nil},
		{"any masquerade", cluster(", masquerade: iptables"), nil},
		{"a host outside", cluster("") + "outside: { user: {} }", nil},
		{"flannel", cluster(", cni: flannel"), nil},
		{"an IPAM of its own", cluster(", cni: ippool"), []string{"clusters.milan.cni"}},
		{"flat", cluster(", nodeCIDR: 10.0.200.0/24, flat: true"), []string{"clusters.milan.nodeCIDR", "clusters.milan.flat"}},
		{"a network of its own", cluster(", nodeCIDR: 192.168.7.0/24"), []string{"clusters.milan.nodeCIDR"}},
		{"NAT", cluster(", nat: true"), []string{"clusters.milan.nat"}},
		{"routed services", cluster(", routedServices: true"), []string{"clusters.milan.routedServices"}},
		{"source check", cluster(", sourceCheck: true"), []string{"clusters.milan.sourceCheck"}},
		{"strict reverse-path filters", cluster(", rpFilter: 1"), nil},
		{"narrow", cluster(", mtu: 1400, wanMTU: 1400"), []string{"clusters.milan.mtu", "clusters.milan.wanMTU"}},
		{"a node that joins later", cluster(", absent: [2]"), []string{"clusters.milan.absent"}},
		{"a long name", strings.Replace(cluster(""), "rome", strings.Repeat("r", maxName+1), 1), []string{"clusters." + strings.Repeat("r", maxName+1)}},
		{"a load balancer", cluster("") + "peerings: [{ server: milan, client: rome, service: LoadBalancer }]", []string{"peerings.milan-rome.service"}},
		{"a ClusterIP from outside", cluster(", routedServices: true") + "peerings: [{ server: milan, client: rome, service: ClusterIP }]",
			[]string{"clusters.milan.routedServices", "peerings.milan-rome.service"}},
		{"gateways in namespaces of nodes", cluster("") + "peerings: [{ server: milan, client: rome, gateways: netns }]", []string{"peerings.milan-rome.gateways"}},
		{"installed by isthmusctl", "install: isthmusctl\n" + cluster(""), nil},
		{"installed by scenarios", "install: none\n" + cluster(""), nil},
		{"a host behind a router", cluster("") + "outside: { db: { address: 192.168.40.10, via: milan } }", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := Refuse(parse(t, tt.source))
			var refused *Refused
			if !errors.As(err, &refused) {
				assert.NilError(t, err)
				assert.Equal(t, len(tt.want), 0, "it was not refused")
				return
			}
			var got []string
			for _, p := range refused.Problems {
				field, why, _ := strings.Cut(p, ": ")
				got = append(got, field)
				assert.Check(t, len(why) > 10, p)
			}
			assert.DeepEqual(t, got, tt.want)
			assert.Check(t, is.Contains(err.Error(), "topology test can't be made of clusters of kind"))
		})
	}
}

// Node networks that the file does not say are those that the engine replaces.
func TestDefaultNodeCIDR(t *testing.T) {
	assert.Equal(t, topology.DefaultNodeCIDR(1), netip.MustParsePrefix("172.18.2.0/24"))
	for i, c := range load(t, "two-clusters").Clusters {
		assert.Equal(t, c.NodeCIDR, topology.DefaultNodeCIDR(i))
	}
}

// TestShared: hosts have one directory for files where the engine is on this machine, and
// each its own where it is not.
func TestShared(t *testing.T) {
	for _, tt := range []struct {
		local     bool
		dir, temp string
	}{{true, "/run/lab/shared", "TMPDIR=/kind/shared"}, {false, "", "TMPDIR=/tmp"}} {
		l := newLab("/run/lab", record{Shared: tt.local}, nil)
		assert.Equal(t, l.shared(), tt.dir)
		assert.Equal(t, l.temp(), tt.temp)
	}
}
