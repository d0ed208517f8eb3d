// Package pace measures how much slower a machine is at present than when it has
// nothing else to do. What must happen within a time is given more of it
// where other work takes processors away.
package pace

import (
	"context"
	"crypto/sha256"
	"runtime"
	"slices"
	"sync"
	"time"
)

const (
	// interval is the pause between two samples: with work it makes the meter take
	// some 2 % of a processor.
	interval = 100 * time.Millisecond
	// work is how long a sample's computation takes at best: about what a daemon
	// computes before it waits for the next event.
	work = 2 * time.Millisecond
	// memory is how long samples are kept: longer than any step takes.
	memory = 30 * time.Minute
	// still is what a piece of work takes at least of a machine that stood still. What
	// takes less had to wait for a processor, as happens where there is other work.
	still = 50 * time.Millisecond
)

// Most is the slowest that a machine is taken for. What a piece of work takes beyond
// that is time in which the machine stood still: see [Meter.Stalled].
const Most = 5

// A Meter computes the same thing again and again and remembers how long that
// took.
type Meter struct {
	rounds int     // of the computation
	most   float64 // the slowest that the machine is taken for; 0: Most

	mu      sync.Mutex
	best    time.Duration
	samples []sample  // in the order of time
	due     time.Time // when the next one should begin
}

type sample struct {
	at   time.Time // when it ended
	took time.Duration
}

// Start returns a meter that runs until ctx ends, and takes the machine for most times as
// slow as at best when it is slower than that: from 1 to Most.
func Start(ctx context.Context, most float64) *Meter {
	m := &Meter{rounds: 1, most: most}
	for compute(m.rounds) < work {
		m.rounds *= 2
	}
	m.best = compute(m.rounds)
	for range 10 {
		m.best = min(m.best, compute(m.rounds))
	}
	go m.run(ctx)
	return m
}

type key struct{}

// With returns a context that carries a meter.
func With(ctx context.Context, m *Meter) context.Context { return context.WithValue(ctx, key{}, m) }

// From returns the meter of a context, or nil if it carries none. A nil meter says that the machine is as
// quick as ever.
func From(ctx context.Context) *Meter {
	m, _ := ctx.Value(key{}).(*Meter)
	return m
}

func (m *Meter) run(ctx context.Context) {
	tick := time.NewTimer(interval)
	defer tick.Stop()
	for {
		due := time.Now().Add(interval)
		m.mu.Lock()
		m.due = due
		m.mu.Unlock()
		tick.Reset(interval)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		compute(m.rounds)
		m.add(time.Now(), time.Since(due)) // waiting for a processor is part of it
	}
}

func (m *Meter) add(at time.Time, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.best, m.due = min(m.best, took), time.Time{}
	m.samples = append(m.samples, sample{at, took})
	if old := slices.IndexFunc(m.samples, func(s sample) bool { return at.Sub(s.at) < memory }); old > 1000 {
		m.samples = slices.Delete(m.samples, 0, old)
	}
}

// Since returns how many times as long as at best the machine has taken on
// average since a moment: 1 when it had nothing else to do, and no more than the meter was
// started for, which is 5 where nobody said otherwise. A nil
// meter, and one that has no sample since then, says 1.
func (m *Meter) Since(t time.Time) float64 { return m.Between(t, time.Time{}) }

// Between is Since for what ended at a moment; the zero time is now.
func (m *Meter) Between(from, to time.Time) float64 {
	if m == nil {
		return 1
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var sum time.Duration
	n := 0
	for i := len(m.samples) - 1; i >= 0 && !m.samples[i].at.Before(from); i-- {
		if !to.IsZero() && m.samples[i].at.After(to) {
			continue
		}
		sum += m.samples[i].took
		n++
	}
	if n == 0 || m.best <= 0 {
		return 1
	}
	return min(m.limit(), max(1, float64(sum)/float64(n)/float64(m.best)))
}

func (m *Meter) limit() float64 {
	if m.most == 0 {
		return Most
	}
	return m.most
}

// Longer returns a time that is as much longer as the machine was slower from one moment
// to another, and by as much as it stood still; the zero time is now.
func (m *Meter) Longer(d time.Duration, from, to time.Time) time.Duration {
	return time.Duration(float64(d)*m.Between(from, to)) + m.Stalled(from, to)
}

// Stalled returns for how long the machine did nothing at all from one moment to another; the
// zero time is now. A host that gives a virtual machine no processor for seconds, or does not
// answer its disks, makes one piece of work take that long.
func (m *Meter) Stalled(from, to time.Time) time.Duration {
	if m == nil {
		return 0
	}
	now := time.Now()
	if to.IsZero() {
		to = now
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var sum time.Duration
	count := func(s sample) {
		if s.took < still {
			return
		}
		begin := later(s.at.Add(Most*m.best-s.took), from)
		sum += max(0, earlier(s.at, to).Sub(begin))
	}
	for i := len(m.samples) - 1; i >= 0 && m.samples[i].at.After(from); i-- {
		count(m.samples[i])
	}
	if !m.due.IsZero() { // who asks may have got a processor before the meter
		count(sample{now, now.Sub(m.due)})
	}
	return sum
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// compute does so many rounds of a computation and returns how long it took.
func compute(rounds int) time.Duration {
	start := time.Now()
	var sum [sha256.Size]byte
	for range rounds {
		sum = sha256.Sum256(sum[:])
	}
	runtime.KeepAlive(sum) // or the compiler would leave it out
	return time.Since(start)
}
