package expect

import (
	"context"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Never expects that nothing readable of the row's own probes passed a network,
// although the probes did. What else is on the network proves nothing: gateways
// look after each other every two seconds. So three things must hold besides.
//
// Every packet of a probe that was sent into a tunnel and came out of it, there
// and back, was followed: in between its gateway sent an encrypted message of its
// length, and that very message, by its header of which there are no two, passed
// the network. Addresses do not matter, so neither do the kind of the gateway's
// Service and translations on the way.
//
// The packets of the network were all captured and kept since the first probe.
// They are searched after those messages were found among them: what passed
// before is there by then.
//
// The same search finds the probes where they were sent in clear text.
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
	on := e.On.HostName(row.Topology)
	messages, why, err := row.sealed(ctx, tokens, on, since)
	if err != nil {
		return Result{}, err
	}
	report, err := row.World.WirePackets(ctx, world.WireQuery{On: on, Since: since, Contains: tokens})
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
				if s.Host == on {
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
	if why != "" {
		res.Got, res.Final = why, false // a capture may not have been read yet
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
			res.Final = false // as above
			return res, nil
		}
	}
	res.OK = true
	res.Got = fmt.Sprintf("none in %d packets on %s, among them %d encrypted ones of the probes", report.Packets, e.On, messages)
	res.Notes = []string{res.Got}
	return res, nil
}

// sealed counts the encrypted messages by which probes passed a network, or says
// what is missing of them.
func (row *Row) sealed(ctx context.Context, tokens []string, on string, since time.Time) (messages int, why string, err error) {
	for _, token := range tokens {
		report, err := row.World.Sealed(ctx, world.SealedQuery{Token: token, On: on, Since: since})
		if err != nil {
			return 0, "", err
		}
		hosts := map[string]bool{}
		for _, p := range report.Packets {
			hosts[p.Host] = true
			switch {
			case !p.Sealed:
				return 0, fmt.Sprintf("probe %s: %s sent it into a tunnel at %s, but no encrypted packet of its length anywhere before it came out", token, p.Host, p.Time.Format("15:04:05.000")), nil
			case p.Passed == 0:
				return 0, fmt.Sprintf("probe %s: the encrypted packet that %s sent at %s did not pass %s: it went another way, or %s is not between the gateways", token, p.Host, p.Time.Format("15:04:05.000"), on, on), nil
			}
		}
		if len(hosts) < 2 { // the probe was answered, so it passed there and back
			return 0, fmt.Sprintf("probe %s: %d hosts sent it into a tunnel, there and back, instead of two: it, or its answer, went another way", token, len(hosts)), nil
		}
		messages += len(report.Packets)
	}
	return messages, "", nil
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
