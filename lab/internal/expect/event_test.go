package expect_test

import (
	"sync/atomic"
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
)

// TestEvent: an event counts when it was told since the row began, be it anew or once more, and is
// of what the scenario says.
func TestEvent(t *testing.T) {
	event := func(uid, version, reason, object, message string) corev1.Event {
		return corev1.Event{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: uid, UID: types.UID(uid), ResourceVersion: version},
			Type:       corev1.EventTypeWarning, Reason: reason, Message: message,
			InvolvedObject: corev1.ObjectReference{Kind: "GatewayServer", Name: object},
		}
	}
	before := []corev1.Event{event("a", "1", "Contradicts", "rome", "nodePort 1 is that of somebody")}
	again := []corev1.Event{event("a", "2", "Contradicts", "rome", "nodePort 1 is that of somebody")}
	more := append([]corev1.Event{event("b", "3", "Overlaps", "rome", "with 10.0.0.0/8")}, before...)

	var has atomic.Value
	api := serveAPI(t, func(path string) any {
		switch path {
		case "/api":
			return metav1.APIVersions{Versions: []string{"v1"}}
		case "/apis":
			return metav1.APIGroupList{}
		case "/api/v1":
			return metav1.APIResourceList{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "events", SingularName: "event", Kind: "Event", Namespaced: true}}}
		case "/api/v1/events":
			return corev1.EventList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "EventList"}, Items: has.Load().([]corev1.Event)}
		}
		return nil
	})

	says := expect.Event{In: "milan", Of: "gatewayserver/rome", Namespace: "liqo-tenant-rome", Type: "Warning", Reason: "Contradicts", Message: "nodePort [0-9]"}
	with := func(change func(*expect.Event)) expect.Event {
		e := says
		change(&e)
		return e
	}
	for _, tt := range []struct {
		name        string
		before, now []corev1.Event
		e           expect.Event
		ok          bool
		got, why    string
	}{
		{"it is new", nil, before, says, true, "Warning Contradicts gatewayserver/rome: nodePort 1 is that of somebody", ""},
		{"it is told again", before, again, says, true, "Warning Contradicts gatewayserver/rome: nodePort 1 is that of somebody", ""},
		{"it is from before", before, before, says, false, "0 other events since the row began, and 1 from before", ""},
		{"another one is new", before, more, says, false, "1 other events since the row began, and 1 from before", "Warning Overlaps gatewayserver/rome: with 10.0.0.0/8"},
		{"another type", nil, before, with(func(e *expect.Event) { e.Type = "Normal" }), false, "1 other events since the row began, and 0 from before", "Warning Contradicts gatewayserver/rome: nodePort 1 is that of somebody"},
		{"another text", nil, before, with(func(e *expect.Event) { e.Message = "nodePort [a-z]" }), false, "1 other events since the row began, and 0 from before", "Warning Contradicts gatewayserver/rome: nodePort 1 is that of somebody"},
		{"another object", nil, before, with(func(e *expect.Event) { e.Of = "gatewayserver/naples" }), false, "0 other events since the row began, and 0 from before", ""},
		{"another kind", nil, before, with(func(e *expect.Event) { e.Of = "gatewayclient" }), false, "0 other events since the row began, and 0 from before", ""},
		{"another namespace", nil, before, with(func(e *expect.Event) { e.Namespace = "liqo" }), false, "0 other events since the row began, and 0 from before", ""},
		{"any object of the kind", nil, before, with(func(e *expect.Event) { e.Of = "gatewayserver" }), true, "Warning Contradicts gatewayserver/rome: nodePort 1 is that of somebody", ""},
		{"any object, for any reason", nil, before, with(func(e *expect.Event) { e.Of, e.Reason = "", "" }), true, "Warning Contradicts gatewayserver/rome: nodePort 1 is that of somebody", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			row := &expect.Row{API: api, EventMarks: expect.EventMarks{}}
			has.Store(tt.before)
			assert.NilError(t, row.EventMarks.MarkEvents(t.Context(), api, "milan"))
			has.Store(tt.now)
			res, err := tt.e.Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tt.ok)
			assert.Equal(t, res.Got, tt.got)
			assert.Equal(t, res.Why, tt.why)
		})
	}
}
