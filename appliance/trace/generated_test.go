package trace_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/plan"
	"github.com/isthmus-net/isthmus/appliance/trace"
)

// A site is one cluster of a generated world.
type site struct {
	id                 string
	pods               []netip.Prefix // one for each node is taken from the first
	external, internal netip.Prefix
	underlay           netip.Prefix // with the router's address
	nodes              int
	overlay            cluster.Overlay
	masquerade         bool
	flat               bool // the network of the nodes knows the way to pods
	mtu, rpFilter      int
	forwards6          bool // gateways forward IPv6, see cluster.Options.IPv6
	// blocks says that the CNI has an IPAM of its own, as Calico: nodePods is a block
	// that it has given to the node, and in nobody's podCIDR.
	blocks bool
	// transit and transitPairs say which peers reach each other through it, as those
	// of cluster.Options.
	transit      bool
	transitPairs [][2]string

	t     testing.TB
	api   *api
	peers []*peering
	known map[string]cluster.Configuration // by peer, once all is settled
}

// A peering is a site's view of a peer.
type peering struct {
	site   *site
	peer   *site
	mode   string
	node   int // index of the node that the gateway runs on
	number int // in the world
	port   uint16
}

// A world is sites that are peers.
type world struct {
	*trace.World
	sites  []*site
	memory *trace.Memory
}

func (s *site) nodeName(i int) string { return fmt.Sprintf("node-%d", i+1) }

// at returns the n-th address of a network.
func at(p netip.Prefix, n int) netip.Addr {
	a := p.Masked().Addr()
	for range n {
		a = a.Next()
	}
	return a
}

func (s *site) is6() bool { return s.pods[0].Addr().Is6() }

// nodePods is where the pods of a node have their addresses.
func (s *site) nodePods(i int) netip.Prefix { return s.piece(i + 1) }

// podCIDR is what Kubernetes says of that.
func (s *site) podCIDR(i int) netip.Prefix {
	if s.blocks {
		return s.piece(i + 201)
	}
	return s.nodePods(i)
}

// piece is a network of the size of a podCIDR out of that of the cluster's pods.
func (s *site) piece(n int) netip.Prefix {
	bytes := s.pods[0].Masked().Addr().AsSlice()
	bits := 24
	if s.is6() {
		bits = 64
	}
	bytes[bits/8-1] = byte(n)
	a, _ := netip.AddrFromSlice(bytes)
	return netip.PrefixFrom(a, bits)
}

func (s *site) nodeAddr(i int) netip.Addr { return at(s.underlay, 11+i) }

// pod is the address of a pod of a node, "a" on all of them.
func (s *site) pod(i int) netip.Addr { return at(s.nodePods(i), 5) }

func (p *peering) tenant() string { return "liqo-tenant-" + p.peer.id }

// gatewayAddr is the address of the gateway's pod.
func (p *peering) gatewayAddr() netip.Addr { return at(p.site.nodePods(p.node), 100+p.number) }

func (p *peering) gatewayName() string { return "gw-" + p.peer.id }

// key is the public key of the gateway of one site towards another.
func (p *peering) key() netstate.Key {
	var k netstate.Key
	copy(k[:], p.site.id+">"+p.peer.id)
	return k
}

// other is the same peering, seen from its peer.
func (p *peering) other() *peering {
	i := slices.IndexFunc(p.peer.peers, func(q *peering) bool { return q.peer == p.site })
	return p.peer.peers[i]
}

