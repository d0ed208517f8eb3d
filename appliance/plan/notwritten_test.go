package plan

import (
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// TestNotWritten blames whose the object is, and nobody for an object of nobody's.
func TestNotWritten(t *testing.T) {
	service := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "gw-rome"}}
	r := Result{}
	r.NotWritten(service, "no")
	assert.Equal(t, len(r.Events), 0)

	accepted := func() []metav1.Condition {
		return []metav1.Condition{{Type: ConditionRolledOut, Status: metav1.ConditionTrue}, {Type: ConditionAccepted, Status: metav1.ConditionTrue, ObservedGeneration: 3, Reason: ReasonAccepted}}
	}
	rome := &v1beta1.GatewayServer{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "rome", UID: "1"}}
	oslo := &v1beta1.GatewayServer{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-oslo", Name: "oslo", UID: "2"}}
	rome.Status.Conditions, oslo.Status.Conditions = accepted(), accepted()
	r.Statuses = []Object{oslo, rome}
	service.OwnerReferences = []metav1.OwnerReference{{APIVersion: "networking.liqo.io/v1beta1", Kind: "GatewayServer", Name: "rome", UID: "1"}}
	r.NotWritten(service, "no")
	want := accepted()
	want[1].Status, want[1].Reason, want[1].Message = metav1.ConditionFalse, ReasonNotWritten, "Service gw-rome can't be written: no"
	assert.DeepEqual(t, rome.Status.Conditions, want)
	assert.DeepEqual(t, oslo.Status.Conditions, accepted())
	assert.Equal(t, len(r.Events), 1)
	assert.Equal(t, r.Events[0].Object.Name+" "+r.Events[0].Message, "rome "+want[1].Message)
}
