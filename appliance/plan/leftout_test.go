package plan_test

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// An object that is left out of a plan has an event; what a user wrote has a
// condition, too, in place of the one that it had, and keeps the rest of its status.
func TestLeaveOut(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "rome", UID: "7", Generation: 3}
	ours := meta
	ours.Labels = map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy}
	had := []metav1.Condition{{Type: plan.ConditionAccepted, Status: metav1.ConditionTrue}, {Type: "Other", Status: metav1.ConditionTrue}}
	for _, test := range []struct {
		name       string
		object     plan.Object
		conditions string // with which it is written; empty: it is not
	}{
		{"an IP", &ipamv1alpha1.IP{TypeMeta: templatesMeta("ipam.liqo.io/v1alpha1", "IP"), ObjectMeta: meta, Status: ipamv1alpha1.IPStatus{IP: "10.70.0.1", Conditions: had}}, "Other=True Accepted=False"},
		{"a new IP", &ipamv1alpha1.IP{TypeMeta: templatesMeta("ipam.liqo.io/v1alpha1", "IP"), ObjectMeta: meta, Status: ipamv1alpha1.IPStatus{IP: "10.70.0.1"}}, "Accepted=False"},
		{"a Configuration", &v1beta1.Configuration{TypeMeta: templatesMeta("networking.liqo.io/v1beta1", "Configuration"), ObjectMeta: meta}, "NetworkCIDRsConfigured=False"},
		{"what Isthmus made", &v1beta1.InternalNode{TypeMeta: templatesMeta("networking.liqo.io/v1beta1", "InternalNode"), ObjectMeta: ours}, ""},
		{"what has other conditions", &v1beta1.RouteConfiguration{TypeMeta: templatesMeta("networking.liqo.io/v1beta1", "RouteConfiguration"), ObjectMeta: meta}, ""},
		{"what has no status", &v1beta1.WgGatewayServerTemplate{TypeMeta: templatesMeta("networking.liqo.io/v1beta1", "WgGatewayServerTemplate"), ObjectMeta: meta}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := test.object.DeepCopyObject()
			var r plan.Result
			r.LeaveOut(test.object, "panic: no such address")
			assert.DeepEqual(t, test.object, before.(plan.Object))
			assert.Assert(t, r.Incomplete)
			assert.Equal(t, len(r.Events), 1)
			e := r.Events[0]
			assert.Equal(t, e.Object.String()+" "+e.Object.UID, test.object.GetObjectKind().GroupVersionKind().Kind+" liqo-tenant-rome/rome 7")
			assert.Equal(t, e.Type+" "+e.Reason, "Warning PlanFailed")
			assert.Assert(t, strings.Contains(e.Message, "panic: no such address") && strings.Contains(e.Message, "delete the object or write it another way"), e.Message)
			var written []string
			for _, o := range r.Statuses {
				list := tree(t, o)["status"].(map[string]any)["conditions"].([]any)
				for _, c := range list {
					c := c.(map[string]any)
					written = append(written, c["type"].(string)+"="+c["status"].(string))
					if c["status"] == "False" {
						assert.Equal(t, c["reason"], plan.ReasonPlanFailed)
						assert.Equal(t, c["observedGeneration"], 3.0)
					}
				}
				if ip, is := o.(*ipamv1alpha1.IP); is {
					assert.Equal(t, ip.Status.IP, v1beta1.IP("10.70.0.1"))
				}
			}
			assert.Equal(t, strings.Join(written, " "), test.conditions)
		})
	}
}