// start makes the API objects of a site without peers.
func (s *site) start(t testing.TB) {
	s.t = t
	s.api = newAPI(t, s.id, s.overlay)
	s.api.options.Transit, s.api.options.TransitPairs = s.transit, s.transitPairs
	for i := range s.nodes {
		n := &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: s.nodeName(i)}}
		n.Spec.PodCIDR, n.Spec.PodCIDRs = s.podCIDR(i).String(), []string{s.podCIDR(i).String()}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: s.nodeAddr(i).String()}}
		s.api.add(n)
	}
	network := func(kind, name string, cidr netip.Prefix) {
		n := &ipamv1alpha1.Network{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "Network"}}
		n.Namespace, n.Name, n.Labels = "liqo", name, map[string]string{v1beta1.LabelNetworkType: kind}
		if kind == v1beta1.NetworkTypePod || kind == v1beta1.NetworkTypeReserved {
			n.Labels[v1beta1.LabelNotRemapped] = "true"
		}
		n.Spec.CIDR = v1beta1.CIDR(cidr.String())
		s.api.add(n)
	}
	for i, cidr := range s.pods {
		network(v1beta1.NetworkTypePod, fmt.Sprintf("pod-%d", i), cidr)
	}
	network(v1beta1.NetworkTypeExternal, "external", s.external)
	network(v1beta1.NetworkTypeInternal, "internal", s.internal)
	network(v1beta1.NetworkTypeReserved, "underlay", s.underlay.Masked())
	for name, ip := range map[string]netip.Addr{"lan": s.lan(), "lan-again": s.lan(), "beyond": beyond(s.is6()), "pod": s.mappedPod()} {
		o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "IP"}}
		o.Namespace, o.Name, o.Spec.IP = "default", name, v1beta1.IP(ip.String())
		if name != "lan-again" {
			o.Spec.Masquerade = new(true)
		}
		s.api.add(o)
	}
}

// fresh is a pod of a node that has just started: no object knows it yet.
func (s *site) fresh(i int) netip.Addr { return at(s.nodePods(i), 7) }

func (s *site) freshName(i int) string { return fmt.Sprintf("%s/fresh-%d", s.id, i+1) }

// knownPods are the pods that the API knows, besides gateways, and their nodes.
func (s *site) knownPods() map[netip.Addr]int {
	out := s.twins()
	for i := range s.nodes {
		out[s.pod(i)] = i
	}
	out[s.mappedPod()] = 1
	return out
}

// runPods adds the Pods, where addresses do not say by themselves which node has them.
func (s *site) runPods() {
	if !s.blocks {
		return
	}
	for a, node := range s.knownPods() {
		pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
		pod.Namespace, pod.Name, pod.Spec.NodeName = "default", "pod-"+strings.ReplaceAll(a.String(), ":", "-"), s.nodeName(node)
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: a.String(), PodIPs: []corev1.PodIP{{IP: a.String()}}}
		s.api.add(pod)
	}
}

// mappedPod is a pod of the second node that peers know by another address.
func (s *site) mappedPod() netip.Addr { return at(s.nodePods(1), 6) }

// twins are pods of the site, and their nodes, whose addresses mean something to a
// gateway of a peer: they are its own, the broadcast address of its subnet, or those
// of the peer's nodes and gateways in the internal CIDR.
func (s *site) twins() map[netip.Addr]int {
	out := map[netip.Addr]int{}
	for _, p := range s.peers {
		theirs := p.other()
		special := []netip.Addr{theirs.gatewayAddr(), netstate.RangeOf(theirs.site.nodePods(theirs.node)).To}
		for n := range 8 {
			special = append(special, at(theirs.site.internal, n+1))
		}
		for _, a := range special {
			used := slices.ContainsFunc(s.peers, func(own *peering) bool { return own.gatewayAddr() == a }) || a == s.mappedPod()
			for i := range s.nodes {
				if s.nodePods(i).Contains(a) && !used && a != s.pod(i) && a != at(s.nodePods(i), 1) {
					out[a] = i
				}
			}
		}
	}
	return out
}

// lan is a host beside the nodes, beyond one behind the router.
func (s *site) lan() netip.Addr { return at(s.underlay, 99) }

func beyond(v6 bool) netip.Addr {
	if v6 {
		return netip.MustParseAddr("2001:db8:ffff::9")
	}
	return netip.MustParseAddr("203.0.113.9")
}

// mapped is the address that stands for one, as a peer calls it.
func (s *site) mapped(name string, peer *site) netip.Addr {
	ip := get[*ipamv1alpha1.IP](s.api, "default", name).Status.IP
	return peer.calls(s, netip.MustParseAddr(string(ip)))
}

