package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// policyName is the name of the policy that withholds an object, and of its
// binding.
const policyName = "isthmus-lab-withhold"

// sabotageWithin is how long an expectation of a sabotaged row is given: it
// must fail, so the scenario's own patience would only cost time. It is more
// than a daemon needs to apply what was changed.
const sabotageWithin = 4 * time.Second

// RunSabotage breaks what a sabotage names, runs the row and returns whether
// it failed where it should: that is the verdict pass.
func (r *Runner) RunSabotage(ctx context.Context, s *scenario.Scenario, sr scenario.Row, sab scenario.Sabotage) report.Row {
	r.setup()
	out := report.Row{Name: sr.Name, Sabotage: sab.String()}
	r.say("%s: %s", sr.Name, sab)
	start := time.Now()
	err := r.runSabotage(ctx, s, sr, sab, &out)
	out.Took = report.Duration(time.Since(start))
	out.Verdict, out.Reason = sabotageVerdict(&out, sab, err)
	r.bundle(ctx, &out)
	return out
}

func sabotageVerdict(out *report.Row, sab scenario.Sabotage, err error) (report.Verdict, string) {
	if err != nil {
		return report.Infra, err.Error()
	}
	switch red := redStep(out); red {
	case sab.Fails:
		return report.Pass, ""
	case "":
		return report.Fail, "it stayed green: nothing of the scenario depends on " + sab.String()
	default:
		return report.Fail, fmt.Sprintf("it failed at %q instead of at %q", red, sab.Fails)
	}
}

func (r *Runner) runSabotage(ctx context.Context, s *scenario.Scenario, sr scenario.Row, sab scenario.Sabotage, out *report.Row) (err error) {
	if err := r.settle(ctx, out); err != nil {
		return err
	}
	row, err := r.newRow(ctx, s)
	if err != nil {
		return err
	}
	steps := r.steps(s, sr)
	if row.Before, err = expect.Observe(ctx, r.World, r.api, s.Topology); err != nil {
		return err
	}
	var undo undoList
	r.needsConvergence = true
	defer func() {
		defer phase(out, "undone")()
		err = errors.Join(err, undo.run(context.WithoutCancel(ctx)))
	}()
	if sab.Before == "" {
		if err := r.sabotage(ctx, row, sab, &undo, out); err != nil {
			return err
		}
	}
	defer closeFlows(row)
	// Not everything that is withheld is reported as applied before. Rows
	// that only look can look again until what is broken shows.
	deadline := time.Now().Add(showTime)
	for {
		out.Steps = nil
		if err := r.sabotagedSteps(ctx, s, row, steps, sab, &undo, out); err != nil {
			return err
		}
		if redStep(out) == sab.Fails || sab.Before != "" || acts(steps) || time.Now().After(deadline) {
			return nil
		}
	}
}

// sabotage breaks what is to be broken.
func (r *Runner) sabotage(ctx context.Context, row *expect.Row, sab scenario.Sabotage, undo *undoList, out *report.Row) error {
	defer phase(out, "broken")()
	var err error
	if sab.Plant != nil {
		err = r.plant(ctx, row, sab.Plant, undo)
	} else {
		err = r.withhold(ctx, sab, undo)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", sab, err)
	}
	return nil
}

// showTime is how long what was withheld may take to show in rows that only
// look.
const showTime = 20 * time.Second

// acts tells whether a step does something.
func acts(steps []scenario.Step) bool {
	return slices.ContainsFunc(steps, func(st scenario.Step) bool { return len(st.Do) > 0 })
}

// redStep returns the first step that failed.
func redStep(out *report.Row) string {
	for _, st := range out.Steps {
		if len(st.Failures) > 0 {
			return st.Name
		}
	}
	return ""
}

// sabotagedSteps runs the steps up to the first that fails.
func (r *Runner) sabotagedSteps(ctx context.Context, s *scenario.Scenario, row *expect.Row, steps []scenario.Step, sab scenario.Sabotage, undo *undoList, out *report.Row) error {
	for _, st := range steps {
		if st.Name == sab.Fails {
			st.Within = min(st.Within, sabotageWithin)
		}
		if st.Name == sab.Before {
			if err := r.sabotage(ctx, row, sab, undo, out); err != nil {
				return err
			}
		}
		rs := r.step(ctx, s, row, st, undo)
		out.Steps = append(out.Steps, rs.Step)
		if rs.err != nil && st.Name == sab.Fails {
			// The sabotage may hit the action itself: what it needs is gone.
			out.Steps[len(out.Steps)-1].Failures = append(rs.Failures, report.Fault{Expectation: "the step's actions", Want: "done", Got: rs.err.Error()})
			return nil
		}
		if rs.err != nil {
			return rs.err
		}
		if len(rs.Failures) > 0 {
			return nil
		}
	}
	return nil
}

