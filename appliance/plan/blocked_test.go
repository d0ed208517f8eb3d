package plan_test

import (
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A peer that its gateway has cut off is warned of, in the gateway's words, as long as
// the gateway says so.
func TestBlockedEvent(t *testing.T) {
	w := peered(t)
	c := get[*v1beta1.Connection](w, "liqo-tenant-rome", "gw-rome")
	for _, tt := range []struct {
		reason string
		events int
	}{{"Connected", 0}, {v1beta1.ReasonBlocked, 1}, {"NoHandshake", 0}} {
		c.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionConnected, Reason: tt.reason, Message: "by anna at noon"}}
		events := slices.DeleteFunc(w.settle().Events, func(e plan.Event) bool { return e.Reason != v1beta1.ReasonBlocked })
		assert.Equal(t, len(events), tt.events, tt.reason)
		for _, e := range events {
			assert.Equal(t, e.Object.Kind+" "+e.Object.Namespace+"/"+e.Object.Name, "Connection liqo-tenant-rome/gw-rome")
			assert.Equal(t, e.Type+": "+e.Message, plan.Warning+": by anna at noon")
		}
	}
}

// A key that is blocked is refused in whatever object names it, and another key of the
// same peer is not.
func TestBlockedKey(t *testing.T) {
	w := peered(t)
	publicKey(w, "rome", "rome", 32)
	fresh := &v1beta1.PublicKey{TypeMeta: metav1.TypeMeta{APIVersion: "networking.liqo.io/v1beta1", Kind: "PublicKey"}, ObjectMeta: metav1.ObjectMeta{
		Namespace: "liqo-tenant-rome", Name: "fresh", Labels: map[string]string{v1beta1.LabelRemoteClusterID: "rome"},
	}}
	fresh.Spec.PublicKey = slices.Repeat([]byte{8}, 32)
	w.create(fresh)
	w.namespace("oslo")
	publicKey(w, "oslo", "another-name", 32)
	f := cluster.FingerprintOf(slices.Repeat([]byte{7}, 32)).String()
	block := &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: named("liqo", v1beta1.BlockedKeysConfigMap)}
	for _, tt := range []struct {
		name                 string
		data                 map[string]string
		rome, fresh, another string
		why                  string
	}{
		{"none", nil, plan.ReasonAccepted, plan.ReasonDuplicate, plan.ReasonAccepted, ""},
		{"with a reason", map[string]string{f: "by anna at noon: leaked"}, v1beta1.ReasonBlocked, plan.ReasonAccepted, v1beta1.ReasonBlocked, "(by anna at noon: leaked)"},
		{"without one", map[string]string{f: ""}, v1beta1.ReasonBlocked, plan.ReasonAccepted, v1beta1.ReasonBlocked, "(without a reason)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.data != nil {
				again := block.DeepCopy()
				again.Data = tt.data
				w.create(again)
				defer w.remove("ConfigMap", block.Namespace, block.Name)
			}
			r := w.settle()
			for _, k := range []struct{ namespace, name, want string }{
				{"liqo-tenant-rome", "rome", tt.rome}, {"liqo-tenant-rome", "fresh", tt.fresh}, {"liqo-tenant-oslo", "another-name", tt.another},
			} {
				got := condition(t, get[*v1beta1.PublicKey](w, k.namespace, k.name).Status.Conditions, plan.ConditionAccepted)
				assert.Check(t, is.Equal(got.Reason, k.want), k.name)
				if k.want == v1beta1.ReasonBlocked {
					want := "spec.publicKey is the key with the fingerprint " + f + ", which this cluster has blocked by ConfigMap liqo/isthmus-blocked-keys " + tt.why + ": isthmusctl peer unblock --key " + f + " ends that"
					assert.Check(t, is.Equal(got.Message, want))
					assert.Check(t, is.DeepEqual(warnings(r, "PublicKey", k.namespace, k.name), []string{v1beta1.ReasonBlocked + ": " + want}))
				}
			}
		})
	}
}

// What is no fingerprint in the ConfigMap blocks nothing, and is told of.
func TestBlockedKeyIsNone(t *testing.T) {
	w := peered(t)
	block := &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: named("liqo", v1beta1.BlockedKeysConfigMap)}
	block.Data = map[string]string{"rome": "by anna"}
	w.create(block)
	got := warnings(w.settle(), "ConfigMap", "liqo", v1beta1.BlockedKeysConfigMap)
	assert.DeepEqual(t, got, []string{plan.ReasonInvalidField + `: data: "rome" is no fingerprint of a key: write 16 hexadecimal digits, such as 01d0-fabd-251f-cbbe`})
}
