package daemon

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-net/isthmus/appliance/internal/probe"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// driver is the value of the label by which dashboards tell kinds of tunnels.
const driver = "wireguard"

// metrics is what a daemon counts of itself. The kernel's counters are read
// when they are asked for.
type metrics struct {
	registry *prometheus.Registry
	passes   *prometheus.CounterVec
	duration prometheus.Histogram
	changes  *prometheus.CounterVec
}

func newMetrics(noRoutes func() (uint64, error)) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		passes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_passes_total",
			Help: "Passes of the loop, by result: idle (nothing to do), changed, failed.",
		}, []string{"result"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "isthmus_pass_duration_seconds",
			Help:    "How long a pass of the loop took.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14), // 1 ms to 8 s
		}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_changes_total",
			Help: "Changes to the kernel's configuration that were attempted, by kind.",
		}, []string{"kind"}),
	}
	for _, result := range []string{"idle", "changed", "failed"} {
		m.passes.WithLabelValues(result)
	}
	m.registry.MustRegister(m.passes, m.duration, m.changes,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		readCounter("isthmus_no_route_packets_total",
			"Packets that this network namespace could not route, those that left a tunnel for no known destination among them.",
			noRoutes))
	return m
}

// A counterFunc is a counter that somebody else keeps. When it can't be read
// it is absent.
type counterFunc struct {
	desc *prometheus.Desc
	read func() (uint64, error)
}

func readCounter(name, help string, read func() (uint64, error)) prometheus.Collector {
	return counterFunc{prometheus.NewDesc(name, help, nil, nil), read}
}

// Describe implements prometheus.Collector.
func (c counterFunc) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c counterFunc) Collect(ch chan<- prometheus.Metric) {
	if n, err := c.read(); err == nil {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(n))
	}
}

// pass counts a pass.
func (m *metrics) pass(p outcome) {
	result := "idle"
	switch {
	case p.err != nil:
		result = "failed"
	case !p.changes.Empty():
		result = "changed"
	}
	m.passes.WithLabelValues(result).Inc()
	m.duration.Observe(p.took.Seconds())
	c := p.changes
	for kind, n := range map[string]int{
		"link":      len(c.AddLinks) + len(c.ChangeLinks) + len(c.RecreateLinks) + len(c.DeleteLinks),
		"wireguard": len(c.SetWireGuard),
		"address":   len(c.AddAddresses) + len(c.DeleteAddresses),
		"route":     len(c.AddRoutes) + len(c.ReplaceRoutes) + len(c.DeleteRoutes),
		"neighbor":  len(c.SetNeighbors) + len(c.DeleteNeighbors),
		"rule":      len(c.AddPassRules) + len(c.AddRules) + len(c.DeleteRules) + len(c.DeletePassRules),
		"table":     len(c.SetTables) + len(c.DeleteTables),
	} {
		m.changes.WithLabelValues(kind).Add(float64(n))
	}
}

// handler answers with all metrics.
func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// A tunnelCollector reads the tunnel when it is asked. The names and labels
// are those of the public system, whose dashboards people have.
type tunnelCollector struct {
	peer           func() (kernel.PeerStatus, bool)
	status         func() probe.Status
	implementation func() kernel.Implementation
	denied         func() (uint64, error)
	blocked        func() bool
	roundTrips     prometheus.Histogram

	rx, tx, latency, connected, cutOff, loss, handshake, impl, deniedPackets *prometheus.Desc
}

// roundTripBuckets are those of the public system, in microseconds: steps of
// 5 ms from 10 to 20 ms, of 16.25 ms up to 150 ms, and of a quarter of an octave
// up to 300 ms, without fractions.
var roundTripBuckets = []float64{
	10000, 15000, 20000, 36250, 52500, 68750, 85000, 101250, 117500, 133750, 150000, 178380, 212129, 252264, 299992,
}

func newTunnelCollector(remoteID string) *tunnelCollector {
	labels := prometheus.Labels{"driver": driver, "cluster_id": remoteID}
	desc := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, labels) }
	return &tunnelCollector{
		roundTrips: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:        "liqo_peer_latency_histogram_us",
			Help:        "Round trips to the peer's gateway through the tunnel, in microseconds.",
			Buckets:     roundTripBuckets,
			ConstLabels: labels,
		}),
		rx:        desc("liqo_peer_receive_bytes_total", "Bytes received from the peer through the tunnel."),
		tx:        desc("liqo_peer_transmit_bytes_total", "Bytes sent to the peer through the tunnel."),
		latency:   desc("liqo_peer_latency_us", "Round trip to the peer's gateway through the tunnel, in microseconds; 0 when it does not answer."),
		connected: desc("liqo_peer_is_connected", "Whether the peer's gateway answers through the tunnel."),
		cutOff:    desc("isthmus_peer_blocked", "Whether this cluster has cut the peer off, so that WireGuard is to have no peer."),
		loss:      desc("isthmus_peer_probe_loss_ratio", "Share of the latest probes of the tunnel that were not answered in time."),
		handshake: desc("isthmus_peer_last_handshake_timestamp_seconds", "When the peer last proved who it is; absent before it did."),
		impl: prometheus.NewDesc("liqo_wireguard_implementation", "1 for the implementation of WireGuard that is in use.",
			[]string{"implementation"}, prometheus.Labels{"driver": driver}),
		deniedPackets: desc("isthmus_peer_denied_packets_total",
			"Packets of the peer to addresses of the internal CIDR, or to the gateway itself: they were dropped. Counted anew when a node or a peer joins or leaves."),
	}
}

// Describe implements prometheus.Collector.
func (c *tunnelCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.rx, c.tx, c.latency, c.connected, c.cutOff, c.loss, c.handshake, c.impl, c.deniedPackets} {
		ch <- d
	}
	c.roundTrips.Describe(ch)
}

// Collect implements prometheus.Collector. What is not known, or can't be read,
// is left out.
func (c *tunnelCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	st := c.status()
	connected := 0.0
	if st.State == probe.Connected {
		connected = 1
	}
	gauge(c.connected, connected)
	cutOff := 0.0
	if c.blocked() {
		cutOff = 1
	}
	gauge(c.cutOff, cutOff)
	gauge(c.latency, float64(st.Latency.Microseconds()))
	gauge(c.loss, st.Loss)
	gauge(c.impl, 1, string(c.implementation()))
	c.roundTrips.Collect(ch)
	if n, err := c.denied(); err == nil {
		ch <- prometheus.MustNewConstMetric(c.deniedPackets, prometheus.CounterValue, float64(n))
	}
	if p, ok := c.peer(); ok {
		ch <- prometheus.MustNewConstMetric(c.rx, prometheus.CounterValue, float64(p.Rx))
		ch <- prometheus.MustNewConstMetric(c.tx, prometheus.CounterValue, float64(p.Tx))
		if !p.LastHandshake.IsZero() {
			gauge(c.handshake, float64(p.LastHandshake.Unix()))
		}
	}
}

// remainingLinks reports whether links, or WireGuard devices, are among what
// could not be applied.
func remainingLinks(c netstate.Changes, only func(netstate.Link) bool) bool {
	for _, list := range [][]netstate.Link{c.AddLinks, c.ChangeLinks, c.RecreateLinks} {
		for _, l := range list {
			if only(l) {
				return true
			}
		}
	}
	return false
}
