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
	mu      sync.Mutex
	waiting []*group
	limit   int // of machines that run beside other labs
	most    int // of machines where there is room, or no other lab
	// Labs that have been handed out and are not down yet.
	machines int
	kinds    int
	real     int // of this kernel, with containerd
	others   int
	change   *sync.Cond
}

// newQueue is for so many labs at a time. At most half of them may be emulated machines,
// which take a processor each for themselves: the control planes outside of
// them, and what they are measured against, need the rest. A second one may use what
// processors have left, be it that no other lab is there any more.
func newQueue(all []*group, jobs int, emulated bool) *queue {
	q := &queue{waiting: slices.Clone(all), limit: jobs, most: jobs}
	q.change = sync.NewCond(&q.mu)
	if emulated {
		q.limit = max(1, jobs/2)
		q.most = min(jobs, max(2, q.limit))
	}
	return q
}

// take is the group to run now, for which it waits as long as what is left has to
// wait for labs that run. It is nil when all are taken. room says that the machine's
// processors have something to do for one more lab, whatever it is.
func (q *queue) take(room bool) *group {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		if g := q.pick(room); g != nil || len(q.waiting) == 0 {
			return g
		}
		q.change.Wait()
	}
}

// pick is the group that can run now, for who has the lock; nil: what is left waits for
// the labs that run.
func (q *queue) pick(room bool) *group {
	for i, g := range q.waiting {
		if !q.can(g, room) {
			continue
		}
		*q.running(g)++
		q.waiting = slices.Delete(q.waiting, i, i+1)
		return g
	}
	return nil
}

// can tells whether a group can run beside those that do.
func (q *queue) can(g *group, room bool) bool {
	switch q.running(g) {
	case &q.machines:
		if room || q.onlyMachines() {
			return q.machines < q.most
		}
		return q.machines < q.limit
	// An engine switches forwarding on for this machine, and the last lab off
	// again. Pods of containerd have what the machine has when they start: they
	// would differ from those before them.
	case &q.kinds:
		return q.real == 0
	// A node with containerd and a kubelet takes 13 of the 128 instances of inotify that
	// a user has by default, a control plane 10. Two labs of four such nodes and two
	// others took more, and nodes were not ready then (inotify(7)).
	case &q.real:
		return q.kinds+q.real == 0
	}
	return true
}

// running is the number of labs of the group's kind.
func (q *queue) running(g *group) *int {
	switch {
	case g.world == supervisor.VM:
		return &q.machines
	case g.world == kind.World:
		return &q.kinds
	case g.topology.Containerd():
		return &q.real
	}
	return &q.others
}

// onlyMachines tells whether no lab of another world runs or waits.
func (q *queue) onlyMachines() bool {
	return q.kinds+q.real+q.others == 0 && !slices.ContainsFunc(q.waiting, func(g *group) bool { return g.world != supervisor.VM })
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
	*q.running(g)--
	q.change.Broadcast()
}