func (r *Runner) plant(ctx context.Context, row *expect.Row, p *scenario.Plant, undo *undoList) error {
	a := &scenario.Exec{On: p.On, Run: p.Run, Undo: p.Undo}
	_, err := r.execOnce(ctx, row, a, undo)
	return err
}

// withhold makes the API server refuse one object by its name, then deletes
// it: the live controllers can't bring it back, and the live daemons take its
// effects away themselves.
func (r *Runner) withhold(ctx context.Context, sab scenario.Sabotage, undo *undoList) error {
	object, err := r.api.Find(ctx, sab.In, sab.Withhold, sab.Namespace)
	if err != nil {
		return err
	}
	if object == nil {
		return fmt.Errorf("there is no %s in %s", sab.Withhold, sab.In)
	}
	m, err := r.api.MappingOf(ctx, sab.In, object.GroupVersionKind())
	if err != nil {
		return err
	}
	if err := r.refuse(ctx, sab, m, object, undo); err != nil {
		return err
	}
	if err := r.remove(ctx, sab.In, m, object.GetNamespace(), object.GetName()); err != nil {
		return err
	}
	return until(ctx, forgetTime, "some host still reports that it has applied it", func(ctx context.Context) (bool, error) {
		return r.forgotten(ctx, sab.In, object)
	})
}

// forgetTime is how long hosts may take to undo what an object asked for.
const forgetTime = 30 * time.Second

// forgotten tells whether no host of a cluster reports any more that it was
// asked to apply an object. Hosts report after they have acted: a row that
// looked earlier could pass on what is about to go.
func (r *Runner) forgotten(ctx context.Context, cluster string, object *unstructured.Unstructured) (bool, error) {
	hosts, err := r.hosts(ctx, cluster)
	return err == nil && !slices.ContainsFunc(hosts, func(h unstructured.Unstructured) bool {
		_, ok := reportOn(&h, object)
		return ok
	}), err
}

// hosts are the objects in which the hosts of a cluster report: nodes and
// gateways.
func (r *Runner) hosts(ctx context.Context, cluster string) ([]unstructured.Unstructured, error) {
	var out []unstructured.Unstructured
	for _, kind := range []string{"internalnode", "gatewayreport"} {
		hosts, err := r.api.List(ctx, cluster, kind)
		if err != nil {
			return nil, err
		}
		out = append(out, hosts...)
	}
	return out, nil
}

// reportOn returns what a host reports on an object, if it does.
func reportOn(host, object *unstructured.Unstructured) (map[string]any, bool) {
	applied, _, _ := unstructured.NestedSlice(host.Object, "status", "applied")
	for _, a := range applied {
		m, ok := a.(map[string]any)
		if ok && m["kind"] == object.GetKind() && m["name"] == object.GetName() && m["namespace"] == object.GetNamespace() {
			return m, true
		}
	}
	return nil, false
}

// inForceTime is how long a policy may take; 119 ms were measured.
const inForceTime = 15 * time.Second

// comebackTime is how long the controller may take to make the object again. It
// retries with growing pauses, so it is woken until it has.
const (
	comebackTime = 60 * time.Second
	wakeInterval = 300 * time.Millisecond
)

