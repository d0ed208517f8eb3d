package controllers

import (
	"net/netip"
	"strings"

	"gotest.tools/v3/assert"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// testAPIServerAddress: that the API server has an address in a peer's network is said as
// soon as it is so, and no longer. EndpointSlices of other Services don't matter.
func (w *world) testAPIServerAddress() {
	rome := &v1beta1.Configuration{ObjectMeta: peerMeta("rome")}
	assert.Assert(w.t, w.get(rome))
	address := netip.MustParsePrefix(string(rome.Status.Remote.CIDR.Pod[0])).Addr().Next().String()
	slice := func(service string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: service, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{address}}},
		}
	}
	undisturbed := func(want metav1.ConditionStatus, text string) func() bool {
		return func() bool {
			if !w.get(rome) {
				return false
			}
			for _, c := range rome.Status.Conditions {
				if c.Type == v1beta1.ConditionHostsUndisturbed {
					return c.Status == want && strings.Contains(c.Message, text)
				}
			}
			return false
		}
	}
	w.create(slice("somebodys"))
	w.until("nobody needs an address of the peer", undisturbed(metav1.ConditionTrue, ""))
	w.create(slice("kubernetes"))
	w.until("a condition says that the API server is cut off", undisturbed(metav1.ConditionFalse, "contains the API server ("+address+")"))
	w.delete(slice("kubernetes"))
	w.until("the address is the peer's again", undisturbed(metav1.ConditionTrue, ""))
	w.delete(slice("somebodys"))
}
