package supervisor

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
)

func TestPollSaysWhatIsMissing(t *testing.T) {
	type answer struct {
		missing string
		err     error
	}
	refused := errors.New("connection refused")
	// What a client says that would have to wait beyond the deadline.
	limited := errors.New("client rate limiter Wait returned an error: rate: Wait(n=1) would exceed context deadline")
	for name, c := range map[string]struct {
		look func(ctx context.Context, n int) answer
		want string // of the error; "" for none
		took time.Duration
	}{
		"nothing is missing": {
			look: func(context.Context, int) answer { return answer{} },
		},
		"something comes": {
			look: func(_ context.Context, n int) answer { return []answer{{"a node", nil}, {"", refused}, {}}[n] },
			took: 2 * time.Second,
		},
		"something never comes": {
			look: func(context.Context, int) answer { return answer{"a node", nil} },
			want: "a node after 10s", took: 10 * time.Second,
		},
		"the time is over during a question": {
			look: func(ctx context.Context, n int) answer {
				if n < 3 {
					return answer{"a node", nil}
				}
				<-ctx.Done()
				return answer{"", ctx.Err()}
			},
			want: "a node after 10s", took: 10 * time.Second,
		},
		"a client sees the deadline come": {
			look: func(ctx context.Context, n int) answer {
				if n < 3 {
					return answer{"a node", nil}
				}
				<-ctx.Done()
				return answer{"", limited}
			},
			want: "a node after 10s", took: 10 * time.Second,
		},
		"nobody answers": {
			look: func(context.Context, int) answer { return answer{"", refused} },
			want: "connection refused, after 10s", took: 10 * time.Second,
		},
		"nobody answers any more": {
			look: func(_ context.Context, n int) answer {
				if n < 3 {
					return answer{"a node", nil}
				}
				return answer{"", refused}
			},
			want: "a node after 10s\nthe last question failed: connection refused", took: 10 * time.Second,
		},
		"the first question takes too long": {
			look: func(ctx context.Context, _ int) answer {
				<-ctx.Done()
				return answer{"", ctx.Err()}
			},
			want: "there was no answer in 10s", took: 10 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start, n := time.Now(), 0
				err := poll(t.Context(), 10*time.Second, time.Second, func(ctx context.Context) (string, error) {
					a := c.look(ctx, n)
					n++
					return a.missing, a.err
				})
				if c.want == "" {
					assert.NilError(t, err)
				} else {
					assert.Error(t, err, c.want)
				}
				assert.Equal(t, time.Since(start), c.took)
			})
		})
	}
}

func TestPollEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	err := poll(ctx, time.Minute, time.Millisecond, func(context.Context) (string, error) {
		cancel()
		return "a node", nil
	})
	assert.ErrorIs(t, err, context.Canceled)
}
