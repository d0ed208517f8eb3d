package expect

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// ErrChoice: a cluster has chosen a network or an address that it must not
// choose.
//
// Addresses that are expected come from the topology, with one exception: by
// which network a cluster calls that of another one, which address it gives to
// the host of an IP object, and which addresses of the internal CIDR its nodes
// and gateways have, is its own choice, so it is read from its objects. Then it
// has to keep the rules below. They are the seeds', written here once more, so
// that a product that chooses wrongly, or not at all, is not believed.
//
// A choice is read whenever it is needed, but it must stay: until the row has
// done more than look and send traffic (see MayChange), one that differs from
// what was read first breaks a rule, too. After that it may change at any time,
// for what an action leads to may come steps later.
var ErrChoice = errors.New("a cluster has broken a rule for what it chooses itself")

// A remap says how a cluster calls a network of another one.
type remap struct {
	cluster, remote    string
	object             string // the Configuration that says so
	kind               string // pod or external
	original, remapped netip.Prefix
}

// String names the field that says so.
func (r remap) String() string {
	return fmt.Sprintf("%s of %s: status.remote.cidr.%s, for %s's %s, is %s", r.object, r.cluster, r.kind, r.remote, r.original, r.remapped)
}

// sameNetwork tells whether two remaps are about one network. Of two
// Configurations for one peer both may say something.
func (r remap) sameNetwork(o remap) bool {
	return r.cluster == o.cluster && r.remote == o.remote && r.kind == o.kind && r.original == o.original
}

// remapsOf are those that a Configuration of a cluster for a remote one says.
func remapsOf(cluster, remote string, c unstructured.Unstructured) []remap {
	var out []remap
	for _, kind := range []string{"pod", "external"} {
		spec, _, _ := unstructured.NestedStringSlice(c.Object, "spec", "remote", "cidr", kind)
		status, _, _ := unstructured.NestedStringSlice(c.Object, "status", "remote", "cidr", kind)
		for i := range min(len(spec), len(status)) {
			original, err1 := netip.ParsePrefix(spec[i])
			remapped, err2 := netip.ParsePrefix(status[i])
			if err1 == nil && err2 == nil {
				out = append(out, remap{
					cluster: cluster, remote: remote,
					object: "Configuration " + c.GetNamespace() + "/" + c.GetName(), kind: kind,
					original: original.Masked(), remapped: remapped.Masked(),
				})
			}
		}
	}
	// What it follows of what the peer tells, it calls what the peer does.
	followed, _, _ := unstructured.NestedSlice(c.Object, "status", "follow", "networks")
	for _, n := range followed {
		n, _ := n.(map[string]any)
		kind, _, _ := unstructured.NestedString(n, "type")
		text, _, _ := unstructured.NestedString(n, "cidr")
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, remap{cluster: cluster, remote: remote, object: "Configuration " + c.GetNamespace() + "/" + c.GetName(), kind: kind, original: p, remapped: p})
		}
	}
	return out
}

// A network is a range of addresses with what it is.
type network struct {
	what string
	netip.Prefix
}

// nobodys are ranges that are never given to pods, Services or hosts: this
// host, loopback, link-local, multicast and reserved ones (RFC 6890, RFC 4291).
func nobodys() []network {
	var out []network
	for _, p := range []string{"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/127", "fe80::/10", "ff00::/8"} {
		out = append(out, network{"the reserved range", netip.MustParsePrefix(p)})
	}
	return out
}

// pools are what a cluster may take other networks from: the private ranges of
// RFC 1918, and of RFC 4193 for IPv6.
func pools() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("fd00::/8"),
	}
}

// ownNetworks are those that a cluster can't use for another one's.
func ownNetworks(c world.ClusterSpec) []network {
	return append([]network{
		{"its own pod CIDR", c.PodCIDR}, {"its own service CIDR", c.ServiceCIDR}, {"its own external CIDR", c.ExternalCIDR},
		{"its own internal CIDR", c.InternalCIDR}, {"the network of its nodes", c.LAN},
	}, nobodys()...)
}

