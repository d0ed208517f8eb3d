package peer

import (
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

func TestWriter(t *testing.T) {
	fields := func(manager, fields string) metav1.ManagedFieldsEntry { return by(manager, fields)[0] }
	const (
		all      = `{"f:metadata":{},"f:spec":{".":{},"f:mtu":{},"f:endpoint":{".":{},"f:port":{}}}}`
		port     = `{"f:spec":{"f:endpoint":{"f:port":{}}}}`
		template = `{"f:spec":{"f:serverTemplateRef":{}}}`
	)
	for _, tt := range []struct {
		name    string
		managed []metav1.ManagedFieldsEntry
		field   string
		want    string
	}{
		{"ours", []metav1.ManagedFieldsEntry{fields("isthmusctl", all)}, "spec.mtu", ""},
		{"liqoctl's", []metav1.ManagedFieldsEntry{fields("liqoctl", all)}, "spec.mtu", "liqoctl"},
		{"ours, but for one field", []metav1.ManagedFieldsEntry{fields("isthmusctl", all), fields("kubectl-edit", port)}, "spec.endpoint.port", "kubectl-edit"},
		{"ours, and another field is not", []metav1.ManagedFieldsEntry{fields("isthmusctl", `{"f:spec":{"f:mtu":{}}}`), fields("kubectl-edit", port)}, "spec.mtu", ""},
		{"a part of what is one field", []metav1.ManagedFieldsEntry{fields("isthmusctl", all), fields("kubectl", template)}, "spec.serverTemplateRef.name", "kubectl"},
		{"a field that nobody wrote is of who wrote the rest", []metav1.ManagedFieldsEntry{fields("kubectl", all)}, "spec.endpoint.nodePort", "kubectl"},
		{"of an empty spec, too", []metav1.ManagedFieldsEntry{fields("kubectl", `{"f:spec":{}}`)}, "spec.mtu", "kubectl"},
		{"a status is nobody's business", []metav1.ManagedFieldsEntry{fields("isthmusctl", all), {Manager: "isthmus", Subresource: "status", FieldsV1: metav1.NewFieldsV1(all)}}, "spec.mtu", ""},
		{"labels only", []metav1.ManagedFieldsEntry{fields("kubectl", `{"f:metadata":{"f:labels":{}}}`)}, "spec.mtu", "somebody else"},
		{"not known", nil, "spec.mtu", "somebody else"},
	} {
		g := &v1beta1.GatewayServer{ObjectMeta: metav1.ObjectMeta{ManagedFields: tt.managed}}
		assert.Equal(t, writer(g, tt.field), tt.want, tt.name)
	}
}

// A run that ends after any change is gone on with, to the same end.
func TestResume(t *testing.T) {
	whole := two()
	all := whole.done(t, Connect, defaults())
	for stop := range all {
		b := two()
		var done []string
		for len(done) <= stop {
			s := connect(b, Connect, defaults())
			assert.Assert(t, len(s.Changes) > 0)
			c := s.Changes[0]
			done = append(done, string(c.Deed)+" "+b.ref(c.On, c.Object).String())
			b.apply(t, s.Changes[:1])
			b.settle(Local)
			b.settle(Remote)
		}
		assert.DeepEqual(t, append(done, b.done(t, Connect, defaults())...), all)
		for on := range b {
			assert.DeepEqual(t, b[on].Namespace, whole[on].Namespace)
			assert.DeepEqual(t, b[on].Configurations, whole[on].Configurations)
			assert.DeepEqual(t, b[on].Servers, whole[on].Servers)
			assert.DeepEqual(t, b[on].Clients, whole[on].Clients)
			assert.DeepEqual(t, b[on].Keys, whole[on].Keys)
		}
	}
}
