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

// TestLostInAnEmulatedMachine: what loses a message takes as much longer there as a step may.
func TestLostInAnEmulatedMachine(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		name                    string
		allowed, lost, patience int
		want                    bool
	}{
		{"as many as are allowed", 2, 2, 0, true},
		{"one more", 2, 3, 0, false},
		{"three times as many where steps may take three times as long", 2, 6, 3, true},
		{"one more there", 2, 7, 3, false},
		{"none is none", 0, 1, 3, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			row := &Row{StepStarted: now.Add(-time.Minute), Patience: tt.patience, Flows: map[string]*FlowState{"f": {interval: prober.FlowInterval, reports: []prober.FlowReport{
				{Time: now.Add(-2 * time.Second), Alive: true, Sent: 10, Received: 10},
				{Time: now.Add(-time.Second), Alive: true, Sent: 30, Received: 30 - tt.lost, Lost: tt.lost},
			}}}}
			res, err := (&Flow{Name: "f", Alive: true, Lost: &tt.allowed}).Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tt.want, "%s %s", res.Got, res.Why)
		})
	}
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
		{Flow{LostPercent: 15}, time.Millisecond, 3, 60},
		{Flow{Lost: &five}, time.Millisecond, 0, 5},
		{Flow{Lost: &five}, time.Millisecond, 3, 15},
		{Flow{Lost: new(int)}, time.Millisecond, 3, 0},
		{Flow{LostFor: 50 * time.Millisecond}, time.Millisecond, 0, 50},
		{Flow{LostFor: 50 * time.Millisecond}, time.Millisecond, 3, 150},
		{Flow{LostFor: 50 * time.Millisecond}, prober.FlowInterval, 0, 1},
		{Flow{LostFor: 50 * time.Millisecond}, time.Second, 0, 1},
	} {
		assert.Check(t, c.flow.countsLost())
		assert.Equal(t, c.flow.mayLose(&Row{Patience: c.patience}, c.interval, flowSummary{sent: 400}), c.want)
	}
	assert.Check(t, !(&Flow{Alive: true}).countsLost())
}

// TestSilenceOfTCP: where outages take longer, a stream of TCP may be silent for as much
// longer twice.
func TestSilenceOfTCP(t *testing.T) {
	for _, tt := range []struct {
		proto           string
		outage, silence time.Duration
	}{
		{"tcp", 3 * time.Second, 3 * time.Second},
		{"tcp", 9 * time.Second, 15 * time.Second},
		{"udp", 9 * time.Second, 9 * time.Second},
	} {
		f := &FlowState{Proto: tt.proto}
		assert.Equal(t, f.silence(3*time.Second, tt.outage), tt.silence, "%+v", tt)
	}
}

// TestLostOfASilentStream: a message counts as lost when a later one has come back. Of a stream
// of which nothing comes back any more nobody knows what was lost.
func TestLostOfASilentStream(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		flow   Flow
		silent time.Duration
		want   bool
	}{
		{Flow{Name: "f", Lost: new(int)}, 100 * time.Millisecond, true},
		{Flow{Name: "f", Lost: new(int)}, 3 * time.Second, false},
		{Flow{Name: "f", LostPercent: 10}, 3 * time.Second, false},
		{Flow{Name: "f", LostFor: time.Second}, 3 * time.Second, false},
	} {
		row := &Row{StepStarted: now.Add(-time.Minute), Flows: map[string]*FlowState{"f": {interval: prober.FlowInterval, reports: []prober.FlowReport{
			{Time: now.Add(-2 * time.Second), Alive: true, Sent: 10, Received: 10},
			{Time: now.Add(-time.Second), Alive: true, Sent: 30, Received: 20, Gap: tt.silent},
		}}}}
		res, err := tt.flow.Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, tt.want, "%s: %s %s", &tt.flow, res.Got, res.Why)
		assert.Equal(t, res.Pending, !tt.want)
	}
}

// TestSilentSince: what comes back late was sent before the step, and passes no more. The reports
// come every quarter of a second: the first one since the step began has that, too.
func TestSilentSince(t *testing.T) {
	now := time.Now()
	began := now.Add(-5 * time.Second)
	for _, tt := range []struct {
		name   string
		newest time.Time
		want   bool
	}{
		{"sent before the step", began.Add(-50 * time.Millisecond), true},
		{"sent after it began", began.Add(50 * time.Millisecond), false},
		{"of an older probe, which does not say when", time.Time{}, false},
	} {
		row := &Row{StepStarted: began, Flows: map[string]*FlowState{"f": {interval: prober.FlowInterval, reports: []prober.FlowReport{
			{Time: began.Add(-100 * time.Millisecond), Alive: true, Sent: 100, Received: 95, Newest: began.Add(-300 * time.Millisecond)},
			{Time: began.Add(150 * time.Millisecond), Alive: true, Sent: 105, Received: 100, Newest: tt.newest},
			{Time: now, Alive: true, Sent: 200, Received: 100, Newest: tt.newest, Gap: 4 * time.Second},
		}}}}
		res, err := (&Flow{Name: "f", Silent: 3 * time.Second}).Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, tt.want, "%s: %+v", tt.name, res)
		assert.Equal(t, res.Final, !tt.want)
	}
}
