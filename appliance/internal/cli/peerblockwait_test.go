package cli

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// What --wait waits for is said by every Connection of the peer.
func TestBlockNotYet(t *testing.T) {
	of := func(name, reason, message string) v1beta1.Connection {
		c := v1beta1.Connection{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: name}}
		if reason != "" {
			c.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionConnected, Reason: reason, Message: message}}
		}
		return c
	}
	connected, blocked, silent := of("gw-rome", "Connected", "it answers"), of("gw-rome", "Blocked", "by a at b"), of("gw-second", "", "")
	const block, unblock = true, false
	for _, tt := range []struct {
		name string
		list []v1beta1.Connection
		is   bool
		want string
	}{
		{"none", nil, block, "there is no Connection: no gateway of this peer is running"},
		{"blocked", []v1beta1.Connection{blocked}, block, ""},
		{"not yet blocked", []v1beta1.Connection{connected}, block, "Connection liqo-tenant-rome/gw-rome says it answers"},
		{"one of two", []v1beta1.Connection{blocked, silent}, block, "Connection liqo-tenant-rome/gw-second says nothing yet"},
		{"connected", []v1beta1.Connection{connected}, unblock, ""},
		{"not yet unblocked", []v1beta1.Connection{blocked}, unblock, "Connection liqo-tenant-rome/gw-rome says by a at b"},
	} {
		t.Run(tt.name, func(t *testing.T) { assert.Equal(t, notYet(tt.list, tt.is), tt.want) })
	}
	assert.ErrorContains(t, waitFlags{timeout: -time.Second}.check(), "--timeout -1s: write a time")
}
