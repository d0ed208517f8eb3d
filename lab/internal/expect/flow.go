package expect

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Flow expects something of a long-lived stream that an action opened.
type Flow struct {
	Name   string        `lab:"name,required" doc:"as the action called it"`
	Gap    time.Duration `lab:"gap" min:"10ms" max:"10m" doc:"no longer silence since the step began"`
	Whole  bool          `lab:"whole" doc:"since the stream was opened, not only since the step began"`
	Alive  bool          `lab:"alive" doc:"it was not reset, and the last message is fresh"`
	For    time.Duration `lab:"for" min:"10ms" max:"10m" doc:"it is watched so long since the step began; default: as long as gap takes"`
	Silent time.Duration `lab:"silent" min:"10ms" max:"10m" doc:"nothing has come back that was sent since the step began, for so long at least, longer on a busy machine, and it was not reset"`
	Lost   *int          `lab:"lost" min:"0" max:"1000000" doc:"at most so many messages since the step began (udp). A busy or an emulated machine may lose as many times more as its steps are longer, and one that stood still up to a fifth of all. 0 is 0 everywhere"`
	// LostPercent is for a link that loses packets. The share does not depend on how fast
	// the machine is.
	LostPercent int `lab:"lostPercent" min:"1" max:"99" doc:"at most so many of a hundred messages since the step began (udp), also on a busy machine"`
	// LostFor is for what costs time, not messages: a busy machine takes longer for it.
	LostFor time.Duration `lab:"lostFor" min:"1ms" max:"10m" doc:"at most as many messages since the step began as are sent in this time (udp). A busy machine may lose more, and one that stood still up to a fifth of all"`
	// AnsweredBy is for addresses that lead to somebody else, or to one after
	// the other.
	AnsweredBy []Ref `lab:"answeredBy" doc:"who may have answered since it was opened; default: whom it is to, and any process there"`
}

// Lint checks the name.
func (e *Flow) Lint(l *Linter) {
	if e.Name != "" && !l.Flows[e.Name] {
		l.Problem(&e.Name, "open it with do: { flow: { name: … } } in this step or an earlier one", "no flow is called %q up to here", e.Name)
	}
	spoken := e.Gap > 0 || e.Alive || e.countsLost()
	if !spoken && e.Silent == 0 {
		l.Problem(e, "", "say gap, alive, silent, lost, lostPercent or lostFor")
	}
	var losses []any
	if e.Lost != nil {
		losses = append(losses, &e.Lost)
	}
	if e.LostPercent > 0 {
		losses = append(losses, &e.LostPercent)
	}
	if e.LostFor > 0 {
		losses = append(losses, &e.LostFor)
	}
	if len(losses) > 1 {
		l.Problem(losses[1], "", "lost, lostPercent and lostFor all say how many messages may be lost: say one of them")
	}
	if e.Silent > 0 && (spoken || e.Whole || e.For > 0) {
		l.Problem(&e.Silent, "", "what is silent has no gap, and nothing to be lost: say silent alone")
	}
	for i := range e.AnsweredBy {
		at := &e.AnsweredBy[i]
		l.Resolve(at)
		if at.Kind != "" && !hasServer(at.Operand) {
			l.Problem(at, "name a pod, a node or a host outside", "nothing answers in the name of %s", at)
		}
	}
	if l.Unnamed[e.Name] && len(e.AnsweredBy) == 0 {
		l.Problem(&e.Name, "answeredBy: [rome/web]", "flow %s is to an address that leads to somebody else: say who may answer", e.Name)
	}
}

func (e *Flow) countsLost() bool { return e.Lost != nil || e.LostPercent > 0 || e.LostFor > 0 }

// mayLose returns how many messages may be lost of a stream that sends one every interval.
// What loses some takes as much longer on a busy or an emulated machine as everything else,
// and then loses as many times more. Where none may be, that is so there, too. However long
// the machine stood still, that excuses a fifth of the messages at most.
func (e *Flow) mayLose(row *Row, interval time.Duration, s flowSummary) int {
	most := func(stood, busy time.Duration) int {
		return min(int(stood/interval), max(int(busy/interval), s.sent/5))
	}
	switch {
	case e.LostPercent > 0:
		return s.sent * e.LostPercent / 100
	case e.LostFor > 0:
		// A stream of a thousand a second overflows the queues on its way whenever
		// those who empty them get no processor, not only while it is silent.
		d := max(longest(row, e.LostFor, s), row.longer(e.LostFor)+row.Pace.Stalled(row.StepStarted, time.Time{}))
		return most(d+interval-1, row.longer(e.LostFor)+interval-1)
	case *e.Lost == 0:
		return 0
	}
	d := time.Duration(*e.Lost) * interval
	return most(longest(row, d, s), row.longer(d))
}

