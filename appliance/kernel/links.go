package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// linkGroup is the group of links that we make, from the moment they exist:
// a link that was made and not yet given its alias is ours as well.
const linkGroup = 0x15801580

// A link is a link of the namespace, ours or not.
type link struct {
	index int
	ours  bool
	kind  string // as the kernel says
	alias alias
	state netstate.Link // when it is ours
	mtu   int
	peer  int  // index of the other end of a veth pair, where that is
	guest bool // the end of a pair of a gateway in another namespace

	ipv4, forwarding bool // whether it speaks IPv4, and forwards it
}

// A linkTable is all links of the namespace at one moment.
type linkTable struct {
	byName map[string]link
	names  map[int]string
	index  map[string]int
}

func (ns *NetNS) listLinks() (linkTable, error) {
	t := linkTable{map[string]link{}, map[int]string{}, map[string]int{}}
	msgs, err := dump(ns.rt.c, unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg))
	if err != nil {
		return t, fmt.Errorf("list links: %w", err)
	}
	for _, m := range msgs {
		name, l, err := parseLink(m.Data)
		if err != nil {
			return t, fmt.Errorf("list links: %w", err)
		}
		if l.ours && ns.impl == Userspace {
			l.state.Kind = ns.userspaceKind(name, l)
		}
		t.byName[name], t.names[l.index], t.index[name] = l, name, l.index
	}
	return t, nil
}

// userspaceKind returns the kind of a link of ours where this process serves
// the wireguard links: a tun device that it serves is one, and one of the
// kernel, left from before, is another kind.
func (ns *NetNS) userspaceKind(name string, l link) netstate.LinkKind {
	switch {
	case l.kind == "tun" && ns.served(name) != nil:
		return netstate.KindWireGuard
	case l.kind == string(netstate.KindWireGuard):
		return "wireguard of the kernel"
	default:
		return l.state.Kind
	}
}

// parseLink returns the link of a message of rtnetlink.
func parseLink(b []byte) (string, link, error) {
	nlink, err := netlink.LinkDeserialize(nil, b)
	if err != nil {
		return "", link{}, err
	}
	a := nlink.Attrs()
	l := link{index: a.Index, kind: nlink.Type(), mtu: a.MTU}
	l.alias, l.ours = parseAlias(a.Alias)
	if a.Alias == "" && a.Group == linkGroup {
		l.ours = true
	}
	if l.guest = a.Group == peerGroup && l.kind == string(netstate.KindVeth); l.guest {
		l.state.Down = a.RawFlags&unix.IFF_UP == 0
	}
	if l.kind == "tuntap" {
		l.kind = "tun"
	}
	conf := inetConf(b)
	l.ipv4, l.forwarding = conf != nil, conf.get(confForwarding) != 0
	if !l.ours {
		return a.Name, l, nil
	}
	l.state = netstate.Link{
		Name:        a.Name,
		Kind:        netstate.LinkKind(l.kind),
		MTU:         a.MTU,
		Description: l.alias.description,
		Down:        a.RawFlags&unix.IFF_UP == 0,
	}
	if len(a.HardwareAddr) == len(l.state.MAC) {
		l.state.MAC = netstate.MAC(a.HardwareAddr)
	}
	if g, ok := nlink.(*netlink.Geneve); ok {
		l.state.Geneve = netstate.Geneve{VNI: g.ID, Port: g.Dport}
		if remote, ok := netip.AddrFromSlice(g.Remote); ok {
			l.state.Geneve.Remote = remote.Unmap()
		}
	}
	if l.kind == string(netstate.KindVeth) {
		l.peer = a.ParentIndex
		// An end of which the other one is down has no carrier.
		l.state.Down = l.state.Down || a.RawFlags&unix.IFF_LOWER_UP == 0
	}
	if v, ok := nlink.(*netlink.Vxlan); ok {
		l.state.Kind, l.state.VXLAN = vxlanState(v)
	}
	l.state.Forwarding = l.forwarding
	l.state.RPFilter = int(conf.get(confRPFilter))
	l.state.AcceptLocal = conf.get(confAcceptLocal) != 0
	return a.Name, l, nil
}

