package expect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Unreachable expects that an operand is not reached, in one way, for a time.
type Unreachable struct {
	From  Ref           `lab:"from,required" doc:"who asks"`
	To    Ref           `lab:"to,required" doc:"who must not be reached"`
	Proto string        `lab:"proto" enum:"tcp|udp|icmp" doc:"default tcp"`
	Port  int           `lab:"port" min:"1" max:"65535" doc:"default 8080"`
	As    string        `lab:"as,required" enum:"drop|reset|icmp" doc:"drop: silence; reset: a TCP reset; icmp: an ICMP error"`
	For   time.Duration `lab:"for" min:"2s" max:"10m" doc:"between the first probe and the last; default 2s"`
}

const (
	// unreachableFor is the least time between the first probe and the last.
	unreachableFor = 2 * time.Second
	// unreachableEvery is the time between two probes.
	unreachableEvery = time.Second
)

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

// Check sends a probe each second, without waiting for the one before. It holds
// when all failed in the way that is meant. One that does not ends it.
func (e *Unreachable) Check(ctx context.Context, row *Row) (Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	type outcome struct {
		probe Probe
		err   error
	}
	n := 1 + int(max(e.For, unreachableFor)/unreachableEvery)
	outcomes := make(chan outcome, n)
	var all sync.WaitGroup
	for i := range n {
		one := row.forOneProbe()
		all.Go(func() {
			select {
			case <-ctx.Done():
				outcomes <- outcome{err: ctx.Err()}
				return
			case <-time.After(time.Duration(i) * unreachableEvery):
			}
			p, err := one.Send(ctx, e.From.Operand, e.To.Operand, e.Proto, e.Port)
			outcomes <- outcome{p, err}
		})
	}
	defer func() {
		cancel()
		all.Wait()
	}()
	res := Result{Want: fmt.Sprintf("%s can't reach %s by %s: %s", e.From, e.To, e.Proto, e.As)}
	for range n {
		o := <-outcomes
		if o.err != nil {
			return Result{}, o.err
		}
		if !o.probe.Sent.IsZero() {
			row.Probes = append(row.Probes, o.probe)
		}
		got, err := e.judge(ctx, row, o.probe, res)
		if err != nil || !got.OK {
			return got, err
		}
		res.Got = got.Got
	}
	res.OK = true
	res.Got = fmt.Sprintf("%s; so %d probes in %v", res.Got, n, max(e.For, unreachableFor))
	return res, nil
}

// forOneProbe is a row to send one probe with while others are sent: it shares
// nothing that sending changes.
func (row *Row) forOneProbe() *Row {
	one := *row
	one.Probes = nil
	token := row.NewToken()
	one.NewToken = func() string { return token }
	return &one
}

// judge says whether a probe failed as it should.
func (e *Unreachable) judge(ctx context.Context, row *Row, p Probe, res Result) (Result, error) {
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
		res.Got = describeFailure(p)
		return e.sent(ctx, row, p, res)
	default:
		res.Got = describeFailure(p)
		res.Why = "it is unreachable, but in another way than the row says; " + p.Result.Message
	}
	return res, nil
}

// sent demands that the request of an unanswered probe left its sender: what was
// never sent says nothing of who can be reached. The first packet of a TCP
// connection has no token to find it by, and a reset comes from somebody.
func (e *Unreachable) sent(ctx context.Context, row *Row, p Probe, res Result) (Result, error) {
	res.OK = true
	if p.Proto == "tcp" {
		return res, nil
	}
	seen, err := row.sightings(ctx, p)
	if errors.Is(err, world.ErrNoCaptures) {
		return res, nil
	}
	if err != nil {
		return Result{}, err
	}
	from, err := row.Directory.Settle(ctx, p.From)
	if err != nil {
		return missing(p.From.String(), err)
	}
	host := from.HostName(row.Topology)
	if !slices.ContainsFunc(seen, func(s world.Sighting) bool { return s.Host == host && s.Direction == world.Out }) {
		res.OK = false
		res.Why = "the request did not leave " + host + ", so it says nothing of " + e.To.Text
	}
	return res, nil
}

// String is the expectation on one line.
func (e *Unreachable) String() string {
	return fmt.Sprintf("%s can't reach %s by %s (%s)", e.From, e.To, e.Proto, e.As)
}
