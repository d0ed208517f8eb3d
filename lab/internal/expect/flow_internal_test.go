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