// longest is how long that may take of which d is said, on a machine that was busy in the step,
// or when the stream was silent: that may be before the step, or while other labs of the run
// began, of which a step's average has little.
func longest(row *Row, d time.Duration, s flowSummary) time.Duration {
	return max(row.longer(d), row.longerBetween(d, s.gapEnd.Add(-s.gap-freshness), s.gapEnd))
}

// silence is how long the stream may be silent when an outage of which d is said may take so
// long on this machine. TCP asks again after twice the time that it has waited last (RFC 6298,
// §5.5), and so hears of the end when the outage was up to twice as long: after 14 s or
// 27 s, as measured. What scenarios say has room for that.
func (f *FlowState) silence(d, outage time.Duration) time.Duration {
	if f.Proto == "tcp" && outage > d {
		return d + 2*(outage-d)
	}
	return outage
}

// freshness is how old the last message of a live stream may be.
const freshness = time.Second

// watch is how long a stream must have been looked at before it has passed:
// what the step's action did to it may come a moment later, and must then last
// as long as is too long.
func watch(gap, fresh time.Duration) time.Duration { return gap + 2*fresh }

// Check looks at the stream's reports. Whatever else is expected of a stream,
// one that somebody else has answered is broken, whenever that was.
func (e *Flow) Check(ctx context.Context, row *Row) (Result, error) {
	f, ok := row.Flows[e.Name]
	if !ok {
		return Result{Want: "flow " + e.Name, Got: "it was never opened", Final: true}, nil
	}
	began := row.StepStarted
	if e.Whole {
		began = time.Time{}
	}
	s := f.since(began)
	res := Result{Want: e.String(), Got: s.String()}
	allowed, err := e.allowed(ctx, row, f)
	if err != nil {
		return missing(res.Want, err)
	}
	// A machine that does its work slower answers slower, too. What has not
	// been silent need not be watched for longer there; what is silent is, until
	// it speaks again or has been silent for too long.
	fresh := max(row.longer(freshness), row.longerBetween(freshness, time.Now().Add(-s.silent-freshness), time.Time{}))
	gap := f.silence(e.Gap, longest(row, e.Gap, s))
	enough := max(e.For, watch(e.Gap, freshness))
	// What would end a silence takes longer there, too.
	silence := row.longer(e.Silent) + row.Pace.Stalled(row.StepStarted, time.Time{})
	if e.countsLost() {
		enough += prober.LateTime
	}
	impostor := slices.IndexFunc(s.by, func(by prober.Server) bool {
		return !slices.ContainsFunc(allowed, func(o operand.Operand) bool { return isNamed(by, o) })
	})
	res.Notes = []string{e.Name + ": " + res.Got}
	switch {
	case impostor >= 0:
		res.Got, res.Final = "it broke", true
		res.Why = fmt.Sprintf("%s answered (process %s), not %s", s.by[impostor], s.by[impostor].Process, names(allowed))
	case s.broken != "":
		res.Got, res.Why, res.Final = "it broke", s.broken, true
	// What was on its way when the step began proves nothing. An older probe does not tell what was.
	case e.Silent > 0 && s.received > 0 && (s.newest.IsZero() || s.newest.After(row.StepStarted)):
		res.Got, res.Final = "it speaks", true
		res.Why = fmt.Sprintf("%d messages have come back since the step began", s.received)
		if !s.newest.IsZero() {
			res.Why = fmt.Sprintf("a message has come back that was sent %v after the step began", s.newest.Sub(row.StepStarted).Round(time.Millisecond))
		}
	case e.Silent > 0 && (s.reports < 2 || time.Since(row.StepStarted) < silence):
		res.Why, res.Pending = "it has been watched for less than "+silence.Round(time.Millisecond).String(), true
	case e.Silent > 0:
		res.OK = true
	case s.reports < 2 || s.received == 0:
		res.Why = "it has not spoken yet since the step began"
	case e.Gap > 0 && s.gap > gap:
		res.Why = fmt.Sprintf("silent for %v", s.gap.Round(time.Millisecond))
		res.Final = true
	case time.Since(row.StepStarted) < enough:
		// A stream that has just broken looks alive for a while.
		res.Why, res.Pending = "it has been watched for less than "+enough.Round(time.Millisecond).String(), true
	case e.Alive && s.silent > fresh:
		res.Why = fmt.Sprintf("nothing came back for %v", s.silent.Round(time.Millisecond))
	case s.silent > freshness && (e.Alive || e.Gap > 0 || e.countsLost()): // what is lost counts when a later one comes back
		res.Why, res.Pending = fmt.Sprintf("it is silent, for %v so far", s.silent.Round(time.Millisecond)), true
	case e.countsLost() && s.lost > e.mayLose(row, f.interval, s):
		// Not final: what comes late was not lost.
		res.Why = fmt.Sprintf("%d messages were lost", s.lost)
	default:
		res.OK, res.Excused = true, e.excused(row, f.interval, s, gap)
	}
	return res, nil
}

