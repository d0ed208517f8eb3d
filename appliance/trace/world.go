// Package trace walks a packet through hosts as they are described by
// [netstate.State] values, and says at every hop what was decided and why:
// which policy rule and route, which rewrite by which rule of which table, what
// connection tracking remembers, which tunnel, and where the packet ends.
//
// It follows what Linux does, not what the configuration means to do, so it
// finds where the two differ. It is pure: what surrounds the appliance (the
// CNI's links and routes, the network between nodes, kube-proxy) is part of
// the [World] that it is given. Not modelled: fragments as packets of their
// own, ARP and its caches, IPv6's neighbour discovery, rate limits, time.
package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A World is all hosts that a packet may pass.
type World struct {
	hosts map[string]*host
	order []*host
	// segments holds who is on each network.
	segments map[string][]port
	ports    int // given to WireGuard devices without a port of their own
}

// A Host is one network namespace: a node, a gateway, a pod, or a machine
// outside of the clusters.
type Host struct {
	Name    string         // unique in the world, such as "milan/node-1"
	Cluster string         // hosts of the same one know each other's addresses by name
	State   netstate.State // what the appliance owns
	Around  Around
	// Names says what addresses and networks are called on this host, in
	// addition to the addresses of hosts of the same cluster.
	Names map[netip.Prefix]string
}

// Around is what a host has that is not of the appliance.
type Around struct {
	Links     []Link
	Addresses []netstate.Address
	Routes    []netstate.Route // Table 0 is the main one
	Rules     []netstate.Rule
	Tables    []netstate.Table
	Services  []Service
	// Forwarding and RPFilter are those of conf/all; for links of the
	// appliance what their own state says counts, too.
	Forwarding bool
	// Forwarding6 is net.ipv6.conf.all.forwarding, which IPv6 asks alone: links have
	// no such setting of their own that packets are asked for (ip6_forward).
	Forwarding6 bool
	RPFilter    int
	// Outside is the name of the host whose namespace is around this one,
	// where veth pairs end and WireGuard has its sockets; empty: none.
	Outside string
}

// A Link is a network device that is not of the appliance.
type Link struct {
	Name    string
	MTU     int    // bytes; 0: 1500
	Segment string // the network that it is on: all links of that name hear each other
	// Bridge says that the link is the bridge that the others of the segment
	// are on, and that what it hands from one to another passes the host's
	// nftables (bridge-nf-call-iptables, which Kubernetes asks for).
	Bridge bool
}

// A Service is what kube-proxy does for one port of a Kubernetes Service: it
// sends what is for one of the addresses to a backend.
type Service struct {
	Name     string
	Proto    string
	VIPs     []netip.AddrPort
	NodePort uint16 // at all addresses of the host; 0: none
	Backends []netip.AddrPort
	// Local keeps the client's address at the NodePort and uses backends
	// without asking for more (externalTrafficPolicy Local); else the node
	// masquerades.
	Local bool
	// PodCIDRs are those whose traffic to VIPs is not masqueraded; none: all.
	PodCIDRs []netip.Prefix
}

// A host is a Host made ready for lookups.
type host struct {
	Host
	addrs  []netstate.Address
	local  map[netip.Addr]string // device of an address
	links  map[string]link
	tables map[uint32][]netstate.Route
	rules  []netstate.Rule
	hooks  map[hookKey][]step
	wg     map[string]netstate.WireGuard
	// listen holds the WireGuard devices whose sockets are in this host's
	// namespace.
	listen map[uint16]endpoint
}

// An endpoint is a device of a host.
type endpoint struct {
	host *host
	dev  string
}

// A port is a link on a network.
type port = endpoint

// A link is one of either kind.
type link struct {
	netstate.Link
	segment    string
	bridge     bool
	forwarding bool
	rpFilter   int
}

// tableMain and tableDefault are the tables that every host's last rules lead
// to (ip-rule(8)).
const (
	tableMain    = 254
	tableDefault = 253
)

const defaultMTU = 1500

// firstPort is where the ports begin that a kernel gives to those who ask for
// none (net.ipv4.ip_local_port_range).
const firstPort = 32768

// New returns the world of these hosts. It complains of names that are there
// twice and of links that nobody can mean.
func New(hosts ...Host) (*World, error) {
	w := &World{hosts: map[string]*host{}, segments: map[string][]port{}}
	for _, v := range hosts {
		if w.hosts[v.Name] != nil || v.Name == "" {
			return nil, fmt.Errorf("host %q: its name is empty or there is another of that name", v.Name)
		}
		h := newHost(v)
		w.hosts[v.Name] = h
		w.order = append(w.order, h)
	}
	for _, h := range w.order {
		if out := h.Around.Outside; out != "" && w.hosts[out] == nil {
			return nil, fmt.Errorf("host %s: there is no host %q around it", h.Name, out)
		}
		if err := w.connect(h); err != nil {
			return nil, err
		}
	}
	for _, h := range w.order {
		h.hooks = compileHooks(h)
		for _, name := range sortedKeys(h.links) {
			if s := h.links[name].segment; s != "" {
				w.segments[s] = append(w.segments[s], port{h, name})
			}
		}
	}
	return w, nil
}

