package expect

import (
	"context"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Never expects that nothing readable of the row's own probes passed a
// network. It holds only when two controls do: the same search finds the
// probes where they were sent, and packets did pass the network.
type Never struct {
	Payload string `lab:"payload,required" enum:"token" doc:"token: the payload of the row's probes"`
	On      Ref    `lab:"on,required" doc:"where it must not be seen: wan, or a host"`
}

// Lint resolves where it must not be seen.
func (e *Never) Lint(l *Linter) { l.Resolve(&e.On) }

// Check searches the frames of the row's own time.
func (e *Never) Check(ctx context.Context, row *Row) (Result, error) {
	tokens, from, since := row.answered()
	res := Result{Want: "no payload of the probes readable on " + e.On.Text, Final: true}
	if len(tokens) == 0 {
		res.Got = "no probe of this row was answered, so an absence proves nothing"
		return res, nil
	}
	report, err := row.World.WirePackets(ctx, world.WireQuery{On: e.On.HostName(row.Topology), Since: since, Contains: tokens})
	if err != nil {
		return Result{}, err
	}
	readable := 0
	for _, n := range report.Found {
		readable += n
	}
	if readable > 0 {
		res.Got = fmt.Sprintf("%d frames with the payload in clear text", readable)
		if seen, err := row.World.Sightings(ctx, world.SightingQuery{Token: tokens[0], Since: since}); err == nil {
			for _, s := range seen {
				if s.Host == e.On.HostName(row.Topology) {
					res.Why = s.String()
					break
				}
			}
		}
		return res, nil
	}
	if report.Lost > 0 {
		res.Got = fmt.Sprintf("%d packets on %s were overwritten before they were searched; an absence proves nothing", report.Lost, e.On)
		return res, nil
	}
	encrypted := 0
	for _, f := range report.Flows {
		if f.Proto == "udp" {
			encrypted += f.Packets
		}
	}
	if encrypted < len(tokens) {
		res.Got = fmt.Sprintf("only %d UDP packets on %s for %d answered probes: they went another way", encrypted, e.On, len(tokens))
		return res, nil
	}
	// The same search where the probes are in clear text.
	control, err := row.World.WirePackets(ctx, world.WireQuery{On: from, Since: since, Contains: tokens})
	if err != nil {
		return Result{}, err
	}
	for i, n := range control.Found {
		if n == 0 {
			res.Got = fmt.Sprintf("the search does not find probe %s at %s either, so it proves nothing", tokens[i], from)
			return res, nil
		}
	}
	res.OK = true
	res.Got = fmt.Sprintf("none in %d packets on %s, %d of them UDP", report.Packets, e.On, encrypted)
	res.Notes = []string{res.Got}
	return res, nil
}

// clockSkew is by how much the clock that captures and probes' answers have may
// be behind ours: an emulated machine's is set when it is off by a few per cent
// of some seconds. A packet of a quick row would seem to have passed before the
// row began.
const clockSkew = time.Second

// answered returns the tokens of the answered probes that the last sender
// sent across clusters, that sender's host, and when the first was sent at
// the earliest, by the captures' clock.
func (row *Row) answered() (tokens []string, host string, since time.Time) {
	crosses := func(p Probe) bool { return p.From.Cluster != p.To.Cluster }
	lastOne, ok := row.lastProbe(crosses)
	if !ok {
		return nil, "", time.Time{}
	}
	for _, p := range row.Probes {
		if p.Result.OK && crosses(p) && same(p.From, lastOne.From) {
			tokens = append(tokens, p.Token)
			if since.IsZero() {
				since = p.Sent.Add(-clockSkew)
			}
		}
	}
	return tokens, lastOne.From.HostName(row.Topology), since
}

// String is the expectation on one line.
func (e *Never) String() string { return "nothing readable on " + e.On.Text }
