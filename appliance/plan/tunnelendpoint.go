package plan

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// A TunnelEndpoint stands for the Configuration, the GatewayServer or
// GatewayClient, and the PublicKey of its peering, as far as the user did not
// write those: they are planned like all objects of ours, and read like all
// objects of the user's. So there is one way from them to the hosts. What the
// user wrote counts more; where the TunnelEndpoint says otherwise, it says so.

// made reports whether m, of a kind that users write, was made from a
// TunnelEndpoint.
func made(m cluster.Meta) bool { return m.Labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy }

// compareMade orders what users wrote before what was made.
func compareMade(a, b cluster.Meta) int {
	switch {
	case made(a) == made(b):
		return 0
	case made(b):
		return -1
	}
	return 1
}

// supersede says that m, which was made from a TunnelEndpoint, is not needed
// any more: the user wrote one.
func (p *planner) supersede(m cluster.Meta) { p.superseded[keyOf(m.Ref)] = true }

// tunnelEndpoints decides which TunnelEndpoints are sound, one at most per
// remote cluster: the oldest. What was made from others is no longer there,
// except from one that is not sound any more: that stays as it is.
func (p *planner) tunnelEndpoints() {
	p.endpoints = map[string]*cluster.TunnelEndpoint{}
	byName := map[objectKey]*cluster.TunnelEndpoint{}
	for _, e := range p.oldestEndpoints() {
		byName[objectKey{"", e.Namespace, e.Name}] = e
		p.checkEndpoint(e)
		if !p.sound(e.Meta) {
			continue
		}
		if first := p.endpoints[e.RemoteID]; first != nil {
			p.refuse(e.Meta, ReasonDuplicate, "TunnelEndpoint %s/%s already describes cluster %s: delete one of the two", first.Namespace, first.Name, e.RemoteID)
			continue
		}
		p.endpoints[e.RemoteID] = e
	}
	// stays reports whether what was made stays: of a TunnelEndpoint that
	// counts what it still asks for, of one that is not sound what nobody else
	// takes care of.
	stays := func(m cluster.Meta, id string, asks func(e *cluster.TunnelEndpoint) bool) bool {
		e, current := byName[objectKey{"", m.Namespace, m.Name}], p.endpoints[id]
		return !made(m) || e != nil && (current == nil && !p.sound(e.Meta) || current == e && asks(e))
	}
	always := func(*cluster.TunnelEndpoint) bool { return true }
	p.s.Configurations = slices.DeleteFunc(p.s.Configurations, func(x cluster.Configuration) bool { return !stays(x.Meta, x.RemoteID, always) })
	p.s.GatewayServers = slices.DeleteFunc(p.s.GatewayServers, func(x cluster.Gateway) bool { return !stays(x.Meta, x.RemoteID, serves) })
	p.s.GatewayClients = slices.DeleteFunc(p.s.GatewayClients, func(x cluster.Gateway) bool {
		return !stays(x.Meta, x.RemoteID, func(e *cluster.TunnelEndpoint) bool { return !serves(e) })
	})
	p.s.PublicKeys = slices.DeleteFunc(p.s.PublicKeys, func(x cluster.PublicKey) bool {
		return !stays(x.Meta, x.RemoteID, func(e *cluster.TunnelEndpoint) bool { return e.Key != nil })
	})
}

// oldestEndpoints returns all TunnelEndpoints, the oldest first.
func (p *planner) oldestEndpoints() []*cluster.TunnelEndpoint {
	var out []*cluster.TunnelEndpoint
	for i := range p.s.TunnelEndpoints {
		out = append(out, &p.s.TunnelEndpoints[i])
	}
	slices.SortStableFunc(out, func(a, b *cluster.TunnelEndpoint) int { return compareAge(a.Meta, b.Meta) })
	return out
}

// serves reports whether the remote cluster dials.
func serves(e *cluster.TunnelEndpoint) bool { return e.Address == "" }

// checkEndpoint refuses e if it contradicts itself.
func (p *planner) checkEndpoint(e *cluster.TunnelEndpoint) {
	const identity = "spec.clusterIdentity.clusterID"
	p.checkFields(e.Meta)
	p.checkClusterID(e.Meta, identity, e.RemoteID)
	if label := e.Labels[v1beta1.LabelRemoteClusterID]; label != "" && label != e.RemoteID {
		p.refuse(e.Meta, ReasonIDMismatch, "%s is %q, but the label %s is %q: correct one of the two", identity, e.RemoteID, v1beta1.LabelRemoteClusterID, label)
	}
	if len(p.fieldErrors(e.Meta)) > 0 {
		return // some networks are missing
	}
	p.checkMapping(e, "Pod", e.Pod)
	p.checkMapping(e, "External", e.External)
	for _, x := range []struct {
		field string
		cidr  netip.Prefix
	}{{"spec.remotePodCIDR", e.Pod.Remote}, {"spec.remoteExternalCIDR", e.External.Remote}} {
		if why := p.notCarried(x.cidr); why != "" {
			p.refuse(e.Meta, ReasonFamily, "%s %v is of IPv6, %s: write the IPv4 network of cluster %s", x.field, x.cidr, why, e.RemoteID)
			return
		}
		if nobody, is := inUnusable(x.cidr); is {
			p.refuse(e.Meta, ReasonBadAddress, "%s %v is in %v, where no pod and no host of another cluster is: correct it to a network of cluster %s", x.field, x.cidr, nobody, e.RemoteID)
		}
	}
	if !e.Pod.Remote.IsValid() {
		p.refuse(e.Meta, ReasonNoCIDRs, "spec.remotePodCIDR is empty: write the pod network of cluster %s", e.RemoteID)
	} else if external := e.External.Remote; external.IsValid() {
		if external.Addr().Is4() != e.Pod.Remote.Addr().Is4() {
			p.refuse(e.Meta, ReasonFamily, "spec.remotePodCIDR %v and spec.remoteExternalCIDR %v are of different address families: a peering has one", e.Pod.Remote, external)
		} else if external.Overlaps(e.Pod.Remote) {
			p.refuse(e.Meta, ReasonSelfOverlap, "spec.remoteExternalCIDR %v overlaps spec.remotePodCIDR %v: correct the one that is not a network of cluster %s", external, e.Pod.Remote, e.RemoteID)
		}
	}
	if !serves(e) && e.Port == 0 {
		p.refuse(e.Meta, ReasonNoEndpoint, "spec.backend_config.port is missing: write the port to dial at %s, or leave out spec.endpointIP if cluster %s dials", e.Address, e.RemoteID)
	}
	for _, c := range p.s.Configurations {
		p.checkPlace(e, c.Meta, c.RemoteID)
	}
	for _, g := range slices.Concat(p.s.GatewayServers, p.s.GatewayClients) {
		p.checkPlace(e, g.Meta, g.RemoteID)
	}
}

