package world

import (
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// routerWANInterface is the link of a router to the WAN.
const routerWANInterface = "eth1"

// An ImpairRequest makes the link of a router, or of a host outside, to the WAN
// do something else to the packets that are sent into it.
type ImpairRequest struct {
	Host string `json:"host"` // "milan/router", "user"
	// With replaces all that the link did; nil: what the topology says.
	With *topology.Impairment `json:"with,omitempty"`
}

// impairment is the link of a host to the WAN, and what the topology says of it.
func (s Spec) impairment(host string) (link string, i topology.Impairment, ok bool) {
	for _, c := range s.Clusters {
		if host == c.Name+"/"+RouterHost {
			return routerWANInterface, c.Impairment, true
		}
	}
	for _, o := range s.Outside {
		if host == o.Name && o.Via == "" {
			return NodeInterface, o.Impairment, true
		}
	}
	return "", i, false
}

// impair changes what a link does to the packets that are sent into it.
func (a *agent) impair(req ImpairRequest) error {
	a.mu.Lock()
	n := a.network
	a.mu.Unlock()
	if n == nil {
		return errNotBuilt
	}
	link, with, ok := n.spec.impairment(req.Host)
	h, there := n.host(req.Host)
	if !ok || !there {
		return fmt.Errorf("%w: %s has no link to the wide area network", ErrNoTarget, req.Host)
	}
	if req.With != nil {
		with = *req.With
	}
	if err := h.ns.impair(link, with); err != nil {
		return fmt.Errorf("%s: %w", req.Host, err)
	}
	return nil
}

// impair sets what a link does to the packets that are sent into it. Those that
// wait in it go on waiting, unless there is nothing to wait for any more.
func (n *Namespace) impair(name string, i topology.Impairment) error {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	qdiscs, err := n.nl.QdiscList(l)
	if err != nil {
		return fmt.Errorf("tc qdisc show dev %s: %w", name, err)
	}
	attrs := netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	for _, q := range qdiscs {
		now, ok := q.(*netlink.Netem)
		// A change leaves a rate as it was when it says none.
		if !ok || i != (topology.Impairment{}) && (i.Rate > 0 || now.Rate64 == 0) {
			continue
		}
		if err := n.nl.QdiscDel(now); err != nil {
			return fmt.Errorf("tc qdisc del dev %s root: %w", name, err)
		}
	}
	if i == (topology.Impairment{}) {
		return nil
	}
	q := netlink.NewNetem(attrs, netlink.NetemQdiscAttrs{
		Latency: uint32(i.Delay.Microseconds()), Jitter: uint32(i.Jitter.Microseconds()),
		Loss: float32(i.Loss), ReorderProb: float32(i.Reorder), Rate64: uint64(i.Rate) / 8,
	})
	if err := n.nl.QdiscReplace(q); err != nil {
		return fmt.Errorf("tc qdisc replace dev %s root netem %v: %w", name, i, err)
	}
	return nil
}
