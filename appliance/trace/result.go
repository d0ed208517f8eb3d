package trace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
)

// A Kind says how a packet's way ended.
type Kind string

// The ends.
const (
	Delivered   Kind = "delivered"
	Dropped     Kind = "dropped"
	Unreachable Kind = "unreachable"
	Looped      Kind = "loop"
	Lost        Kind = "lost" // nobody is there to take it
	Left        Kind = "left" // by a link that leads out of the world
)

// An End is where a packet's way ended, and why.
type End struct {
	Kind   Kind
	Host   string
	Dev    string // link that it came in by, empty for the host's own
	Packet Packet // as it was then
	Why    string // names rule and table, or rule and priority
	// Answer is the ICMP error that the host sends about it, its source yet
	// to be chosen; nil: none. Walk it from Host.
	Answer *Packet

	delivered *place // to a tunnel, from where it goes on
}

// String returns the end in one line.
func (e End) String() string {
	s := string(e.Kind) + " at " + e.Host
	if e.Why != "" && e.Why != string(e.Kind) {
		s += ": " + e.Why
	}
	return s
}

// A Hop is the way of a packet through one host. What a tunnel sends is a
// packet of its own, with hops of its own.
type Hop struct {
	Depth   int // how many tunnels the packet is in
	Host    string
	In, Out string // links; empty: the host's own, or for it
	Arrived Packet
	Packet  Packet // as it left
	Route   string // the rule that decided, and its route
	Notes   []string
	Mark    uint32
	MTU     int // of the way out, in bytes; 0: it did not get that far
}

// A Trace is the way of one packet.
type Trace struct {
	World  *World
	From   string // host
	Packet Packet // as it was sent
	Hops   []Hop
	End    End
	// MTU is the size of the largest packet that passes the same way whole;
	// 0: not known, for it passes no link.
	MTU int

	overheads []int // of the tunnels, by depth
}

// outer notes what a tunnel adds to packets.
func (t *Trace) outer(depth, overhead int) {
	t.overheads = append(t.overheads[:min(depth-1, len(t.overheads))], overhead)
}

// narrow takes a link's MTU into account.
func (t *Trace) narrow(depth, mtu int) {
	for _, overhead := range t.overheads[:min(depth, len(t.overheads))] {
		mtu -= overhead
	}
	if t.MTU == 0 || mtu < t.MTU {
		t.MTU = mtu
	}
}

// Delivered reports whether the packet came to a program of the host.
func (t Trace) Delivered(host string) bool { return t.End.Kind == Delivered && t.End.Host == host }

// Hosts returns the hosts that the packet itself passed, in order, without
// those that its tunnels pass.
func (t Trace) Hosts() []string {
	var out []string
	for _, h := range t.Hops {
		if h.Depth == 0 {
			out = append(out, h.Host)
		}
	}
	return slices.Compact(out)
}

// AllHosts is Hosts with those that its tunnels pass.
func (t Trace) AllHosts() []string {
	out := make([]string, 0, len(t.Hops))
	for _, h := range t.Hops {
		out = append(out, h.Host)
	}
	return slices.Compact(out)
}

// String returns the hop in one line, without names.
func (h Hop) String() string { return h.text(nil) }

func (h Hop) text(w *World) string { return strings.Join(h.cells(w), " | ") }

// cells returns the columns of the hop's line: where it is, its links, the
// packet, and what was decided.
func (h Hop) cells(w *World) []string {
	name := func(netip.Addr) string { return "" }
	if w != nil {
		name = func(a netip.Addr) string { return w.name(w.hosts[h.Host], a) }
	}
	in, out := h.In, h.Out
	if in == "" {
		in = "·"
	}
	if out == "" {
		out = "·"
	}
	var decided []string
	if h.Route != "" {
		decided = append(decided, h.Route)
	}
	decided = append(decided, h.Notes...)
	if h.Mark != 0 {
		decided = append(decided, fmt.Sprintf("mark 0x%x", h.Mark))
	}
	if h.MTU != 0 {
		decided = append(decided, fmt.Sprintf("mtu %d", h.MTU))
	}
	return []string{
		strings.Repeat("  ", h.Depth) + h.Host, in + " → " + out, h.Packet.text(name), strings.Join(decided, "; "),
	}
}

// String returns the trace as a table, a hop in every line, and its end below.
func (t Trace) String() string {
	if len(t.Hops) == 0 {
		return ""
	}
	var b strings.Builder
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "HOST\tLINKS\tPACKET\tDECISIONS\n")
	for _, h := range t.Hops {
		fmt.Fprintln(tw, strings.Join(h.cells(t.World), "\t"))
	}
	tw.Flush()
	lines := strings.Split(b.String(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n") + t.End.String() + "\n"
}

// A Flow is a packet and what its receiver answers.
type Flow struct {
	Request Trace
	Reply   Trace // no hops: the request was not delivered
}

// Flow walks a packet, and the answer to it.
func (w *World) Flow(m *Memory, from string, p Packet) Flow {
	f := Flow{Request: w.Walk(m, from, p)}
	if end := f.Request.End; end.Kind == Delivered {
		f.Reply = w.Walk(m, end.Host, end.Packet.Reply())
	}
	return f
}

// Problem says what is wrong with a flow; empty: the answer came back to the
// program that waits for it, with the addresses it expects.
func (f Flow) Problem() string {
	if f.Request.End.Kind != Delivered {
		return "the packet is " + f.Request.End.String()
	}
	if f.Reply.End.Kind != Delivered {
		return "the answer is " + f.Reply.End.String()
	}
	if f.Reply.End.Host != f.Request.From {
		return fmt.Sprintf("the answer comes to %s, not to %s", f.Reply.End.Host, f.Request.From)
	}
	sent := f.Request.Hops[0].Arrived
	if !sent.Src.IsValid() {
		sent.Src = f.Reply.End.Packet.Dst // the host chose
	}
	if got, want := tupleOf(f.Reply.End.Packet), tupleOf(sent).inverted(); got != want {
		return fmt.Sprintf("the answer is %v, not %v", f.Reply.End.Packet, sent.Reply())
	}
	return ""
}

// Detour says where the answer passes other hosts than the packet did; empty:
// nowhere.
func (f Flow) Detour() string {
	back := f.Reply.Hosts()
	slices.Reverse(back)
	if why := Explain(f.Request, back); why != "" {
		return "the answer, backwards: " + why
	}
	return ""
}

// Explain says where the hosts that a packet was seen on differ first from
// those that it passes in the model; empty: nowhere.
func Explain(t Trace, seen []string) string {
	model := t.Hosts()
	for i := range max(len(model), len(seen)) {
		switch {
		case i >= len(seen):
			return fmt.Sprintf("it was not seen on %s, after %s; in the model it is %s", model[i], last(seen), t.End)
		case i >= len(model):
			return fmt.Sprintf("it was seen on %s; in the model it is %s", seen[i], t.End)
		case model[i] != seen[i]:
			at := ""
			if i > 0 {
				for _, h := range t.Hops {
					if h.Depth == 0 && h.Host == model[i-1] {
						at = ", where " + h.text(t.World)
					}
				}
			}
			return fmt.Sprintf("after %s it was seen on %s, in the model it is on %s%s", last(seen[:i]), seen[i], model[i], at)
		}
	}
	return ""
}

func last(hosts []string) string {
	if len(hosts) == 0 {
		return "its sender"
	}
	return hosts[len(hosts)-1]
}
