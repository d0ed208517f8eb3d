package daemon

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// The namespace of a gateway is made anew for every pod, survives the container
// that holds it, and goes with it when the pod ends.
func TestHoldNetNS(t *testing.T) {
	nettest.NeedRoot(t)
	path := filepath.Join(t.TempDir(), "liqo-netns")
	hold := func(state string) (id uint64, end func()) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- HoldNetNS(ctx, NetNSConfig{Path: path, StateDir: state}) }()
		gw := &gateway{cfg: GatewayConfig{NetNS: path, StateDir: state}}
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			if err := gw.sameNetNS(); err != nil {
				return poll.Continue("%v", err)
			}
			return poll.Success()
		}, poll.WithDelay(10*time.Millisecond))
		id, err := kernel.NetNSID(path)
		assert.NilError(t, err)
		return id, func() {
			cancel()
			assert.NilError(t, <-done)
		}
	}
	pod := t.TempDir()
	first, end := hold(pod)
	// Another pod does not take what this one has for its own, and makes its
	// own in its place.
	other := &gateway{cfg: GatewayConfig{NetNS: path, StateDir: t.TempDir()}}
	assert.ErrorContains(t, other.sameNetNS(), "not been made yet")
	second, endSecond := hold(t.TempDir())
	assert.Assert(t, first != second)
	gw := &gateway{cfg: GatewayConfig{NetNS: path, StateDir: pod}}
	assert.ErrorContains(t, gw.sameNetNS(), "not the one of this pod")
	// The end of the older one does not touch it.
	end()
	id, err := kernel.NetNSID(path)
	assert.NilError(t, err)
	assert.Equal(t, id, second)
	endSecond()
	_, err = os.Stat(path)
	assert.ErrorIs(t, err, os.ErrNotExist)
}