// excused says which bound the stream exceeded, which would have made the row red on an
// idle machine.
func (e *Flow) excused(row *Row, interval time.Duration, s flowSummary, gap time.Duration) string {
	var parts []string
	if e.Gap > 0 && s.gap > e.Gap {
		parts = append(parts, fmt.Sprintf("it was silent for %v; the bound is %v, and %v on a machine as slow as this one was", s.gap.Round(time.Millisecond), e.Gap, gap.Round(10*time.Millisecond)))
	}
	lost := s.lost
	switch {
	case e.Lost != nil:
		lost = *e.Lost
	case e.LostFor > 0:
		lost = int((e.LostFor + interval - 1) / interval)
	}
	if s.lost > lost {
		parts = append(parts, fmt.Sprintf("%d messages were lost; the bound is %d, and %d on a machine as slow as this one was", s.lost, lost, e.mayLose(row, interval, s)))
	}
	if len(parts) == 0 {
		return ""
	}
	return "flow " + e.Name + ": " + strings.Join(parts, "; ")
}

// allowed are who may answer, settled.
func (e *Flow) allowed(ctx context.Context, row *Row, f *FlowState) ([]operand.Operand, error) {
	if len(e.AnsweredBy) == 0 {
		return []operand.Operand{f.end}, nil
	}
	var out []operand.Operand
	for _, at := range e.AnsweredBy {
		o, err := row.Directory.Settle(ctx, at.Operand)
		if err != nil {
			return nil, err
		}
		out = append(out, o)
	}
	return out, nil
}

func names(all []operand.Operand) string {
	var out []string
	for _, o := range all {
		out = append(out, o.String())
	}
	return strings.Join(out, " or ")
}

// String is the expectation on one line.
func (e *Flow) String() string {
	s := "flow " + e.Name
	if e.Alive {
		s += " lives"
	}
	if e.Gap > 0 {
		s += fmt.Sprintf(", no silence over %v", e.Gap)
	}
	if e.Whole {
		s += " since it was opened"
	}
	if e.For > 0 {
		s += fmt.Sprintf(", watched for %v", e.For)
	}
	if e.Silent > 0 {
		s += fmt.Sprintf(" is silent for %v", e.Silent)
	}
	if e.LostFor > 0 {
		s += fmt.Sprintf(", at most those of %v lost", e.LostFor)
	}
	if e.LostPercent > 0 {
		s += fmt.Sprintf(", at most %d of 100 lost", e.LostPercent)
	}
	if e.Lost != nil {
		s += fmt.Sprintf(", at most %d lost", *e.Lost)
	}
	for i, at := range e.AnsweredBy {
		s += map[bool]string{true: ", answered by ", false: " or "}[i == 0] + at.Text
	}
	return s
}

// A FlowState is a stream that runs, and what it reported.
type FlowState struct {
	From, To operand.Operand
	Proto    string

	interval time.Duration // between two messages

	end     operand.Operand // To when the stream was opened, settled
	cancel  context.CancelFunc
	done    chan struct{}
	mu      sync.Mutex
	reports []prober.FlowReport
	err     error
}

