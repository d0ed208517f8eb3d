package controllers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/agent"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// AnnotationPlanned has a digest of what was planned, on objects that the API
// server fills in: what is no longer planned can't be told from what it added.
const AnnotationPlanned = "networking.liqo.io/planned"

// errDeleting is returned for an object that has to go before it can be made
// again.
var errDeleting = errors.New("is being deleted; it will be made again after that")

// errOvertaken is returned for an object that a user wrote since the plan was
// made. The next plan knows of it.
var errOvertaken = errors.New("a user has just written one")

// errOthers is returned for an object that somebody else made.
var errOthers = fmt.Errorf("there is one that Isthmus did not make (it lacks the label %s=%s): delete or rename it", v1beta1.LabelManagedBy, v1beta1.ManagedBy)

// parallel writes are enough to keep an API server busy.
const parallel = 8

// objectKey names an object of any kind.
type objectKey struct {
	schema.GroupVersionKind
	client.ObjectKey
}

// String returns Kind namespace/name, as logs and errors have it.
func (k objectKey) String() string { return describeRef(k.Kind, k.Namespace, k.Name) }

// settled is a version of an object to which a plan was written. If it still
// differs from the plan, the API server sees to it, and writing it again would
// go on forever.
type settled struct{ version, digest string }

// A pass's writes, shared by goroutines.
type writer struct {
	*reconciler
	mu     sync.Mutex
	errs   []error
	latest map[objectKey]client.Object // what was written in this pass
	denied []denial
	told   time.Time // when the log was told how far it is
}

// A denial is why a planned object can't be written as it is, whatever else changes.
type denial struct {
	object plan.Object
	why    string
}

// deny notes an error that only a change of what was asked for cures, or of the cluster's
// rules: what the API server finds invalid or forbids, and a name that somebody else has.
func (w *writer) deny(o plan.Object, err error) {
	if !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) && !errors.Is(err, errOthers) || deletedMeanwhile(err) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.denied = append(w.denied, denial{o, err.Error()})
}

// The kinds of a plan (plan.Kinds) are made, compared with what is there,
// changed and removed; of what is somebody else's a field or a label is set: the
// Pod Security level of tenant namespaces, spec.local of Configurations, an
// annotation of the node daemon's pods, and the module of ForeignClusters.
//
// +kubebuilder:rbac:groups="",resources=serviceaccounts;services,verbs=get;create;update;delete
// +kubebuilder:rbac:groups="",resources=namespaces,verbs=patch
// +kubebuilder:rbac:groups="",namespace=system,resources=pods,verbs=patch
// +kubebuilder:rbac:groups=apps,resources=deployments,verbs=get;create;update;delete
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=get;create;update;delete
// +kubebuilder:rbac:groups=rbac.authorization.k8s.io,resources=clusterrolebindings;rolebindings;roles,verbs=get;create;update;delete
// +kubebuilder:rbac:groups=networking.liqo.io,resources=configurations;connections;firewallconfigurations;gatewayclients;gatewayreports;gatewayservers;genevetunnels;internalfabrics;internalnodes;publickeies;routeconfigurations;wggatewayclients;wggatewayservers,verbs=get;create;update;delete
// +kubebuilder:rbac:groups=networking.liqo.io,resources=configurations,verbs=patch
// +kubebuilder:rbac:groups=ipam.liqo.io,resources=ips;networks,verbs=get;create;update;delete
// +kubebuilder:rbac:groups=core.liqo.io,resources=foreignclusters,verbs=get;create;update;patch;delete

// What gateways may do the controller grants (plan.GatewayRole, and a Role for
// each), so it has to hold it; it needs neither "bind" nor "escalate".
//
// +kubebuilder:rbac:groups=networking.liqo.io,resources=connections/status;gatewayreports/status,verbs=update;patch

