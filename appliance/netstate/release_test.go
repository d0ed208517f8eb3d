package netstate

import (
	"testing"

	"gotest.tools/v3/assert"
)

func TestKernelTooOld(t *testing.T) {
	for release, want := range map[string]bool{
		"5.10": false, "5.10.0-28-amd64": false, "5.9.16": true, "4.19.0": true, "5.4.0-generic": true, "6.1.0-18-cloud-amd64": false, "10.0": false,
	} {
		old, err := KernelTooOld(release)
		assert.NilError(t, err, release)
		assert.Equal(t, old, want, release)
	}
	_, err := KernelTooOld("linux")
	assert.ErrorContains(t, err, `kernel release "linux": not understood`)
}
