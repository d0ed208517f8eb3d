package plan_test

import (
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// The whole plan of one end of a peering, once its gateway runs.
func TestGolden(t *testing.T) {
	for _, test := range []struct {
		name  string
		build func(t *testing.T) *world
	}{
		{"server-disjoint", func(t *testing.T) *world {
			w := twoNodes(t, "milan", "10.10.0.0/16")
			w.namespace("rome")
			w.configure("rome", "10.20.0.0/16", "10.71.0.0/16")
			w.server("rome", corev1.ServiceTypeNodePort)
			return w
		}},
		{"client-disjoint", func(t *testing.T) *world {
			w := twoNodes(t, "rome", "10.20.0.0/16")
			w.namespace("milan")
			w.configure("milan", "10.10.0.0/16", "10.72.0.0/16")
			w.client("milan")
			return w
		}},
		{"server-overlapping", func(t *testing.T) *world {
			w := twoNodes(t, "milan", "10.10.0.0/16")
			w.namespace("rome")
			w.configure("rome", "10.10.0.0/16", "10.70.0.0/16")
			w.server("rome", corev1.ServiceTypeLoadBalancer)
			return w
		}},
		{"client-overlapping", func(t *testing.T) *world {
			w := twoNodes(t, "rome", "10.10.0.0/16")
			w.namespace("milan")
			w.configure("milan", "10.10.0.0/16", "10.70.0.0/16")
			w.client("milan")
			return w
		}},
		{"server-vxlan", func(t *testing.T) *world {
			w := twoNodes(t, "milan", "10.10.0.0/16")
			w.options.Overlay = cluster.OverlayVXLAN
			w.namespace("rome")
			w.configure("rome", "10.10.0.0/16", "10.70.0.0/16")
			w.server("rome", corev1.ServiceTypeNodePort)
			return w
		}},
		{"client-vxlan", func(t *testing.T) *world {
			w := twoNodes(t, "rome", "10.20.0.0/16")
			w.options.Overlay = cluster.OverlayVXLAN
			w.namespace("milan")
			w.configure("milan", "10.10.0.0/16", "10.72.0.0/16")
			w.client("milan")
			return w
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := test.build(t)
			w.settle()
			w.kubelet("node-1", "node-2")
			w.settle()
			w.vteps()
			r := w.settle()
			assert.Equal(t, len(r.Events), 0, "%v", r.Events)
			golden.Assert(t, dump(t, r), test.name+".yaml")
			assert.Equal(t, dump(t, plan.Cluster(w.snapshot())), dump(t, r))
		})
	}
}
