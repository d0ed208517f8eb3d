// Package controlplanetest helps tests to start control planes.
package controlplanetest

import (
	"testing"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
)

// FreePorts are free ports of loopback, for a control plane without a network namespace of its own.
func FreePorts(t testing.TB) controlplane.Ports {
	t.Helper()
	p := nettest.FreePorts(t, 5)
	return controlplane.Ports{APIServer: p[0], EtcdClient: p[1], EtcdPeer: p[2], ControllerManager: p[3], Scheduler: p[4]}
}
