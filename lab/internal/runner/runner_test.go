package runner

import (
	"errors"
	"regexp"
	"strings"
	"testing"

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
		assert.Equal(t, len(errorLines(world.Log{Name: name, Text: text}, s)), want, name)
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
		{bad, "known", errors.New("the agent is gone"), report.Infra},
	} {
		got, _ := verdict(&tc.row, tc.xfail, tc.err)
		assert.Equal(t, got, tc.want)
	}
}

// TestSabotageVerdict: a sabotage that was noticed at its step passes.
func TestSabotageVerdict(t *testing.T) {
	sab := scenario.Sabotage{Withhold: "routeconfiguration/x", In: "milan", Fails: "second"}
	red := func(name string) report.Step { return report.Step{Name: name, Failures: []report.Fault{{}}} }
	for _, tc := range []struct {
		steps []report.Step
		err   error
		want  report.Verdict
		why   string
	}{
		{[]report.Step{{Name: "first"}, red("second")}, nil, report.Pass, ""},
		{[]report.Step{{Name: "first"}, {Name: "second"}}, nil, report.Fail, "it stayed green: nothing of the scenario depends on withhold routeconfiguration/x in milan"},
		{[]report.Step{red("first")}, nil, report.Fail, `it failed at "first" instead of at "second"`},
		{[]report.Step{red("second")}, errors.New("the agent is gone"), report.Infra, "the agent is gone"},
	} {
		got, why := sabotageVerdict(&report.Row{Steps: tc.steps}, sab, tc.err)
		assert.Equal(t, got, tc.want)
		assert.Equal(t, why, tc.why)
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
