package plan_test

import (
	"fmt"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// Of the addresses of a node those are open to peers that an IP stands for, and the
// networks of Services; a gateway knows the networks of all peers.
func TestOpenToPeers(t *testing.T) {
	w := peered(t)
	open := func(node string) []v1beta1.CIDR {
		w.settle()
		return get[*v1beta1.InternalNode](w, "", node).Spec.OpenToPeers
	}
	assert.DeepEqual(t, open("node-1"), []v1beta1.CIDR{"10.96.0.0/16"})

	n := get[*v1beta1.InternalNode](w, "", "node-1")
	n.Status.Addresses = []v1beta1.IP{"10.10.0.1", "192.168.40.10"}
	ip := func(name, of string) {
		o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "IP"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		o.Spec.IP = v1beta1.IP(of)
		w.create(o)
	}
	ip("bridge", "10.10.0.1")        // as the node says
	ip("vip", "192.168.40.10")       // on this node for now
	ip("elsewhere", "192.168.40.11") // of no node
	assert.DeepEqual(t, open("node-1"), []v1beta1.CIDR{"10.10.0.1/32", "10.96.0.0/16", "192.168.40.10/32"})
	assert.DeepEqual(t, open("node-2"), []v1beta1.CIDR{"10.96.0.0/16"})

	n = get[*v1beta1.InternalNode](w, "", "node-1")
	n.Status.Addresses = []v1beta1.IP{"10.10.0.1"} // it moved
	get[*v1beta1.InternalNode](w, "", "node-2").Status.Addresses = []v1beta1.IP{"192.168.40.10"}
	assert.DeepEqual(t, open("node-1"), []v1beta1.CIDR{"10.10.0.1/32", "10.96.0.0/16"})
	assert.DeepEqual(t, open("node-2"), []v1beta1.CIDR{"10.96.0.0/16", "192.168.40.10/32"})

	delete(w.objects, "IP default/bridge")
	assert.DeepEqual(t, open("node-1"), []v1beta1.CIDR{"10.96.0.0/16"})

	// More than there is room for: who can't be reached is said.
	n = get[*v1beta1.InternalNode](w, "", "node-2")
	n.Status.Addresses = nil
	for i := range 256 {
		a := address("192.168.41.0/24", i)
		n.Status.Addresses = append(n.Status.Addresses, v1beta1.IP(a))
		ip(fmt.Sprintf("many-%d", i), a)
	}
	r := w.settle()
	assert.Equal(t, len(open("node-2")), 256)
	said := strings.Join(warnings(r, "InternalNode", "", "node-2"), "; ")
	assert.Check(t, is.Contains(said, "room for 256 of the 257 networks"))
	assert.Check(t, is.Contains(said, "peers do not reach 192.168.41.255/32"))

	f := get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome")
	assert.DeepEqual(t, f.Spec.PeerCIDRs, f.Spec.RemoteCIDRs)
}
