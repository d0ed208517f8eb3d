package world

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// setTime sets the clock of the machine.
func setTime(t time.Time) error {
	tv := unix.NsecToTimeval(t.UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	return nil
}

// OpenTap makes a tap device in the calling thread's namespace. It exists as
// long as the file is open, also after it was moved to another namespace.
func OpenTap(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil, fmt.Errorf("/dev/net/tun: %w: load the module tun (modprobe tun), or use the native world", err)
		}
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("tap device %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// prepareMachine brings up the management network of a virtual machine, at the
// address that the agent will listen on.
func prepareMachine(addr netip.Addr) error {
	root, err := CurrentNamespace()
	if err != nil {
		return err
	}
	defer root.Close()
	link, err := root.linkByMAC(UplinkMAC(0))
	if err != nil {
		return fmt.Errorf("management network: %w", err)
	}
	const name = "management"
	if err := root.rename(link, name); err != nil {
		return err
	}
	if err := root.up(name); err != nil {
		return err
	}
	return root.AddAddress(name, netip.PrefixFrom(addr, 30))
}
