package supervisor

import (
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// TestUnbalanced: each Service gets the first address that is free, as long as
// there are some.
func TestUnbalanced(t *testing.T) {
	c := world.ClusterSpec{LoadBalancer: netip.MustParsePrefix("198.51.100.0/29")} // .1 to .6
	service := func(name string, kind corev1.ServiceType, has string) corev1.Service {
		s := corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Type: kind}}
		if has != "" {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: has}}
		}
		return s
	}
	all := []corev1.Service{
		service("a", corev1.ServiceTypeNodePort, ""), service("b", corev1.ServiceTypeLoadBalancer, "198.51.100.2"),
	}
	for _, name := range []string{"c", "d", "e", "f", "g", "h"} {
		all = append(all, service(name, corev1.ServiceTypeLoadBalancer, ""))
	}
	var got []string
	for _, s := range unbalanced(all, c) {
		got = append(got, s.Name+" "+s.Status.LoadBalancer.Ingress[0].IP)
	}
	assert.Equal(t, strings.Join(got, ", "), "c 198.51.100.1, d 198.51.100.3, e 198.51.100.4, f 198.51.100.5, g 198.51.100.6")
}
