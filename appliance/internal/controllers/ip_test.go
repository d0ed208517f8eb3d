package controllers

import (
	"slices"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// testIP makes an IP whose Service somebody else has at first.
func (w *world) testIP() {
	m := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: name} }
	users := &corev1.Service{ObjectMeta: m("db"), Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 1}}}}
	w.create(users)
	ip := &ipamv1alpha1.IP{ObjectMeta: m("db"), Spec: ipamv1alpha1.IPSpec{
		IP: "192.168.40.10", Masquerade: new(true),
		ServiceTemplate: &ipamv1alpha1.ServiceTemplate{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 5432}}}},
	}}
	w.create(ip)
	says := func(status metav1.ConditionStatus, reason string) func() bool {
		return func() bool {
			return w.get(ip) && slices.ContainsFunc(ip.Status.Conditions, func(c metav1.Condition) bool { return c.Status == status && c.Reason == reason })
		}
	}
	w.until("the IP says that the name of its Service is taken", says(metav1.ConditionFalse, plan.ReasonNameTaken))
	assert.Check(w.t, is.Equal(string(ip.Status.CIDR), "10.70.0.0/16"))
	for _, name := range []string{"db-remap-ipmapping-gw", "db-remap-ipmapping-fabric"} {
		w.exists(&v1beta1.FirewallConfiguration{ObjectMeta: m(name)})
	}
	w.exists(&ipamv1alpha1.IP{ObjectMeta: peerMeta("rome-unknown-source")})
	uid := users.UID
	assert.Assert(w.t, w.get(users))
	assert.Check(w.t, users.UID == uid && users.Spec.Ports[0].Port == 1)

	w.delete(users)
	w.until("the name is free", says(metav1.ConditionTrue, plan.ReasonAccepted))
	slice := &discoveryv1.EndpointSlice{ObjectMeta: m("db")}
	w.exists(slice)
	assert.Check(w.t, is.DeepEqual(slice.Endpoints[0].Addresses, []string{"192.168.40.10"}))
	assert.Check(w.t, is.Equal(*slice.Ports[0].Port, int32(5432)))
	service := &corev1.Service{ObjectMeta: m("db")}
	w.until("the Service is there", func() bool { return w.get(service) && service.Labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy })

	// What Kubernetes makes of our Services is not ours, though it has their labels.
	kubernetes := &discoveryv1.EndpointSlice{ObjectMeta: m("db-x7k2p"), AddressType: discoveryv1.AddressTypeIPv4}
	kubernetes.Labels = map[string]string{
		v1beta1.LabelManagedBy: v1beta1.ManagedBy, discoveryv1.LabelServiceName: "db", discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io",
	}
	w.create(kubernetes)

	// It is not written again and again.
	w.settle()
	before := w.log.writes()
	w.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}, `{"metadata":{"labels":{"touched":"ip"}}}`)
	w.settle()
	assert.Check(w.t, is.Equal(w.log.writes()-before, 0))
	assert.Check(w.t, w.get(kubernetes), "the controller deleted an EndpointSlice of Kubernetes")
	w.patch(slice, `{"endpoints":[{"addresses":["192.168.40.99"]}]}`)
	w.until("the endpoint is put right", func() bool { return w.get(slice) && slice.Endpoints[0].Addresses[0] == "192.168.40.10" })

	w.patch(ip, `{"spec":{"serviceTemplate":null}}`)
	w.until("the Service goes with the template", func() bool { return !w.get(service) && !w.get(slice) })
	w.delete(ip)
	w.until("the mappings go with the IP", func() bool {
		return !w.get(&v1beta1.FirewallConfiguration{ObjectMeta: m("db-remap-ipmapping-gw")}) && !w.get(&v1beta1.FirewallConfiguration{ObjectMeta: m("db-remap-ipmapping-fabric")})
	})
}
