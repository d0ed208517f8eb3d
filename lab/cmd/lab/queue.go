package main

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// A queue hands groups to those who run them, the first first, and does not let
// more virtual machines run at a time than it is told.
type queue struct {
	mu      sync.Mutex
	waiting []*group
	limit   int // of machines that run beside other labs
	most    int // of machines where there is room, or no other lab
	// Virtual machines are emulated: none runs beside labs with containerd, of this
	// kernel or of kind.
	emulated bool
	// The machine has few processors: emulated machines and labs with containerd run alone, except
	// that a plain lab of this kernel is beside an emulated machine that leaves it room.
	few bool
	// Labs that have been handed out and are not down yet.
	machines int
	kinds    int
	real     int // of this kernel, with containerd
	others   int
	// Instances of inotify that labs of this kernel may have, and those that the labs that
	// run take.
	inotify, taken int
	change         *sync.Cond
}

// newQueue is for so many labs at a time. At most half of those that run however busy the
// machine is may be emulated machines, which take a processor each for themselves: the
// control planes outside of them, and what they are measured against, need the rest. A
// second one may use what processors have left, be it that no other lab is there any more.
// Labs of this kernel share so many instances of inotify.
//
// Emulated machines and labs with containerd (of this kernel, or of kind) do not run beside
// each other. On two cores whose page faults take 16 µs they were ready after 94 s and 58 s
// alone, and after more than fourteen minutes beside each other.
//
// On a machine of so few processors each of them runs alone: beside one other lab an emulated
// machine took three times as long there, and a row in a lab with containerd 6m27 in place of
// 1m29. There is one exception. Where page faults took 1.6 µs an emulated machine left the two
// processors a third of their time. Where it leaves such room, one lab of this kernel without
// containerd runs beside it.
func newQueue(all []*group, jobs int, emulated bool, processors, inotify int) *queue {
	q := &queue{waiting: slices.Clone(all), limit: jobs, most: jobs, emulated: emulated, few: processors < enoughProcessors, inotify: inotify}
	q.change = sync.NewCond(&q.mu)
	if emulated {
		q.limit = max(1, min(jobs, alwaysAtOnce)/2)
		q.most = min(jobs, max(2, q.limit))
	}
	return q
}

// enoughProcessors is how many it takes to have an emulated machine, or a lab with
// containerd, beside other labs without looking for room: each may keep two busy.
const enoughProcessors = 4

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
		q.taken += instances(g)
		q.waiting = slices.Delete(q.waiting, i, i+1)
		return g
	}
	return nil
}

// can tells whether a group can run beside those that do.
func (q *queue) can(g *group, room bool) bool {
	running := q.running(g)
	if all := q.machines + q.kinds + q.real + q.others; q.few && all > 0 && (q.heavy(running) || q.heavyRun()) {
		// Emulated machines begin before all others. So the machine that begins beside a plain lab
		// follows another machine, and that one left the lab its room.
		beside := running == &q.others && q.machines == 1 && room || running == &q.machines && q.others == 1
		if !q.emulated || all > 1 || !beside {
			return false
		}
	}
	if q.emulated && (running == &q.machines && q.kinds+q.real > 0 || (running == &q.kinds || running == &q.real) && q.machines > 0) {
		return false
	}
	switch running {
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
	case &q.real:
		if q.kinds > 0 {
			return false
		}
	}
	// What takes more than there is runs alone, and its nodes say what is missing.
	return q.taken == 0 || q.taken+instances(g) <= q.inotify
}

// inotifyLimit is what labs of this kernel may take together: this user's limit, less what
// the machine's own programs take, as systemd and the lab do.
func inotifyLimit() int {
	const kernels, others = 128, 16 // the kernel's default (inotify_user_setup in fs/notify/inotify)
	limit := kernels
	if b, err := os.ReadFile("/proc/sys/fs/inotify/max_user_instances"); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			limit = n
		}
	}
	return limit - others
}

// instances is how many instances of inotify (inotify(7)) a lab takes from this kernel's
// limit for a user: a control plane 10, a node with containerd and a kubelet 13, as counted
// in labs. Where none is left a kubelet does not start, and no message says why. Machines
// have a kernel of their own; clusters of kind take theirs from a limit that they raise.
func instances(g *group) int {
	if g.world != supervisor.Native {
		return 0
	}
	n := 0
	for _, c := range g.topology.Clusters {
		n += 10
		if c.Runtime == topology.RuntimeContainerd {
			n += 13 * c.Nodes
		}
	}
	return n
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

// heavy tells whether labs of this kind keep two processors busy.
func (q *queue) heavy(kind *int) bool {
	return kind == &q.kinds || kind == &q.real || kind == &q.machines && q.emulated
}

// heavyRun tells whether such a lab runs.
func (q *queue) heavyRun() bool {
	return q.kinds+q.real > 0 || q.emulated && q.machines > 0
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
	q.taken -= instances(g)
	q.change.Broadcast()
}
