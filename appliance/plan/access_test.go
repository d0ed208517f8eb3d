package plan_test

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Gateways get the Pod Security level that they need where there is none. One
// that somebody chose stays, whatever the namespace is called, and the gateway
// says what to do: asking for another one would fail in every pass.
func TestPodSecurityLevel(t *testing.T) {
	const enforce = "pod-security.kubernetes.io/enforce"
	for _, test := range []struct {
		name, namespace, level string
		set, told              bool
	}{
		{name: "a tenant namespace without", namespace: "liqo-tenant-rome", set: true},
		{name: "a tenant namespace that has it", namespace: "liqo-tenant-rome", level: "privileged", set: true},
		{name: "a tenant namespace with another", namespace: "liqo-tenant-rome", level: "baseline", told: true},
		{name: "any namespace without", namespace: "shop", set: true},
		{name: "any namespace with another", namespace: "shop", level: "restricted", told: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := twoNodes(t, "milan", "10.10.0.0/16")
			ns := &corev1.Namespace{TypeMeta: templatesMeta("v1", "Namespace"), ObjectMeta: named("", test.namespace)}
			if test.level != "" {
				ns.Labels = map[string]string{enforce: test.level}
			}
			w.create(ns)
			g := w.server("rome", corev1.ServiceTypeNodePort)
			delete(w.objects, keyOf(g))
			g.Namespace = test.namespace
			w.objects[keyOf(g)] = g

			r := plan.Cluster(w.snapshot())
			set := false
			for _, o := range r.Applies {
				set = set || o.GetName() == test.namespace && o.GetLabels()[enforce] == "privileged"
			}
			assert.Equal(t, set, test.set)
			told := strings.Join(warnings(r, "GatewayServer", test.namespace, "rome"), "\n")
			assert.Equal(t, strings.Contains(told, "namespace "+test.namespace+" has the label "+enforce+"="+test.level), test.told, told)
		})
	}
}
