package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	vnl "github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Attributes of a tuple (linux/netfilter/nfnetlink_conntrack.h).
const (
	ctaTupleIP, ctaTupleProto                  = 1, 2
	ctaIPv4Src, ctaIPv4Dst                     = 1, 2
	ctaIPv6Src, ctaIPv6Dst                     = 3, 4
	ctaProtoNum, ctaSrcPort, ctaDstPort        = 1, 2, 3
	nfgenmsgLen                                = 4
	ctnetlink                           uint16 = unix.NFNL_SUBSYS_CTNETLINK << 8
)

// evict deletes the entries of the connection table that one of the evictions
// is about. The table is read once, and entries are deleted in batches.
func (ns *NetNS) evict(evictions []netstate.Eviction) error {
	if len(evictions) == 0 {
		return nil
	}
	var doomed []request
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		entries, err := dump(ns.nft.read, ctnetlink|vnl.IPCTNL_MSG_CT_GET, []byte{family, unix.NFNETLINK_V0, 0, 0})
		switch {
		case noNFTables(err):
			ns.logger.Warn("connections that exist keep their old addresses: the kernel lacks ctnetlink (module nf_conntrack_netlink)", "err", err)
			return nil
		case err != nil:
			return fmt.Errorf("read the connection table: %w", err)
		}
		for _, m := range entries {
			c, id := parseConnection(m.Data)
			for _, e := range evictions {
				if e.Evicts(c) {
					doomed = append(doomed, request{
						typ:  ctnetlink | vnl.IPCTNL_MSG_CT_DELETE,
						data: append([]byte{family, unix.NFNETLINK_V0, 0, 0}, id...),
					})
					break
				}
			}
		}
	}
	socket := rtnl{ns.nft.read}
	var errs []error
	for _, err := range socket.batch(doomed) {
		if err != nil && !errors.Is(err, unix.ENOENT) { // it has ended meanwhile
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("delete %d of %d entries of the connection table: %w", len(errs), len(doomed), errs[0])
	}
	if len(doomed) > 0 {
		ns.logger.Info("connections whose translation has changed are translated anew", "count", len(doomed))
	}
	return nil
}

// parseConnection returns an entry, and the attributes that identify it: one
// that has the same tuple and is younger has another ID.
func parseConnection(b []byte) (c netstate.Connection, id []byte) {
	if len(b) < nfgenmsgLen {
		return c, nil
	}
	var a attrs
	eachAttr(b[nfgenmsgLen:], func(t uint16, v []byte) {
		switch t {
		case vnl.CTA_TUPLE_ORIG:
			c.Orig, c.L4Proto = parseTuple(v)
			a.bytes(t|unix.NLA_F_NESTED, v)
		case vnl.CTA_TUPLE_REPLY:
			c.Reply, _ = parseTuple(v)
		case vnl.CTA_ID, vnl.CTA_ZONE:
			a.bytes(t, v)
		}
	})
	return c, a.b
}

func parseTuple(b []byte) (tuple netstate.Tuple, l4proto byte) {
	eachAttr(b, func(t uint16, v []byte) {
		switch t {
		case ctaTupleIP:
			eachAttr(v, func(t uint16, v []byte) {
				switch a, _ := netip.AddrFromSlice(v); t {
				case ctaIPv4Src, ctaIPv6Src:
					tuple.Src = a
				case ctaIPv4Dst, ctaIPv6Dst:
					tuple.Dst = a
				}
			})
		case ctaTupleProto:
			eachAttr(v, func(t uint16, v []byte) {
				switch {
				case t == ctaProtoNum && len(v) == 1:
					l4proto = v[0]
				case t == ctaSrcPort && len(v) == 2:
					tuple.SrcPort = binary.BigEndian.Uint16(v)
				case t == ctaDstPort && len(v) == 2:
					tuple.DstPort = binary.BigEndian.Uint16(v)
				}
			})
		}
	})
	return tuple, l4proto
}
