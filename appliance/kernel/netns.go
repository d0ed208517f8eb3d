package kernel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A NetNS is a handle on one network namespace. Its methods may be called
// from any goroutine; Observe and Apply wait for each other.
type NetNS struct {
	cfg       Config
	logger    *slog.Logger
	impl      Implementation // Kernel or Userspace
	fd        int            // of the namespace
	elsewhere bool           // not all threads of the process are in it
	thread    *resident      // that is in it, where no other one is
	around    *around        // the namespace around it; nil: there is none

	mu  sync.Mutex
	nl  *netlink.Handle
	rt  *rtnl
	nft *nft

	// wgMu is for WireGuard, and taken after mu where both are: who asks for a handshake, or
	// begins one, must not wait for a pass that reads and changes everything else.
	wgMu   sync.Mutex
	wg     *wgctrl.Client
	user   map[string]*userDevice // WireGuard devices served by us, by link
	begun  map[peerOf]time.Time   // when Rehandshake began anew with a peer last
	memory *memory

	stop chan struct{} // ends watchPeers; nil: it does not run
	done sync.WaitGroup

	mon      *monitor
	counters [2]*os.File // of InNoRoutes
}

// Open returns a NetNS for the namespace of the calling thread, or for that of
// Config.NetNS, which takes CAP_SYS_ADMIN. Its sockets stay bound to that
// namespace whatever thread later uses them.
func Open(cfg Config) (_ *NetNS, err error) {
	ns := &NetNS{cfg: cfg, logger: cfg.Logger, user: map[string]*userDevice{}, begun: map[peerOf]time.Time{}, fd: -1}
	if ns.logger == nil {
		ns.logger = slog.New(slog.DiscardHandler)
	}
	// All of this must happen on one thread, which the caller has chosen.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer func() {
		if err != nil {
			err = errors.Join(err, ns.Close())
		}
	}()
	if cfg.NetNS == "" {
		return ns, ns.open()
	}
	if ns.around, err = openAround(); err != nil {
		return nil, err
	}
	if ns.thread, err = enter(cfg.NetNS); err != nil {
		return nil, err
	}
	return ns, ns.Do(ns.open)
}

