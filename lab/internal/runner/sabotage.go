package runner

import (
	"cmp"
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

// leastBudget is the least time for which a sabotaged expectation is looked at,
// where the machine is not emulated: four times what a probe waits for its answer.
const leastBudget = 4 * time.Second

// budget is how long a sabotaged expectation is looked at before it has failed,
// when it took so long to hold in the row without the sabotage: twice that, and
// no longer than the step says. That was on this machine, as slow as it is.
func budget(least, green, within time.Duration) time.Duration {
	return min(within, max(least, 2*green))
}

// RunSabotage breaks what a sabotage names, runs the row and returns whether
// the expectation failed that the sabotage names: that is the verdict pass. The row
// was green before, without the sabotage and within the time that the
// expectation is given here. A row that only looks must be green again
// afterwards.
func (r *Runner) RunSabotage(ctx context.Context, s *scenario.Scenario, sr scenario.Row, sab scenario.Sabotage) report.Row {
	r.setup()
	out := report.Row{Name: sr.Name, Sabotage: sab.String()}
	start := time.Now()
	out.Verdict, out.Reason = r.greenBefore(ctx, s, sr)
	// What the steps showed is bundled before anything is undone; what undoing shows, after it.
	var bundled evidence
	if out.Verdict == report.Pass {
		r.say("%s: %s", sr.Name, sab)
		judge := func(seen sabotaged, err error) {
			out.Took = report.Duration(time.Since(start))
			out.Verdict, out.Reason = seen.verdict(s.Build(sr), sab, err)
			bundled.write(ctx, r, &out)
		}
		judge(r.runSabotage(ctx, s, sr, sab, &out, judge))
	}
	out.Took = report.Duration(time.Since(start))
	bundled.write(ctx, r, &out)
	out.Reason = bundled.reason(out.Reason)
	return out
}

// greenBefore runs a row without sabotage unless it has passed already on this
// lab. What it returns when the row has not passed is the sabotage's verdict.
func (r *Runner) greenBefore(ctx context.Context, s *scenario.Scenario, sr scenario.Row) (report.Verdict, string) {
	if r.green[sr.Name] != nil {
		return report.Pass, ""
	}
	switch out := r.Run(ctx, s, sr); out.Verdict {
	case report.Pass:
		return report.Pass, ""
	case report.Infra:
		return report.Infra, out.Reason
	default:
		return report.Fail, fmt.Sprintf("without the sabotage the row is not green either (%s: %s), so the sabotage proves nothing: make the row pass first", out.Verdict, out.FirstFault())
	}
}

// aimedAt says which expectations a sabotage must break.
func aimedAt(steps []scenario.Step, sab scenario.Sabotage) string {
	var all []string
	for _, st := range steps {
		if st.Name != sab.Fails {
			continue
		}
		for _, i := range sab.Expectation {
			all = append(all, fmt.Sprintf("%q", st.Expect[i]))
		}
	}
	return strings.Join(all, " or ")
}

// What a sabotaged row showed.
type sabotaged struct {
	step    string // that failed first; empty: none did
	index   int    // of the expectation in it that failed first, or failedAction
	fault   report.Fault
	pending bool // it had not been watched for long enough
	// after is what was wrong when the sabotage had been undone.
	after string
}

// noticed tells whether the expectation failed that the sabotage names.
func (b sabotaged) noticed(sab scenario.Sabotage) bool {
	return b.step == sab.Fails && slices.Contains(sab.Expectation, b.index) && !b.pending
}

func (b sabotaged) verdict(steps []scenario.Step, sab scenario.Sabotage, err error) (report.Verdict, string) {
	aimed := aimedAt(steps, sab)
	var vain *vainError
	switch {
	case errors.As(err, &vain):
		return report.Fail, vain.Error()
	case err != nil && !b.noticed(sab):
		return report.Infra, err.Error()
	case b.step == "":
		return report.Fail, "the row passed all the same: none of its expectations depends on " + sab.String()
	case b.index == failedAction:
		return report.Fail, fmt.Sprintf("an action failed at %q (%s), which proves nothing: the sabotage must let the row act, and break %s at %q", b.step, b.fault.Got, aimed, sab.Fails)
	case b.step != sab.Fails || !slices.Contains(sab.Expectation, b.index):
		return report.Fail, fmt.Sprintf("%q failed at %q (%s), instead of %s at %q", b.fault.Expectation, b.step, b.fault.Found(), aimed, sab.Fails)
	case b.pending:
		return report.Fail, fmt.Sprintf("%s was not watched for long enough to say that it failed: give the step %q more time", aimed, sab.Fails)
	case b.after != "":
		return report.Fail, b.after
	case err != nil:
		return report.Infra, err.Error()
	}
	return report.Pass, ""
}

// A vainError is why a sabotage could not be made as the scenario says.
type vainError struct{ err error }

func (e *vainError) Error() string {
	return "it could not be made, so it proves nothing: " + e.err.Error()
}

func (e *vainError) Unwrap() error { return e.err }

// runSabotage breaks something, runs the row's steps and mends what was broken. done is told
// what the steps showed before anything is undone.
func (r *Runner) runSabotage(ctx context.Context, s *scenario.Scenario, sr scenario.Row, sab scenario.Sabotage, out *report.Row, done func(sabotaged, error)) (seen sabotaged, err error) {
	if err := r.settle(ctx, out); err != nil {
		return seen, err
	}
	row, err := r.newRow(ctx, s)
	if err != nil {
		return seen, err
	}
	steps := r.steps(s, sr)
	if err := r.markEvents(ctx, row, steps); err != nil {
		return seen, err
	}
	if acts(steps) {
		if row.Before, err = r.lookBefore(ctx, s); err != nil {
			return seen, err
		}
	}
	var undo undoList
	broken := func() error { return r.sabotage(ctx, row, sab, &undo, out) }
	if sab.Before == "" {
		err = broken()
	}
	// Not everything that is withheld is reported as applied before. Steps
	// that only look can look again until what is broken shows.
	looks := !acts(upTo(steps, sab.Fails))
	for given := r.allowAction(showTime); err == nil; {
		out.Steps = nil
		seen, err = r.sabotagedSteps(ctx, s, row, steps, sab, broken, &undo, out)
		if seen.noticed(sab) || sab.Before != "" || !looks || given.over(0) {
			break
		}
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(showInterval):
		}
	}
	done(seen, err)
	closeFlows(row)
	failures := len(out.Steps)
	restored, restoreErr := r.restore(ctx, out, &undo, true)
	err = errors.Join(err, restoreErr)
	switch {
	case err != nil || ctx.Err() != nil:
		return seen, errors.Join(err, ctx.Err())
	case !restored:
		seen.after = "it was noticed, but could not be undone: " + out.Steps[failures].Failures[0].Got
	case !acts(steps):
		if seen.noticed(sab) {
			seen.after, err = r.greenAgain(ctx, s, sr, sab)
		}
	default:
		seen.after, err = r.asBefore(ctx, row)
	}
	if seen.after != "" && r.spoiled == nil {
		r.spoiled = fmt.Errorf("%s: %s: %s", sr.Name, sab, seen.after)
	}
	return seen, err
}

