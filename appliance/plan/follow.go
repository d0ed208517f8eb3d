package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// followWithdrawn is how long a network that the peer has withdrawn is followed: what
// runs there has this time to go elsewhere, and a peer that is mistaken to correct itself.
const followWithdrawn = 10 * time.Minute

// refusedTold is how many networks an event names: its text is cut after 1024 bytes, which
// is what the validation of events.k8s.io/v1 allows for Event.note.
const refusedTold = 4

// followed is what has come of the networks that a peer tells.
type followed struct {
	networks []cluster.Followed
	refused  []cluster.Refused
}

// A followInput is all that decides which networks of those that a peer tells count.
type followInput struct {
	config *cluster.Configuration
	told   *cluster.CIDRs // nil: the peer says nothing of them, and nothing is withdrawn
	now    time.Time      // zero: no time passes
	// holder says who in this cluster, or which other peer, has addresses of a network;
	// empty: nobody.
	holder func(netip.Prefix) string
}

// follow decides which networks that only the peer's gateway has told count besides those
// of the Configuration, what is refused and why, and when that is to be decided again; zero:
// when something changes.
//
// It adds what the peer tells within the ranges and the number that the Configuration
// allows. What the peer has withdrawn stays for a while, and leaves at once where the spec
// has changed since, a new network overlaps it, or the operator says so. All leave that the
// Configuration no longer allows, or that somebody here needs.
func follow(in followInput) (out followed, again time.Time) {
	c := in.config
	if c.Follow == nil {
		return out, again
	}
	if c.Follow.Problem != "" { // what is there stays, as long as it is in nobody's way
		taken := func(f cluster.Followed) bool { return in.taken(f.CIDR) != "" }
		return followed{slices.DeleteFunc(slices.Clone(c.Followed), taken), c.Refused}, again
	}
	var withdrawn []cluster.Followed
	for _, f := range c.Followed {
		if told := in.tells(f); told || in.told == nil && f.Withdrawn.IsZero() {
			f.Withdrawn, f.Generation = time.Time{}, c.Generation
			out.add(in, f)
			continue
		}
		if f.Withdrawn.IsZero() {
			f.Withdrawn = in.now.Truncate(time.Second) // what a status can hold
		}
		end := f.Withdrawn.Add(followWithdrawn)
		over := f.Generation != c.Generation || !in.now.Before(end) || !f.Withdrawn.After(c.Follow.Forget)
		if !in.now.IsZero() && over || in.denies(f.CIDR) != "" {
			continue
		}
		withdrawn = append(withdrawn, f)
	}
	if in.told != nil {
		for _, kind := range []struct {
			external bool
			list     []netip.Prefix
		}{{false, in.told.Pod}, {true, in.told.External}} {
			for _, cidr := range kind.list {
				f := cluster.Followed{External: kind.external, CIDR: cidr, Generation: c.Generation}
				if !slices.ContainsFunc(c.Followed, f.Same) {
					out.add(in, f)
				}
			}
		}
	}
	// The newest of these count: a peer that tells something else every time has no more of
	// them than of the others.
	slices.SortStableFunc(withdrawn, func(a, b cluster.Followed) int { return b.Withdrawn.Compare(a.Withdrawn) })
	for _, f := range withdrawn[:min(len(withdrawn), c.Follow.Max)] {
		if slices.ContainsFunc(out.networks, func(o cluster.Followed) bool { return o.CIDR.Overlaps(f.CIDR) }) {
			continue
		}
		out.networks = append(out.networks, f)
		if end := f.Withdrawn.Add(followWithdrawn); !in.now.IsZero() && (again.IsZero() || end.Before(again)) {
			again = end
		}
	}
	return out, again
}

// tells reports whether the peer tells a network.
func (in followInput) tells(f cluster.Followed) bool {
	switch {
	case in.told == nil:
		return false
	case f.External:
		return slices.Contains(in.told.External, f.CIDR)
	}
	return slices.Contains(in.told.Pod, f.CIDR)
}

// add follows a network that the peer tells, or says why not. Networks of the spec need
// no word, and those of another address family can't be of the peering.
func (out *followed) add(in followInput, f cluster.Followed) {
	remote := in.config.Remote
	written := remote.Pod
	if f.External {
		written = remote.External
	}
	if slices.Contains(written, f.CIDR) || f.CIDR.Addr().Is4() != remote.All()[0].Addr().Is4() {
		return
	}
	why := in.denies(f.CIDR)
	told := func(o cluster.Followed) bool { return o.CIDR.Overlaps(f.CIDR) }
	if i := slices.IndexFunc(out.networks, told); why == "" && i >= 0 {
		why = fmt.Sprintf("overlaps %v, which the peer tells as well", out.networks[i].CIDR)
	}
	if n := in.config.Follow.Max; why == "" && len(out.networks) >= n {
		why = fmt.Sprintf("is one more than the %d that the peer may add: annotation %s", n, v1beta1.AnnotationFollowMax)
	}
	if why != "" {
		out.refused = append(out.refused, cluster.Refused{CIDR: f.CIDR, Why: why})
		return
	}
	out.networks = append(out.networks, f)
}

