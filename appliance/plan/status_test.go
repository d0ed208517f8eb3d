package plan_test

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// TestForeignClusterSaysWhyItIsNotConnected: it repeats what the gateway says in the
// condition of its Connection.
func TestForeignClusterSaysWhyItIsNotConnected(t *testing.T) {
	w := peered(t)
	connection := get[*v1beta1.Connection](w, "liqo-tenant-rome", "gw-rome")
	for _, tc := range []struct {
		value v1beta1.ConnectionStatusValue
		why   string
		want  string
	}{
		{"", "", "Connection liqo-tenant-rome/gw-rome is not reported yet"},
		{v1beta1.ConnectionError, "", "Connection liqo-tenant-rome/gw-rome is Error"},
		{v1beta1.ConnectionError, "nobody has dialled", "Connection liqo-tenant-rome/gw-rome is Error: nobody has dialled"},
		{v1beta1.Connected, "the peer answers", "Connection liqo-tenant-rome/gw-rome is Connected"},
	} {
		connection.Status.Value, connection.Status.Conditions = tc.value, nil
		if tc.why != "" {
			connection.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionConnected, Message: tc.why}}
		}
		w.settle()
		got := ""
		for _, c := range get[*corev1beta1.ForeignCluster](w, "", "rome").Status.Modules.Networking.Conditions {
			if c.Type == corev1beta1.NetworkConnectionStatus {
				got = c.Message
			}
		}
		assert.Equal(t, got, tc.want)
	}
}

// TestForeignClusterOfAnotherCluster: one that a user has called like a peer, and that is
// about another cluster, is given the state of that cluster alone, and told so. Of two
// states the API server would have got one after the other for ever.
func TestForeignClusterOfAnotherCluster(t *testing.T) {
	w := peered(t)
	delete(w.objects, "ForeignCluster rome")
	delete(w.objects, "ForeignCluster /rome")
	o := &corev1beta1.ForeignCluster{TypeMeta: templatesMeta("core.liqo.io/v1beta1", "ForeignCluster"), ObjectMeta: metav1.ObjectMeta{Name: "rome"}}
	o.Spec.ClusterID = "oslo"
	w.create(o)
	r := plan.Cluster(w.snapshot())
	var states []*corev1beta1.ForeignCluster
	for _, s := range r.Statuses {
		if fc, ok := s.(*corev1beta1.ForeignCluster); ok && fc.Name == "rome" {
			states = append(states, fc)
		}
	}
	assert.Equal(t, len(states), 1)
	assert.Assert(t, !states[0].Status.Modules.Networking.Enabled, "oslo is no peer")
	got := warnings(r, "ForeignCluster", "", "rome")
	assert.Equal(t, len(got), 1)
	assert.Assert(t, strings.Contains(got[0], `metadata.name: "rome" is the ID of another remote cluster`), got[0])
}
