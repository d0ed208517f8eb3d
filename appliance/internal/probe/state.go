package probe

import (
	"strconv"
	"time"
)

// A State is what the probe knows of the tunnel, in the words of
// Connection.status.value.
type State string

// The states of a Connection.
const (
	Connecting State = "Connecting" // no answer yet, and not overdue
	Connected  State = "Connected"  // answered within the threshold
	Error      State = "Error"      // nothing came back for as long, and of as many probes, as the threshold says
)

// A Status is a reading of a [Prober].
type Status struct {
	State   State
	Latency time.Duration // round trip of the latest answer; 0 unless Connected
	// RoundTrip is that of the latest answer, however long ago it came; 0: none
	// has come.
	RoundTrip time.Duration
	// Loss is the share, 0 to 1, of the latest probes that were not answered
	// in time, out of those whose time is over.
	Loss      float64
	Sent      uint64
	Received  uint64
	LastReply time.Time // zero: never
	// Answered is when the latest of the probes left that were answered; zero: none was. Who asks
	// whether the peer answers since a moment must not count what was on its way by then.
	Answered time.Time
	// Waiting is when the first of the probes left that were sent since the
	// latest answer; zero: there is none.
	Waiting time.Time
	// PeerMTU is the longest packet that the network below the peer has room for
	// in the tunnel, as the peer says; 0: it does not say.
	PeerMTU int
}

// LatencyText writes a latency as Connection.status.latency.value: whole
// microseconds below one millisecond, whole milliseconds from there on, N/A
// for none.
func LatencyText(d time.Duration) string {
	switch {
	case d <= 0:
		return "N/A"
	case d < time.Millisecond:
		return strconv.FormatInt(max(d.Microseconds(), 1), 10) + "µs"
	default:
		return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
	}
}

// window is how many probes the loss is computed over: one minute at the
// default interval.
const window = 30

// A sent is a probe on its way.
type sent struct {
	stamp    int64     // Unix nanoseconds, as in the message
	at       time.Time // with the monotonic clock, so that a clock step is no latency
	answered bool
	extra    bool // sent in a hurry: what becomes of it is no measure of the loss
}

// A tracker is the state machine: what was sent, what came back. It has no
// clock and no lock of its own.
type tracker struct {
	interval  time.Duration // between probes that are not sent in a hurry
	threshold int           // how many of those without an answer are too many
	state     State
	silence   time.Duration // watched since the first probe, or the latest answer
	watched   time.Time     // until when; zero: no probe has left
	tries     int           // probes since the latest answer, but those in a hurry
	latency   time.Duration // 0 after an Error
	took      time.Duration // round trip of the latest answer
	last      time.Time     // latest answer
	answered  time.Time     // when the newest probe left that was answered
	waiting   time.Time     // see Status
	extras    int           // probes sent in a hurry since the latest answer
	ring      []sent        // at most window entries, oldest first
	sent      uint64
	recv      uint64
}

func newTracker(interval time.Duration, threshold int) *tracker {
	return &tracker{interval: interval, threshold: threshold, state: Connecting}
}

// timeout is how long a silence lasts before it is an Error.
func (t *tracker) timeout() time.Duration { return t.interval * time.Duration(t.threshold) }

// maxWatched is how much of the time between two looks counts as silence: twice
// what is between them as a rule ([Prober.Hurry]). This process did not run for the
// rest of it, and could neither probe nor hear: it knows nothing of the peer.
func (t *tracker) maxWatched() time.Duration { return t.interval / 2 }

// maxExtras is how many probes in a row are sent in a hurry: 7.5 s of them at
// the default interval. Half the window stays with the others.
const maxExtras = window / 2

// send notes a probe that leaves now, in a hurry or not, and returns its time
// stamp.
func (t *tracker) send(now time.Time, hurry bool) time.Time {
	if len(t.ring) == window {
		copy(t.ring, t.ring[1:])
		t.ring = t.ring[:window-1]
	}
	t.ring = append(t.ring, sent{stamp: now.UnixNano(), at: now, extra: hurry})
	t.sent++
	if t.waiting.IsZero() {
		t.waiting = now
	}
	if t.watched.IsZero() {
		t.watched = now
	}
	if hurry {
		t.extras++
	} else {
		t.tries++
	}
	return now
}

// receive notes the answer to the probe with the given stamp and returns how
// long it took. Answers to what was never sent, and second answers, do not
// count; one overtaken by a newer answer does, but does not set the latency.
func (t *tracker) receive(now, stamp time.Time) (took time.Duration, counts bool) {
	n := stamp.UnixNano()
	for i := range t.ring {
		s := &t.ring[i]
		if s.stamp != n || s.answered {
			continue
		}
		s.answered = true
		t.recv++
		took = max(now.Sub(s.at), 1)
		if !s.at.Before(t.answered) {
			t.answered, t.latency, t.took = s.at, took, took
		}
		t.state, t.last = Connected, now
		t.silence, t.watched, t.tries = 0, now, 0
		t.waiting, t.extras = time.Time{}, 0
		return took, true
	}
	return 0, false
}

// late reports whether nothing was answered since a probe that left longer ago
// than the given time and than two round trips.
func (t *tracker) late(now time.Time, after time.Duration) bool {
	return !t.waiting.IsZero() && now.Sub(t.waiting) >= max(after, 2*t.latency)
}

// check notes that nothing has come until now, and ends a silence that has lasted
// too long.
func (t *tracker) check(now time.Time) {
	if t.watched.IsZero() {
		return
	}
	t.silence += min(now.Sub(t.watched), t.maxWatched())
	t.watched = now
	if t.state != Error && t.silence > t.timeout() && t.tries >= t.threshold {
		t.state, t.latency = Error, 0
	}
}

// status is the reading at now.
func (t *tracker) status(now time.Time) Status {
	st := Status{State: t.state, Latency: t.latency, RoundTrip: t.took, Sent: t.sent, Received: t.recv, LastReply: t.last, Answered: t.answered, Waiting: t.waiting}
	var over, lost int
	for _, s := range t.ring {
		switch {
		case s.extra:
		case s.answered:
			over++
		case now.Sub(s.at) > t.timeout():
			over++
			lost++
		}
	}
	if over > 0 {
		st.Loss = float64(lost) / float64(over)
	}
	return st
}
