package main

import (
	"slices"
	"sync"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
)

// A queue hands groups to those who run them, the first first, and does not let
// more virtual machines run at a time than it is told.
type queue struct {
	mu       sync.Mutex
	waiting  []*group
	machines int // that may start
	// alone is how many may start when there are only machines left; native labs
	// that have been handed out and are not down yet are counted.
	alone, native int
	others        int // labs of other worlds than kind that run
	change        *sync.Cond
}

// newQueue is for so many labs at a time. At most half of them may be emulated machines,
// which take a processor each for themselves: the control planes outside of
// them, and what they are measured against, need the rest. When nothing else is
// left, a second one may use the processors that native labs have used.
func newQueue(all []*group, jobs int, emulated bool) *queue {
	q := &queue{waiting: slices.Clone(all), machines: jobs}
	q.change = sync.NewCond(&q.mu)
	if emulated {
		q.machines = max(1, jobs/2)
		q.alone = min(jobs, max(2, q.machines)) - q.machines
	}
	return q
}

// take is the group to run now, for which it waits as long as what is left has to
// wait for labs that run. It is nil when all are taken.
func (q *queue) take() *group {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		if g := q.pick(); g != nil || len(q.waiting) == 0 {
			return g
		}
		q.change.Wait()
	}
}

// pick is the group that can run now, for who has the lock; nil: what is left waits for
// the labs that run.
func (q *queue) pick() *group {
	for i, g := range q.waiting {
		switch g.world {
		case kind.World:
			// An engine switches forwarding on for this machine, and the last lab off
			// again. Pods of others, which have what the machine has when they start,
			// would differ from those before them.
			if q.others > 0 || slices.ContainsFunc(q.waiting, func(g *group) bool { return g.world != kind.World }) {
				continue
			}
		case supervisor.VM:
			if q.machines == 0 && q.onlyMachines() {
				q.machines, q.alone = q.alone, 0
			}
			if q.machines == 0 {
				continue
			}
			q.machines--
			q.others++
		default:
			q.native++
			q.others++
		}
		q.waiting = slices.Delete(q.waiting, i, i+1)
		return g
	}
	return nil
}

// onlyMachines tells whether no native lab runs or waits. Those of kind come last.
func (q *queue) onlyMachines() bool {
	return q.native == 0 && !slices.ContainsFunc(q.waiting, func(g *group) bool { return g.world != supervisor.VM && g.world != kind.World })
}

// empty tells whether no group waits any more.
func (q *queue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting) == 0
}

// done tells that a group's lab is down.
func (q *queue) done(g *group) {
	q.mu.Lock()
	defer q.mu.Unlock()
	defer q.change.Broadcast()
	switch g.world {
	case kind.World:
		return
	case supervisor.VM:
		q.machines++
	default:
		q.native--
	}
	q.others--
}
