package main

import (
	"os"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"sigs.k8s.io/yaml"
)

// The chart passes only flags that exist, and knows all commands.
func TestChartFlags(t *testing.T) {
	text, err := os.ReadFile("../../../k8s/testdata/full.yaml")
	assert.NilError(t, err)
	seen := map[string]int{}
	var walk func(node any)
	walk = func(node any) {
		switch n := node.(type) {
		case []any:
			for _, v := range n {
				walk(v)
			}
		case map[string]any:
			if args, ok := n["args"].([]any); ok {
				seen[args[0].(string)]++
				checkArgs(t, args)
			}
			for _, v := range n {
				walk(v)
			}
		}
	}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var o any
		assert.NilError(t, yaml.Unmarshal([]byte(doc), &o))
		walk(o)
	}
	assert.DeepEqual(t, seen, map[string]int{"controller": 1, "node": 1, "gateway": 4, "netns": 2, "teardown": 1})
}

func checkArgs(t *testing.T, args []any) {
	t.Helper()
	root := newRootCommand(os.Stderr)
	cmd, _, err := root.Find([]string{args[0].(string)})
	assert.NilError(t, err)
	assert.Assert(t, cmd != root, "no command %v", args[0])
	for _, a := range args[1:] {
		name, value, _ := strings.Cut(strings.TrimPrefix(a.(string), "--"), "=")
		f := cmd.Flags().Lookup(name)
		if f == nil {
			f = root.PersistentFlags().Lookup(name)
		}
		if !assert.Check(t, f != nil, "%v has no flag --%s", args[0], name) {
			continue
		}
		if value != "" && !strings.ContainsAny(value, "{$") {
			assert.Check(t, is.Nil(f.Value.Set(value)), "%v --%s=%s", args[0], name, value)
		}
	}
}
