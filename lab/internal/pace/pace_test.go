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

	// A machine that turns out to be quicker than at the start.
	m.add(at(5), time.Millisecond)
	assert.Equal(t, m.Since(at(3)), 4.5)

	var none *Meter
	assert.Equal(t, none.Since(start), 1.0)
}

// TestStalled: a machine that stood still did so while a piece of work took longer than
// on the slowest machine, and only as far as that was in the time that is asked for.
func TestStalled(t *testing.T) {
	start := time.Now().Add(-time.Hour)
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	m := &Meter{best: 100 * time.Millisecond}
	for _, s := range []sample{{at(1), 100 * time.Millisecond}, {at(2), 500 * time.Millisecond}, {at(10), 6500 * time.Millisecond}, {at(11), time.Second}} {
		m.add(s.at, s.took)
	}
	for _, tt := range []struct {
		name     string
		from, to time.Time
		want     time.Duration
	}{
		{"slow is not still", at(0), at(2.5), 0},
		{"all of it", at(0), at(20), 6500 * time.Millisecond},
		{"it began before", at(8), at(10), 2 * time.Second},
		{"it lasts longer", at(0), at(6), 2 * time.Second},
		{"in the middle of it", at(5), at(6), time.Second},
		{"until now", at(10), time.Time{}, 500 * time.Millisecond},
		{"afterwards", at(12), at(20), 0},
	} {
		t.Run(tt.name, func(t *testing.T) { assert.Equal(t, m.Stalled(tt.from, tt.to), tt.want) })
	}
	t.Run("what is done is not counted again", func(t *testing.T) {
		m := &Meter{best: time.Millisecond, due: at(0)}
		m.add(at(10), 10*time.Second)
		assert.Equal(t, m.Stalled(at(0), at(20)), 9995*time.Millisecond)
	})
	t.Run("a wait for a processor is not a machine that stands still", func(t *testing.T) {
		m := &Meter{best: time.Millisecond}
		for i := range 100 {
			m.add(at(float64(i)), still-time.Millisecond)
		}
		assert.Equal(t, m.Stalled(at(0), at(100)), time.Duration(0))
	})
	t.Run("it still lasts", func(t *testing.T) {
		m.due = time.Now().Add(-10 * time.Second)
		got := m.Stalled(m.due, time.Time{})
		assert.Assert(t, got >= 9500*time.Millisecond && got <= time.Since(m.due), "%v", got)
		assert.Equal(t, m.Stalled(at(12), at(20)), time.Duration(0))
	})
	var none *Meter
	assert.Equal(t, none.Stalled(start, time.Time{}), time.Duration(0))
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
	m := Start(t.Context(), 2)
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		m.mu.Lock()
		defer m.mu.Unlock()
		if len(m.samples) < 3 {
			return poll.Continue("%d samples", len(m.samples))
		}
		return poll.Success()
	})
	assert.Assert(t, m.Since(start) >= 1)
	m.mu.Lock()
	m.best = time.Nanosecond // the machine is as slow as can be
	m.mu.Unlock()
	assert.Equal(t, m.Since(start), 2.)
}

// A context without a meter says that the machine is as quick as ever.
func TestFrom(t *testing.T) {
	start := time.Now()
	assert.Equal(t, From(t.Context()).Longer(time.Minute, start, time.Time{}), time.Minute)
	m := &Meter{best: 2 * time.Millisecond}
	assert.Assert(t, From(With(t.Context(), m)) == m)
}
