package plan_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// The templates of the chart can be filled in, for every type of Service and
// with and without each optional field.
func TestChartTemplates(t *testing.T) {
	for _, file := range []string{"minimal.yaml", "full.yaml"} {
		for name, change := range map[string]func(s *v1beta1.GatewayServer){
			"ClusterIP": func(s *v1beta1.GatewayServer) {},
			"NodePort": func(s *v1beta1.GatewayServer) {
				s.Spec.Endpoint.ServiceType, s.Spec.Endpoint.NodePort = corev1.ServiceTypeNodePort, new(int32(30840))
			},
			"ports": func(s *v1beta1.GatewayServer) {
				s.Spec.Endpoint.ServiceType = corev1.ServiceTypeNodePort
				s.Spec.Endpoint.Port, s.Spec.Endpoint.Ports, s.Spec.Endpoint.NodePorts = nil, []int32{4500}, []int32{30841}
			},
			"LoadBalancer": func(s *v1beta1.GatewayServer) {
				s.Spec.Endpoint.ServiceType, s.Spec.Endpoint.LoadBalancerIP = corev1.ServiceTypeLoadBalancer, new("203.0.113.7")
			},
		} {
			t.Run(file+"/"+name, func(t *testing.T) {
				w := twoNodes(t, "milan", "10.10.0.0/16")
				w.remove("WgGatewayServerTemplate", "liqo", "wireguard-server")
				w.remove("WgGatewayClientTemplate", "liqo", "wireguard-client")
				chartTemplates(t, w, "../../k8s/testdata/"+file)
				w.namespace("rome")
				change(w.server("rome", corev1.ServiceTypeClusterIP))
				w.namespace("paris")
				w.client("paris")
				r := w.settle()
				assert.Assert(t, cmp.Len(r.Events, 0))

				s := get[*corev1.Service](w, "liqo-tenant-rome", "gw-rome").Spec
				switch name {
				case "NodePort":
					assert.Equal(t, s.Ports[0].NodePort, int32(30840))
				case "ports":
					assert.Equal(t, s.Ports[0].Port, int32(4500))
					assert.Equal(t, s.Ports[0].NodePort, int32(30841))
				case "LoadBalancer":
					assert.Equal(t, s.LoadBalancerIP, "203.0.113.7")
					// full.yaml says false.
					assert.Equal(t, s.AllocateLoadBalancerNodePorts == nil, file == "minimal.yaml")
				case "ClusterIP":
					assert.Equal(t, s.Ports[0].Port, int32(51840))
					assert.Equal(t, s.Ports[0].NodePort, int32(0))
					assert.Equal(t, s.LoadBalancerIP, "")
					assert.Assert(t, s.AllocateLoadBalancerNodePorts == nil)
				}
				server := get[*appsv1.Deployment](w, "liqo-tenant-rome", "gw-rome").Spec.Template
				client := get[*appsv1.Deployment](w, "liqo-tenant-paris", "gw-paris").Spec.Template
				for k, v := range s.Selector {
					assert.Equal(t, server.Labels[k], v, k)
				}
				for _, pod := range []corev1.PodTemplateSpec{server, client} {
					args := strings.Join(pod.Spec.Containers[0].Args, " ")
					assert.Assert(t, !strings.Contains(args, "{{") && !strings.Contains(args, "<nil>"), args)
					assert.Equal(t, pod.Labels[v1beta1.LabelComponent], v1beta1.ComponentGateway)
					assert.Equal(t, pod.Labels[v1beta1.LabelActive], "true")
				}
				for _, arg := range []string{"--name=rome", "--namespace=liqo-tenant-rome", "--remote-cluster-id=rome", "--mode=server", "--mtu=1340"} {
					assert.Assert(t, slices.Contains(server.Spec.Containers[0].Args, arg), "%s is not in %v", arg, server.Spec.Containers[0].Args)
				}
				for _, arg := range []string{"--name=paris", "--mode=client", "--endpoint-address=203.0.113.1", "--endpoint-port=30840", "--mtu=0"} {
					assert.Assert(t, slices.Contains(client.Spec.Containers[0].Args, arg), "%s is not in %v", arg, client.Spec.Containers[0].Args)
				}
			})
		}
	}
}

// chartTemplates adds the gateway templates of a rendered chart, and checks
// that what the plan binds gateways to is in it too.
func chartTemplates(t *testing.T, w *world, path string) {
	t.Helper()
	rendered, err := os.ReadFile(path)
	assert.NilError(t, err)
	found := map[string]bool{}
	for doc := range strings.SplitSeq(string(rendered), "\n---\n") {
		var head struct {
			Kind     string
			Metadata struct{ Name string }
		}
		assert.NilError(t, yaml.Unmarshal([]byte(doc), &head))
		found[head.Kind+" "+head.Metadata.Name] = true
		if head.Kind == "WgGatewayServerTemplate" || head.Kind == "WgGatewayClientTemplate" {
			w.yaml(doc)
		}
	}
	for _, want := range []string{"ClusterRole " + plan.GatewayRole, "Role " + plan.GatewayRole} {
		assert.Assert(t, found[want], "%s is not in %s", want, path)
	}
}
