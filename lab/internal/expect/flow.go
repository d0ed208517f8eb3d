package expect

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Flow expects something of a long-lived stream that an action opened.
type Flow struct {
	Name  string        `lab:"name,required" doc:"as the action called it"`
	Gap   time.Duration `lab:"gap" min:"10ms" max:"10m" doc:"no longer silence since the step began"`
	Whole bool          `lab:"whole" doc:"since the stream was opened, not only since the step began"`
	Alive bool          `lab:"alive" doc:"it was not reset, and the last message is fresh"`
	Lost  *int          `lab:"lost" min:"0" max:"1000000" doc:"at most so many messages since the step began (udp)"`
}

// Lint checks the name.
func (e *Flow) Lint(l *Linter) {
	if e.Name != "" && !l.Flows[e.Name] {
		l.Problem(&e.Name, "open it with do: { flow: { name: … } } in this step or an earlier one", "no flow is called %q up to here", e.Name)
	}
	if e.Gap == 0 && !e.Alive && e.Lost == nil {
		l.Problem(e, "", "say gap, alive or lost")
	}
}

// freshness is how old the last message of a live stream may be.
const freshness = time.Second

// watch is how long a stream must have been looked at before it has passed:
// what the step's action did to it may come a moment later, and must then last
// as long as is too long.
func (e *Flow) watch() time.Duration {
	if e.Gap == 0 {
		return freshness
	}
	return e.Gap + 2*freshness
}

// Check looks at the stream's reports.
func (e *Flow) Check(_ context.Context, row *Row) (Result, error) {
	f, ok := row.Flows[e.Name]
	if !ok {
		return Result{Want: "flow " + e.Name, Got: "it was never opened", Final: true}, nil
	}
	began := row.StepStarted
	if e.Whole {
		began = time.Time{}
	}
	s := f.since(began)
	res := Result{Want: e.String(), Got: fmt.Sprintf("%d sent, %d received, %d lost, longest silence %v", s.sent, s.received, s.lost, s.gap.Round(time.Millisecond))}
	res.Notes = []string{e.Name + ": " + res.Got}
	switch {
	case s.broken != "":
		res.Got, res.Why, res.Final = "it broke", s.broken, true
	case s.reports < 2 || s.received == 0:
		res.Why = "it has not spoken yet since the step began"
	case e.Gap > 0 && s.gap > e.Gap:
		res.Why = fmt.Sprintf("silent for %v", s.gap.Round(time.Millisecond))
		res.Final = true
	case time.Since(row.StepStarted) < e.watch():
		// A stream that has just broken looks alive for a while.
		res.Why, res.Pending = "it has been watched for less than "+e.watch().String(), true
	case e.Alive && s.silent > freshness:
		res.Why = fmt.Sprintf("nothing came back for %v", s.silent.Round(time.Millisecond))
	case e.Lost != nil && s.lost > *e.Lost:
		res.Why, res.Final = fmt.Sprintf("%d messages were lost", s.lost), true
	default:
		res.OK = true
	}
	return res, nil
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
	if e.Lost != nil {
		s += fmt.Sprintf(", at most %d lost", *e.Lost)
	}
	return s
}

// A FlowState is a stream that runs, and what it reported.
type FlowState struct {
	From, To operand.Operand
	Proto    string

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
	f := &FlowState{From: s.From, To: s.To, Proto: s.Proto, cancel: cancel, done: make(chan struct{})}
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

// Close ends the stream.
func (f *FlowState) Close() {
	f.cancel()
	<-f.done
}

// A flowSummary is how a stream did since a moment.
type flowSummary struct {
	reports, sent, received, lost int
	gap, silent                   time.Duration
	broken                        string
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
		if r.Time.Before(t) {
			before = r
			continue
		}
		s.reports++
		s.gap = max(s.gap, r.Gap)
		s.sent, s.received, s.lost = r.Sent-before.Sent, r.Received-before.Received, r.Lost-before.Lost
		s.silent = r.Gap
	}
	if f.err != nil && s.broken == "" {
		s.broken = "its process ended: " + f.err.Error()
	}
	return s
}
