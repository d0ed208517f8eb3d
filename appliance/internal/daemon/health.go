package daemon

import (
	"errors"
	"fmt"
	"net/http"
	"sync"

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
