package cli

import (
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// A CNI that asks for the pod's own address is told from one that asks routes, and
// from one that has been told not to ask.
func TestChecksSources(t *testing.T) {
	config := func(value string) *corev1.ConfigMap {
		c := &corev1.ConfigMap{Data: map[string]string{"ipam": "cluster-pool"}}
		if value != "" {
			c.Data["enable-source-ip-verification"] = value
		}
		return c
	}
	assert.Assert(t, !ciliumChecksSources(nil))
	assert.Assert(t, ciliumChecksSources(config("")), "older releases have no such key")
	assert.Assert(t, ciliumChecksSources(config("true")))
	assert.Assert(t, !ciliumChecksSources(config("false")))

	felix := func(spec map[string]any) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	}
	assert.Assert(t, !calicoChecksSources(nil))
	assert.Assert(t, !calicoChecksSources(felix(map[string]any{})), "iptables or nftables")
	assert.Assert(t, !calicoChecksSources(felix(map[string]any{"bpfEnabled": false})))
	assert.Assert(t, calicoChecksSources(felix(map[string]any{"bpfEnabled": true})))
}

func TestWarnSpoofing(t *testing.T) {
	for _, tt := range []struct {
		name, overlay string
		netns         bool
		cni           string
		want          []string // nil: nothing to warn of
	}{
		{"Geneve", "geneve", false, "Cilium", nil},
		{"the default", "", false, "Cilium", nil},
		{"another CNI", "vxlan", false, "", nil},
		{"VXLAN", "vxlan", false, "Cilium", []string{"networking.overlay is vxlan, and Cilium drops", "set networking.overlay=geneve", "netns.enabled=true"}},
		{"auto may take it", "auto", false, "Calico with its eBPF dataplane", []string{"is auto, which takes vxlan where", "Calico with its eBPF dataplane drops"}},
		{"gateways need not be pods", "vxlan", true, "Cilium", []string{"name the templates wireguard-server-netns"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := warnSpoofing(tt.overlay, tt.netns, tt.cni)
			if tt.want == nil {
				assert.Equal(t, got, "")
			}
			for _, want := range tt.want {
				assert.Assert(t, is.Contains(got, want))
			}
		})
	}
}