// denies says why a network is never followed; empty: it may be.
func (in followInput) denies(cidr netip.Prefix) string {
	within := func(r netip.Prefix) bool { return r.Bits() <= cidr.Bits() && r.Contains(cidr.Addr()) }
	if !slices.ContainsFunc(in.config.Follow.Ranges, within) {
		return fmt.Sprintf("is in none of the ranges %v of annotation %s", in.config.Follow.Ranges, v1beta1.AnnotationFollow)
	}
	return in.taken(cidr)
}

// taken says by whom addresses of a network are taken; empty: by nobody.
func (in followInput) taken(cidr netip.Prefix) string {
	for _, nobody := range unusable() {
		if nobody.Overlaps(cidr) {
			return fmt.Sprintf("overlaps %v, where no pod and no host of another cluster is", nobody)
		}
	}
	for _, x := range labelled(in.config.Remote) {
		if x.cidr.Overlaps(cidr) {
			return fmt.Sprintf("overlaps %s %v", x.field, x.cidr)
		}
	}
	if who := in.holder(cidr); who != "" {
		return "overlaps " + who
	}
	return ""
}

// holdFollowed keeps for peers the networks that are followed already, as long as these are
// free of what counts more, and returns them.
func (p *planner) holdFollowed(peers []*peerNetwork, keep func(*cluster.Network, netip.Prefix) bool) []*peerNetwork {
	exists := p.existingNetworks()
	var out []*peerNetwork
	for _, peer := range peeringsOf(peers) {
		for _, f := range peer.config.Followed {
			x := newPeerNetwork(peer, labelFollowed(f, 0), exists)
			if x.has != nil && x.has.Status == f.CIDR && keep(x.has, f.CIDR) {
				x.given = f.CIDR
				out = append(out, x)
			}
		}
	}
	return out
}

// followPeers adds to the networks of peers, which have what they were given, those that are
// followed; held are those of them that are there already.
func (p *planner) followPeers(peers []*peerNetwork, held []*peerNetwork, waiting string) []*peerNetwork {
	exists := p.existingNetworks()
	for _, peer := range peeringsOf(peers) {
		if made(peer.config.Meta) {
			continue // of a TunnelEndpoint, which says all
		}
		if waiting != "" { // nobody knows yet what is free: all stays
			peer.follow = followed{peer.config.Followed, peer.config.Refused}
			peers = append(peers, slices.DeleteFunc(slices.Clone(held), func(x *peerNetwork) bool { return x.peer != peer })...)
			continue
		}
		others := slices.DeleteFunc(slices.Clone(held), func(x *peerNetwork) bool { return x.peer == peer })
		in := followInput{config: peer.config, told: p.told(peer), now: p.s.Now, holder: func(cidr netip.Prefix) string {
			return cmp.Or(p.holder(cidr, slices.Concat(peers, others)), p.reached(cidr, peer))
		}}
		var again time.Time
		if peer.follow, again = follow(in); !again.IsZero() {
			p.again(again)
		}
		for i, f := range peer.follow.networks {
			x := newPeerNetwork(peer, labelFollowed(f, i), exists)
			x.given = f.CIDR
			peers = append(peers, x)
		}
		p.tellOfFollowed(peer)
	}
	return peers
}

// reached says which single address that this cluster has, or reaches by another way, is in a
// network that a peer tells: of its nodes beyond those that the Node says, of pods wherever
// their addresses are from, of the hosts that IPs stand for, and of other peers' gateways.
// The peer is not trusted with these, as who writes spec.remote is. Empty: none.
func (p *planner) reached(cidr netip.Prefix, by *peering) string {
	for _, n := range p.s.InternalNodes {
		for _, a := range append([]netip.Addr{n.Local, n.Remote, n.VTEP.IP}, n.Addresses...) {
			if cidr.Contains(a) {
				return fmt.Sprintf("an address of node %s (%v)", n.Name, a)
			}
		}
	}
	for _, pod := range p.s.Pods {
		if i := slices.IndexFunc(pod.IPs, cidr.Contains); i >= 0 && pod.Running && !pod.HostNetwork {
			return fmt.Sprintf("an address of %v (%v)", pod.Ref, pod.IPs[i])
		}
	}
	for _, ip := range p.s.IPs {
		if cidr.Contains(ip.IP) {
			return fmt.Sprintf("spec.ip of %v (%v)", ip.Ref, ip.IP)
		}
	}
	in := func(list []string) (string, bool) {
		i := slices.IndexFunc(list, func(text string) bool {
			a, err := netip.ParseAddr(text)
			return err == nil && cidr.Contains(a.Unmap())
		})
		if i < 0 {
			return "", false
		}
		return list[i], true
	}
	for _, g := range p.s.GatewayClients {
		if at, is := in(g.Addresses); is && g.RemoteID != by.id {
			return fmt.Sprintf("the endpoint of cluster %s (%s)", g.RemoteID, at)
		}
	}
	for _, c := range p.s.Connections {
		if c.RemoteID == by.id || c.Peer == nil || c.Peer.Endpoint == nil {
			continue
		}
		if at, is := in(c.Peer.Endpoint.Addresses); is {
			return fmt.Sprintf("the endpoint of cluster %s (%s)", c.RemoteID, at)
		}
	}
	return ""
}

