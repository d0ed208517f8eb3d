package plan

import (
	"net/netip"
	"slices"
	"strings"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/ipam"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// unusable are ranges that are never handed out and that no remote network
// can keep: this host, loopback, link-local (the tunnels' own addresses are
// 169.254.18.0/24), multicast and reserved ones (RFC 6890, RFC 4291).
func unusable() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"),
		netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("224.0.0.0/3"),
		netip.MustParsePrefix("::/127"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
	}
}

// inUnusable returns the unusable range that a network is in. One that is not
// known is in none.
func inUnusable(cidr netip.Prefix) (netip.Prefix, bool) {
	for _, nobody := range unusable() {
		if cidr.IsValid() && nobody.Bits() <= cidr.Bits() && nobody.Contains(cidr.Addr()) {
			return nobody, true
		}
	}
	return netip.Prefix{}, false
}

// localNetworks are the networks of this cluster, as they were given.
type localNetworks struct {
	given map[objectKey]netip.Prefix // by Network
	list  []*cluster.Network         // in the order in which they count: oldest first
}

// ofType returns the networks with this value of the label network-type.
func (l localNetworks) ofType(kind string) []netip.Prefix {
	var out []netip.Prefix
	for _, n := range l.list {
		if cidr, ok := l.given[keyOf(n.Ref)]; ok && n.Labels[v1beta1.LabelNetworkType] == kind {
			out = append(out, cidr)
		}
	}
	return out
}

func (l localNetworks) cidrs() cluster.CIDRs {
	return cluster.CIDRs{Pod: l.ofType(v1beta1.NetworkTypePod), External: l.ofType(v1beta1.NetworkTypeExternal)}
}

// A peerNetwork is a Network that the plan makes for a Configuration.
type peerNetwork struct {
	labelledCIDR
	peer  *peering
	name  string
	has   *cluster.Network // as it exists; nil: not yet
	given netip.Prefix
}

// networks gives every Network its CIDR. Who has one keeps it as long as it
// is free of everything that counts more; the others get theirs in the order:
// networks that can't be remapped, other local ones, those of peers.
func (p *planner) networks() {
	peers := p.peerNetworks()
	p.peers, p.needs = peers, p.neededAddresses()
	var exact, movable []*cluster.Network
	for i := range p.s.Networks {
		n := &p.s.Networks[i]
		switch {
		case slices.ContainsFunc(peers, func(x *peerNetwork) bool { return x.has == n }):
		case n.Labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy: // of a peering that is no more
		case n.Labels[v1beta1.LabelNotRemapped] == "true":
			exact = append(exact, n)
		default:
			movable = append(movable, n)
		}
	}
	for _, list := range [][]*cluster.Network{exact, movable} {
		slices.SortStableFunc(list, func(a, b *cluster.Network) int {
			if a.Status.IsValid() != b.Status.IsValid() {
				if a.Status.IsValid() {
					return -1
				}
				return 1
			}
			return compareAge(a.Meta, b.Meta)
		})
	}
	p.local = localNetworks{given: map[objectKey]netip.Prefix{}, list: slices.Concat(exact, movable)}
	for _, n := range p.local.list {
		p.checkFields(n.Meta)
		p.checkNetwork(n)
	}

	// Who has a network keeps it unless it is taken. A new one has to avoid, besides,
	// what hosts need: a network that changes ends all connections to a peer, so that
	// one with such an address in it gets a condition instead.
	var taken, avoid ipam.Set
	take := func(cidr netip.Prefix) {
		taken.Add(cidr)
		avoid.Add(cidr)
	}
	for _, x := range p.needs {
		avoid.Add(host(x.ip))
	}
	for _, cidr := range unusable() {
		take(cidr)
	}
	for _, n := range p.s.Nodes {
		for _, a := range n.Addresses {
			take(host(a))
		}
		for _, cidr := range n.PodCIDRs {
			take(cidr)
		}
	}
	p.exactNetworks(exact, take)
	pools := p.pools()

	keep := func(n *cluster.Network, wanted netip.Prefix) bool {
		if n == nil || !n.Status.IsValid() || n.Status.Bits() != wanted.Bits() || taken.Overlaps(n.Status) {
			return false
		}
		take(n.Status)
		return true
	}
	for _, n := range movable {
		if p.sound(n.Meta) && keep(n, n.CIDR) {
			p.local.given[keyOf(n.Ref)] = n.Status
		}
	}
	for _, x := range peers {
		if wish := p.wish(x); (!wish.IsValid() || x.has != nil && x.has.Status == wish) && keep(x.has, x.cidr) {
			x.given = x.has.Status
		}
	}
	followed := p.holdFollowed(peers, keep)
	for _, n := range movable {
		if _, has := p.local.given[keyOf(n.Ref)]; has || !p.sound(n.Meta) {
			continue
		}
		cidr, ok := ipam.Remap(n.CIDR, avoid, pools)
		if !ok {
			p.refuse(n.Meta, ReasonPoolsExhausted, "spec.cidr %v overlaps %s, and the pools %v have no free network of this size: add a pool or choose another CIDR", n.CIDR, p.holderOf(n.CIDR, peers), pools)
			continue
		}
		take(cidr)
		p.local.given[keyOf(n.Ref)] = cidr
	}
	waiting := p.missingNetworks()
	for _, x := range peers {
		wish := p.wish(x)
		switch {
		case !wish.IsValid() || x.given.IsValid() || waiting != "":
		case !avoid.Overlaps(wish):
			take(wish)
			x.given = wish
		default:
			p.refuseWish(x, wish, peers)
			if keep(x.has, x.cidr) { // as it was until now
				x.given = x.has.Status
			}
		}
	}
	for _, x := range peers {
		if waiting != "" {
			break
		}
		if x.given.IsValid() || p.wish(x).IsValid() {
			continue
		}
		cidr, ok := ipam.Remap(x.cidr, avoid, pools)
		if !ok {
			p.refuse(x.peer.config.Meta, ReasonPoolsExhausted, "%s %v overlaps %s, and the pools %v have no free network of this size: add a pool", x.field, x.cidr, p.holderOf(x.cidr, peers), pools)
			continue
		}
		if x.has != nil && x.has.Status.IsValid() {
			p.remark(x.peer.config.Meta, Normal, ReasonMoved, "%s %v was known as %v, which is now in use by this cluster; it is %v from now on", x.field, x.cidr, x.has.Status, cidr)
		}
		take(cidr)
		x.given = cidr
	}
	p.peers = p.followPeers(peers, followed, waiting)
	p.writeNetworks(p.peers, waiting)
}

