package controllers

import (
	"fmt"
	"sync"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// marks is the label of a Node by which a test knows what a pass has seen.
const marks = "test/mark"

// plans records what the controller knew when it made its plans.
type plans struct {
	mu     sync.Mutex
	marks  int
	latest cluster.Snapshot
	passes map[string]float64 // how many passes had ended when a mark was first seen
}

// plan records the objects, and plans as [planWithBug] does.
func (p *plans) plan(s cluster.Snapshot) plan.Result {
	before, err := countPasses()
	p.mu.Lock()
	p.latest = s
	for _, n := range s.Nodes {
		if mark := n.Labels[marks]; mark != "" && err == nil && p.passes != nil {
			if _, seen := p.passes[mark]; !seen {
				p.passes[mark] = before
			}
		}
	}
	p.mu.Unlock()
	return planWithBug(s)
}

// mark returns a value that no Node has had.
func (p *plans) mark() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.passes == nil {
		p.passes = map[string]float64{}
	}
	p.marks++
	return fmt.Sprint("mark-", p.marks)
}

// seen returns how many passes had ended when a mark was seen.
func (p *plans) seen(mark string) (passes float64, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	passes, ok = p.passes[mark]
	return passes, ok
}

// sees reports whether the objects of the controller's latest plan are such.
func (p *plans) sees(ok func(cluster.Snapshot) bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return ok(p.latest)
}
