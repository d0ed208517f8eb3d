package netns

import (
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Addresses are the addresses that a network namespace has, of both families, on
// all of its interfaces.
func Addresses(ns *os.File) ([]netip.Addr, error) {
	h, err := netlink.NewHandleAt(netns.NsHandle(ns.Fd()))
	if err != nil {
		return nil, err
	}
	defer h.Close()
	list, err := h.AddrList(nil, unix.AF_UNSPEC)
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, a := range list {
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			out = append(out, addr.Unmap())
		}
	}
	return out, nil
}
