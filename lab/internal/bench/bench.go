// Package bench measures the data path between two clusters of a lab: from pod
// to pod, beside the bare tunnel between the gateways and the bare network
// between nodes. This machine's numbers mean little and change with what else
// it does, so claims are ratios: the three paths are measured one after the
// other, again and again; a pair is two numbers from the same round, and what
// counts is the median of the pairs' ratios. Nothing here says that a number is good or bad.
//
// Values are computed from values in this file and in table.go; measure.go
// runs the load generator in a lab.
package bench

import (
	"fmt"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/load"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// A Path is what traffic takes.
type Path string

// Paths, in the order in which they are measured.
const (
	PodToPod Path = "pod→pod"     // overlay, gateways and tunnel: all of it
	Tunnel   Path = "bare tunnel" // from gateway to gateway through WireGuard
	Underlay Path = "underlay"    // from node to node of the other cluster
)

// Paths returns all paths, in the order in which they are measured.
func Paths() []Path { return []Path{PodToPod, Tunnel, Underlay} }

// A Metric is one number of a measurement.
type Metric string

// Metrics.
const (
	Throughput     Metric = "throughput"          // bit/s, one TCP stream
	ThroughputLong Metric = "after a long packet" // the same, when packets that are too long have gone before
	Throughput4    Metric = "throughput, 4 flows" // bit/s, four TCP streams
	Packets        Metric = "small packets"       // received/s, UDP, 64-byte frames, at most a window on the way
	Connections    Metric = "connections"         // per second: connect, a byte there and back, close; four at a time
	Latency        Metric = "latency, median"     // s, a byte there and back on a TCP connection
	LatencyP99     Metric = "latency, p99"        // s
)

// Metrics returns all metrics, in the order of the table.
func Metrics() []Metric {
	return []Metric{Throughput, ThroughputLong, Throughput4, Packets, Connections, Latency, LatencyP99}
}

// Unit is what a metric's values are in.
func (m Metric) Unit() string {
	switch m {
	case Throughput, ThroughputLong, Throughput4:
		return "bit/s"
	case Packets, Connections:
		return "/s"
	}
	return "s"
}

// LowerIsBetter tells whether a ratio above 1 is a loss.
func (m Metric) LowerIsBetter() bool { return m.Unit() == "s" }

// values are the metrics that a measurement gives.
func values(r load.Result) map[Metric]float64 {
	perSecond := func(n float64) float64 {
		if r.Elapsed <= 0 {
			return 0
		}
		return n / r.Elapsed.Seconds()
	}
	switch r.Kind {
	case load.Throughput:
		m := Throughput
		switch {
		case r.LongFirst:
			m = ThroughputLong
		case r.Streams > 1:
			m = Throughput4
		}
		return map[Metric]float64{m: perSecond(8 * float64(r.Bytes))}
	case load.Packets:
		return map[Metric]float64{Packets: perSecond(float64(r.Packets))}
	case load.Connections:
		return map[Metric]float64{Connections: perSecond(float64(r.Count))}
	case load.Latency:
		return map[Metric]float64{Latency: r.Median.Seconds(), LatencyP99: r.P99.Seconds()}
	}
	return nil
}

// Samples are what was measured: for each metric and path the values of all
// rounds, in their order.
type Samples map[Metric]map[Path][]float64

func (s Samples) add(p Path, r load.Result) {
	for m, v := range values(r) {
		if s[m] == nil {
			s[m] = map[Path][]float64{}
		}
		s[m][p] = append(s[m][p], v)
	}
}

// A Spread is the median of some values, with the smallest and the largest.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// spreadOf needs at least one value.
func spreadOf(values []float64) Spread {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return Spread{Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, Min: sorted[0], Max: sorted[n-1]}
}

// A Row is one metric over all rounds. The ratios are of pod→pod to the others,
// pair by pair.
type Row struct {
	Metric        Metric          `json:"metric"`
	Unit          string          `json:"unit"`
	LowerIsBetter bool            `json:"lowerIsBetter,omitempty"`
	Paths         map[Path]Spread `json:"paths"`
	ToTunnel      Spread          `json:"toTunnel"`
	ToUnderlay    Spread          `json:"toUnderlay"`
}

// Summarize makes the rows of the table. Each metric that was measured must
// have been measured on all paths as often as there are pairs, and have a value.
func Summarize(s Samples, pairs int) ([]Row, error) {
	var rows []Row
	for _, m := range Metrics() {
		paths, ok := s[m]
		if !ok {
			continue
		}
		row := Row{Metric: m, Unit: m.Unit(), LowerIsBetter: m.LowerIsBetter(), Paths: map[Path]Spread{}}
		for _, p := range Paths() {
			all := paths[p]
			if len(all) != pairs {
				return nil, fmt.Errorf("%s, %s: %d values of %d pairs", m, p, len(all), pairs)
			}
			if slices.Min(all) <= 0 {
				return nil, fmt.Errorf("%s, %s: pair %d measured nothing; measure longer (--duration)", m, p, slices.Index(all, slices.Min(all))+1)
			}
			row.Paths[p] = spreadOf(all)
		}
		row.ToTunnel = spreadOf(ratios(paths[PodToPod], paths[Tunnel]))
		row.ToUnderlay = spreadOf(ratios(paths[PodToPod], paths[Underlay]))
		rows = append(rows, row)
	}
	return rows, nil
}

// ratios divides value by value.
func ratios(a, b []float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = a[i] / b[i]
	}
	return out
}

// A Combination is what a lab can be made of.
type Combination struct {
	World          string `json:"world"`
	Overlay        string `json:"overlay"`
	Implementation string `json:"implementation"` // of WireGuard: kernel or userspace
}

// String is the combination for people.
func (c Combination) String() string {
	return fmt.Sprintf("%s world, %s, WireGuard in %s", c.World, c.Overlay, map[string]string{"kernel": "the kernel", "userspace": "user space"}[c.Implementation])
}

// A Result is what was measured of one combination, or why nothing was.
type Result struct {
	Combination
	Lab      string          `json:"lab,omitempty"`
	Pairs    int             `json:"pairs,omitempty"`
	Duration report.Duration `json:"duration,omitempty"` // of one measurement, in seconds
	Ends     map[Path]string `json:"ends,omitempty"`     // from whom to whom
	Rows     []Row           `json:"rows,omitempty"`
	NotRun   string          `json:"notRun,omitempty"` // why this machine can't run it
	Error    string          `json:"error,omitempty"`  // why it failed
}

// A Report is one run of lab bench datapath.
type Report struct {
	Version string    `json:"version"` // of the lab
	Started time.Time `json:"started"`
	Results []Result  `json:"results"`
}
