package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Priorities of the kernel's own hooks (netfilter_ipv4.h). All nat chains run
// inside the kernel's two NAT hooks, in the order of their own priorities.
const (
	conntrackPriority      = -200 // NF_IP_PRI_CONNTRACK
	destinationNATPriority = -100 // NF_IP_PRI_NAT_DST: prerouting and output
	sourceNATPriority      = 100  // NF_IP_PRI_NAT_SRC: postrouting and input
)

// serviceMark is the bit of the mark by which kube-proxy tells itself to
// masquerade a packet (--iptables-masquerade-bit).
const serviceMark = 0x4000

type hookKey struct {
	hook string
	ipv6 bool
}

// A step is one thing that happens in a hook.
type step struct {
	priority  int32
	conntrack bool
	nat       []chain // of the NAT hook, in the order of their priorities
	isNAT     bool
	chain     chain
}

// A chain is a chain of nftables with its table, or what kube-proxy does.
type chain struct {
	netstate.Chain
	table    string
	family   netstate.Family
	services []Service
}

// compileHooks puts the chains of all tables into the order in which packets
// meet them, as if the tables had been added in the order in which they are
// given, the surrounding ones first.
func compileHooks(h *host) map[hookKey][]step {
	out := map[hookKey][]step{}
	tables := slices.Concat(h.Around.Tables, h.State.Tables)
	for _, v6 := range []bool{false, true} {
		for _, hook := range []string{"prerouting", "input", "forward", "output", "postrouting"} {
			var steps []step
			nat := step{isNAT: true, priority: sourceNATPriority}
			if hook == "prerouting" || hook == "output" {
				nat.priority = destinationNATPriority
				steps = append(steps, step{conntrack: true, priority: conntrackPriority})
			}
			for _, t := range tables {
				if t.Family != netstate.FamilyINET && (t.Family != netstate.FamilyIPv4 || v6) && (t.Family != netstate.FamilyIPv6 || !v6) {
					continue
				}
				for _, c := range t.Chains {
					if c.Hook != hook {
						continue
					}
					compiled := chain{Chain: c, table: t.Name, family: t.Family}
					if c.Type == "nat" {
						nat.nat = append(nat.nat, compiled)
					} else {
						steps = append(steps, step{priority: c.Priority, chain: compiled})
					}
				}
			}
			if len(h.Around.Services) > 0 && hook != "forward" && hook != "input" {
				nat.nat = append(nat.nat, chain{
					Chain:    netstate.Chain{Name: "services", Type: "nat", Hook: hook, Priority: nat.priority},
					table:    "kube-proxy",
					services: h.Around.Services,
				})
			}
			// Of two with the same priority the one that was added last is the
			// first (nf_hook_entries_grow).
			slices.Reverse(nat.nat)
			slices.Reverse(steps)
			slices.SortStableFunc(nat.nat, func(a, b chain) int { return cmp.Compare(a.Priority, b.Priority) })
			if hook != "forward" {
				steps = append(steps, nat)
			}
			slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(a.priority, b.priority) })
			out[hookKey{hook, v6}] = steps
		}
	}
	return out
}

// run lets a packet through all that is in a hook. It returns what ended it
// there, or nil.
func (x *transit) run(hook string) *End {
	for _, s := range x.h.hooks[hookKey{hook, x.p.Is6()}] {
		var end *End
		mark := x.mark
		switch {
		case s.conntrack:
			x.track()
		case s.isNAT:
			end = x.nat(hook, s)
		default:
			_, end = x.chain(hook, s.chain)
		}
		if end == nil && hook == "output" {
			end = x.reroute(s, mark)
		}
		if end != nil {
			return end
		}
	}
	return nil
}

// nat is the kernel's NAT hook: chains decide for the first packet of a
// connection, and only until one has; all others are translated as that was.
func (x *transit) nat(hook string, s step) *End {
	e := destination
	if hook == "postrouting" || hook == "input" {
		e = source
	}
	switch x.state {
	case unseen, invalid, untracked:
		return nil
	case related:
		x.translateError(e)
		return nil
	case fresh:
		c := x.ct.connection
		by := ""
		for _, chain := range s.nat {
			if c.decided[index(e)] {
				break
			}
			name, end := x.chain(hook, chain)
			if end != nil {
				return end
			}
			by = name
		}
		if !c.decided[index(e)] {
			by = "its source port is taken by another connection"
			x.setUp(e, map[side]netip.Addr{source: x.p.Src, destination: x.p.Dst}[e], false)
		}
		x.translate(e, by)
	case established:
		by := "its connection"
		x.translate(e, by)
	}
	return nil
}

// translate gives one end of a packet what its connection says.
func (x *transit) translate(e side, by string) {
	if !x.ct.translates(x.ct.reply, e) {
		return
	}
	before := x.p
	x.p.rewrite(e, x.ct.target(x.ct.reply))
	x.rewrote(before, by)
}

