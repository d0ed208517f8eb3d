package kube

import (
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// PodTrouble says why a pod is not ready; empty: it is.
func PodTrouble(pod corev1.Pod) string {
	if pod.DeletionTimestamp != nil {
		return "it is ending"
	}
	condition := func(kind corev1.PodConditionType) *corev1.PodCondition {
		i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
		if i < 0 {
			return nil
		}
		return &pod.Status.Conditions[i]
	}
	if c := condition(corev1.PodReady); c != nil && c.Status == corev1.ConditionTrue {
		return ""
	}
	if c := condition(corev1.PodScheduled); c != nil && c.Status == corev1.ConditionFalse {
		return c.Message
	}
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "PodInitializing" {
			return strings.TrimSpace(w.Reason + " " + w.Message)
		}
	}
	return "it is not ready (" + string(pod.Status.Phase) + ")"
}

// DeploymentTrouble says why the pods of a Deployment are not there and available,
// or that older ones are; empty: they are.
func DeploymentTrouble(d *appsv1.Deployment) string {
	want := int32(1)
	if d.Spec.Replicas != nil {
		want = *d.Spec.Replicas
	}
	st := d.Status
	ending := st.TerminatingReplicas != nil && *st.TerminatingReplicas > 0
	if st.ObservedGeneration >= d.Generation && st.UpdatedReplicas >= want && st.AvailableReplicas >= want && st.Replicas <= want && !ending {
		return ""
	}
	return fmt.Sprintf("Deployment %s: %d of %d pods are new, %d available", d.Name, st.UpdatedReplicas, want, st.AvailableReplicas)
}
