package plan_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// natRules returns the rules of a table, one line each: chain, matches, action.
func natRules(o *v1beta1.FirewallConfiguration) []string {
	var out []string
	for _, c := range o.Spec.Table.Chains {
		for _, r := range c.Rules.NatRules {
			line := strings.Join(append([]string{c.Name}, append(matchTexts(r.Match), string(r.NatType))...), " ")
			if r.To != nil {
				line += " " + *r.To
			}
			out = append(out, line)
		}
		for _, r := range c.Rules.FilterRules {
			value := ""
			if r.Value != nil {
				value = " " + *r.Value
			}
			out = append(out, strings.Join(append([]string{c.Name}, append(matchTexts(r.Match), string(r.Action)+value)...), " "))
		}
	}
	return out
}

func matchTexts(list []v1beta1.Match) []string {
	var out []string
	for _, m := range list {
		not := ""
		if m.Op == v1beta1.MatchOperationNeq {
			not = "!"
		}
		switch {
		case m.IP != nil:
			out = append(out, fmt.Sprintf("%s%s=%s", not, m.IP.Position, m.IP.Value))
		case m.Dev != nil:
			out = append(out, fmt.Sprintf("%s%s=%s", not, m.Dev.Position, m.Dev.Value))
		case m.Port != nil:
			out = append(out, fmt.Sprintf("%s%sport=%s", not, m.Port.Position, m.Port.Value))
		case m.Proto != nil:
			out = append(out, not+string(m.Proto.Value))
		}
	}
	return out
}

// overlapping returns milan with two nodes, its gateways to these clusters running
// on node-2; all of them have the networks of milan itself.
func overlapping(t *testing.T, overlay cluster.Overlay, remotes ...string) *world {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.options.Overlay = overlay
	for _, id := range remotes {
		w.namespace(id)
		w.configure(id, "10.10.0.0/16", "10.70.0.0/16")
		w.server(id, corev1.ServiceTypeNodePort)
	}
	w.settle()
	w.kubelet("node-2")
	w.settle()
	w.vteps()
	w.settle()
	return w
}

func firewallOf(w *world, namespace, name string) *v1beta1.FirewallConfiguration {
	o, _ := w.objects[key("FirewallConfiguration", namespace, name)].(*v1beta1.FirewallConfiguration)
	return o
}

// Only what is known by another network is translated: the destination of what
// goes to the peer, the source of what comes from there.
func TestRemaps(t *testing.T) {
	w := overlapping(t, cluster.OverlayGeneve, "rome")
	for name, c := range map[string]struct{ here, there string }{
		"rome-remap-podcidr":      {"10.0.0.0/16", "10.10.0.0/16"},
		"rome-remap-externalcidr": {"10.1.0.0/16", "10.70.0.0/16"},
	} {
		o := get[*v1beta1.FirewallConfiguration](w, "liqo-tenant-rome", name)
		assert.DeepEqual(t, natRules(o), []string{
			"outgoing !in=liqo-tunnel dst=" + c.here + " dnat " + c.there,
			"incoming in=liqo-tunnel src=" + c.there + " snat " + c.here,
		})
		assert.Equal(t, o.Labels[v1beta1.LabelFirewallUnique], "rome")
	}

	w = twoNodes(t, "milan", "10.10.0.0/16")
	w.namespace("rome")
	w.configure("rome", "10.20.0.0/16", "10.70.0.0/16")
	w.settle()
	assert.Assert(t, firewallOf(w, "liqo-tenant-rome", "rome-remap-podcidr") == nil)
	assert.Assert(t, firewallOf(w, "liqo-tenant-rome", "rome-remap-externalcidr") != nil)
}

// Where the peer's gateway has an address of the peer's own network, the tunnel's
// packets are masqueraded as the CNI likes, and pods' packets are not.
func TestBypassAndEndpointOfThePeersNetwork(t *testing.T) {
	for _, test := range []struct {
		name, endpoint string
		gateway        bool // has rules of its own
	}{
		{"outside", "203.0.113.7", false},
		{"a name", "gateway.example.com", false},
		{"inside", "10.20.3.14", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := twoNodes(t, "milan", "10.10.0.0/16")
			w.namespace("rome")
			w.configure("rome", "10.20.0.0/16", "10.71.0.0/16")
			w.client("rome").Spec.Endpoint.Addresses = []string{test.endpoint}
			w.settle()
			w.kubelet("node-2")
			w.settle()
			fabric := get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome")
			not := ""
			if test.gateway {
				not = fmt.Sprintf(" !src=%s", fabric.Spec.GatewayIP)
			}
			rules := natRules(firewallOf(w, "liqo-tenant-rome", "rome-masquerade-bypass"))
			assert.Assert(t, slices.Contains(rules, "pre-postrouting src=10.10.0.0/16 dst=10.20.0.0/16"+not+" snat 10.10.0.0/16"), "%q", rules)
			assert.Assert(t, slices.Contains(rules, "pre-postrouting src=10.10.0.0/16 dst=10.71.0.0/16 snat 10.10.0.0/16"), "%q", rules)
		})
	}
}

