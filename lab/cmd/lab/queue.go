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
	// alone is how many may start when there are only machines left; other labs
	// that have been handed out and are not down yet are counted.
	alone, native int
	kinds, real   int // labs of kind that run, and of this kernel with containerd
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
		switch {
		case g.world == supervisor.VM:
			if q.machines == 0 && q.onlyMachines() {
				q.machines, q.alone = q.alone, 0
			}
			if q.machines == 0 {
				continue
			}
			q.machines--
		// An engine switches forwarding on for this machine, and the last lab off
		// again. Pods of containerd have what the machine has when they start: they
		// would differ from those before them.
		case g.world == kind.World:
			if q.real > 0 {
				continue
			}
			q.kinds++
		case g.topology.Containerd():
			if q.kinds > 0 {
				continue
			}
			q.real++
		default:
			q.native++
		}
		q.waiting = slices.Delete(q.waiting, i, i+1)
		return g
	}
	return nil
}

// onlyMachines tells whether no lab of another world runs or waits.
func (q *queue) onlyMachines() bool {
	return q.native+q.kinds+q.real == 0 && !slices.ContainsFunc(q.waiting, func(g *group) bool { return g.world != supervisor.VM })
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
	switch {
	case g.world == supervisor.VM:
		q.machines++
	case g.world == kind.World:
		q.kinds--
	case g.topology.Containerd():
		q.real--
	default:
		q.native--
	}
}