// open opens everything in the namespace of the calling thread.
func (ns *NetNS) open() (err error) {
	if ns.fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("network namespace of this thread: %w", err)
	}
	ns.elsewhere = ns.around != nil || !everyThreadIn(ns.fd)
	if ns.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open netlink socket: %w", err)
	}
	if ns.rt, err = openRTNL(); err != nil {
		return err
	}
	if ns.nft, err = openNFT(); err != nil {
		return err
	}
	if err := ns.chooseImplementation(); err != nil {
		return err
	}
	dir := ns.cfg.StateDir
	if ns.impl == Kernel {
		dir = "" // its devices outlive this process
	}
	ns.memory = newMemory(dir, ns.logger)
	if ns.wg, err = wgctrl.New(); err != nil {
		return fmt.Errorf("open wireguard socket: %w", err)
	}
	for i, name := range []string{"netstat", "snmp6"} {
		// Without IPv6 there is no snmp6.
		if ns.counters[i], err = os.Open("/proc/thread-self/net/" + name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if ns.mon, err = ns.openMonitor(); err != nil {
		return err
	}
	if ns.cfg.PrivateKey != nil { // else there are no devices
		stop := make(chan struct{})
		ns.stop = stop
		ns.done.Go(func() { ns.watchPeers(stop) })
	}
	return nil
}

// everyThreadIn reports whether all threads of the process are in the network
// namespace, as they are in a daemon. The main thread alone tells nothing: a
// test may run on it.
func everyThreadIn(fd int) bool {
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(threads) == 0 {
		return false
	}
	for _, t := range threads {
		if !isFile(t, fd) {
			return false
		}
	}
	return true
}

// isFile reports whether the path leads to the open file.
func isFile(path string, fd int) bool {
	var a, b unix.Stat_t
	if unix.Stat(path, &a) != nil || unix.Fstat(fd, &b) != nil {
		return false
	}
	return a.Dev == b.Dev && a.Ino == b.Ino
}

func (ns *NetNS) chooseImplementation() error {
	switch ns.cfg.Implementation {
	case Userspace:
		ns.impl = Userspace
	case Kernel, Auto, "":
		err := ns.probeLink(string(netstate.KindWireGuard))
		switch {
		case err == nil:
			ns.impl = Kernel
		case ns.cfg.Implementation == Kernel:
			return fmt.Errorf("WireGuard of the kernel is demanded: %w", err)
		default:
			ns.impl = Userspace
		}
	default:
		return fmt.Errorf("implementation %q: must be %s, %s or %s", ns.cfg.Implementation, Auto, Kernel, Userspace)
	}
	return nil
}

// Close releases the sockets. It changes nothing in the kernel, except that
// links of userspace WireGuard end with the process that serves them.
func (ns *NetNS) Close() error {
	if ns.stop != nil {
		close(ns.stop)
		ns.stop = nil
	}
	ns.done.Wait()
	ns.mu.Lock()
	defer ns.mu.Unlock()
	var errs []error
	if ns.mon != nil {
		errs = append(errs, ns.mon.close())
	}
	ns.wgMu.Lock()
	defer ns.wgMu.Unlock()
	for dev, u := range ns.user {
		_, _ = ns.readWireGuard(dev) // the last chance to remember
		u.dev.Close()
	}
	ns.user = map[string]*userDevice{}
	if ns.wg != nil {
		errs = append(errs, ns.wg.Close())
	}
	if ns.nft != nil {
		errs = append(errs, ns.nft.close())
	}
	if ns.rt != nil {
		errs = append(errs, ns.rt.c.Close())
	}
	if ns.nl != nil {
		ns.nl.Close()
	}
	for _, f := range ns.counters {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if ns.around != nil {
		errs = append(errs, ns.around.close())
	}
	if ns.thread != nil {
		ns.thread.leave()
	}
	if ns.fd >= 0 {
		errs = append(errs, unix.Close(ns.fd))
	}
	ns.mon, ns.wg, ns.nft, ns.rt, ns.nl, ns.counters, ns.fd = nil, nil, nil, nil, nil, [2]*os.File{}, -1
	ns.around, ns.thread = nil, nil
	return errors.Join(errs...)
}

// Implementation says which WireGuard is in use: Kernel or Userspace.
func (ns *NetNS) Implementation() Implementation { return ns.impl }

// Do calls f on a thread that is in the namespace: what f opens belongs to it.
// f must not call Do.
func (ns *NetNS) Do(f func() error) error {
	switch {
	case ns.thread != nil:
		return ns.thread.do(f)
	case ns.elsewhere:
		return onThreadIn(ns.fd, f)
	default:
		return f()
	}
}

// Observe returns what is in place of the things we own.
func (ns *NetNS) Observe(ctx context.Context) (netstate.State, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	return ns.observe(ctx)
}

func (ns *NetNS) observe(ctx context.Context) (netstate.State, error) {
	links, err := ns.listLinks()
	if err != nil {
		return netstate.State{}, err
	}
	ns.mon.know(links)
	s, err := ns.listRouting(links)
	if err != nil {
		return s, err
	}
	s.Settings = links.foreignSettings()
	if s.Neighbors, err = ns.listNeighbors(links); err != nil {
		return s, err
	}
	for _, l := range links.byName {
		if l.state.Kind != netstate.KindVXLAN { // of ours: others have no state
			continue // only there can entries be ours
		}
		entries, err := ns.listFDB(l)
		if err != nil {
			return s, err
		}
		s.FDB = append(s.FDB, entries...)
	}
	for _, l := range links.byName {
		if l.ours {
			s.Links = append(s.Links, ns.withPeer(l))
		}
	}
	if s.WireGuard, err = ns.observeWireGuard(links); err != nil {
		return s, err
	}
	if err := ns.mon.settle(ns.nft); err != nil {
		return s, err
	}
	if s.Tables, err = ns.nft.observe(); err != nil {
		return s, err
	}
	return s.Normalized(), ctx.Err()
}

// listRouting returns our addresses, routes and rules.
func (ns *NetNS) listRouting(links linkTable) (s netstate.State, err error) {
	if s.Addresses, err = ns.listAddresses(links); err != nil {
		return s, err
	}
	if s.Routes, err = ns.listRoutes(links.names); err != nil {
		return s, err
	}
	s.Rules, err = ns.listRules()
	return s, err
}

// Apply carries out the changes. It goes on after a failure and returns all
// failures joined, so that one bad route does not hold back the others.
// What is gone already is no failure.
func (ns *NetNS) Apply(ctx context.Context, c netstate.Changes) error {
	if c.Empty() {
		return nil
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()

	errs := ns.applyLinks(&c)
	// A peer that is blocked goes at once. Nobody gets in by a device that has had no peer before the
	// rules are there, unless the kernel refuses those.
	var later []netstate.WireGuard
	for _, w := range c.SetWireGuard {
		if ns.hasNoPeers(w.Dev) {
			later = append(later, w)
			continue
		}
		errs = appendError(errs, "wireguard "+w.Dev, ns.setWireGuard(w))
	}
	links, err := ns.listLinks()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	errs = slices.Concat(errs,
		ns.setSettings(c.SetSettings, links.index),
		ns.addAddresses(c.AddAddresses, links.index),
		ns.setNeighbors(c.SetNeighbors, links.index),
		ns.setFDB(c.SetFDB, links.index),
		ns.addRules(c.AddPassRules),
		ns.addRoutes(c.AddRoutes, false, links.index),
		ns.addRoutes(c.ReplaceRoutes, true, links.index),
		ns.addRules(c.AddRules))
	errs = slices.Concat(errs, ns.nft.apply(c.SetTables, c.DeleteTables))
	for _, w := range later {
		errs = appendError(errs, "wireguard "+w.Dev, ns.setWireGuard(w))
	}
	errs = appendError(errs, "evict", ns.evict(c.Evict))

	restore, err := ns.collateral(c, links)
	if err != nil {
		errs = append(errs, err)
	}
	errs = slices.Concat(errs,
		ns.deleteAllRules(c.DeleteRules),
		ns.deleteRoutes(c.DeleteRoutes, links.index),
		ns.deleteAllRules(c.DeletePassRules),
		ns.deleteFDB(c.DeleteFDB, links.index),
		ns.deleteNeighbors(c.DeleteNeighbors, links.index),
		ns.deleteAddresses(c.DeleteAddresses, links.index))
	if restore != nil {
		errs = slices.Concat(errs, restore())
	}
	for _, l := range c.DeleteLinks {
		errs = appendError(errs, "delete link "+l.Name, ns.deleteLink(l.Name))
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// applyLinks adds, changes and recreates links. Links that are to go and
// stand in the way of new ones go first.
func (ns *NetNS) applyLinks(c *netstate.Changes) []error {
	var errs []error
	fresh := slices.Concat(c.RecreateLinks, c.AddLinks)
	c.DeleteLinks = slices.DeleteFunc(slices.Clone(c.DeleteLinks), func(old netstate.Link) bool {
		if !slices.ContainsFunc(fresh, func(l netstate.Link) bool { return inTheWay(old, l) }) {
			return false
		}
		errs = appendError(errs, "delete link "+old.Name, ns.deleteLink(old.Name))
		return true
	})
	for _, l := range c.RecreateLinks {
		errs = appendError(errs, "delete link "+l.Name, ns.deleteLink(l.Name))
	}
	for _, l := range fresh {
		errs = appendError(errs, "link "+l.Name, ns.addLink(l))
	}
	for _, l := range c.ChangeLinks {
		errs = appendError(errs, "link "+l.Name, ns.changeLink(l))
	}
	return errs
}

// inTheWay reports whether the kernel does not allow both links: two of
// WireGuard would want the same port, two of Geneve or VXLAN the same packets.
func inTheWay(a, b netstate.Link) bool {
	if a.Kind != b.Kind {
		return false
	}
	return a.Kind == netstate.KindWireGuard || a.Geneve.VNI == b.Geneve.VNI && a.Geneve.Port == b.Geneve.Port &&
		a.VXLAN.VNI == b.VXLAN.VNI && a.VXLAN.Port == b.VXLAN.Port
}

// collateral returns a function that puts back what the kernel will take
// away together with what is deleted: with the last address of a link its
// routes, with a primary address those of the same prefix, with a rule
// another one that has all that the first has and more. It returns nil when
// that can't happen.
func (ns *NetNS) collateral(c netstate.Changes, links linkTable) (func() []error, error) {
	if len(c.DeleteAddresses)+len(c.DeleteRules)+len(c.DeletePassRules) == 0 {
		return nil, nil
	}
	want, err := ns.listRouting(links)
	if err != nil {
		return nil, err
	}
	want = want.Normalized()
	want.Addresses = subtract(want.Addresses, c.DeleteAddresses)
	want.Routes = subtract(want.Routes, c.DeleteRoutes)
	want.Rules = subtract(subtract(want.Rules, c.DeleteRules), c.DeletePassRules)
	return func() []error {
		have, err := ns.listRouting(links)
		if err != nil {
			return []error{err}
		}
		lost := netstate.Diff(have, want)
		return slices.Concat(
			ns.addAddresses(lost.AddAddresses, links.index),
			ns.addRules(lost.AddPassRules),
			ns.addRoutes(lost.AddRoutes, false, links.index),
			ns.addRules(lost.AddRules))
	}, nil
}

func subtract[T comparable](all, some []T) []T {
	drop := make(map[T]bool, len(some))
	for _, v := range some {
		drop[v] = true
	}
	return slices.DeleteFunc(slices.Clone(all), func(v T) bool { return drop[v] })
}

func appendError(errs []error, what string, err error) []error {
	if err == nil {
		return errs
	}
	return append(errs, fmt.Errorf("%s: %w", what, err))
}
