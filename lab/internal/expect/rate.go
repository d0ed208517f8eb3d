package expect

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/lane"
	"github.com/isthmus-net/isthmus/lab/internal/load"
)

// Rate expects that one connection of TCP carries so much. Rows that expect it run
// alone: what is measured at once is not what a path carries, and a pod has one
// port for load.
type Rate struct {
	From    Ref `lab:"from,required" doc:"who sends"`
	To      Ref `lab:"to,required" doc:"who receives"`
	AtLeast int `lab:"atLeast,required" min:"1" max:"1000000000" doc:"bytes per second that arrive, on a machine with nothing else to do"`
}

// rateTime is how long a connection sends: long enough for some losses, each of
// which costs TCP 200 ms at least (RFC 6298 in Linux: TCP_RTO_MIN).
const rateTime = 2 * time.Second

// Lint resolves the two ends.
func (e *Rate) Lint(l *Linter) {
	tcp := "tcp"
	lintEnds(l, &e.From, &e.To, &tcp)
}

// Check sends for two seconds.
func (e *Rate) Check(ctx context.Context, row *Row) (Result, error) {
	began := time.Now()
	want := fmt.Sprintf("%d bytes per second arrive", e.AtLeast)
	addr, err := row.Directory.Address(ctx, e.To.Operand, e.From.Cluster)
	if err != nil {
		return missing(want, err)
	}
	on := lane.Lane{Addr: addr}
	if on.From, err = row.ExecTarget(ctx, e.From.Operand); err != nil {
		return Result{}, err
	}
	if on.To, err = row.ExecTarget(ctx, e.To.Operand); err != nil {
		return Result{}, err
	}
	stop, err := on.Serve(ctx, row.World)
	if err != nil {
		return Result{}, err
	}
	defer stop()
	got, err := on.Measure(ctx, row.World, load.Measurement{Kind: load.Throughput, Duration: rateTime})
	var exit *lane.ExitError
	if errors.As(err, &exit) {
		return Result{Want: want, Got: exit.Message}, nil
	}
	if err != nil {
		return Result{}, err
	}
	rate := 0.0
	if got.Elapsed > 0 {
		rate = float64(got.Bytes) / got.Elapsed.Seconds()
	}
	res := Result{Want: want, Got: fmt.Sprintf("%.0f bytes per second, %d in all", rate, got.Bytes)}
	if res.OK = rate*row.Pace.Since(began) >= float64(e.AtLeast); res.OK {
		res.Notes = []string{res.Got}
	}
	return res, nil
}

// String is the expectation on one line.
func (e *Rate) String() string {
	return fmt.Sprintf("%s sends %s at least %d bytes per second", e.From, e.To, e.AtLeast)
}
