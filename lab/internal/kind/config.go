// Package kind runs labs in clusters of sigs.k8s.io/kind: real kubelets and
// containerd, in containers of Docker, Podman or nerdctl. It turns a topology
// into kind's configuration, creates and deletes the clusters by kind's own
// library, and answers for the lab what a world answers: where pods are, what
// they log, what a command prints in them.
//
// All nodes are on one network of the engine, without routers, and nothing is
// captured there. What a topology has beyond that is refused before anything is
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

// Config is kind's configuration of a cluster: a control plane, and a worker for
// each node of the topology that has its name.
func Config(lab string, c topology.Cluster) *v1alpha4.Cluster {
	cfg := &v1alpha4.Cluster{
		TypeMeta: v1alpha4.TypeMeta{Kind: "Cluster", APIVersion: "kind.x-k8s.io/v1alpha4"},
		Name:     ClusterName(lab, c.Name),
		Nodes:    []v1alpha4.Node{{Role: v1alpha4.ControlPlaneRole}},
		Networking: v1alpha4.Networking{
			IPFamily:          v1alpha4.IPv4Family,
			PodSubnet:         c.PodCIDR.String(),
			ServiceSubnet:     c.ServiceCIDR.String(),
			DisableDefaultCNI: !kindnet(c),
			KubeProxyMode:     v1alpha4.ProxyMode(c.KubeProxy),
		},
	}
	for n := range c.Nodes {
		cfg.Nodes = append(cfg.Nodes, v1alpha4.Node{
			Role:                 v1alpha4.WorkerRole,
			KubeadmConfigPatches: []string{nameNode(operand.NodeName(n + 1))},
		})
	}
	v1alpha4.SetDefaultsCluster(cfg)
	return cfg
}

// kindnet tells whether a cluster's network is what kind installs itself: ptp
// and host-local, routes between the nodes, and an early rule that masquerades.
func kindnet(c topology.Cluster) bool {
	return c.CNI == topology.CNIPtP && c.Masquerade == topology.MasqueradeKindnet
}

// nameNode is a patch by which kubeadm gives a Node another name than that of
// its host: everything that a topology or a scenario says of node-1 is then
// true of the object, its label kubernetes.io/hostname included.
func nameNode(name string) string {
	return fmt.Sprintf("kind: JoinConfiguration\nnodeRegistration:\n  name: %s\n", name)
}
