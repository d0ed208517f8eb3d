package pace

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
)

// TestSince: what is said of a machine is the mean of what was measured since a
// moment, beside the best that was ever measured, within bounds.
func TestSince(t *testing.T) {
	start := time.Now()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	m := &Meter{best: 2 * time.Millisecond}
	assert.Equal(t, m.Since(start), 1.0)
	for i, ms := range []int{2, 4, 6, 8, 80} {
		m.add(at(i), time.Duration(ms)*time.Millisecond)
	}
	for _, tt := range []struct {
		since time.Time
		want  float64
	}{{at(0), Most}, {at(4), Most}, {at(5), 1}} {
		assert.Equal(t, m.Since(tt.since), tt.want)
	}
	m.samples = m.samples[:4]
	assert.Equal(t, m.Since(at(0)), 2.5)
	assert.Equal(t, m.Since(at(2)), 3.5)
	assert.Equal(t, m.Between(at(1), at(2)), 2.5)
	assert.Equal(t, m.Between(at(7), at(9)), 1.0)
	assert.Equal(t, m.Longer(time.Second, at(2)), 3500*time.Millisecond)

	// A machine that turns out to be quicker than at the start.
	m.add(at(5), time.Millisecond)
	assert.Equal(t, m.Since(at(3)), 4.5)

	var none *Meter
	assert.Equal(t, none.Since(start), 1.0)
}

// TestForgets: samples do not pile up in a long run.
func TestForgets(t *testing.T) {
	m := &Meter{best: time.Millisecond}
	start := time.Now()
	for i := range 100_000 {
		m.add(start.Add(time.Duration(i)*interval), time.Millisecond)
	}
	assert.Assert(t, len(m.samples) <= int(memory/interval)+1001, "%d", len(m.samples))
}

// TestMeter: it measures while it runs.
func TestMeter(t *testing.T) {
	start := time.Now()
	m := Start(t.Context())
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		m.mu.Lock()
		defer m.mu.Unlock()
		if len(m.samples) < 3 {
			return poll.Continue("%d samples", len(m.samples))
		}
		return poll.Success()
	})
	assert.Assert(t, m.Since(start) >= 1)
}
