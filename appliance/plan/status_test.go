package plan_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
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

// TestForeignClusterOfAnInvitation: what there is no Configuration for since nobody has
// answered yet says so, and what to do next.
func TestForeignClusterOfAnInvitation(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	soon, before := now.Add(time.Hour), now.Add(-time.Hour)
	answer := &invitation.Answer{ID: "0123456789abcdef", From: "rome", To: "milan", Key: invitation.Key{7}}
	for _, tc := range []struct {
		record       invitation.Record
		reason, next string
		due          time.Time
	}{
		{invitation.Record{Expires: soon}, "InvitationOpen", "isthmusctl peer invite rome --revoke", soon},
		{invitation.Record{Expires: soon, Approve: true, Asks: answer}, "InvitationAnswered", "isthmusctl peer invite rome --approve", soon},
		{invitation.Record{Expires: soon, Approve: true, Asks: answer, Rejected: &answer.Key}, "InvitationOpen", "nobody has been let in", soon},
		{invitation.Record{Expires: before, Used: answer}, "InvitationUsed", "exchanging keys", time.Time{}},
		{invitation.Record{Expires: before}, "InvitationExpired", "isthmusctl peer invite rome --revoke", time.Time{}},
		{invitation.Record{Expires: soon, Accepting: true}, "InvitationAccepted", "isthmusctl peer accept with the same text", soon},
		{invitation.Record{Expires: before, Accepting: true}, "InvitationExpired", "isthmusctl peer remove rome", time.Time{}},
		{invitation.Record{Expires: soon, Done: true}, "ConfigurationMissing", "there is no usable Configuration of cluster rome", time.Time{}},
	} {
		r := &tc.record
		r.ID, r.From, r.To, r.Key = answer.ID, "milan", "rome", invitation.Key{9}
		if r.Accepting {
			r.From, r.To, r.PrivateKey = "rome", "milan", &invitation.Key{8}
		}
		data, err := r.Fields()
		assert.NilError(t, err)
		w := peered(t)
		w.clock = now
		delete(w.objects, "Configuration liqo-tenant-rome/rome")
		w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "invitation-rome"}, Type: v1beta1.SecretTypeInvitation, Data: data})
		w.settle()
		i := slices.IndexFunc(get[*corev1beta1.ForeignCluster](w, "", "rome").Status.Modules.Networking.Conditions, func(c corev1beta1.Condition) bool {
			return c.Type == corev1beta1.NetworkConfigurationStatus
		})
		c := get[*corev1beta1.ForeignCluster](w, "", "rome").Status.Modules.Networking.Conditions[i]
		assert.Equal(t, c.Reason, tc.reason, c.Message)
		assert.Check(t, strings.Contains(c.Message, tc.next), c.Message)
		assert.Equal(t, plan.Cluster(w.snapshot()).Due, tc.due, tc.reason)
	}
}
