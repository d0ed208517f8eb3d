package plan_test

import (
	"fmt"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Every object that is wrong says so, in its condition and in an event, and
// the peering that was there is exactly as before.
func TestProblems(t *testing.T) {
	configured := func(w *world, namespace, name string) metav1.Condition {
		return condition(w.t, get[*v1beta1.Configuration](w, namespace, name).Status.Conditions, v1beta1.ConditionNetworkCIDRsConfigured)
	}
	server := func(w *world, namespace, name string) metav1.Condition {
		return condition(w.t, get[*v1beta1.GatewayServer](w, namespace, name).Status.Conditions, plan.ConditionAccepted)
	}
	client := func(w *world, namespace, name string) metav1.Condition {
		return condition(w.t, get[*v1beta1.GatewayClient](w, namespace, name).Status.Conditions, plan.ConditionAccepted)
	}
	key := func(w *world, namespace, name string) metav1.Condition {
		return condition(w.t, get[*v1beta1.PublicKey](w, namespace, name).Status.Conditions, plan.ConditionAccepted)
	}
	network := func(w *world, namespace, name string) metav1.Condition {
		return condition(w.t, get[*ipamv1alpha1.Network](w, namespace, name).Status.Conditions, plan.ConditionAccepted)
	}
	ip := func(w *world, namespace, name string) metav1.Condition {
		return condition(w.t, get[*ipamv1alpha1.IP](w, namespace, name).Status.Conditions, plan.ConditionAccepted)
	}
	relabel := func(o plan.Object, value string) {
		o.SetLabels(map[string]string{v1beta1.LabelRemoteClusterID: value})
	}
	for _, test := range []struct {
		name            string
		make            func(w *world)
		kind            string
		namespace, into string
		condition       func(w *world, namespace, name string) metav1.Condition
		reason, says    string
	}{
		{
			name: "configuration without a remote cluster",
			make: func(w *world) { w.namespace("paris"); w.configure("paris", "10.30.0.0/16", "").Labels = nil },
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonNoRemoteID, says: "set liqo.io/remote-cluster-id",
		}, {
			name: "configuration of an impossible cluster",
			make: func(w *world) { w.namespace("paris"); relabel(w.configure("paris", "10.30.0.0/16", ""), "Paris_1") },
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonBadRemoteID, says: `"Paris_1" is not a cluster ID`,
		}, {
			name: "configuration of this very cluster",
			make: func(w *world) { w.namespace("milan"); w.configure("milan", "10.30.0.0/16", "") },
			kind: "Configuration", namespace: "liqo-tenant-milan", into: "milan", condition: configured,
			reason: plan.ReasonRemoteIsLocal, says: "ID of this cluster",
		}, {
			name: "label and namespace disagree",
			make: func(w *world) { w.namespace("paris"); relabel(w.configure("paris", "10.30.0.0/16", ""), "london") },
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonIDMismatch, says: `belongs to the peering with "paris"`,
		}, {
			name: "second configuration of a cluster",
			make: func(w *world) {
				w.namespace("paris")
				relabel(w.configure("paris", "10.30.0.0/16", ""), "rome")
				delete(w.objects["Namespace /liqo-tenant-paris"].(*corev1.Namespace).Labels, v1beta1.LabelRemoteClusterID)
			},
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonDuplicate, says: "Configuration liqo-tenant-rome/rome already describes cluster rome",
		}, {
			name: "configuration without networks",
			make: func(w *world) {
				w.namespace("paris")
				w.configure("paris", "10.30.0.0/16", "").Spec.Remote = v1beta1.ClusterConfig{}
			},
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonNoCIDRs, says: "spec.remote.cidr is empty",
		}, {
			name: "malformed CIDR",
			make: func(w *world) { w.namespace("paris"); w.configure("paris", "10.30.0.0/33", "") },
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonInvalidField, says: "spec.remote.cidr.pod[0]",
		}, {
			name: "overlapping itself",
			make: func(w *world) { w.namespace("paris"); w.configure("paris", "10.30.0.0/16", "10.30.128.0/17") },
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonSelfOverlap, says: "spec.remote.cidr.external[0] 10.30.128.0/17 overlaps spec.remote.cidr.pod[0] 10.30.0.0/16",
		}, {
			name: "two address families",
			make: func(w *world) {
				w.options.IPv6 = true
				w.namespace("paris")
				w.configure("paris", "10.30.0.0/16", "fd00::/64")
			},
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonFamily, says: "different address families",
		}, {
			name: "IPv6",
			make: func(w *world) { w.namespace("paris"); w.configure("paris", "fd00::/64", "") },
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonFamily, says: "spec.remote.cidr.pod[0] fd00::/64 is of IPv6, which peerings do not carry yet, because the network of a gateway's pod does not forward it: list the IPv4 networks of cluster paris",
		}, {
			name: "IPv6 outside of the pods",
			make: func(w *world) { w.namespace("paris"); w.configure("paris", "10.30.0.0/16", "fd00::/64") },
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonFamily, says: "spec.remote.cidr.external[0] fd00::/64 is of IPv6",
		}, {
			name: "another family than the internal CIDR",
			make: func(w *world) {
				w.options.IPv6 = true
				w.namespace("paris")
				w.configure("paris", "fd00::/64", "")
			},
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonFamily, says: "10.80.0.0/16",
		}, {
			name: "larger than all pools",
			make: func(w *world) { w.namespace("paris"); w.configure("paris", "0.0.0.0/0", "") },
			kind: "Configuration", namespace: "liqo-tenant-paris", into: "paris", condition: configured,
			reason: plan.ReasonPoolsExhausted, says: "no free network of this size",
		}, {
			name: "server and client for one peering",
			make: func(w *world) { w.client("rome") },
			kind: "GatewayClient", namespace: "liqo-tenant-rome", into: "rome", condition: client,
			reason: plan.ReasonDuplicate, says: "GatewayServer liqo-tenant-rome/rome already connects cluster rome",
		}, {
			name: "two gateways of one name",
			make: func(w *world) {
				delete(w.objects["Namespace /liqo-tenant-rome"].(*corev1.Namespace).Labels, v1beta1.LabelRemoteClusterID)
				relabel(w.client("rome"), "paris")
			},
			kind: "GatewayClient", namespace: "liqo-tenant-rome", into: "rome", condition: client,
			reason: plan.ReasonNameTaken, says: "would both be gw-rome",
		}, {
			name: "gateway elsewhere than its configuration",
			make: func(w *world) {
				w.namespace("paris")
				w.configure("paris", "10.30.0.0/16", "")
				w.create(&corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-x"}})
				relabel(w.server("x", corev1.ServiceTypeClusterIP), "paris")
			},
			kind: "GatewayServer", namespace: "liqo-tenant-x", into: "x", condition: server,
			reason: plan.ReasonNamespace, says: "Configuration liqo-tenant-paris/paris",
		}, {
			name: "template missing",
			make: func(w *world) {
				w.namespace("paris")
				w.server("paris", corev1.ServiceTypeClusterIP).Spec.ServerTemplateRef.Name = "nope"
			},
			kind: "GatewayServer", namespace: "liqo-tenant-paris", into: "paris", condition: server,
			reason: plan.ReasonNoTemplate, says: "there is no WgGatewayServerTemplate liqo/nope",
		}, {
			name: "template of another kind",
			make: func(w *world) {
				w.namespace("paris")
				w.server("paris", corev1.ServiceTypeClusterIP).Spec.ServerTemplateRef.Kind = "Other"
			},
			kind: "GatewayServer", namespace: "liqo-tenant-paris", into: "paris", condition: server,
			reason: plan.ReasonNoTemplate, says: "use WgGatewayServerTemplate",
		}, {
			name: "template that can't be filled in",
			make: func(w *world) {
				w.namespace("paris")
				w.yaml(strings.NewReplacer("name: wireguard-client", "name: broken", "{{ .SecretName }}", "{{ .Secret }}").Replace(strings.SplitAfter(templates, "---\n")[1]))
				w.client("paris").Spec.ClientTemplateRef.Name = "broken"
			},
			kind: "GatewayClient", namespace: "liqo-tenant-paris", into: "paris", condition: client,
			reason: plan.ReasonBadTemplate, says: "spec.template.spec.deployment.spec.template.spec.volumes[0].secret.secretName",
		}, {
			name: "client without endpoint",
			make: func(w *world) { w.namespace("paris"); w.client("paris").Spec.Endpoint = v1beta1.EndpointStatus{} },
			kind: "GatewayClient", namespace: "liqo-tenant-paris", into: "paris", condition: client,
			reason: plan.ReasonNoEndpoint, says: "spec.endpoint",
		}, {
			name: "secret of the user missing",
			make: func(w *world) { w.namespace("paris"); w.client("paris").Spec.SecretRef.Name = "mine" },
			kind: "GatewayClient", namespace: "liqo-tenant-paris", into: "paris", condition: client,
			reason: plan.ReasonNoSecret, says: "there is no Secret liqo-tenant-paris/mine",
		}, {
			name: "secret of the user without keys",
			make: func(w *world) {
				w.namespace("paris")
				w.client("paris").Spec.SecretRef.Name = "mine"
				w.create(&corev1.Secret{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}, ObjectMeta: metav1.ObjectMeta{
					Namespace: "liqo-tenant-paris", Name: "mine", Labels: map[string]string{v1beta1.LabelGatewayResource: "true"},
				}})
			},
			kind: "GatewayClient", namespace: "liqo-tenant-paris", into: "paris", condition: client,
			reason: plan.ReasonBadSecret, says: "32 bytes",
		}, {
			name: "public key too short",
			make: func(w *world) { publicKey(w, "rome", "rome-key", 31) },
			kind: "PublicKey", namespace: "liqo-tenant-rome", into: "rome-key", condition: key,
			reason: plan.ReasonBadKey, says: "31 bytes",
		}, {
			name: "network that collides with another",
			make: func(w *world) {
				w.network("reserved-but-not-really", "10.96.128.0/24")
				w.objects["Network liqo/reserved-but-not-really"].SetLabels(map[string]string{v1beta1.LabelNotRemapped: "true"})
			},
			kind: "Network", namespace: "liqo", into: "reserved-but-not-really", condition: network,
			reason: plan.ReasonOverlaps, says: "overlaps Network liqo/service-cidr (10.96.0.0/16)",
		}, {
			name: "network that contains a node",
			make: func(w *world) {
				w.network("lan", "172.18.0.0/16")
				w.objects["Network liqo/lan"].SetLabels(map[string]string{v1beta1.LabelNotRemapped: "true"})
			},
			kind: "Network", namespace: "liqo", into: "lan", condition: network,
			reason: plan.ReasonOverlaps, says: "an address of Node node-1",
		}, {
			name: "IP of a network that is not there",
			make: func(w *world) {
				o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "IP"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "db"}}
				o.Spec.IP, o.Spec.NetworkRef = "192.168.40.10", &corev1.ObjectReference{Namespace: "liqo", Name: "nope"}
				w.create(o)
			},
			kind: "IP", namespace: "default", into: "db", condition: ip,
			reason: plan.ReasonNoNetwork, says: "Network liqo/nope",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := peered(t)
			before := dumpOf(t, plan.Cluster(w.snapshot()).Objects)
			test.make(w)
			r := w.settle()
			c := test.condition(w, test.namespace, test.into)
			assert.Equal(t, c.Status, metav1.ConditionFalse)
			assert.Equal(t, c.Reason, test.reason, c.Message)
			assert.Assert(t, cmp.Contains(c.Message, test.says))
			events := warnings(r, test.kind, test.namespace, test.into)
			assert.Assert(t, cmp.Len(events, 1))
			assert.Assert(t, strings.HasPrefix(events[0], test.reason+": "), events[0])

			after := dumpOf(t, r.Objects)
			for k, text := range before {
				assert.Equal(t, after[k], text, k)
			}
			delete(w.objects, test.kind+" "+test.namespace+"/"+test.into)
			w.settle()
		})
	}
}

