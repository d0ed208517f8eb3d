package daemon

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// init keeps the goroutines of tests off the main thread, which is the only one
// that does not end with a goroutine that has taken it into a namespace: it
// would take /proc/self/ns/net along.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	if os.Getenv(childConfig) != "" {
		os.Exit(childGateway())
	}
	os.Exit(nettest.Main(m))
}

// memoryAPI is an informer source in memory: what is put into it is what the
// daemon reads.
type memoryAPI[View any] struct {
	synced  chan struct{}
	changed chan struct{}
	mu      sync.Mutex
	view    View
}

func newMemoryAPI[View any](v View) *memoryAPI[View] {
	a := &memoryAPI[View]{synced: make(chan struct{}), changed: make(chan struct{}, 1), view: v}
	close(a.synced)
	return a
}

func (a *memoryAPI[View]) Changed() <-chan struct{} { return a.changed }

func (a *memoryAPI[View]) Start(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (a *memoryAPI[View]) Synced(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-a.synced:
		return nil
	}
}

func (a *memoryAPI[View]) Read(ctx context.Context) (View, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.view, a.Synced(ctx)
}

// set changes what is there.
func (a *memoryAPI[View]) set(f func(*View)) {
	a.mu.Lock()
	f(&a.view)
	a.mu.Unlock()
	notify(a.changed)
}

// latest keeps the last value that was written.
type latest[T any] struct {
	mu    sync.Mutex
	value T
	n     int
	err   error
}

func (l *latest[T]) write(_ context.Context, v T) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.value, l.n = v, l.n+1
	}
	return l.err
}

func (l *latest[T]) get() T {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.value
}

func (l *latest[T]) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

// logBuffer is a log that a test can read while it is written.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newLog(t *testing.T, name string) (*slog.Logger, *logBuffer) {
	l := &logBuffer{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, l)
		}
	})
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})).With("daemon", name), l
}

// inNS runs a daemon in a namespace until the test ends or stop is called.
func inNS(t *testing.T, ns *nettest.NS, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go ns.Do(func() { done <- run(ctx) })
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			assert.NilError(t, <-done)
		})
	}
	t.Cleanup(stop)
	return stop
}

// busyTime is what a busy machine may take for what takes a moment.
const busyTime = time.Minute

// within polls until check is nil, for at most d, or busyTime where that is longer. How long it took is for
// who has a claim about that.
func within(t *testing.T, d time.Duration, check func() error) time.Duration {
	t.Helper()
	start := time.Now()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if err := check(); err != nil {
			return poll.Continue("%v", err)
		}
		return poll.Success()
	}, poll.WithDelay(10*time.Millisecond), poll.WithTimeout(max(d, busyTime)))
	return time.Since(start)
}

// metricsToken is what get shows, and what tokenGuard wants to see. What the API
// server says of tokens is tested where there is one (internal/controllers).
const metricsToken = "of-this-test-only"

func tokenGuard(h http.Handler) (http.Handler, error) {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+metricsToken {
			http.Error(w, "Unauthorized", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	}), nil
}

// get fetches a page of a daemon in a namespace, with the token.
func get(ns *nettest.NS, url string) (status int, body string, err error) {
	return getWith(ns, url, metricsToken)
}

// getWith fetches a page of a daemon in a namespace.
func getWith(ns *nettest.NS, url, token string) (status int, body string, err error) {
	ns.Do(func() {
		// A transport dials on a goroutine of its own, in another
		// namespace; this connection is made here.
		req, e := http.NewRequest(http.MethodGet, url, nil)
		if e != nil {
			err = e
			return
		}
		req.Header.Set("Authorization", "Bearer "+token)
		c, e := net.Dial("tcp", req.URL.Host)
		if e != nil {
			err = e
			return
		}
		defer c.Close()
		client := http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext:       func(context.Context, string, string) (net.Conn, error) { return c, nil },
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // the certificate is the daemon's own
		}}
		resp, e := client.Do(req)
		if e != nil {
			err = e
			return
		}
		defer resp.Body.Close()
		b, e := io.ReadAll(resp.Body)
		status, body, err = resp.StatusCode, string(b), e
	})
	return status, body, err
}

// wire joins two namespaces by a veth pair eth0–eth0 and gives each a default
// route to the other.
func wire(t *testing.T, a, b *nettest.NS, addrA, addrB netip.Addr) {
	t.Helper()
	a.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0",
		"netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), b.FD()))
	for _, end := range []struct {
		ns         *nettest.NS
		own, other netip.Addr
	}{{a, addrA, addrB}, {b, addrB, addrA}} {
		end.ns.Run("ip", "link", "set", "lo", "up")
		end.ns.Run("ip", "address", "add", end.own.String()+"/24", "dev", "eth0")
		end.ns.Run("ip", "link", "set", "eth0", "up")
		end.ns.Run("ip", "route", "add", "default", "via", end.other.String())
	}
}
