package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/watchlist"
)

const (
	// All processes of a cluster ask while the API server starts: not so
	// often that it feels them, and not all at once.
	askPause, askJitter = time.Second, 2.0 // 1–3 s
	// An answer to /readyz that takes longer would not help: what follows it
	// are lists.
	askTimeout = 5 * time.Second
	// retryPause is between two requests for the same objects when the API
	// server answers others.
	retryPause = time.Second
	// /readyz can be bad for long while lists are served. As often as a
	// reflector alone would, everybody tries all the same.
	patience, patienceJitter = 30 * time.Second, 1.0 // 30–60 s
)

// An InformerFunc makes an informer, as cache.Options.NewInformer wants it.
type InformerFunc = func(toolscache.ListerWatcher, runtime.Object, time.Duration, toolscache.Indexers) toolscache.SharedIndexInformer

// NewInformer returns what makes the informers of a process. They wait for an
// API server that is away together, and follow again within seconds after it
// is back. A reflector alone backs off for up to a minute.
func NewInformer(config *rest.Config, log *slog.Logger) (InformerFunc, error) {
	newInformer, _, err := newInformers(config, log)
	return newInformer, err
}

// newInformers is NewInformer with the gate at which the informers wait.
func newInformers(config *rest.Config, log *slog.Logger) (InformerFunc, *gate, error) {
	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	c, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		return nil, nil, fmt.Errorf("client for %s: %w", config.Host, err)
	}
	g := newGate(log, func(ctx context.Context) error {
		// Every authenticated user may read it (system:public-info-viewer).
		return c.Get().AbsPath("/readyz").MaxRetries(0).Do(ctx).Error()
	})
	return func(lw toolscache.ListerWatcher, o runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
		return toolscache.NewSharedIndexInformer(patient{lw, toolscache.ToListerWatcherWithContext(lw), g}, o, resync, indexers)
	}, g, nil
}

// patient lists and watches. It does not fail because the API server is away,
// but waits. Without a context to end the waiting there is none.
type patient struct {
	toolscache.ListerWatcher
	lw   toolscache.ListerWatcherWithContext
	gate *gate
}

// ListWithContext implements toolscache.ListerWithContext.
func (p patient) ListWithContext(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	return try(ctx, p.gate, func() (runtime.Object, error) { return p.lw.ListWithContext(ctx, options) })
}

// WatchWithContext implements toolscache.WatcherWithContext.
func (p patient) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	return try(ctx, p.gate, func() (watch.Interface, error) { return p.lw.WatchWithContext(ctx, options) })
}

// IsWatchListSemanticsUnSupported is what reflectors ask before they list by
// watching. The name is client-go's.
func (p patient) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(p.ListerWatcher)
}

// try does a request until it reaches the API server or ctx is done.
func try[T any](ctx context.Context, g *gate, request func() (T, error)) (T, error) {
	for again := false; ; again = true {
		start := time.Now()
		v, err := request()
		if err == nil && again {
			g.back()
		}
		if err == nil || ctx.Err() != nil || !unreachable(err) {
			return v, err
		}
		g.away(err)
		if again && !pause(ctx, retryPause-time.Since(start)) {
			return v, err
		}
		if !g.wait(ctx) {
			return v, err
		}
	}
}

// A gate is where requests wait for the API server. One of those that wait asks
// for all; there is no goroutine when nobody waits.
type gate struct {
	ask    func(context.Context) error
	log    *slog.Logger
	asking chan struct{} // has room for the one that asks
	lost   chan struct{} // closed when there was an outage

	mu     sync.Mutex
	opened chan struct{} // closed when the API server answers, then replaced
	since  time.Time     // of the outage; zero when there is none
	once   sync.Once     // closes lost
}

func newGate(log *slog.Logger, ask func(context.Context) error) *gate {
	return &gate{ask: ask, log: log, asking: make(chan struct{}, 1), lost: make(chan struct{}), opened: make(chan struct{})}
}

// wait returns when a request is worth a try; false when ctx is done.
func (g *gate) wait(ctx context.Context) bool {
	g.mu.Lock()
	opened := g.opened
	g.mu.Unlock()
	end := time.NewTimer(wait.Jitter(patience, patienceJitter))
	defer end.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-opened:
		return true
	case <-end.C:
		return true
	case g.asking <- struct{}{}:
	}
	// Who takes over from one that gave up goes on here.
	defer func() { <-g.asking }()
	for pause(ctx, wait.Jitter(askPause, askJitter)) {
		select {
		case <-opened:
			return true
		case <-end.C:
			return true
		default:
		}
		asked, cancel := context.WithTimeout(ctx, askTimeout)
		err := g.ask(asked)
		cancel()
		if ctx.Err() == nil && !unreachable(err) {
			g.open()
			return true
		}
	}
	return false
}

// silent reports whether a question to the API server gets no answer in this time.
func (g *gate) silent(ctx context.Context, within time.Duration) bool {
	asked, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	err := g.ask(asked)
	return ctx.Err() == nil && unreachable(err)
}

// open lets go all that wait.
func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.opened)
	g.opened = make(chan struct{})
}

// away notes that the API server could not be reached. An outage has one line
// when it begins and one when it ends.
func (g *gate) away(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.since.IsZero() {
		g.since = time.Now()
		g.once.Do(func() { close(g.lost) })
		g.log.Warn("the API server cannot be reached; going on with what is known", "err", err)
	}
}

// back notes that a request that had waited succeeded.
func (g *gate) back() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.since.IsZero() {
		g.log.Info("the API server is back", "after", time.Since(g.since).Round(time.Second/10))
		g.since = time.Time{}
	}
}

// pause returns false when ctx is done before.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// unreachable reports whether a request failed because the API server is away
// or starts. What it says when it is there is the reflector's business.
func unreachable(err error) bool {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		// A resource version from the future, after etcd was restored, is a
		// 504 too. The reflector lists anew then, and waiting would not help.
		return status.Status().Code >= http.StatusInternalServerError &&
			!apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
	}
	for _, errno := range []syscall.Errno{
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.EPIPE, syscall.ETIMEDOUT,
		syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.ENETDOWN,
	} {
		if errors.Is(err, errno) {
			return true
		}
	}
	// Whatever hinders dialling counts, names that do not resolve as well.
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return true
	}
	var timeout net.Error // context.DeadlineExceeded is one
	if errors.As(err, &timeout) && timeout.Timeout() {
		return true
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		utilnet.IsProbableEOF(err) || utilnet.IsHTTP2ConnectionLost(err)
}
