package cli

import (
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
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
	for _, c := range []struct {
		name      string
		own       string
		conn      *v1beta1.Connection
		allowLoss bool
		want      string // the error; empty: none
	}{
		{"not connected", "", connection(v1beta1.ConnectionError, "", ""), false, "are not connected"},
		{"of another system", "", connection(v1beta1.Connected, "", ""), false, "has not said that it takes part"},
		{"with loss", "", connection(v1beta1.ConnectionError, "", ""), true, ""},
		{"with loss, while they agree", "", connection(v1beta1.Connected, v1beta1.RotationByUs, "Waiting"), true, "Connection liqo-tenant-rome/gw-rome is Committed or Aborted, 2m30s at most"},
		{"with loss, after that", "", connection(v1beta1.Connected, v1beta1.RotationByUs, "Aborted"), true, ""},
		{"with loss, while the peer waits for its own", "", connection(v1beta1.Connected, v1beta1.RotationByPeer, "Ready"), true, ""},
		{"the user's own keys", "mine", connection(v1beta1.Connected, "", ""), false, "in Secret liqo-tenant-rome/mine, which spec.secretRef names"},
		{"the user's own keys, with loss", "mine", connection(v1beta1.Connected, "", ""), true, "in Secret liqo-tenant-rome/mine, which spec.secretRef names"},
	} {
		err := canRotate(gateway(c.own), c.conn, "rome", c.allowLoss)
		if c.want == "" {
			assert.Check(t, err, c.name)
			continue
		}
		assert.Check(t, is.ErrorContains(err, c.want), c.name)
	}
}