// write makes the cluster what the plan says. What others depend on comes
// first; what is superfluous goes last.
//
// What can't be written is told in result: in events, and in statuses before those are written.
func (r *reconciler) write(ctx context.Context, result *plan.Result) error {
	r.dog.At("writing")
	w := &writer{reconciler: r, latest: map[objectKey]client.Object{}, told: time.Now()}
	each(w, result.Applies, func(o plan.Object) error { return w.apply(ctx, o) })
	each(w, result.Keys, func(k plan.KeySecret) error { return w.keySecret(ctx, k) })
	for _, wave := range waves(result.Objects) {
		each(w, wave, func(o plan.Object) error { return w.object(ctx, o) })
	}
	each(w, result.Pulls, func(o *corev1.Pod) error { return w.pull(ctx, o) })
	// In one order, or a gateway with two of them would say now this, now that.
	slices.SortFunc(w.denied, func(a, b denial) int { return strings.Compare(keyFor(a.object).String(), keyFor(b.object).String()) })
	for _, d := range w.denied {
		result.NotWritten(d.object, d.why)
	}
	each(w, result.Statuses, func(o plan.Object) error { return w.status(ctx, o) })
	if !result.Incomplete {
		w.prune(ctx, *result)
		w.prunePulls(ctx, result.Pulls)
	}
	r.metrics.planned(len(result.Objects))
	return errors.Join(w.errs...)
}

// waves sorts objects by when they can be written: bindings after what they
// bind, Deployments after what their pods need.
func waves(list []plan.Object) [3][]plan.Object {
	var out [3][]plan.Object
	for _, o := range list {
		i := 0
		switch o.GetObjectKind().GroupVersionKind().Kind {
		case "RoleBinding", "ClusterRoleBinding":
			i = 1
		case "Deployment":
			i = 2
		}
		out[i] = append(out[i], o)
	}
	return out
}

// each calls do for all of list, some at a time.
func each[T any](w *writer, list []T, do func(T) error) {
	var g errgroup.Group
	g.SetLimit(parallel)
	done := 0
	for _, x := range list {
		g.Go(func() error {
			w.fail(agent.Guard(func() error { return do(x) }))
			w.progressed(&done, len(list))
			return nil
		})
	}
	_ = g.Wait() // the functions return nil
}

// progress is how often a pass that writes much says how far it is.
const progress = 10 * time.Second

// progressed counts one more as done.
func (w *writer) progressed(done *int, of int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	*done++
	w.dog.At("writing")
	if now := time.Now(); now.Sub(w.told) >= progress {
		w.told = now
		w.log.Info("writing", "done", *done, "of", of)
	}
}

func (w *writer) fail(err error) {
	if err == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.errs = append(w.errs, err)
}

// keyFor names a planned object.
func keyFor(o plan.Object) objectKey {
	return objectKey{o.GetObjectKind().GroupVersionKind(), client.ObjectKey{Namespace: o.GetNamespace(), Name: o.GetName()}}
}

// wrote keeps what the API server answered.
func (w *writer) wrote(key objectKey, o client.Object, digest string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.latest[key] = o
	w.reconciler.settled[key] = settled{o.GetResourceVersion(), digest}
	w.writes.expect(w.scheme, key, o)
}

// live returns an object as it is, nil if it is not there.
func (w *writer) live(ctx context.Context, key objectKey) (client.Object, error) {
	w.mu.Lock()
	o := w.latest[key]
	w.mu.Unlock()
	if o != nil {
		return o, nil
	}
	o, err := w.empty(key.GroupVersionKind)
	if err != nil {
		return nil, err
	}
	if err := w.cache.Get(ctx, key.ObjectKey, o); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return o, nil
}

func (r *reconciler) empty(kind schema.GroupVersionKind) (client.Object, error) {
	o, err := r.scheme.New(kind)
	if err != nil {
		return nil, err
	}
	return o.(client.Object), nil
}

