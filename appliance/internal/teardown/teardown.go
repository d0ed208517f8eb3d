// Package teardown takes back what an installation does in a cluster, in the
// order that leaves nothing behind: first the controller, which would make
// everything again, then what it made, then what nodes have in their kernels.
// What the chart installed stays for whoever installed it to remove.
//
// It runs in the pre-delete hook of the chart, and in isthmusctl uninstall. Every
// step may be made again: a run that was interrupted is made good by the next.
package teardown

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Names of what the chart installs.
const (
	Controller = "isthmus-controller"
	Node       = "isthmus-node"
)

// undoFlag has a node daemon take back what is in its kernel.
const undoFlag = "--undo"

// Config is what Run needs. Client, which knows the kinds of internal/kube, and
// Namespace are required.
type Config struct {
	Client    client.Client
	Namespace string // of the installation
	// Progress is told what is done, and what is waited for; optional.
	Progress func(string)
	// Timeout is how long a step may take; default 2 min.
	Timeout time.Duration
	// Force goes on without nodes that do not answer in time.
	Force bool
}

// run is a teardown in progress.
type run struct {
	Config
	last string // what was said last
}

// Run takes back what the installation does. The error says what is left and
// what to do.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Client == nil || cfg.Namespace == "" {
		return errors.New("teardown: Client and Namespace are required")
	}
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	cfg.Timeout = cmp.Or(cfg.Timeout, 2*time.Minute)
	r := &run{Config: cfg}
	for _, step := range []func(context.Context) error{r.stopController, r.deletePlanned, r.undoNodes, r.restore} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// say tells what has become of a step, once.
func (r *run) say(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); text != r.last {
		r.last = text
		r.Progress(text)
	}
}

// until polls until nothing is left to wait for.
func (r *run) until(ctx context.Context, what string, left func(context.Context) (string, error)) error {
	waiting := ""
	err := wait.PollUntilContextTimeout(ctx, 250*time.Millisecond, r.Timeout, true, func(ctx context.Context) (bool, error) {
		now, err := left(ctx)
		if err != nil {
			return false, err
		}
		if now != "" {
			waiting = now
			r.say("%s: %s", what, now)
		}
		return now == "", nil
	})
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return &TimeoutError{What: what, Left: waiting, After: r.Timeout}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// A TimeoutError says what a step waited for in vain.
type TimeoutError struct {
	What, Left string
	After      time.Duration
}

// Error says it.
func (e *TimeoutError) Error() string {
	return fmt.Sprintf("%s: after %v: %s", e.What, e.After, e.Left)
}

// +kubebuilder:rbac:roleName=isthmus-teardown,groups=apps,namespace=system,resources=deployments,resourceNames=isthmus-controller,verbs=get;patch
// +kubebuilder:rbac:roleName=isthmus-teardown,groups="",resources=pods,verbs=list

// stopController ends the controller and waits until its pods are gone.
func (r *run) stopController(ctx context.Context) error {
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: Controller}}
	r.say("stopping the controller")
	err := r.Client.Patch(ctx, d, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":0}}`)))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("stop the controller: %w", err)
	}
	return r.until(ctx, "stopping the controller", func(ctx context.Context) (string, error) {
		return r.pods(ctx, client.InNamespace(r.Namespace), client.MatchingLabels{v1beta1.LabelAppName: Controller})
	})
}

// pods names those that there are.
func (r *run) pods(ctx context.Context, opts ...client.ListOption) (string, error) {
	var list corev1.PodList
	if err := r.Client.List(ctx, &list, opts...); err != nil {
		return "", fmt.Errorf("list pods: %w", err)
	}
	var names []string
	for _, p := range list.Items {
		names = append(names, p.Namespace+"/"+p.Name)
	}
	if len(names) == 0 {
		return "", nil
	}
	return "waiting for the end of " + some(names), nil
}

// some names a few and counts the rest.
func some(names []string) string {
	const few = 5
	slices.Sort(names)
	if len(names) <= few {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
}

// Of the kinds of a plan (plan.Kinds), what carries the controller's label.
//
// +kubebuilder:rbac:roleName=isthmus-teardown,groups="",resources=serviceaccounts;services,verbs=list;delete
// +kubebuilder:rbac:roleName=isthmus-teardown,groups=apps,resources=deployments,verbs=list;delete
// +kubebuilder:rbac:roleName=isthmus-teardown,groups=discovery.k8s.io,resources=endpointslices,verbs=list;delete
// +kubebuilder:rbac:roleName=isthmus-teardown,groups=rbac.authorization.k8s.io,resources=clusterrolebindings;rolebindings;roles,verbs=list;delete
// +kubebuilder:rbac:roleName=isthmus-teardown,groups=networking.liqo.io,resources=configurations;connections;firewallconfigurations;gatewayclients;gatewayreports;gatewayservers;genevetunnels;internalfabrics;internalnodes;publickeies;routeconfigurations;wggatewayclients;wggatewayservers,verbs=list;delete
// +kubebuilder:rbac:roleName=isthmus-teardown,groups=ipam.liqo.io,resources=ips;networks,verbs=list;delete
// +kubebuilder:rbac:roleName=isthmus-teardown,groups=core.liqo.io,resources=foreignclusters,verbs=list;delete

// deletePlanned deletes what the controller has made, and waits for the end of
// the gateways. Secrets with keys stay, with the gateways that own them.
func (r *run) deletePlanned(ctx context.Context) error {
	deleted := 0
	for _, kind := range plan.Kinds() {
		objects, err := r.made(ctx, &unstructured.UnstructuredList{Object: map[string]any{
			"apiVersion": kind.GroupVersion().String(), "kind": kind.Kind + "List",
		}})
		if err != nil {
			return err
		}
		for _, o := range objects {
			if err := r.Client.Delete(ctx, &o, client.PropagationPolicy(metav1.DeletePropagationBackground)); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("delete %s %s: %w", kind.Kind, client.ObjectKeyFromObject(&o), err)
			}
			deleted++
		}
	}
	r.say("deleted %d objects that the controller had made", deleted)
	return r.until(ctx, "removing the gateways", func(ctx context.Context) (string, error) {
		return r.pods(ctx, client.MatchingLabels{v1beta1.LabelComponent: v1beta1.ComponentGateway, "app.kubernetes.io/part-of": v1beta1.ManagedBy})
	})
}

