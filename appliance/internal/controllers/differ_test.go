package controllers

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

func deployment() *appsv1.Deployment {
	replicas := int32(1)
	d := &appsv1.Deployment{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"}}
	d.Name, d.Namespace = "gw-rome", "liqo-tenant-rome"
	d.Labels = map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy}
	d.Annotations = map[string]string{AnnotationPlanned: "a"}
	d.Spec.Replicas = &replicas
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "gw"}}
	d.Spec.Template.Spec.Containers = []corev1.Container{{Name: "gateway", Image: "isthmus:dev"}}
	return d
}

func route() *v1beta1.RouteConfiguration {
	cidr := v1beta1.CIDR("10.1.0.0/16")
	r := &v1beta1.RouteConfiguration{TypeMeta: metav1.TypeMeta{APIVersion: v1beta1.GroupVersion.String(), Kind: "RouteConfiguration"}}
	r.Name, r.Namespace = "rome-node-gw", "liqo-tenant-rome"
	r.Labels = map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy, v1beta1.LabelRouteCategory: v1beta1.CategoryFabric}
	r.Spec.Table = v1beta1.RouteTable{Name: r.Name, Rules: []v1beta1.Rule{{Dst: &cidr, Routes: []v1beta1.Route{{Dst: &cidr}}}}}
	return r
}

// change returns o after f.
func change[T client.Object](o T, f func(T)) T {
	f(o)
	return o
}

func TestDifference(t *testing.T) {
	src := v1beta1.CIDR("10.2.0.0/16")
	for _, tt := range []struct {
		name       string
		want, live client.Object
		field      string
	}{
		{"the same", deployment(), deployment(), ""},
		{"what the API server filled in", deployment(), change(deployment(), func(d *appsv1.Deployment) {
			d.Spec.RevisionHistoryLimit = new(int32)
			d.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyAlways
			d.Spec.Template.Spec.Containers[0].TerminationMessagePath = "/dev/termination-log"
		}), ""},
		{"another image", deployment(), change(deployment(), func(d *appsv1.Deployment) {
			d.Spec.Template.Spec.Containers[0].Image = "other"
		}), "spec"},
		{"a container more", deployment(), change(deployment(), func(d *appsv1.Deployment) {
			d.Spec.Template.Spec.Containers = append(d.Spec.Template.Spec.Containers, corev1.Container{Name: "x"})
		}), "spec"},
		{"planned otherwise before", deployment(), change(deployment(), func(d *appsv1.Deployment) {
			d.Annotations[AnnotationPlanned] = "b"
		}), "spec"},
		{"annotation of somebody else", deployment(), change(deployment(), func(d *appsv1.Deployment) {
			d.Annotations["deployment.kubernetes.io/revision"] = "3"
		}), ""},
		{"our label lost", deployment(), change(deployment(), func(d *appsv1.Deployment) { d.Labels = nil }), "metadata.labels"},
		{"owner lost", change(deployment(), func(d *appsv1.Deployment) {
			d.OwnerReferences = []metav1.OwnerReference{{Kind: "GatewayServer", UID: "1"}}
		}), deployment(), "metadata.ownerReferences"},
		{"label of somebody else", route(), change(route(), func(r *v1beta1.RouteConfiguration) { r.Labels["team"] = "net" }), ""},
		{"label that addresses another host", route(), change(route(), func(r *v1beta1.RouteConfiguration) {
			r.Labels[v1beta1.LabelRouteUnique] = "paris"
		}), "metadata.labels"},
		{"a selector more in a rule", route(), change(route(), func(r *v1beta1.RouteConfiguration) { r.Spec.Table.Rules[0].Src = &src }), "spec"},
		{"status is not planned", route(), change(route(), func(r *v1beta1.RouteConfiguration) {
			r.Status.Conditions = []v1beta1.HostCondition{{Host: "node-1"}}
		}), ""},
		{"no rule left in a Role", &rbacv1.Role{Rules: []rbacv1.PolicyRule{{Verbs: []string{"get"}}}}, &rbacv1.Role{}, "rules"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			assert.Equal(t, difference(tt.want, tt.live), tt.field)
			if tt.field != "" {
				assert.Equal(t, difference(tt.want, merged(tt.want, tt.live)), "")
			}
		})
	}
}

