// Package kind runs labs in clusters of sigs.k8s.io/kind: kubeadm's control planes,
// real kubelets and containerd, in containers of Docker, Podman or nerdctl. It
// turns a topology into kind's configuration, creates and deletes the clusters by
// kind's own library, and answers for the lab what a world answers: where pods are,
// what they log, what a command prints in them, and what packets did.
//
// All nodes, and the hosts outside the clusters, are on one network of the engine,
// without routers. Packets are captured where the engine's containers are processes
// of this machine. What a topology has beyond that is refused before anything is
// made (Refuse), and rows that need more are not selected (CannotRun). Package
// kind knows nothing of what Isthmus does.
package kind

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"sigs.k8s.io/kind/pkg/apis/config/v1alpha4"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// World is the name of the world whose nodes are containers.
const World = "kind"

// nameSum is how many letters tell the clusters of one lab from those of
// another on the same engine: enough for the few labs of a machine.
const nameSum = 6

// maxName is the length of the longest cluster ID that a lab can have here:
// <ID>-<sum>-control-plane is the name of a host, which has at most 63 bytes.
const maxName = 63 - nameSum - 1 - len("-control-plane")

// ClusterName is what kind calls a cluster of a lab. The names of its
// containers start so.
func ClusterName(lab, cluster string) string {
	sum := sha256.Sum256([]byte(lab))
	return cluster + "-" + hex.EncodeToString(sum[:])[:nameSum]
}

// oldCgroups is a patch by which kubelets start where the kernel has control
// groups of version 1 only: as of Kubernetes 1.35 they refuse to.
const oldCgroups = "kind: KubeletConfiguration\nfailCgroupV1: false\n"

// patience is a patch of kubeadm's configuration of one kind. kubeadm itself waits 1 to 5 minutes for what
// a cluster needs; two cores that start six nodes need more (https://kubernetes.io/docs/reference/config-api/kubeadm-config.v1beta4/#kubeadm-k8s-io-v1beta4-Timeouts).
func patience(kind string) string {
	return "kind: " + kind + `
timeouts:
  controlPlaneComponentHealthCheck: 15m
  kubeletHealthCheck: 15m
  kubernetesAPICall: 5m
  tlsBootstrap: 15m
  discovery: 15m
`
}

// Config is kind's configuration of a cluster: a control plane, and a worker for
// each node of the topology that has its name, all from one image. Each has the
// directory shared of the engine's machine, unless shared is empty.
func Config(lab, image, shared string, c topology.Cluster) *v1alpha4.Cluster {
	cfg := &v1alpha4.Cluster{
		TypeMeta: v1alpha4.TypeMeta{Kind: "Cluster", APIVersion: "kind.x-k8s.io/v1alpha4"},
		Name:     ClusterName(lab, c.Name),
		Nodes:    []v1alpha4.Node{{Role: v1alpha4.ControlPlaneRole, Image: image}},
		Networking: v1alpha4.Networking{
			IPFamily:          v1alpha4.IPv4Family,
			PodSubnet:         c.PodCIDR.String(),
			ServiceSubnet:     c.ServiceCIDR.String(),
			DisableDefaultCNI: true, // the image has none; see command nodeimage
			KubeProxyMode:     v1alpha4.ProxyMode(c.KubeProxy),
		},
		KubeadmConfigPatches: []string{oldCgroups, patience("InitConfiguration"), patience("JoinConfiguration")},
	}
	for n := range c.Nodes {
		cfg.Nodes = append(cfg.Nodes, v1alpha4.Node{
			Role:                 v1alpha4.WorkerRole,
			Image:                image,
			KubeadmConfigPatches: []string{nameNode(operand.NodeName(n + 1))},
		})
	}
	if shared != "" {
		for i := range cfg.Nodes {
			cfg.Nodes[i].ExtraMounts = []v1alpha4.Mount{{HostPath: shared, ContainerPath: sharedOnNode}}
		}
	}
	v1alpha4.SetDefaultsCluster(cfg)
	return cfg
}

// nameNode is a patch by which kubeadm gives a Node another name than that of
// its host: everything that a topology or a scenario says of node-1 is then
// true of the object, its label kubernetes.io/hostname included.
func nameNode(name string) string {
	return fmt.Sprintf("kind: JoinConfiguration\nnodeRegistration:\n  name: %s\n", name)
}
