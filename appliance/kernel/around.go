package kernel

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// peerGroup is the group of the ends of our veth pairs that are in the
// namespace around ours. It is not linkGroup: who looks after that namespace
// would take them for its own.
const peerGroup = linkGroup + 1

// An around is the namespace around the one that a NetNS works in.
type around struct {
	fd        int
	elsewhere bool // not all threads of the process are in it
	nl        *netlink.Handle
	rt        *rtnl
}

// openAround opens the namespace of the calling thread.
func openAround() (_ *around, err error) {
	a := &around{fd: -1}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()
	if a.fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("network namespace of this thread: %w", err)
	}
	a.elsewhere = !everyThreadIn(a.fd)
	if a.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	a.rt, err = openRTNL()
	return a, err
}

func (a *around) close() error {
	var errs []error
	if a.rt != nil {
		errs = append(errs, a.rt.c.Close())
	}
	if a.nl != nil {
		a.nl.Close()
	}
	if a.fd >= 0 {
		errs = append(errs, unix.Close(a.fd))
	}
	return errors.Join(errs...)
}

// do calls f on a thread that is in the namespace around.
func (a *around) do(f func() error) error {
	if !a.elsewhere {
		return f() // all threads but the resident one are
	}
	return onThreadIn(a.fd, f)
}

// onThreadIn calls f on a thread in the namespace that ends with it.
func onThreadIn(fd int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// A resident is a thread that stays in another network namespace than the
// rest of the process, so that the process need not be able to enter it
// again: that takes CAP_SYS_ADMIN, which it gives up.
type resident struct{ calls chan func() }

// enter sends a thread into the network namespace of a file.
func enter(path string) (*resident, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("network namespace: %w", err)
	}
	defer f.Close()
	r := &resident{calls: make(chan func())}
	entered := make(chan error)
	onOtherThread(func() {
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			entered <- fmt.Errorf("enter network namespace %s: %w", path, err)
			return
		}
		entered <- nil
		for call := range r.calls {
			call()
		}
	})
	if err := <-entered; err != nil {
		return nil, err
	}
	return r, nil
}

// onOtherThread runs f on a goroutine that has a thread for itself and ends
// with it. It is never the main thread: that one's namespaces pass for those of
// the process (proc(5)), for kubectl exec among others.
func onOtherThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		// As long as this goroutine has the main thread, the other one has
		// not.
		found := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(found)
			f()
		}()
		<-found
		runtime.UnlockOSThread()
	}()
}

func (r *resident) do(f func() error) error {
	done := make(chan error)
	r.calls <- func() { done <- f() }
	return <-done
}

func (r *resident) leave() { close(r.calls) }

// withPeer returns what is there of a link of ours: of a veth pair, the other
// end too.
func (ns *NetNS) withPeer(l link) netstate.Link {
	s := l.state
	if s.Kind != netstate.KindVeth || ns.around == nil {
		return s
	}
	peer, err := ns.around.nl.LinkByIndex(l.peer)
	if err != nil || peer.Type() != "veth" || peer.Attrs().ParentIndex != l.index {
		return s // it is not there: no name is as bad as another one
	}
	s.Peer = peer.Attrs().Name
	return s
}

// addVeth makes a pair, one end here and the other one around.
//
//	ip link add liqo.gateway type veth peer name liqo.host netns …
func (ns *NetNS) addVeth(l netstate.Link) error {
	if ns.around == nil {
		return errors.New("there is no namespace around this one for the other end: kernel.Config.NetNS is not set")
	}
	const vethInfoPeer = 1 // VETH_INFO_PEER of <linux/veth.h>
	end := func(a *attrs, name string, group uint32) {
		a.str(unix.IFLA_IFNAME, name)
		a.u32(unix.IFLA_GROUP, group)
		if l.MTU != 0 {
			a.u32(unix.IFLA_MTU, uint32(l.MTU))
		}
	}
	a := attrs{linkHeader(0, 0, 0)}
	end(&a, l.Name, linkGroup)
	a.nest(unix.IFLA_LINKINFO, func(a *attrs) {
		a.str(unix.IFLA_INFO_KIND, string(netstate.KindVeth))
		a.nest(unix.IFLA_INFO_DATA, func(a *attrs) {
			a.nest(vethInfoPeer, func(a *attrs) {
				a.b = append(a.b, linkHeader(0, 0, 0)...) // it can't be up before it has a peer
				end(a, l.Peer, peerGroup)
				a.u32(unix.IFLA_NET_NS_FD, uint32(ns.around.fd))
			})
		})
	})
	pair := request{unix.RTM_NEWLINK, nl.Create | nl.Excl, a.b}
	err := ns.rt.do(pair)
	if !errors.Is(err, unix.EEXIST) || ns.exists(l.Name) {
		return err
	}
	// The name is taken around. One that a gateway left behind goes.
	old, err := ns.around.nl.LinkByName(l.Peer)
	switch {
	case err != nil:
	case old.Attrs().Group != peerGroup:
		return fmt.Errorf("the host has a link %s that is not ours (type %s): remove or rename it", l.Peer, old.Type())
	default:
		if err := ns.around.nl.LinkDel(old); err != nil {
			return fmt.Errorf("remove %s of a gateway that is gone: %w", l.Peer, err)
		}
	}
	return ns.rt.do(pair)
}

// raisePeer sets the other end of a veth pair up.
func (ns *NetNS) raisePeer(l link, mtu int) error {
	if ns.around == nil {
		return nil
	}
	a := attrs{linkHeader(l.peer, unix.IFF_UP, unix.IFF_UP)}
	if mtu != 0 {
		a.u32(unix.IFLA_MTU, uint32(mtu))
	}
	if err := ns.around.rt.do(request{typ: unix.RTM_SETLINK, data: a.b}); err != nil {
		return fmt.Errorf("the other end of %s: %w", l.state.Name, err)
	}
	return nil
}

// RemovePeers deletes the ends in this namespace of the veth pairs of gateways
// whose names nobody wants, and with them the other ends. It returns what it
// deleted.
func (ns *NetNS) RemovePeers(unwanted func(name string) bool) ([]string, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	links, err := ns.nl.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var gone []string
	var errs []error
	for _, l := range links {
		if l.Attrs().Group != peerGroup || l.Type() != string(netstate.KindVeth) || !unwanted(l.Attrs().Name) {
			continue
		}
		if err := ns.nl.LinkDel(l); err != nil {
			errs = append(errs, fmt.Errorf("delete link %s: %w", l.Attrs().Name, err))
			continue
		}
		gone = append(gone, l.Attrs().Name)
	}
	return gone, errors.Join(errs...)
}

// addWireGuard makes a device of the kernel's WireGuard. Its socket is in the
// namespace that the request comes from, and stays there
// (https://www.wireguard.com/netns/).
func (ns *NetNS) addWireGuard(l netstate.Link) error {
	a := attrs{linkHeader(0, 0, 0)}
	a.str(unix.IFLA_IFNAME, l.Name)
	a.u32(unix.IFLA_GROUP, linkGroup)
	if l.MTU != 0 {
		a.u32(unix.IFLA_MTU, uint32(l.MTU))
	}
	rt := ns.rt
	if ns.around != nil {
		rt = ns.around.rt
		a.u32(unix.IFLA_NET_NS_FD, uint32(ns.fd))
	}
	a.nest(unix.IFLA_LINKINFO, func(a *attrs) { a.str(unix.IFLA_INFO_KIND, string(netstate.KindWireGuard)) })
	return rt.do(request{unix.RTM_NEWLINK, nl.Create | nl.Excl, a.b})
}
