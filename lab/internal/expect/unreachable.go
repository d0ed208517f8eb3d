package expect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Unreachable expects that an operand is not reached, in one way.
type Unreachable struct {
	From  Ref    `lab:"from,required" doc:"who asks"`
	To    Ref    `lab:"to,required" doc:"who must not be reached"`
	Proto string `lab:"proto" enum:"tcp|udp|icmp" doc:"default tcp"`
	Port  int    `lab:"port" min:"1" max:"65535" doc:"default 8080"`
	As    string `lab:"as,required" enum:"drop|reset|icmp" doc:"drop: silence; reset: a TCP reset; icmp: an ICMP error"`
}

// Lint resolves the two ends.
func (e *Unreachable) Lint(l *Linter) {
	lintEnds(l, &e.From, &e.To, &e.Proto)
	if e.As == "reset" && e.Proto != "tcp" {
		l.Problem(&e.As, "as: drop or as: icmp", "only tcp can be reset, not %s", e.Proto)
	}
}

// errorsOf are the ways in which a probe can fail for each value of As.
func errorsOf(as string) []string {
	switch as {
	case "reset":
		return []string{prober.ErrorReset, prober.ErrorRefused}
	case "icmp":
		return []string{prober.ErrorICMPPort, prober.ErrorICMPHost, prober.ErrorICMPNet, prober.ErrorICMPAdm}
	}
	return []string{prober.ErrorTimeout}
}

// Check sends one probe.
func (e *Unreachable) Check(ctx context.Context, row *Row) (Result, error) {
	p, err := row.Send(ctx, e.From.Operand, e.To.Operand, e.Proto, e.Port)
	if err != nil {
		return Result{}, err
	}
	res := Result{Want: fmt.Sprintf("%s can't reach %s by %s: %s", e.From, e.To, e.Proto, e.As)}
	switch {
	case p.Result.OK:
		v, err := row.judge(ctx, p)
		if err != nil {
			return Result{}, err
		}
		res.Got = cmp.Or(v.impostor, e.To.Text+" answered")
		seen, err := row.sightings(ctx, p)
		if errors.Is(err, world.ErrNoCaptures) {
			return res, nil
		}
		if err != nil {
			return Result{}, err
		}
		t := newTrail(seen)
		res.Path, res.Reply = t.request, t.reply
		res.Why = "by way of " + strings.Join(t.request, ", ")
	case slices.Contains(errorsOf(e.As), p.Result.Error):
		res.OK, res.Got = true, describeFailure(p)
	default:
		res.Got = describeFailure(p)
		res.Why = "unreachable, but not in this way; " + p.Result.Message
	}
	return res, nil
}

// String is the expectation on one line.
func (e *Unreachable) String() string {
	return fmt.Sprintf("%s can't reach %s by %s (%s)", e.From, e.To, e.Proto, e.As)
}
