package plan_test

import (
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// inHosts returns a cluster with the chart's templates, whose gateways to rome
// and to paris are in namespaces of nodes.
func inHosts(t *testing.T, overlay cluster.Overlay) *world {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.remove("WgGatewayServerTemplate", "liqo", "wireguard-server")
	w.remove("WgGatewayClientTemplate", "liqo", "wireguard-client")
	chartTemplates(t, w, "../../k8s/testdata/full.yaml")
	w.options.Overlay = overlay
	for i, remote := range []string{"rome", "paris"} {
		w.namespace(remote)
		w.configure(remote, []string{"10.20.0.0/16", "10.30.0.0/16"}[i], []string{"10.71.0.0/16", "10.72.0.0/16"}[i])
	}
	w.server("rome", corev1.ServiceTypeNodePort).Spec.ServerTemplateRef.Name = "wireguard-server-netns"
	w.client("paris").Spec.ClientTemplateRef.Name = "wireguard-client-netns"
	w.settle()
	w.kubelet("node-1")
	w.settle()
	w.vteps()
	w.settle()
	return w
}

// Every gateway in a namespace of a node has names and ports of its own, and
// everybody is told which.
func TestGatewaysInHosts(t *testing.T) {
	w := inHosts(t, cluster.OverlayVXLAN)
	taken := map[string]bool{}
	for remote, role := range map[string]string{"rome": "server", "paris": "client"} {
		ns := "liqo-tenant-" + remote
		pod := get[*appsv1.Deployment](w, ns, "gw-"+remote).Spec.Template
		args := strings.Join(pod.Spec.Containers[0].Args, " ")
		f := get[*v1beta1.InternalFabric](w, ns, remote).Spec
		assert.Equal(t, f.GatewayIP, v1beta1.IP("172.18.1.11"))
		assert.Assert(t, !taken[f.HostInterface], "%s is there twice", f.HostInterface)
		taken[f.HostInterface] = true
		number, netns, listen, health, metrics := "", "liqo-netns", "51840", ":51740", ":51640"
		if f.HostInterface != "liqo.host" {
			number, netns, listen, health, metrics = ".1", "liqo-netns-1", "51841", ":51741", ":51641"
		}
		assert.Equal(t, f.HostInterface, "liqo.host"+number)
		assert.Assert(t, pod.Spec.HostNetwork)
		assert.Equal(t, pod.Annotations[v1beta1.AnnotationNetNS], netns)
		want := []string{"--netns=/run/netns/" + netns, "--host-interface=" + f.HostInterface, "--health-address=" + health, "--metrics-address=" + metrics}
		if role == "server" {
			want = append(want, "--listen-port="+listen)
			// The peer dials the node, and not the Service.
			e := get[*v1beta1.GatewayServer](w, ns, remote).Status.Endpoint
			assert.DeepEqual(t, e.Addresses, []string{"172.18.1.11"})
			assert.Equal(t, *e.Port, map[string]int32{"51840": 51840, "51841": 51841}[listen])
			assert.Equal(t, get[*corev1.Service](w, ns, "gw-rome").Spec.Ports[0].TargetPort.String(), listen)
		}
		for _, arg := range want {
			assert.Assert(t, cmp.Contains(args, arg))
		}
		// Who may do what, and where.
		holder, gateway := pod.Spec.InitContainers[0], pod.Spec.Containers[0]
		assert.Assert(t, *holder.SecurityContext.Privileged && !*gateway.SecurityContext.Privileged)
		assert.DeepEqual(t, gateway.SecurityContext.Capabilities.Add, []corev1.Capability{"NET_ADMIN", "SYS_ADMIN"})
		assert.Equal(t, *holder.RestartPolicy, corev1.ContainerRestartPolicyAlways)

		ext := get[*v1beta1.RouteConfiguration](w, ns, remote+"-gw-ext").Spec.Table.Rules
		assert.Equal(t, *ext[len(ext)-1].Iif, "liqo.gateway")
		back := get[*v1beta1.RouteConfiguration](w, ns, remote+"-symmetric").Spec.Table
		assert.Assert(t, slices.ContainsFunc(back.Rules, func(r v1beta1.Rule) bool {
			return r.Src != nil && string(*r.Src) == string(f.Interface.Gateway.IP)+"/32"
		}), "nothing says how the gateway's own packets get to other nodes")
		for _, r := range back.Rules {
			for _, route := range r.Routes {
				assert.Assert(t, string(*route.Dst) != "172.18.1.11/32", "the node's address is taken for a pod's")
			}
		}
	}

	// The names stay when the first of them goes, and the next gateway gets
	// what is free.
	stays := get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome").Spec.HostInterface
	was := get[*v1beta1.InternalFabric](w, "liqo-tenant-paris", "paris").Spec.HostInterface
	w.remove("GatewayClient", "liqo-tenant-paris", "paris")
	w.settle()
	assert.Equal(t, get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome").Spec.HostInterface, stays)
	w.namespace("oslo")
	w.configure("oslo", "10.40.0.0/16", "10.73.0.0/16")
	w.client("oslo").Spec.ClientTemplateRef.Name = "wireguard-client-netns"
	w.settle()
	assert.Equal(t, get[*appsv1.Deployment](w, "liqo-tenant-oslo", "gw-oslo").Labels[v1beta1.LabelHostInterface], was)
}

// With Geneve there is no way to such a gateway: it is refused, and told what
// to do.
func TestGatewaysInHostsNeedVXLAN(t *testing.T) {
	w := inHosts(t, cluster.OverlayGeneve)
	c := condition(t, get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome").Status.Conditions, plan.ConditionAccepted)
	assert.Equal(t, c.Status, metav1.ConditionFalse)
	assert.Equal(t, c.Reason, plan.ReasonNeedsVXLAN)
	assert.Assert(t, cmp.Contains(c.Message, "networking.overlay to vxlan, or name the template wireguard-server"))
	c = condition(t, get[*v1beta1.GatewayClient](w, "liqo-tenant-paris", "paris").Status.Conditions, plan.ConditionAccepted)
	assert.Assert(t, cmp.Contains(c.Message, "name the template wireguard-client"))
	_, exists := w.objects[key("Deployment", "liqo-tenant-rome", "gw-rome")]
	assert.Assert(t, !exists)
}

// A gateway goes from a pod into a namespace and back; everybody follows the
// pod that is there.
func TestGatewayMovesIntoHost(t *testing.T) {
	w := inHosts(t, cluster.OverlayVXLAN)
	w.remove("GatewayClient", "liqo-tenant-paris", "paris")
	for _, tt := range []struct{ template, iface, iif string }{
		{"wireguard-server", "", "eth0"},
		{"wireguard-server-netns", "liqo.host", "liqo.gateway"},
	} {
		get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome").Spec.ServerTemplateRef.Name = tt.template
		w.settle()
		w.remove("Pod", "liqo-tenant-rome", "gw-rome-0")
		w.settle()
		w.kubelet("node-2")
		w.settle()
		assert.Equal(t, get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome").Spec.HostInterface, tt.iface)
		ext := get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-gw-ext").Spec.Table.Rules
		assert.Equal(t, *ext[len(ext)-1].Iif, tt.iif)
	}
}
