package k8s

import (
	"os"
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	lua "github.com/yuin/gopher-lua"
	"gotest.tools/v3/assert"
	"sigs.k8s.io/yaml"
)

// TestHealthForGit runs what README.md gives to Argo CD and Flux on objects that are sound,
// refused, and not looked at since they changed.
func TestHealthForGit(t *testing.T) {
	text, err := os.ReadFile("README.md")
	assert.NilError(t, err)
	_, section, ok := strings.Cut(string(text), "### From Git")
	assert.Assert(t, ok)
	blocks := strings.Split(section, "```")
	var argo struct {
		Customizations string `json:"resource.customizations"`
	}
	assert.NilError(t, yaml.UnmarshalStrict([]byte(blocks[1]), &argo))
	var of map[string]map[string]string
	assert.NilError(t, yaml.UnmarshalStrict([]byte(argo.Customizations), &of))
	script := of["networking.liqo.io/*"]["health.lua"]
	assert.Assert(t, script != "")
	var flux struct {
		Spec struct {
			Wait             bool
			HealthCheckExprs []struct{ APIVersion, Kind, Current, Failed string }
		}
	}
	assert.NilError(t, yaml.UnmarshalStrict([]byte(blocks[3]), &flux))
	var kinds []string
	for _, e := range flux.Spec.HealthCheckExprs {
		kinds = append(kinds, e.Kind)
	}
	assert.DeepEqual(t, kinds, []string{"Configuration", "GatewayServer", "GatewayClient", "PublicKey"})

	for _, tt := range []struct {
		name, status    string
		argo            string
		current, failed bool
	}{
		{"not looked at yet", `{}`, "Progressing", false, false},
		{"sound", `{conditions: [{type: Accepted, status: "True", observedGeneration: 2}]}`, "Healthy", true, false},
		{"sound before it changed", `{conditions: [{type: Accepted, status: "True", observedGeneration: 1}]}`, "Progressing", false, false},
		{"refused", `{conditions: [{type: RolledOut, status: "True", observedGeneration: 2}, {type: Accepted, status: "False", reason: InvalidKey, observedGeneration: 2}]}`, "Degraded", false, true},
		{"it takes time", `{conditions: [{type: Accepted, status: "True", observedGeneration: 2}, {type: RolledOut, status: "False", reason: WaitingForTurn, observedGeneration: 2}]}`, "Progressing", false, false},
		{"refused before it changed", `{conditions: [{type: Accepted, status: "False", reason: InvalidKey, observedGeneration: 1}]}`, "Progressing", false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var object map[string]any
			assert.NilError(t, yaml.Unmarshal([]byte("{metadata: {generation: 2}, status: "+tt.status+"}"), &object))
			assert.Equal(t, runLua(t, script, object), tt.argo)
			for _, e := range flux.Spec.HealthCheckExprs {
				assert.Equal(t, e.APIVersion, "networking.liqo.io/v1beta1")
				assert.Equal(t, runCEL(t, e.Current, object), tt.current, e.Kind)
				assert.Equal(t, runCEL(t, e.Failed, object), tt.failed, e.Kind)
			}
		})
	}
}

// runLua returns the status that a health script of Argo CD gives an object, which it has as obj.
func runLua(t *testing.T, script string, object map[string]any) string {
	l := lua.NewState()
	defer l.Close()
	l.SetGlobal("obj", toLua(l, object))
	assert.NilError(t, l.DoString(script))
	result, ok := l.Get(-1).(*lua.LTable)
	assert.Assert(t, ok, "the script returns %v", l.Get(-1))
	return result.RawGetString("status").String()
}

func toLua(l *lua.LState, value any) lua.LValue {
	switch v := value.(type) {
	case map[string]any:
		t := l.NewTable()
		for key, x := range v {
			t.RawSetString(key, toLua(l, x))
		}
		return t
	case []any:
		t := l.NewTable()
		for _, x := range v {
			t.Append(toLua(l, x))
		}
		return t
	case float64:
		return lua.LNumber(v)
	case string:
		return lua.LString(v)
	}
	return lua.LNil
}

// runCEL evaluates an expression of Flux, which has an object's fields as variables.
func runCEL(t *testing.T, expression string, object map[string]any) bool {
	env, err := cel.NewEnv(cel.Variable("metadata", cel.DynType), cel.Variable("status", cel.DynType))
	assert.NilError(t, err)
	ast, issues := env.Compile(expression)
	assert.NilError(t, issues.Err())
	program, err := env.Program(ast)
	assert.NilError(t, err)
	value, _, err := program.Eval(object)
	assert.NilError(t, err)
	return value.Value().(bool)
}
