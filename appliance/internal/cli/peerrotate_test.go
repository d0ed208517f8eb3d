package cli

import (
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
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
