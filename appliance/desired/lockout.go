package desired

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/trace"
)

// A host that is cut off from its API server is never told that the object is gone
// which did it. So no object of a user's own is in force that would take a
// lifeline: whether it would is not guessed from how it is written, but seen from
// packets that are walked through the host with it and without it.
//
// What the controller has made is not asked: it keeps away from these addresses
// itself, or says so (plan, condition HostsUndisturbed).

// LeftOut is an object that is not used although nothing is wrong with it that a
// computation can see: the host has found that it does harm.
type LeftOut struct {
	Object     cluster.Ref
	Generation int64 // that is left out; an earlier one may be among the objects
	Why        string
}

const (
	// kubeletPort is where an API server asks a node's kubelet for logs and for exec
	// (KubeletConfiguration.port, by default).
	kubeletPort = 10250
	// clientPort stands for the port of a client: one in the middle of those that
	// Linux gives (net.ipv4.ip_local_port_range).
	clientPort = 45678
)

// What hosts are called in the world that packets are walked through: the host
// itself, and everything beyond one of its links.
const thisHost = "this host"

func beyond(dev string) string { return "beyond " + dev }

// A lifeline is a way for packets that a host can't do without.
type lifeline struct {
	what     string // connections to the API server (172.18.1.1:6443)
	from, to string
	packet   trace.Packet
	answered bool // it is a connection: the answer has to come back
	// routing says that only the way counts: no filter looks at these packets.
	routing bool
}

// A vicinity is what a host needs of other hosts, and what is around it there.
type vicinity struct {
	underlay Underlay
	lines    []lifeline
	around   trace.Around
	far      map[string]*trace.Host // beyond each link
	routers  map[netip.Addr]bool
}

func newVicinity(u Underlay) *vicinity {
	return &vicinity{underlay: u, around: trace.Around{Forwarding: true}, far: map[string]*trace.Host{}, routers: map[netip.Addr]bool{}}
}

// reach adds an address and the way there. It returns the host that has it, and
// from which address this one sends to it; false when no way is known, or one by
// a link of ours: then a peer has taken the address over.
func (v *vicinity) reach(a netip.Addr) (at string, own netip.Addr, ok bool) {
	dev, own := v.underlay.Devs[a], v.underlay.Sources[a]
	if dev == "" || strings.HasPrefix(dev, linkPrefix) || !own.IsValid() {
		return "", own, false
	}
	if dev == loopback {
		v.around.Addresses = append(v.around.Addresses, netstate.Address{Dev: loopback, Prefix: hostPrefix(a)})
		return thisHost, a, true
	}
	far := v.far[dev]
	if far == nil {
		far = &trace.Host{Name: beyond(dev), Around: trace.Around{
			Links: []trace.Link{{Name: dev, Segment: dev}},
			Routes: []netstate.Route{
				{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Dev: dev}, {Dst: netip.PrefixFrom(netip.IPv6Unspecified(), 0), Dev: dev},
			},
		}}
		v.far[dev] = far
		v.around.Links = append(v.around.Links, trace.Link{Name: dev, Segment: dev})
	}
	has := func(x netip.Addr) {
		far.Around.Addresses = append(far.Around.Addresses, netstate.Address{Dev: dev, Prefix: hostPrefix(x)})
	}
	has(a)
	via := v.underlay.Routers[a]
	v.around.Routes = append(v.around.Routes, netstate.Route{Dst: hostPrefix(a), Via: via, Dev: dev, Src: own})
	v.around.Addresses = append(v.around.Addresses, netstate.Address{Dev: dev, Prefix: hostPrefix(own)})
	if via.IsValid() && !v.routers[via] && via.Is6() == own.Is6() {
		// The kernel asks where a router is before it takes a route by it (fib_check_nh).
		v.routers[via] = true
		has(via)
		v.around.Routes = append(v.around.Routes, netstate.Route{Dst: hostPrefix(via), Dev: dev, Src: own})
		v.lines = append(v.lines, lifeline{
			what: fmt.Sprintf("packets to the router %s", via),
			from: thisHost, to: far.Name, packet: trace.Ping(own, via), routing: true,
		})
	}
	return far.Name, own, true
}

// apiServers adds the connections between this host and the API server. A node
// has a kubelet that the API server connects to.
func (v *vicinity) apiServers(servers []netip.AddrPort, kubelet bool) {
	for _, a := range servers {
		at, own, ok := v.reach(a.Addr())
		if !ok {
			continue
		}
		v.lines = append(v.lines, lifeline{
			what: fmt.Sprintf("connections to the API server (%s)", a),
			from: thisHost, to: at, packet: trace.Connect(netip.AddrPortFrom(netip.Addr{}, clientPort), a), answered: true,
		})
		if kubelet {
			v.lines = append(v.lines, lifeline{
				what: fmt.Sprintf("connections of the API server (%s) to this node's kubelet (TCP port %d)", a.Addr(), kubeletPort),
				from: at, to: thisHost, answered: true,
				packet: trace.Connect(netip.AddrPortFrom(a.Addr(), clientPort), netip.AddrPortFrom(own, kubeletPort)),
			})
		}
	}
}