// addLink makes a link and sets it up.
func (ns *NetNS) addLink(l netstate.Link) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Group = l.Name, l.MTU, linkGroup
	if l.MAC != (netstate.MAC{}) {
		attrs.HardwareAddr = l.MAC[:]
	}
	var err error
	switch {
	case l.Kind == netstate.KindGeneve:
		err = ns.nl.LinkAdd(&netlink.Geneve{LinkAttrs: attrs, ID: l.Geneve.VNI, Remote: l.Geneve.Remote.AsSlice(), Dport: l.Geneve.Port})
	case l.Kind == netstate.KindVXLAN:
		err = ns.nl.LinkAdd(vxlanLink(attrs, l.VXLAN))
	case l.Kind == netstate.KindWireGuard && ns.impl == Userspace:
		err = ns.serve(l)
	case l.Kind == netstate.KindWireGuard:
		err = ns.addWireGuard(l)
	case l.Kind == netstate.KindVeth:
		err = ns.addVeth(l)
	default:
		return fmt.Errorf("kind %q: unknown", l.Kind)
	}
	switch {
	case errors.Is(err, unix.EEXIST), errors.Is(err, unix.EBUSY) && ns.exists(l.Name):
		return ns.explainExists(l)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTSUP):
		return fmt.Errorf("%w: the kernel has no %s links (module %s): %w", ErrUnsupported, l.Kind, l.Kind, err)
	case err != nil:
		return err
	}
	made, err := ns.getLink(l.Name)
	if err != nil {
		return fmt.Errorf("it was made and is gone already: %w", errors.Join(err, ns.whyGone(l.Name)))
	}
	return ns.setLink(made, l)
}

// getLink returns one link, as it is at one moment.
func (ns *NetNS) getLink(name string) (link, error) {
	a := attrs{linkHeader(0, 0, 0)}
	a.str(unix.IFLA_IFNAME, name)
	msgs, err := ns.rt.c.Execute(nl.Message{
		Header: nl.Header{Type: unix.RTM_GETLINK, Flags: nl.Request},
		Data:   a.b,
	})
	if err != nil {
		return link{}, plain(err)
	}
	if len(msgs) != 1 {
		return link{}, fmt.Errorf("the kernel answers with %d links", len(msgs))
	}
	_, l, err := parseLink(msgs[0].Data)
	return l, err
}

// whyGone says what became of a link that this process serves.
func (ns *NetNS) whyGone(name string) error {
	u := ns.served(name)
	if u == nil {
		return nil
	}
	select {
	case <-u.dev.Wait():
		return errors.New("userspace WireGuard has given up; see its warnings")
	default:
		return errors.New("userspace WireGuard still serves it")
	}
}

func (ns *NetNS) exists(name string) bool {
	_, err := ns.nl.LinkByName(name)
	return err == nil
}

func (ns *NetNS) explainExists(l netstate.Link) error {
	links, err := ns.listLinks()
	if err != nil {
		return err
	}
	if other, ok := links.byName[l.Name]; ok && !other.ours {
		return fmt.Errorf("there is a link of this name that is not ours (type %s, no alias %q): remove or rename it", other.kind, AliasPrefix+"…")
	}
	switch l.Kind {
	case netstate.KindGeneve:
		return fmt.Errorf("another link has geneve id %d, remote %s and port %d already: remove it or choose another id", l.Geneve.VNI, l.Geneve.Remote, l.Geneve.Port)
	case netstate.KindVXLAN:
		return fmt.Errorf("another link has vxlan id %d and dstport %d already: remove it or choose another id", l.VXLAN.VNI, l.VXLAN.Port)
	}
	return unix.EEXIST
}

// changeLink changes a link of ours in place, or makes it anew when the
// kernel can't.
func (ns *NetNS) changeLink(l netstate.Link) error {
	links, err := ns.listLinks()
	if err != nil {
		return err
	}
	old, ok := links.byName[l.Name]
	switch {
	case !ok:
		return ns.addLink(l)
	case !old.ours:
		return ns.explainExists(l)
	}
	if l.Kind == netstate.KindGeneve && old.state.Geneve != l.Geneve {
		err := ns.setGeneveRemote(old.index, l.Geneve.Remote)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return ns.recreateLink(l, links)
		}
		if err != nil {
			return fmt.Errorf("remote %s: %w", l.Geneve.Remote, err)
		}
	}
	return ns.setLink(old, l)
}

// recreateLink makes a link anew and gives it back its addresses and routes.
func (ns *NetNS) recreateLink(l netstate.Link, links linkTable) error {
	on := func(dev string) bool { return dev == l.Name }
	before, err := ns.listRouting(links)
	if err != nil {
		return err
	}
	if err := ns.deleteLink(l.Name); err != nil {
		return err
	}
	if err := ns.addLink(l); err != nil {
		return err
	}
	if links, err = ns.listLinks(); err != nil {
		return err
	}
	addrs := slices.DeleteFunc(before.Addresses, func(a netstate.Address) bool { return !on(a.Dev) })
	routes := slices.DeleteFunc(before.Routes, func(r netstate.Route) bool { return !on(r.Dev) })
	return errors.Join(append(ns.addAddresses(addrs, links.index), ns.addRoutes(routes, true, links.index)...)...)
}

// setGeneveRemote is "ip link set DEV type geneve remote ADDR".
func (ns *NetNS) setGeneveRemote(index int, remote netip.Addr) error {
	const ( // of <linux/if_link.h>
		iflaGeneveRemote  = 2
		iflaGeneveRemote6 = 7
	)
	a := attrs{linkHeader(index, 0, 0)}
	a.nest(unix.IFLA_LINKINFO, func(a *attrs) {
		a.str(unix.IFLA_INFO_KIND, string(netstate.KindGeneve))
		a.nest(unix.IFLA_INFO_DATA, func(a *attrs) {
			if remote.Is4() {
				a.ip(iflaGeneveRemote, remote)
			} else {
				a.ip(iflaGeneveRemote6, remote)
			}
		})
	})
	return ns.rt.do(request{typ: unix.RTM_NEWLINK, data: a.b})
}

