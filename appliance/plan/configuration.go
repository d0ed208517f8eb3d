package plan

import (
	"cmp"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/exchange"
)

// clusterID is the form of a cluster ID: a DNS label.
var clusterID = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// peering returns the peering with a remote cluster.
func (p *planner) peering(id string) *peering {
	i, found := slices.BinarySearchFunc(p.peerings, id, func(x *peering, id string) int { return strings.Compare(x.id, id) })
	if !found {
		p.peerings = slices.Insert(p.peerings, i, &peering{id: id})
	}
	return p.peerings[i]
}

// checkRemoteID refuses m, an object whose label says that it is of the peering
// with the cluster id, unless id makes sense.
func (p *planner) checkRemoteID(m cluster.Meta, id string) {
	if id == "" {
		p.refuse(m, ReasonNoRemoteID, "metadata.labels: set %s to the ID of the remote cluster", v1beta1.LabelRemoteClusterID)
		return
	}
	p.checkClusterID(m, "metadata.labels["+v1beta1.LabelRemoteClusterID+"]", id)
}

// checkClusterID refuses m unless id, which is in this field of it, can be the
// ID of the remote cluster, and is that of the namespace if that has one.
func (p *planner) checkClusterID(m cluster.Meta, field, id string) {
	switch {
	case !clusterID.MatchString(id):
		p.refuse(m, ReasonBadRemoteID, "%s: %q is not a cluster ID; use at most 63 lower-case letters, digits and hyphens, as the remote cluster's ConfigMap %s says",
			field, id, v1beta1.ClusterIDConfigMap)
		return
	case id == p.s.ID:
		p.refuse(m, ReasonRemoteIsLocal, "%s: %q is the ID of this cluster: set it to that of the remote one", field, id)
		return
	}
	for _, ns := range p.s.Namespaces {
		if want := ns.Labels[v1beta1.LabelRemoteClusterID]; ns.Name == m.Namespace && want != "" && want != id {
			p.refuse(m, ReasonIDMismatch, "%s is %q, but namespace %s belongs to the peering with %q: correct that or move the object to the tenant namespace of %s",
				field, id, ns.Name, want, id)
		}
	}
}

// configurations decides which Configurations are sound, one at most per
// remote cluster: the oldest, but one that a user wrote before one that was made
// from a TunnelEndpoint.
func (p *planner) configurations() {
	list := slices.Clone(p.s.Configurations)
	slices.SortStableFunc(list, func(a, b cluster.Configuration) int {
		return cmp.Or(compareMade(a.Meta, b.Meta), compareAge(a.Meta, b.Meta))
	})
	for i := range list {
		c := &list[i]
		p.checkFields(c.Meta)
		p.checkRemoteID(c.Meta, c.RemoteID)
		p.checkCIDRs(c)
		if !p.sound(c.Meta) {
			continue
		}
		peer := p.peering(c.RemoteID)
		if first := peer.config; first != nil {
			if made(c.Meta) {
				p.supersede(c.Meta)
				continue
			}
			p.refuse(c.Meta, ReasonDuplicate, "Configuration %s/%s already describes cluster %s: delete one of the two", first.Namespace, first.Name, c.RemoteID)
			continue
		}
		peer.config = c
	}
}

// checkCIDRs refuses c if the networks in it can't be those of one cluster.
func (p *planner) checkCIDRs(c *cluster.Configuration) {
	if len(p.fieldErrors(c.Meta)) > 0 {
		return // already refused, and some networks are missing
	}
	all := labelled(c.Remote)
	if len(all) == 0 {
		p.refuse(c.Meta, ReasonNoCIDRs, "spec.remote.cidr is empty: list the pod and external CIDRs of cluster %s", c.RemoteID)
	}
	for i, a := range all {
		if why := p.notCarried(a.cidr); why != "" {
			p.refuse(c.Meta, ReasonFamily, "%s %v is of IPv6, %s: list the IPv4 networks of cluster %s", a.field, a.cidr, why, c.RemoteID)
			return
		}
		if nobody, is := inUnusable(a.cidr); is {
			p.refuse(c.Meta, ReasonBadAddress, "%s %v is in %v, where no pod and no host of another cluster is: correct it to a network of cluster %s", a.field, a.cidr, nobody, c.RemoteID)
		}
		if a.cidr.Addr().Is4() != all[0].cidr.Addr().Is4() {
			p.refuse(c.Meta, ReasonFamily, "%s %v and %s %v are of different address families: a peering has one", all[0].field, all[0].cidr, a.field, a.cidr)
			return
		}
		for _, b := range all[:i] {
			if a.cidr.Overlaps(b.cidr) {
				p.refuse(c.Meta, ReasonSelfOverlap, "%s %v overlaps %s %v: correct the one that is not a network of cluster %s", a.field, a.cidr, b.field, b.cidr, c.RemoteID)
			}
		}
	}
}

