package kube

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// IsPull reports whether a pod is one that pulls the images of a gateway.
func IsPull(o *corev1.Pod) bool {
	return o.Labels[v1beta1.LabelComponent] == v1beta1.ComponentGatewayPull && o.Labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy
}

// pulls returns the pods that pull images.
func pulls(all []corev1.Pod) []cluster.Pull {
	var out []cluster.Pull
	for i := range all {
		if IsPull(&all[i]) {
			out = append(out, Pull(&all[i]))
		}
	}
	slices.SortFunc(out, func(a, b cluster.Pull) int { return compareNames(a.Meta, b.Meta) })
	return out
}

// Pull reads what a pod says of the images that it pulls. A container that runs
// or has ended has its image, whatever became of it: not every image has a
// program that knows what it is asked.
func Pull(o *corev1.Pod) cluster.Pull {
	p := cluster.Pull{
		Meta: metaOf(o, corev1.SchemeGroupVersion, "Pod"), Node: o.Spec.NodeName,
		Over: o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed,
	}
	has := 0
	for _, s := range o.Status.ContainerStatuses {
		switch w := s.State.Waiting; {
		case w == nil:
			if s.State.Running != nil || s.State.Terminated != nil && (s.ImageID != "" || s.State.Terminated.Reason != "ContainerStatusUnknown") {
				has++
			}
		case isPullError(w.Reason):
			p.Image, p.Why = s.Image, pullError(w)
		case s.ImageID != "": // CreateContainerError and the like: it has the image
			has++
		}
	}
	p.Pulled = p.Image == "" && len(o.Status.ContainerStatuses) > 0 && has >= len(o.Spec.Containers)
	switch {
	case p.Pulled || p.Image != "":
	case o.Status.Phase == corev1.PodFailed && o.Status.Reason == "DeadlineExceeded" && len(o.Spec.Containers) > 0:
		p.Image, p.Why = o.Spec.Containers[0].Image, "it was not there in time"
	case o.Status.Phase == corev1.PodFailed:
		// The kubelet wanted no more pods (OutOfpods, Evicted): that says nothing about
		// images, and there will be place when the gateway's old pod has gone.
		p.Pulled = true
	case o.Spec.NodeName == "":
		for _, c := range o.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Message != "" {
				p.Why = fmt.Sprintf("no node takes a pod like the gateway's (%s)", c.Message)
			}
		}
	}
	return p
}

// isPullError reports whether a container waits because its image can't be had
// (pkg/kubelet/images/types.go).
func isPullError(reason string) bool {
	switch reason {
	case "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed":
		return true
	}
	return false
}

// pullError says why an image can't be pulled: the same while the kubelet tries
// and while it waits to try again.
func pullError(w *corev1.ContainerStateWaiting) string {
	text := w.Message
	if strings.HasPrefix(text, "Back-off pulling image ") {
		if _, rest, found := strings.Cut(text, `": `); found {
			text = rest
		}
	}
	for _, prefix := range []string{"ErrImagePull: ", "rpc error: "} {
		text = strings.TrimPrefix(text, prefix)
	}
	if text == "" {
		return w.Reason
	}
	return strings.Join(strings.Fields(text), " ")
}
