package clusters

import (
	"errors"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

func pod(namespace, name string, labels ...string) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{}}}
	for _, l := range labels {
		key, value, _ := strings.Cut(l, "=")
		p.Labels[key] = value
	}
	return p
}

func gateway(name, peer string, labels ...string) corev1.Pod {
	return pod("liqo-tenant-"+peer, name, append(labels, netv1beta1.LabelComponent+"="+netv1beta1.ComponentGateway, netv1beta1.LabelRemoteClusterID+"="+peer)...)
}

// Pods have the names that scenarios and users have for them.
func TestFind(t *testing.T) {
	one := []corev1.Pod{pod("default", "web"), pod("kube-system", "coredns"), gateway("gw-rome-1", "rome"), gateway("gw-rome-2", "rome", netv1beta1.LabelActive+"=true")}
	two := append(one, gateway("gw-naples-1", "naples"))
	for _, tt := range []struct {
		pods   []corev1.Pod
		target string
		want   string // or a part of the error
	}{
		{one, "milan/web", "web"},
		{one, "milan/kube-system/coredns", "coredns"},
		{one, "milan/coredns", "no such target"},
		{one, "milan/gateway", "gw-rome-2"}, // the active one
		{one, "milan/gateway.rome", "gw-rome-2"},
		{one, "milan/gateway.naples", "no such target"},
		{two, "milan/gateway", "several gateways"},
		{two, "milan/gateway.naples", "gw-naples-1"},
		{one, "milan/router", "the world kind has no such pod"},
	} {
		p, err := (&Set{World: "kind"}).find(tt.pods, tt.target)
		if err != nil {
			assert.Check(t, errors.Is(err, world.ErrNoTarget))
			assert.Check(t, is.Contains(err.Error(), tt.want), tt.target)
			continue
		}
		assert.Equal(t, p.Name, tt.want, tt.target)
	}
}
