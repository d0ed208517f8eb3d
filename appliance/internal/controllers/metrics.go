package controllers

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
)

// metrics of the controller, beside those of its libraries.
type metrics struct {
	passes  *prometheus.CounterVec
	took    prometheus.Histogram
	writes  *prometheus.CounterVec
	objects prometheus.Gauge
	// keyChanges are those of gateways' keys.
	keyChanges *prometheus.CounterVec
}

func newMetrics() *metrics {
	m := &metrics{
		passes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_controller_passes_total", Help: "Passes of the controller, by result.",
		}, []string{"result"}),
		took: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "isthmus_controller_pass_seconds", Help: "How long a pass took.",
			Buckets: []float64{.001, .005, .01, .05, .1, .5, 1, 5, 10, 30},
		}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_controller_writes_total", Help: "Objects written, by kind and verb.",
		}, []string{"kind", "verb"}),
		objects: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "isthmus_controller_planned_objects", Help: "Objects in the plan.",
		}),
	}
	m.keyChanges = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_controller_key_changes_total", Help: "Changes of the keys of gateways, by peer, by whose key it is (us or peer), and by outcome (changed or failed).",
	}, []string{"peer", "by", "outcome"})
	for _, c := range []prometheus.Collector{m.passes, m.took, m.writes, m.objects, m.keyChanges} {
		// A second controller in one process (a test) goes uncounted.
		var twice prometheus.AlreadyRegisteredError
		if err := ctrlmetrics.Registry.Register(c); err != nil && !errors.As(err, &twice) {
			panic("controllers: a metric contradicts itself: " + err.Error())
		}
	}
	return m
}

func (m *metrics) passed(took time.Duration, err error) {
	m.took.Observe(took.Seconds())
	result := "ok"
	switch {
	case err == nil:
	case onlyStale(err):
		result = "stale"
	default:
		result = "error"
	}
	m.passes.WithLabelValues(result).Inc()
}

func (m *metrics) wrote(kind, verb string) { m.writes.WithLabelValues(kind, verb).Inc() }

func (m *metrics) planned(n int) { m.objects.Set(float64(n)) }