func newHost(v Host) *host {
	v.State = v.State.Normalized() // tables in the order in which they are applied
	h := &host{
		Host: v, local: map[netip.Addr]string{}, links: map[string]link{}, tables: map[uint32][]netstate.Route{},
		wg: map[string]netstate.WireGuard{}, listen: map[uint16]endpoint{},
	}
	for _, l := range v.Around.Links {
		h.links[l.Name] = link{
			Link:    netstate.Link{Name: l.Name, MTU: cmp.Or(l.MTU, defaultMTU)},
			segment: l.Segment, bridge: l.Bridge, forwarding: v.Around.Forwarding, rpFilter: v.Around.RPFilter,
		}
	}
	for _, l := range v.State.Links {
		l.MTU = cmp.Or(l.MTU, defaultMTU)
		h.links[l.Name] = link{Link: l, forwarding: l.Forwarding || v.Around.Forwarding, rpFilter: max(l.RPFilter, v.Around.RPFilter)}
	}
	for _, s := range v.State.Settings {
		if l, ok := h.links[s.Dev]; ok {
			l.forwarding = l.forwarding || s.Forwarding
			h.links[s.Dev] = l
		}
	}
	h.addrs = slices.Concat(v.Around.Addresses, v.State.Addresses)
	for _, a := range h.addrs {
		h.local[a.Prefix.Addr()] = a.Dev
		// The kernel adds the route to who else is on the link.
		if a.Prefix.Bits() < a.Prefix.Addr().BitLen() {
			h.addRoute(netstate.Route{Dst: a.Prefix.Masked(), Dev: a.Dev, Src: a.Prefix.Addr(), Scope: netstate.ScopeLink})
		}
	}
	for _, r := range slices.Concat(v.Around.Routes, v.State.Routes) {
		h.addRoute(r)
	}
	for _, r := range slices.Concat(v.Around.Rules, v.State.Rules) {
		h.rules = append(h.rules, r)
	}
	for _, v6 := range []bool{false, true} {
		h.rules = append(h.rules,
			netstate.Rule{Priority: 32766, IPv6: v6, Table: tableMain},
			netstate.Rule{Priority: 32767, IPv6: v6, Table: tableDefault})
	}
	slices.SortStableFunc(h.rules, func(a, b netstate.Rule) int { return cmp.Compare(a.Priority, b.Priority) })
	for _, d := range v.State.WireGuard {
		h.wg[d.Dev] = d
	}
	return h
}

func (h *host) addRoute(r netstate.Route) {
	r.Table = cmp.Or(r.Table, tableMain)
	h.tables[r.Table] = append(h.tables[r.Table], r)
}

// connect joins what of the host's links ends elsewhere.
func (w *World) connect(h *host) error {
	outside := h
	if h.Around.Outside != "" {
		outside = w.hosts[h.Around.Outside]
	}
	for _, l := range h.State.Links {
		if l.Kind != netstate.KindVeth {
			continue
		}
		if outside == h {
			return fmt.Errorf("host %s: the link %s ends in the namespace around it, and there is none", h.Name, l.Name)
		}
		segment := "veth " + h.Name + " " + l.Name
		near, far := h.links[l.Name], outside.links[l.Peer]
		near.segment = segment
		far.Link = netstate.Link{Name: l.Peer, Kind: netstate.KindVeth, MTU: near.MTU}
		far.segment, far.forwarding, far.rpFilter = segment, outside.Around.Forwarding, outside.Around.RPFilter
		h.links[l.Name], outside.links[l.Peer] = near, far
	}
	for _, dev := range sortedKeys(h.wg) {
		d := h.wg[dev]
		if d.ListenPort == 0 {
			d.ListenPort = firstPort + uint16(w.ports)
			w.ports++
			h.wg[dev] = d
		}
		if other, taken := outside.listen[d.ListenPort]; taken {
			return fmt.Errorf("host %s: the port %d of %s is that of %s on %s", outside.Name, d.ListenPort, dev, other.dev, other.host.Name)
		}
		outside.listen[d.ListenPort] = endpoint{h, dev}
	}
	return nil
}

// Hosts returns the names of all hosts, in the order they were given.
func (w *World) Hosts() []string {
	out := make([]string, len(w.order))
	for i, h := range w.order {
		out[i] = h.Name
	}
	return out
}

// Ports returns the UDP ports at which WireGuard devices listen in the
// namespace of a host.
func (w *World) Ports(name string) []uint16 { return sortedKeys(w.hosts[name].listen) }

// socketHost is the host in whose namespace a host's tunnels have their
// sockets.
func (w *World) socketHost(h *host, l link) *host {
	if l.Kind == netstate.KindWireGuard && h.Around.Outside != "" {
		return w.hosts[h.Around.Outside]
	}
	return h
}

// bridge returns the bridge of a segment, if it has one.
func (w *World) bridge(segment string) (port, bool) {
	for _, p := range w.segments[segment] {
		if p.host.links[p.dev].bridge {
			return p, true
		}
	}
	return port{}, false
}

// name returns what a host calls an address; empty: nothing.
func (w *World) name(h *host, a netip.Addr) string {
	for _, other := range w.order {
		if _, ok := other.local[a]; ok && (other == h || h.Cluster != "" && other.Cluster == h.Cluster) {
			return other.Name
		}
	}
	best := netip.Prefix{}
	for p := range h.Names {
		if p.Contains(a) && (!best.IsValid() || p.Bits() > best.Bits()) {
			best = p
		}
	}
	return h.Names[best]
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	out := make([]K, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}
