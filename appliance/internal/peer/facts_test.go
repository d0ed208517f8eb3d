package peer

import (
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

// A key of a gateway that was there before is not exchanged: it is deleted with its
// owner.
func TestLeftBehind(t *testing.T) {
	g := &v1beta1.GatewayServer{ObjectMeta: metav1.ObjectMeta{UID: "now"}}
	now := metav1.Now()
	for _, tt := range []struct {
		meta metav1.ObjectMeta
		want bool
	}{
		{metav1.ObjectMeta{}, false}, // a user's own
		{metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{Kind: "GatewayServer", UID: "now"}}}, false},
		{metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{Kind: "GatewayServer", UID: "before"}}}, true},
		{metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{Kind: "GatewayClient", UID: "before"}}}, true},
		{metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{Kind: "WgGatewayServer", UID: "any"}}}, false}, // of the public system
		{metav1.ObjectMeta{DeletionTimestamp: &now}, true},
	} {
		assert.Equal(t, leftBehind(&corev1.Secret{ObjectMeta: tt.meta}, g), tt.want, "%v", tt.meta)
	}
}

// TestAccepted: what one side has begun is taken back only as long as the other side has not
// accepted it.
func TestAccepted(t *testing.T) {
	for _, tt := range []struct {
		name string
		of   Facts
		want bool
	}{
		{"nothing was heard", Facts{}, false},
		{"refused", Facts{Reply: &invitation.Reply{Verdict: invitation.Refused}}, false},
		{"it waits for somebody's yes", Facts{Reply: &invitation.Reply{Verdict: invitation.Waiting}}, false},
		{"accepted", Facts{Reply: &invitation.Reply{Verdict: invitation.Accepted}}, true},
		{"the invitation is over", Facts{Record: invitation.Record{Done: true}}, true},
	} {
		t.Run(tt.name, func(t *testing.T) { assert.Equal(t, tt.of.accepted(), tt.want) })
	}
}
