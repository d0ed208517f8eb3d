// Package netns runs code, connections and new processes in another network
// namespace of this machine, and makes anonymous ones.
//
// A namespace is an open file: it exists as long as the file, a process in it
// or a device that refers to it. Nothing is mounted and nothing has a name.
//
// A thread that has entered a namespace goes back to its own before it serves
// other goroutines, and ends if it can't. A process started inside Do must not
// use Pdeathsig, which fires when that thread ends.
package netns

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/nettest/sysctl"
)

// Do runs f on a thread of its own in the namespace ns and waits for it. What
// f opens or starts, itself and not by way of other goroutines, belongs to that
// namespace. A nil ns means the caller's own.
func Do(ns *os.File, f func() error) error {
	if ns == nil {
		return f()
	}
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// New makes an empty network namespace with the settings of package sysctl,
// whatever this machine has. It goes away when the file is closed and nothing
// uses it any more.
func New() (ns *os.File, err error) {
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("new network namespace: %w", err)
		}
		if err := sysctl.Reset(); err != nil {
			return err
		}
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return ns, err
}

// Path returns a path under which other programs of this PID namespace can
// open ns while this process keeps it open.
func Path(ns *os.File) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd()) }

// DialContext connects from within ns. The address must be an IP address, not
// a name.
func DialContext(ctx context.Context, ns *os.File, network, address string) (conn net.Conn, err error) {
	err = Do(ns, func() error {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen listens within ns, on an IP address and a port.
func Listen(ctx context.Context, ns *os.File, network, address string) (l net.Listener, err error) {
	err = Do(ns, func() error {
		l, err = (&net.ListenConfig{}).Listen(ctx, network, address)
		return err
	})
	return l, err
}

// OnSpareThread runs f on a thread that f may spoil: it ends afterwards. Use it
// for what a thread cannot take back, such as joining a mount namespace or
// giving up capabilities.
func OnSpareThread(f func() error) error {
	done := make(chan error, 1)
	locked(func() { done <- f() })
	return <-done
}

// onThread runs f on a thread of its own. If that can't go back to its network
// namespace afterwards it stays locked, and the runtime ends it with its
// goroutine, so that no other goroutine finds itself in the wrong one.
func onThread(f func() error) error {
	done := make(chan error, 1)
	locked(func() {
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			done <- fmt.Errorf("the thread's network namespace: %w", err)
			return
		}
		defer home.Close()
		err = f()
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	})
	return <-done
}

// locked runs f on a goroutine that is locked to its thread, which is never the
// main thread: /proc/PID shows that one's namespaces, mounts and capabilities as
// the process's, and the runtime keeps it for ever instead of ending it.
func locked(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		// As long as this goroutine occupies the main thread, the other
		// finds a different one.
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
