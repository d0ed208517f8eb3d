package world

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/vishvananda/netlink"
	nsfd "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
)

// A Namespace is an anonymous network namespace: it exists as long as its file
// is open or somebody is inside, and has no name anywhere.
type Namespace struct {
	File *os.File
	nl   *netlink.Handle
}

// NewNamespace makes a network namespace with its loopback up.
func NewNamespace() (*Namespace, error) {
	file, err := netns.New()
	if err != nil {
		return nil, fmt.Errorf("%w (the lab needs root)", err)
	}
	return openNamespace(file)
}

// CurrentNamespace is the network namespace of the calling thread.
func CurrentNamespace() (*Namespace, error) {
	file, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	return openNamespace(file)
}

func openNamespace(file *os.File) (*Namespace, error) {
	nl, err := netlink.NewHandleAt(nsfd.NsHandle(file.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("netlink socket in a namespace: %w", err)
	}
	n := &Namespace{File: file, nl: nl}
	if err := n.up("lo"); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// Close lets go of the namespace. It ends when nobody else is in it.
func (n *Namespace) Close() error {
	n.nl.Close()
	return n.File.Close()
}

// Do runs fn on a thread that is in the namespace. What fn starts stays there:
// processes, and sockets that it opens.
func (n *Namespace) Do(fn func() error) error { return netns.Do(n.File, fn) }

// Start starts a process in the namespace. Its Pdeathsig must not be set: the
// thread that is its parent ends at once.
func (n *Namespace) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Output runs a command in the namespace and returns what it printed, both
// streams.
func (n *Namespace) Output(cmd *exec.Cmd) (string, error) {
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.Start(cmd); err != nil {
		return "", err
	}
	err := cmd.Wait()
	return out.String(), err
}

func (n *Namespace) up(name string) error {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := n.nl.LinkSetUp(l); err != nil {
		return fmt.Errorf("ip link set %s up: %w", name, err)
	}
	return nil
}

// sysctl writes settings in the namespace. A setting that the kernel does not
// have is left out when its name ends in "?".
func (n *Namespace) sysctl(settings ...string) error {
	return n.Do(func() error {
		var errs []error
		for _, s := range settings {
			key, value, _ := strings.Cut(s, "=")
			key, optional := strings.CutSuffix(key, "?")
			err := os.WriteFile("/proc/sys/"+strings.ReplaceAll(key, ".", "/"), []byte(value), 0)
			if err != nil && !(optional && errors.Is(err, os.ErrNotExist)) {
				errs = append(errs, fmt.Errorf("sysctl %s=%s: %w", key, value, err))
			}
		}
		return errors.Join(errs...)
	})
}
