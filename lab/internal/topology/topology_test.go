package topology_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// TestMistakes reads every testdata/*.yaml, each with mistakes, and compares
// the messages.
func TestMistakes(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	assert.NilError(t, err)
	assert.Assert(t, len(files) > 0)
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".yaml"), func(t *testing.T) {
			_, err := topology.Load(path)
			assert.Assert(t, err != nil, "the file was accepted")
			golden.Assert(t, err.Error()+"\n", strings.TrimSuffix(filepath.Base(path), ".yaml")+".golden")
		})
	}
}

func TestLinks(t *testing.T) {
	src := "# drawing\n" + `
clusters:
  milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16, nat: true, icmp: drop, wan: { delay: 40ms, jitter: 5ms, loss: 0.5%, reorder: 2%, rate: 20mbit } }
  rome:  { nodes: 1, podCIDR: 10.1.0.0/16, serviceCIDR: 10.97.0.0/16, kubeProxy: ipvs }
  naples:  { nodes: 1, podCIDR: 10.2.0.0/16, serviceCIDR: 10.98.0.0/16, nat: true }
peerings:
  - { server: milan, client: rome, forward: { port: 51820, nodePort: 31820 } }
  - { server: naples, client: rome, service: LoadBalancer }
outside: { user: { wan: { loss: 100% } } }
`
	got, err := topology.Parse("links.yaml", []byte(src))
	assert.NilError(t, err)
	milan, rome := got.Clusters[0], got.Clusters[1]
	assert.Equal(t, milan.Impairment, topology.Impairment{Delay: 40 * time.Millisecond, Jitter: 5 * time.Millisecond, Loss: 0.5, Reorder: 2, Rate: 20e6})
	assert.Equal(t, milan.Impairment.String(), "delay 40ms, jitter 5ms, loss 0.5%, reorder 2%, rate 20mbit")
	assert.Equal(t, rome.Impairment.String(), "nothing")
	assert.Assert(t, milan.BlocksICMP && !rome.BlocksICMP)
	assert.DeepEqual(t, got.Peerings[0].Forward, &topology.Forward{Port: 51820, NodePort: 31820, Node: 1})
	assert.Equal(t, got.Outside[0].Impairment.String(), "loss 100%")
	assert.DeepEqual(t, got.Features(), []string{"netem", "ipvs"})
}

func TestLoad(t *testing.T) {
	src := "# drawing\n" + `
clusters:
  milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16, masquerade: kindnet }
  rome:  { nodes: 1, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16, kubeProxy: iptables, internalCIDR: 10.81.0.0/24, cni: flannel, mtu: 1400 }
peerings: [{ server: milan, client: rome, mtu: 1340 }]
outside: { user: {}, other: , db: { address: 192.168.40.10, via: rome } }
pods:
  rome: { web: { node: 1, hostNetwork: true } }
`
	got, err := topology.Parse("dir/small.yaml", []byte(src))
	assert.NilError(t, err)
	assert.Equal(t, got.Name, "small")
	assert.Equal(t, got.Drawing, "drawing")
	assert.Equal(t, got.Clusters[0].NodeCIDR.String(), "172.18.1.0/24")
	assert.Equal(t, got.Clusters[1].NodeCIDR.String(), "172.18.2.0/24")
	assert.Equal(t, got.Clusters[1].InternalCIDR.String(), "10.81.0.0/24")
	assert.Equal(t, got.Clusters[0].KubeProxy, "nftables")
	assert.Equal(t, got.Clusters[1].KubeProxy, "iptables")
	assert.DeepEqual(t, got.Peerings, []topology.Peering{{Server: "milan", Client: "rome", Service: "NodePort", MTU: 1340, Implementation: "auto", Objects: "Configuration", Gateways: "pod"}})
	assert.Assert(t, slices.Equal(got.Outside, []topology.Outside{{Name: "user"}, {Name: "other"}, {Name: "db", Address: netip.MustParseAddr("192.168.40.10"), Via: "rome"}}), "%+v", got.Outside)
	milan, rome := got.Clusters[0], got.Clusters[1]
	assert.Equal(t, milan.LoadBalancer.String()+" "+rome.LoadBalancer.String(), "198.51.100.0/28 198.51.100.16/28")
	assert.Equal(t, milan.MTU, 1500)
	assert.Equal(t, rome.MTU, 1400)
	assert.Equal(t, milan.Masquerade+" "+rome.CNI, "kindnet flannel")
	assert.DeepEqual(t, got.Pods, []topology.Pod{{Cluster: "rome", Name: "web", Node: 1, HostNetwork: true}})
	assert.DeepEqual(t, got.Peers("rome"), []string{"milan"})
}

// TestAbsentPeering: scenarios connect it, so nobody waits for it before.
func TestAbsentPeering(t *testing.T) {
	got, err := topology.Load("../../../topologies/hub-joins.yaml")
	assert.NilError(t, err)
	assert.DeepEqual(t, got.Peers("milan"), []string{"rome", "naples"})
	assert.DeepEqual(t, got.PresentPeers("milan"), []string{"rome"})
	assert.DeepEqual(t, got.Peers("naples"), []string{"milan"})
	assert.Equal(t, len(got.PresentPeers("naples")), 0)
	assert.Equal(t, len(got.PresentPeerings()), 1)
	assert.Equal(t, len(got.Peerings), 2)
}

// TestRepository reads every topology of the repository.
func TestRepository(t *testing.T) {
	files, err := filepath.Glob("../../../topologies/*.yaml")
	assert.NilError(t, err)
	assert.Assert(t, len(files) > 0)
	for _, path := range files {
		_, err := topology.Load(path)
		assert.NilError(t, err)
	}
}

func TestMissingFile(t *testing.T) {
	_, err := topology.Load("testdata/none.yaml")
	assert.ErrorIs(t, err, os.ErrNotExist)
}

func TestDNSAddress(t *testing.T) {
	for services, want := range map[string]string{
		"10.96.0.0/16": "10.96.0.10", "10.97.3.4/16": "10.97.0.10", "10.0.0.248/28": "10.0.0.250", "fd00:10:96::/112": "fd00:10:96::a",
	} {
		assert.Equal(t, topology.DNSAddress(netip.MustParsePrefix(services)).String(), want)
	}
}
