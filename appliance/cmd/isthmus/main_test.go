package main

import (
	"bytes"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

// TestUsageErrors: a command line that can't work says what to write instead.
func TestUsageErrors(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for _, tc := range []struct{ args, want string }{
		{"node", "--node-name is required"},
		{"node --node-name n1", "no --kubeconfig"},
		{"node --node-name n1 --kubeconfig /does/not/exist", "/does/not/exist"},
		{"node --log-level loud", "--log-level \"loud\" is not a level"},
		{"node --log-format xml", "--log-format \"xml\" is neither"},
		{"node --geneve-port 70000", "--geneve-port"},
		{"node extra", "unknown command"},
		{"gateway --pod-ip 10.0.0", "--pod-ip \"10.0.0\""},
		{"controller --direct-connections rome", `--direct-connections "rome": "rome": write all, or pairs`},
		{"controller --direct-connections rome:naples,rome:rome", `"rome:rome": write all, or pairs`},
		{"controller --direct-connections rome:naples,", `"": write all, or pairs`},
		{"controller --direct-connections rome:naples:oslo", `"rome:naples:oslo": write all, or pairs`},
		{"controller --direct-connections rome:naples,rome:oslo", "no --kubeconfig"},
		{"controller --direct-connections all", "no --kubeconfig"},
		{"nodes", "unknown command"},
	} {
		t.Run(tc.args, func(t *testing.T) {
			var out, errs bytes.Buffer
			code := run(t.Context(), strings.Fields(tc.args), &out, &errs)
			assert.Equal(t, code, 1)
			assert.Assert(t, strings.Contains(errs.String(), tc.want), errs.String())
		})
	}
}

func TestVersion(t *testing.T) {
	var out, errs bytes.Buffer
	assert.Equal(t, run(t.Context(), []string{"--version"}, &out, &errs), 0)
	assert.Equal(t, out.String(), "isthmus version devel\n")
}
