package expect

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// MTU expects that packets up to a length pass without being fragmented, that whom they are
// meant for answers them, and that the sender is told when one is a byte too long.
type MTU struct {
	From Ref `lab:"from,required" doc:"who sends"`
	To   Ref `lab:"to,required" doc:"who answers"`
	Is   int `lab:"is" min:"576" max:"1500" doc:"length of the longest IP packet that passes; default: any"`
	// Above is what becomes of a longer one.
	Above string `lab:"above" enum:"error|silent" doc:"error: the sender is told, by an ICMP error or by its own link; default error"`
}

// Lint resolves the two ends.
func (e *MTU) Lint(l *Linter) {
	udp := "udp"
	lintEnds(l, &e.From, &e.To, &udp)
	if e.Above == "" {
		e.Above = prober.AboveError
	}
}

// The lengths between which is searched: IPv4's least, and a byte more than
// Ethernet carries. MTU.Is has the same bounds.
const (
	leastMTU = 576
	mostMTU  = 1501
)

// mtuTimeout is how long the answer to one packet may take on a machine that has nothing else
// to do. A search asks some ten times, and one late answer leads it astray.
const mtuTimeout = 300 * time.Millisecond

// Check searches, after the sender has forgotten what it was told of paths. It takes two seconds
// where long packets vanish.
func (e *MTU) Check(ctx context.Context, row *Row) (Result, error) {
	length := "some length"
	if e.Is != 0 {
		length = fmt.Sprintf("%d bytes", e.Is)
	}
	want := fmt.Sprintf("packets of up to %s pass from %s to %s, and %s", length, e.From, e.To, e.above())
	addr, err := row.Directory.Address(ctx, e.To.Operand, e.From.Cluster)
	if err != nil {
		return missing(want, err)
	}
	target, err := row.ExecTarget(ctx, e.From.Operand)
	if err != nil {
		return Result{}, err
	}
	if !row.OfOthers { // whoever has been told before knows by itself, for ten minutes
		if _, err := row.World.Exec(ctx, world.ExecRequest{Target: target, Host: true, Argv: []string{"ip", "route", "flush", "cache"}}); err != nil {
			return Result{}, err
		}
	}
	ran, err := row.World.Exec(ctx, world.ExecRequest{Target: target, Host: true, Argv: []string{ProbeProgram, "mtu", "--to", addr.String(), "--token", row.NewToken(), "--timeout", min(row.longer(mtuTimeout), time.Second).String()}})
	if err != nil {
		return Result{}, err
	}
	res := Result{Want: want}
	if ran.Code != 0 {
		res.Got = strings.TrimSpace(string(ran.Stderr))
		return res, nil
	}
	var got prober.PathMTUResult
	if err := json.Unmarshal(ran.Stdout, &got); err != nil {
		return Result{}, fmt.Errorf("mtu from %s: %w", e.From, err)
	}
	res.Got = fmt.Sprintf("%d bytes pass; one more: %s; the sender's kernel knows of %d", got.Largest, got.Above, got.PMTU)
	res.OK = (got.Largest == e.Is || e.Is == 0 && got.Largest > 0) && got.Above == e.Above
	if res.OK && e.Above == prober.AboveError && got.PMTU != got.Largest {
		res.OK, res.Why = false, "the sender was told another length than what passes"
	}
	if got.Largest > 0 {
		impostor, err := row.Impostor(ctx, Probe{From: e.From.Operand, To: e.To.Operand, Proto: "udp", Result: prober.Result{Server: got.Server}})
		if err != nil {
			return Result{}, err
		}
		if impostor != "" {
			res.OK, res.Impostor, res.Got, res.Why = false, true, impostor, ""
		}
	}
	if res.OK {
		res.Notes = []string{res.Got}
	}
	return res, nil
}

// String is the expectation on one line.
func (e *MTU) String() string {
	is := "of any length"
	if e.Is != 0 {
		is = strconv.Itoa(e.Is)
	}
	return fmt.Sprintf("MTU from %s to %s is %s, and %s", e.From, e.To, is, e.above())
}

func (e *MTU) above() string {
	if e.Above == prober.AboveSilent {
		return "longer ones vanish"
	}
	return "the sender of a longer one is told"
}

// MSS expects that the server saw a connection begin with a maximum segment
// size.
type MSS struct {
	SeenBy Ref `lab:"seenBy,required" doc:"the end that a connection reached"`
	Is     int `lab:"is,required" min:"1" max:"65535" doc:"what stood in the SYN as it came in there"`
}

// Lint resolves the name; there must be a connection to look at.
func (e *MSS) Lint(l *Linter) {
	l.Resolve(&e.SeenBy)
	if e.SeenBy.Kind != "" && !l.Reached[e.SeenBy.HostName(l.Topology)] {
		l.Problem(&e.SeenBy, "put a reach to it into this step or an earlier one", "nothing has reached %s up to here", e.SeenBy)
	}
}

// Check looks for the SYN of the last connection among the captured packets.
func (e *MSS) Check(ctx context.Context, row *Row) (Result, error) {
	p, ok := row.lastProbe(func(p Probe) bool { return p.Proto == "tcp" && same(p.To, e.SeenBy.Operand) })
	if !ok {
		return Result{Want: "an answered probe to " + e.SeenBy.Text + " by tcp", Got: "none", Final: true}, nil
	}
	seen, err := row.World.Sightings(ctx, world.SightingQuery{SYN: p.Result.SeenAs, Since: p.Sent.Add(-clockSkew)})
	if err != nil {
		return Result{}, err
	}
	res := Result{Want: fmt.Sprintf("%s sees a SYN with MSS %d", e.SeenBy, e.Is), Got: "no SYN from " + p.Result.SeenAs.String() + " was captured there"}
	end := e.SeenBy.HostName(row.Topology)
	for _, s := range seen {
		if s.Outer == world.OuterNone {
			res.Path = append(res.Path, fmt.Sprintf("%s:%d", s.Host, s.MSS))
		}
		if s.Host == end && s.Direction == world.In && s.Outer == world.OuterNone {
			res.Got, res.OK = fmt.Sprintf("MSS %d", s.MSS), s.MSS == e.Is
			break
		}
	}
	return res, nil
}

// String is the expectation on one line.
func (e *MSS) String() string { return fmt.Sprintf("%s sees MSS %d", e.SeenBy, e.Is) }
