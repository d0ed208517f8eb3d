package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/appliance/agent"
)

// health is what /healthz and /readyz answer from.
type health struct {
	agent.Watchdog // of the loop's steps

	mu    sync.Mutex
	ready bool
	why   string // what is being waited for, until ready
}

func newHealth() *health { return &health{why: "starting"} }

// waiting says what readiness waits for.
func (h *health) waiting(why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.why = why
}

// setReady makes the daemon ready, for good: what it built goes on working
// whatever fails later.
func (h *health) setReady() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready = true
}

func (h *health) isReady() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ready
}

func (h *health) readiness() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ready {
		return nil
	}
	return errors.New(h.why)
}

// register adds the two paths to a mux.
func (h *health) register(mux *http.ServeMux) {
	answer := func(check func() error) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if err := check(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		}
	}
	mux.Handle("GET /healthz", answer(h.Err))
	mux.Handle("GET /readyz", answer(h.readiness))
}

// off is the address of a server that is not wanted, as in controller-runtime.
const off = "0"

// A server is one HTTP address of the daemon.
type server struct {
	listener net.Listener
	http     *http.Server
}

// listen binds the addresses, which may be the same, for what each is to
// serve.
func listen(ctx context.Context, log *slog.Logger, handlers map[string]func(*http.ServeMux)) ([]server, error) {
	var out []server
	for addr, register := range handlers {
		if addr == "" || addr == off {
			continue
		}
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
		if err != nil {
			for _, s := range out {
				s.listener.Close()
			}
			return nil, fmt.Errorf("listen on %s for health or metrics: %w", addr, err)
		}
		mux := http.NewServeMux()
		register(mux)
		out = append(out, server{listener: l, http: &http.Server{
			Handler:           mux,
			ReadHeaderTimeout: 5 * time.Second,
			ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		}})
	}
	return out, nil
}

// run serves until ctx is done.
func (s server) run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.http.Close() })
	defer stop()
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve on %s: %w", s.listener.Addr(), err)
	}
	return nil
}