// setLink gives a link of ours its alias, MTU, MAC and IPv4 settings, and sets
// it up.
func (ns *NetNS) setLink(old link, l netstate.Link) error {
	want := old.alias
	want.description = l.Description
	a := attrs{linkHeader(old.index, unix.IFF_UP, unix.IFF_UP)}
	a.bytes(unix.IFLA_IFALIAS, []byte(want.String()))
	if l.MTU != 0 && l.MTU != old.mtu {
		a.u32(unix.IFLA_MTU, uint32(l.MTU))
	}
	if l.MAC != (netstate.MAC{}) && l.MAC != old.state.MAC {
		a.bytes(unix.IFLA_ADDRESS, l.MAC[:])
	}
	a.inetConf(func(a *attrs) {
		a.u32(confForwarding, boolToU32(l.Forwarding))
		a.u32(confRPFilter, uint32(l.RPFilter))
		a.u32(confAcceptLocal, boolToU32(l.AcceptLocal))
		a.u32(confPromoteSecondaries, 1)
	})
	err := ns.rt.do(request{typ: unix.RTM_SETLINK, data: a.b})
	if err == nil && l.Kind == netstate.KindVeth {
		err = ns.raisePeer(old, l.MTU)
	}
	switch {
	case errors.Is(err, unix.EINVAL) && l.MTU != 0 && l.MTU != old.mtu:
		return fmt.Errorf("mtu %d: %w", l.MTU, err)
	case errors.Is(err, unix.EADDRINUSE) && l.Kind == netstate.KindVXLAN:
		return fmt.Errorf("dstport %d: a program has this UDP port: stop it or choose another port: %w", l.VXLAN.Port, err)
	}
	return err
}

// setAlias changes the alias of a link of ours.
func (ns *NetNS) setAlias(index int, al alias) error {
	a := attrs{linkHeader(index, 0, 0)}
	text := al.String()
	if len(text) > 255 { // IFALIASZ-1
		return fmt.Errorf("alias %q: has more than 255 bytes; use fewer peers with endpoints or a shorter description", text)
	}
	a.bytes(unix.IFLA_IFALIAS, []byte(text))
	return ns.rt.do(request{typ: unix.RTM_SETLINK, data: a.b})
}

// deleteLink deletes a link of ours. One that is gone is no error.
func (ns *NetNS) deleteLink(name string) error {
	if u := ns.served(name); u != nil {
		ns.serves(name, nil)
		u.dev.Close()
	}
	links, err := ns.listLinks()
	if err != nil {
		return err
	}
	l, ok := links.byName[name]
	if !ok || !l.ours {
		return nil
	}
	err = ns.rt.do(request{typ: unix.RTM_DELLINK, data: linkHeader(l.index, 0, 0)})
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

func linkHeader(index int, flags, change uint32) []byte {
	return appendU32s([]byte{unix.AF_UNSPEC, 0, 0, 0}, uint32(index), flags, change)
}

func boolToU32(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// An alias is what we write into IFLA_IFALIAS: that the link is ours, where
// it leads, and the endpoints that its WireGuard peers were configured with.
// WireGuard itself forgets those as soon as it learns others.
type alias struct {
	description string
	endpoints   string // as encodeEndpoints writes them
}

const endpointsMark = " | endpoints "

// parseAlias reports whether an alias is one of ours.
func parseAlias(s string) (alias, bool) {
	rest, ours := strings.CutPrefix(s, AliasPrefix)
	if !ours && s+" " != AliasPrefix {
		return alias{}, false
	}
	d, e, _ := strings.Cut(rest, endpointsMark)
	return alias{d, e}, true
}

// String returns the alias as the kernel keeps it.
func (a alias) String() string {
	s := AliasPrefix + a.description
	if a.endpoints != "" {
		s += endpointsMark + a.endpoints
	}
	return s
}

// encodeEndpoints returns the configured endpoints of peers, each with the
// beginning of the peer's key.
func encodeEndpoints(peers []netstate.WireGuardPeer) string {
	var out []string
	for _, p := range peers {
		if p.Endpoint.IsValid() {
			out = append(out, p.PublicKey.String()[:8]+"="+p.Endpoint.String())
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// endpointOf returns what encodeEndpoints wrote for the peer.
func (a alias) endpointOf(key netstate.Key) netip.AddrPort {
	for word := range strings.FieldsSeq(a.endpoints) {
		if e, ok := strings.CutPrefix(word, key.String()[:8]+"="); ok {
			ap, _ := netip.ParseAddrPort(e)
			return ap
		}
	}
	return netip.AddrPort{}
}