// notCarried says why a network of a peer can't be reached if it is of IPv6; empty: it can.
func (p *planner) notCarried(cidr netip.Prefix) string {
	if !cidr.IsValid() || cidr.Addr().Is4() || p.s.Options.IPv6 {
		return ""
	}
	return "which peerings do not carry yet, because the network of a gateway's pod does not forward it"
}

// checkLocalCIDRs remarks where c says something else of this cluster's networks
// than is so: the gateway goes by it when it tells the peer the MTU of a path.
func (p *planner) checkLocalCIDRs(c *cluster.Configuration) {
	for _, x := range []struct {
		field    string
		says, is []netip.Prefix
	}{
		{"spec.local.cidr.pod", c.Local.Pod, p.local.ofType(v1beta1.NetworkTypePod)},
		{"spec.local.cidr.external", c.Local.External, p.local.ofType(v1beta1.NetworkTypeExternal)},
	} {
		for i, cidr := range x.says {
			if len(x.is) > 0 && !slices.Contains(x.is, cidr) {
				p.remark(c.Meta, Warning, ReasonContradicts, "%s is %v, but these networks of this cluster are %v: correct it, or leave spec.local out to have it filled in", field(x.field, i), cidr, x.is)
			}
		}
	}
}

// A labelledCIDR is a network of a remote cluster and where it is written.
type labelledCIDR struct {
	cidr     netip.Prefix
	kind     string // v1beta1.CIDRTypePod or CIDRTypeExternal
	field    string
	position int
}

// labelled returns the networks of c, pods first.
func labelled(c cluster.CIDRs) []labelledCIDR {
	var out []labelledCIDR
	for i, cidr := range c.Pod {
		out = append(out, labelledCIDR{cidr, v1beta1.CIDRTypePod, field("spec.remote.cidr.pod", i), i})
	}
	for i, cidr := range c.External {
		out = append(out, labelledCIDR{cidr, v1beta1.CIDRTypeExternal, field("spec.remote.cidr.external", i), i})
	}
	return out
}

// writeConfigurations gives every Configuration its status, and those that do
// not say what the local networks are that as well.
func (p *planner) writeConfigurations() {
	for i := range p.s.Configurations {
		c := &p.s.Configurations[i]
		if p.superseded[keyOf(c.Ref)] {
			continue
		}
		if !made(c.Meta) {
			p.checkLocalCIDRs(c)
		}
		o := &v1beta1.Configuration{TypeMeta: typeMeta("Configuration"), ObjectMeta: existing(c.Meta)}
		o.Status.Conditions = []metav1.Condition{p.condition(c.Meta, v1beta1.ConditionNetworkCIDRsConfigured, ReasonConfigured, "")}
		local := p.local.cidrs()
		if len(local.Pod) > 0 {
			o.Status.Local = &v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: apiCIDRs(local.Pod), External: apiCIDRs(local.External)}}
			if err := exchange.CheckNetworks("status.local.cidr", local.Pod, local.External); err != nil {
				p.remark(c.Meta, Warning, ReasonNotTold, "%v, so the gateway tells cluster %s none of them, and it can follow no further one: make fewer Networks, each of a wider range", err, c.RemoteID)
			}
		}
		if peer := p.lookup(c.RemoteID); peer != nil && peer.ready && peer.config.Ref == c.Ref {
			o.Status.Remote = &v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{
				Pod: apiCIDRs(peer.remap.Pod[:len(c.Remote.Pod)]), External: apiCIDRs(peer.remap.External[:len(c.Remote.External)]),
			}}
			o.Status.Conditions = append(o.Status.Conditions, p.hostsUndisturbed(peer))
			if !made(c.Meta) && len(c.Local.All()) == 0 && o.Status.Local != nil {
				p.out.Applies = append(p.out.Applies, &v1beta1.Configuration{
					TypeMeta: typeMeta("Configuration"), ObjectMeta: existing(c.Meta),
					Spec: v1beta1.ConfigurationSpec{Local: o.Status.Local.DeepCopy()},
				})
			}
		}
		o.Status.Follow = p.followStatus(c)
		p.out.Statuses = append(p.out.Statuses, o)
	}
}

// lookup returns the peering with a remote cluster; nil: nothing is sound in
// it.
func (p *planner) lookup(id string) *peering {
	i, found := slices.BinarySearchFunc(p.peerings, id, func(x *peering, id string) int { return strings.Compare(x.id, id) })
	if !found {
		return nil
	}
	return p.peerings[i]
}
