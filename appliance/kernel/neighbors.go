package kernel

import (
	"encoding/binary"
	"fmt"
	"slices"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// neighborHeader is a struct ndmsg (rtnetlink(7)): what neighbours and
// forwarding entries begin with.
func neighborHeader(family uint8, index int, state uint16, flags uint8) []byte {
	b := appendU32s([]byte{family, 0, 0, 0}, uint32(index))
	return append(binary.NativeEndian.AppendUint16(b, state), flags, 0)
}

// neighborLink returns the index of the link that a message is about, and its
// family: that of the address, or AF_BRIDGE for a forwarding entry.
func neighborLink(b []byte) (index int, family uint8) {
	if len(b) < unix.SizeofNdMsg {
		return 0, unix.AF_UNSPEC
	}
	return int(asU32(b[4:])), b[0]
}

// neighborState returns the state (NUD_*) of a message that neighborLink has
// found a link in.
func neighborState(b []byte) uint16 { return binary.NativeEndian.Uint16(b[8:]) }

// listNeighbors returns the permanent neighbours on links of ours, of both families.
// The others are the kernel's. A gateway has as many links as its cluster has
// nodes, so several are asked for at once.
func (ns *NetNS) listNeighbors(links linkTable) ([]netstate.Neighbor, error) {
	names := map[int]string{}
	for _, l := range links.byName {
		if l.state.Kind.HasNeighbors() { // of ours: others have no state
			names[l.index] = l.state.Name
		}
	}
	if len(names) == 0 {
		return nil, nil
	}
	a := attrs{neighborHeader(unix.AF_UNSPEC, 0, 0, 0)}
	if len(names) == 1 { // the kernel filters: a node may have thousands of others
		for index := range names {
			a.u32(unix.NDA_IFINDEX, uint32(index))
		}
	}
	msgs, err := dump(ns.rt.c, unix.RTM_GETNEIGH, a.b)
	if err != nil {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	var out []netstate.Neighbor
	for _, m := range msgs {
		index, fam := neighborLink(m.Data)
		if names[index] == "" || fam != unix.AF_INET && fam != unix.AF_INET6 || neighborState(m.Data)&unix.NUD_PERMANENT == 0 {
			continue
		}
		n := netstate.Neighbor{Dev: names[index]}
		eachAttr(m.Data[unix.SizeofNdMsg:], func(t uint16, v []byte) {
			switch t {
			case unix.NDA_DST:
				n.Addr = asAddr(v)
			case unix.NDA_LLADDR:
				copy(n.MAC[:], v)
			}
		})
		out = append(out, n)
	}
	return out, nil
}

// setNeighbors adds neighbours, or replaces those of the same address: also
// what the kernel has learned of it.
func (ns *NetNS) setNeighbors(vs []netstate.Neighbor, index map[string]int) []error {
	return each(ns.rt, "neigh", vs, func(v netstate.Neighbor) (request, error) {
		i, err := indexOf(index, v.Dev)
		a := attrs{neighborHeader(family(v.Addr), i, unix.NUD_PERMANENT, 0)}
		a.ip(unix.NDA_DST, v.Addr)
		a.bytes(unix.NDA_LLADDR, v.MAC[:])
		return request{unix.RTM_NEWNEIGH, nl.Create | nl.Replace, a.b}, err
	})
}

// deleteNeighbors deletes neighbours. One that is gone is no error.
func (ns *NetNS) deleteNeighbors(vs []netstate.Neighbor, index map[string]int) []error {
	vs = slices.DeleteFunc(slices.Clone(vs), func(v netstate.Neighbor) bool { return index[v.Dev] == 0 })
	return each(ns.rt, "delete neigh", vs, func(v netstate.Neighbor) (request, error) {
		a := attrs{neighborHeader(family(v.Addr), index[v.Dev], 0, 0)}
		a.ip(unix.NDA_DST, v.Addr)
		return request{typ: unix.RTM_DELNEIGH, data: a.b}, nil
	}, unix.ENOENT, unix.ENODEV)
}
