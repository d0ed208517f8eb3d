package cli

import (
	"encoding/base64"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"

	model "github.com/isthmus-net/isthmus/appliance/cluster"
)

// A key is named by its fingerprint or by itself.
func TestParseKey(t *testing.T) {
	key := make([]byte, 32)
	key[0] = 1
	for _, tt := range []struct {
		text string
		ok   bool
	}{
		{"01d0-fabd-251f-cbbe", true},
		{"01d0fabd251fcbbe", true},
		{base64.StdEncoding.EncodeToString(key), true},
		{base64.StdEncoding.EncodeToString(key[:31]), false},
		{"rome", false},
	} {
		f, err := parseKey(tt.text)
		if tt.ok {
			assert.NilError(t, err)
			assert.Equal(t, f, model.FingerprintOf(key))
		} else {
			assert.ErrorContains(t, err, `--key "`+tt.text+`": is no fingerprint of a key`)
			assert.ErrorContains(t, err, "or the base64 of a public key, as spec.publicKey of a PublicKey has it")
		}
	}
}

// An entry is found however somebody has written it.
func TestBlockedKeyEntries(t *testing.T) {
	o := &corev1.ConfigMap{Data: map[string]string{"01D0FABD251FCBBE": "", "01d0-fabd-251f-cbbe": "", "rome": "", "0000-0000-0000-0001": ""}}
	f, err := parseKey("01d0-fabd-251f-cbbe")
	assert.NilError(t, err)
	assert.DeepEqual(t, entries(o, f), []string{"01D0FABD251FCBBE", "01d0-fabd-251f-cbbe"})
}

func TestPrintKeyBlock(t *testing.T) {
	const f = "01d0-fabd-251f-cbbe"
	of := []string{"liqo-tenant-rome/rome"}
	for _, tt := range []struct {
		r    keyBlock
		want string
	}{
		{keyBlock{Blocked: true, Changed: true}, "The key " + f + " is blocked, in whatever object it is: gateways take it out of WireGuard as soon as they have read that. No PublicKey has it now."},
		{keyBlock{Blocked: true, Changed: true, Applied: true, PublicKeys: of}, "The key " + f + " is blocked: this cluster's gateways have taken it out of WireGuard. PublicKeys that have it: liqo-tenant-rome/rome. To end that: isthmusctl peer unblock --key " + f},
		{keyBlock{Blocked: true, Block: "by a at b", PublicKeys: of}, "The key " + f + " is blocked already (by a at b): nothing to do. PublicKeys that have it: liqo-tenant-rome/rome."},
		{keyBlock{Blocked: true}, "The key " + f + " is blocked already (without a reason): nothing to do. No PublicKey has it now."},
		{keyBlock{Changed: true}, "The key " + f + " is no longer blocked. No PublicKey has it now."},
		{keyBlock{Applied: true, PublicKeys: of}, "The key " + f + " is no longer blocked, and its gateway is connected again. PublicKeys that have it: liqo-tenant-rome/rome."},
		{keyBlock{}, "The key " + f + " is not blocked: nothing to do."},
	} {
		tt.r.Fingerprint = f
		assert.Equal(t, tt.r.String(), tt.want)
	}
	var out strings.Builder
	assert.NilError(t, printBlockedKeys(&out, []keyBlock{{Fingerprint: f, Block: "by a at b", PublicKeys: of}, {Fingerprint: f}}))
	assert.Equal(t, out.String(), `BLOCKED KEY           PUBLICKEYS              WHY
01d0-fabd-251f-cbbe   liqo-tenant-rome/rome   by a at b
01d0-fabd-251f-cbbe   -                       -
`)
}
