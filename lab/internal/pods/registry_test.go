package pods

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
)

// TestSleep: who asks during a sleep waits for its end, and can tell afterwards
// that there was one.
func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRegistry()
		before, ok := r.awake(t.Context())
		assert.Assert(t, ok)
		start := time.Now()
		r.Sleep()
		time.AfterFunc(time.Minute, r.Wake)
		after, ok := r.awake(t.Context())
		assert.Assert(t, ok)
		assert.Equal(t, time.Since(start), time.Minute)
		assert.Equal(t, after, before+1)
		// Wake alone is no sleep.
		r.Wake()
		again, ok := r.awake(t.Context())
		assert.Assert(t, ok)
		assert.Equal(t, again, after)

		r.Sleep()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, ok = r.awake(ctx)
		assert.Assert(t, !ok, "the time to wait was over first")
	})
}
