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
		"milan/liqo/isthmus-node-abcde/node":         2,
		"milan/liqo-tenant-rome/gw-rome-xyz/gateway": 2,
		"milan/default/web/probe":                    0, // not the appliance
		"milan/kube-apiserver":                       0,
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
