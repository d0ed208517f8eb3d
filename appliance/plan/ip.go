package plan

import (
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/ipam"
)

// An address is an IP with the address by which peers reach it.
type address struct {
	*cluster.IP
	network *cluster.Network // that the address is taken from; its name is empty if there is none
	given   netip.Addr       // invalid: it has none
}

// unknownSources plans, for every peer, the IP of whatever is no pod there, as
// this cluster sees it: the first address of the peer's external network. Other
// peers see its own address in place of that, where their way leads through
// this cluster.
func (p *planner) unknownSources() {
	for _, peer := range p.peerings {
		if !peer.ready {
			continue
		}
		external := ofFamily(peer.remap.External, peer.ipv6())
		if len(external) == 0 || !p.unknownSourceAddr(peer.ipv6()).IsValid() {
			continue
		}
		o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: ipamVersion, Kind: "IP"}}
		o.ObjectMeta = owned(Name(peer.config.Name, "unknown-source"), peer.id, peer.config.Meta)
		o.Spec.IP = apiIP(external[0].Addr())
		p.add(o)
		p.ownIPs[objectKey{"IP", o.Namespace, o.Name}] = external[0].Addr()
	}
}

// outdated reports whether an IP was made for something that is no more: it
// goes, or makes room for another one, for its spec.ip can't be changed.
func (p *planner) outdated(ip *cluster.IP) bool {
	want, planned := p.ownIPs[keyOf(ip.Ref)]
	return planned && want != ip.IP || !planned && made(ip.Meta)
}

// addresses gives IPs their address. Once given it can't be changed.
func (p *planner) addresses() {
	for i := range p.s.IPs {
		if ip := &p.s.IPs[i]; !p.outdated(ip) {
			p.ips = append(p.ips, &address{IP: ip})
		}
	}
	slices.SortStableFunc(p.ips, func(a, b *address) int { return compareAge(a.Meta, b.Meta) })

	taken, holder := map[netip.Addr]bool{}, map[netip.Addr]*cluster.IP{}
	for _, ipv6 := range []bool{false, true} {
		taken[p.unknownSourceAddr(ipv6)] = true
	}
	wanting := map[objectKey][]*address{} // by Network
	var order []*cluster.Network
	check := p.addressCheck()
	for _, x := range p.ips {
		p.checkFields(x.Meta)
		check(x.IP)
		p.checkNetworkRef(x.IP)
		x.network = p.networkOf(x.IP)
		if x.Status.IsValid() {
			p.checkAddress(x, holder[x.Status])
			x.given, taken[x.Status] = x.Status, true
			if holder[x.Status] == nil {
				holder[x.Status] = x.IP
			}
			continue
		}
		if !p.sound(x.Meta) {
			continue
		}
		network := keyOf(x.network.Ref)
		if wanting[network] == nil {
			order = append(order, x.network)
		}
		wanting[network] = append(wanting[network], x)
	}
	for _, network := range order {
		cidr := p.local.given[keyOf(network.Ref)]
		wants := wanting[keyOf(network.Ref)]
		free := ipam.Addresses(len(wants), cidr, network.PreAllocated, taken)
		for i, x := range wants {
			if i >= len(free) {
				p.refuse(x.Meta, ReasonNetworkFull, "Network %s/%s (%v) has no free address: delete IPs that are not needed", network.Namespace, network.Name, cidr)
				continue
			}
			x.given, taken[free[i]] = free[i], true
		}
	}
}

// addressCheck returns a function that refuses IPs for addresses that can't be
// those of a host or a pod, or that stand for one already.
func (p *planner) addressCheck() func(ip *cluster.IP) {
	nobody := unusable()
	external, internal := p.local.ofType(v1beta1.NetworkTypeExternal), p.local.ofType(v1beta1.NetworkTypeInternal)
	in := func(list []netip.Prefix, a netip.Addr) (netip.Prefix, bool) {
		for _, c := range list {
			if c.Contains(a) {
				return c, true
			}
		}
		return netip.Prefix{}, false
	}
	return func(ip *cluster.IP) {
		if c, is := in(nobody, ip.IP); is {
			p.refuse(ip.Meta, ReasonBadAddress, "spec.ip %v is in %v, where no host is that gateways could reach: create the IP anew with the address of a host or a pod", ip.IP, c)
		}
		if c, is := in(external, ip.IP); is {
			p.refuse(ip.Meta, ReasonBadAddress, "spec.ip %v is in the external CIDR %v of this cluster, whose addresses stand for others: create the IP anew with the address of the host or the pod itself", ip.IP, c)
		}
		if c, is := in(internal, ip.IP); is {
			p.refuse(ip.Meta, ReasonBadAddress, "spec.ip %v is in the internal CIDR %v, which is closed to peers: create the IP anew with the address of the host itself", ip.IP, c)
		}
	}
}

