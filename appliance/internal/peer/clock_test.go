package peer

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
)

// The time that somebody takes to decide is not that of the run, and ends as well.
func TestClock(t *testing.T) {
	for _, tt := range []struct {
		name  string
		holds time.Duration // after one minute: until then somebody decides
		until time.Duration // since the beginning
		most  time.Duration
		want  time.Duration
	}{
		{"nobody has to decide", 0, 0, 0, 2 * time.Minute},
		{"somebody takes ten minutes", 10 * time.Minute, time.Hour, 0, 12 * time.Minute},
		{"somebody takes too long", 2 * time.Hour, time.Hour, 0, time.Hour},
		{"somebody takes longer than is waited", 10 * time.Minute, time.Hour, 5 * time.Minute, 6 * time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				ctx, cancel, c := limit(t.Context(), 2*time.Minute, tt.most)
				defer cancel()
				wait := func(d time.Duration) {
					select {
					case <-ctx.Done():
					case <-time.After(d):
					}
				}
				c.look(time.Time{})
				wait(time.Minute)
				if tt.holds > 0 {
					c.look(start.Add(tt.until))
					wait(tt.holds / 2)
					c.look(start.Add(tt.until)) // again, at the next look
					wait(tt.holds / 2)
					c.look(time.Time{})
				}
				<-ctx.Done()
				assert.Equal(t, time.Since(start), tt.want)
				assert.Assert(t, errors.Is(context.Cause(ctx), context.DeadlineExceeded))
			})
		})
	}
}