// wake writes an annotation to what the controller watches and takes it away
// again: it makes a pass at once instead of after its pause.
func (r *Runner) wake(ctx context.Context, cluster string) error {
	m, err := r.api.Mapping(ctx, cluster, "configmap")
	if err != nil {
		return err
	}
	res, err := r.api.Resource(ctx, cluster, m, deploy.Namespace)
	if err != nil {
		return err
	}
	for _, value := range []string{`"now"`, "null"} {
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"isthmus-lab/wake":%s}}}`, value)
		_, err := res.Patch(ctx, networkingv1beta1.ClusterIDConfigMap, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: fieldOwner})
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Runner) refuse(ctx context.Context, sab scenario.Sabotage, m *meta.RESTMapping, object *unstructured.Unstructured, undo *undoList) error {
	policy, binding := policyFor(m, object)
	for _, o := range []runtime.Object{policy, binding} {
		u, err := toUnstructured(o)
		if err != nil {
			return err
		}
		pm, err := r.api.MappingOf(ctx, sab.In, u.GroupVersionKind())
		if err != nil {
			return err
		}
		res, err := r.api.Resource(ctx, sab.In, pm, "")
		if err != nil {
			return err
		}
		if _, err := res.Apply(ctx, u.GetName(), u, metav1.ApplyOptions{FieldManager: fieldOwner, Force: true}); err != nil {
			return err
		}
		undo.add(func(ctx context.Context) error { return r.remove(ctx, sab.In, pm, "", u.GetName()) })
	}
	res, err := r.api.Resource(ctx, sab.In, m, object.GetNamespace())
	if err != nil {
		return err
	}
	probe := object.DeepCopy()
	probe.SetResourceVersion("")
	probe.SetUID("")
	probe.SetManagedFields(nil)
	// Undone last first, so this runs before the policy is removed; what must
	// come back is waited for at the very end. What the chart installs nobody
	// makes again: that is for who installed it.
	installed := object.GetLabels()["app.kubernetes.io/managed-by"] == "Helm"
	var woken time.Time
	back := func(ctx context.Context) error {
		return until(ctx, comebackTime, fmt.Sprintf("%s has not come back to %s", sab.Withhold, sab.In), func(ctx context.Context) (bool, error) {
			_, err := res.Get(ctx, object.GetName(), metav1.GetOptions{})
			if !apierrors.IsNotFound(err) {
				return err == nil, err
			}
			if installed {
				_, err = res.Create(ctx, probe, metav1.CreateOptions{FieldManager: fieldOwner})
				if err != nil && !strings.Contains(err.Error(), policyName) { // which may be in force a moment longer
					return false, err
				}
				return false, nil
			}
			if time.Since(woken) < wakeInterval {
				return false, nil
			}
			woken = time.Now()
			return false, r.wake(ctx, sab.In)
		})
	}
	*undo = append(undoList{back}, *undo...)

	return until(ctx, inForceTime, "the policy is not in force", func(ctx context.Context) (bool, error) {
		_, err := res.Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil && strings.Contains(err.Error(), policyName), nil
	})
}

// policyFor makes the policy that refuses to create one object.
func policyFor(m *meta.RESTMapping, object *unstructured.Unstructured) (*admissionv1.ValidatingAdmissionPolicy, *admissionv1.ValidatingAdmissionPolicyBinding) {
	fail := admissionv1.Fail
	exact := admissionv1.Exact
	condition := fmt.Sprintf("object.metadata.name == %q", object.GetName())
	if ns := object.GetNamespace(); ns != "" {
		condition += fmt.Sprintf(" && object.metadata.namespace == %q", ns)
	}
	policy := &admissionv1.ValidatingAdmissionPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: "admissionregistration.k8s.io/v1", Kind: "ValidatingAdmissionPolicy"},
		ObjectMeta: metav1.ObjectMeta{Name: policyName},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			FailurePolicy: &fail,
			MatchConstraints: &admissionv1.MatchResources{
				MatchPolicy: &exact,
				ResourceRules: []admissionv1.NamedRuleWithOperations{{
					RuleWithOperations: admissionv1.RuleWithOperations{
						Operations: []admissionv1.OperationType{admissionv1.Create},
						Rule: admissionv1.Rule{
							APIGroups:   []string{m.Resource.Group},
							APIVersions: []string{m.Resource.Version},
							Resources:   []string{m.Resource.Resource},
						},
					},
				}},
			},
			MatchConditions: []admissionv1.MatchCondition{{Name: "this-one", Expression: condition}},
			Validations: []admissionv1.Validation{{
				Expression: "false",
				Message:    policyName + ": the lab withholds this object",
			}},
		},
	}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{
		TypeMeta:   metav1.TypeMeta{APIVersion: "admissionregistration.k8s.io/v1", Kind: "ValidatingAdmissionPolicyBinding"},
		ObjectMeta: metav1.ObjectMeta{Name: policyName},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName:        policyName,
			ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		},
	}
	return policy, binding
}

func toUnstructured(o runtime.Object) (*unstructured.Unstructured, error) {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return nil, err
	}
	delete(m, "status")
	u := &unstructured.Unstructured{Object: m}
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	return u, nil
}