// checkNetworkRef refuses ip if it refers to something that is no Network.
func (p *planner) checkNetworkRef(ip *cluster.IP) {
	group, _, _ := strings.Cut(ip.NetworkRef.APIVersion, "/")
	if kind := ip.NetworkRef.Kind; kind != "" && kind != "Network" {
		p.refuse(ip.Meta, ReasonNoNetwork, "spec.networkRef.kind: %q has no addresses to give: create the IP anew with the kind Network", kind)
	}
	if group != "" && group != ipamv1alpha1.GroupVersion.Group {
		p.refuse(ip.Meta, ReasonNoNetwork, "spec.networkRef.apiVersion: %q has no Networks: create the IP anew with %s", ip.NetworkRef.APIVersion, ipamVersion)
	}
}

// checkAddress refuses an IP whose address can't be its own. The first that
// has it is nil if that is x.
func (p *planner) checkAddress(x *address, first *cluster.IP) {
	cidr := p.local.given[keyOf(x.network.Ref)]
	switch {
	case first != nil:
		p.refuse(x.Meta, ReasonDuplicate, "status.ip %v belongs to IP %s/%s: delete this object and create it anew", x.Status, first.Namespace, first.Name)
	case x.Status == p.unknownSourceAddr(x.Status.Is6()):
		p.refuse(x.Meta, ReasonDuplicate, "status.ip %v is what peers see of everything that is no pod of this cluster: delete this object and create it anew", x.Status)
	case x.network.Name != "" && !cidr.Contains(x.Status):
		p.refuse(x.Meta, ReasonNetworkChanged, "status.ip %v is not in Network %s/%s, which is %v: delete this object and create it anew", x.Status, x.network.Namespace, x.network.Name, cidr)
	}
}

// networkOf returns the Network that an IP takes its address from: the one it
// names, or the first external one of its address family. It refuses the IP if
// there is none.
func (p *planner) networkOf(ip *cluster.IP) *cluster.Network {
	var other *cluster.Network // of the other family
	for _, n := range p.local.list {
		named := n.Name == ip.NetworkRef.Name && (n.Namespace == ip.NetworkRef.Namespace || ip.NetworkRef.Namespace == "" && n.Namespace == ip.Namespace)
		first := ip.NetworkRef.Name == "" && n.Labels[v1beta1.LabelNetworkType] == v1beta1.NetworkTypeExternal
		cidr, given := p.local.given[keyOf(n.Ref)]
		switch {
		case !given || !named && !first:
		case !ip.IP.IsValid() || ip.IP.Is6() == cidr.Addr().Is6():
			return n
		case other == nil:
			other = n
		}
	}
	switch {
	case other != nil:
		p.refuse(ip.Meta, ReasonFamily, "spec.ip %v and Network %s/%s (%v) are of different address families: create the IP anew with an address of the other one, or with a Network of its own family in spec.networkRef",
			ip.IP, other.Namespace, other.Name, p.local.given[keyOf(other.Ref)])
	case !p.sound(ip.Meta) || ip.Status.IsValid():
	case ip.NetworkRef.Name == "":
		p.refuse(ip.Meta, ReasonNoNetwork, "there is no usable Network with label %s=%s: create it", v1beta1.LabelNetworkType, v1beta1.NetworkTypeExternal)
	default:
		p.refuse(ip.Meta, ReasonNoNetwork, "spec.networkRef: there is no usable Network %s/%s: create it or correct the reference", ip.NetworkRef.Namespace, ip.NetworkRef.Name)
	}
	return &cluster.Network{}
}

// writeIPs gives all IPs their status.
func (p *planner) writeIPs() {
	for _, x := range p.ips {
		o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: ipamVersion, Kind: "IP"}, ObjectMeta: existing(x.Meta)}
		if x.given.IsValid() {
			o.Status.IP = apiIP(x.given)
			cidr := x.CIDR // can't be changed either
			if network := p.local.given[keyOf(x.network.Ref)]; !cidr.IsValid() && network.Contains(x.given) {
				cidr = network
			}
			if cidr.IsValid() {
				o.Status.CIDR = apiCIDR(cidr)
			}
		}
		o.Status.Conditions = p.accepted(x.Meta)
		p.out.Statuses = append(p.out.Statuses, o)
	}
}
