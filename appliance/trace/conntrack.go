package trace

import "net/netip"

// Memory is what hosts remember of packets that have passed: connections with
// their translations and marks, and the endpoints that WireGuard has learned.
// The zero value remembers nothing. Walks add to it.
type Memory struct {
	connections map[string]map[tuple]direction // by host
	endpoints   map[peerOf]netip.AddrPort
}

// A peerOf is one peer of one WireGuard device.
type peerOf struct {
	host, dev string
	key       [32]byte
}

// A direction is one of the two of a connection.
type direction struct {
	*connection
	reply bool
}

// A connection is an entry of conntrack. Its reply tuple is what answers look
// like; where that is not the inverse of the original one, packets are
// translated.
type connection struct {
	original, reply tuple
	translated      [2]bool // by end: IPS_SRC_NAT, IPS_DST_NAT
	decided         [2]bool // by end: the NAT chains have been asked
	mark            uint32
}

func index(e side) int {
	if e == destination {
		return 1
	}
	return 0
}

// tuple returns what packets of a direction look like as they come in.
func (c *connection) tuple(reply bool) tuple {
	if reply {
		return c.reply
	}
	return c.original
}

// target is what packets of a direction look like as they go out.
func (c *connection) target(reply bool) tuple { return c.tuple(!reply).inverted() }

// translates reports whether packets of a direction get another value at an
// end (nf_nat_packet): what was done to the source of requests is undone at
// the destination of replies.
func (c *connection) translates(reply bool, e side) bool {
	if reply {
		e = !e
	}
	return c.translated[index(e)]
}

// A ctState is what conntrack thinks of a packet.
type ctState int

const (
	unseen      ctState = iota // conntrack has not looked yet
	invalid                    // it has, and has nothing to do with it
	untracked                  // a rule keeps it from looking
	fresh                      // the first of its connection
	established                // of a connection that it knows
	related                    // an ICMP error about one
)

// find returns the connection that a tuple belongs to.
func (m *Memory) find(host string, t tuple) (direction, bool) {
	d, ok := m.connections[host][t]
	return d, ok
}

// confirm keeps a connection, as conntrack does when its first packet leaves
// the host or reaches a program.
func (m *Memory) confirm(host string, c *connection) {
	if m.connections == nil {
		m.connections = map[string]map[tuple]direction{}
	}
	if m.connections[host] == nil {
		m.connections[host] = map[tuple]direction{}
	}
	m.connections[host][c.original] = direction{c, false}
	m.connections[host][c.reply] = direction{c, true}
}

// Forget forgets the connections of a host, or of all for "".
func (m *Memory) Forget(host string) {
	if host == "" {
		m.connections = nil
	}
	delete(m.connections, host)
}

// Connections returns how many connections a host remembers.
func (m *Memory) Connections(host string) int { return len(m.connections[host]) / 2 }

// track is conntrack's look at a packet that comes in or is sent
// (nf_conntrack_in).
func (x *transit) track() {
	if x.state != unseen {
		return
	}
	if x.p.Error() {
		x.trackError()
		return
	}
	t := tupleOf(x.p)
	if d, ok := x.w.m.find(x.h.Name, t); ok {
		x.ct, x.state = d, established
		return
	}
	if x.p.ICMP != "" && x.p.ICMP != Echo {
		x.state = invalid // an answer that nobody asked for
		return
	}
	x.ct, x.state = direction{&connection{original: t, reply: t.inverted()}, false}, fresh
}

// trackError finds the connection that an ICMP error is about. The quoted
// packet is seen as it left this host, or was about to, so what answers it is
// looked up (nf_conntrack_inet_error).
func (x *transit) trackError() {
	x.state = invalid
	d, ok := x.w.m.find(x.h.Name, tupleOf(*x.p.Quoted).inverted())
	// The error goes to who sent the quoted packet, or it is not believed.
	if !ok || d.tuple(d.reply).dst != x.p.Dst {
		return
	}
	x.ct, x.state = d, related
}

// setUp binds one end of a new connection to an address, and finds a port
// that makes its answers recognisable (nf_nat_setup_info). A
// destination that a prefix gives counts as translated even if it stays the
// same (measured, 6.18: 1,198 times of 1,200): ICMP errors of this host about the
// packet come from it.
func (x *transit) setUp(e side, to netip.Addr, byPrefix bool) {
	c := x.ct.connection
	c.decided[index(e)] = true
	now := c.reply.inverted()
	want := now
	if e == source {
		want.src = to
	} else {
		want.dst = to
	}
	if e == source {
		want = x.unique(want)
	}
	if want != now || byPrefix {
		c.reply = want.inverted()
		c.translated[index(e)] = true
	}
}

// unique changes the source port of a tuple if its answers would be taken for
// those of another connection. Which port the kernel takes is random; here it
// is the first that is free.
func (x *transit) unique(t tuple) tuple {
	taken := func() bool {
		d, ok := x.w.m.find(x.h.Name, t.inverted())
		return ok && d.connection != x.ct.connection
	}
	for port := uint32(1024); taken() && port <= 65535; port++ {
		t.sport = uint16(port)
		if t.icmp != "" {
			t.dport = t.sport
		}
	}
	return t
}

// translateError gives an ICMP error, and the packet that it quotes, the
// addresses that its receiver knows (nf_nat_icmp_reply_translation). No chain
// is asked.
func (x *transit) translateError(e side) {
	c, reply := x.ct.connection, x.ct.reply
	if !c.translates(reply, e) {
		return
	}
	quoted := *x.p.Quoted
	quoted.rewrite(!e, c.tuple(!reply))
	before := x.p
	x.p.Quoted = &quoted
	outer := c.target(reply)
	if e == source {
		x.p.Src = outer.src
	} else {
		x.p.Dst = outer.dst
	}
	x.rewrote(before, "nat of its connection")
}

// changes says what is different between two packets.
func changes(before, after Packet) string {
	var out string
	add := func(what, from, to string) {
		if from != to {
			if out != "" {
				out += ", "
			}
			out += what + " " + from + " → " + to
		}
	}
	add("source", endText(before.Src, before.SrcPort, before.Proto), endText(after.Src, after.SrcPort, after.Proto))
	add("destination", endText(before.Dst, before.DstPort, before.Proto), endText(after.Dst, after.DstPort, after.Proto))
	if before.Quoted != nil && after.Quoted != nil {
		if q := changes(*before.Quoted, *after.Quoted); q != "" {
			add("quoted", "", q)
		}
	}
	return out
}

func endText(a netip.Addr, port uint16, proto string) string {
	if proto == TCP || proto == UDP {
		return netip.AddrPortFrom(a, port).String()
	}
	return a.String()
}
