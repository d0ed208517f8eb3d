package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A monitor watches what happens to the things we own. Everything else that
// happens on a host, such as a kube-proxy that rewrites its rules, is looked
// at for a few instructions and forgotten.
type monitor struct {
	changed chan struct{}
	conns   []*nl.Conn
	done    sync.WaitGroup
	closing <-chan struct{}
	stop    func()          // closes closing
	own     map[uint32]bool // port IDs of our own sockets

	mu     sync.Mutex
	links  map[int]linkEvent             // our links, by index, as last seen
	guests map[int]netstate.Link         // the same of gateways in other namespaces: routes lead there
	edited map[netstate.TableID]struct{} // since the last settle
	heard  uint32                        // generation of nftables of the last transaction that was told of
	news   chan struct{}                 // closed when heard or losses changes
	losses int                           // how often messages of nftables were lost, or may have been: heard may stay behind
	caught int                           // after how many of these losses heard was up to date again
}

// A receiver is a netlink socket ([nl.Conn]).
type receiver interface {
	Receive() ([]nl.Message, error)
}

// A linkEvent is what of a link we care about.
type linkEvent struct {
	state netstate.Link
	alias alias
}

// groups to listen to (rtnetlink(7)).
var routeGroups = []uint32{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_NEIGH,
	unix.RTNLGRP_IPV4_NETCONF,
}

func (ns *NetNS) openMonitor() (*monitor, error) {
	closing := make(chan struct{})
	m := &monitor{
		changed: make(chan struct{}, 1),
		closing: closing, stop: sync.OnceFunc(func() { close(closing) }),
		own:    map[uint32]bool{ns.rt.c.PID(): true, ns.nft.write.PID(): true},
		links:  map[int]linkEvent{},
		guests: map[int]netstate.Link{},
		edited: map[netstate.TableID]struct{}{},
		news:   make(chan struct{}),
	}
	start := func(family int, groups []uint32, handle func(nl.Message), lost func()) error {
		c, err := nl.Dial(family, nil)
		if err != nil {
			return err
		}
		m.conns = append(m.conns, c)
		enlarge(c)
		for _, g := range groups {
			if err := c.JoinGroup(g); err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
		m.done.Go(func() { m.watch(c, handle, lost) })
		return nil
	}
	err := start(unix.NETLINK_ROUTE, routeGroups, m.route, func() {})
	if err == nil {
		err = start(unix.NETLINK_NETFILTER, []uint32{unix.NFNLGRP_NFTABLES}, m.table, m.missed)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to changes: %w", err), m.close())
	}
	return m, nil
}

func (m *monitor) close() error {
	var errs []error
	m.stop()
	for _, c := range m.conns {
		errs = append(errs, c.Close())
	}
	m.done.Wait()
	return errors.Join(errs...)
}

// Changed yields a value after something of ours was touched, by anybody or,
// where the kernel does not say by whom, by ourselves: then the next pass
// finds nothing to do and is the last. Bursts are merged; a reader that is
// late misses nothing.
func (ns *NetNS) Changed() <-chan struct{} { return ns.mon.changed }

func (m *monitor) signal() {
	select {
	case m.changed <- struct{}{}:
	default: // a value is waiting already
	}
}

// deafness is how long the monitor waits after an error that stays, doubled from
// the least to the most: it must not keep a core busy, nor the loop that it calls.
const (
	leastDeafness = 50 * time.Millisecond
	mostDeafness  = 10 * time.Second
)

func (m *monitor) watch(c receiver, handle func(nl.Message), lost func()) {
	wait := time.Duration(0)
	for {
		msgs, err := c.Receive()
		switch {
		case err == nil:
			wait = 0
		case errors.Is(err, os.ErrClosed), errors.Is(err, unix.EBADF):
			return
		default:
			// ENOBUFS says that something was lost, any other that nobody knows what
			// was: look. More may be lost meanwhile, so that is after the wait.
			if wait > 0 {
				select {
				case <-m.closing:
					return
				case <-time.After(wait):
				}
			}
			wait = min(max(2*wait, leastDeafness), mostDeafness)
			lost()
			m.signal()
			continue
		}
		for _, msg := range msgs {
			handle(msg)
		}
	}
}

// route handles a message of rtnetlink.
func (m *monitor) route(msg nl.Message) {
	if m.own[msg.Header.PID] {
		return
	}
	b := msg.Data
	switch msg.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if m.link(b, msg.Header.Type == unix.RTM_DELLINK) {
			m.signal()
		}
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		if _, index, ok := parseAddress(b); ok && m.ours(index) {
			m.signal()
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if len(b) >= unix.SizeofRtMsg && b[5] == Protocol && binary.NativeEndian.Uint32(b[8:])&unix.RTM_F_CLONED == 0 {
			m.signal()
		}
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		if _, ours := parseRule(b); ours {
			m.signal()
		}
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		// What the kernel learns and forgets by itself comes from nobody.
		// It says the same of forwarding entries, but learns none here.
		index, fam := neighborLink(b)
		if (fam == unix.AF_BRIDGE || msg.Header.PID != 0) && m.hasNeighbors(index) {
			m.signal()
		}
	case unix.RTM_NEWNETCONF:
		// Somebody sets forwarding of one link rarely, and which links that
		// are not ours matter is known only to the next pass.
		if index, forwarding, ok := parseNetconf(b); ok && (forwarding || m.ours(index)) {
			m.signal()
		}
	}
}

// link reports whether a link of ours became another than it was.
func (m *monitor) link(b []byte, gone bool) bool {
	if len(b) < unix.SizeofIfInfomsg || b[0] != unix.AF_UNSPEC {
		return false // a bridge speaking of its ports
	}
	_, l, err := parseLink(b)
	if err != nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if guest, met := m.guests[l.index]; met || l.guest {
		m.guests[l.index] = l.state
		if gone {
			delete(m.guests, l.index)
		}
		return gone || !met || guest != l.state
	}
	was, known := m.links[l.index]
	if gone || !l.ours {
		delete(m.links, l.index)
		return known || gone && l.ours
	}
	now := linkEvent{l.state, l.alias}
	m.links[l.index] = now
	return now != was
}

func (m *monitor) ours(index int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.links[index]
	return ok
}

// hasNeighbors reports whether the link is ours, and neighbours on it can be.
func (m *monitor) hasNeighbors(index int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, ok := m.links[index]
	return ok && l.state.Kind.HasNeighbors()
}

// table handles a message of nftables. The kernel tells of one transaction
// after the other, and of each that it is complete.
func (m *monitor) table(msg nl.Message) {
	if msg.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return
	}
	typ := msg.Header.Type & 0xff
	m.mu.Lock()
	defer m.mu.Unlock()
	if typ == unix.NFT_MSG_NEWGEN {
		m.heard = generationOf(msg.Data)
		close(m.news)
		m.news = make(chan struct{})
		return
	}
	id, ours := tableOf(msg.Data)
	switch {
	case !ours:
	case !m.own[msg.Header.PID]:
		m.edited[id] = struct{}{}
		m.signal()
	case typ == unix.NFT_MSG_NEWTABLE:
		delete(m.edited, id) // we have replaced what was edited
	}
}

