package cli

import (
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
)

// Who has asked is told what came of it, what it cost, and what is left to do.
func TestRotateResult(t *testing.T) {
	for _, c := range []struct {
		result rotateResult
		want   string
	}{
		{rotateResult{ID: "rome", Phase: "Committed", Silence: "14ms"}, "The gateway has a new key pair, and rome knows it. There was no session for 14ms."},
		{rotateResult{ID: "rome", Phase: "Aborted", Message: "the peer refuses: no"}, "Nothing has changed: the peer refuses: no."},
		{rotateResult{ID: "rome"}, "as soon as the gateway of rome is ready"},
		{rotateResult{ID: "rome", Phase: "Committed", PublicKey: "QUJD"}, `In cluster rome, write its public key: kubectl patch publickeies.networking.liqo.io NAME -n NAMESPACE --type merge -p '{"spec":{"publicKey":"QUJD"}}'`},
	} {
		assert.Check(t, is.Contains(c.result.String(), c.want))
	}
}

// Keys are not changed where that can't end well, and the reason is said before anything is.
func TestCanRotate(t *testing.T) {
	gateway := func(own string) gatewayObject {
		g := gatewayObject{Object: &v1beta1.GatewayServer{}, own: own}
		g.SetNamespace("liqo-tenant-rome")
		return g
	}
	connection := func(value v1beta1.ConnectionStatusValue, by, phase string) *v1beta1.Connection {
		c := &v1beta1.Connection{}
		c.Namespace, c.Name, c.Status.Value = "liqo-tenant-rome", "gw-rome", value
		if by != "" {
			c.Status.Rotation = &v1beta1.RotationStatus{By: by, Phase: phase}
		}
		return c
	}
	blocked := connection(v1beta1.ConnectionError, "", "")
	blocked.Status.Conditions = []metav1.Condition{{Type: "Connected", Reason: v1beta1.ReasonBlocked}}
	alone, repair := rotateFlags{allowLoss: true}, rotateFlags{Manner: rotation.Manner{Repair: true}}
	for _, c := range []struct {
		name, own string
		conn      *v1beta1.Connection
		flags     rotateFlags
		want      string // the error; empty: none
	}{
		{"not connected", "", connection(v1beta1.ConnectionError, "", ""), rotateFlags{}, "are not connected"},
		{"of another system", "", connection(v1beta1.Connected, "", ""), rotateFlags{}, "has not said that it takes part"},
		{"with loss", "", connection(v1beta1.ConnectionError, "", ""), alone, ""},
		{"with loss, while they agree", "", connection(v1beta1.Connected, v1beta1.RotationByUs, "Waiting"), alone, "Connection liqo-tenant-rome/gw-rome is Committed or Aborted, 2m30s at most"},
		{"with loss, after that", "", connection(v1beta1.Connected, v1beta1.RotationByUs, "Aborted"), alone, ""},
		{"with loss, while the peer waits for its own", "", connection(v1beta1.Connected, v1beta1.RotationByPeer, "Ready"), alone, ""},
		{"the user's own keys", "mine", connection(v1beta1.Connected, "", ""), rotateFlags{}, "in Secret liqo-tenant-rome/mine, which spec.secretRef names"},
		{"the user's own keys, with loss", "mine", connection(v1beta1.Connected, "", ""), alone, "in Secret liqo-tenant-rome/mine, which spec.secretRef names"},
		{"repair", "", connection(v1beta1.ConnectionError, "", ""), repair, ""},
		{"repair, while the peer is cut off", "", blocked, repair, "isthmusctl peer unblock rome"},
		{"repair of what is connected", "", connection(v1beta1.Connected, "", ""), repair, "isthmusctl peer rotate rome changes their keys"},
		{"repair of the user's own keys", "mine", connection(v1beta1.ConnectionError, "", ""), repair, "which spec.secretRef names"},
	} {
		err := canRotate(gateway(c.own), c.conn, "rome", c.flags)
		if c.want == "" {
			assert.Check(t, err, c.name)
			continue
		}
		assert.Check(t, is.ErrorContains(err, c.want), c.name)
	}
}
