package expect

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/prober"
)

// TestLongestSilence: when it was is known, for the machine may have been slow then
// and not any more when somebody looks.
func TestLongestSilence(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	f := &FlowState{reports: []prober.FlowReport{
		{Time: at(1), Alive: true, Gap: time.Second}, {Time: at(2), Alive: true, Gap: 3 * time.Second},
		{Time: at(3), Alive: true, Gap: 4 * time.Second}, {Time: at(4), Alive: true, Gap: time.Second},
	}}
	s := f.since(time.Time{})
	assert.Equal(t, s.gap, 4*time.Second)
	assert.Equal(t, s.gapEnd, at(3))
	s = f.since(at(4))
	assert.Equal(t, s.gap, time.Second)
	assert.Equal(t, s.gapEnd, at(4))
}

// What costs time costs more messages of a stream that sends more, and where the machine
// has other work.
func TestMayLose(t *testing.T) {
	five := 5
	for _, c := range []struct {
		flow     Flow
		interval time.Duration
		patience int
		want     int
	}{
		{Flow{Lost: &five}, time.Millisecond, 3, 5},
		{Flow{LostFor: 50 * time.Millisecond}, time.Millisecond, 0, 50},
		{Flow{LostFor: 50 * time.Millisecond}, time.Millisecond, 3, 150},
		{Flow{LostFor: 50 * time.Millisecond}, prober.FlowInterval, 0, 1},
		{Flow{LostFor: 50 * time.Millisecond}, time.Second, 0, 1},
	} {
		assert.Check(t, c.flow.countsLost())
		assert.Equal(t, c.flow.mayLose(&Row{Patience: c.patience}, c.interval), c.want)
	}
	assert.Check(t, !(&Flow{Alive: true}).countsLost())
}
