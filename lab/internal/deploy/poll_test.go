package deploy

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
)

// TestPoll: a wait that ends says what it waited for, and whether its time was
// over or somebody interrupted it.
func TestPoll(t *testing.T) {
	broken := errors.New("forbidden")
	for name, c := range map[string]struct {
		look      func(time.Duration) (string, error)
		interrupt time.Duration // 0: nobody does
		want      string
		is        error
	}{
		"it comes":          {look: func(d time.Duration) (string, error) { return map[bool]string{true: "a node"}[d < time.Minute], nil }},
		"it never comes":    {look: func(time.Duration) (string, error) { return "a node", nil }, want: "after 3m0s still waiting: a node: context deadline exceeded", is: context.DeadlineExceeded},
		"it is interrupted": {look: func(time.Duration) (string, error) { return "a node", nil }, interrupt: 12 * time.Second, want: "interrupted after 12s, still waiting: a node: context canceled", is: context.Canceled},
		"it can't be asked": {look: func(time.Duration) (string, error) { return "", broken }, want: "forbidden", is: broken},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if c.interrupt > 0 {
					time.AfterFunc(c.interrupt, cancel)
				}
				start := time.Now()
				err := Poll(ctx, 3*time.Minute, func(context.Context) (string, error) { return c.look(time.Since(start)) })
				if c.want == "" {
					assert.NilError(t, err)
					return
				}
				assert.Error(t, err, c.want)
				assert.ErrorIs(t, err, c.is)
			})
		})
	}
}

// TestPollIsPatient: on a machine that is slower there is more time, and not more than the most.
func TestPollIsPatient(t *testing.T) {
	for _, c := range []struct{ over, most, want string }{
		{"5m0s", "15m0s", "after 5m0s still waiting: a node: context deadline exceeded"},
		{"1h0m0s", "15m0s", "after 15m0s still waiting: a node: context deadline exceeded"},
	} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			over, err := time.ParseDuration(c.over)
			assert.NilError(t, err)
			most, err := time.ParseDuration(c.most)
			assert.NilError(t, err)
			err = poll(t.Context(), most, func() bool { return time.Since(start) >= over }, func(context.Context) (string, error) { return "a node", nil })
			assert.Error(t, err, c.want)
		})
	}
}