func TestMergedServiceKeepsWhatItWasGiven(t *testing.T) {
	port := corev1.ServicePort{Port: 51840, Protocol: corev1.ProtocolUDP}
	given := port
	given.NodePort = 31000
	live := &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"}, Ports: []corev1.ServicePort{given}}}
	for _, tt := range []struct {
		name string
		kind corev1.ServiceType
		port int32
	}{
		{"node port stays", corev1.ServiceTypeNodePort, 31000},
		{"node port stays behind a load balancer", corev1.ServiceTypeLoadBalancer, 31000},
		{"node port goes", corev1.ServiceTypeClusterIP, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := &corev1.Service{Spec: corev1.ServiceSpec{Type: tt.kind, Ports: []corev1.ServicePort{port}}}
			got := merged(want, live).(*corev1.Service)
			assert.Equal(t, got.Spec.ClusterIP, "10.96.0.7")
			assert.Equal(t, got.Spec.Ports[0].NodePort, tt.port)
			assert.Equal(t, want.Spec.Ports[0].NodePort, int32(0), "the plan was changed")
		})
	}
}

func TestImmutable(t *testing.T) {
	network := func(cidr v1beta1.CIDR) *ipamv1alpha1.Network {
		return &ipamv1alpha1.Network{Spec: ipamv1alpha1.NetworkSpec{CIDR: cidr}}
	}
	for _, tt := range []struct {
		name       string
		want, live client.Object
		field      string
	}{
		{"selector", deployment(), change(deployment(), func(d *appsv1.Deployment) { d.Spec.Selector = nil }), "spec.selector"},
		{"replicas", deployment(), change(deployment(), func(d *appsv1.Deployment) { d.Spec.Replicas = nil }), ""},
		{"table", route(), change(route(), func(r *v1beta1.RouteConfiguration) { r.Spec.Table.Name = "x" }), "spec.table.name"},
		{"network", network("10.0.0.0/16"), network("10.1.0.0/16"), "spec.cidr"},
		{"address of an IP", &ipamv1alpha1.IP{Spec: ipamv1alpha1.IPSpec{IP: "10.1.0.0"}}, &ipamv1alpha1.IP{Spec: ipamv1alpha1.IPSpec{IP: "10.2.0.0"}}, "spec.ip"},
		{"masquerade of an IP", &ipamv1alpha1.IP{}, &ipamv1alpha1.IP{Spec: ipamv1alpha1.IPSpec{Masquerade: new(true)}}, ""},
		{"family of an endpoint", &discoveryv1.EndpointSlice{AddressType: "IPv6"}, &discoveryv1.EndpointSlice{AddressType: "IPv4"}, "addressType"},
		{"role of a binding", &rbacv1.RoleBinding{RoleRef: rbacv1.RoleRef{Name: "a"}}, &rbacv1.RoleBinding{}, "roleRef"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			assert.Equal(t, immutable(tt.want, tt.live), tt.field)
		})
	}
}

func TestWithStatus(t *testing.T) {
	before, now := metav1.NewTime(time.Unix(1000, 0)), metav1.NewTime(time.Unix(2000, 0))
	accepted := func(status metav1.ConditionStatus, at metav1.Time) metav1.Condition {
		return metav1.Condition{Type: "Accepted", Status: status, Reason: "R", LastTransitionTime: at}
	}
	gateway := func(c ...metav1.Condition) *v1beta1.GatewayClient {
		return &v1beta1.GatewayClient{Status: v1beta1.GatewayClientStatus{Conditions: c}}
	}
	t.Run("nothing new", func(t *testing.T) {
		assert.Assert(t, withStatus(gateway(accepted("True", metav1.Time{})), gateway(accepted("True", before)), now) == nil)
	})
	t.Run("changed status has a new time", func(t *testing.T) {
		got := withStatus(gateway(accepted("False", metav1.Time{})), gateway(accepted("True", before)), now)
		assert.DeepEqual(t, got.(*v1beta1.GatewayClient).Status.Conditions, []metav1.Condition{accepted("False", now)})
	})
	t.Run("changed reason keeps the time", func(t *testing.T) {
		c := accepted("True", metav1.Time{})
		c.Reason = "Other"
		got := withStatus(gateway(c), gateway(accepted("True", before)), now).(*v1beta1.GatewayClient)
		assert.Equal(t, got.Status.Conditions[0].LastTransitionTime, before)
	})
	t.Run("what a node wrote stays", func(t *testing.T) {
		ip := v1beta1.IP("10.0.0.1")
		live := &v1beta1.InternalNode{}
		live.Status.NodeIP.Local = &ip
		live.Status.Conditions = []metav1.Condition{{Type: "Kernel", Status: "True", LastTransitionTime: before}}
		want := &v1beta1.InternalNode{}
		want.Status.Conditions = []metav1.Condition{accepted("True", metav1.Time{})}
		got := withStatus(want, live, now).(*v1beta1.InternalNode)
		assert.Equal(t, *got.Status.NodeIP.Local, ip)
		assert.Check(t, is.Len(got.Status.Conditions, 2))
		assert.Assert(t, withStatus(want, got, now) == nil)
	})
}

