package peer

import (
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
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
