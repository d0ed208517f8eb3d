package world

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Wire joins two namespaces by a veth pair: aName in a, bName in b, both up.
func Wire(a *Namespace, aName string, b *Namespace, bName string) error {
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: aName},
		PeerName:      bName,
		PeerNamespace: netlink.NsFd(b.File.Fd()),
	}
	if err := a.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("ip link add %s type veth peer name %s: %w", aName, bName, err)
	}
	if err := a.up(aName); err != nil {
		return err
	}
	return b.up(bName)
}

// MoveLink moves a link to another namespace under a new name, and sets it up.
func MoveLink(from *Namespace, name string, to *Namespace, newName string) error {
	l, err := from.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := from.nl.LinkSetNsFd(l, int(to.File.Fd())); err != nil {
		return fmt.Errorf("ip link set %s netns …: %w", name, err)
	}
	if err := to.rename(name, newName); err != nil {
		return err
	}
	return to.up(newName)
}

func (n *Namespace) rename(name, newName string) error {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if name == newName {
		return nil
	}
	if err := n.nl.LinkSetDown(l); err != nil {
		return fmt.Errorf("ip link set %s down: %w", name, err)
	}
	if err := n.nl.LinkSetName(l, newName); err != nil {
		return fmt.Errorf("ip link set %s name %s: %w", name, newName, err)
	}
	return nil
}

// SetMAC gives a link its hardware address.
func (n *Namespace) SetMAC(name string, mac net.HardwareAddr) error { return n.setMAC(name, mac) }

func (n *Namespace) setMAC(name string, mac net.HardwareAddr) error {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := n.nl.LinkSetHardwareAddr(l, mac); err != nil {
		return fmt.Errorf("ip link set %s address %s: %w", name, mac, err)
	}
	return nil
}

// setMTU sets the MTU of a link.
func (n *Namespace) setMTU(name string, mtu int) error {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := n.nl.LinkSetMTU(l, mtu); err != nil {
		return fmt.Errorf("ip link set %s mtu %d: %w", name, mtu, err)
	}
	return nil
}

// SetUp sets a link up.
func (n *Namespace) SetUp(name string) error { return n.up(name) }

// AddAddress gives a link an address. IPv6 duplicate address detection would
// delay it, and nothing here is duplicated.
func (n *Namespace) AddAddress(link string, p netip.Prefix) error {
	l, err := n.nl.LinkByName(link)
	if err != nil {
		return fmt.Errorf("link %s: %w", link, err)
	}
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := n.nl.AddrReplace(l, a); err != nil {
		return fmt.Errorf("ip addr add %s dev %s: %w", p, link, err)
	}
	return nil
}

// AddRoute adds or replaces a route by a next hop in the main table.
func (n *Namespace) AddRoute(dst netip.Prefix, via netip.Addr) error {
	r := &netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice()}
	if err := n.nl.RouteReplace(r); err != nil {
		return fmt.Errorf("ip route replace %s via %s: %w", dst, via, err)
	}
	return nil
}

// addNarrowRoute is AddRoute for a way on which a link carries less than the
// first one: who forwards to it must know, and tell the sender.
func (n *Namespace) addNarrowRoute(dst netip.Prefix, via netip.Addr, mtu int) error {
	r := &netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice(), MTU: mtu, MTULock: true}
	if err := n.nl.RouteReplace(r); err != nil {
		return fmt.Errorf("ip route replace %s via %s mtu lock %d: %w", dst, via, mtu, err)
	}
	return nil
}

// addNarrowNeighbour is addNarrowRoute to an address on a link of n itself.
func (n *Namespace) addNarrowNeighbour(a netip.Addr, mtu int) error {
	ways, err := n.nl.RouteGet(a.AsSlice())
	if err != nil || len(ways) != 1 {
		return fmt.Errorf("ip route get %s: %d ways: %w", a, len(ways), err)
	}
	dst := netip.PrefixFrom(a, a.BitLen())
	r := &netlink.Route{Dst: ipNet(dst), LinkIndex: ways[0].LinkIndex, Scope: netlink.SCOPE_LINK, MTU: mtu, MTULock: true}
	if err := n.nl.RouteReplace(r); err != nil {
		return fmt.Errorf("ip route replace %s mtu lock %d: %w", dst, mtu, err)
	}
	return nil
}

func (n *Namespace) deleteRoute(dst netip.Prefix, via netip.Addr) error {
	r := &netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice()}
	if err := n.nl.RouteDel(r); err != nil {
		return fmt.Errorf("ip route del %s via %s: %w", dst, via, err)
	}
	return nil
}

// addBridge makes a bridge that is up at once and has no address.
func (n *Namespace) addBridge(name string) error {
	snooping := false
	b := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}, MulticastSnooping: &snooping}
	if err := n.nl.LinkAdd(b); err != nil {
		return fmt.Errorf("ip link add %s type bridge: %w", name, err)
	}
	return n.up(name)
}

func (n *Namespace) enslave(port, bridge string) error {
	p, err := n.nl.LinkByName(port)
	if err != nil {
		return fmt.Errorf("link %s: %w", port, err)
	}
	b, err := n.nl.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("link %s: %w", bridge, err)
	}
	if err := n.nl.LinkSetMaster(p, b); err != nil {
		return fmt.Errorf("ip link set %s master %s: %w", port, bridge, err)
	}
	return n.up(port)
}

// unplug deletes one end of a cable, and with it the other one. A cable that is
// not there is no error.
func (n *Namespace) unplug(port string) error {
	p, err := n.nl.LinkByName(port)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("link %s: %w", port, err)
	}
	if err := n.nl.LinkDel(p); err != nil {
		return fmt.Errorf("ip link del %s: %w", port, err)
	}
	return nil
}

// linkByMAC is the name of the link with that hardware address.
func (n *Namespace) linkByMAC(mac net.HardwareAddr) (string, error) {
	links, err := n.nl.LinkList()
	if err != nil {
		return "", fmt.Errorf("ip link: %w", err)
	}
	for _, l := range links {
		if l.Attrs().HardwareAddr.String() == mac.String() {
			return l.Attrs().Name, nil
		}
	}
	return "", fmt.Errorf("there is no link with the address %s", mac)
}

// nft carries out a ruleset in the namespace.
func (n *Namespace) nft(ruleset string) error {
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(ruleset)
	if out, err := n.Output(cmd); err != nil {
		return fmt.Errorf("nft -f -: %w: %s", err, strings.TrimSpace(out))
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// defaultRoute is the prefix of everything, in the family of an address.
func defaultRoute(a netip.Addr) netip.Prefix {
	if a.Is4() {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}
