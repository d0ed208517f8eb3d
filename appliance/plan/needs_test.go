package plan_test

import (
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// needs has a node report the address of another host that it needs.
func (w *world) needs(node, ip string, what v1beta1.NeededFor) {
	w.t.Helper()
	n := get[*v1beta1.InternalNode](w, "", node)
	n.Status.Needs = append(n.Status.Needs, v1beta1.NeededAddress{IP: v1beta1.IP(ip), For: what})
}

// apiServer has the Service default/kubernetes lead to these addresses.
func (w *world) apiServer(addresses ...string) {
	w.t.Helper()
	w.create(&discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  named("default", "kubernetes"),
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: addresses}},
	})
}

// undisturbed returns the condition HostsUndisturbed of a Configuration.
func (w *world) undisturbed(remote string) metav1.Condition {
	w.t.Helper()
	return condition(w.t, get[*v1beta1.Configuration](w, "liqo-tenant-"+remote, remote).Status.Conditions, v1beta1.ConditionHostsUndisturbed)
}

// TestNeededAddressesAreTaken: no network of a new peer has an address that a host of
// this cluster needs.
func TestNeededAddressesAreTaken(t *testing.T) {
	for _, test := range []struct {
		name          string
		make          func(w *world)
		pod, external string
		moved         bool // the pods' network; else the external one
	}{
		{"a router", func(w *world) { w.needs("node-1", "10.30.7.1", v1beta1.NeededForRouting) }, "10.30.0.0/16", "10.73.0.0/16", true},
		{"a DNS server", func(w *world) { w.needs("node-2", "10.30.255.255", v1beta1.NeededForDNS) }, "10.30.0.0/16", "10.73.0.0/16", true},
		{"the API server that a node reaches", func(w *world) { w.needs("node-1", "10.30.0.0", v1beta1.NeededForAPIServer) }, "10.30.0.0/16", "10.73.0.0/16", true},
		{"the API server itself", func(w *world) { w.apiServer("192.0.2.9", "10.30.7.1") }, "10.30.0.0/16", "10.73.0.0/16", true},
		{"in the external network", func(w *world) { w.needs("node-1", "10.73.0.1", v1beta1.NeededForRouting) }, "10.30.0.0/16", "10.73.0.0/16", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := peered(t)
			w.settle()
			test.make(w)
			w.namespace("paris")
			w.configure("paris", test.pod, test.external)
			r := w.settle()
			got := get[*v1beta1.Configuration](w, "liqo-tenant-paris", "paris").Status.Remote
			assert.Assert(t, got != nil)
			assert.Equal(t, string(got.CIDR.Pod[0]) != test.pod, test.moved, "pods' network %s", got.CIDR.Pod[0])
			assert.Equal(t, string(got.CIDR.External[0]) != test.external, !test.moved, "external network %s", got.CIDR.External[0])
			assert.Equal(t, w.undisturbed("paris").Status, metav1.ConditionTrue)
			assert.Check(t, cmp.Len(warnings(r, "Configuration", "liqo-tenant-paris", "paris"), 0))
		})
	}
}

// TestNeededAddressesOfAnOldPeer: a peering that was there first keeps its networks, and
// says what is wrong and what to do, which helps.
func TestNeededAddressesOfAnOldPeer(t *testing.T) {
	w := peered(t)
	w.namespace("paris")
	w.configure("paris", "10.30.0.0/16", "10.73.0.0/16")
	w.settle()
	before := *get[*v1beta1.Configuration](w, "liqo-tenant-paris", "paris").Status.Remote
	assert.Equal(t, string(before.CIDR.Pod[0]), "10.30.0.0/16")
	assert.Equal(t, w.undisturbed("paris").Status, metav1.ConditionTrue)

	for _, last := range []string{"1", "2", "3", "4", "5"} {
		w.needs("node-1", "10.30.7."+last, v1beta1.NeededForRouting)
	}
	w.needs("node-2", "10.30.7.1", v1beta1.NeededForRouting)
	w.needs("node-1", "10.73.0.1", v1beta1.NeededForDNS)
	r := w.settle()
	assert.DeepEqual(t, *get[*v1beta1.Configuration](w, "liqo-tenant-paris", "paris").Status.Remote, before)
	c := w.undisturbed("paris")
	assert.Equal(t, string(c.Status)+" "+c.Reason, "False TakesOverHosts")
	var network string
	for _, o := range w.objects {
		if n, is := o.(*ipamv1alpha1.Network); is && n.Namespace == "liqo-tenant-paris" && n.Spec.CIDR == "10.30.0.0/16" {
			network = n.Name
		}
	}
	assert.Assert(t, strings.HasPrefix(c.Message, "spec.remote.cidr.pod[0] 10.30.0.0/16 contains a router of Node node-1 (10.30.7.1), a router of Node node-1 (10.30.7.2), a router of Node node-1 (10.30.7.3) and 2 more: "+
		"nodes send packets for them to the gateway of cluster paris. To have another network chosen, which ends all connections to this one, delete Network liqo-tenant-paris/"+network+"; "+
		"spec.remote.cidr.external[0] 10.73.0.0/16 contains a DNS server of Node node-1 (10.73.0.1): "), c.Message)
	assert.DeepEqual(t, warnings(r, "Configuration", "liqo-tenant-paris", "paris"), []string{c.Reason + ": " + c.Message})

	w.remove("Network", "liqo-tenant-paris", network)
	w.settle()
	now := get[*v1beta1.Configuration](w, "liqo-tenant-paris", "paris").Status.Remote.CIDR
	assert.Check(t, !netip.MustParsePrefix(string(now.Pod[0])).Contains(netip.MustParseAddr("10.30.7.1")), "%s", now.Pod[0])
	assert.Equal(t, now.External[0], before.CIDR.External[0])
	assert.Check(t, !strings.Contains(w.undisturbed("paris").Message, "spec.remote.cidr.pod"), "%s", w.undisturbed("paris").Message)
}