// missed notes that messages of nftables were lost, or may have been.
func (m *monitor) missed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.losses++
	close(m.news)
	m.news = make(chan struct{})
}

// Messages that the monitor has not read yet are in its socket, however late a busy machine
// reads them. Only those that the kernel had no room for are not.
const (
	hearsLate = 10 * time.Second
	// hearsLost is how long hear waits when it knows that messages were lost: the last one may be among them.
	hearsLost = 100 * time.Millisecond
)

// hear waits until the monitor has read what was told up to a generation of
// nftables. losses is what m.losses was before the kernel was asked for that generation.
func (m *monitor) hear(generation uint32, losses int) {
	began, patience := time.Now(), hearsLate
	for {
		m.mu.Lock()
		behind, news := int32(m.heard-generation) < 0, m.news
		if !behind {
			m.caught = max(m.caught, losses)
		}
		if m.losses > m.caught {
			patience = hearsLost
		}
		m.mu.Unlock()
		if !behind {
			return
		}
		select {
		case <-news:
		case <-time.After(patience - time.Since(began)):
			return
		}
	}
}

// settle tells n which tables somebody else has touched since we wrote them.
// What the monitor has read may be from before that, so it reads the rest first.
func (m *monitor) settle(n *nft) error {
	m.mu.Lock()
	edits, losses := len(m.edited), m.losses
	m.mu.Unlock()
	if edits == 0 {
		return nil
	}
	now, err := n.generation()
	if err != nil {
		return err
	}
	m.hear(now, losses)
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range m.edited {
		n.edited[id] = true
	}
	clear(m.edited)
	return nil
}

// know tells the monitor which links are ours, for those that were there
// before it.
func (m *monitor) know(links linkTable) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range links.byName {
		if _, ok := m.links[l.index]; l.ours && !ok {
			m.links[l.index] = linkEvent{l.state, l.alias}
		}
	}
}