// checkMapping refuses e if a network and the one that it is to be mapped to
// do not fit.
func (p *planner) checkMapping(e *cluster.TunnelEndpoint, kind string, m cluster.Mapping) {
	if m.RemoteNAT.IsValid() && m.Remote.IsValid() && !sameSize(m.RemoteNAT, m.Remote) {
		p.refuse(e.Meta, ReasonInvalidField, "spec.remoteNAT%sCIDR %v is not of the size of spec.remote%sCIDR %v: write one that is, or None to have it chosen", kind, m.RemoteNAT, kind, m.Remote)
	}
}

// sameSize reports whether each address of a network can stand for one of the
// other.
func sameSize(a, b netip.Prefix) bool {
	return a.Bits() == b.Bits() && a.Addr().Is4() == b.Addr().Is4()
}

// checkPlace refuses e if an object of its peering that the user wrote is in
// another namespace.
func (p *planner) checkPlace(e *cluster.TunnelEndpoint, m cluster.Meta, id string) {
	if id == e.RemoteID && m.Namespace != e.Namespace && !made(m) {
		p.refuse(e.Meta, ReasonNamespace, "%s of cluster %s is in another namespace: move one of the two, both belong into the tenant namespace", m.Ref, id)
	}
}

// wish returns the network by which the user wants to reach a peer's; invalid:
// any will do.
func (p *planner) wish(x *peerNetwork) netip.Prefix {
	e := p.endpoints[x.peer.id]
	if e == nil || !made(x.peer.config.Meta) {
		return netip.Prefix{}
	}
	m := e.Pod
	if x.kind == v1beta1.CIDRTypeExternal {
		m = e.External
	}
	if m.Remote != x.cidr {
		return netip.Prefix{} // the Configuration is about to change
	}
	return m.RemoteNAT
}

// refuseWish says that a network that a TunnelEndpoint asks for is taken, and
// by whom.
func (p *planner) refuseWish(x *peerNetwork, wish netip.Prefix, peers []*peerNetwork) {
	p.refuse(p.endpoints[x.peer.id].Meta, ReasonOverlaps, "%s %v overlaps %s: write a network of this size that is free, or None to have one chosen", wishField(x), wish, p.holderOf(wish, peers))
}

// wishField is where a TunnelEndpoint says by which network it wants to reach a peer's.
func wishField(x *peerNetwork) string {
	if x.kind == v1beta1.CIDRTypeExternal {
		return "spec.remoteNATExternalCIDR"
	}
	return "spec.remoteNATPodCIDR"
}

// holderOf says what overlaps a network.
func (p *planner) holderOf(wanted netip.Prefix, peers []*peerNetwork) string {
	return cmp.Or(p.holder(wanted, peers), "a range that can't be used")
}

// holder says who has addresses of a network; empty: nobody.
func (p *planner) holder(wanted netip.Prefix, peers []*peerNetwork) string {
	for _, n := range p.local.list {
		if cidr, ok := p.local.given[keyOf(n.Ref)]; ok && cidr.Overlaps(wanted) {
			return n.Ref.String() + " (" + cidr.String() + ")"
		}
	}
	for _, n := range p.s.Nodes {
		for _, a := range n.Addresses {
			if wanted.Contains(a) {
				return "an address of " + n.Ref.String() + " (" + a.String() + ")"
			}
		}
		for _, cidr := range n.PodCIDRs {
			if cidr.Overlaps(wanted) {
				return "the podCIDR of " + n.Ref.String() + " (" + cidr.String() + ")"
			}
		}
	}
	if list := neededIn(p.needs, wanted); len(list) > 0 {
		return list[0].String()
	}
	for _, x := range peers {
		if x.given.IsValid() && x.given.Overlaps(wanted) {
			return "the network of cluster " + x.peer.id + " (" + x.given.String() + ")"
		}
	}
	return ""
}

// current returns the TunnelEndpoints that stand for a peering, by remote ID.
func (p *planner) current() []*cluster.TunnelEndpoint {
	var out []*cluster.TunnelEndpoint
	for _, id := range slices.Sorted(maps.Keys(p.endpoints)) {
		out = append(out, p.endpoints[id])
	}
	return out
}