// checkNetwork refuses n if nobody can be in it, and remarks that it has nothing
// left for IPs. What is reserved may be any range.
func (p *planner) checkNetwork(n *cluster.Network) {
	if nobody, is := inUnusable(n.CIDR); is && n.Labels[v1beta1.LabelNetworkType] != v1beta1.NetworkTypeReserved {
		p.refuse(n.Meta, ReasonBadAddress, "spec.cidr %v is in %v, whose addresses are never given to pods, Services or hosts: delete the Network and create it anew with another one", n.CIDR, nobody)
	}
	if bits := n.CIDR.Addr().BitLen() - n.CIDR.Bits(); n.CIDR.IsValid() && bits < 32 && n.PreAllocated >= 1<<bits {
		p.remark(n.Meta, Warning, ReasonNetworkFull, "spec.preAllocated %d is all of %v, so no IP gets an address of it: delete the Network and create it anew with a smaller number", n.PreAllocated, n.CIDR)
	}
}

// exactNetworks gives those that can't be remapped the CIDR that they ask for.
// Pod, service and reserved networks may overlap each other: they only say
// what is in use.
func (p *planner) exactNetworks(list []*cluster.Network, take func(netip.Prefix)) {
	var before []*cluster.Network
	for _, n := range list {
		if !p.sound(n.Meta) {
			continue
		}
		kept := n.Status == n.CIDR
		for _, other := range before {
			if other.CIDR.Overlaps(n.CIDR) && !(shared(n) && shared(other)) {
				p.refuse(n.Meta, ReasonOverlaps, "spec.cidr %v overlaps Network %s/%s (%v): choose another CIDR for one of the two", n.CIDR, other.Namespace, other.Name, other.CIDR)
			}
		}
		for _, node := range p.s.Nodes {
			for _, a := range node.Addresses {
				if !shared(n) && n.CIDR.Contains(a) {
					p.refuse(n.Meta, ReasonOverlaps, "spec.cidr %v contains %v, an address of Node %s: choose another CIDR", n.CIDR, a, node.Name)
				}
			}
		}
		if !p.sound(n.Meta) && !kept {
			continue
		}
		before = append(before, n)
		take(n.CIDR)
		p.local.given[keyOf(n.Ref)] = n.CIDR
	}
}

// shared reports whether a network says what is in use rather than asking for
// its use.
func shared(n *cluster.Network) bool {
	switch n.Labels[v1beta1.LabelNetworkType] {
	case v1beta1.NetworkTypePod, v1beta1.NetworkTypeService, v1beta1.NetworkTypeReserved:
		return true
	}
	return n.Labels[v1beta1.LabelShared] == "true"
}

// pools returns where remapped networks are taken from.
func (p *planner) pools() []netip.Prefix {
	pools := p.s.Options.Pools
	if len(pools) == 0 {
		pools = ipam.DefaultPools()
	}
	if p.s.ID != "" && !slices.ContainsFunc(pools, func(x netip.Prefix) bool { return x.Addr().Is6() }) {
		pools = slices.Concat(pools, []netip.Prefix{ipam.ULA(p.s.ID)})
	}
	return pools
}