// object makes a planned object exist as planned.
func (w *writer) object(ctx context.Context, want plan.Object) error {
	key := keyFor(want)
	if err := w.put(ctx, key, want); err != nil {
		w.deny(want, err)
		return fmt.Errorf("%v: %w", key, err)
	}
	return nil
}

func (w *writer) put(ctx context.Context, key objectKey, want plan.Object) error {
	digest, err := digestOf(want)
	if err != nil {
		return err
	}
	if filledIn(key.Kind) {
		annotations := want.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[AnnotationPlanned] = digest
		want.SetAnnotations(annotations)
	}
	live, err := w.live(ctx, key)
	if err != nil {
		return err
	}
	if live == nil {
		return w.create(ctx, key, want, digest)
	}
	if !made(live) && !adoptable(want, live) {
		if writtenByUsers(key.Kind) {
			return errOvertaken
		}
		return errOthers
	}
	return w.update(ctx, key, want, live, digest)
}

func (w *writer) create(ctx context.Context, key objectKey, want plan.Object, digest string) error {
	o := want.DeepCopyObject().(client.Object)
	err := w.cache.Create(ctx, o, client.FieldOwner(name))
	if err == nil {
		w.log.Info("created", "object", key.String())
		w.metrics.wrote(key.Kind, "create")
		w.wrote(key, o, digest)
		return nil
	}
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	// It is there, but without our label, or the informer is behind.
	live, emptyErr := w.empty(key.GroupVersionKind)
	if emptyErr != nil {
		return emptyErr
	}
	if getErr := w.direct.Get(ctx, key.ObjectKey, live); getErr != nil {
		return errors.Join(err, client.IgnoreNotFound(getErr))
	}
	if made(live) {
		return err
	}
	if !adoptable(want, live) {
		return errOthers
	}
	return w.update(ctx, key, want, live, digest)
}

func (w *writer) update(ctx context.Context, key objectKey, want plan.Object, live client.Object, digest string) error {
	if live.GetDeletionTimestamp() != nil {
		return errDeleting
	}
	differs := difference(want, live)
	if differs == "" {
		return nil
	}
	w.mu.Lock()
	before := w.reconciler.settled[key]
	w.mu.Unlock()
	if before == (settled{live.GetResourceVersion(), digest}) {
		return nil
	}
	if field := immutable(want, live); field != "" {
		return w.remove(ctx, key, live, field+" can't be changed")
	}
	var err error
	version := live.GetResourceVersion()
	o := merged(want, live)
	if key.Kind == "ForeignCluster" { // others own parts of it
		u, convErr := applyConfiguration(want)
		if convErr != nil {
			return convErr
		}
		if err = w.cache.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(name), client.ForceOwnership); err == nil {
			err = runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, o)
		}
	} else {
		err = w.cache.Update(ctx, o, client.FieldOwner(name))
	}
	if err != nil {
		return err
	}
	if o.GetResourceVersion() != version {
		w.log.Info("updated", "object", key.String(), "changed", differs)
		w.metrics.wrote(key.Kind, "update")
	} else {
		w.log.Debug("the API server keeps a difference to the plan", "object", key.String(), "differs", differs)
	}
	w.wrote(key, o, digest)
	return nil
}

// remove deletes an object, if it is still the one that was read.
func (w *writer) remove(ctx context.Context, key objectKey, live client.Object, why string) error {
	id := live.GetUID()
	err := w.cache.Delete(ctx, live, client.Preconditions{UID: &id}, client.PropagationPolicy("Background"))
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	w.log.Info("deleted", "object", key.String(), "why", why)
	w.metrics.wrote(key.Kind, "delete")
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.reconciler.settled, key)
	w.writes.expectGone(w.scheme, key, id)
	return nil
}

