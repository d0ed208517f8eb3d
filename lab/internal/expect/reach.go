package expect

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Reach expects an answer from an operand.
type Reach struct {
	From  Ref    `lab:"from,required" doc:"who asks"`
	To    Ref    `lab:"to,required" doc:"who must answer"`
	Proto string `lab:"proto" enum:"tcp|udp|icmp" doc:"default tcp"`
	Port  int    `lab:"port" min:"1" max:"65535" doc:"default 8080, where the lab's pods listen"`
	// AnsweredBy is for addresses that lead to somebody else.
	AnsweredBy Ref `lab:"answeredBy" doc:"who is behind the address; default: who has it"`
}

// Lint resolves the two ends.
func (e *Reach) Lint(l *Linter) {
	l.Resolve(&e.AnsweredBy)
	if e.AnsweredBy.Kind == "" {
		lintEnds(l, &e.From, &e.To, &e.Proto)
	} else {
		at := e.AnsweredBy
		lintEnds(l, &e.From, &at, &e.Proto)
		l.Resolve(&e.To)
	}
	if LeadsElsewhere(e.end()) {
		l.Problem(&e.To, "answeredBy: rome/web", "say who is behind %s", e.To)
	}
	l.Reached[e.end().HostName(l.Topology)] = true
}

// LeadsElsewhere tells whether nobody answers in the name of an operand itself.
func LeadsElsewhere(o operand.Operand) bool {
	return o.Kind == operand.Ingress || o.Kind == operand.ClusterIP || o.Kind == operand.Unknown
}

// end is who must answer.
func (e *Reach) end() operand.Operand {
	if e.AnsweredBy.Kind != "" {
		return e.AnsweredBy.Operand
	}
	return e.To.Operand
}

func lintEnds(l *Linter, from, to *Ref, proto *string) {
	l.Resolve(from)
	l.Resolve(to)
	if *proto == "" {
		*proto = "tcp"
	}
	switch from.Kind {
	case operand.WAN, operand.ControlPlane:
		l.Problem(from, "name a pod, a node, a gateway, a router or a host outside", "%s sends nothing", from)
	}
	switch {
	case to.Kind == operand.WAN:
		l.Problem(to, "name a pod, a node or a gateway", "%s has no address", to)
	case *proto != "icmp" && (to.Kind == operand.Gateway || to.Kind == operand.Router):
		l.Problem(to, "proto: icmp", "nothing listens on %s", to)
	}
}

// Check sends one probe.
func (e *Reach) Check(ctx context.Context, row *Row) (Result, error) {
	p, err := row.SendBy(ctx, e.From.Operand, e.To.Operand, e.end(), e.Proto, e.Port)
	if err != nil {
		return Result{}, err
	}
	want := fmt.Sprintf("%s answers %s by %s", e.end(), e.From, e.Proto)
	if !p.Result.OK {
		return row.explainLost(ctx, p, Result{Want: want, Got: describeFailure(p)})
	}
	v, err := row.judge(ctx, p)
	if err != nil {
		return Result{}, err
	}
	if v.impostor != "" {
		return row.explainImpostor(ctx, p, Result{Want: want, Got: v.impostor, Impostor: true})
	}
	notes := []string{fmt.Sprintf("rtt %v", p.Result.RTT.Round(100*time.Microsecond))}
	if v.note != "" {
		notes = append(notes, v.note)
	}
	return Result{OK: true, Want: want, Got: want, Notes: notes}, nil
}

// Reached reports whether one probe is answered by whom it is for. Where address ranges overlap
// and the clusters are no peers yet, somebody else has that address.
func (row *Row) Reached(ctx context.Context, from, to operand.Operand, proto string) (bool, error) {
	p, err := row.Send(ctx, from, to, proto, 0)
	if err != nil || !p.Result.OK {
		return false, err
	}
	v, err := row.judge(ctx, p)
	return err == nil && v.impostor == "", err
}

