package nettest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// Ports of FreePorts are above those at which parts of a control plane listen by themselves
// (10250 to 10259) and below those of NodePorts.
const (
	firstPort = 10_300
	lastPort  = 29_999
)

// FreePorts finds TCP ports of 127.0.0.1 at which nobody listens, for programs that must be told
// theirs. They are below those that the kernel gives to connections and to who listens at port 0
// (ip_local_port_range in ip(7): 32768 and above): one of these may be taken before the program
// listens at it.
func FreePorts(t testing.TB, n int) (ports []uint16) {
	t.Helper()
	for tries := 0; len(ports) < n; tries++ {
		port := firstPort + rand.IntN(lastPort-firstPort+1)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		switch {
		case err == nil:
			defer l.Close() // all at once: no two are the same
			ports = append(ports, uint16(port))
		case tries == 100:
			t.Fatalf("no free port from %d to %d: %v", firstPort, lastPort, err)
		}
	}
	return ports
}
