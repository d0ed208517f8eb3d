package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// A need is an address of another host that hosts of this cluster can't do without.
// Nodes send what goes to a peer's networks to its gateway, whatever else is
// there: a node whose router, DNS server or API server is in one of them
// is cut off.
type need struct {
	ip   netip.Addr
	what string // a DNS server of Node node-1
}

// String names the address.
func (n need) String() string { return n.what + " (" + n.ip.String() + ")" }

// neededAddresses returns what the nodes report, and the API server's own
// addresses, each once. Of several nodes that need one the first by name is said.
func (p *planner) neededAddresses() []need {
	var out []need
	for _, a := range p.s.APIServers {
		out = append(out, need{a, "the API server"})
	}
	for _, n := range p.s.InternalNodes {
		if n.Deleting {
			continue
		}
		for _, x := range n.Needs {
			out = append(out, need{x.IP, neededAs(x.For) + " of Node " + n.Name})
		}
	}
	slices.SortStableFunc(out, func(a, b need) int { return a.ip.Compare(b.ip) })
	return slices.CompactFunc(out, func(a, b need) bool { return a.ip == b.ip })
}

// neededAs says what an address is, in words.
func neededAs(what string) string {
	switch v1beta1.NeededFor(what) {
	case v1beta1.NeededForAPIServer:
		return "the API server"
	case v1beta1.NeededForDNS:
		return "a DNS server"
	case v1beta1.NeededForRouting:
		return "a router"
	}
	return "a host"
}

// neededIn returns those of the needs, which are sorted by address, that are in a
// network.
func neededIn(needs []need, cidr netip.Prefix) []need {
	var out []need
	for _, n := range needs {
		if cidr.IsValid() && cidr.Contains(n.ip) {
			out = append(out, n)
		}
	}
	return out
}

// hostsUndisturbed says whether the networks of a peering leave alone what this cluster's
// hosts need, and tells of it if not. A peer's network that is new is never given
// such an address; this is about one that was there first.
func (p *planner) hostsUndisturbed(peer *peering) metav1.Condition {
	c := metav1.Condition{
		Type: v1beta1.ConditionHostsUndisturbed, Status: metav1.ConditionTrue, ObservedGeneration: peer.config.Generation,
		Reason: ReasonUndisturbed, Message: "no node has reported that it needs an address in the networks of the peer",
	}
	var messages []string
	for _, x := range p.peers {
		if x.peer != peer {
			continue
		}
		list := neededIn(p.needs, x.given)
		if len(list) == 0 {
			continue
		}
		names := make([]string, 0, 3)
		for _, n := range list[:min(len(list), 3)] {
			names = append(names, n.String())
		}
		more := ""
		if rest := len(list) - len(names); rest > 0 {
			more = fmt.Sprintf(" and %d more", rest)
		}
		known := ""
		if x.given != x.cidr {
			known = fmt.Sprintf(", here %v,", x.given)
		}
		cure := fmt.Sprintf("To have another network chosen, which ends all connections to this one, delete Network %s/%s", peer.config.Namespace, x.name)
		if p.wish(x).IsValid() {
			e := p.endpoints[peer.id]
			cure = fmt.Sprintf("Write another network into %s of TunnelEndpoint %s/%s, which ends all connections to this one", wishField(x), e.Namespace, e.Name)
		}
		messages = append(messages, fmt.Sprintf("%s %v%s contains %s%s: nodes send packets for them to the gateway of cluster %s. %s",
			x.field, x.cidr, known, strings.Join(names, ", "), more, peer.id, cure))
	}
	if len(messages) == 0 {
		return c
	}
	c.Status, c.Reason, c.Message = metav1.ConditionFalse, ReasonTakesOver, clip(strings.Join(messages, "; "))
	p.event(peer.config.Ref, Warning, c.Reason, c.Message)
	return c
}