// asBefore compares what there is with what there was before a sabotage, which has
// been undone. It returns what is not the same: what stays of one sabotage would
// be taken for the effect of the next.
func (r *Runner) asBefore(ctx context.Context, row *expect.Row) (string, error) {
	res, err := r.await(ctx, row, expect.Checked{Name: "gone", Expectation: &expect.Gone{}}, nil, r.allow(r.patient(leftoverTime)), 1)
	if err != nil || res.OK {
		return "", err
	}
	return fmt.Sprintf("what undoes it does not make everything as it was: %s\n%s", res.Got, res.Why), nil
}

// greenAgain runs the steps of a row up to the one that a sabotage has broken:
// without the sabotage they hold. It returns what does not.
func (r *Runner) greenAgain(ctx context.Context, s *scenario.Scenario, sr scenario.Row, sab scenario.Sabotage) (string, error) {
	row, err := r.newRow(ctx, s)
	if err != nil {
		return "", err
	}
	steps := r.steps(s, sr)
	if err := r.markEvents(ctx, row, steps); err != nil {
		return "", err
	}
	for _, st := range steps {
		rs := r.step(ctx, s, row, st, nil, nil)
		if rs.err != nil {
			return "", rs.err
		}
		if len(rs.Failures) > 0 {
			f := rs.Failures[0]
			return fmt.Sprintf("%q fails at %q after the sabotage was undone, too, so the sabotage may not be why: want %s, got %s", f.Expectation, st.Name, f.Want, f.Got), nil
		}
		if st.Name == sab.Fails {
			break
		}
	}
	return "", nil
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
	switch {
	case err == nil:
		return nil
	case ofLab(ctx, err):
		return fmt.Errorf("%s: %w", sab, err)
	}
	return &vainError{err}
}

// showTime is how long what was withheld may take to show in steps that only
// look.
const showTime = 20 * time.Second

// showInterval is the pause between two looks at it.
const showInterval = 100 * time.Millisecond

// acts tells whether a step does something.
func acts(steps []scenario.Step) bool {
	return slices.ContainsFunc(steps, func(st scenario.Step) bool { return len(st.Do) > 0 })
}

// upTo are the steps up to one and with it.
func upTo(steps []scenario.Step, name string) []scenario.Step {
	i := slices.IndexFunc(steps, func(st scenario.Step) bool { return st.Name == name })
	return steps[:i+1]
}

