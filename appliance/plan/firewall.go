package plan

import (
	"fmt"
	"net/netip"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// maxRuleName is the longest name of a rule that nftables can keep as its
// comment (NFTNL_UDATA_COMMENT_MAXLEN, without its final zero).
const maxRuleName = 127

// ruleName joins parts with hyphens to the name of a rule.
func ruleName(parts ...string) string { return shorten(Name(parts...), maxRuleName) }

// firewallConfiguration returns a FirewallConfiguration with an empty table.
func firewallConfiguration(m metav1.ObjectMeta, table string, ipv6 bool) *v1beta1.FirewallConfiguration {
	o := &v1beta1.FirewallConfiguration{TypeMeta: typeMeta("FirewallConfiguration"), ObjectMeta: m}
	o.Spec.Table = v1beta1.Table{Name: table, Family: v1beta1.TableFamilyIPv4}
	if ipv6 {
		o.Spec.Table.Family = v1beta1.TableFamilyIPv6
	}
	return o
}

// forPeerGateway addresses m to the gateway of one peering.
func forPeerGateway(m metav1.ObjectMeta, remoteID string) metav1.ObjectMeta {
	m.Labels[v1beta1.LabelFirewallCategory], m.Labels[v1beta1.LabelFirewallUnique] = v1beta1.CategoryGateway, remoteID
	return m
}

// forAllGateways returns the metadata of an object of the system namespace that
// is addressed to all gateways.
func (p *planner) forAllGateways(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: p.s.Namespace, Name: name, Labels: map[string]string{
		v1beta1.LabelFirewallCategory: v1beta1.CategoryGateway, v1beta1.LabelFirewallSubcategory: v1beta1.SubcategoryFabric,
	}}
}

// forAllNodes addresses m to all nodes.
func forAllNodes(m metav1.ObjectMeta) metav1.ObjectMeta {
	m.Labels[v1beta1.LabelFirewallCategory], m.Labels[v1beta1.LabelFirewallSubcategory] = v1beta1.CategoryFabric, v1beta1.SubcategoryAllNodes
	return m
}

// chain returns a base chain without rules.
func chain(name string, kind v1beta1.ChainType, hook v1beta1.ChainHook, priority v1beta1.ChainPriority) v1beta1.Chain {
	return v1beta1.Chain{Name: name, Type: kind, Hook: hook, Policy: v1beta1.ChainPolicyAccept, Priority: priority}
}

// translate returns a rule that replaces the addresses of packets: by one
// address, or by those of a network, host bits kept.
func translate[T netip.Addr | netip.Prefix](kind v1beta1.NatType, name string, to T, match ...v1beta1.Match) v1beta1.NatRule {
	return v1beta1.NatRule{Name: name, NatType: kind, To: ptr(fmt.Sprint(to)), Match: match}
}

// from matches packets with a source in this network, to those with such a
// destination.
func from(p netip.Prefix) v1beta1.Match { return matchIP(p, v1beta1.MatchPositionSrc) }
func to(p netip.Prefix) v1beta1.Match   { return matchIP(p, v1beta1.MatchPositionDst) }

func matchIP(p netip.Prefix, position v1beta1.MatchPosition) v1beta1.Match {
	value := p.String()
	if p.IsSingleIP() {
		value = p.Addr().String()
	}
	return v1beta1.Match{Op: v1beta1.MatchOperationEq, IP: &v1beta1.MatchIP{Value: value, Position: position}}
}

// by matches packets that came in by this link, out those that leave by it.
func by(dev string) v1beta1.Match { return matchDev(dev, v1beta1.MatchDevPositionIn) }
func out(dev string) v1beta1.Match {
	return matchDev(dev, v1beta1.MatchDevPositionOut)
}

func matchDev(dev string, position v1beta1.MatchDevPosition) v1beta1.Match {
	return v1beta1.Match{Op: v1beta1.MatchOperationEq, Dev: &v1beta1.MatchDev{Value: dev, Position: position}}
}

// not matches what m does not.
func not(m v1beta1.Match) v1beta1.Match {
	m.Op = v1beta1.MatchOperationNeq
	return m
}

// toPort matches packets of a transport protocol to a port.
func toPort(proto v1beta1.L4Proto, port uint16) []v1beta1.Match {
	return []v1beta1.Match{
		{Op: v1beta1.MatchOperationEq, Proto: &v1beta1.MatchProto{Value: proto}},
		{Op: v1beta1.MatchOperationEq, Port: &v1beta1.MatchPort{Value: strconv.Itoa(int(port)), Position: v1beta1.MatchPositionDst}},
	}
}