// peeringsOf returns those of a list of networks, in its order.
func peeringsOf(peers []*peerNetwork) []*peering {
	var out []*peering
	for _, x := range peers {
		if !slices.Contains(out, x.peer) {
			out = append(out, x.peer)
		}
	}
	return out
}

func labelFollowed(f cluster.Followed, i int) labelledCIDR {
	x := labelledCIDR{f.CIDR, v1beta1.CIDRTypePod, field("status.follow.networks", i) + ".cidr", i}
	if f.External {
		x.kind = v1beta1.CIDRTypeExternal
	}
	return x
}

// told returns what the gateway of a peer tells of its networks; nil: nothing.
func (p *planner) told(peer *peering) *cluster.CIDRs {
	for _, c := range p.s.Connections {
		if c.RemoteID == peer.id && c.Namespace == peer.config.Namespace && c.Peer != nil && c.Peer.Networks != nil {
			return c.Peer.Networks
		}
	}
	return nil
}

// tellOfFollowed says which networks are followed, which are not, and which end.
func (p *planner) tellOfFollowed(peer *peering) {
	c := peer.config
	if f := c.Follow; f != nil && f.Problem != "" {
		p.remark(c.Meta, Warning, ReasonInvalidField, "%s; until then cluster %s adds no networks by telling them", f.Problem, peer.id)
		return
	}
	var counts []string
	for _, f := range peer.follow.networks {
		if f.Withdrawn.IsZero() {
			counts = append(counts, f.CIDR.String())
			continue
		}
		p.event(c.Ref, Normal, ReasonWithdrawn, fmt.Sprintf("cluster %s tells no more of its network %v, which is reached until %s: end that sooner by isthmusctl peer follow %s --forget",
			peer.id, f.CIDR, f.Withdrawn.Add(followWithdrawn).UTC().Format(time.RFC3339), peer.id))
	}
	if len(counts) > 0 {
		p.event(c.Ref, Normal, ReasonFollowed, fmt.Sprintf("cluster %s has told its networks %s, which count besides those of spec.remote", peer.id, strings.Join(counts, ", ")))
	}
	if refused := peer.follow.refused; len(refused) > 0 {
		var texts []string
		for _, r := range refused[:min(len(refused), refusedTold)] {
			texts = append(texts, fmt.Sprintf("%v, which %s", r.CIDR, r.Why))
		}
		if more := len(refused) - len(texts); more > 0 {
			texts = append(texts, fmt.Sprintf("and %d more, which status.follow has", more))
		}
		p.event(c.Ref, Warning, ReasonNotFollowed, fmt.Sprintf("cluster %s tells networks that are not followed: %s; isthmusctl peer follow %s shows what it may add", peer.id, strings.Join(texts, "; "), peer.id))
	}
}

// followStatus is what has come of the annotations of c; nil: it has none.
func (p *planner) followStatus(c *cluster.Configuration) *v1beta1.ConfigurationFollow {
	peer := p.lookup(c.RemoteID)
	if c.Follow == nil || peer == nil || peer.config == nil || peer.config.Ref != c.Ref {
		return nil
	}
	out := &v1beta1.ConfigurationFollow{}
	for i, f := range peer.follow.networks {
		n := v1beta1.FollowedNetwork{Type: labelFollowed(f, i).kind, CIDR: apiCIDR(f.CIDR), ObservedGeneration: f.Generation}
		if !f.Withdrawn.IsZero() {
			n.WithdrawnAt = ptr(metav1.NewTime(f.Withdrawn))
		}
		out.Networks = append(out.Networks, n)
	}
	for _, r := range peer.follow.refused {
		out.Refused = append(out.Refused, v1beta1.RefusedNetwork{CIDR: apiCIDR(r.CIDR), Message: r.Why})
	}
	return out
}