// chain lets a packet through the rules of a chain. It returns the name of the
// rule that decided on a translation, and what ended the packet here.
func (x *transit) chain(hook string, c chain) (string, *End) {
	if c.services != nil {
		return x.service(hook, c.services), nil
	}
	for i, r := range c.Rules {
		if !x.matches(c, r) {
			continue
		}
		r, ok := x.resolve(r)
		if !ok {
			continue
		}
		name := fmt.Sprintf("rule %s of table %s, chain %s", cmp.Or(r.Name, fmt.Sprint("#", i+1)), c.table, c.Name)
		switch a := r.Action; a.Kind {
		case netstate.Accept:
			return "", nil
		case netstate.Drop:
			return "", x.end(Dropped, "dropped by "+name)
		case netstate.Reject:
			return "", x.refuse(Refused, 0, Dropped, "rejected by "+name)
		case netstate.SNAT, netstate.DNAT, netstate.Masquerade:
			x.bind(a)
			return name, nil
		case netstate.SetPrefix:
			x.setPrefix(a, name)
			return "", nil
		default:
			x.apply(a, name)
		}
	}
	if c.Policy == "drop" {
		return "", x.end(Dropped, fmt.Sprintf("dropped by the policy of table %s, chain %s", c.table, c.Name))
	}
	return "", nil
}

// resolve returns the rule that one with a map stands for, if its map has an
// entry for the packet.
func (x *transit) resolve(r netstate.FirewallRule) (netstate.FirewallRule, bool) {
	m := r.Action.Map
	if len(m.Entries) == 0 {
		return r, true
	}
	a := x.p.Dst
	if m.Dir == "src" {
		a = x.p.Src
	}
	e, ok := m.Find(a, x.inName)
	r.Action.To, r.Name = e.To, cmp.Or(e.Name, r.Name)
	if r.Action.Kind == netstate.SetCTMark {
		r.Action.Mark = e.Mark
	}
	return r, ok
}

// bind does what a rule of a nat chain says.
func (x *transit) bind(a netstate.Action) {
	to := a.To.Addr()
	byPrefix := a.Prefix && (len(a.Map.Entries) > 0 || !a.To.IsSingleIP())
	switch {
	case a.Kind == netstate.Masquerade:
		x.setUp(source, x.h.addressOf(x.out, x.next), false)
	case a.Kind == netstate.SNAT:
		if a.Prefix {
			to = netstate.WithHostBits(a.To, x.p.Src)
		}
		x.setUp(source, to, false)
	default:
		if a.Prefix {
			to = netstate.WithHostBits(a.To, x.p.Dst)
		}
		x.setUp(destination, to, byPrefix)
	}
}

// apply does what a rule says that lets the packet go on to the next one.
func (x *transit) apply(a netstate.Action, name string) {
	switch a.Kind {
	case netstate.NoTrack:
		if x.state == unseen {
			x.state = untracked
			x.note("not tracked: " + name)
		}
	case netstate.SetCTMark:
		if x.ct.connection == nil {
			return
		}
		if mark := x.ct.mark&^masked(a) | a.Mark; x.ct.mark != mark {
			x.ct.mark = mark
			x.note(fmt.Sprintf("ct mark 0x%x: %s", mark, name))
		}
	case netstate.RestoreCT:
		if x.ct.connection == nil {
			return
		}
		if mark := x.ct.mark & masked(a); x.mark != mark {
			x.mark = mark
			x.note(fmt.Sprintf("mark 0x%x: %s", mark, name))
		}
	case netstate.SetMark:
		if x.mark != a.Mark {
			x.mark = a.Mark
			x.note(fmt.Sprintf("mark 0x%x: %s", a.Mark, name))
		}
	case netstate.ClampMSS:
		mss := int(a.MSS)
		if mss == 0 {
			mss = x.routeMSS()
		}
		if mss < x.p.MSS {
			x.note(fmt.Sprintf("mss %d → %d: %s", x.p.MSS, mss, name))
			x.p.MSS = mss
		}
	case netstate.SetSource:
		before := x.p
		x.p.Src = a.To.Addr()
		x.rewrote(before, name)
	}
}

// setPrefix gives an address another prefix.
func (x *transit) setPrefix(a netstate.Action, name string) {
	before, p := x.p, &x.p
	if a.Of == netstate.OfQuoted {
		quoted := *x.p.Quoted // which others may look at
		x.p.Quoted, p = &quoted, &quoted
	}
	if a.Dir == "src" {
		p.Src = netstate.WithHostBits(a.To, p.Src)
	} else {
		p.Dst = netstate.WithHostBits(a.To, p.Dst)
	}
	x.rewrote(before, name)
}

// masked is the bits of a mark that an action is about.
func masked(a netstate.Action) uint32 {
	if a.Mask == 0 {
		return ^uint32(0)
	}
	return a.Mask
}