// Configurations of two peers, each in its tenant namespace, may have one name: nodes
// have a table for each.
func TestConfigurationsOfOneName(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	for i, remote := range []string{"rome", "oslo"} {
		w.namespace(remote)
		c := w.configure(remote, fmt.Sprintf("10.%d.0.0/16", 20+i), fmt.Sprintf("10.%d.0.0/16", 71+i))
		w.remove("Configuration", c.Namespace, c.Name)
		c.Name = "peer"
		w.create(c)
		w.server(remote, corev1.ServiceTypeNodePort)
	}
	w.settle()
	assert.Equal(t, firewallOf(w, "liqo-tenant-rome", "peer-masquerade-bypass").Spec.Table.Name, "rome-masquerade-bypass")
	assert.Equal(t, firewallOf(w, "liqo-tenant-oslo", "peer-masquerade-bypass").Spec.Table.Name, "oslo-masquerade-bypass")
}

// What is no pod's has the first address of the external network for the peer;
// pods keep theirs. The rules come in that order.
func TestUnknownSource(t *testing.T) {
	w := overlapping(t, cluster.OverlayGeneve, "rome")
	assert.DeepEqual(t, natRules(get[*v1beta1.FirewallConfiguration](w, "liqo-tenant-rome", "rome-unknown-source")), []string{
		"pre-postrouting out=liqo-tunnel src=10.10.0.0/16 snat 10.10.0.0/16",
		"pre-postrouting out=liqo-tunnel dst=10.0.0.0/16 snat 10.70.0.0",
		"pre-postrouting out=liqo-tunnel dst=10.1.0.0/16 snat 10.70.0.0",
	})
}

// The answer to what came from a node goes back to it: its mark is its own, and
// leads to its link, or in the VXLAN overlay to its address.
func TestReturnToNodes(t *testing.T) {
	for _, tt := range []struct {
		overlay cluster.Overlay
		rules   []string
		table   string
		routes  []string
	}{
		{cluster.OverlayGeneve, []string{
			"mark-to-conntrack in=liqo.node-1 src=10.80.0.1 ctmark 1", "mark-to-conntrack in=liqo.node-2 src=10.80.0.2 ctmark 2",
			"conntrack-mark-to-meta-mark in=liqo-tunnel metamarkfromctmark",
		}, "milan-node-2-service-nodeport-routing", []string{"0.0.0.0/0"}},
		{cluster.OverlayVXLAN, []string{
			"mark-to-conntrack src=10.80.0.1 ctmark 1", "mark-to-conntrack src=10.80.0.2 ctmark 2",
			"conntrack-mark-to-meta-mark in=liqo-tunnel metamarkfromctmark",
		}, "254", nil},
	} {
		t.Run(string(tt.overlay), func(t *testing.T) {
			w := overlapping(t, tt.overlay, "rome")
			assert.DeepEqual(t, natRules(get[*v1beta1.FirewallConfiguration](w, "liqo", "service-nodeport-routing")), tt.rules)
			r := get[*v1beta1.RouteConfiguration](w, "liqo", "milan-node-2-service-nodeport-routing")
			assert.Equal(t, r.Spec.Table.Name, tt.table)
			assert.Equal(t, *r.Spec.Table.Rules[0].FwMark, 2)
			assert.DeepEqual(t, routesOf(r), tt.routes)
			for _, route := range r.Spec.Table.Rules[0].Routes {
				assert.Equal(t, *route.Dev, "liqo.node-2")
			}
		})
	}
}

// All of a peering's own goes with it; what all gateways share goes with the
// last one.
func TestTranslationsGo(t *testing.T) {
	w := overlapping(t, cluster.OverlayGeneve, "oslo", "rome")
	for _, id := range []string{"rome", "oslo"} {
		assert.Assert(t, firewallOf(w, "liqo", "service-nodeport-routing") != nil)
		w.remove("Configuration", "liqo-tenant-"+id, id)
		w.remove("GatewayServer", "liqo-tenant-"+id, id)
		w.settle()
		for k := range w.objects {
			assert.Assert(t, !strings.HasPrefix(k, "FirewallConfiguration liqo-tenant-"+id), k)
		}
	}
	for k := range w.objects {
		assert.Assert(t, !strings.HasPrefix(k, "FirewallConfiguration "), k)
	}
}
