package netns_test

import (
	"errors"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

func inode(t *testing.T, path string) string {
	t.Helper()
	s, err := os.Readlink(path)
	assert.NilError(t, err)
	return s
}

func TestDoRunsInTheNamespaceAndLeavesTheCallerAlone(t *testing.T) {
	nettest.NeedRoot(t)
	before := inode(t, "/proc/thread-self/ns/net")
	ns, err := netns.New()
	assert.NilError(t, err)
	defer ns.Close()
	for range 20 {
		assert.NilError(t, netns.Do(ns, func() error {
			ifs, err := net.Interfaces()
			if err != nil {
				return err
			}
			assert.Equal(t, len(ifs), 1, "a new namespace has only lo")
			assert.Assert(t, inode(t, "/proc/thread-self/ns/net") != before)
			return nil
		}))
		assert.Equal(t, inode(t, "/proc/thread-self/ns/net"), before)
	}
	assert.Equal(t, inode(t, netns.Path(ns)), func() string {
		var in string
		_ = netns.Do(ns, func() error { in = inode(t, "/proc/thread-self/ns/net"); return nil })
		return in
	}())
}

// What happens on the main thread is what /proc shows of the process.
func TestSpareThreadsAreNotTheMainThread(t *testing.T) {
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			assert.Check(t, netns.OnSpareThread(func() error {
				if unix.Gettid() == unix.Getpid() {
					return errors.New("on the main thread")
				}
				runtime.Gosched()
				return nil
			}))
		})
	}
	wg.Wait()
}

func TestANilNamespaceIsTheCallersOwn(t *testing.T) {
	l, err := netns.Listen(t.Context(), nil, "tcp", "127.0.0.1:0")
	assert.NilError(t, err)
	defer l.Close()
	c, err := netns.DialContext(t.Context(), nil, "tcp", l.Addr().String())
	assert.NilError(t, err)
	assert.NilError(t, c.Close())
}