// explainImpostor adds the way of a probe that somebody else answered.
func (row *Row) explainImpostor(ctx context.Context, p Probe, res Result) (Result, error) {
	addr, err := row.Directory.Address(ctx, p.Dst, p.From.Cluster)
	if _, is := ofProduct(err); is {
		res.Why = err.Error()
	} else if err != nil {
		return Result{}, err
	} else {
		res.Why = fmt.Sprintf("it was sent to %s (%s)", addr, row.Directory.Name(addr))
	}
	seen, err := row.sightings(ctx, p)
	if errors.Is(err, world.ErrNoCaptures) {
		return res, nil
	}
	if err != nil {
		return Result{}, err
	}
	t := newTrail(seen)
	res.Path, res.Reply = t.request, t.reply
	return res, nil
}

// String is the expectation on one line.
func (e *Reach) String() string {
	if e.AnsweredBy.Kind != "" {
		return fmt.Sprintf("%s reaches %s at %s by %s", e.From, e.AnsweredBy, portOf(e.To.Text, e.Port), e.Proto)
	}
	return fmt.Sprintf("%s reaches %s by %s", e.From, e.To, e.Proto)
}

// portOf is an operand with the port that it is reached at.
func portOf(name string, port int) string {
	if port == 0 {
		return name
	}
	return fmt.Sprintf("%s:%d", name, port)
}

func describeFailure(p Probe) string {
	r := p.Result
	text := map[string]string{
		prober.ErrorTimeout:  "no answer within " + p.Timeout.String(),
		prober.ErrorRefused:  "refused: the host answers, nothing listens there",
		prober.ErrorReset:    "the connection was reset",
		prober.ErrorICMPPort: "ICMP port unreachable",
		prober.ErrorICMPHost: "ICMP host unreachable",
		prober.ErrorICMPNet:  "network unreachable",
		prober.ErrorICMPAdm:  "administratively prohibited",
	}[r.Error]
	if text == "" {
		return r.Error + ": " + r.Message
	}
	return text
}

// explainLost adds how far an unanswered probe came.
func (row *Row) explainLost(ctx context.Context, p Probe, res Result) (Result, error) {
	if p.Sent.IsZero() {
		return res, nil
	}
	for _, end := range []*operand.Operand{&p.From, &p.To} {
		o, err := row.Directory.Settle(ctx, *end)
		if err != nil {
			return missing(end.String(), err)
		}
		*end = o
	}
	seen, err := row.sightings(ctx, p)
	if errors.Is(err, world.ErrNoCaptures) {
		return res, nil
	}
	if err != nil {
		return Result{}, err
	}
	t := newTrail(seen)
	res.Path, res.Reply = t.request, t.reply
	to := p.To.HostName(row.Topology)
	switch {
	case len(t.request) == 0 && p.Proto == "tcp":
		return row.explainByDatagram(ctx, p, res)
	case len(t.request) == 0:
		res.Why = "no host saw the request: " + p.From.String() + " has no route, or dropped it"
	case last(t.request) != to:
		res.Why = fmt.Sprintf("the request was last seen at %s", lastSighting(seen, string(prober.MarkRequest)))
	case len(t.reply) == 0:
		res.Why = fmt.Sprintf("the request arrived at %s, which sent no reply", to)
	default:
		res.Why = fmt.Sprintf("the reply was last seen at %s", last(t.reply))
	}
	return res, nil
}

// explainByDatagram follows a datagram to where a connection did not come
// about: a SYN has no payload to find it by.
func (row *Row) explainByDatagram(ctx context.Context, p Probe, res Result) (Result, error) {
	sent := len(row.Probes)
	scout, err := row.SendBy(ctx, p.From, p.Dst, p.To, "udp", p.Port)
	row.Probes = row.Probes[:sent] // no step is about this one
	if err != nil {
		return res, err
	}
	if scout.Result.OK {
		res.Why = "the connection did not come about, but a datagram is answered"
	} else if res, err = row.explainLost(ctx, scout, res); err != nil {
		return res, err
	} else {
		res.Why = "the connection did not come about; of a datagram in its place: " + res.Why
	}
	if addr, err := row.Directory.Address(ctx, p.Dst, p.From.Cluster); err == nil {
		res.Why += fmt.Sprintf("\n%s is %s", addr, row.Directory.Name(addr))
	}
	return res, nil
}

func last(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return s[len(s)-1]
}