// A Stream is what OpenFlow is to open. From, To and Proto are required.
type Stream struct {
	From, To operand.Operand
	Proto    string        // tcp or udp
	Bind     string        // address and port that it comes from; empty: the kernel chooses
	Interval time.Duration // between two messages; 0: as the probe does by default
	Fresh    bool          // a new socket for every message
}

// OpenFlow starts a stream; it runs until Close or until ctx ends.
func (row *Row) OpenFlow(ctx context.Context, s Stream) (*FlowState, error) {
	addr, err := row.Directory.Address(ctx, s.To, s.From.Cluster)
	if err != nil {
		return nil, err
	}
	end, err := row.Directory.Settle(ctx, s.To)
	if err != nil {
		return nil, err
	}
	target, err := row.ExecTarget(ctx, s.From)
	if err != nil {
		return nil, err
	}
	argv := []string{ProbeProgram, "flow", "--proto", s.Proto, "--to", addr.String(), "--token", row.NewToken()}
	if s.Interval > 0 {
		argv = append(argv, "--interval", s.Interval.String())
	}
	if s.Bind != "" {
		argv = append(argv, "--from", s.Bind)
	}
	if s.Fresh {
		argv = append(argv, "--fresh")
	}
	ctx, cancel := context.WithCancel(ctx)
	f := &FlowState{From: s.From, To: s.To, Proto: s.Proto, interval: cmp.Or(s.Interval, prober.FlowInterval), end: end, cancel: cancel, done: make(chan struct{})}
	r, w := io.Pipe()
	go func() {
		_, err := row.World.ExecStream(ctx, world.ExecRequest{Target: target, Host: true, Argv: argv}, nil, w, io.Discard, nil)
		w.CloseWithError(err)
	}()
	go f.read(ctx, r)
	return f, nil
}

func (f *FlowState) read(ctx context.Context, r *io.PipeReader) {
	defer close(f.done)
	defer r.Close()
	d := json.NewDecoder(r)
	for {
		var rep prober.FlowReport
		err := d.Decode(&rep)
		f.mu.Lock()
		if err != nil {
			if ctx.Err() == nil {
				f.err = err
			}
			f.mu.Unlock()
			return
		}
		f.reports = append(f.reports, rep)
		f.mu.Unlock()
	}
}

// Answered tells whether the stream has had an answer, or never will.
func (f *FlowState) Answered() bool {
	s := f.since(time.Time{})
	return s.received > 0 || s.broken != ""
}

// Close ends the stream.
func (f *FlowState) Close() {
	f.cancel()
	<-f.done
}

// A flowSummary is how a stream did since a moment; broken and by are about its
// whole life.
type flowSummary struct {
	reports, sent, received, lost, duplicates int
	gap, silent                               time.Duration
	gapEnd                                    time.Time // when the longest silence ended, or was last reported
	newest                                    time.Time // when the latest message was sent that came back
	broken                                    string
	by                                        []prober.Server // who answered
}

// String is the summary in numbers.
func (s flowSummary) String() string {
	text := fmt.Sprintf("%d sent, %d received, %d lost", s.sent, s.received, s.lost)
	if s.duplicates > 0 {
		text += fmt.Sprintf(", %d answered again", s.duplicates)
	}
	text += fmt.Sprintf(", longest silence %v", s.gap.Round(time.Millisecond))
	if len(s.by) > 1 {
		text += fmt.Sprintf(", answered by %d processes", len(s.by))
	}
	return text
}

func (f *FlowState) since(t time.Time) flowSummary {
	f.mu.Lock()
	defer f.mu.Unlock()
	var s flowSummary
	var before prober.FlowReport
	for _, r := range f.reports {
		if !r.Alive {
			s.broken = r.Error + ": " + r.Message
		}
		for _, by := range r.By {
			if !slices.Contains(s.by, by) {
				s.by = append(s.by, by)
			}
		}
		if r.Time.Before(t) {
			before = r
			continue
		}
		s.reports++
		if r.Gap >= s.gap {
			s.gap, s.gapEnd = r.Gap, r.Time
		}
		s.sent, s.received, s.lost = r.Sent-before.Sent, r.Received-before.Received, r.Lost-before.Lost
		s.duplicates, s.newest = r.Duplicates-before.Duplicates, r.Newest
		s.silent = r.Gap
	}
	if f.err != nil && s.broken == "" {
		s.broken = "its process ended: " + f.err.Error()
	}
	return s
}
