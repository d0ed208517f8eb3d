package kube

import (
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// conditionAppliedListed is False where a host was asked to apply more objects than
// its report has room for, and is not there otherwise.
const conditionAppliedListed = "AppliedListed"

// appliedRoom is what the entries of a report may take in bytes. An object of more than
// 1.5 MiB is refused (etcd --max-request-bytes), and with it what others need of the
// report: the addresses of a node.
const appliedRoom = 1 << 20

// appliedBytes is what an entry takes: its fields, and their names again in the
// managedFields of the object. 6,000 entries with names of 41 characters took 2.6 MB.
func appliedBytes(a v1beta1.AppliedStatus) int {
	const fields = 290
	return fields + 2*(len(a.Kind)+len(a.Namespace)+len(a.Name)) + len(a.Message)
}

// appliedStatus returns the report on objects as the API has it. An entry
// whose verdict has not changed keeps its time. Where there is not room for all, those
// that are in force are left out, and a condition beside the others says so.
func appliedStatus(want []cluster.Applied, have []v1beta1.AppliedStatus, beside []metav1.Condition) ([]v1beta1.AppliedStatus, []metav1.Condition) {
	type key struct{ kind, namespace, name string }
	before := make(map[key]v1beta1.AppliedStatus, len(have))
	for _, a := range have {
		before[key{a.Kind, a.Namespace, a.Name}] = a
	}
	var out []v1beta1.AppliedStatus
	for _, a := range want {
		since := a.Since
		if since.IsZero() {
			since = time.Now()
		}
		s := v1beta1.AppliedStatus{
			Kind: a.Object.Kind, Namespace: a.Object.Namespace, Name: a.Object.Name,
			ObservedGeneration: a.ObservedGeneration, OK: a.OK, Message: a.Message,
			LastTransitionTime: stamp(since),
		}
		if old, ok := before[key{s.Kind, s.Namespace, s.Name}]; ok && old.OK == s.OK && !old.LastTransitionTime.IsZero() {
			s.LastTransitionTime = old.LastTransitionTime
		}
		out = append(out, s)
	}
	out = sortedApplied(out)
	if fit := fitting(out); len(fit) < len(out) {
		beside = append(slices.Clone(beside), metav1.Condition{
			Type: conditionAppliedListed, Status: metav1.ConditionFalse, Reason: "TooMany",
			// No numbers: with every other object they would be news of every host.
			Message: "status.applied has not room for all objects that this host was asked to apply. Those that are not in force are kept before the others, so that some that are in force have no condition of this host",
		})
		out = fit
	}
	return out, beside
}

// fitting returns those of a sorted list that there is room for: first those that are
// not in force.
func fitting(list []v1beta1.AppliedStatus) []v1beta1.AppliedStatus {
	room := appliedRoom
	in := make([]bool, len(list))
	for _, ok := range []bool{false, true} {
		for i, a := range list {
			if a.OK == ok && room >= appliedBytes(a) {
				in[i] = true
				room -= appliedBytes(a)
			}
		}
	}
	var out []v1beta1.AppliedStatus
	for i, a := range list {
		if in[i] {
			out = append(out, a)
		}
	}
	return out
}

func sortedApplied(list []v1beta1.AppliedStatus) []v1beta1.AppliedStatus {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b v1beta1.AppliedStatus) int {
		return compareNames(
			cluster.Meta{Ref: cluster.Ref{Namespace: a.Kind + "/" + a.Namespace, Name: a.Name}},
			cluster.Meta{Ref: cluster.Ref{Namespace: b.Kind + "/" + b.Namespace, Name: b.Name}})
	})
	return list
}
