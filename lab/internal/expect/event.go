package expect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Event expects that the product tells something of an object, as kubectl get events shows it.
// What was told before the row began does not count: the row before, or the same row without
// its sabotage, may have been the cause.
type Event struct {
	In        string `lab:"in,required" doc:"cluster"`
	Of        string `lab:"of" doc:"kind/name of the object; kind alone: of any of them; without it of any object"`
	Namespace string `lab:"namespace" doc:"of the event; may be left out"`
	Type      string `lab:"type,required" doc:"Normal or Warning"`
	Reason    string `lab:"reason" doc:"the reason; without it any"`
	Message   string `lab:"message" doc:"regular expression for a part of the text"`
}

// Lint checks what can be checked before there is an object.
func (e *Event) Lint(l *Linter) {
	l.Cluster(&e.In)
	l.Pattern(&e.Message)
	l.Text(&e.Of)
	if e.Type != corev1.EventTypeNormal && e.Type != corev1.EventTypeWarning {
		l.Problem(&e.Type, "Normal or Warning", "%q is no type of event", e.Type)
	}
	if e.Of == "" && e.Reason == "" && e.Message == "" {
		l.Problem(e, "", "any event of this type would do: say of which object (of), for which reason, or with which message")
	}
	if of := inBraces.ReplaceAllString(e.Of, "x"); strings.Count(of, "/") > 1 || strings.HasSuffix(of, "/") {
		l.Problem(&e.Of, "such as internalnode/node-1, or internalnode", "%q is not kind/name", e.Of)
	}
}

// Check reads the cluster's events.
func (e *Event) Check(ctx context.Context, row *Row) (Result, error) {
	of, err := row.Expand(ctx, e.Of)
	if err != nil {
		return missing(e.Of, err)
	}
	message, err := row.Pattern(ctx, e.Message)
	if err != nil {
		return missing(e.Message, err)
	}
	res := Result{Want: "since the row began, the event " + e.what(of)}
	marks, marked := row.EventMarks[e.In]
	if !marked {
		return Result{}, fmt.Errorf("nobody looked at the events of %s before the row", e.In)
	}
	all, err := row.API.Events(ctx, e.In)
	switch {
	case errors.Is(err, world.ErrNotRunning):
		return Result{}, err
	case err != nil:
		res.Got, res.Why = "no answer", err.Error()
		return res, nil
	}
	kind, name, named := strings.Cut(strings.ToLower(of), "/")
	var others []string
	old := 0
	for _, v := range all {
		o := v.InvolvedObject
		if kind != "" && strings.ToLower(o.Kind) != kind || named && o.Name != name || e.Namespace != "" && v.Namespace != e.Namespace {
			continue
		}
		switch {
		case marks[v.UID] == v.ResourceVersion:
			old++
		case v.Type == e.Type && (e.Reason == "" || v.Reason == e.Reason) && message.MatchString(v.Message):
			res.OK, res.Got = true, describeEvent(v)
			return res, nil
		default:
			others = append(others, describeEvent(v))
		}
	}
	res.Got = fmt.Sprintf("%d other events since the row began, and %d from before", len(others), old)
	slices.Sort(others)
	res.Why = strings.Join(others, "\n")
	return res, nil
}

func describeEvent(v corev1.Event) string {
	return fmt.Sprintf("%s %s %s/%s: %s", v.Type, v.Reason, strings.ToLower(v.InvolvedObject.Kind), v.InvolvedObject.Name, v.Message)
}

// String is the expectation on one line.
func (e *Event) String() string { return "event " + e.what(e.Of) }

func (e *Event) what(of string) string {
	words := []string{e.Type}
	if e.Reason != "" {
		words = append(words, e.Reason)
	}
	if of != "" {
		words = append(words, "of", of)
	}
	words = append(words, "in", e.In)
	if e.Message != "" {
		words = append(words, fmt.Sprintf("that matches %q", e.Message))
	}
	return strings.Join(words, " ")
}

// EventMarks are the events that a cluster has had so far, with the version of each: one that is
// told again has another version. They are by cluster.
type EventMarks map[string]map[types.UID]string

// MarkEvents looks at the events of a cluster.
func (m EventMarks) MarkEvents(ctx context.Context, api *API, cluster string) error {
	all, err := api.Events(ctx, cluster)
	if err != nil {
		return fmt.Errorf("events of %s: %w", cluster, err)
	}
	m[cluster] = map[types.UID]string{}
	for _, v := range all {
		m[cluster][v.UID] = v.ResourceVersion
	}
	return nil
}

// Events returns the events of all namespaces of a cluster.
func (a *API) Events(ctx context.Context, cluster string) ([]corev1.Event, error) {
	m, err := a.MappingOf(ctx, cluster, corev1.SchemeGroupVersion.WithKind("Event"))
	if err != nil {
		return nil, err
	}
	objects, err := a.list(ctx, cluster, m)
	if err != nil {
		return nil, err
	}
	out := make([]corev1.Event, len(objects))
	for i, o := range objects {
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &out[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}
