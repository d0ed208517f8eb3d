package plan

import (
	"encoding/json"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	appsv1 "k8s.io/api/apps/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

func TestRender(t *testing.T) {
	port := int32(51840)
	values := templateValues{
		Name: "gw-rome", Namespace: "liqo-tenant-rome", ClusterID: "rome", SecretName: "gw-rome",
		Spec: v1beta1.GatewayServerSpec{MTU: 1340, Endpoint: v1beta1.Endpoint{Port: &port, ServiceType: "NodePort"}},
	}
	for _, test := range []struct {
		name, template, want, err string
		unknown                   []string
	}{
		{name: "no blanks", template: `{"metadata":{"name":"a"}}`, want: `{"metadata":{"name":"a"}}`},
		{name: "a name", template: `{"metadata":{"name":"{{ .Name }}"}}`, want: `{"metadata":{"name":"gw-rome"}}`},
		{name: "digits where a number belongs", template: `{"spec":{"replicas":"3"}}`, want: `{"spec":{"replicas":3}}`},
		{name: "digits in a label", template: `{"metadata":{"labels":{"mtu":"{{ .Spec.MTU }}"}}}`, want: `{"metadata":{"labels":{"mtu":"1340"}}}`},
		{name: "digits in arguments and environment", template: `{"spec":{"template":{"spec":{"containers":[{"args":["{{ .Spec.MTU }}"],"env":[{"name":"A","value":"1"}]}]}}}}`,
			want: `{"spec":{"template":{"spec":{"containers":[{"args":["1340"],"env":[{"name":"A","value":"1"}]}]}}}}`},
		{name: "number or name", template: `{"spec":{"template":{"spec":{"containers":[{"livenessProbe":{"httpGet":{"port":"8081"}}},{"livenessProbe":{"httpGet":{"port":"health"}}}]}}}}`,
			want: `{"spec":{"template":{"spec":{"containers":[{"livenessProbe":{"httpGet":{"port":8081}}},{"livenessProbe":{"httpGet":{"port":"health"}}}]}}}}`},
		{name: "quantity", template: `{"spec":{"template":{"spec":{"containers":[{"resources":{"limits":{"cpu":"2","memory":"64Mi"}}}]}}}}`,
			want: `{"spec":{"template":{"spec":{"containers":[{"resources":{"limits":{"cpu":"2","memory":"64Mi"}}}]}}}}`},
		{name: "pointer", template: `{"metadata":{"name":"{{ .Spec.Endpoint.Port }}"}}`, want: `{"metadata":{"name":"51840"}}`},
		{name: "optional, absent", template: `{"metadata":{"?name":"{{ .Spec.Endpoint.LoadBalancerIP }}"}}`, want: `{"metadata":{}}`},
		{name: "optional, present", template: `{"spec":{"?minReadySeconds":"{{ .Spec.MTU }}"}}`, want: `{"spec":{"minReadySeconds":1340}}`},
		{name: "optional object that is empty", template: `{"metadata":{"?labels":{"?a":""}}}`, want: `{"metadata":{}}`},
		{name: "fields that there are not", template: `{"spec":{"replica":"3","?x":{"y":1},"template":{"spec":{"workloadRef":{"name":"a","podGroup":"b"},"containers":[{"name":"a"},{"imagee":"b"}]}}}}`,
			want: `{"spec":{"template":{"spec":{"containers":[{"name":"a"},{}]}}}}`, unknown: []string{
				"spec.template.spec.x", "spec.template.spec.replica", "spec.template.spec.template.spec.containers[1].imagee", "spec.template.spec.template.spec.workloadRef",
			}},
		{name: "what decodes itself, and maps", template: `{"metadata":{"creationTimestamp":null,"managedFields":[{"fieldsV1":{"f:a":{}}}],"labels":{"any":"b"}},"spec":{"template":{"spec":{"nodeSelector":{"any":"b"}}}}}`,
			want: `{"metadata":{"creationTimestamp":null,"managedFields":[{"fieldsV1":{"f:a":{}}}],"labels":{"any":"b"}},"spec":{"template":{"spec":{"nodeSelector":{"any":"b"}}}}}`},
		{name: "syntax", template: `{"metadata":{"name":"{{ .Name"}}`, err: "spec.template.metadata.name"},
		{name: "unknown field", template: `{"spec":{"replicas":"{{ .Spec.Replicas }}"}}`, err: "spec.template.spec.replicas"},
		{name: "a word where a number belongs", template: `{"spec":{"replicas":"many"}}`, err: "spec.template"},
		{name: "no JSON", template: `{`, err: "spec.template"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got, want appsv1.Deployment
			unknown, err := render([]byte(test.template), values, &got)
			if test.err != "" {
				assert.ErrorContains(t, err, test.err)
				return
			}
			assert.NilError(t, err)
			assert.DeepEqual(t, unknown, test.unknown)
			assert.NilError(t, json.Unmarshal([]byte(test.want), &want))
			gotJSON, err := json.Marshal(got)
			assert.NilError(t, err)
			wantJSON, err := json.Marshal(want)
			assert.NilError(t, err)
			assert.Equal(t, string(gotJSON), string(wantJSON))
		})
	}
}

func TestInterfaceName(t *testing.T) {
	for _, test := range []struct{ id, want string }{
		{"rome", "liqo.rome"},
		{"abcdefghij", "liqo.abcdefghij"},
		{"node-1", "liqo.node-1"},
	} {
		assert.Equal(t, interfaceName("node", test.id, 0), test.want)
	}
	for _, id := range []string{"", "abcdefghijk", "Rome", "a.b", "vxlan", "host", "é"} {
		name := interfaceName("node", id, 0)
		assert.Assert(t, cmp.Regexp(`^liqo\.[a-z2-7]{10}$`, name))
		assert.Assert(t, name != interfaceName("fabric", id, 0))
		assert.Assert(t, name != interfaceName("node", id, 2))
	}
	// A hash that another node is called by: who has it keeps it.
	taken := interfaceName("node", "a.long.node", 0)
	names := interfaceNames("node", []ifaceUser{{"x", taken}, {"a.long.node", ""}, {"y", taken}}, nil)
	assert.Equal(t, names["x"], taken)
	assert.Assert(t, names["a.long.node"] != taken && names["y"] != taken && names["a.long.node"] != names["y"])
}

func TestShorten(t *testing.T) {
	assert.Equal(t, Label("abc"), "abc")
	long := Label("a-very-long-name-of-a-node-in-a-cluster.in-a-region.of-a-provider.example.org")
	assert.Assert(t, len(long) <= 63)
	assert.Assert(t, cmp.Regexp(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`, long))
	assert.Assert(t, long != Label("a-very-long-name-of-a-node-in-a-cluster.in-a-region.of-a-provider.example.com"))
}