// overlapping is the first of networks that shares addresses with p.
func overlapping(p netip.Prefix, all []network) (network, bool) {
	i := slices.IndexFunc(all, func(n network) bool { return n.IsValid() && n.Overlaps(p) })
	if i < 0 {
		return network{}, false
	}
	return all[i], true
}

// checkRemap checks one of the networks of other clusters that a cluster has
// remapped, or left as they are. all are those of the cluster, peers its peers.
//
//   - It is as long as the original.
//   - It overlaps nothing of the cluster, and no other peer's network as the
//     cluster calls it. So an original that does must be remapped.
//   - A network that is not the original is in one of the pools, and there is a
//     reason for it: the original overlaps something of the cluster, or a network
//     of another peer, which may have come first. Where the lab has not made the
//     cluster, its pools and all its reasons are not known.
func checkRemap(r remap, c world.ClusterSpec, all []remap, peers []world.ClusterSpec) error {
	if r.remapped.Bits() != r.original.Bits() || r.remapped.Addr().Is4() != r.original.Addr().Is4() {
		return fmt.Errorf("%w: %s, which is not as long as the original", ErrChoice, r)
	}
	taken, used := ownNetworks(c), ownNetworks(c)
	for _, o := range all {
		if !o.sameNetwork(r) {
			taken = append(taken, network{fmt.Sprintf("what it calls %s's %s", o.remote, o.original), o.remapped})
		}
	}
	if n, ok := overlapping(r.remapped, taken); ok {
		return fmt.Errorf("%w: %s, which overlaps %s, %s", ErrChoice, r, n.what, n.Prefix)
	}
	if r.remapped == r.original || c.ID != "" { // pools and reasons of a cluster of others are not known
		return nil
	}
	if !slices.ContainsFunc(pools(), func(p netip.Prefix) bool { return p.Bits() <= r.remapped.Bits() && p.Overlaps(r.remapped) }) {
		return fmt.Errorf("%w: %s, which is in none of the pools", ErrChoice, r)
	}
	for _, p := range peers {
		for _, n := range []network{{"pod", p.PodCIDR}, {"external", p.ExternalCIDR}} {
			if p.Name != r.remote || n.what != r.kind {
				used = append(used, n)
			}
		}
	}
	for _, o := range all {
		if !o.sameNetwork(r) {
			used = append(used, network{"", o.remapped})
		}
	}
	if _, ok := overlapping(r.original, used); !ok {
		return fmt.Errorf("%w: %s, although nothing of %s overlaps the original", ErrChoice, r, r.cluster)
	}
	return nil
}

// A mapped host is the host of an IP object, and the address that a cluster
// gives it.
type mapped struct {
	cluster, object string
	host, given     netip.Addr
	ofNetwork       bool // of a Network that the object names
}

// mappedIn are the IP objects of a cluster that have an address.
func mappedIn(cluster string, ips []unstructured.Unstructured) []mapped {
	var out []mapped
	for _, ip := range ips {
		host, err1 := netip.ParseAddr(nested(ip, "spec", "ip"))
		given, err2 := netip.ParseAddr(nested(ip, "status", "ip"))
		if err1 == nil && err2 == nil {
			_, named, _ := unstructured.NestedMap(ip.Object, "spec", "networkRef")
			out = append(out, mapped{cluster, "IP " + ip.GetNamespace() + "/" + ip.GetName(), host, given, named})
		}
	}
	return out
}

// checkMapped checks the address of an IP object: it is of the external CIDR of
// its cluster, not the first one, which stands for unknown sources, not the
// host's own, and nobody else's. all are those of the cluster.
func checkMapped(m mapped, c world.ClusterSpec, all []mapped) error {
	is := fmt.Sprintf("%s of %s: status.ip, for %s, is %s", m.object, m.cluster, m.host, m.given)
	switch {
	case m.given == m.host:
		return fmt.Errorf("%w: %s, the host's own", ErrChoice, is)
	case !m.ofNetwork && !c.ExternalCIDR.Contains(m.given):
		return fmt.Errorf("%w: %s, which is not in the external CIDR %s", ErrChoice, is, c.ExternalCIDR)
	case m.given == c.ExternalCIDR.Masked().Addr():
		return fmt.Errorf("%w: %s, which stands for unknown sources", ErrChoice, is)
	}
	for _, o := range all {
		if o.given == m.given && o.object != m.object {
			return fmt.Errorf("%w: %s, which %s has, too", ErrChoice, is, o.object)
		}
	}
	return nil
}

