package runner

import (
	"context"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// appliedTime is how long the hosts may take to apply one version.
const appliedTime = 15 * time.Second

// rewrite writes the versions of an object in turn. The first one is applied
// and undone as any object is.
func (r *Runner) rewrite(ctx context.Context, row *expect.Row, a *scenario.Rewrite, undo *undoList) (*report.Fault, error) {
	text, err := row.Expand(ctx, a.Versions)
	if err != nil {
		return nil, err
	}
	versions, err := scenario.ParseObjects(text)
	if err != nil {
		return nil, err
	}
	if err := r.applyOne(ctx, a.In, versions[0], undo); err != nil {
		return nil, err
	}
	res, err := r.resource(ctx, a.In, versions[0])
	if err != nil {
		return nil, err
	}
	for n := range a.Times {
		fault, err := r.writeVersion(ctx, a.In, res, versions[n%len(versions)])
		if err != nil || fault != nil {
			return fault, err
		}
	}
	return nil, nil
}

// writeVersion writes an object and waits until all hosts that it is for report
// that they have applied what was written.
func (r *Runner) writeVersion(ctx context.Context, cluster string, res dynamic.ResourceInterface, o *unstructured.Unstructured) (*report.Fault, error) {
	now, err := res.Apply(ctx, o.GetName(), o, metav1.ApplyOptions{FieldManager: fieldOwner, Force: true})
	if err != nil {
		return nil, err
	}
	return await(ctx, r.allowAction(appliedTime), report.Fault{
		Expectation: o.GetName() + " is applied", Want: fmt.Sprintf("generation %d applied within %v", now.GetGeneration(), appliedTime),
	}, func(ctx context.Context) (string, bool, error) {
		hosts, err := r.hosts(ctx, cluster)
		if err != nil {
			return "", false, err
		}
		seen, done := appliedBy(hosts, now)
		return seen, done, nil
	})
}

// appliedBy says what hosts report on an object, and whether all that report on
// it have applied its generation. Nobody is not all.
func appliedBy(hosts []unstructured.Unstructured, object *unstructured.Unstructured) (seen string, done bool) {
	seen = "no host reports on it"
	for _, h := range hosts {
		report, ok := reportOn(&h, object)
		if !ok {
			continue
		}
		generation, _, _ := unstructured.NestedInt64(report, "observedGeneration")
		fine, _, _ := unstructured.NestedBool(report, "ok")
		message, _, _ := unstructured.NestedString(report, "message")
		seen = strings.TrimSpace(fmt.Sprintf("%s has generation %d, ok: %v %s", h.GetName(), generation, fine, message))
		if generation < object.GetGeneration() || !fine {
			return seen, false
		}
		done = true
	}
	return seen, done
}
