package nettest_test

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestFreePorts: what is free stays so. No connection is given one of these ports, and nobody who
// listens at port 0.
func TestFreePorts(t *testing.T) {
	const ownChoice = 32_768 // the kernel's first, where nobody changed net.ipv4.ip_local_port_range
	for range 50 {
		seen := map[uint16]bool{}
		for _, port := range nettest.FreePorts(t, 5) {
			assert.Check(t, port < ownChoice, "the kernel may give %d to a connection", port)
			assert.Check(t, !seen[port], "%d is there twice", port)
			seen[port] = true
		}
		assert.Equal(t, len(seen), 5)
	}
}
