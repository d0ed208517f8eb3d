package pods

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// network wires pods of one node by CNI plugins.
type network struct {
	node *os.File // network namespace
	cni  *libcni.CNIConfig
	list *libcni.NetworkConfigList
	bare bool // the node's ends of pods' links have no address
	vpc  bool // pods' addresses have rules of their own, see vpc.go

	mu    sync.Mutex
	addrs map[types.UID][]netip.Addr // of pods, which these rules are for
}

func (n *network) runtime(pod *corev1.Pod, ns *os.File) *libcni.RuntimeConf {
	var ports []map[string]any
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if p.HostPort == 0 {
				continue
			}
			m := map[string]any{"hostPort": p.HostPort, "containerPort": p.ContainerPort, "protocol": strings.ToLower(string(p.Protocol))}
			if p.HostIP != "" {
				m["hostIP"] = p.HostIP
			}
			ports = append(ports, m)
		}
	}
	return &libcni.RuntimeConf{
		ContainerID: string(pod.UID), NetNS: netns.Path(ns), IfName: "eth0",
		Args: [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", pod.Namespace}, {"K8S_POD_NAME", pod.Name}, {"K8S_POD_UID", string(pod.UID)},
		},
		CapabilityArgs: map[string]any{"portMappings": ports},
	}
}

// add gives a pod's new namespace its eth0 and returns its addresses.
func (n *network) add(ctx context.Context, pod *corev1.Pod, ns *os.File) ([]netip.Addr, error) {
	if err := loopbackUp(ns); err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	// libcni starts the plugins from the calling thread, so they run in the
	// node's namespace.
	err := netns.Do(n.node, func() error {
		res, err := n.cni.AddNetworkList(ctx, n.list, n.runtime(pod, ns))
		if err != nil {
			return err
		}
		r, err := types100.NewResultFromResult(res)
		if err != nil {
			return err
		}
		for _, ip := range r.IPs {
			if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
				addrs = append(addrs, a.Unmap())
			}
		}
		if n.bare {
			if err := bareLinks(n.node, r); err != nil {
				return err
			}
		}
		if n.vpc {
			n.mu.Lock()
			n.addrs[pod.UID] = addrs
			n.mu.Unlock()
			return addVPCRules(n.node, addrs)
		}
		return nil
	})
	if err == nil && len(addrs) == 0 {
		err = errors.New("the CNI plugins gave no address")
	}
	return addrs, err
}

// del returns a pod's addresses and removes its link.
func (n *network) del(ctx context.Context, pod *corev1.Pod, ns *os.File) error {
	n.mu.Lock()
	addrs := n.addrs[pod.UID]
	delete(n.addrs, pod.UID)
	n.mu.Unlock()
	if err := deleteVPCRules(n.node, addrs); err != nil {
		return err
	}
	return netns.Do(n.node, func() error {
		return n.cni.DelNetworkList(ctx, n.list, n.runtime(pod, ns))
	})
}

func loopbackUp(ns *os.File) error {
	h, err := netlink.NewHandleAt(vnetns.NsHandle(ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	return h.LinkSetUp(lo)
}

// nodeSysctls are what a distribution sets on a node. Errors are ignored for
// those marked: their module is not loaded, or built without.
var nodeSysctls = []struct {
	path, value string
	optional    bool
}{
	{"net/ipv4/ip_forward", "1", false},
	{"net/ipv6/conf/all/forwarding", "1", true},
	// With br_netfilter, the answer of a pod behind a service is translated
	// back also when it crosses nothing but the node's bridge.
	{"net/bridge/bridge-nf-call-iptables", "1", true},
	{"net/bridge/bridge-nf-call-ip6tables", "1", true},
}

// SetNodeSysctls sets in a network namespace what a distribution, or who installs
// Kubernetes on it, sets on a node.
func SetNodeSysctls(ns *os.File) error {
	for _, s := range nodeSysctls {
		if err := writeSysctl(ns, s.path, s.value); err != nil && !s.optional {
			return err
		}
	}
	return nil
}

// podSysctls are containerd's defaults: a pod may bind low ports and send
// pings without capabilities.
var podSysctls = []struct{ path, value string }{
	{"net/ipv4/ip_unprivileged_port_start", "0"},
	{"net/ipv4/ping_group_range", "0 2147483647"},
}

// safeSysctls are those a pod may set without permission of the node.
var safeSysctls = []string{
	"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
	"net.ipv4.ip_unprivileged_port_start", "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout",
	"net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}

func writeSysctl(ns *os.File, path, value string) error {
	return netns.Do(ns, func() error {
		if err := os.WriteFile("/proc/sys/"+path, []byte(value), 0); err != nil {
			return fmt.Errorf("sysctl %s=%s: %w", strings.ReplaceAll(path, "/", "."), value, err)
		}
		return nil
	})
}

// unsafeSysctl returns the first sysctl of the pod that a kubelet without
// --allowed-unsafe-sysctls refuses.
func unsafeSysctl(pod *corev1.Pod) string {
	if pod.Spec.SecurityContext == nil {
		return ""
	}
	for _, s := range pod.Spec.SecurityContext.Sysctls {
		name := strings.ReplaceAll(s.Name, "/", ".")
		if !slices.Contains(safeSysctls, name) || pod.Spec.HostNetwork && strings.HasPrefix(name, "net.") {
			return s.Name
		}
	}
	return ""
}

// routes are those of a node to the pods of the others.
type routes struct {
	ns  *os.File
	set map[netip.Prefix]netip.Addr
}

// sync makes the routes those of want; it touches no others.
func (r *routes) sync(want map[netip.Prefix]netip.Addr) error {
	h, err := netlink.NewHandleAt(vnetns.NsHandle(r.ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	route := func(dst netip.Prefix, via netip.Addr) *netlink.Route {
		return &netlink.Route{
			Dst:      &net.IPNet{IP: dst.Addr().AsSlice(), Mask: net.CIDRMask(dst.Bits(), dst.Addr().BitLen())},
			Gw:       via.AsSlice(),
			Protocol: unix.RTPROT_STATIC,
		}
	}
	var errs []error
	for dst, via := range want {
		if r.set[dst] == via {
			continue
		}
		// ip route replace DST via NODE proto static
		if err := h.RouteReplace(route(dst, via)); err != nil {
			errs = append(errs, fmt.Errorf("route %s via %s: %w", dst, via, err))
			continue
		}
		r.set[dst] = via
	}
	for dst, via := range r.set {
		if _, ok := want[dst]; ok {
			continue
		}
		if err := h.RouteDel(route(dst, via)); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove route %s via %s: %w", dst, via, err))
			continue
		}
		delete(r.set, dst)
	}
	return errors.Join(errs...)
}
