package plan_test

import (
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
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