// prune deletes what the controller made and does not plan any more.
func (w *writer) prune(ctx context.Context, result plan.Result) {
	keep := make(map[objectKey]bool, len(result.Objects)+len(result.Keep))
	for _, o := range result.Objects {
		keep[keyFor(o)] = true
	}
	for _, o := range result.Keep {
		keep[objectKey{schema.FromAPIVersionAndKind(o.APIVersion, o.Kind), client.ObjectKey{Namespace: o.Namespace, Name: o.Name}}] = true
	}
	for key := range w.reconciler.settled {
		if !keep[key] {
			delete(w.reconciler.settled, key)
		}
	}
	for _, kind := range plan.Kinds() {
		live, err := w.list(ctx, kind)
		if err != nil {
			w.fail(err)
			continue
		}
		var superfluous []client.Object
		for _, o := range live {
			if !keep[objectKey{kind, client.ObjectKeyFromObject(o)}] && o.GetDeletionTimestamp() == nil {
				superfluous = append(superfluous, o)
			}
		}
		each(w, superfluous, func(o client.Object) error {
			key := objectKey{kind, client.ObjectKeyFromObject(o)}
			if err := w.remove(ctx, key, o, "not planned any more"); err != nil {
				return fmt.Errorf("delete %v: %w", key, err)
			}
			return nil
		})
	}
}

// list returns the objects of a kind that the controller made.
func (w *writer) list(ctx context.Context, kind schema.GroupVersionKind) ([]client.Object, error) {
	kind.Kind += "List"
	o, err := w.scheme.New(kind)
	if err != nil {
		return nil, err
	}
	list := o.(client.ObjectList)
	if err := w.cache.List(ctx, list, client.MatchingLabels{v1beta1.LabelManagedBy: v1beta1.ManagedBy}); err != nil {
		return nil, fmt.Errorf("read %s: %w", kind.Kind, err)
	}
	return elements(list)
}

// made reports whether the controller made an object, by its label. Kubernetes
// gives the labels of a Service to the EndpointSlices that it makes of it, the
// gateways' among them: those say themselves who manages them.
func made(o client.Object) bool {
	labels := o.GetLabels()
	if _, is := o.(*discoveryv1.EndpointSlice); is && labels[discoveryv1.LabelManagedBy] != v1beta1.ManagedBy {
		return false
	}
	return labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy
}

// apply writes the few fields of somebody else's object that the plan asks for.
func (w *writer) apply(ctx context.Context, want plan.Object) error {
	key := keyFor(want)
	live, err := w.live(ctx, key)
	if err != nil || live == nil || live.GetDeletionTimestamp() != nil {
		return err
	}
	differs := partDifference(want, live)
	if differs == "" {
		return nil
	}
	u, err := applyConfiguration(want)
	if err != nil {
		return fmt.Errorf("%v: %w", key, err)
	}
	if err := w.cache.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(name)); err != nil {
		return fmt.Errorf("%v: set %s: %w", key, differs, err)
	}
	w.log.Info("set", "object", key.String(), "field", differs)
	w.metrics.wrote(key.Kind, "apply")
	w.mu.Lock()
	defer w.mu.Unlock()
	w.writes.expectOthers(w.scheme, key, u)
	return nil
}

// applyConfiguration returns what o sets, for server-side apply.
func applyConfiguration(o runtime.Object) (*unstructured.Unstructured, error) {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return nil, err
	}
	delete(m, "status")
	if meta, ok := m["metadata"].(map[string]any); ok {
		for _, field := range []string{"creationTimestamp", "uid", "generation", "resourceVersion"} {
			delete(meta, field)
		}
	}
	dropEmpty(m)
	return &unstructured.Unstructured{Object: m}, nil
}

// dropEmpty removes maps that are empty: applying one would own it.
func dropEmpty(m map[string]any) {
	for k, v := range m {
		if child, ok := v.(map[string]any); ok {
			if dropEmpty(child); len(child) == 0 {
				delete(m, k)
			}
		}
	}
}

// digestOf returns a short digest of what is planned.
func digestOf(o plan.Object) (string, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8]), nil
}
