package deploy

import (
	"bytes"
	"context"
	_ "embed"
	"text/template"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// DNSImage is that of CoreDNS on nodes with containerd.
const DNSImage = "docker.io/isthmus-lab/coredns:dev"

//go:embed coredns.yaml
var coreDNS string

// hasDNS tells whether the lab brings CoreDNS to a cluster: where nodes are real,
// as kubeadm does. The lab's own kubelet gives pods no server to ask.
func hasDNS(c topology.Cluster) bool { return c.Runtime == topology.RuntimeContainerd }

// dnsObjects are CoreDNS and what it needs, in the order in which they are
// applied: the Deployment last.
func dnsObjects(c topology.Cluster) ([]*unstructured.Unstructured, error) {
	t, err := template.New("coredns.yaml").Parse(coreDNS)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	if err := t.Execute(&text, map[string]any{"Address": topology.DNSAddress(c.ServiceCIDR), "Image": DNSImage}); err != nil {
		return nil, err
	}
	return decode(text.Bytes())
}

// createDNS brings CoreDNS to one cluster. It is waited for with the pods of the
// topology.
func (in *installer) createDNS(ctx context.Context, c topology.Cluster, cl client.Client) error {
	if !hasDNS(c) {
		return nil
	}
	objects, err := dnsObjects(c)
	if err != nil {
		return err
	}
	last := len(objects) - 1
	if err := apply(ctx, cl, objects[:last]); err != nil {
		return err
	}
	// A first packet to the API server that no rule translates stands in the way
	// of those after it: the kernel translates no connection half way.
	if err := in.services(ctx); err != nil {
		return err
	}
	return applyOne(ctx, cl, objects[last])
}

// waitDNS says why no server of a cluster answers.
func waitDNS(ctx context.Context, cl client.Client) string {
	var pods corev1.PodList
	if err := cl.List(ctx, &pods, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{"k8s-app": "kube-dns"}); err != nil {
		return err.Error()
	}
	why := "CoreDNS has no pod"
	for _, p := range pods.Items {
		if podReady(&p) {
			return ""
		}
		why = notReady(&p)
	}
	return why
}