// tunnel adds the outer packets of an overlay, in both directions.
func (v *vicinity) tunnel(name string, remote netip.Addr, port uint16) {
	at, own, ok := v.reach(remote)
	if !ok || at == thisHost {
		return
	}
	there := trace.Datagram(netip.AddrPortFrom(own, clientPort), netip.AddrPortFrom(remote, port), 100)
	back := trace.Datagram(netip.AddrPortFrom(remote, clientPort), netip.AddrPortFrom(own, port), 100)
	v.lines = append(v.lines,
		lifeline{what: fmt.Sprintf("%s packets (UDP port %d) to %s", name, port, remote), from: thisHost, to: at, packet: there},
		lifeline{what: fmt.Sprintf("%s packets (UDP port %d) of %s", name, port, remote), from: at, to: thisHost, packet: back})
}

// vicinity returns what a node needs: its API server, and the outer packets of
// the overlay.
func (in NodeInput) vicinity() *vicinity {
	v := newVicinity(in.Underlay)
	v.apiServers(in.APIServers, true)
	if in.Overlay() == cluster.OverlayVXLAN {
		for _, n := range in.Nodes {
			if n.Name != in.Name && n.VTEP.IP.IsValid() {
				v.tunnel("VXLAN", n.VTEP.IP, VXLANPort)
			}
		}
		return v
	}
	for _, f := range in.Fabrics {
		if f.GatewayIP.IsValid() {
			v.tunnel("Geneve", f.GatewayIP, cmp.Or(in.GenevePort, GenevePort))
		}
	}
	return v
}

// vicinity returns what a gateway needs: its API server. What a user does to the
// tunnels is undone when the object is deleted, as long as the gateway hears of that. One
// in a network namespace of its node hears it by another one, that of the node.
func (in GatewayInput) vicinity() *vicinity {
	v := newVicinity(in.Underlay)
	if in.HostInterface == "" {
		v.apiServers(in.APIServers, false)
	}
	return v
}

// cut returns what becomes of each lifeline that a state does not let through, by
// its place.
func (v *vicinity) cut(s netstate.State) map[int]string {
	whole := v.world(s)
	s.Tables = nil
	routing := v.world(s)
	out := map[int]string{}
	for i, l := range v.lines {
		w := whole
		if l.routing {
			w = routing
		}
		if w == nil {
			continue
		}
		if fate := l.fate(w); fate != "" {
			out[i] = fate
		}
	}
	return out
}

// world returns the host with a state, and what is around it; nil if packets can't be
// walked through it: nothing is said of them then.
func (v *vicinity) world(s netstate.State) *trace.World {
	hosts := []trace.Host{{Name: thisHost, State: s, Around: v.around}}
	for _, far := range v.far {
		hosts = append(hosts, *far)
	}
	w, err := trace.New(hosts...)
	if err != nil {
		return nil
	}
	return w
}

// fate says what becomes of the packets of a lifeline; empty: they arrive. They are
// short enough for every link.
func (l lifeline) fate(w *trace.World) string {
	l.packet.Size = 0
	if !l.answered {
		if t := w.Walk(&trace.Memory{}, l.from, l.packet); !t.Delivered(l.to) {
			return ending(t)
		}
		return ""
	}
	f := w.Flow(&trace.Memory{}, l.from, l.packet)
	switch {
	case !f.Request.Delivered(l.to):
		return ending(f.Request)
	case !f.Reply.Delivered(l.from):
		return "are answered, and the answers " + ending(f.Reply)
	case f.Problem() != "":
		return "are changed on their way: " + f.Problem()
	}
	return ""
}

// ending says how a packet ends that does not arrive, without what may differ from
// host to host: the same object is told of once for all.
func ending(t trace.Trace) string {
	switch end := t.End; end.Kind {
	case trace.Dropped:
		return "are " + end.Why
	case trace.Unreachable:
		return "have no route"
	case trace.Lost, trace.Left, trace.Delivered, trace.Looped:
		for _, h := range t.Hops {
			if h.Host == thisHost && h.Out != "" {
				return "leave by " + h.Out + ", where nobody takes them"
			}
		}
	}
	return "do not arrive"
}

// A suspect is an object of a user's own.
type suspect struct {
	cluster.Meta
	route    *cluster.RouteConfiguration
	firewall *cluster.FirewallConfiguration
}

// parts returns of how many rules or chains the object is made, and what one of
// them is called.
func (s suspect) parts() (n int, field string) {
	if s.route != nil {
		return len(s.route.Rules), "spec.table.rules[%d]"
	}
	return len(s.firewall.Chains), "spec.table.chains[%d]"
}

// first returns the object with the first n of its parts.
func (s suspect) first(n int) suspect {
	if s.route != nil {
		rc := *s.route
		rc.Rules = rc.Rules[:n:n]
		s.route = &rc
		return s
	}
	fc := *s.firewall
	fc.Chains = fc.Chains[:n:n]
	s.firewall = &fc
	return s
}

