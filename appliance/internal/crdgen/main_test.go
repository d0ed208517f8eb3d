package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

func TestFinish(t *testing.T) {
	for _, tt := range []struct {
		name, in, want string
	}{
		{"an address is of either family",
			"schema: {type: string, format: ip, description: an address}",
			"---\nschema:\n  anyOf:\n  - format: ipv4\n  - format: ipv6\n  description: an address\n  type: string\n"},
		{"other formats stay",
			"schema: {type: string, format: cidr}",
			"---\nschema:\n  format: cidr\n  type: string\n"},
		{"a workload's own prose goes, ours stays",
			"deployment: {description: ours, properties: {spec: {description: theirs, properties: {progressDeadlineSeconds: {description: theirs, type: integer}}}}}",
			"---\ndeployment:\n  description: ours\n  properties:\n    spec:\n      properties:\n        progressDeadlineSeconds:\n          type: integer\n"},
		{"pods have a field of an older Kubernetes",
			"spec: {properties: {clusterIPs: {type: array}, schedulingGroup: {type: object}}}",
			"---\nspec:\n  properties:\n    clusterIPs:\n      type: array\n    schedulingGroup:\n      type: object\n    workloadRef:\n      properties:\n" +
				"        name:\n          type: string\n        podGroup:\n          type: string\n        podGroupReplicaKey:\n          type: string\n" +
				"      required:\n      - name\n      - podGroup\n      type: object\n"},
		{"a property called description stays",
			"spec: {properties: {clusterIPs: {type: array}, description: {type: string, description: text}}}",
			"---\nspec:\n  properties:\n    clusterIPs:\n      type: array\n    description:\n      type: string\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := finish([]byte(tt.in))
			assert.NilError(t, err)
			assert.Equal(t, string(got), tt.want)
			again, err := finish(got)
			assert.NilError(t, err)
			assert.Equal(t, string(again), tt.want)
		})
	}
}

// The CRDs in the repository went through finish.
func TestCRDsAreFinished(t *testing.T) {
	files, err := filepath.Glob("../../../k8s/crds/*.yaml")
	assert.NilError(t, err)
	assert.Assert(t, len(files) == 19, "found %d CRDs", len(files))
	for _, f := range files {
		text, err := os.ReadFile(f)
		assert.NilError(t, err)
		done, err := finish(text)
		assert.NilError(t, err)
		assert.Assert(t, string(done) == string(text) && !strings.Contains(string(text), "format: ip\n"), "%s: run go generate ./appliance/api", f)
	}
}
