package expect

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Source expects that an operand saw the last probe to it come from an
// address.
type Source struct {
	SeenBy Ref `lab:"seenBy,required" doc:"the end that was reached"`
	Is     Ref `lab:"is,required" doc:"whose address it must have seen"`
}

// Lint resolves the names; there must be a probe to look at.
func (e *Source) Lint(l *Linter) {
	l.Resolve(&e.SeenBy)
	l.Resolve(&e.Is)
	if e.SeenBy.Kind != "" && !l.Reached[e.SeenBy.HostName(l.Topology)] {
		l.Problem(&e.SeenBy, "put a reach to it into this step or an earlier one", "nothing has reached %s up to here", e.SeenBy)
	}
}

// Check reads what the server said; for ICMP, what was captured there. What
// somebody else said counts for nothing.
func (e *Source) Check(ctx context.Context, row *Row) (Result, error) {
	p, ok := row.lastProbe(func(p Probe) bool { return same(p.To, e.SeenBy.Operand) })
	if !ok {
		return Result{Want: "an answered probe to " + e.SeenBy.Text, Got: "none", Final: true}, nil
	}
	want, err := row.Directory.Address(ctx, e.Is.Operand, "")
	if err != nil {
		return missing(e.Is.Text, err)
	}
	impostor, err := row.Impostor(ctx, p)
	if err != nil {
		return Result{}, err
	}
	if impostor != "" {
		return Result{Want: fmt.Sprintf("%s sees %s (%s)", e.SeenBy, want, e.Is), Got: impostor + ", so it is not known what " + e.SeenBy.Text + " saw"}, nil
	}
	got := p.Result.SeenAs.Addr()
	if p.Proto == "icmp" {
		seen, err := row.sightings(ctx, p)
		if err != nil {
			return Result{}, err
		}
		got, ok = arrivedFrom(seen, p, e.SeenBy.HostName(row.Topology))
		if !ok {
			return Result{Want: want.String(), Got: "the request was not captured at " + e.SeenBy.Text}, nil
		}
	}
	res := Result{
		OK:   got == want,
		Want: fmt.Sprintf("%s sees %s (%s)", e.SeenBy, want, e.Is),
		Got:  fmt.Sprintf("it saw %s (%s)", got, row.Directory.Name(got)),
	}
	if !res.OK {
		res.Why = row.explainSource(ctx, p, got)
	}
	return res, nil
}

// explainSource says where on its way the source changed.
func (row *Row) explainSource(ctx context.Context, p Probe, got netip.Addr) string {
	seen, err := row.sightings(ctx, p)
	if err != nil {
		return err.Error()
	}
	before := ""
	for _, s := range seen {
		if s.Outer != world.OuterNone || s.Marker == string(prober.MarkReply) {
			continue
		}
		if s.Src.Addr() == got {
			if before == "" {
				return "it left " + s.Host + " with that source already"
			}
			return fmt.Sprintf("translated between %s and %s (%s)", before, s.Host, s.Interface)
		}
		before = s.Host
	}
	return "no capture saw the change"
}

// arrivedFrom is the source of the first request that came into a host.
func arrivedFrom(seen []world.Sighting, p Probe, host string) (netip.Addr, bool) {
	for _, s := range seen {
		if s.Host == host && s.Direction == world.In && s.Outer == world.OuterNone && s.Marker != string(prober.MarkReply) {
			return s.Src.Addr(), true
		}
	}
	return netip.Addr{}, false
}

// String is the expectation on one line.
func (e *Source) String() string { return fmt.Sprintf("%s sees %s", e.SeenBy, e.Is) }

// sightings are the captured packets of a probe.
func (row *Row) sightings(ctx context.Context, p Probe) ([]world.Sighting, error) {
	return row.World.Sightings(ctx, world.SightingQuery{Token: p.Token, Since: p.Sent.Add(-clockSkew)})
}
