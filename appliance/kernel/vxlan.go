package kernel

import (
	"fmt"
	"net/netip"
	"slices"

	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// vxlanLink is what the library wants to know of a link: it does not learn,
// and has no remote to send to what it has no entry for.
func vxlanLink(attrs netlink.LinkAttrs, v netstate.VXLAN) *netlink.Vxlan {
	return &netlink.Vxlan{LinkAttrs: attrs, VxlanId: int(v.VNI), SrcAddr: v.Local.AsSlice(), Port: int(v.Port)}
}

// vxlanState returns what a link is. One that somebody made learn or flood, or
// bound to another link, is of another kind than those that we make.
func vxlanState(v *netlink.Vxlan) (netstate.LinkKind, netstate.VXLAN) {
	s := netstate.VXLAN{VNI: uint32(v.VxlanId), Port: uint16(v.Port)}
	if local, ok := netip.AddrFromSlice(v.SrcAddr); ok {
		s.Local = local.Unmap()
	}
	switch group, _ := netip.AddrFromSlice(v.Group); {
	case v.Learning:
		return "vxlan that learns", s
	case group.IsValid() && !group.Unmap().IsUnspecified():
		return "vxlan with a default remote", s
	case v.VtepDevIndex != 0:
		return "vxlan on another link", s
	}
	return netstate.KindVXLAN, s
}

// listFDB returns the forwarding entries of a VXLAN link of ours. It does not
// learn, so all of them were put there. One that goes elsewhere than an entry
// of ours can say, or does not stay, has no remote.
func (ns *NetNS) listFDB(l link) ([]netstate.FDBEntry, error) {
	msgs, err := dump(ns.rt.c, unix.RTM_GETNEIGH, neighborHeader(unix.AF_BRIDGE, l.index, 0, 0))
	if err != nil {
		return nil, fmt.Errorf("list fdb of %s: %w", l.state.Name, err)
	}
	var out []netstate.FDBEntry
	for _, m := range msgs {
		if index, _ := neighborLink(m.Data); index != l.index {
			continue
		}
		e := netstate.FDBEntry{Dev: l.state.Name}
		odd := neighborState(m.Data)&unix.NUD_PERMANENT == 0
		eachAttr(m.Data[unix.SizeofNdMsg:], func(t uint16, v []byte) {
			switch t {
			case unix.NDA_LLADDR:
				copy(e.MAC[:], v)
			case unix.NDA_DST:
				e.Remote = asAddr(v)
			case unix.NDA_PORT, unix.NDA_VNI, unix.NDA_IFINDEX:
				odd = true // said only where they are not the link's
			}
		})
		if odd {
			e.Remote = netip.Addr{}
		}
		out = append(out, e)
	}
	return out, nil
}

// setFDB adds entries, or replaces those of the same station.
func (ns *NetNS) setFDB(es []netstate.FDBEntry, index map[string]int) []error {
	return each(ns.rt, "fdb", es, func(e netstate.FDBEntry) (request, error) {
		i, err := indexOf(index, e.Dev)
		a := attrs{neighborHeader(unix.AF_BRIDGE, i, unix.NUD_PERMANENT|unix.NUD_NOARP, unix.NTF_SELF)}
		a.bytes(unix.NDA_LLADDR, e.MAC[:])
		a.ip(unix.NDA_DST, e.Remote)
		return request{unix.RTM_NEWNEIGH, nl.Create | nl.Replace, a.b}, err
	})
}

// deleteFDB deletes entries. One that is gone is no error.
func (ns *NetNS) deleteFDB(es []netstate.FDBEntry, index map[string]int) []error {
	es = slices.DeleteFunc(slices.Clone(es), func(e netstate.FDBEntry) bool { return index[e.Dev] == 0 })
	return each(ns.rt, "delete fdb", es, func(e netstate.FDBEntry) (request, error) {
		// By the station alone, so that it is found wherever it leads.
		a := attrs{neighborHeader(unix.AF_BRIDGE, index[e.Dev], 0, unix.NTF_SELF)}
		a.bytes(unix.NDA_LLADDR, e.MAC[:])
		return request{typ: unix.RTM_DELNEIGH, data: a.b}, nil
	}, unix.ENOENT, unix.ENODEV)
}
