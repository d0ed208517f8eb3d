package fieldpath_test

import (
	"encoding/json"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/fieldpath"
)

func TestPut(t *testing.T) {
	for _, tc := range []struct{ path, before, after string }{
		{"spec", `{}`, `{"spec":7}`},
		{"spec.cidr", `{"spec":{"other":1}}`, `{"spec":{"cidr":7,"other":1}}`},
		{"spec.a.b", `{"spec":"not an object"}`, `{"spec":{"a":{"b":7}}}`},
		{"spec.pods[]", `{}`, `{"spec":{"pods":[7]}}`},
		{"spec.pods[]", `{"spec":{"pods":[1,2]}}`, `{"spec":{"pods":[7,2]}}`},
		{"spec.rules[].routes[].dst", `{"spec":{"rules":[{"iif":"x"},{}]}}`, `{"spec":{"rules":[{"iif":"x","routes":[{"dst":7}]},{}]}}`},
	} {
		var o map[string]any
		assert.NilError(t, json.Unmarshal([]byte(tc.before), &o))
		fieldpath.Put(o, tc.path, 7)
		got, err := json.Marshal(o)
		assert.NilError(t, err)
		assert.Equal(t, string(got), tc.after, tc.path)
	}
}