func TestOnlyStale(t *testing.T) {
	resource := schema.GroupResource{Resource: "networks"}
	conflict, exists := apierrors.NewConflict(resource, "a", nil), apierrors.NewAlreadyExists(resource, "a")
	// As the admission plug-in NamespaceLifecycle refuses it.
	ending := apierrors.NewForbidden(resource, "a", nil)
	ending.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause, Field: "metadata.namespace"}}
	owned := apierrors.NewApplyConflict([]metav1.StatusCause{{Type: metav1.CauseTypeFieldManagerConflict, Field: ".metadata.labels"}}, "conflict")
	for _, tt := range []struct {
		name string
		err  error
		want bool
	}{
		{"conflict", errors.Join(conflict), true},
		{"a field is somebody else's", fmt.Errorf("Namespace a: %w", owned), false},
		{"behind", errors.Join(conflict, exists, errDeleting), true},
		{"the namespace ends", errors.Join(conflict, fmt.Errorf("Secret a/b: %w", ending)), true},
		{"the namespace is gone", fmt.Errorf("Network a/b: %w", apierrors.NewNotFound(corev1.Resource("namespaces"), "a")), true},
		{"the object is gone", fmt.Errorf("Network a/b: %w", apierrors.NewNotFound(resource, "b")), true},
		{"the kind is unknown", apierrors.NewGenericServerResponse(http.StatusNotFound, "POST", resource, "b", "404 page not found", 0, true), false},
		{"refused", errors.Join(conflict, apierrors.NewForbidden(resource, "a", nil)), false},
	} {
		t.Run(tt.name, func(t *testing.T) { assert.Equal(t, onlyStale(tt.err), tt.want) })
	}
}

func TestMatters(t *testing.T) {
	at := func(version string, f func(*v1beta1.Connection)) *v1beta1.Connection {
		c := &v1beta1.Connection{}
		c.ResourceVersion = version
		c.Status.Value = v1beta1.Connected
		f(c)
		return c
	}
	same := func(*v1beta1.Connection) {}
	assert.Assert(t, !matters(at("1", same), at("1", same)), "resync")
	assert.Assert(t, !matters(at("1", same), at("2", func(c *v1beta1.Connection) { c.Status.Latency.Value = "3ms" })), "heartbeat")
	assert.Assert(t, matters(at("1", same), at("2", func(c *v1beta1.Connection) { c.Status.Value = v1beta1.ConnectionError })), "state")
}

func TestWaves(t *testing.T) {
	object := func(kind string) plan.Object {
		return &corev1.Pod{TypeMeta: metav1.TypeMeta{Kind: kind}}
	}
	got := waves([]plan.Object{object("Deployment"), object("RoleBinding"), object("Role")})
	for i, want := range []string{"Role", "RoleBinding", "Deployment"} {
		assert.Assert(t, is.Len(got[i], 1))
		assert.Equal(t, got[i][0].GetObjectKind().GroupVersionKind().Kind, want)
	}
}

func TestParsePools(t *testing.T) {
	got, err := ParsePools([]string{"10.0.0.0/8", "fd00::/8"})
	assert.NilError(t, err)
	assert.Equal(t, len(got), 2)
	_, err = ParsePools([]string{"10.0.0.0"})
	assert.ErrorContains(t, err, `pool "10.0.0.0": write a network`)
}
