package cli

import (
	"testing"

	"gotest.tools/v3/assert"
	"sigs.k8s.io/yaml"
)

// What is null is taken back, wherever it is, and what is merged stays what it was:
// Helm is told the same values afterwards.
func TestMergeValues(t *testing.T) {
	parse := func(text string) (out map[string]any) {
		t.Helper()
		assert.NilError(t, yaml.Unmarshal([]byte(text), &out))
		return out
	}
	for _, tt := range []struct{ name, before, given, want string }{
		{"nothing was given", "null", "{a: 1}", "{a: 1}"},
		{"nothing is given", "{a: 1}", "null", "{a: 1}"},
		{"one beside another", "{a: {b: 1}}", "{a: {c: [x]}}", "{a: {b: 1, c: [x]}}"},
		{"another value", "{a: {b: [[x, y]], c: 1}}", "{a: {b: [[z, y]]}}", "{a: {b: [[z, y]], c: 1}}"},
		{"null", "{a: 1, b: 2}", "{a: null}", "{b: 2}"},
		{"null inside", "{a: {b: [[x, y]], c: 1}}", "{a: {b: null}}", "{a: {c: 1}}"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before, given := parse(tt.before), parse(tt.given)
			assert.DeepEqual(t, mergeValues(before, given), parse(tt.want))
			assert.DeepEqual(t, before, parse(tt.before))
			assert.DeepEqual(t, given, parse(tt.given))
		})
	}
}
