package expect

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Conntrack expects that a host's connection table has the last probe's
// connection, with the mark of a node.
type Conntrack struct {
	On     Ref `lab:"on,required" doc:"host whose table it is"`
	SeenBy Ref `lab:"seenBy,required" doc:"the end that the probe reached"`
	Mark   Ref `lab:"mark" doc:"the node whose mark it has: the number of its address in the internal CIDR; default: none"`
}

// Lint resolves the names; there must be a probe to look at.
func (e *Conntrack) Lint(l *Linter) {
	l.Resolve(&e.On)
	l.Resolve(&e.SeenBy)
	l.Resolve(&e.Mark)
	if e.Mark.Kind != "" && e.Mark.Kind != operand.Node && e.Mark.Kind != operand.GatewayNode {
		l.Problem(&e.Mark, "such as milan/node-1, or milan/gateway.node", "%s is no node, so it has no mark", e.Mark)
	}
	if e.SeenBy.Kind != "" && !l.Reached[e.SeenBy.HostName(l.Topology)] {
		l.Problem(&e.SeenBy, "put a reach to it into this step or an earlier one", "nothing has reached %s up to here", e.SeenBy)
	}
}

// Check asks conntrack for the connection whose replies go to the port that
// the server saw.
func (e *Conntrack) Check(ctx context.Context, row *Row) (Result, error) {
	p, ok := row.lastProbe(func(p Probe) bool { return same(p.To, e.SeenBy.Operand) && p.Proto != "icmp" })
	if !ok {
		return Result{Want: "an answered probe to " + e.SeenBy.Text + " by tcp or udp", Got: "none", Final: true}, nil
	}
	want := 0
	if e.Mark.Kind != "" {
		var err error
		if want, err = row.mark(ctx, e.Mark.Operand); err != nil {
			return missing(e.Mark.Text, err)
		}
	}
	server, err := row.Directory.Address(ctx, e.SeenBy.Operand, e.On.Cluster)
	if err != nil {
		return missing(e.SeenBy.Text, err)
	}
	target, err := row.ExecTarget(ctx, e.On.Operand)
	if err != nil {
		return Result{}, err
	}
	ran, err := row.World.Exec(ctx, world.ExecRequest{Target: target, Host: true, Argv: []string{"conntrack", "-L", "-p", p.Proto}})
	if err != nil {
		return Result{}, err
	}
	if ran.Code != 0 {
		return Result{}, fmt.Errorf("conntrack on %s: exit code %d: %s", e.On, ran.Code, strings.TrimSpace(string(ran.Stderr)))
	}
	res := Result{Want: fmt.Sprintf("%s has the connection of %s to %s with mark %d", e.On, p.From, e.SeenBy, want)}
	port := strconv.Itoa(int(p.Result.SeenAs.Port()))
	var got []string
	for line := range strings.Lines(string(ran.Stdout)) {
		// A probe of a kubelet's may come from the same port, and one of another
		// row's to another pod.
		if r := repliesOf(line); r.to == port && r.from == strconv.Itoa(prober.Port) && r.src == server.String() {
			got = append(got, strings.Join(strings.Fields(line), " "))
		}
	}
	switch {
	case len(got) == 0:
		res.Got = fmt.Sprintf("no entry with replies of %s to port %s", server, port)
		return res, nil
	case len(got) > 1: // nobody can tell which one is meant; the next probe comes from another port
		res.Got, res.Why = fmt.Sprintf("%d entries with replies of %s to port %s", len(got), server, port), strings.Join(got, "\n")
		_, err := row.SendBy(ctx, p.From, p.Dst, p.To, p.Proto, p.Port)
		return res, err
	}
	switch mark, ok := markOf(got[0]); {
	case !ok:
		res.Got, res.Why = "an entry that does not say its mark: this kernel keeps none", got[0]
	case mark != want:
		res.Got, res.Why = fmt.Sprintf("mark %d", mark), got[0]
	default:
		res.OK, res.Got = true, got[0]
	}
	return res, nil
}

// mark is the number by which gateways mark a node's connections.
func (row *Row) mark(ctx context.Context, node operand.Operand) (int, error) {
	node, err := row.Directory.Settle(ctx, node)
	if err != nil {
		return 0, err
	}
	node.Attr = operand.Internal
	a, err := row.Directory.Address(ctx, node, "")
	if err != nil {
		return 0, err
	}
	c, _ := row.Topology.Cluster(node.Cluster)
	return offset(a, c.InternalCIDR), nil
}

// offset is the number of an address in a network.
func offset(a netip.Addr, network netip.Prefix) int {
	n, first := 0, network.Masked().Addr().AsSlice()
	for i, b := range a.AsSlice() {
		n = n<<8 | int(b^first[i])
	}
	return n
}

// replies say where the replies of an entry come from, and the ports that they come
// from and go to.
type replies struct{ src, from, to string }

// repliesOf reads an entry: its replies are the last ones of the line.
func repliesOf(line string) (r replies) {
	for f := range strings.FieldsSeq(line) {
		key, value, _ := strings.Cut(f, "=")
		switch key {
		case "src":
			r.src = value
		case "sport":
			r.from = value
		case "dport":
			r.to = value
		}
	}
	return r
}

// markOf is the mark of an entry without the bits that say which direction of it
// came out of the tunnel: those are of no node. An entry may say none.
func markOf(line string) (mark int, ok bool) {
	for _, f := range strings.Fields(line) {
		if m, ok := strings.CutPrefix(f, "mark="); ok {
			n, err := strconv.Atoi(m)
			return n &^ desired.ReservedMarks, err == nil
		}
	}
	return 0, false
}

// String is the expectation on one line.
func (e *Conntrack) String() string {
	if e.Mark.Kind == "" {
		return fmt.Sprintf("%s tracks the connection to %s, without a mark", e.On, e.SeenBy)
	}
	return fmt.Sprintf("%s tracks the connection to %s with the mark of %s", e.On, e.SeenBy, e.Mark)
}
