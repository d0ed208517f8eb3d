package plan

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// NotWritten tells that the API server does not take o as it is planned: whose o is gets an
// event, and where it has a status in r the condition that it is not in use as written. The
// next plan knows nothing of it, so it is tried again.
func (r *Result) NotWritten(o Object, why string) {
	i := slices.IndexFunc(o.GetOwnerReferences(), func(ref metav1.OwnerReference) bool { return ref.UID != "" })
	if i < 0 {
		return
	}
	owner := o.GetOwnerReferences()[i]
	message := clip(fmt.Sprintf("%s %s can't be written: %s", o.GetObjectKind().GroupVersionKind().Kind, o.GetName(), why))
	ref := cluster.Ref{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: o.GetNamespace(), Name: owner.Name, UID: string(owner.UID)}
	r.Events = append(r.Events, Event{Object: ref, Type: Warning, Reason: ReasonNotWritten, Message: message})
	for _, status := range r.Statuses {
		if status.GetUID() != owner.UID {
			continue
		}
		conditions := ConditionsOf(status)
		if conditions == nil {
			continue
		}
		for j, c := range *conditions {
			if c.Type == ConditionAccepted && c.Status == metav1.ConditionTrue {
				(*conditions)[j].Status, (*conditions)[j].Reason, (*conditions)[j].Message = metav1.ConditionFalse, ReasonNotWritten, message
			}
		}
	}
}
