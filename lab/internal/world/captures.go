package world

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"
)

// Captures are captures of network namespaces that come and go: those of hosts,
// and those of pods. The zero value has none. They are safe for concurrent use.
type Captures struct {
	mu     sync.Mutex
	all    []*namespaceCapture // those that are gone included
	pauses int                 // who wants no captures
}

// A namespaceCapture is the capture of a host, or of a pod's own namespace.
type namespaceCapture struct {
	*capture
	id   string
	name func() string
	gone bool
}

// Start captures in a network namespace. The ID is for End; name is asked for the
// name of the host whenever somebody wants packets, since a pod may become the
// gateway of another peering. Packets from and to the service addresses of API
// servers are left out, like those of the control plane itself.
func (cs *Captures) Start(ns *os.File, id string, name func() string, api []netip.AddrPort) error {
	c, err := startCapture(ns, id, api)
	if err != nil {
		return err
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.all = append(cs.all, &namespaceCapture{capture: c, id: id, name: name})
	if cs.pauses > 0 {
		return c.pause()
	}
	return nil
}

// keepGone is how many captures of pods and nodes that are gone are kept.
const keepGone = 16

// End ends the capture with that ID. What it has seen is kept, until too many are
// gone.
func (cs *Captures) End(id string) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	gone := 0
	for i := len(cs.all) - 1; i >= 0; i-- {
		c := cs.all[i]
		if !c.gone && c.id == id {
			c.gone = true
			c.close()
		}
		if c.gone {
			if gone++; gone > keepGone {
				cs.all = slices.Delete(cs.all, i, i+1)
			}
		}
	}
}

// Close ends all captures. What they have seen is gone.
func (cs *Captures) Close() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, c := range cs.all {
		if !c.gone {
			c.close()
		}
	}
	cs.all = nil
}

// Follow empties the captures' sockets now and then until ctx ends. Whoever asks
// for packets has them read at once.
func (cs *Captures) Follow(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, c := range cs.open() {
			c.catchUp()
		}
	}
}

func (cs *Captures) open() []*namespaceCapture {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(cs.all), func(c *namespaceCapture) bool { return c.gone })
}

// Pause stops all captures until resume is called, as often as Pause was, also
// when it failed. The error of resume says which captures do not go on.
func (cs *Captures) Pause() (resume func() error, err error) {
	all := func(do func(*capture) error) error {
		var errs []error
		for _, c := range cs.all {
			if !c.gone {
				errs = append(errs, do(c.capture))
			}
		}
		return errors.Join(errs...)
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.pauses++
	resume = func() error {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		if cs.pauses--; cs.pauses > 0 {
			return nil
		}
		return all((*capture).resume)
	}
	if cs.pauses == 1 {
		err = all((*capture).pause)
	}
	return resume, err
}

// named are all captures, under the names that their hosts have now. The names
// are asked for without our lock: a registry of pods that calls Start holds its
// own.
func (cs *Captures) named() []namedCapture {
	cs.mu.Lock()
	all := slices.Clone(cs.all)
	cs.mu.Unlock()
	out := make([]namedCapture, len(all))
	for i, c := range all {
		out[i] = namedCapture{c.name(), c.capture}
	}
	return out
}

// Sightings are the packets that have a token in their innermost payload, or are
// the SYN that is asked for, in the order of time.
func (cs *Captures) Sightings(q SightingQuery) ([]Sighting, error) {
	if q.Token == "" && !q.SYN.IsValid() {
		return nil, errors.New("sightings: say a token, or where a connection comes from")
	}
	var out []Sighting
	for _, c := range cs.named() {
		out = append(out, c.sightings(c.host, q)...)
	}
	sortSightings(out)
	return out, nil
}

// A Network is where packets of a network are seen that no host is in the middle
// of: on the hosts that have a link to it.
type Network struct {
	Name  string
	Hosts []string // host names
	Link  string   // the interface that each has to it
	// Between tells whether packets from one address to another are meant, which come to a host.
	Between func(src, dst netip.Addr) bool
	// Leaves tells whether packets are meant that leave a host by the link for an address that
	// none of the hosts has; nil: they are not.
	Leaves func(host string, dst netip.Addr) bool
}

// packets are those that came to a host of the network, and those that left one for elsewhere,
// each once.
func (n *Network) packets(cs *Captures, since, until time.Time) (packets []packet, lost int) {
	for _, c := range cs.named() {
		if !slices.Contains(n.Hosts, c.host) {
			continue
		}
		all, dropped := c.between(since, until)
		lost += dropped
		for _, p := range all {
			if c.linkName(p.ifindex) != n.Link {
				continue
			}
			d := decodeOutermost(p)
			if p.direction == In && n.Between(d.src.Addr(), d.dst.Addr()) || p.direction == Out && n.Leaves != nil && n.Leaves(c.host, d.dst.Addr()) {
				packets = append(packets, p)
			}
		}
	}
	return packets, lost
}

// Wire counts the packets that passed on a host, or in a network of that name;
// with ports those that entered the host by these interfaces.
func (cs *Captures) Wire(q WireQuery, ports []string, networks ...*Network) (WireReport, error) {
	packets, lost, err := cs.passed(q.On, q.Since, q.Until, ports, networks)
	if err != nil {
		return WireReport{}, err
	}
	return q.count(packets, lost), nil
}

// Sealed follows packets with a token through a tunnel past a host or a network;
// ports are as those of Wire.
func (cs *Captures) Sealed(q SealedQuery, ports []string, networks ...*Network) (SealedReport, error) {
	if q.Token == "" {
		return SealedReport{}, errors.New("sealed: say a token")
	}
	passed, _, err := cs.passed(q.On, q.Since, time.Time{}, ports, networks)
	if err != nil {
		return SealedReport{}, err
	}
	return sealed(cs.named(), q, passed), nil
}

func (cs *Captures) passed(on string, since, until time.Time, ports []string, networks []*Network) (packets []packet, lost int, err error) {
	for _, n := range networks {
		if n.Name == on {
			packets, lost = n.packets(cs, since, until)
			return packets, lost, nil
		}
	}
	c, err := cs.of(on)
	if err != nil {
		return nil, 0, err
	}
	packets, lost = c.entered(since, until, ports)
	return packets, lost, nil
}

// WritePcap writes all packets that there are as a pcapng file.
func (cs *Captures) WritePcap(w io.Writer) error { return writePcap(w, cs.named()) }

// of finds the capture of a host.
func (cs *Captures) of(host string) (namedCapture, error) {
	names := []string{}
	for _, c := range slices.Backward(cs.named()) { // who came back has an older one, too
		if c.host == host {
			return c, nil
		}
		names = append(names, c.host)
	}
	return namedCapture{}, fmt.Errorf("%w: nothing is captured on %q; there are %s", ErrNoTarget, host, joinNames(names))
}
