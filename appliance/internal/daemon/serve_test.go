package daemon

import (
	"context"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

// What can't be served is an error before anything runs; a template of
// somebody's own that has metrics and health on one address keeps its gateway.
func TestServing(t *testing.T) {
	const health, metrics = "127.0.0.1:0", "127.0.0.2:0"
	for _, tt := range []struct {
		name   string
		cfg    Serving
		err    string
		logged string
	}{
		{name: "nothing", cfg: Serving{Health: "0"}},
		{name: "both", cfg: Serving{Health: health, Metrics: metrics, Guard: tokenGuard}},
		{name: "one address", cfg: Serving{Health: health, Metrics: health, Guard: tokenGuard}, logged: "change --metrics-address"},
		{name: "nobody to decide", cfg: Serving{Metrics: metrics}, err: "metrics: daemon: Serving.Guard is required"},
		{name: "no port", cfg: Serving{Health: "127.0.0.1"}, err: "health: listen on 127.0.0.1"},
		{name: "an address of others", cfg: Serving{Health: health, Metrics: "192.0.2.1:0", Guard: tokenGuard}, err: "metrics: listen on 192.0.2.1:0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log, text := newLog(t, "n1")
			h := &host{log: log, health: newHealth(), metrics: newMetrics(func() (uint64, error) { return 0, nil })}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			g, running := newGroup(ctx)
			err := h.serve(running, g, tt.cfg)
			cancel()
			_ = g.wait(running)
			if tt.err != "" {
				assert.ErrorContains(t, err, tt.err)
				return
			}
			assert.NilError(t, err)
			assert.Equal(t, strings.Contains(text.String(), tt.logged), true, text.String())
		})
	}
}
