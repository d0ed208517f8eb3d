package controllers

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/isthmus-net/isthmus/appliance/agent"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A leftOut object is one with which a plan ends in a panic. It is left out of
// plans, so that all others go on, until it changes or the time is over.
type leftOut struct {
	digest   string // of what the plan reads of it
	panicked string
	until    time.Time
}

// searchTime is how long the objects that make a plan panic are looked for. With
// 10,000 objects it takes some thirty plans, with 1,000 nodes less than ten seconds.
const searchTime = 30 * time.Second

// searchPause is how long it is not searched again when nothing was found.
const searchPause = 5 * time.Minute

// plan makes the plan. It leaves out the objects with which that panics, and says
// so on them.
func (r *reconciler) plan(o kube.Objects) (plan.Result, error) {
	out := r.stillLeftOut(o)
	result, err := r.try(o.Without(out))
	if err != nil {
		var bug *agent.PanicError
		if !errors.As(err, &bug) {
			return plan.Result{}, err
		}
		panicked := fmt.Sprintf("panic: %v", bug.Value)
		notFound := fmt.Errorf("plan: %s (the log has the stack), and the objects that are the cause were not found", panicked)
		if o.Now.Before(r.nextSearch) {
			return plan.Result{}, notFound
		}
		r.log.Error("no plan can be made; looking for the objects that are the cause", "err", err)
		culprits, ok := r.search(o, out)
		if !ok {
			r.nextSearch = o.Now.Add(searchPause)
			return plan.Result{}, notFound
		}
		for _, x := range culprits {
			r.leftOut[x.GetUID()] = leftOut{digestForPlan(x), panicked, o.Now.Add(r.cfg.Resync)}
			out[x.GetUID()] = true
			r.log.Error("left out of the plan", "object", r.describe(x), "panic", panicked)
		}
		if result, err = r.try(o.Without(out)); err != nil {
			return plan.Result{}, err
		}
	}
	o.Each(func(x client.Object) {
		if left, is := r.leftOut[x.GetUID()]; is {
			x = x.DeepCopyObject().(client.Object)
			if kind, err := apiutil.GVKForObject(x, r.scheme); err == nil {
				x.GetObjectKind().SetGroupVersionKind(kind)
				result.LeaveOut(x, left.panicked)
			}
		}
	})
	return result, nil
}

// try makes a plan, and turns a panic into an error.
func (r *reconciler) try(o kube.Objects) (result plan.Result, err error) {
	err = agent.Guard(func() error {
		snapshot := kube.Snapshot(o)
		for _, x := range r.refused {
			snapshot.Pulls = append(snapshot.Pulls, x)
		}
		result = r.cfg.planner(snapshot)
		return nil
	})
	return result, err
}

// stillLeftOut returns the objects that stay left out, and forgets the others.
func (r *reconciler) stillLeftOut(o kube.Objects) map[types.UID]bool {
	out := map[types.UID]bool{}
	if len(r.leftOut) == 0 {
		return out
	}
	o.Each(func(x client.Object) {
		if left, is := r.leftOut[x.GetUID()]; is && o.Now.Before(left.until) && digestForPlan(x) == left.digest {
			out[x.GetUID()] = true
		}
	})
	for id := range r.leftOut {
		if !out[id] {
			delete(r.leftOut, id)
		}
	}
	return out
}

// search returns objects without which, and without those that are left out
// already, a plan can be made: with any one of them it can't. It is false if no such
// objects are found in time.
func (r *reconciler) search(o kube.Objects, out map[types.UID]bool) ([]client.Object, bool) {
	var candidates []client.Object
	o.Each(func(x client.Object) {
		if !out[x.GetUID()] {
			candidates = append(candidates, x)
		}
	})
	slices.SortStableFunc(candidates, func(a, b client.Object) int { return cmp.Compare(r.rank(a), r.rank(b)) })
	late := time.Now().Add(searchTime)
	works := func(list []client.Object) bool {
		if time.Now().After(late) {
			return false
		}
		without := map[types.UID]bool{}
		for id := range out {
			without[id] = true
		}
		for _, x := range list {
			without[x.GetUID()] = true
		}
		_, err := r.try(o.Without(without))
		return err == nil
	}
	// Those of a later rank stay, if that is enough.
	for i := range candidates {
		last := i == len(candidates)-1
		if !last && r.rank(candidates[i]) == r.rank(candidates[i+1]) || !works(candidates[:i+1]) {
			continue
		}
		found := smallest(candidates[:i+1], works)
		return found, time.Now().Before(late)
	}
	return nil, false
}

// smallest returns a part of list, for which works is true, of which no element can
// be missing. Those at the end are missing first. (This is delta debugging: Zeller and
// Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.)
func smallest[T any](list []T, works func([]T) bool) []T {
	for parts := 2; len(list) > 1; {
		size := (len(list) + parts - 1) / parts
		chunks := slices.Collect(slices.Chunk(list, size))
		if i := slices.IndexFunc(chunks, works); i >= 0 {
			list, parts = chunks[i], 2
			continue
		}
		rest := func(i int) []T { return slices.Concat(list[:i*size], list[min((i+1)*size, len(list)):]) }
		i := len(chunks) - 1
		for i >= 0 && !works(rest(i)) {
			i--
		}
		switch {
		case i >= 0:
			list, parts = rest(i), max(parts-1, 2)
		case size == 1:
			return list
		default:
			parts = min(2*parts, len(list))
		}
	}
	return list
}

// rank says which objects are left out rather than others: those that the
// fewest others depend on, and that users write.
func (r *reconciler) rank(o client.Object) int {
	kinds := []string{
		"RouteConfiguration", "FirewallConfiguration", "IP", "PublicKey", "ForeignCluster", "TunnelEndpoint",
		"GatewayServer", "GatewayClient", "Configuration", "WgGatewayServerTemplate", "WgGatewayClientTemplate",
	}
	kind, err := apiutil.GVKForObject(o, r.scheme)
	i := slices.Index(kinds, kind.Kind)
	if err != nil || i < 0 || made(o) {
		return len(kinds)
	}
	return i
}

func (r *reconciler) describe(o client.Object) string {
	kind, err := apiutil.GVKForObject(o, r.scheme)
	if err != nil {
		return describeRef(fmt.Sprintf("%T", o), o.GetNamespace(), o.GetName())
	}
	return describeRef(kind.Kind, o.GetNamespace(), o.GetName())
}

// digestForPlan tells an object that changes from one that does not. What the
// controller says on it is no change.
func digestForPlan(o client.Object) string {
	o = forPlan(o)
	if conditions := plan.ConditionsOf(o); conditions != nil {
		*conditions = nil
	}
	text, err := json.Marshal(o)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%x", sha256.Sum256(text))
}
