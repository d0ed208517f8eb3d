package kube

import (
	"slices"
	"strings"

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
