package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
)

// names is a name server in memory.
type names struct {
	mu      sync.Mutex
	found   []netip.Addr
	err     error
	queries int
}

func (n *names) lookup(context.Context, string, string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.queries++
	return append([]netip.Addr{}, n.found...), n.err
}

func (n *names) set(err error, found ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err, n.found = err, nil
	for _, f := range found {
		n.found = append(n.found, netip.MustParseAddr(f))
	}
}

func (n *names) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.queries
}

func TestResolverAddress(t *testing.T) {
	for _, tc := range []struct{ host, want string }{
		{"203.0.113.7", "203.0.113.7:51840"},
		{"::ffff:203.0.113.7", "203.0.113.7:51840"},
		{"2001:db8::7", "[2001:db8::7]:51840"},
		{"[2001:db8::7]", "[2001:db8::7]:51840"},
		{"", "invalid AddrPort"},
	} {
		ns := &names{}
		r := newResolver(tc.host, 51840, ns.lookup, func() bool { return true }, slog.New(slog.DiscardHandler))
		assert.Equal(t, r.endpoint().String(), tc.want)
		assert.NilError(t, r.run(t.Context())) // returns: there is nothing to look up
		assert.Equal(t, ns.count(), 0)
	}
}

// TestResolverHurry asks at once when the peer is silent, and not too often.
func TestResolverHurry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns := &names{}
		ns.set(nil, "203.0.113.1")
		r := newResolver("gw.rome.example", 51840, ns.lookup, func() bool { return false }, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.run(ctx) }()
		after := func(d time.Duration) string {
			<-time.After(d)
			synctest.Wait()
			return r.endpoint().Addr().String()
		}
		// Every five minutes by now.
		after(lookupEarlyFor + lookupEarly + time.Second)
		before := ns.count()
		ns.set(nil, "203.0.113.2")
		assert.Equal(t, after(2*time.Minute), "203.0.113.1")
		assert.Equal(t, ns.count(), before)
		r.hurry()
		assert.Equal(t, after(time.Millisecond), "203.0.113.2")
		<-r.changed
		assert.Equal(t, ns.count(), before+1)

		for range 100 {
			r.hurry()
			after(100 * time.Millisecond)
		}
		assert.Assert(t, ns.count() <= before+11, "%d lookups in 10 s", ns.count()-before-1)
		cancel()
		assert.NilError(t, <-done)
	})
}

func TestResolverName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns := &names{}
		ns.set(errors.New("server misbehaving"))
		up := false
		var mu sync.Mutex
		r := newResolver("gw.rome.example", 51840, ns.lookup, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return !up
		}, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.run(ctx) }()
		after := func(d time.Duration) string {
			<-time.After(d)
			synctest.Wait()
			return r.endpoint().String()
		}

		assert.Equal(t, after(time.Second), "invalid AddrPort")
		ns.set(nil, "203.0.113.7", "2001:db8::7")
		assert.Equal(t, after(lookupEarly), "203.0.113.7:51840")
		<-r.changed

		ns.set(nil, "2001:db8::7", "203.0.113.7") // in another order: stays
		assert.Equal(t, after(lookupEarly), "203.0.113.7:51840")
		ns.set(errors.New("i/o timeout"))
		assert.Equal(t, after(time.Minute), "203.0.113.7:51840")
		ns.set(nil)
		assert.Equal(t, after(time.Minute), "203.0.113.7:51840")
		select {
		case <-r.changed:
			t.Error("told of a change that was none")
		default:
		}
		ns.set(nil, "203.0.113.9")
		assert.Equal(t, after(lookupEarly), "203.0.113.9:51840")
		<-r.changed

		// Later, seldom, unless the tunnel is down.
		mu.Lock()
		up = true
		mu.Unlock()
		after(lookupEarlyFor + lookupLater)
		before := ns.count()
		after(time.Hour)
		assert.Equal(t, ns.count()-before, int(time.Hour/lookupLater))
		mu.Lock()
		up = false
		mu.Unlock()
		after(lookupLater)
		before = ns.count()
		after(time.Minute)
		assert.Equal(t, ns.count()-before, int(time.Minute/lookupEarly))

		cancel()
		assert.NilError(t, <-done)
	})
}
