// Package nettest runs tests in network namespaces of their own, as root or
// without: a test binary that is not started by root runs itself again in a
// user namespace. It also skips tests of what this machine lacks, in the one
// way that such a skip may have; see [SkipOrFail].
package nettest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/nettest/sysctl"
)

// inUserNS is set in the environment of a test binary that runs itself again.
const inUserNS = "NETTEST_IN_USERNS"

// Main runs the tests of a package, in new user and mount namespaces if the
// caller is not root, so that [NewNS] and mounts work for anybody. Use it as
//
//	func TestMain(m *testing.M) { os.Exit(nettest.Main(m)) }
func Main(m *testing.M) int {
	if os.Getenv(inUserNS) != "" {
		if err := sysctl.Reset(); err != nil {
			fmt.Fprintf(os.Stderr, "nettest: %v\n", err)
			return 1
		}
	}
	if os.Geteuid() == 0 || os.Getenv(inUserNS) != "" {
		return m.Run()
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inUserNS+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	runtime.LockOSThread() // the child dies with the thread that started it
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1)
	case os.Getenv("CI") == "":
		fmt.Fprintf(os.Stderr, "nettest: no user namespaces here (%v); kernel tests skipped\n", err)
		return 0
	default:
		fmt.Fprintf(os.Stderr, "nettest: %v\n", err)
		return 1 // in CI a kernel test that cannot run has failed
	}
}

// Rootless reports whether the tests run in a user namespace.
func Rootless() bool { return os.Getenv(inUserNS) != "" }

// NewNS moves the calling goroutine into an empty network namespace, whose
// loopback is down and whose settings are those of package sysctl, whatever this
// machine has. The goroutine keeps its thread to the end, so that the namespace
// dies with the test; goroutines that it starts run elsewhere, see [NS.Do].
func NewNS(t testing.TB) *NS {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the runtime discards the thread
	if err := unshare(); err != nil {
		t.Fatal(err)
	}
	return current(t)
}

// unshare moves the calling thread into a new network namespace.
func unshare() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("new network namespace: %w", err)
	}
	return sysctl.Reset()
}

// An NS is a network namespace of a test.
type NS struct {
	t  testing.TB
	fd int
}

// Another makes one more namespace, without moving into it. It dies with the
// test.
func Another(t testing.TB) *NS {
	t.Helper()
	made := make(chan *NS)
	go func() {
		defer close(made)
		runtime.LockOSThread()
		if err := unshare(); err != nil {
			t.Error(err)
			return
		}
		made <- current(t)
	}()
	ns, ok := <-made
	if !ok {
		t.FailNow()
	}
	return ns
}

func current(t testing.TB) *NS {
	t.Helper()
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Errorf("network namespace of this thread: %v", err)
		return nil
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return &NS{t, fd}
}

// FD returns a file descriptor of the namespace, open until the test ends.
func (ns *NS) FD() int { return ns.fd }

// Do runs f in the namespace, on a thread of its own, and waits for it. The
// processes that f starts are in the namespace too.
func (ns *NS) Do(f func()) {
	ns.t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Setns(ns.fd, unix.CLONE_NEWNET)
		if err == nil {
			defer func() { done <- nil }() // also when f ends the goroutine
			f()
			return
		}
		done <- err
	}()
	if err := <-done; err != nil {
		ns.t.Fatalf("enter network namespace: %v", err)
	}
}

// Run runs a command in the namespace and returns what it printed. The test
// fails if the command does.
func (ns *NS) Run(argv ...string) string {
	ns.t.Helper()
	out, err := ns.Try(argv...)
	if err != nil {
		ns.t.Fatalf("%q: %v\n%s", argv, err, out)
	}
	return out
}

// Try is Run for commands that may fail.
func (ns *NS) Try(argv ...string) (out string, err error) {
	ns.t.Helper()
	ns.Do(func() {
		var b []byte
		b, err = exec.Command(argv[0], argv[1:]...).CombinedOutput()
		out = string(b)
	})
	return out, err
}
