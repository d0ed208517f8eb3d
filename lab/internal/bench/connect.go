package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// A Way is one way in which two clusters are connected.
type Way struct {
	Name string
	// Prepare makes what Connect needs, and is not measured; nil: nothing.
	Prepare func(context.Context) error
	// Connect is what is measured, from its beginning to the first answer of a pod: it may
	// end before or after that.
	Connect func(context.Context) error
}

// A ConnectConfig says what MeasureConnect measures. All but Progress is needed.
type ConnectConfig struct {
	Ways  []Way // the first is what the others are compared with
	Pairs int
	// Reached reports whether a pod has an answer from the other cluster now.
	Reached func(context.Context) (bool, error)
	// Disconnect forgets the peering, on both sides.
	Disconnect func(context.Context) error
	Progress   func(pair int, text string)
}

// How often MeasureConnect looks for the first answer, and for how long.
const (
	lookEvery  = 20 * time.Millisecond
	lookAtMost = 2 * time.Minute
)

// MeasureConnect connects two clusters in each way, one after the other and again, and returns the
// seconds until the first answer, for each way in the order of the rounds.
func MeasureConnect(ctx context.Context, c ConnectConfig) ([][]float64, error) {
	out := make([][]float64, len(c.Ways))
	for pair := range c.Pairs {
		for i, way := range c.Ways {
			if c.Progress != nil {
				c.Progress(pair+1, way.Name)
			}
			took, err := c.once(ctx, way)
			if err != nil {
				return nil, fmt.Errorf("pair %d, %s: %w", pair+1, way.Name, err)
			}
			out[i] = append(out[i], took.Seconds())
		}
	}
	return out, nil
}

// once connects, and disconnects whatever came of it.
func (c ConnectConfig) once(ctx context.Context, way Way) (took time.Duration, err error) {
	if way.Prepare != nil {
		if err := way.Prepare(ctx); err != nil {
			return 0, err
		}
	}
	defer func() {
		if undo := c.Disconnect(context.WithoutCancel(ctx)); undo != nil {
			err = errors.Join(err, fmt.Errorf("disconnect: %w", undo))
		}
	}()
	start := time.Now()
	ended := make(chan error, 1)
	go func() { ended <- way.Connect(ctx) }()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		reached, err := c.Reached(ctx)
		if reached && err == nil {
			took = time.Since(start)
			return took, <-ended
		}
		if err == nil && time.Since(start) > lookAtMost {
			err = fmt.Errorf("no pod had an answer within %v", lookAtMost)
		}
		if err != nil {
			return 0, errors.Join(err, <-ended)
		}
		<-look.C
	}
}

// A ConnectRow is one way over all rounds. The ratio is to the first way, pair by pair.
type ConnectRow struct {
	Way     string `json:"way"`
	Seconds Spread `json:"seconds"` // until the first answer
	Ratio   Spread `json:"ratio"`
}

// A ConnectReport is one run of lab bench connect.
type ConnectReport struct {
	Version string       `json:"version"` // of the lab
	Started time.Time    `json:"started"`
	Overlay string       `json:"overlay"`
	Pairs   int          `json:"pairs"`
	Rows    []ConnectRow `json:"rows"`
}

// SummarizeConnect makes the rows of the table out of what MeasureConnect returns.
func SummarizeConnect(ways []Way, seconds [][]float64) []ConnectRow {
	var out []ConnectRow
	for i, w := range ways {
		out = append(out, ConnectRow{Way: w.Name, Seconds: spreadOf(seconds[i]), Ratio: spreadOf(ratios(seconds[i], seconds[0]))})
	}
	return out
}

// Write writes the report as a table.
func (r ConnectReport) Write(w io.Writer) {
	fmt.Fprintf(w, "\nfrom the beginning to the first answer of a pod, %s overlay\n  %d interleaved pairs: median (smallest–largest)\n", r.Overlay, r.Pairs)
	lines := [][]string{{"", "time", "to " + r.Rows[0].Way}}
	for _, row := range r.Rows {
		s := row.Seconds
		lines = append(lines, []string{row.Way, fmt.Sprintf("%s s (%s–%s)", digits(s.Median), digits(s.Min), digits(s.Max)), row.Ratio.ratio()})
	}
	writeColumns(w, lines)
	fmt.Fprintf(w, "\nCompare ratios: the times are this machine's.\n")
}