// sabotagedSteps runs the steps up to the first that fails, or that should.
func (r *Runner) sabotagedSteps(ctx context.Context, s *scenario.Scenario, row *expect.Row, steps []scenario.Step, sab scenario.Sabotage, broken func() error, undo *undoList, out *report.Row) (sabotaged, error) {
	for _, st := range steps {
		if st.Name == sab.Before {
			if err := broken(); err != nil {
				return sabotaged{}, err
			}
		}
		var at aim
		if st.Name == sab.Fails {
			at = aim{}
			for _, i := range sab.Expectation {
				at[i] = budget(r.patient(leastBudget), r.greenIn(out.Name, st.Name, i), st.Within)
				// Twice what the expectation took with all its probes is enough for two
				// of them.
				row.ProbeTimeout = min(cmp.Or(row.ProbeTimeout, expect.ProbeTimeout), at[i]/aimLooks)
			}
		}
		rs := r.step(ctx, s, row, st, at, undo)
		out.Steps = append(out.Steps, rs.Step)
		if rs.err != nil {
			return sabotaged{}, rs.err
		}
		if len(rs.Failures) > 0 {
			return sabotaged{step: st.Name, index: rs.failed[0], fault: rs.Failures[0], pending: rs.pending}, nil
		}
		if at != nil {
			break
		}
	}
	return sabotaged{}, nil
}

// greenIn is how long an expectation took to hold in the last run of a row that
// passed.
func (r *Runner) greenIn(row, step string, index int) time.Duration {
	took := r.green[row][step]
	if index >= len(took) {
		return 0
	}
	return took[index]
}

func (r *Runner) plant(ctx context.Context, row *expect.Row, p *scenario.Plant, undo *undoList) error {
	a := &scenario.Exec{On: p.On, Run: p.Run, Undo: p.Undo}
	n := len(*undo)
	_, err := r.execOnce(ctx, row, a, undo)
	undo.name(n, a)
	return err
}

// withhold makes the API servers of clusters refuse one object by its name, then
// deletes it: the live controllers can't bring it back, and the live daemons take
// its effects away themselves.
func (r *Runner) withhold(ctx context.Context, sab scenario.Sabotage, undo *undoList) error {
	for _, cluster := range sab.In {
		if err := r.withholdIn(ctx, cluster, sab, undo); err != nil {
			return err
		}
	}
	return nil
}

func (r *Runner) withholdIn(ctx context.Context, cluster string, sab scenario.Sabotage, undo *undoList) error {
	object, err := r.api.Find(ctx, cluster, sab.Withhold, sab.Namespace)
	if err != nil {
		return err
	}
	if object == nil {
		return fmt.Errorf("there is no %s in %s", sab.Withhold, cluster)
	}
	m, err := r.api.MappingOf(ctx, cluster, object.GroupVersionKind())
	if err != nil {
		return err
	}
	if err := r.refuse(ctx, cluster, sab.Withhold, m, object, undo); err != nil {
		return err
	}
	if err := r.remove(ctx, cluster, m, object.GetNamespace(), object.GetName()); err != nil {
		return err
	}
	return until(ctx, r.allowAction(forgetTime), "some host still reports that it has applied it", func(ctx context.Context) (bool, error) {
		return r.forgotten(ctx, cluster, object)
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

func (r *Runner) refuse(ctx context.Context, cluster, name string, m *meta.RESTMapping, object *unstructured.Unstructured, undo *undoList) error {
	policy, binding := policyFor(m, object)
	for _, o := range []runtime.Object{policy, binding} {
		u, err := toUnstructured(o)
		if err != nil {
			return err
		}
		pm, err := r.api.MappingOf(ctx, cluster, u.GroupVersionKind())
		if err != nil {
			return err
		}
		res, err := r.api.Resource(ctx, cluster, pm, "")
		if err != nil {
			return err
		}
		if _, err := res.Apply(ctx, u.GetName(), u, metav1.ApplyOptions{FieldManager: fieldOwner, Force: true}); err != nil {
			return err
		}
		undo.add(func(ctx context.Context) error { return r.remove(ctx, cluster, pm, "", u.GetName()) })
	}
	res, err := r.api.Resource(ctx, cluster, m, object.GetNamespace())
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
		return until(ctx, r.allowAction(comebackTime), fmt.Sprintf("%s has not come back to %s", name, cluster), func(ctx context.Context) (bool, error) {
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
			return false, r.wake(ctx, cluster)
		})
	}
	*undo = append(undoList{{do: back}}, *undo...)

	unlabelled := probe.DeepCopy() // other policies refuse some labels
	unlabelled.SetLabels(nil)
	return until(ctx, r.allowAction(inForceTime), "the policy is not in force", func(ctx context.Context) (bool, error) {
		_, err := res.Create(ctx, unlabelled, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
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
