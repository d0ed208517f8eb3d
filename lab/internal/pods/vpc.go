package pods

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Numbers of AWS's VPC CNI (amazon-vpc-cni-k8s): priorities of its rules, the table
// of a node's second interface, and the mark of connections to ports of the node.
const (
	vpcToPod    = 512
	vpcNodePort = 1024
	vpcFromPod  = 1536
	vpcTable    = 2
	vpcMark     = 0x80
)

// vpcMarks keeps answers of pods that were asked by a port of the node on the
// interface that the question came by: translated back they have the node's address,
// which the other interface's network drops.
const vpcMarks = `table ip lab-vpc
delete table ip lab-vpc
table ip lab-vpc {
	chain prerouting {
		type filter hook prerouting priority mangle; policy accept;
		iifname "eth0" fib daddr type local ct mark set ct mark or 0x80
		iifname "veth*" meta mark set ct mark and 0x80
	}
}
`

// vpcRouting makes the node's table of the link by which its pods leave, and what
// keeps answers of ports of the node away from it.
//
//	ip route add 172.18.1.1 dev eth1 table 2
//	ip route add default via 172.18.1.1 dev eth1 table 2
//	ip rule add fwmark 0x80/0x80 lookup main priority 1024
func (n *node) vpcRouting() error {
	h, err := netlink.NewHandleAt(vnetns.NsHandle(n.cfg.NetNS.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	l, err := h.LinkByName(n.cfg.PodLink)
	if err != nil {
		return fmt.Errorf("link %s: %w", n.cfg.PodLink, err)
	}
	router := &netlink.Route{LinkIndex: l.Attrs().Index, Table: vpcTable, Scope: netlink.SCOPE_LINK, Dst: hostNet(n.cfg.Router)}
	all := &netlink.Route{LinkIndex: l.Attrs().Index, Table: vpcTable, Gw: n.cfg.Router.AsSlice(), Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}}
	for _, r := range []*netlink.Route{router, all} {
		if err := h.RouteReplace(r); err != nil {
			return fmt.Errorf("ip route replace %s dev %s table %d: %w", r.Dst, n.cfg.PodLink, vpcTable, err)
		}
	}
	mask := uint32(vpcMark)
	marked := netlink.NewRule()
	marked.Family, marked.Priority, marked.Mark, marked.Mask, marked.Table = unix.AF_INET, vpcNodePort, vpcMark, &mask, unix.RT_TABLE_MAIN
	if err := h.RuleAdd(marked); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("ip rule add fwmark %#x: %w", vpcMark, err)
	}
	return n.input(vpcMarks, "nft", "-f", "-")
}

// vpcRules are the rules of a pod's address: what is for it goes by the main table,
// and what comes from it by the table of the second interface, whatever it is for.
func vpcRules(a netip.Addr) []*netlink.Rule {
	to, from := netlink.NewRule(), netlink.NewRule()
	to.Family, to.Priority, to.Dst, to.Table = unix.AF_INET, vpcToPod, hostNet(a), unix.RT_TABLE_MAIN
	from.Family, from.Priority, from.Src, from.Table = unix.AF_INET, vpcFromPod, hostNet(a), vpcTable
	return []*netlink.Rule{to, from}
}

// addVPCRules adds the rules of a pod's addresses to the node.
func addVPCRules(node *os.File, addrs []netip.Addr) error {
	return eachVPCRule(node, addrs, "add", unix.EEXIST, (*netlink.Handle).RuleAdd)
}

// deleteVPCRules removes them. What is gone already is no error.
func deleteVPCRules(node *os.File, addrs []netip.Addr) error {
	return eachVPCRule(node, addrs, "del", unix.ENOENT, (*netlink.Handle).RuleDel)
}

func eachVPCRule(node *os.File, addrs []netip.Addr, verb string, done error, do func(*netlink.Handle, *netlink.Rule) error) error {
	h, err := netlink.NewHandleAt(vnetns.NsHandle(node.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	for _, a := range addrs {
		for _, r := range vpcRules(a) {
			if err := do(h, r); err != nil && !errors.Is(err, done) {
				return fmt.Errorf("ip rule %s %s: %w", verb, r, err)
			}
		}
	}
	return nil
}

func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}
