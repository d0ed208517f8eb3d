package kernel

import (
	"fmt"
	"net/netip"
	"slices"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// listAddresses returns the addresses of our links. Link-local ones of IPv6
// are the kernel's.
func (ns *NetNS) listAddresses(links linkTable) ([]netstate.Address, error) {
	msgs, err := dump(ns.rt.c, unix.RTM_GETADDR, make([]byte, unix.SizeofIfAddrmsg))
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var out []netstate.Address
	for _, m := range msgs {
		if a, index, ok := parseAddress(m.Data); ok && links.byName[links.names[index]].ours {
			a.Dev = links.names[index]
			out = append(out, a)
		}
	}
	return out, nil
}

// ipvsLink has the addresses of all Services where kube-proxy runs in its mode ipvs.
const ipvsLink = "kube-ipvs0"

// HostAddresses returns the addresses of the namespace, sorted, each once: all but those
// of our links, of loopback (127.0.0.0/8, ::1), link-local ones of IPv6, and those that
// kube-proxy gives the namespace for Services.
func (ns *NetNS) HostAddresses() ([]netip.Addr, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	links, err := ns.listLinks()
	if err != nil {
		return nil, err
	}
	msgs, err := dump(ns.rt.c, unix.RTM_GETADDR, make([]byte, unix.SizeofIfAddrmsg))
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var out []netip.Addr
	for _, m := range msgs {
		a, index, ok := parseAddress(m.Data)
		if name := links.names[index]; ok && !links.byName[name].ours && name != ipvsLink && !a.Prefix.Addr().IsLoopback() {
			out = append(out, a.Prefix.Addr())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// parseAddress returns the address of a message and the index of its link;
// not ok for those that the kernel gives by itself.
func parseAddress(b []byte) (netstate.Address, int, bool) {
	if len(b) < unix.SizeofIfAddrmsg {
		return netstate.Address{}, 0, false
	}
	var local, peer netip.Addr
	eachAttr(b[unix.SizeofIfAddrmsg:], func(t uint16, v []byte) {
		switch t {
		case unix.IFA_LOCAL:
			local = asAddr(v)
		case unix.IFA_ADDRESS:
			peer = asAddr(v)
		}
	})
	if !local.IsValid() {
		local = peer // IPv6
	}
	index := int(asU32(b[4:]))
	if !local.IsValid() || local.Is6() && local.IsLinkLocalUnicast() {
		return netstate.Address{}, index, false
	}
	return netstate.Address{Prefix: netip.PrefixFrom(local, int(b[1]))}, index, true
}

func (ns *NetNS) addAddresses(as []netstate.Address, index map[string]int) []error {
	return each(ns.rt, "address", as, func(a netstate.Address) (request, error) {
		i, err := indexOf(index, a.Dev)
		return request{unix.RTM_NEWADDR, nl.Create | nl.Replace, encodeAddress(a, i)}, err
	})
}

// deleteAddresses deletes addresses. One that is gone is no error.
func (ns *NetNS) deleteAddresses(as []netstate.Address, index map[string]int) []error {
	as = slices.DeleteFunc(slices.Clone(as), func(a netstate.Address) bool { return index[a.Dev] == 0 })
	return each(ns.rt, "delete address", as, func(a netstate.Address) (request, error) {
		return request{typ: unix.RTM_DELADDR, data: encodeAddress(a, index[a.Dev])}, nil
	}, unix.EADDRNOTAVAIL, unix.ENODEV)
}

func encodeAddress(a netstate.Address, index int) []byte {
	ip := a.Prefix.Addr()
	out := attrs{appendU32s([]byte{family(ip), uint8(a.Prefix.Bits()), 0, unix.RT_SCOPE_UNIVERSE}, uint32(index))}
	out.ip(unix.IFA_LOCAL, ip)
	out.ip(unix.IFA_ADDRESS, ip)
	if ip.Is6() {
		// Nobody else is on these links; usable at once.
		out.u32(unix.IFA_FLAGS, unix.IFA_F_NODAD|unix.IFA_F_PERMANENT)
	}
	return out.b
}
