package controllers

import (
	"reflect"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// labelDomain is where all labels are the controller's, on objects it made.
const labelDomain = "networking.liqo.io/"

// filledIn tells the kinds to which the API server adds defaults that are not
// ours to know.
func filledIn(kind string) bool {
	switch kind {
	case "Deployment", "Service", "WgGatewayServer", "WgGatewayClient":
		return true
	}
	return false
}

// difference returns where live is not what is planned; empty: nowhere. What
// others add to labels and annotations is no difference.
func difference(want, live client.Object) string {
	kind := want.GetObjectKind().GroupVersionKind().Kind
	switch {
	case !containsAll(live.GetLabels(), want.GetLabels()) || len(strayLabels(want, live)) > 0:
		return "metadata.labels"
	case !ownersIncluded(want.GetOwnerReferences(), live.GetOwnerReferences()):
		return "metadata.ownerReferences"
	case filledIn(kind) && live.GetAnnotations()[AnnotationPlanned] != want.GetAnnotations()[AnnotationPlanned]:
		return "spec"
	case !containsAll(live.GetAnnotations(), want.GetAnnotations()):
		return "metadata.annotations"
	}
	for _, field := range parts {
		w, l, ok := field.of(want, live)
		if !ok {
			continue
		}
		if filledIn(kind) {
			if !contains(l, w) {
				return field.name
			}
		} else if !equality.Semantic.DeepEqual(w, l) {
			return field.name
		}
	}
	return ""
}

// partDifference is difference for an object of which only a part is planned.
func partDifference(want, live client.Object) string {
	if !containsAll(live.GetLabels(), want.GetLabels()) {
		return "metadata.labels"
	}
	if !containsAll(live.GetAnnotations(), want.GetAnnotations()) {
		return "metadata.annotations"
	}
	w, l, ok := part{"spec", "Spec"}.of(want, live)
	if ok && !contains(l, w) {
		return "spec"
	}
	return ""
}

// A part is a field of an object that is planned as a whole.
type part struct{ name, field string }

var parts = []part{
	{"spec", "Spec"}, {"rules", "Rules"}, {"subjects", "Subjects"}, {"roleRef", "RoleRef"},
	{"endpoints", "Endpoints"}, {"ports", "Ports"},
}

// of returns the part of two objects of one kind; false if the kind has none.
func (p part) of(a, b client.Object) (any, any, bool) {
	x, y := reflect.ValueOf(a).Elem().FieldByName(p.field), reflect.ValueOf(b).Elem().FieldByName(p.field)
	if !x.IsValid() || !y.IsValid() || x.Type() != y.Type() {
		return nil, nil, false
	}
	return x.Interface(), y.Interface(), true
}

// merged returns live with what is planned written over it.
func merged(want, live client.Object) client.Object {
	out := live.DeepCopyObject().(client.Object)
	labels := out.GetLabels()
	for _, stray := range strayLabels(want, live) {
		delete(labels, stray)
	}
	out.SetLabels(over(labels, want.GetLabels()))
	out.SetAnnotations(over(out.GetAnnotations(), want.GetAnnotations()))
	if owners := want.GetOwnerReferences(); len(owners) > 0 {
		out.SetOwnerReferences(owners)
	}
	planned := want.DeepCopyObject()
	for _, p := range parts {
		from, to := reflect.ValueOf(planned).Elem().FieldByName(p.field), reflect.ValueOf(out).Elem().FieldByName(p.field)
		if from.IsValid() && to.IsValid() && from.Type() == to.Type() {
			to.Set(from)
		}
	}
	if service, ok := out.(*corev1.Service); ok {
		keepAllocated(&service.Spec, live.(*corev1.Service).Spec)
	}
	return out
}

// keepAllocated carries over what the cluster gave to a Service.
func keepAllocated(to *corev1.ServiceSpec, from corev1.ServiceSpec) {
	if to.ClusterIP == "" {
		to.ClusterIP, to.ClusterIPs = from.ClusterIP, from.ClusterIPs
	}
	if len(to.IPFamilies) == 0 {
		to.IPFamilies = from.IPFamilies
	}
	if to.IPFamilyPolicy == nil {
		to.IPFamilyPolicy = from.IPFamilyPolicy
	}
	if to.HealthCheckNodePort == 0 && to.ExternalTrafficPolicy == from.ExternalTrafficPolicy {
		to.HealthCheckNodePort = from.HealthCheckNodePort
	}
	if to.Type == corev1.ServiceTypeClusterIP || to.Type == corev1.ServiceTypeExternalName {
		return
	}
	for i := range to.Ports {
		p := &to.Ports[i]
		j := slices.IndexFunc(from.Ports, func(q corev1.ServicePort) bool { return q.Port == p.Port && q.Protocol == p.Protocol })
		if p.NodePort == 0 && j >= 0 {
			p.NodePort = from.Ports[j].NodePort
		}
	}
}

// immutable returns the field that would have to change and can't; empty: none.
func immutable(want, live client.Object) string {
	switch w := want.(type) {
	case *appsv1.Deployment:
		if !equality.Semantic.DeepEqual(w.Spec.Selector, live.(*appsv1.Deployment).Spec.Selector) {
			return "spec.selector"
		}
	case *rbacv1.RoleBinding:
		if w.RoleRef != live.(*rbacv1.RoleBinding).RoleRef {
			return "roleRef"
		}
	case *rbacv1.ClusterRoleBinding:
		if w.RoleRef != live.(*rbacv1.ClusterRoleBinding).RoleRef {
			return "roleRef"
		}
	case *v1beta1.RouteConfiguration:
		if w.Spec.Table.Name != live.(*v1beta1.RouteConfiguration).Spec.Table.Name {
			return "spec.table.name"
		}
	case *v1beta1.FirewallConfiguration:
		if w.Spec.Table.Name != live.(*v1beta1.FirewallConfiguration).Spec.Table.Name {
			return "spec.table.name"
		}
	case *discoveryv1.EndpointSlice:
		if w.AddressType != live.(*discoveryv1.EndpointSlice).AddressType {
			return "addressType"
		}
	case *ipamv1alpha1.IP:
		if w.Spec.IP != live.(*ipamv1alpha1.IP).Spec.IP {
			return "spec.ip"
		}
	case *ipamv1alpha1.Network:
		l := live.(*ipamv1alpha1.Network)
		if w.Spec.CIDR != l.Spec.CIDR {
			return "spec.cidr"
		}
		if w.Spec.PreAllocated != l.Spec.PreAllocated {
			return "spec.preAllocated"
		}
	}
	return ""
}

// writtenByUsers tells the kinds that users write, and that are made from
// TunnelEndpoints where they do not.
func writtenByUsers(kind string) bool {
	switch kind {
	case "Configuration", "GatewayServer", "GatewayClient", "PublicKey":
		return true
	}
	return false
}

// adoptable reports whether an object without our label may become ours: one
// of a kind that is made by controllers like this one, or one that has the
// owner that is planned.
func adoptable(want, live client.Object) bool {
	gvk := want.GetObjectKind().GroupVersionKind()
	if strings.HasSuffix(gvk.Group, ".liqo.io") && !writtenByUsers(gvk.Kind) {
		return true
	}
	owners := want.GetOwnerReferences()
	return len(owners) > 0 && ownersIncluded(owners, live.GetOwnerReferences())
}

func containsAll(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// strayLabels are labels on live that address it to somebody, and are not
// planned.
func strayLabels(want, live client.Object) []string {
	var out []string
	for k := range live.GetLabels() {
		if _, planned := want.GetLabels()[k]; !planned && strings.HasPrefix(k, labelDomain) {
			out = append(out, k)
		}
	}
	return out
}

func over(below, above map[string]string) map[string]string {
	if below == nil {
		below = make(map[string]string, len(above))
	}
	for k, v := range above {
		below[k] = v
	}
	return below
}

func ownersIncluded(want, have []metav1.OwnerReference) bool {
	for _, w := range want {
		if !slices.ContainsFunc(have, func(h metav1.OwnerReference) bool { return h.UID == w.UID && h.Kind == w.Kind }) {
			return false
		}
	}
	return true
}

// elements returns pointers to the items of a list.
func elements(list client.ObjectList) ([]client.Object, error) {
	var out []client.Object
	err := meta.EachListItem(list, func(o runtime.Object) error {
		out = append(out, o.(client.Object))
		return nil
	})
	return out, err
}
