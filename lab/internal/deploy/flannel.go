package deploy

import (
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/lab/internal/pods"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// flannelObjects are the namespace and the ConfigMap of flannel's manifest, where
// others read what the network of the pods is; nil for a cluster without
// flannel. The DaemonSet of the manifest is missing: the lab's nodes run flanneld
// without a pod.
func flannelObjects(c topology.Cluster) []*unstructured.Unstructured {
	if c.CNI != topology.CNIFlannel {
		return nil
	}
	const name = "kube-flannel"
	ns := newUnstructured("v1", "Namespace")
	ns.SetName(name)
	ns.SetLabels(map[string]string{"k8s-app": "flannel", "pod-security.kubernetes.io/enforce": "privileged"})
	config := newUnstructured("v1", "ConfigMap")
	config.SetNamespace(name)
	config.SetName("kube-flannel-cfg")
	config.SetLabels(map[string]string{"tier": "node", "k8s-app": "flannel", "app": "flannel"})
	config.Object["data"] = map[string]any{"net-conf.json": string(pods.FlannelConfig(c.PodCIDR, c.KubeProxy))}
	return []*unstructured.Unstructured{ns, config}
}
