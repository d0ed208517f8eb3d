package desired

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Priorities of our rules, counted from the first of the band.
const (
	firstPriority = 300
	pastOurs      = 0  // from a gateway's pod: behind our rules
	toPeer        = 5  // of a gateway's own ICMP errors: the tunnel
	firstRoutes   = 10 // rules of RouteConfigurations …
	lastRoutes    = 87 // … up to here
	mappedHosts   = 88 // to hosts with mapped addresses that no route knows, …
	mappedToMain  = 89 // … by the main table
	unknownPods   = 89 // to pods that no route knows; where there is no mappedToMain
	closing       = 90 // what must not go on to the main table
	behind        = 91 // our rules end
)

// RPFilterLoose is the value of rp_filter that accepts a packet if there is
// any route back to its source (RFC 3704 §2.4).
const rpFilterLoose = 2

// A host collects the state of one host and what became of each object.
type host struct {
	state    netstate.State
	base     uint32 // first rule priority
	results  map[objectKey]*Result
	problems map[objectKey][]string // fields that did not parse
	notes    map[objectKey][]string
	// hops leads from the internal address of who is at the other end of a
	// link, or behind it, to the way there.
	hops  map[netip.Addr]hop
	links map[string]bool
	ends  map[end]string // what identifies a Geneve link to the kernel
	// missing says of links that should be there why they are not.
	missing map[string]string
	// mapped holds what FirewallConfigurations map addresses to.
	mapped []mappedTarget
	// translations are the networks of the peer that have another name here.
	translations []prefixTranslation
	mappedTable  uint32 // number of the routing table to hosts with mapped addresses
	// noWayBack is the link by which nothing leaves that the tunnel brings; empty:
	// there is none.
	noWayBack string
	gateway   bool // which needs marks itself, and translates networks
	// forPeerTable is the number of a gateway's routing table into the tunnel (see
	// icmperrors.go).
	forPeerTable uint32
	// unknownPodsTable is the number of the table to pods that no route knows.
	unknownPodsTable uint32
	// numbered holds the routing tables that objects name by their number,
	// explicit the rule priorities that they ask for.
	numbered, explicit map[uint32]bool
}

type end struct {
	vni    uint32
	remote netip.Addr
}

type objectKey struct{ kind, namespace, name string }

func key(r cluster.Ref) objectKey { return objectKey{r.Kind, r.Namespace, r.Name} }

func newHost(base uint32, invalid []cluster.InvalidError) *host {
	h := &host{
		base:     cmp.Or(base, firstPriority),
		results:  map[objectKey]*Result{},
		problems: map[objectKey][]string{},
		notes:    map[objectKey][]string{},
		hops:     map[netip.Addr]hop{},
		links:    map[string]bool{},
		ends:     map[end]string{},
		missing:  map[string]string{},
		numbered: map[uint32]bool{},
		explicit: map[uint32]bool{},
	}
	for _, e := range invalid {
		texts := h.problems
		if e.Note {
			texts = h.notes
		}
		texts[key(e.Object)] = append(texts[key(e.Object)], e.Message())
	}
	return h
}

// accept opens the result of an object. It returns false, with the result
// saying so, when a field of the object did not parse.
func (h *host) accept(m cluster.Meta) bool {
	k := key(m.Ref)
	if h.results[k] != nil {
		return h.results[k].OK
	}
	h.results[k] = &Result{Object: m.Ref, ObservedGeneration: m.Generation, OK: true}
	for _, text := range sorted(h.notes[k]) {
		h.warn(m, "%s", text)
	}
	for _, text := range sorted(h.problems[k]) {
		h.refuse(m, "%s", text)
	}
	return h.results[k].OK
}

// refuse says why an object is left out. What a warning said does not matter
// any more.
func (h *host) refuse(m cluster.Meta, format string, args ...any) {
	r := h.results[key(m.Ref)]
	if r.OK {
		r.OK, r.Message = false, ""
	}
	r.Message = join(r.Message, fmt.Sprintf(format, args...))
}

// impair says why an object is in force in part only.
func (h *host) impair(m cluster.Meta, text string) {
	r := h.results[key(m.Ref)]
	r.OK, r.Message = false, join(r.Message, text)
}

