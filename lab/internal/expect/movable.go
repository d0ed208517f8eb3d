package expect

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// movable are the addresses of a cluster that are others after a node has come
// back or a pod was made again: the node gets another podCIDR, the pod another
// address. What is compared over time names whose they are instead.
type movable struct {
	nodes map[netip.Prefix]string // podCIDRs
	pods  map[netip.Addr]string
}

// movableAddresses asks for them, by cluster.
func movableAddresses(ctx context.Context, w World, api *API, t *topology.Topology) (map[string]movable, error) {
	status, err := w.Status(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]movable{}
	for _, c := range t.Clusters {
		m := movable{map[netip.Prefix]string{}, map[netip.Addr]string{}}
		nodes, err := api.List(ctx, c.Name, "nodes")
		if err != nil {
			return nil, err
		}
		for _, n := range nodes {
			cidrs, _, _ := unstructured.NestedStringSlice(n.Object, "spec", "podCIDRs")
			for _, cidr := range cidrs {
				if p, err := netip.ParsePrefix(cidr); err == nil {
					m.nodes[p.Masked()] = c.Name + "/" + n.GetName()
				}
			}
		}
		for _, s := range status.Clusters {
			for _, p := range s.Pods {
				if s.Name == c.Name && !p.HostNet {
					m.pods[p.IP] = podName(c.Name, p)
				}
			}
		}
		out[c.Name] = m
	}
	return out, nil
}

// address finds an address in a line, with its length when it has one.
var address = regexp.MustCompile(`[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+(/[0-9]+)?|[0-9a-f]*:[0-9a-f:]*:[0-9a-f]*(/[0-9]+)?`)

// name replaces those addresses in a line by whose they are.
func (m movable) name(line string) string {
	return address.ReplaceAllStringFunc(line, func(text string) string {
		p, err := netip.ParsePrefix(text)
		length := fmt.Sprintf("/%d", p.Bits())
		if err != nil {
			a, err := netip.ParseAddr(text)
			if err != nil {
				return text
			}
			p, length = netip.PrefixFrom(a, a.BitLen()), ""
		}
		if pod, ok := m.pods[p.Addr()]; ok {
			return "<" + pod + ">" + length
		}
		for cidr, node := range m.nodes {
			if cidr.Contains(p.Addr()) && p.Bits() >= cidr.Bits() {
				return "<podCIDR of " + node + ">+" + rebase(p.Addr(), zero(cidr)).String() + length
			}
		}
		return text
	})
}

// zero is the network of all zeroes of that length.
func zero(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4() {
		return netip.PrefixFrom(netip.IPv4Unspecified(), p.Bits())
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), p.Bits())
}