// dumpOf writes each object, by key.
func dumpOf(t testing.TB, objects []plan.Object) map[string]string {
	out := map[string]string{}
	for _, o := range objects {
		fields := tree(t, o)
		withoutPeers(o, fields)
		out[keyOf(o)] = fmt.Sprint(fields)
	}
	return out
}

// A field that is read differently than it is written is used, and the
// condition says so.
func TestHostBits(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.namespace("rome")
	w.configure("rome", "10.20.3.4/16", "")
	w.settle()
	c := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome")
	assert.DeepEqual(t, c.Status.Remote.CIDR.Pod, []v1beta1.CIDR{"10.20.0.0/16"})
	status := condition(t, c.Status.Conditions, v1beta1.ConditionNetworkCIDRsConfigured)
	assert.Equal(t, status.Status, metav1.ConditionTrue)
	assert.Assert(t, cmp.Contains(status.Message, "10.20.3.4/16"))
}

// Peers wait until the networks of this cluster are known.
func TestWaitingForNetworks(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.namespace("rome")
	w.configure("rome", "10.80.0.0/16", "")
	internal := w.objects["Network liqo/internal-cidr"]
	delete(w.objects, "Network liqo/internal-cidr")
	r := w.settle()
	c := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome")
	assert.Equal(t, condition(t, c.Status.Conditions, v1beta1.ConditionNetworkCIDRsConfigured).Reason, plan.ReasonWaiting)
	assert.Assert(t, c.Status.Remote == nil)
	assert.Assert(t, cmp.Len(r.Events, 0))

	w.objects["Network liqo/internal-cidr"] = internal
	w.settle()
	c = get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome")
	assert.Equal(t, condition(t, c.Status.Conditions, v1beta1.ConditionNetworkCIDRsConfigured).Reason, plan.ReasonConfigured)
	assert.DeepEqual(t, c.Status.Remote.CIDR.Pod, []v1beta1.CIDR{"10.0.0.0/16"})
	assert.DeepEqual(t, c.Spec.Local.CIDR, v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.10.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"}})
}
