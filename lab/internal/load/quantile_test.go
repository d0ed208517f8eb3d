package load

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

func TestQuantile(t *testing.T) {
	upTo := func(n int) (out []time.Duration) {
		for i := range n {
			out = append(out, time.Duration(i+1))
		}
		return out
	}
	for _, tt := range []struct {
		n, percent int
		want       time.Duration
	}{
		{1, 50, 1}, {1, 99, 1}, {2, 50, 1}, {3, 50, 2}, {4, 0, 1},
		{100, 50, 50}, {100, 99, 99}, {101, 99, 100}, {1000, 99, 990}, {5, 100, 5},
	} {
		assert.Equal(t, quantile(upTo(tt.n), tt.percent), tt.want, "%d%% of %d", tt.percent, tt.n)
	}
}
