package cluster_test

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

func TestFingerprint(t *testing.T) {
	key := make([]byte, 32)
	key[0] = 1
	want := cluster.FingerprintOf(key)
	assert.Equal(t, want.String(), "01d0-fabd-251f-cbbe") // SHA-256 of 01 00 … 00
	for _, tt := range []struct {
		text string
		ok   bool
	}{
		{"01d0-fabd-251f-cbbe", true},
		{"01D0FABD251FCBBE", true},
		{"01d0-fabd-251f-cbb", false},
		{"01d0-fabd-251f-cbbe-00", false},
		{"01d0-fabd-251f-cbbx", false},
		{"", false},
	} {
		got, err := cluster.ParseFingerprint(tt.text)
		assert.Equal(t, err == nil, tt.ok, "%q: %v", tt.text, err)
		if tt.ok {
			assert.Equal(t, got, want)
		} else {
			assert.ErrorContains(t, err, "write 16 hexadecimal digits, such as 01d0-fabd-251f-cbbe")
		}
	}
}

// It is the key itself that is blocked: another byte is another key.
func TestBlockedKeys(t *testing.T) {
	key, other := []byte{1}, []byte{2}
	list := cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf(other), Why: "b"}, {Fingerprint: cluster.FingerprintOf(key), By: cluster.Ref{Kind: "ConfigMap", Namespace: "liqo", Name: "isthmus-blocked-keys"}}}
	got, blocked := list.Of(key)
	assert.Assert(t, blocked)
	f := cluster.FingerprintOf(key).String()
	assert.Equal(t, got.String(), "the key with the fingerprint "+f+", which this cluster has blocked by ConfigMap liqo/isthmus-blocked-keys (without a reason): isthmusctl peer unblock --key "+f+" ends that")
	_, blocked = list.Of([]byte{3})
	assert.Assert(t, !blocked)
}
