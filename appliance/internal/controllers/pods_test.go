package controllers

import (
	"fmt"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
)

// passes returns how many passes there were.
func (w *world) passes() float64 {
	w.t.Helper()
	n, err := countPasses()
	assert.NilError(w.t, err)
	return n
}

func countPasses() (n float64, err error) {
	families, err := ctrlmetrics.Registry.Gather()
	for _, f := range families {
		if f.GetName() == "isthmus_controller_passes_total" {
			for _, m := range f.GetMetric() {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n, err
}

// testPods has pods come and go. Those where the podCIDRs of their node lead to are no
// reason for a pass, nor is a ConfigMap of somebody else's; one elsewhere is.
func (w *world) testPods() {
	pod := func(name, ip string) *corev1.Pod {
		o := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{
			NodeName: "node-1", Containers: []corev1.Container{{Name: "web", Image: "web"}},
		}}
		w.create(o)
		o.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
		assert.NilError(w.t, w.c.Status().Update(w.t.Context(), o))
		return o
	}
	w.settle()
	// What the test before has changed may come late by a watch, and make a pass: one of these
	// rounds is without any. Were a pod a reason, each would have some.
	for round := 1; ; round++ {
		before := w.passes()
		for i := range 5 {
			n := 5*round + i // names and addresses that nobody has seen
			o := pod(fmt.Sprintf("web-%d", n), fmt.Sprintf("10.0.1.%d", 40+n))
			assert.NilError(w.t, w.c.Delete(w.t.Context(), o, client.GracePeriodSeconds(0)))
		}
		other := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "somebodys"}, Data: map[string]string{"a": "b"}}
		w.create(other)
		w.delete(other)
		w.silent()
		made := w.passes() - before
		if made == 0 {
			break
		}
		assert.Assert(w.t, round < 5, "%v passes, and some in each round before", made)
	}

	before := w.passes()
	elsewhere := pod("elsewhere", "10.0.2.40")
	w.until("there is a pass", func() bool { return w.passes() > before })
	w.settle()
	before = w.passes()
	assert.NilError(w.t, w.c.Delete(w.t.Context(), elsewhere, client.GracePeriodSeconds(0)))
	w.until("there is a pass when it goes", func() bool { return w.passes() > before })
	w.settle()
}