// missingNetworks says which networks of this cluster must be known before
// those of peers can be told from them.
func (p *planner) missingNetworks() string {
	var missing []string
	for _, kind := range []string{v1beta1.NetworkTypePod, v1beta1.NetworkTypeExternal, v1beta1.NetworkTypeInternal} {
		if len(p.local.ofType(kind)) == 0 {
			missing = append(missing, kind)
		}
	}
	if len(missing) == 0 {
		return ""
	}
	return "no usable Network with label " + v1beta1.LabelNetworkType + "=" + strings.Join(missing, "|") + ": create it, or see the condition of the one that is there"
}

// peerNetworks returns what the Configurations ask for, those of the oldest
// first.
func (p *planner) peerNetworks() []*peerNetwork {
	exists := p.existingNetworks()
	var sound []*peering
	for _, peer := range p.peerings {
		if peer.config != nil {
			sound = append(sound, peer)
		}
	}
	slices.SortStableFunc(sound, func(a, b *peering) int { return compareAge(a.config.Meta, b.config.Meta) })
	var out []*peerNetwork
	for _, peer := range sound {
		for _, c := range labelled(peer.config.Remote) {
			out = append(out, newPeerNetwork(peer, c, exists))
		}
	}
	return out
}

// existingNetworks returns all Networks by namespace and name.
func (p *planner) existingNetworks() map[objectKey]*cluster.Network {
	exists := map[objectKey]*cluster.Network{}
	for i := range p.s.Networks {
		exists[objectKey{"", p.s.Networks[i].Namespace, p.s.Networks[i].Name}] = &p.s.Networks[i]
	}
	return exists
}

func newPeerNetwork(peer *peering, c labelledCIDR, exists map[objectKey]*cluster.Network) *peerNetwork {
	name := Name(peer.config.Name, c.kind, strings.NewReplacer(".", "-", ":", "-", "/", "-").Replace(c.cidr.String()))
	return &peerNetwork{labelledCIDR: c, peer: peer, name: name, has: exists[objectKey{"", peer.config.Namespace, name}]}
}

// writeNetworks plans the Networks of peers and gives all their status.
func (p *planner) writeNetworks(peers []*peerNetwork, waiting string) {
	for _, x := range peers {
		o := &ipamv1alpha1.Network{TypeMeta: metav1.TypeMeta{APIVersion: ipamVersion, Kind: "Network"}}
		o.ObjectMeta = owned(x.name, x.peer.id, x.peer.config.Meta)
		o.Labels[v1beta1.LabelCIDRType] = x.kind
		o.Spec.CIDR = apiCIDR(x.cidr)
		p.add(o)
		if x.given.IsValid() {
			m := cluster.Meta{Ref: cluster.Ref{Kind: "Network", Namespace: o.Namespace, Name: o.Name}}
			if x.has != nil {
				m = x.has.Meta
			}
			p.networkStatus(m, x.given)
		}
		if x.kind == v1beta1.CIDRTypePod {
			x.peer.remote.Pod = append(x.peer.remote.Pod, x.cidr)
			x.peer.remap.Pod = append(x.peer.remap.Pod, x.given)
		} else {
			x.peer.remote.External = append(x.peer.remote.External, x.cidr)
			x.peer.remap.External = append(x.peer.remap.External, x.given)
		}
	}
	for _, n := range p.local.list {
		p.networkStatus(n.Meta, p.local.given[keyOf(n.Ref)])
	}
	internal := p.local.ofType(v1beta1.NetworkTypeInternal)
	for _, peer := range p.peerings {
		switch {
		case peer.config == nil:
		case waiting != "":
			p.wait(peer.config.Meta, ReasonWaiting, "%s", waiting)
		case slices.ContainsFunc(peer.remapped(), func(given netip.Prefix) bool { return !given.IsValid() }) && p.sound(peer.config.Meta):
			p.wait(peer.config.Meta, ReasonOverlaps, "a network that its TunnelEndpoint asks for is taken: see the condition of that")
		case !p.sound(peer.config.Meta):
		case len(internal) > 0 && internal[0].Addr().Is4() != peer.config.Remote.All()[0].Addr().Is4():
			p.refuse(peer.config.Meta, ReasonFamily, "spec.remote.cidr is of another address family than the internal CIDR %v of this cluster, by which nodes and gateways reach each other: list the networks of its family, or install with ipam.internalCIDR of the other one", internal[0])
		default:
			peer.ready = true
		}
	}
}

func (p *planner) networkStatus(m cluster.Meta, given netip.Prefix) {
	o := &ipamv1alpha1.Network{TypeMeta: metav1.TypeMeta{APIVersion: ipamVersion, Kind: "Network"}, ObjectMeta: existing(m)}
	if given.IsValid() {
		o.Status.CIDR = apiCIDR(given)
	}
	o.Status.Conditions = p.accepted(m)
	p.out.Statuses = append(p.out.Statuses, o)
}