// routeMSS is what "rt mtu" stands for: what fits the packet's route, and that
// of the way back to its source (get_tcpmss in nft_rt.c).
func (x *transit) routeMSS() int {
	mtu := x.h.mtu(x.route.route)
	if back := x.h.lookup(flow{dst: x.p.Src, iif: loopback}); back.err == "" {
		mtu = min(mtu, x.h.mtu(back.route))
	} else if dev, own := x.h.local[x.p.Src]; own && dev != "" {
		mtu = min(mtu, x.h.links[dev].MTU)
	}
	headers := 40
	if x.p.Is6() {
		headers = 60
	}
	return mtu - headers
}

// matches reports whether a rule is for a packet.
func (x *transit) matches(c chain, r netstate.FirewallRule) bool {
	if is6, ok := r.Is6(c.family); ok && is6 != x.p.Is6() {
		return false
	}
	for _, m := range r.Matches {
		is, possible := x.match(m)
		if !possible || is == m.Negate {
			return false
		}
	}
	return r.Action.Kind != netstate.ClampMSS || x.p.MSS > 0
}

// match reports whether one condition holds, and whether the packet has what
// it looks at at all: if not, the rule is not for it, negated or not.
func (x *transit) match(m netstate.Match) (is, possible bool) {
	p := x.p
	switch {
	case m.Addr.From.IsValid():
		src, dst := p.Src, p.Dst
		switch {
		case m.Of == netstate.OfQuoted && p.Quoted == nil, m.Of == netstate.OfConnection && x.ct.connection == nil:
			return false, false
		case m.Of == netstate.OfQuoted:
			src, dst = p.Quoted.Src, p.Quoted.Dst
		case m.Of == netstate.OfConnection:
			src, dst = x.ct.original.src, x.ct.original.dst
		}
		a := dst
		if m.Dir == "src" {
			a = src
		}
		if a.BitLen() != m.Addr.From.BitLen() {
			return false, false
		}
		return m.Addr.From.Compare(a) <= 0 && a.Compare(m.Addr.To) <= 0, true
	case m.Ports != netstate.PortRange{}:
		if p.Proto != TCP && p.Proto != UDP {
			return false, false
		}
		port := p.DstPort
		if m.Dir == "src" {
			port = p.SrcPort
		}
		return m.Ports.From <= port && port <= m.Ports.To, true
	case m.L4Proto != "":
		return p.Proto == m.L4Proto, true
	case m.Dev != "":
		dev := x.inName
		if m.Dir == "out" {
			dev = x.out
		}
		if prefix, wild := strings.CutSuffix(m.Dev, "*"); wild {
			if m.Dev == netstate.AnyDev {
				return dev != "", true
			}
			return strings.HasPrefix(dev, prefix), true
		}
		return dev == m.Dev, true
	case m.ICMPError:
		if p.Proto != ICMP && p.Proto != ICMPv6 {
			return false, false
		}
		return p.Error(), true
	case m.ICMPRedirect:
		return false, p.Proto == ICMP || p.Proto == ICMPv6
	case m.CTDir != "":
		return x.ct.reply == (m.CTDir == "reply"), x.ct.connection != nil
	case m.CTMark != 0:
		if x.ct.connection == nil {
			return false, false
		}
		return x.ct.mark&m.CTMark != 0, true
	case m.ToHost:
		_, own := x.h.local[p.Dst]
		return own || p.Dst.IsMulticast(), true
	}
	return true, true
}

// service is kube-proxy: in prerouting and output it sends what is for a
// Service to a backend, in postrouting it masquerades what it has marked. It
// returns what did it.
func (x *transit) service(hook string, services []Service) string {
	if hook == "postrouting" {
		if x.mark&serviceMark == 0 {
			return ""
		}
		x.mark &^= serviceMark
		x.setUp(source, x.h.addressOf(x.out, x.next), false)
		return "kube-proxy's masquerade"
	}
	for _, s := range services {
		if s.Proto != x.p.Proto || len(s.Backends) == 0 {
			continue
		}
		to := netip.AddrPortFrom(x.p.Dst, x.p.DstPort)
		_, local := x.h.local[x.p.Dst]
		inside := slices.ContainsFunc(s.PodCIDRs, func(c netip.Prefix) bool { return c.Contains(x.p.Src) })
		masquerade := false
		switch {
		case slices.Contains(s.VIPs, to):
			masquerade = len(s.PodCIDRs) > 0 && !inside
		case s.NodePort != 0 && local && s.NodePort == to.Port():
			masquerade = !s.Local
		default:
			continue
		}
		i := slices.IndexFunc(s.Backends, func(b netip.AddrPort) bool { return b.Addr().Is6() == x.p.Is6() })
		if i < 0 {
			continue
		}
		backend := s.Backends[i]
		if masquerade || backend.Addr() == x.p.Src {
			x.mark |= serviceMark
		}
		c := x.ct.connection
		c.decided[index(destination)] = true
		want := c.reply.inverted()
		want.dst, want.dport = backend.Addr(), backend.Port()
		if want != c.reply.inverted() {
			c.reply, c.translated[index(destination)] = want.inverted(), true
		}
		return "Service " + s.Name
	}
	return ""
}
