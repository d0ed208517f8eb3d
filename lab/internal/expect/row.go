package expect

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/pace"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A World is what expectations need of a lab; *world.Client is one.
type World interface {
	Status(ctx context.Context) (world.Status, error)
	Exec(ctx context.Context, req world.ExecRequest) (world.ExecResult, error)
	ExecStream(ctx context.Context, req world.ExecRequest, stdin io.Reader, stdout, stderr io.Writer, resize <-chan world.Resize) (int, error)
	RESTConfig(ctx context.Context, cluster string) (*rest.Config, error)
	Sightings(ctx context.Context, q world.SightingQuery) ([]world.Sighting, error)
	WirePackets(ctx context.Context, q world.WireQuery) (world.WireReport, error)
	Sealed(ctx context.Context, q world.SealedQuery) (world.SealedReport, error)
	Logs(ctx context.Context, since map[string]world.LogMark) ([]world.Log, error)
	PodLogs(ctx context.Context, target string, since map[string]world.LogMark) ([]world.Log, error)
	Inventory(ctx context.Context) ([]world.Inventory, error)
}

// ProbeProgram is the lab's program for test traffic (lab/cmd/probe), as the agent
// starts it in the network namespace of a host or a pod.
const ProbeProgram = "probe"

// A Row is one row of a scenario while it runs: what its steps have done so
// far, for those that follow.
type Row struct {
	World     World
	Topology  *topology.Topology
	Directory *Directory
	API       *API
	// NewToken returns a token that no other probe has.
	NewToken func() string
	Started  time.Time
	// Before has what Gone compares with.
	Before Leftovers
	// StepStarted is when the present step began to act.
	StepStarted time.Time
	// ProbeTimeout is how long a probe waits for its answer; 0: a second.
	ProbeTimeout time.Duration
	// Pace says how much slower the machine is than at best; nil: not at all.
	Pace *pace.Meter
	// OfOthers: somebody else has made the clusters, on whose hosts nothing is run.
	OfOthers bool
	// Patience is how many times as long an emulated machine may be silent; 0: once.
	Patience int

	Probes  []Probe               // in the order they were sent
	Flows   map[string]*FlowState // by name
	Outputs map[string]Ran        // of exec actions by name; "" is the last
	Ran     []Ran                 // all of them, in the order in which they ended
	// Remembered is what clusters were like, by the name of the action.
	Remembered map[string]Remembered
	// LogMarks has the end of every log when the row began.
	LogMarks map[string]world.LogMark
	// EventMarks has the events of the clusters of which the row expects some, when the row began.
	EventMarks EventMarks
}

// longer is how long something may take here for which d is enough on a machine
// of its own that has nothing else to do.
func (row *Row) longer(d time.Duration) time.Duration {
	return time.Duration(float64(d)*row.Pace.Since(row.StepStarted)) * row.patience()
}

// longerBetween is longer for what was from one moment to another: the time in which the
// machine stood still is not held against it. The zero time is now.
func (row *Row) longerBetween(d time.Duration, from, to time.Time) time.Duration {
	return time.Duration(float64(d)*row.Pace.Between(from, to))*row.patience() + row.Pace.Stalled(from, to)
}

func (row *Row) patience() time.Duration { return time.Duration(max(row.Patience, 1)) }

// A Probe is a probe that was sent. Dst is whose address it was sent to: To's
// own, or one that leads there, such as a Service's.
type Probe struct {
	From, To operand.Operand
	Dst      operand.Operand
	Proto    string
	Port     int // 0: where the lab's pods listen
	Token    string
	Timeout  time.Duration
	Sent     time.Time
	Result   prober.Result
}

// Ran is how a command of an exec action ended.
type Ran struct {
	Command string
	// MayFail says that an exit code other than 0 is no mistake.
	MayFail bool
	world.ExecResult
}

// ExecTarget is where a command must run to be in the network namespace of an
// operand.
func (row *Row) ExecTarget(ctx context.Context, o operand.Operand) (string, error) {
	if o.Kind == operand.Controller {
		return row.Directory.PodTarget(ctx, o)
	}
	o, err := row.Directory.Settle(ctx, o)
	return o.HostName(row.Topology), err
}

// ProbeTimeout is how long a probe waits for its answer unless the row says
// so. Within it UDP and ICMP try twice: the first packet may find an empty
// neighbour table.
const ProbeTimeout = time.Second

// Send sends a probe to an operand's own address and remembers it.
func (row *Row) Send(ctx context.Context, from, to operand.Operand, proto string, port int) (Probe, error) {
	return row.SendBy(ctx, from, to, to, proto, port)
}

// SendBy sends a probe to the address of dst, where to is expected to answer.
func (row *Row) SendBy(ctx context.Context, from, dst, to operand.Operand, proto string, port int) (Probe, error) {
	p := Probe{From: from, To: to, Dst: dst, Proto: proto, Port: port, Token: row.NewToken(), Timeout: cmp.Or(row.ProbeTimeout, ProbeTimeout)}
	addr, err := row.Directory.Address(ctx, dst, from.Cluster)
	if got, is := ofProduct(err); is {
		p.Result = prober.Result{Error: got, Message: err.Error()}
		return p, nil
	} else if err != nil {
		return p, err
	}
	target, err := row.ExecTarget(ctx, from)
	if err != nil {
		return p, err
	}
	at := addr.String()
	if proto != "icmp" && port != 0 {
		at = netip.AddrPortFrom(addr, uint16(port)).String()
	}
	p.Sent = time.Now()
	count := 1
	if proto != "tcp" {
		count = 2
	}
	res, err := row.World.Exec(ctx, world.ExecRequest{
		Target: target,
		Host:   true,
		Argv: []string{ProbeProgram, "dial", "--proto", proto, "--to", at, "--token", p.Token,
			"--timeout", p.Timeout.String(), "--count", strconv.Itoa(count)},
	})
	if err != nil {
		return p, fmt.Errorf("probe from %s: %w", from, err)
	}
	if res.Code != 0 {
		return p, fmt.Errorf("probe from %s: exit code %d: %s", from, res.Code, strings.TrimSpace(string(res.Stderr)))
	}
	if err := json.Unmarshal(res.Stdout, &p.Result); err != nil {
		return p, fmt.Errorf("probe from %s: %w", from, err)
	}
	row.Probes = append(row.Probes, p)
	return p, nil
}

// missing is the result when a name of an expectation stands for nothing yet, or
// for what it must not stand for; another error is the lab's.
func missing(want string, err error) (Result, error) {
	got, is := ofProduct(err)
	if !is {
		return Result{}, err
	}
	return Result{Want: want, Got: got, Why: err.Error()}, nil
}

// ofProduct tells whether an error of a Directory is about what the product did,
// or did not do, and what it is in two words.
func ofProduct(err error) (string, bool) {
	switch {
	case errors.Is(err, ErrChoice):
		return "bad address", true
	case errors.Is(err, ErrNoAddress):
		return "no address", true
	}
	return "", false
}

// lastProbe returns the latest probe that was answered and that matches.
func (row *Row) lastProbe(match func(Probe) bool) (Probe, bool) {
	for i := len(row.Probes) - 1; i >= 0; i-- {
		if p := row.Probes[i]; p.Result.OK && match(p) {
			return p, true
		}
	}
	return Probe{}, false
}

// same tells whether two operands are the same end of a path.
func same(a, b operand.Operand) bool {
	a.Attr, b.Attr = "", ""
	return a.Kind == b.Kind && a.Cluster == b.Cluster && a.Name == b.Name && a.Node == b.Node && a.Peer == b.Peer
}
