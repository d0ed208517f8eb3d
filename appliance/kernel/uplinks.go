package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// podLinks are the kinds of links that CNIs join pods to their node by: one for each
// pod, or a bridge for all.
var podLinks = map[string]bool{"veth": true, "netkit": true, "bridge": true}

// Uplinks returns the links of the namespace, ours or not, by which packets of other
// hosts may come in, sorted. A link is not among them if it is of a kind that joins pods
// to their node, has not the node's address, is not the way to any next hop, and, if it
// is a bridge, has no port of another kind.
//
//	10.0.4.65 dev cali1234 scope link                               a pod
//	10.0.5.64/26 via 10.0.5.64 dev vxlan.calico onlink              pods of another node
//	default via 172.18.1.1 dev eth0
//
// Routes of ours do not count: one leads by a gateway's pod.
func (ns *NetNS) Uplinks(node netip.Addr) ([]string, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	links, err := ns.nl.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list links: %w", err)
	}
	up := map[int]bool{}
	for _, l := range links {
		a := l.Attrs()
		if !podLinks[l.Type()] {
			up[a.Index] = true
			if a.MasterIndex != 0 {
				up[a.MasterIndex] = true // a bridge with such a port; a bond is an uplink anyway
			}
		}
	}
	routes, err := ns.nl.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Protocol == Protocol {
			continue
		}
		if len(r.Gw) > 0 || r.Via != nil {
			up[r.LinkIndex] = true
		}
		for _, hop := range r.MultiPath {
			up[hop.LinkIndex] = true
		}
	}
	if node.IsValid() {
		addrs, err := ns.nl.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, fmt.Errorf("list addresses: %w", err)
		}
		for _, x := range addrs {
			if a, ok := netip.AddrFromSlice(x.IP); ok && a.Unmap() == node.Unmap() {
				up[x.LinkIndex] = true
			}
		}
	}
	out := []string{}
	for _, l := range links {
		if up[l.Attrs().Index] {
			out = append(out, l.Attrs().Name)
		}
	}
	slices.Sort(out)
	return out, nil
}
