package daemon

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
)

// apiServer takes integers, unless it is away.
type apiServer struct {
	mu     sync.Mutex
	err    error
	tries  int
	values []int
}

func (a *apiServer) write(_ context.Context, v int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tries++
	if a.err == nil {
		a.values = append(a.values, v)
	}
	return a.err
}

func (a *apiServer) set(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
}

func (a *apiServer) read() (int, []int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.tries, append([]int{}, a.values...)
}

func TestReporter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		api := &apiServer{}
		r := newReporter("status", slog.New(slog.NewTextHandler(&log, nil)), func(a, b int) bool { return a == b }, api.write)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.run(ctx) }()
		give := func(after time.Duration, values ...int) {
			for _, v := range values {
				r.set(v)
			}
			<-time.After(after)
			synctest.Wait()
		}

		give(time.Hour)
		give(time.Second, 1)
		give(time.Second, 1)
		give(time.Second, 2)
		give(time.Second, 2)
		_, values := api.read()
		assert.DeepEqual(t, values, []int{1, 2})
		give(rewrite)
		_, values = api.read()
		assert.DeepEqual(t, values, []int{1, 2, 2})
		assert.Equal(t, log.String(), "")

		// Away for an hour: few tries, one line, and then the latest value.
		api.set(errors.New("connection refused"))
		give(30*time.Minute, 3)
		give(30*time.Minute, 4)
		tries, values := api.read()
		assert.DeepEqual(t, values, []int{1, 2, 2})
		assert.Assert(t, tries > 600 && tries < 800, "%d tries in an hour", tries)
		assert.Equal(t, strings.Count(log.String(), "\n"), 1, log.String())
		api.set(nil)
		give(5 * time.Second)
		_, values = api.read()
		assert.DeepEqual(t, values, []int{1, 2, 2, 4})
		assert.Equal(t, strings.Count(log.String(), "\n"), 2, log.String())
		assert.Assert(t, strings.Contains(log.String(), "works again"))

		cancel()
		assert.NilError(t, <-done)
	})
}
