package cli

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// In the overlay VXLAN a gateway that is a pod hands what its peer sends to its node by
// the link that the CNI has given the pod, with the peer's addresses. A CNI that asks
// whether the node's routes lead back to the source by that link lets it pass, for they
// do: Calico does so where its dataplane is iptables or nftables. One that knows which
// address the pod has, and asks no routes, drops it.

// ciliumChecksSources reports whether the configuration of Cilium (ConfigMap
// kube-system/cilium-config) lets it drop what a pod sends with the address of another.
func ciliumChecksSources(config *corev1.ConfigMap) bool {
	return config != nil && config.Data["enable-source-ip-verification"] != "false"
}

// calicoChecksSources reports the same of that of Calico (FelixConfiguration default):
// its eBPF dataplane lets a pod send with the addresses of the node's pods only.
func calicoChecksSources(felix *unstructured.Unstructured) bool {
	if felix == nil {
		return false
	}
	bpf, _, _ := unstructured.NestedBool(felix.Object, "spec", "bpfEnabled")
	return bpf
}

// warnSpoofing says that a CNI would drop what the gateways of these values send;
// empty: it would not. overlay is the value networking.overlay, netns
// networking.gatewayTemplates.netns.enabled.
func warnSpoofing(overlay string, netns bool, cni string) string {
	if cni == "" || overlay != "vxlan" && overlay != "auto" {
		return ""
	}
	when := "networking.overlay is vxlan"
	if overlay == "auto" {
		when = "networking.overlay is auto, which takes vxlan where kernels of nodes have no geneve"
	}
	how := "set networking.overlay=geneve, or networking.gatewayTemplates.netns.enabled=true and name the templates wireguard-server-netns and wireguard-client-netns"
	if netns {
		how = "name the templates wireguard-server-netns and wireguard-client-netns, or set networking.overlay=geneve"
	}
	return fmt.Sprintf("%s, and %s drops what pods send with other addresses than their own: then nothing of a peer gets past a gateway that is a pod: %s", when, cni, how)
}

// spoofing looks for a CNI that would drop what gateways send, and says so. What can't
// be read warns of nothing.
func (c *cluster) spoofing(ctx context.Context, values map[string]any) string {
	overlay, _, _ := unstructured.NestedString(values, "networking", "overlay")
	netns, _, _ := unstructured.NestedBool(values, "networking", "gatewayTemplates", "netns", "enabled")
	cni := ""
	config := &corev1.ConfigMap{}
	if err := c.client.Get(ctx, client.ObjectKey{Namespace: "kube-system", Name: "cilium-config"}, config); err == nil && ciliumChecksSources(config) {
		cni = "Cilium"
	}
	felix := &unstructured.Unstructured{}
	felix.SetGroupVersionKind(schema.GroupVersionKind{Group: "crd.projectcalico.org", Version: "v1", Kind: "FelixConfiguration"})
	if err := c.client.Get(ctx, client.ObjectKey{Name: "default"}, felix); err == nil && calicoChecksSources(felix) {
		cni = "Calico with its eBPF dataplane"
	}
	return warnSpoofing(overlay, netns, cni)
}