// warn says what is odd about an object that is in force.
func (h *host) warn(m cluster.Meta, format string, args ...any) {
	if r := h.results[key(m.Ref)]; r.OK {
		r.Message = join(r.Message, fmt.Sprintf(format, args...))
	}
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// finish returns the state and the results, in their order.
func (h *host) finish() (netstate.State, []Result) {
	results := make([]Result, 0, len(h.results))
	for _, r := range h.results {
		results = append(results, *r)
	}
	slices.SortFunc(results, func(a, b Result) int { return compareRef(a.Object, b.Object) })
	s := h.fewerRules(h.state.Normalized()).Normalized()
	return h.nodesAtOnce(s, leastMapped).Normalized(), results
}

// A link is a Geneve link that a GeneveTunnel asks for.
type link struct {
	tunnel      cluster.GeneveTunnel
	name        string
	description string
	mtu         int // as written; 0: derive
	remote      netip.Addr
	own, peer   netip.Addr // addresses of the internal CIDR
}

// addLink adds a Geneve link and the address of its near end. The result is
// that of the tunnel.
func (h *host) addLink(l link, port uint16, underlay Underlay) {
	fail := func(format string, args ...any) {
		h.refuse(l.tunnel.Meta, format, args...)
		if l.name != "" && !h.hasLink(l.name) {
			h.missing[l.name] = fmt.Sprintf(format, args...)
		}
	}
	switch {
	case linkNameProblem(l.name) != "":
		fail("the name of the link, %q, %s", l.name, linkNameProblem(l.name))
		return
	case l.tunnel.VNI >= 1<<24:
		fail("spec.id: %d is not a VNI; write a number below 16777216", l.tunnel.VNI)
		return
	case !l.remote.IsValid() || !l.own.IsValid():
		fail("an address of the link %s is not known", l.name) // callers say it better
		return
	case l.remote.IsUnspecified() || l.remote.IsMulticast() || l.remote.IsLoopback():
		fail("the other end of the link %s, %s, is not the address of a host", l.name, l.remote)
		return
	case h.hasLink(l.name):
		fail("the link %s exists already for another GeneveTunnel; delete one of the two", l.name)
		return
	}
	e := end{l.tunnel.VNI, l.remote}
	if other, taken := h.ends[e]; taken {
		fail("spec.id: %d is taken by the link %s to the same address, %s; give one of the two another id", e.vni, other, e.remote)
		return
	}
	h.ends[e] = l.name
	mtu, problem := ChooseMTU(l.mtu, GeneveMTU(underlay.To(l.remote), l.remote))
	if problem != "" {
		h.warn(l.tunnel.Meta, "%s", problem)
	}
	h.addDev(netstate.Link{
		Name:        l.name,
		Kind:        netstate.KindGeneve,
		MTU:         mtu,
		MAC:         macOf(l.own),
		Geneve:      netstate.Geneve{VNI: l.tunnel.VNI, Remote: l.remote, Port: port},
		Description: l.description,
		Forwarding:  true,
		RPFilter:    rpFilterLoose,
	})
	h.state.Addresses = append(h.state.Addresses, netstate.Address{Dev: l.name, Prefix: hostPrefix(l.own)})
	if l.peer.IsValid() && !l.peer.IsUnspecified() && !l.peer.IsMulticast() {
		// The kernel learns no neighbour on these links: a machine has room for 1024
		// that are learned, those of all its namespaces together (arp(7): gc_thresh3).
		h.state.Neighbors = append(h.state.Neighbors, netstate.Neighbor{Dev: l.name, Addr: l.peer, MAC: macOf(l.peer)})
		h.hops[l.peer] = hop{via: l.peer, dev: l.name, onLink: true}
	}
}

func (h *host) addDev(l netstate.Link) {
	h.state.Links = append(h.state.Links, l)
	h.links[l.Name] = true
}

func (h *host) hasLink(name string) bool { return h.links[name] }

// linkNameProblem says what the kernel has against a link's name
// (dev_valid_name in net/core/dev.c).
func linkNameProblem(name string) string {
	switch {
	case name == "":
		return "is empty; write 1 to 15 letters, digits, dots or hyphens"
	case len(name) > 15:
		return fmt.Sprintf("has %d bytes; a link's name has 15 at most", len(name))
	case name == "." || name == ".." || strings.ContainsAny(name, "/: \t\n\v\f\r"):
		return "is not a link's name; write letters, digits, dots and hyphens"
	}
	return ""
}

// living returns the objects that are not being deleted, the oldest first.
func living[T any](objects []T, meta func(T) cluster.Meta) []T {
	out := make([]T, 0, len(objects))
	for _, o := range objects {
		if !meta(o).Deleting {
			out = append(out, o)
		}
	}
	slices.SortStableFunc(out, func(a, b T) int { return compareAge(meta(a), meta(b)) })
	return out
}

// hostPrefix returns the prefix that holds one address only.
func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func comparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

func sorted(texts []string) []string {
	texts = slices.Clone(texts)
	slices.Sort(texts)
	return slices.Compact(texts)
}
