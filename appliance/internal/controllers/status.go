package controllers

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// +kubebuilder:rbac:groups=networking.liqo.io,resources=configurations/status;firewallconfigurations/status;gatewayclients/status;gatewayservers/status;internalnodes/status;publickeies/status;routeconfigurations/status;wggatewayclients/status;wggatewayservers/status,verbs=update
// +kubebuilder:rbac:groups=ipam.liqo.io,resources=ips/status;networks/status,verbs=update
// +kubebuilder:rbac:groups=net.liqo.io,resources=tunnelendpoints/status,verbs=update
// +kubebuilder:rbac:groups=core.liqo.io,resources=foreignclusters/status,verbs=patch

// status writes the status that is planned for an object, if it differs.
func (w *writer) status(ctx context.Context, want plan.Object) error {
	key := keyFor(want)
	live, err := w.live(ctx, key)
	if err != nil || live == nil || live.GetDeletionTimestamp() != nil {
		return err
	}
	if id := want.GetUID(); id != "" && id != live.GetUID() {
		return nil // another object of that name; the next pass is about it
	}
	if fc, ok := want.(*corev1beta1.ForeignCluster); ok {
		return w.foreignClusterStatus(ctx, key, fc, live.(*corev1beta1.ForeignCluster))
	}
	o := withStatus(want, live, metav1.Now())
	if o == nil {
		return nil
	}
	changes := statusChanges(o, live)
	err = w.cache.Status().Update(ctx, o, client.FieldOwner(name))
	if apierrors.IsNotFound(err) {
		return nil // deleted meanwhile
	}
	if err != nil {
		return fmt.Errorf("%v: status: %w", key, err)
	}
	w.log.Info("status", "object", key.String(), "changed", changes)
	w.metrics.wrote(key.Kind, "status")
	w.mu.Lock()
	defer w.mu.Unlock()
	w.latest[key] = o
	w.writes.expect(w.scheme, key, o)
	return nil
}

// withStatus returns live with the status that is planned; nil if it has it.
func withStatus(want, live client.Object, now metav1.Time) client.Object {
	out := live.DeepCopyObject().(client.Object)
	switch w := want.(type) {
	case *v1beta1.InternalNode: // the rest is the node's
		o := out.(*v1beta1.InternalNode)
		o.Status.Conditions = overConditions(w.Status.Conditions, o.Status.Conditions, now)
	default:
		to := reflect.ValueOf(out).Elem().FieldByName("Status")
		conditions := plan.ConditionsOf(out)
		var had []metav1.Condition
		if conditions != nil {
			had = *conditions
		}
		to.Set(reflect.ValueOf(want.DeepCopyObject()).Elem().FieldByName("Status"))
		if conditions != nil && *conditions != nil {
			*conditions = timed(*conditions, had, now)
		}
	}
	if equality.Semantic.DeepEqual(statusOf(out), statusOf(live)) {
		return nil
	}
	return out
}

func statusOf(o client.Object) any {
	return reflect.ValueOf(o).Elem().FieldByName("Status").Interface()
}

// timed returns want with the times of transition: the old one where the
// status is the same.
func timed(want, had []metav1.Condition, now metav1.Time) []metav1.Condition {
	out := slices.Clone(want)
	for i := range out {
		out[i].LastTransitionTime = now
		for _, h := range had {
			if h.Type == out[i].Type && h.Status == out[i].Status {
				out[i].LastTransitionTime = h.LastTransitionTime
			}
		}
	}
	return out
}

// overConditions replaces the conditions of had that are in want.
func overConditions(want, had []metav1.Condition, now metav1.Time) []metav1.Condition {
	out := slices.Clone(had)
	for _, c := range timed(want, had, now) {
		if i := slices.IndexFunc(out, func(o metav1.Condition) bool { return o.Type == c.Type }); i >= 0 {
			out[i] = c
		} else {
			out = append(out, c)
		}
	}
	return out
}

// foreignClusterStatus writes the module that is ours, and nothing else.
func (w *writer) foreignClusterStatus(ctx context.Context, key objectKey, want, live *corev1beta1.ForeignCluster) error {
	module := want.Status.Modules.Networking
	if module == nil {
		return nil
	}
	module = module.DeepCopy()
	now := metav1.Now()
	var had []corev1beta1.Condition
	if live.Status.Modules.Networking != nil {
		had = live.Status.Modules.Networking.Conditions
	}
	for i := range module.Conditions {
		c := &module.Conditions[i]
		c.LastTransitionTime = now
		for _, h := range had {
			if h.Type == c.Type && h.Status == c.Status {
				c.LastTransitionTime = h.LastTransitionTime
			}
		}
	}
	if equality.Semantic.DeepEqual(module, live.Status.Modules.Networking) {
		return nil
	}
	part, err := runtime.DefaultUnstructuredConverter.ToUnstructured(module)
	if err != nil {
		return fmt.Errorf("%v: %w", key, err)
	}
	u := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": key.GroupVersion().String(), "kind": key.Kind,
		"metadata": map[string]any{"name": live.Name},
		"status":   map[string]any{"modules": map[string]any{"networking": part}},
	}}
	if err := w.cache.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(name), client.ForceOwnership); err != nil {
		return fmt.Errorf("%v: status: %w", key, client.IgnoreNotFound(err))
	}
	w.log.Info("status", "object", key.String(), "connection", foreignClusterSummary(module))
	w.metrics.wrote(key.Kind, "status")
	w.mu.Lock()
	defer w.mu.Unlock()
	w.writes.expect(w.scheme, key, u)
	return nil
}

// statusChanges names the fields of the status in which two objects differ,
// and says what conditions became.
func statusChanges(is, was client.Object) string {
	a, b := reflect.ValueOf(is).Elem().FieldByName("Status"), reflect.ValueOf(was).Elem().FieldByName("Status")
	var out []string
	for i := range a.NumField() {
		if equality.Semantic.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			continue
		}
		field, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
		if list, ok := a.Field(i).Interface().([]metav1.Condition); ok {
			for _, c := range list {
				out = append(out, fmt.Sprintf("%s=%s (%s)", c.Type, c.Status, c.Reason))
			}
			continue
		}
		out = append(out, field)
	}
	return strings.Join(out, ", ")
}

func foreignClusterSummary(m *corev1beta1.Module) string {
	for _, c := range m.Conditions {
		if c.Type == corev1beta1.NetworkConnectionStatus {
			return string(c.Status)
		}
	}
	return ""
}
