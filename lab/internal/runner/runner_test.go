package runner

import (
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

func TestErrorLines(t *testing.T) {
	s := &scenario.Scenario{AllowLogs: []*regexp.Regexp{regexp.MustCompile(`connection refused`)}}
	text := strings.Join([]string{
		`time=1 level=INFO msg="no error"`,
		`time=2 level=ERROR msg=pass err="dial: connection refused"`,
		`{"level":"ERROR","msg":"no such device"}`,
		`panic: runtime error`,
	}, "\n")
	for name, want := range map[string]int{
		"milan/node-1/log/liqo_isthmus-node-abcde_1-2-3/node/0":         2,
		"milan/node-2/log/liqo-tenant-rome_gw-rome-xyz_4-5-6/gateway/7": 2,
		"milan/node-1/log/default_web_7-8-9/probe/0":                    0, // not the appliance
		"milan/node-1/log/kube-proxy":                                   0,
		"milan/kube-apiserver":                                          0,
	} {
		assert.Equal(t, len(errorLines(world.Log{Name: name, Text: text}, s, false)), want, name)
	}
}

// On a slow machine the API server may be late for a controller's lease, and for
// nothing else.
func TestLateLease(t *testing.T) {
	const name = "milan/node-1/log/liqo_isthmus-controller-abcde_1-2-3/controller/0"
	for text, want := range map[string][2]int{ // on a slow machine, and elsewhere
		`level=ERROR msg="Error retrieving lease lock" err="Get \"https://10.96.0.1/…\": context deadline exceeded"`: {0, 1},
		`level=ERROR msg="Unexpected error when reading response body" err="context deadline exceeded"`:              {0, 1},
		`level=ERROR msg="Unexpected error when reading response body" err="unexpected EOF"`:                         {1, 1},
		`level=ERROR msg="error retrieving resource lock" err="context deadline exceeded"`:                           {0, 1},
		`level=ERROR msg="Failed to release lease" err="Put \"https://10.96.0.1/…\": context deadline exceeded"`:     {0, 1},
		`level=ERROR msg="Error retrieving lease lock" err="leases is forbidden"`:                                    {1, 1},
		`level=ERROR msg="pass failed, trying again" err="context deadline exceeded"`:                                {1, 1},
	} {
		for i, slow := range []bool{true, false} {
			assert.Equal(t, len(errorLines(world.Log{Name: name, Text: text}, &scenario.Scenario{}, slow)), want[i], "%s, slow: %v", text, slow)
		}
	}
}

func TestVerdict(t *testing.T) {
	bad := report.Row{Steps: []report.Step{{}, {Failures: []report.Fault{{}}}}}
	for _, tc := range []struct {
		row   report.Row
		xfail string
		err   error
		want  report.Verdict
	}{
		{report.Row{}, "", nil, report.Pass},
		{bad, "", nil, report.Fail},
		{bad, "known", nil, report.XFail},
		{report.Row{}, "known", nil, report.XPass},
		{report.Row{}, "", errors.New("the agent is gone"), report.Infra},
		{report.Row{}, "known", errors.New("the agent is gone"), report.Infra},
		// It failed before the lab did: it is not tried again.
		{bad, "", errors.New("the agent is gone"), report.Fail},
		{bad, "known", errors.New("the agent is gone"), report.XFail},
	} {
		got, _ := verdict(&tc.row, tc.xfail, tc.err)
		assert.Equal(t, got, tc.want)
	}
}

// TestSabotageVerdict: a sabotage passes when the expectation fails first that it
// names, and nothing else is proof.
func TestSabotageVerdict(t *testing.T) {
	sc, err := scenario.Parse("scenarios/x.yaml", []byte(`
description: x
topology: two-clusters
steps:
  - name: first
    expect:
      reach: { from: milan/web, to: rome/web }
  - name: second
    expect:
      reach: { from: milan/web, to: rome/probe }
      source: { seenBy: rome/probe, is: milan/web }
sabotage:
  - { withhold: routeconfiguration/x, in: milan, fails: second, expectation: source }
`), "../../../topologies")
	assert.NilError(t, err)
	sab, steps := sc.Sabotage[0], sc.Build(sc.Rows[0])
	fault := report.Fault{Expectation: "milan/web reaches rome/web by tcp", Got: "no answer"}
	gone := errors.New("the agent is gone")
	for _, tc := range []struct {
		name string
		seen sabotaged
		err  error
		want report.Verdict
		why  string
	}{
		{"it fails", sabotaged{step: "second", index: 1}, nil, report.Pass, ""},
		{"green", sabotaged{}, nil, report.Fail, "the row passed all the same: none of its expectations depends on withhold routeconfiguration/x in milan"},
		{"another step", sabotaged{step: "first", index: 0, fault: fault}, nil, report.Fail,
			`"milan/web reaches rome/web by tcp" failed at "first" (no answer), instead of "rome/probe sees milan/web" at "second"`},
		{"another expectation", sabotaged{step: "second", index: 0, fault: fault}, nil, report.Fail,
			`"milan/web reaches rome/web by tcp" failed at "second" (no answer), instead of "rome/probe sees milan/web" at "second"`},
		{"an action", sabotaged{step: "second", index: failedAction, fault: report.Fault{Got: "exit code 1"}}, nil, report.Fail,
			`an action failed at "second" (exit code 1), which proves nothing: the sabotage must let the row act, and break "rome/probe sees milan/web" at "second"`},
		{"not watched for long enough", sabotaged{step: "second", index: 1, pending: true}, nil, report.Fail,
			`"rome/probe sees milan/web" was not watched for long enough to say that it failed: give the step "second" more time`},
		{"red afterwards", sabotaged{step: "second", index: 1, after: "it is red still"}, nil, report.Fail, "it is red still"},
		{"the lab fails", sabotaged{}, gone, report.Infra, "the agent is gone"},
		{"the lab fails afterwards", sabotaged{step: "second", index: 1}, gone, report.Infra, "the agent is gone"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, why := tc.seen.verdict(steps, sab, tc.err)
			assert.Equal(t, got, tc.want)
			assert.Equal(t, why, tc.why)
		})
	}
}