// checkInternal checks the address of the internal CIDR that a node or a gateway
// has: it is in it, not the network's own, and nobody else's. all are those of
// all clusters, by name.
func checkInternal(name string, a netip.Addr, c world.ClusterSpec, all map[string]netip.Addr) error {
	is := fmt.Sprintf("the internal address of %s is %s", name, a)
	switch {
	case !c.InternalCIDR.Contains(a):
		return fmt.Errorf("%w: %s, which is not in the internal CIDR %s", ErrChoice, is, c.InternalCIDR)
	case a == c.InternalCIDR.Masked().Addr():
		return fmt.Errorf("%w: %s, the address of the network itself", ErrChoice, is)
	}
	for other, b := range all {
		if a == b && other != name && strings.HasPrefix(other, c.Name+"/") {
			return fmt.Errorf("%w: %s, which %s has, too", ErrChoice, is, other)
		}
	}
	return nil
}

// MayChange says that the row has done something: what clusters have chosen may
// differ from now on.
func (d *Directory) MayChange() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mayChange = true
}

// steady checks that a choice is what it was when the row read it first. d.mu
// is held.
func (d *Directory) steady(what, value string) error {
	before, ok := d.chosen[what]
	if ok && before != value && !d.mayChange {
		return fmt.Errorf("%w: %s was %s and is %s now, although nothing was done", ErrChoice, what, before, value)
	}
	d.chosen[what] = value
	return nil
}

// asCalledBy is the address by which a cluster knows an address of another one.
// Where the cluster has no Configuration of the other one that is the address
// itself.
func (d *Directory) asCalledBy(viewer, remote string, a netip.Addr) (netip.Addr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []remap
	for _, r := range d.remaps {
		if r.cluster == viewer {
			all = append(all, r)
		}
	}
	for _, r := range all {
		if r.remote != remote || !r.original.Contains(a) {
			continue
		}
		c, _ := d.status.Spec.Cluster(viewer)
		if err := checkRemap(r, c, all, d.peersOf(viewer)); err != nil {
			return netip.Addr{}, err
		}
		if err := d.steady(fmt.Sprintf("what %s calls %s's %s CIDR %s", viewer, remote, r.kind, r.original), r.remapped.String()); err != nil {
			return netip.Addr{}, err
		}
		return rebase(a, r.remapped), nil
	}
	c, _ := d.status.Spec.Cluster(remote)
	if d.configured[viewer+"/"+remote] && (c.PodCIDR.Contains(a) || c.ExternalCIDR.Contains(a)) {
		return netip.Addr{}, fmt.Errorf("%s %w in %s yet: its Configuration of %s does not say how it is called there", a, ErrNoAddress, viewer, remote)
	}
	return a, nil
}

// peersOf are the peers of a cluster in the topology, present or not. d.mu is
// held.
func (d *Directory) peersOf(cluster string) []world.ClusterSpec {
	var out []world.ClusterSpec
	for _, name := range d.topology.Peers(cluster) {
		c, _ := d.status.Spec.Cluster(name)
		out = append(out, c)
	}
	return out
}

// ofIP is the address that a cluster gives to a host by an IP object; false: by
// none.
func (d *Directory) ofIP(ctx context.Context, cluster string, host netip.Addr) (netip.Addr, bool, error) {
	ips, err := d.api.List(ctx, cluster, "ips.ipam.liqo.io")
	if err != nil {
		return netip.Addr{}, false, err
	}
	all := mappedIn(cluster, ips)
	i := slices.IndexFunc(all, func(m mapped) bool { return m.host == host })
	if i < 0 {
		return netip.Addr{}, false, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	c, _ := d.status.Spec.Cluster(cluster)
	if err := checkMapped(all[i], c, all); err != nil {
		return netip.Addr{}, false, err
	}
	return all[i].given, true, d.steady(fmt.Sprintf("what %s calls the host %s", cluster, host), all[i].given.String())
}
