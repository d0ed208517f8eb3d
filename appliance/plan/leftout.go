package plan

import (
	"fmt"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// LeaveOut makes r a plan that was made without o, because one with it ends in
// a panic, which is a bug of Isthmus. What is known of o then is too little to
// say what is superfluous, so r is incomplete. o, which has its kind set, gets an
// event, and a condition if a user wrote it and it has conditions of Kubernetes'
// kind.
func (r *Result) LeaveOut(o Object, panicked string) {
	r.Incomplete = true
	message := clip(fmt.Sprintf("no plan can be made with this object, which is a bug of Isthmus (%s). It is left out, what was made of it stays as it is, and nothing in the cluster is deleted meanwhile: "+
		"delete the object or write it another way, and report the bug with the stack in the controller's log", panicked))
	version, kind := o.GetObjectKind().GroupVersionKind().ToAPIVersionAndKind()
	ref := cluster.Ref{APIVersion: version, Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName(), UID: string(o.GetUID())}
	r.Events = append(r.Events, Event{Object: ref, Type: Warning, Reason: ReasonPlanFailed, Message: message})

	o = o.DeepCopyObject().(Object)
	conditions := ConditionsOf(o)
	if conditions == nil || o.GetLabels()[v1beta1.LabelManagedBy] == v1beta1.ManagedBy {
		return // the plan may have a status for what it makes
	}
	accepted := metav1.Condition{Type: ConditionAccepted, Status: metav1.ConditionFalse, ObservedGeneration: o.GetGeneration(), Reason: ReasonPlanFailed, Message: message}
	if kind == "Configuration" {
		accepted.Type = v1beta1.ConditionNetworkCIDRsConfigured
	}
	same := func(c metav1.Condition) bool { return c.Type == accepted.Type }
	*conditions = append(slices.DeleteFunc(*conditions, same), accepted)
	r.Statuses = append(r.Statuses, o)
}

// ConditionsOf returns where the conditions in the status of o are; nil if it has none
// of Kubernetes' kind.
func ConditionsOf(o Object) *[]metav1.Condition {
	status := reflect.ValueOf(o).Elem().FieldByName("Status")
	if !status.IsValid() {
		return nil
	}
	field := status.FieldByName("Conditions")
	if !field.IsValid() {
		return nil
	}
	conditions, _ := field.Addr().Interface().(*[]metav1.Condition)
	return conditions
}
