package controllers

import (
	"encoding/base64"
	"strings"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// testTunnelEndpoint peers with paris by a TunnelEndpoint.
func (w *world) testTunnelEndpoint() {
	const namespace = "liqo-tenant-paris"
	at := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: namespace, Name: name} }
	w.create(
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{v1beta1.LabelTenantNamespace: "true", v1beta1.LabelRemoteClusterID: "paris"}}},
		&netv1alpha1.TunnelEndpoint{ObjectMeta: at("paris"), Spec: netv1alpha1.TunnelEndpointSpec{
			ClusterIdentity: &netv1alpha1.ClusterIdentity{ClusterID: "paris"},
			RemotePodCIDR:   "10.5.0.0/16", RemoteNATPodCIDR: "10.55.0.0/16", RemoteExternalCIDR: "10.75.0.0/16",
			BackendType: netv1alpha1.BackendWireGuard,
			BackendConfig: map[string]string{
				netv1alpha1.BackendServiceType: string(corev1.ServiceTypeNodePort), netv1alpha1.BackendPort: "30060",
				netv1alpha1.BackendPublicKey: base64.StdEncoding.EncodeToString([]byte(strings.Repeat("k", 32))),
			},
		}},
	)
	conf, e := &v1beta1.Configuration{ObjectMeta: at("paris")}, &netv1alpha1.TunnelEndpoint{ObjectMeta: at("paris")}
	w.until("its networks have their names", func() bool {
		return w.get(conf) && conf.Status.Remote != nil && conf.Status.Remote.CIDR.Pod[0] == "10.55.0.0/16" && conf.Spec.Local != nil
	})
	service := &corev1.Service{ObjectMeta: at("gw-paris")}
	w.until("its gateway can be dialled", func() bool { return w.get(service) && service.Spec.Ports[0].NodePort == 30060 })
	w.exists(&v1beta1.PublicKey{ObjectMeta: at("paris")})
	accepted := func(status metav1.ConditionStatus) func() bool {
		return func() bool {
			return w.get(e) && meta.IsStatusConditionPresentAndEqual(e.Status.Conditions, plan.ConditionAccepted, status)
		}
	}
	w.until("it is accepted", accepted(metav1.ConditionTrue))
	assert.Check(w.t, is.Equal(e.Status.Connection.Status, netv1alpha1.Connecting))
	w.testQuiet()

	w.patch(conf, `{"spec":{"remote":{"cidr":{"pod":["10.6.0.0/16"]}}}}`)
	w.until("what is changed by hand is changed back", func() bool { return w.get(conf) && conf.Spec.Remote.CIDR.Pod[0] == "10.5.0.0/16" })

	// A user's own Configuration takes its place.
	mine := &v1beta1.Configuration{ObjectMeta: at("mine")}
	mine.Labels = map[string]string{v1beta1.LabelRemoteClusterID: "paris"}
	mine.Spec.Remote.CIDR = v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.5.0.0/16"}, External: []v1beta1.CIDR{"10.75.0.0/16"}}
	w.create(mine)
	w.until("there is one Configuration again", func() bool { return !w.get(conf) })
	w.until("and a TunnelEndpoint that contradicts it", accepted(metav1.ConditionFalse))
	w.until("which an event tells", func() bool {
		var events eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &events, client.InNamespace(namespace)))
		for _, x := range events.Items {
			if x.Regarding.Kind == "TunnelEndpoint" && x.Reason == plan.ReasonContradicts &&
				strings.Contains(x.Note, "Configuration liqo-tenant-paris/mine") && strings.Contains(x.Note, "spec.remoteNATPodCIDR") {
				return true
			}
		}
		return false
	})
	w.delete(mine)
	w.until("without it all is as before", func() bool { return w.get(conf) && accepted(metav1.ConditionTrue)() })

	// There is no garbage collector here: the controller does it.
	w.delete(e)
	w.until("what it stood for is gone", func() bool {
		return !w.get(conf) && !w.get(&v1beta1.GatewayServer{ObjectMeta: at("paris")}) && !w.get(&v1beta1.PublicKey{ObjectMeta: at("paris")}) && !w.get(service)
	})
	w.settle()
}