// TestBudget: what is sabotaged is looked at for longer than it took to hold.
func TestBudget(t *testing.T) {
	for _, tc := range []struct{ green, within, want time.Duration }{
		{100 * time.Millisecond, 10 * time.Second, leastBudget},
		{3 * time.Second, 10 * time.Second, 6 * time.Second},
		{12 * time.Second, 20 * time.Second, 20 * time.Second},
	} {
		assert.Equal(t, budget(leastBudget, tc.green, tc.within), tc.want)
	}
}

// TestReportOn: an object is looked for in a host's report by its kind,
// namespace and name.
func TestReportOn(t *testing.T) {
	object := func(kind, namespace, name string) *unstructured.Unstructured {
		o := &unstructured.Unstructured{Object: map[string]any{"kind": kind}}
		o.SetNamespace(namespace)
		o.SetName(name)
		return o
	}
	host := &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"applied": []any{
		map[string]any{"kind": "RouteConfiguration", "namespace": "liqo", "name": "other", "ok": true},
		map[string]any{"kind": "RouteConfiguration", "namespace": "liqo-tenant-rome", "name": "rome-gw-ext", "ok": true},
	}}}}
	for _, tt := range []struct {
		host   *unstructured.Unstructured
		object *unstructured.Unstructured
		want   bool
	}{
		{host, object("RouteConfiguration", "liqo-tenant-rome", "rome-gw-ext"), true},
		{host, object("FirewallConfiguration", "liqo-tenant-rome", "rome-gw-ext"), false},
		{host, object("RouteConfiguration", "liqo-tenant-milan", "rome-gw-ext"), false},
		{host, object("RouteConfiguration", "liqo-tenant-rome", "rome-node-gw"), false},
		{&unstructured.Unstructured{Object: map[string]any{}}, object("RouteConfiguration", "liqo", "other"), false},
	} {
		_, got := reportOn(tt.host, tt.object)
		assert.Equal(t, got, tt.want, "%v", tt.object)
	}
}

// TestPolicy: it refuses one object by name and namespace, and nothing else.
func TestPolicy(t *testing.T) {
	o := &unstructured.Unstructured{Object: map[string]any{}}
	o.SetName("rome-node-gw")
	o.SetNamespace("liqo-tenant-rome")
	policy, binding := policyFor(&meta.RESTMapping{
		Resource: schema.GroupVersionResource{Group: "networking.liqo.io", Version: "v1beta1", Resource: "routeconfigurations"},
	}, o)
	assert.Equal(t, policy.Spec.MatchConditions[0].Expression, `object.metadata.name == "rome-node-gw" && object.metadata.namespace == "liqo-tenant-rome"`)
	assert.DeepEqual(t, policy.Spec.MatchConstraints.ResourceRules[0].Resources, []string{"routeconfigurations"})
	assert.Equal(t, binding.Spec.PolicyName, policy.Name)
	u, err := toUnstructured(policy)
	assert.NilError(t, err)
	assert.Equal(t, u.GetKind(), "ValidatingAdmissionPolicy")
	assert.Equal(t, u.GetCreationTimestamp(), metav1.Time{})
}