// made lists the objects of a kind that the controller has made. A kind that
// the API server does not know has none.
func (r *run) made(ctx context.Context, list *unstructured.UnstructuredList) ([]unstructured.Unstructured, error) {
	err := r.Client.List(ctx, list, client.MatchingLabels{v1beta1.LabelManagedBy: v1beta1.ManagedBy})
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", list.GetKind(), err)
	}
	return list.Items, nil
}

// +kubebuilder:rbac:roleName=isthmus-teardown,groups=apps,namespace=system,resources=daemonsets,resourceNames=isthmus-node,verbs=get;update

// undoNodes has every node's daemon take back what is in its kernel, and waits
// until all have said so by being ready.
func (r *run) undoNodes(ctx context.Context) error {
	key := client.ObjectKey{Namespace: r.Namespace, Name: Node}
	var ds appsv1.DaemonSet
	if err := r.Client.Get(ctx, key, &ds); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("DaemonSet %s: %w", key, err)
	}
	if withUndo(&ds) {
		if err := r.Client.Update(ctx, &ds); err != nil {
			return fmt.Errorf("have the nodes undo their work: DaemonSet %s: %w", key, err)
		}
	}
	err := r.until(ctx, "undoing what is in the kernels of nodes", func(ctx context.Context) (string, error) {
		if err := r.Client.Get(ctx, key, &ds); err != nil {
			return "", err
		}
		st := ds.Status
		if st.ObservedGeneration >= ds.Generation && st.UpdatedNumberScheduled >= st.DesiredNumberScheduled && st.NumberReady >= st.DesiredNumberScheduled {
			r.say("nothing is left in the kernels of %d nodes", st.NumberReady)
			return "", nil
		}
		return r.unfinished(ctx, st.DesiredNumberScheduled)
	})
	var late *TimeoutError
	if !errors.As(err, &late) {
		return err
	}
	if r.Force {
		r.say("going on without them: %s; what is in their kernels goes when they are started anew", late.Left)
		return nil
	}
	return fmt.Errorf("%w: see to it that these nodes run and try again, or go on without them by --force, which leaves what is in their kernels until they are started anew", err)
}

// withUndo makes a DaemonSet one that undoes its work, everywhere at once. It
// returns false when it is one already.
func withUndo(ds *appsv1.DaemonSet) bool {
	containers := ds.Spec.Template.Spec.Containers
	if len(containers) == 0 || slices.Contains(containers[0].Args, undoFlag) {
		return false
	}
	containers[0].Args = append(containers[0].Args, undoFlag)
	all := intstr.FromString("100%")
	ds.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{
		Type: appsv1.RollingUpdateDaemonSetStrategyType, RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxUnavailable: &all},
	}
	return true
}

// unfinished says which nodes have not undone their work.
func (r *run) unfinished(ctx context.Context, of int32) (string, error) {
	var list corev1.PodList
	if err := r.Client.List(ctx, &list, client.InNamespace(r.Namespace), client.MatchingLabels{v1beta1.LabelAppName: Node}); err != nil {
		return "", fmt.Errorf("list pods: %w", err)
	}
	var left []string
	done := 0
	for _, p := range list.Items {
		undoes := len(p.Spec.Containers) > 0 && slices.Contains(p.Spec.Containers[0].Args, undoFlag)
		ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
		if undoes && ready {
			done++
		} else {
			left = append(left, p.Spec.NodeName)
		}
	}
	slices.Sort(left)
	return fmt.Sprintf("%d of %d nodes are done, waiting for %s", done, of, cmp.Or(some(slices.Compact(left)), "their pods")), nil
}

// +kubebuilder:rbac:roleName=isthmus-teardown,groups="",resources=namespaces,verbs=list;patch
// +kubebuilder:rbac:roleName=isthmus-teardown,groups=coordination.k8s.io,namespace=system,resources=leases,resourceNames=isthmus-controller,verbs=delete

// restore gives back what the controller has set on what others made, and
// removes its lease.
func (r *run) restore(ctx context.Context) error {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: Controller}}
	if err := r.Client.Delete(ctx, lease); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete Lease %s/%s: %w", r.Namespace, Controller, err)
	}
	var list corev1.NamespaceList
	if err := r.Client.List(ctx, &list); err != nil {
		return fmt.Errorf("list Namespaces: %w", err)
	}
	for _, ns := range list.Items {
		if ns.DeletionTimestamp != nil || !slices.ContainsFunc(ns.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Manager == Controller }) {
			continue
		}
		// What a manager applied before and applies no longer goes.
		u := &unstructured.Unstructured{}
		u.SetAPIVersion("v1")
		u.SetKind("Namespace")
		u.SetName(ns.Name)
		if err := r.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(Controller)); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("take back the labels of Namespace %s: %w", ns.Name, err)
		}
	}
	return nil
}
