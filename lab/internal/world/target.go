package world

import (
	"fmt"
	"slices"
	"strings"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// defaultNamespace is where the topology's pods are: their names come first.
const defaultNamespace = "default"

// gatewaysByCluster are the clusters that each cluster has gateways for.
func gatewaysByCluster(all []pods.Pod) map[string][]string {
	remotes := map[string][]string{}
	for _, p := range all {
		if remote, ok := gatewayFor(p); ok && !slices.Contains(remotes[p.Cluster], remote) {
			remotes[p.Cluster] = append(remotes[p.Cluster], remote)
		}
	}
	return remotes
}

// gatewayFor is the remote cluster of a gateway pod.
func gatewayFor(p pods.Pod) (remote string, ok bool) {
	return p.Labels[netv1beta1.LabelRemoteClusterID], p.Labels[netv1beta1.LabelComponent] == netv1beta1.ComponentGateway
}

// PodHost is a pod's name as an operand, when these are all pods that there are;
// see podHost.
func PodHost(p pods.Pod, all []pods.Pod) string { return podHost(p, gatewaysByCluster(all)) }

// podHost is a pod's name as an operand: "milan/web"; "milan/gateway" for the
// gateway of the only peering, "milan/gateway.rome" when there are several.
// Pods outside the default namespace that are no gateways have it in their
// name.
func podHost(p pods.Pod, gateways map[string][]string) string {
	remote, ok := gatewayFor(p)
	switch {
	case ok && len(gateways[p.Cluster]) > 1:
		return p.Cluster + "/" + GatewayHost + "." + remote
	case ok:
		return p.Cluster + "/" + GatewayHost
	case p.Namespace != defaultNamespace:
		return p.Cluster + "/" + p.Namespace + "/" + p.Name
	}
	return p.Cluster + "/" + p.Name
}

// findPod finds a pod by operand: what podHost says; "milan/namespace/name";
// or "milan/owner.node-2", the pod of that owner (a DaemonSet, a Deployment)
// on that node, where the node may be left out when there is only one.
func findPod(all []pods.Pod, target string) (pods.Pod, error) {
	cluster, name, ok := strings.Cut(target, "/")
	if !ok {
		return pods.Pod{}, fmt.Errorf("%w: %q", ErrNoTarget, target)
	}
	gateways := gatewaysByCluster(all)
	owner, node, onNode := strings.Cut(name, ".")
	var exact, gateway, owned []pods.Pod
	for _, p := range all {
		if p.Cluster != cluster {
			continue
		}
		remote, isGateway := gatewayFor(p)
		switch {
		case podHost(p, gateways) == target && !isGateway, p.Namespace+"/"+p.Name == name:
			exact = append(exact, p)
		case isGateway && (name == GatewayHost && len(gateways[cluster]) == 1 || name == GatewayHost+"."+remote):
			gateway = append(gateway, p)
		case strings.HasPrefix(p.Name, owner+"-") && (!onNode || p.Node == node):
			owned = append(owned, p)
		}
	}
	// The active replica of a gateway is the gateway.
	if active := slices.DeleteFunc(slices.Clone(gateway), func(p pods.Pod) bool { return p.Labels[netv1beta1.LabelActive] != "true" }); len(active) > 0 {
		gateway = active
	}
	for _, found := range [][]pods.Pod{exact, gateway, owned} {
		switch len(found) {
		case 0:
			continue
		case 1:
			return found[0], nil
		}
		var names []string
		for _, p := range found {
			names = append(names, fmt.Sprintf("%s/%s/%s", cluster, p.Namespace, p.Name))
		}
		return pods.Pod{}, fmt.Errorf("%w: %q can be any of %s", ErrNoTarget, target, strings.Join(names, ", "))
	}
	return pods.Pod{}, fmt.Errorf("%w: %q; there are %s", ErrNoTarget, target, strings.Join(podNames(all, gateways), ", "))
}

func podNames(all []pods.Pod, gateways map[string][]string) []string {
	names := []string{}
	for _, p := range all {
		names = append(names, podHost(p, gateways))
	}
	return slices.Compact(slices.Sorted(slices.Values(names)))
}
