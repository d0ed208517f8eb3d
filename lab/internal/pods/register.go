package pods

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// heartbeat is how often the node's conditions are confirmed. The lease says
// more often that the node lives.
const heartbeat = time.Minute

// capacity is what every node claims to have. Nothing enforces it.
func capacity() corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("16"),
		corev1.ResourceMemory:           resource.MustParse("16Gi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("16Gi"),
		corev1.ResourcePods:             resource.MustParse("110"),
	}
}

// register creates the Node, or takes over the one that is there.
func (n *node) register(ctx context.Context) error {
	labels := map[string]string{
		corev1.LabelOSStable: runtime.GOOS, corev1.LabelArchStable: runtime.GOARCH, corev1.LabelHostname: n.cfg.Name,
	}
	for k, v := range n.cfg.Labels {
		labels[k] = v
	}
	nodes := n.client.CoreV1().Nodes()
	_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.cfg.Name, Labels: labels}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return n.writeNodeStatus(ctx, false)
}

// writeNodeStatus writes what the node is, and whether it is ready for pods.
func (n *node) writeNodeStatus(ctx context.Context, ready bool) error {
	nodes := n.client.CoreV1().Nodes()
	for {
		nd, err := nodes.Get(ctx, n.cfg.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := &nd.Status
		s.Capacity, s.Allocatable = capacity(), capacity()
		s.Addresses = append([]corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: n.cfg.Addr.String()}, {Type: corev1.NodeHostName, Address: n.cfg.Name},
		}, external(s.Addresses)...)
		s.DaemonEndpoints.KubeletEndpoint.Port = kubeletPort
		if s.NodeInfo.KubeletVersion == "" {
			if s.NodeInfo, err = n.info(); err != nil {
				return err
			}
		}
		status, reason, message := corev1.ConditionTrue, "KubeletReady", "the lab's kubelet is ready"
		if !ready {
			status, reason, message = corev1.ConditionFalse, "KubeletNotReady", "the node has no podCIDR yet, so there is no CNI configuration"
		}
		setNodeCondition(s, corev1.NodeReady, status, reason, message)
		setNodeCondition(s, corev1.NodeMemoryPressure, corev1.ConditionFalse, "KubeletHasSufficientMemory", "not measured")
		setNodeCondition(s, corev1.NodeDiskPressure, corev1.ConditionFalse, "KubeletHasNoDiskPressure", "not measured")
		setNodeCondition(s, corev1.NodePIDPressure, corev1.ConditionFalse, "KubeletHasSufficientPID", "not measured")
		_, err = nodes.UpdateStatus(ctx, nd, metav1.UpdateOptions{})
		if err == nil || !apierrors.IsConflict(err) {
			return err
		}
	}
}

// external are the addresses that a cloud provider has written.
func external(all []corev1.NodeAddress) []corev1.NodeAddress {
	return slices.DeleteFunc(slices.Clone(all), func(a corev1.NodeAddress) bool {
		return a.Type != corev1.NodeExternalIP && a.Type != corev1.NodeExternalDNS
	})
}

func (n *node) info() (corev1.NodeSystemInfo, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return corev1.NodeSystemInfo{}, fmt.Errorf("uname: %w", err)
	}
	version, err := n.client.Discovery().ServerVersion()
	if err != nil {
		return corev1.NodeSystemInfo{}, err
	}
	return corev1.NodeSystemInfo{
		MachineID: n.cfg.Cluster + "-" + n.cfg.Name, SystemUUID: n.cfg.Cluster + "-" + n.cfg.Name,
		KernelVersion: unix.ByteSliceToString(u.Release[:]), OSImage: "Isthmus lab", OperatingSystem: runtime.GOOS, Architecture: runtime.GOARCH,
		KubeletVersion: version.GitVersion, ContainerRuntimeVersion: "lab://1",
	}, nil
}

func setNodeCondition(s *corev1.NodeStatus, kind corev1.NodeConditionType, status corev1.ConditionStatus, reason, message string) {
	now := metav1.Now()
	c := corev1.NodeCondition{Type: kind, Status: status, Reason: reason, Message: message, LastHeartbeatTime: now, LastTransitionTime: now}
	for i := range s.Conditions {
		if s.Conditions[i].Type != kind {
			continue
		}
		if s.Conditions[i].Status == status {
			c.LastTransitionTime = s.Conditions[i].LastTransitionTime
		}
		s.Conditions[i] = c
		return
	}
	s.Conditions = append(s.Conditions, c)
}

// keepStatus waits for the node's podCIDR, makes the network, reports the node
// ready, and confirms it from time to time.
func (n *node) keepStatus(ctx context.Context) {
	var cidrs []netip.Prefix
	for len(cidrs) == 0 {
		nd, err := n.client.CoreV1().Nodes().Get(ctx, n.cfg.Name, metav1.GetOptions{})
		if err == nil {
			for _, c := range nd.Spec.PodCIDRs {
				if p, perr := netip.ParsePrefix(c); perr == nil {
					cidrs = append(cidrs, p)
				}
			}
		}
		if len(cidrs) == 0 && !pause(ctx, 50*time.Millisecond) {
			return
		}
	}
	close(n.hasPodCIDR)
	if err := n.retry(ctx, "set up the network of the node", func(ctx context.Context) (err error) {
		n.net, err = n.newNetwork(ctx, cidrs)
		return err
	}); err != nil {
		return
	}
	close(n.netReady)
	n.log.Info("node is ready", "podCIDRs", cidrs)
	for {
		woken := n.cfg.Registry.wake()
		if n.retry(ctx, "write the node's status", func(ctx context.Context) error { return n.writeNodeStatus(ctx, true) }) != nil {
			return
		}
		if !pauseUnlessWoken(ctx, heartbeat, woken) {
			return
		}
	}
}

// keepLease renews the node's lease.
func (n *node) keepLease(ctx context.Context) {
	leases := n.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	for {
		woken := n.cfg.Registry.wake()
		err := n.retry(ctx, "renew the node's lease", func(ctx context.Context) error {
			now, duration := metav1.NowMicro(), int32(leaseDuration)
			l, err := leases.Get(ctx, n.cfg.Name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				_, err = leases.Create(ctx, &coordinationv1.Lease{
					ObjectMeta: metav1.ObjectMeta{Name: n.cfg.Name, Namespace: corev1.NamespaceNodeLease},
					Spec:       coordinationv1.LeaseSpec{HolderIdentity: &n.cfg.Name, LeaseDurationSeconds: &duration, RenewTime: &now},
				}, metav1.CreateOptions{})
				return err
			}
			if err != nil {
				return err
			}
			l.Spec.RenewTime = &now
			_, err = leases.Update(ctx, l, metav1.UpdateOptions{})
			return err
		})
		if err != nil || !pauseUnlessWoken(ctx, leaseInterval, woken) {
			return
		}
	}
}
