package main

import (
	"slices"
	"sync"

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
}

// newQueue is for so many labs at a time. At most half of them may be emulated machines,
// which take a processor each for themselves: the control planes outside of
// them, and what they are measured against, need the rest. When nothing else is
// left, a second one may use the processors that native labs have used.
func newQueue(all []*group, jobs int, emulated bool) *queue {
	q := &queue{waiting: slices.Clone(all), machines: jobs}
	if emulated {
		q.machines = max(1, jobs/2)
		q.alone = min(jobs, max(2, q.machines)) - q.machines
	}
	return q
}

// next is the group to run now. It is nil when all are taken, or when what is
// left waits for the labs that run: whoever runs those comes back for it.
func (q *queue) next() *group {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, g := range q.waiting {
		if g.world == supervisor.VM {
			if q.machines == 0 && q.onlyMachines() {
				q.machines, q.alone = q.alone, 0
			}
			if q.machines == 0 {
				continue
			}
			q.machines--
		} else {
			q.native++
		}
		q.waiting = slices.Delete(q.waiting, i, i+1)
		return g
	}
	return nil
}

// onlyMachines tells whether no native lab runs or waits.
func (q *queue) onlyMachines() bool {
	return q.native == 0 && !slices.ContainsFunc(q.waiting, func(g *group) bool { return g.world != supervisor.VM })
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
	if g.world == supervisor.VM {
		q.machines++
	} else {
		q.native--
	}
}