// cure says what to write instead.
func (s suspect) cure() string {
	if s.route != nil {
		return "write dst, src, iif or fwmark so that the rule does not select them"
	}
	return "accept them in an earlier rule of the chain, or write matches that leave them out"
}

// A compiler computes what a host has with some of the objects for it.
type compiler func([]cluster.RouteConfiguration, []cluster.FirewallConfiguration) (netstate.State, []Result)

// reachable computes what a host has without the objects that are left out, and
// without those of users that would cut it off. Addressed says whether an object
// is for this host.
func reachable(v *vicinity, left []LeftOut, routes []cluster.RouteConfiguration, firewalls []cluster.FirewallConfiguration,
	addressed func(labels map[string]string) bool, compile compiler,
) (netstate.State, []Result) {
	used := func(left []LeftOut) ([]cluster.RouteConfiguration, []cluster.FirewallConfiguration) {
		return without(routes, func(o cluster.RouteConfiguration) cluster.Meta { return o.Meta }, left),
			without(firewalls, func(o cluster.FirewallConfiguration) cluster.Meta { return o.Meta }, left)
	}
	routes, firewalls = used(left)
	state, results := compile(routes, firewalls)
	if len(v.lines) > 0 && len(v.cut(state)) > 0 {
		if cuts := v.lockOuts(routes, firewalls, addressed, compile); len(cuts) > 0 {
			state, results = compile(used(cuts))
			left = slices.Concat(left, cuts)
		}
	}
	return state, explained(results, left)
}

// explained returns the results with the reasons why objects are left out.
func explained(results []Result, left []LeftOut) []Result {
	for _, o := range left {
		results = slices.DeleteFunc(results, func(r Result) bool { return key(r.Object) == key(o.Object) })
		results = append(results, Result{Object: o.Object, ObservedGeneration: o.Generation, Message: o.Why})
	}
	slices.SortFunc(results, func(a, b Result) int { return compareRef(a.Object, b.Object) })
	return results
}

// lockOuts returns the objects that would cut a host off, each with the reason. Of
// several that do so together it is the youngest.
func (v *vicinity) lockOuts(routes []cluster.RouteConfiguration, firewalls []cluster.FirewallConfiguration,
	addressed func(labels map[string]string) bool, compile compiler,
) []LeftOut {
	var suspects []suspect
	var ourRoutes []cluster.RouteConfiguration
	var ourFirewalls []cluster.FirewallConfiguration
	users := func(m cluster.Meta) bool { return OfUser(m) && addressed(m.Labels) }
	for _, rc := range routes {
		if users(rc.Meta) {
			suspects = append(suspects, suspect{Meta: rc.Meta, route: &rc})
		} else {
			ourRoutes = append(ourRoutes, rc)
		}
	}
	for _, fc := range firewalls {
		if users(fc.Meta) {
			suspects = append(suspects, suspect{Meta: fc.Meta, firewall: &fc})
		} else {
			ourFirewalls = append(ourFirewalls, fc)
		}
	}
	slices.SortStableFunc(suspects, func(a, b suspect) int { return compareAge(a.Meta, b.Meta) })

	var before map[int]string // what is cut without any of them
	cut := func(list []suspect) (line int, fate string) {
		rs, fs := slices.Clone(ourRoutes), slices.Clone(ourFirewalls)
		for _, s := range list {
			if s.route != nil {
				rs = append(rs, *s.route)
			} else {
				fs = append(fs, *s.firewall)
			}
		}
		state, _ := compile(rs, fs)
		now := v.cut(state)
		if list == nil {
			before = now
		}
		for i := range v.lines {
			if before[i] == "" && now[i] != "" {
				return i, now[i]
			}
		}
		return -1, ""
	}
	cut(nil)
	// cuts is what sort.Search asks for: with more objects, or more of one, nothing gets
	// better but in rare cases, and then who is found is still one with whom it got worse.
	cuts := func(list []suspect) bool {
		line, _ := cut(list)
		return line >= 0
	}
	var out []LeftOut
	for good := 0; cuts(suspects); {
		good += sort.Search(len(suspects)-good-1, func(n int) bool { return cuts(suspects[:good+n+1]) })
		bad := suspects[good]
		line, fate := cut(suspects[:good+1])
		n, field := bad.parts()
		part := sort.Search(max(n-1, 0), func(k int) bool { return cuts(append(slices.Clone(suspects[:good]), bad.first(k+1))) })
		out = append(out, LeftOut{bad.Ref, bad.Generation, fmt.Sprintf("%s: it would cut off the host: %s %s; %s",
			fmt.Sprintf(field, part), v.lines[line].what, fate, bad.cure())})
		suspects = slices.Delete(suspects, good, good+1)
	}
	return out
}

// without returns the objects that are not left out.
func without[T any](objects []T, meta func(T) cluster.Meta, left []LeftOut) []T {
	if len(left) == 0 {
		return objects
	}
	generations := map[objectKey]int64{}
	for _, o := range left {
		generations[key(o.Object)] = o.Generation
	}
	return slices.DeleteFunc(slices.Clone(objects), func(o T) bool {
		generation, is := generations[key(meta(o).Ref)]
		return is && generation == meta(o).Generation
	})
}