// TestNeededAddressesThatCannotBeAvoided are named by who refuses the network.
func TestNeededAddressesThatCannotBeAvoided(t *testing.T) {
	w := peered(t)
	w.options.Pools = []netip.Prefix{netip.MustParsePrefix("10.30.0.0/16")}
	w.settle()
	w.needs("node-2", "10.30.7.1", v1beta1.NeededForRouting)
	w.namespace("paris")
	w.configure("paris", "10.30.0.0/16", "")
	w.settle()
	c := get[*v1beta1.Configuration](w, "liqo-tenant-paris", "paris")
	assert.Check(t, c.Status.Remote == nil)
	refused := condition(t, c.Status.Conditions, v1beta1.ConditionNetworkCIDRsConfigured)
	assert.Equal(t, refused.Reason, plan.ReasonPoolsExhausted)
	assert.Check(t, strings.HasPrefix(refused.Message, "spec.remote.cidr.pod[0] 10.30.0.0/16 overlaps a router of Node node-2 (10.30.7.1), and the pools [10.30.0.0/16"), refused.Message)

	w.namespace("london")
	w.endpoint("london", "10.31.0.0/16", "10.72.0.0/16").Spec.RemoteNATPodCIDR = "10.30.0.0/16"
	w.settle()
	e := warnings(plan.Cluster(w.snapshot()), "TunnelEndpoint", "liqo-tenant-london", "london")
	assert.Assert(t, cmp.Len(e, 1))
	assert.Check(t, cmp.Contains(e[0], "spec.remoteNATPodCIDR 10.30.0.0/16 overlaps a router of Node node-2 (10.30.7.1)"))
}

// TestNeededAddressesOfAWish: whoever chose the network of a peer is told where to choose
// another one, which helps.
func TestNeededAddressesOfAWish(t *testing.T) {
	w := peered(t)
	w.portsTemplate()
	w.namespace("london")
	e := w.endpoint("london", "10.31.0.0/16", "10.74.0.0/16")
	e.Spec.RemoteNATPodCIDR = "10.40.0.0/16"
	w.settle()
	remapped := func() v1beta1.CIDR {
		return get[*v1beta1.Configuration](w, "liqo-tenant-london", "london").Status.Remote.CIDR.Pod[0]
	}
	assert.Equal(t, remapped(), v1beta1.CIDR("10.40.0.0/16"))
	w.needs("node-1", "10.40.7.1", v1beta1.NeededForRouting)
	w.settle()
	assert.Equal(t, remapped(), v1beta1.CIDR("10.40.0.0/16"))
	c := w.undisturbed("london")
	assert.Equal(t, c.Status, metav1.ConditionFalse)
	assert.Check(t, strings.HasSuffix(c.Message, "Write another network into spec.remoteNATPodCIDR of TunnelEndpoint liqo-tenant-london/london, which ends all connections to this one"), c.Message)

	e = get[*netv1alpha1.TunnelEndpoint](w, "liqo-tenant-london", "london")
	e.Spec.RemoteNATPodCIDR = "10.41.0.0/16"
	e.Generation++
	w.settle()
	assert.Equal(t, remapped(), v1beta1.CIDR("10.41.0.0/16"))
	assert.Equal(t, w.undisturbed("london").Status, metav1.ConditionTrue)
}