// configure adds what a user says of a peering.
func (p *peering) configure() {
	a := p.site.api
	labels := map[string]string{v1beta1.LabelRemoteClusterID: p.peer.id}
	meta := func(kind string) (metav1.TypeMeta, metav1.ObjectMeta) {
		return metav1.TypeMeta{APIVersion: "networking.liqo.io/v1beta1", Kind: kind}, metav1.ObjectMeta{Namespace: p.tenant(), Name: p.peer.id, Labels: labels}
	}
	a.add(&corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{
		Name: p.tenant(), Labels: map[string]string{v1beta1.LabelTenantNamespace: "true", v1beta1.LabelRemoteClusterID: p.peer.id},
	}})
	c := &v1beta1.Configuration{}
	c.TypeMeta, c.ObjectMeta = meta("Configuration")
	for _, cidr := range p.peer.pods {
		c.Spec.Remote.CIDR.Pod = append(c.Spec.Remote.CIDR.Pod, v1beta1.CIDR(cidr.String()))
	}
	c.Spec.Remote.CIDR.External = []v1beta1.CIDR{v1beta1.CIDR(p.peer.external.String())}
	a.add(c)
	k := &v1beta1.PublicKey{}
	k.TypeMeta, k.ObjectMeta = meta("PublicKey")
	key := p.other().key()
	k.Spec.PublicKey = key[:]
	a.add(k)
	port := int32(51840)
	if p.mode == cluster.Server {
		g := &v1beta1.GatewayServer{}
		g.TypeMeta, g.ObjectMeta = meta("GatewayServer")
		g.Spec.ServerTemplateRef = corev1.ObjectReference{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayServerTemplate", Namespace: "liqo", Name: "wireguard"}
		nodePort := int32(p.port)
		g.Spec.Endpoint = v1beta1.Endpoint{ServiceType: corev1.ServiceTypeNodePort, Port: &port, NodePort: &nodePort}
		a.add(g)
		return
	}
	g := &v1beta1.GatewayClient{}
	g.TypeMeta, g.ObjectMeta = meta("GatewayClient")
	g.Spec.ClientTemplateRef = corev1.ObjectReference{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayClientTemplate", Namespace: "liqo", Name: "wireguard"}
	udp := corev1.ProtocolUDP
	g.Spec.Endpoint = v1beta1.EndpointStatus{Addresses: []string{p.peer.nodeAddr(p.other().node).String()}, Port: &port, Protocol: &udp}
	a.add(g)
}

// schedule runs the gateway's pod, as Kubernetes does.
func (p *peering) schedule() {
	ip := p.gatewayAddr().String()
	pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
	pod.Namespace, pod.Name = p.tenant(), "gw-"+p.peer.id+"-0"
	pod.Labels = map[string]string{
		v1beta1.LabelAppName: plan.GatewayName(p.peer.id), v1beta1.LabelComponent: v1beta1.ComponentGateway, v1beta1.LabelActive: "true",
	}
	pod.Spec.NodeName = p.site.nodeName(p.node)
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
	p.site.api.add(pod)
}

// report does what the daemons of nodes do: they say where they are.
func (s *site) report() {
	for i := range s.nodes {
		n := get[*v1beta1.InternalNode](s.api, "", s.nodeName(i))
		local, remote := v1beta1.IP(at(s.nodePods(i), 1).String()), v1beta1.IP(s.nodeAddr(i).String())
		n.Status.NodeIP = v1beta1.InternalNodeStatusNodeIP{Local: &local, Remote: &remote}
		if s.overlay == cluster.OverlayVXLAN {
			vtep := desired.OwnVTEP(s.nodeInput(i, s.api.snapshot()))
			assert.Assert(s.t, vtep.IP.IsValid())
			n.Status.VTEP = &v1beta1.VTEP{IP: v1beta1.IP(vtep.IP.String()), MAC: netstate.MAC(vtep.MAC).String()}
			n.Status.Overlays = []v1beta1.Overlay{v1beta1.OverlayVXLAN}
		}
	}
}

func (s *site) underlayInput() desired.Underlay {
	u := desired.Underlay{MTU: 1500, Devs: map[netip.Addr]string{}}
	if s.mtu != 0 {
		u.MTU = s.mtu
	}
	return u
}

func (s *site) nodeInput(i int, snap cluster.Snapshot) desired.NodeInput {
	u := s.underlayInput()
	for _, p := range s.peers {
		if p.node == i {
			u.Devs[p.gatewayAddr()] = trace.Bridge
		}
	}
	in := desired.NodeInput{
		Name: s.nodeName(i), NodeIP: s.nodeAddr(i), Underlay: u,
		Fabrics: snap.Fabrics, Tunnels: snap.Tunnels, Nodes: snap.InternalNodes, Routes: snap.Routes, Firewalls: snap.Firewalls, Problems: snap.Invalid,
	}
	if in.NeedsUplinks() {
		in.Underlay.Uplinks = []string{trace.Eth0}
		for _, a := range in.Remotes() {
			if s.nodePods(i).Contains(a) {
				u.Devs[a] = trace.Bridge
			}
		}
	}
	return in
}

// understood fails if a host can't do all that it is told to.
func understood(t testing.TB, host string, state netstate.State, results []desired.Result) netstate.State {
	t.Helper()
	assert.NilError(t, state.Validate())
	for _, r := range results {
		assert.Assert(t, r.OK && r.Message == "", "%s: %v: %s", host, r.Object, r.Message)
	}
	return state
}

// compile returns the hosts of the site as its daemons make them.
func (s *site) compile() []trace.Host {
	snap := s.api.snapshot()
	s.known = map[string]cluster.Configuration{}
	for _, c := range snap.Configurations {
		s.known[c.RemoteID] = c
	}
	c := trace.Cluster{
		Name: s.id, PodCIDRs: s.pods, Underlay: s.id, MTU: s.mtu, Masquerade: s.masquerade, RPFilter: s.rpFilter, Forwarding6: s.forwards6,
		Routers: []netip.Addr{s.underlay.Addr()}, Names: map[netip.Prefix]string{},
	}
	for i := range s.nodes {
		state, results := desired.Node(s.nodeInput(i, snap))
		host := s.id + "/" + s.nodeName(i)
		c.Nodes = append(c.Nodes, trace.Node{
			Name: s.nodeName(i), Addrs: []netip.Prefix{netip.PrefixFrom(s.nodeAddr(i), s.underlay.Bits())},
			PodCIDRs: []netip.Prefix{s.nodePods(i)}, State: understood(s.t, host, state, results),
		})
		c.Pods = append(c.Pods, trace.Pod{Name: fmt.Sprintf("pod-%d", i+1), Node: s.nodeName(i), Addrs: []netip.Addr{s.pod(i)}})
		if s.blocks {
			c.Pods = append(c.Pods, trace.Pod{Name: fmt.Sprintf("fresh-%d", i+1), Node: s.nodeName(i), Addrs: []netip.Addr{s.fresh(i)}})
		}
	}
	c.Pods = append(c.Pods, trace.Pod{Name: "mapped", Node: s.nodeName(1), Addrs: []netip.Addr{s.mappedPod()}})
	for a, node := range s.twins() {
		c.Pods = append(c.Pods, trace.Pod{Name: "twin-" + a.String(), Node: s.nodeName(node), Addrs: []netip.Addr{a}})
	}
	for _, p := range s.peers {
		in := desired.GatewayInput{
			Name: p.peer.id, Namespace: p.tenant(), RemoteID: p.peer.id, Mode: p.mode, NodeName: s.nodeName(p.node),
			PodIP: p.gatewayAddr(), PublicKey: p.key(), Underlay: s.underlayInput(),
			Configurations: snap.Configurations, PublicKeys: snap.PublicKeys, Fabrics: snap.Fabrics, Tunnels: snap.Tunnels,
			Nodes: snap.InternalNodes, Routes: snap.Routes, Firewalls: snap.Firewalls, Problems: snap.Invalid,
		}
		if p.mode == cluster.Client {
			in.PeerEndpoint = netip.AddrPortFrom(p.peer.nodeAddr(p.other().node), p.other().port)
		} else {
			c.Services = append(c.Services, trace.Service{
				Name: p.gatewayName(), Proto: trace.UDP, NodePort: p.port,
				Backends: []netip.AddrPort{netip.AddrPortFrom(p.gatewayAddr(), desired.WireGuardPort)},
			})
		}
		c.Services = append(c.Services, p.web("web-"+p.peer.id, false), p.web("local-"+p.peer.id, true))
		state, results := desired.Gateway(in)
		c.Gateways = append(c.Gateways, trace.Gateway{
			Name: p.gatewayName(), Node: s.nodeName(p.node), Addr: p.gatewayAddr(), State: understood(s.t, s.id+"/"+p.gatewayName(), state, results),
		})
		for _, cidr := range p.peer.pods {
			c.Names[p.site.sees(p.peer, cidr)] = "pods of " + p.peer.id
		}
		c.Names[p.site.sees(p.peer, p.peer.external)] = "external of " + p.peer.id
	}
	hosts := c.Hosts()
	lan := trace.Host{Name: s.id + "/lan", Cluster: s.id, Around: trace.Around{
		Links:     []trace.Link{{Name: trace.Eth0, Segment: s.id}},
		Addresses: []netstate.Address{{Dev: trace.Eth0, Prefix: netip.PrefixFrom(s.lan(), s.underlay.Bits())}},
		Routes:    []netstate.Route{{Dst: netip.PrefixFrom(at(netip.PrefixFrom(s.lan(), 0), 0), 0), Via: s.underlay.Addr(), Dev: trace.Eth0}},
	}}
	for _, p := range s.peers { // it knows the way to peers
		for _, cidr := range p.site.known[p.peer.id].Remapped.All() {
			lan.Around.Routes = append(lan.Around.Routes, netstate.Route{Dst: cidr, Via: s.nodeAddr(p.node), Dev: trace.Eth0})
		}
	}
	hosts = append(hosts, lan)
	for i := range s.nodes { // an address that all nodes have, as node-local DNS does
		hosts[i].Around.Links = append(hosts[i].Around.Links, trace.Link{Name: "nodelocal"})
		hosts[i].Around.Addresses = append(hosts[i].Around.Addresses, netstate.Address{Dev: "nodelocal", Prefix: netip.PrefixFrom(s.nodeLocal(), s.nodeLocal().BitLen())})
	}
	return hosts
}

func (s *site) nodeLocal() netip.Addr {
	if s.is6() {
		return netip.MustParseAddr("fdcc::a")
	}
	return netip.MustParseAddr("169.254.20.10")
}

// unknown is the address by which a peer sees what is no pod of the site.
func (s *site) unknown(peer *site) netip.Addr { return peer.calls(s, s.external.Addr()) }

// services is the network of ClusterIPs, the same on all sites.
func (s *site) services() netip.Prefix {
	if s.is6() {
		return netip.MustParsePrefix("fd96::/112")
	}
	return netip.MustParsePrefix("10.96.0.0/16")
}

// web is a Service of the site whose one endpoint is a pod of the peer: the one
// on its last node.
func (p *peering) web(name string, local bool) trace.Service {
	port := uint16(30100 + p.number)
	if local {
		port += 50
	}
	return trace.Service{
		Name: name, Proto: trace.TCP, NodePort: port, Local: local, PodCIDRs: p.site.pods,
		VIPs:     []netip.AddrPort{netip.AddrPortFrom(at(p.site.services(), int(port)-30000), 80)},
		Backends: []netip.AddrPort{netip.AddrPortFrom(p.site.calls(p.peer, p.peer.pod(p.peer.nodes-1)), 8080)},
	}
}

// sees returns what a site calls a network of its peer.
func (s *site) sees(peer *site, cidr netip.Prefix) netip.Prefix {
	s.t.Helper()
	c := s.known[peer.id]
	if i := slices.Index(c.Remote.All(), cidr); i >= 0 && i < len(c.Remapped.All()) {
		return c.Remapped.All()[i]
	}
	s.t.Fatalf("%s knows no network %s of %s", s.id, cidr, peer.id)
	return netip.Prefix{}
}

// calls returns what a site calls an address of its peer.
func (s *site) calls(peer *site, a netip.Addr) netip.Addr {
	s.t.Helper()
	for _, cidr := range append(slices.Clone(peer.pods), peer.external) {
		if !cidr.Contains(a) {
			continue
		}
		return netstate.WithHostBits(s.sees(peer, cidr), a)
	}
	s.t.Fatalf("%s is no address of %s", a, peer.id)
	return netip.Addr{}
}

// build makes a world of sites, of which the pairs are peers: the first of a
// pair is the server.
func build(t testing.TB, sites []*site, pairs ...[2]int) *world {
	t.Helper()
	for _, s := range sites {
		s.start(t)
	}
	for i, pair := range pairs {
		a, b := sites[pair[0]], sites[pair[1]]
		a.peers = append(a.peers, &peering{site: a, peer: b, mode: cluster.Server, number: i, port: uint16(30840 + i), node: i % a.nodes})
		b.peers = append(b.peers, &peering{site: b, peer: a, mode: cluster.Client, number: i, node: (i + 1) % b.nodes})
	}
	for _, s := range sites {
		for _, p := range s.peers {
			p.configure()
		}
		s.runPods()
		s.api.settle()
		for _, p := range s.peers {
			p.schedule()
		}
		s.api.settle()
		s.report()
		s.api.settle()
	}
	return assemble(t, sites)
}

// assemble makes the world of what the APIs of the sites say now.
func assemble(t testing.TB, sites []*site) *world {
	t.Helper()
	var hosts []trace.Host
	router := map[netip.Prefix]string{}
	for _, s := range sites {
		hosts = append(hosts, s.compile()...)
		router[s.underlay] = s.id
	}
	out := netip.MustParsePrefix("203.0.113.1/24")
	if sites[0].underlay.Addr().Is6() {
		out = netip.MustParsePrefix("2001:db8:ffff::1/64")
	}
	router[out] = "internet"
	client := trace.Host{Name: "client", Around: trace.Around{
		Links:     []trace.Link{{Name: trace.Eth0, Segment: "internet"}},
		Addresses: []netstate.Address{{Dev: trace.Eth0, Prefix: netip.PrefixFrom(beyond(out.Addr().Is6()), out.Bits())}},
		Routes:    []netstate.Route{{Dst: netip.PrefixFrom(at(netip.PrefixFrom(out.Addr(), 0), 0), 0), Via: out.Addr(), Dev: trace.Eth0}},
	}}
	between := trace.Router("router", router)
	for _, s := range sites {
		for i := range s.nodes {
			if s.flat {
				between.Around.Routes = append(between.Around.Routes, netstate.Route{Dst: s.nodePods(i), Via: s.nodeAddr(i), Dev: routerDev(between, s.underlay)})
			}
		}
	}
	hosts = append(hosts, between, client)
	w, err := trace.New(hosts...)
	assert.NilError(t, err)
	m := &trace.Memory{}
	for _, tr := range w.Connect(m) {
		assert.Assert(t, tr.End.Kind == trace.Delivered, "a handshake:\n%v", tr)
	}
	return &world{w, sites, m}
}

// routerDev is the link of a router on a network.
func routerDev(router trace.Host, network netip.Prefix) string {
	i := slices.IndexFunc(router.Around.Addresses, func(a netstate.Address) bool { return a.Prefix == network })
	return router.Around.Addresses[i].Dev
}

func site4(id string, n int, pods, external string, overlay cluster.Overlay) *site {
	return &site{
		id: id, pods: []netip.Prefix{netip.MustParsePrefix(pods)}, external: netip.MustParsePrefix(external),
		internal: netip.MustParsePrefix("10.80.0.0/16"), underlay: netip.MustParsePrefix(fmt.Sprintf("172.18.%d.1/24", n)),
		nodes: 3, overlay: overlay, masquerade: true, rpFilter: n % 3,
	}
}

func site6(id string, n int, pods, external string, overlay cluster.Overlay) *site {
	return &site{
		id: id, pods: []netip.Prefix{netip.MustParsePrefix(pods)}, external: netip.MustParsePrefix(external),
		internal: netip.MustParsePrefix("fd80::/112"), underlay: netip.MustParsePrefix(fmt.Sprintf("2001:db8:%d::1/64", n)),
		nodes: 3, overlay: overlay, masquerade: true, forwards6: true,
	}
}

// shapes are the worlds that the tests look at.
func shapes() map[string]func(t testing.TB) *world {
	out := map[string]func(t testing.TB) *world{}
	for _, overlay := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
		name := string(overlay)
		out[name+"-disjoint"] = func(t testing.TB) *world {
			return build(t, []*site{
				site4("milan", 1, "10.1.0.0/16", "10.71.0.0/16", overlay),
				site4("rome", 2, "10.2.0.0/16", "10.72.0.0/16", overlay),
			}, [2]int{0, 1})
		}
		out[name+"-overlapping"] = func(t testing.TB) *world {
			return build(t, []*site{
				site4("milan", 1, "10.1.0.0/16", "10.70.0.0/16", overlay),
				site4("rome", 2, "10.1.0.0/16", "10.70.0.0/16", overlay),
			}, [2]int{0, 1})
		}
		out[name+"-three-overlapping"] = func(t testing.TB) *world {
			return build(t, []*site{
				site4("milan", 1, "10.1.0.0/16", "10.70.0.0/16", overlay),
				site4("rome", 2, "10.1.0.0/16", "10.70.0.0/16", overlay),
				site4("paris", 3, "10.1.0.0/16", "10.70.0.0/16", overlay),
			}, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 0})
		}
		out[name+"-ipv6"] = func(t testing.TB) *world {
			return build(t, []*site{
				site6("milan", 1, "fd01::/56", "fd71::/64", overlay),
				site6("rome", 2, "fd02::/56", "fd72::/64", overlay),
			}, [2]int{0, 1})
		}
		out[name+"-ipv6-overlapping"] = func(t testing.TB) *world {
			return build(t, []*site{
				site6("milan", 1, "fd01::/56", "fd71::/64", overlay),
				site6("rome", 2, "fd01::/56", "fd71::/64", overlay),
			}, [2]int{0, 1})
		}
	}
	// A CNI with an IPAM of its own; with Geneve also with many nodes, and one by which
	// pods reach other nodes with their own addresses.
	blocks := func(overlay cluster.Overlay, nodes int, masquerade bool) func(t testing.TB) *world {
		return func(t testing.TB) *world {
			milan, rome := site4("milan", 1, "10.1.0.0/16", "10.70.0.0/16", overlay), site4("rome", 2, "10.1.0.0/16", "10.70.0.0/16", overlay)
			milan.blocks, milan.nodes, rome.nodes, milan.masquerade = true, nodes, 2, masquerade
			return build(t, []*site{milan, rome}, [2]int{0, 1})
		}
	}
	out["geneve-blocks"], out["vxlan-blocks"] = blocks(cluster.OverlayGeneve, 3, false), blocks(cluster.OverlayVXLAN, 3, true)
	out["geneve-blocks-large"] = blocks(cluster.OverlayGeneve, 9, true)
	// So many nodes that a gateway does not ask a rule for each.
	out["geneve-large"] = func(t testing.TB) *world {
		milan, rome := site4("milan", 1, "10.1.0.0/16", "10.70.0.0/16", cluster.OverlayGeneve), site4("rome", 2, "10.1.0.0/16", "10.70.0.0/16", cluster.OverlayGeneve)
		milan.nodes, rome.nodes = 9, 9
		return build(t, []*site{milan, rome}, [2]int{0, 1})
	}
	return out
}

// each runs a test in all worlds.
func each(t *testing.T, test func(t *testing.T, w *world)) {
	for name, build := range shapes() {
		t.Run(name, func(t *testing.T) { test(t, build(t)) })
	}
}

// pairs calls f for every two sites that are peers, in both directions.
func (w *world) pairs(f func(from, to *site)) {
	for _, s := range w.sites {
		for _, p := range s.peers {
			f(s, p.peer)
		}
	}
}
