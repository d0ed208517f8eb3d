package pods

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// PodNetworks are where the pods of a node have their addresses: its block of
// the pool, with a CNI that has an IPAM of its own, or its podCIDRs. blocks are
// by node.
func PodNetworks(nd *corev1.Node, blocks map[string]netip.Prefix) ([]netip.Prefix, error) {
	if b, ok := blocks[nd.Name]; ok {
		return []netip.Prefix{b}, nil
	}
	var out []netip.Prefix
	var errs []error
	for _, cidr := range nd.Spec.PodCIDRs {
		p, err := netip.ParsePrefix(cidr)
		if err != nil {
			errs = append(errs, fmt.Errorf("node %s: podCIDR: %w", nd.Name, err))
			continue
		}
		out = append(out, p.Masked())
	}
	return out, errors.Join(errs...)
}

// workloadRules is what Calico's Felix writes on a node, policies aside, for
// the links of pods: it drops what a pod sends with a source that no route leads
// back to by its link, what conntrack takes for a part of no connection, and
// what pods have put into VXLAN or IP-in-IP themselves. Cilium's bpf_lxc drops
// the first of these as "Invalid source ip".
const workloadRules = `table ip lab-workloads
delete table ip lab-workloads
table ip lab-workloads {
	chain raw {
		type filter hook prerouting priority raw; policy accept;
		iifname "veth*" fib saddr . mark . iif oif missing counter drop comment "the source is not the pod's"
	}
	chain from {
		meta l4proto 4 counter drop
		udp dport 4789 counter drop
	}
	chain input {
		type filter hook input priority filter; policy accept;
		iifname "veth*" ct state invalid counter drop
		iifname "veth*" jump from
	}
	chain forward {
		type filter hook forward priority filter; policy accept;
		iifname "veth*" ct state invalid counter drop
		oifname "veth*" ct state invalid counter drop
		iifname "veth*" jump from
	}
}
`

// bareLinks makes the node's ends of a pod's links what Calico makes them: the
// plug-in ptp gives each the gateway's address, Calico gives it none, so that
// the node reaches its pods from its own address, and answers the pod's ARP for
// the gateway.
func bareLinks(node *os.File, r *types100.Result) error {
	h, err := netlink.NewHandleAt(vnetns.NsHandle(node.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	for _, i := range r.Interfaces {
		if i.Sandbox != "" {
			continue
		}
		l, err := h.LinkByName(i.Name)
		if err != nil {
			return fmt.Errorf("link %s: %w", i.Name, err)
		}
		addrs, err := h.AddrList(l, netlink.FAMILY_V4)
		if err != nil {
			return fmt.Errorf("ip addr show dev %s: %w", i.Name, err)
		}
		for _, a := range addrs {
			if err := h.AddrDel(l, &a); err != nil {
				return fmt.Errorf("ip addr del %s dev %s: %w", a.IPNet, i.Name, err)
			}
		}
		// With the last address of a link the kernel removes the link's routes.
		for _, ip := range r.IPs {
			to := &net.IPNet{IP: ip.Address.IP, Mask: net.CIDRMask(32, 32)}
			if err := h.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: to}); err != nil {
				return fmt.Errorf("ip route replace %s dev %s: %w", to, i.Name, err)
			}
		}
		for _, s := range []struct{ path, value string }{
			{"net/ipv4/conf/" + i.Name + "/proxy_arp", "1"},
			{"net/ipv4/neigh/" + i.Name + "/proxy_delay", "0"},
			{"net/ipv4/conf/" + i.Name + "/rp_filter", "0"}, // the rules look at sources
		} {
			if err := writeSysctl(node, s.path, s.value); err != nil {
				return err
			}
		}
	}
	return nil
}
