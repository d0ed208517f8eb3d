package cli

import (
	"bytes"
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// isthmusctl runs a command line.
func isthmusctl(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = Run(t.Context(), "test", args, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

// offline are flags that need no cluster.
func offline(dir string, more ...string) []string {
	return append([]string{
		"peer", "manifests", "--server-id", "milan", "--server-pod-cidr", "10.0.0.0/16", "--server-external-cidr", "10.70.0.0/16",
		"--client-id", "rome", "--client-pod-cidr", "10.1.0.0/16", "--client-external-cidr", "10.70.0.0/16", "--out", dir,
	}, more...)
}

// The second run writes the same files: keys are made once, and are in no output.
func TestPeerManifests(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "peering")
	read := func() string {
		var all string
		for _, name := range []string{"milan/peering.yaml", "milan/secret.yaml", "rome/peering.yaml", "rome/secret.yaml"} {
			text, err := os.ReadFile(filepath.Join(dir, name))
			assert.NilError(t, err)
			all += string(text)
		}
		return all
	}
	args := offline(dir, "--server-address", "vpn.example.com")
	code, out, errs := isthmusctl(t, args...)
	assert.Equal(t, code, 0, errs)
	assert.Check(t, is.Contains(out, "in rome: kubectl apply --server-side -f "+filepath.Join(dir, "rome")))
	first := read()
	info, err := os.Stat(filepath.Join(dir, "milan", "secret.yaml"))
	assert.NilError(t, err)
	assert.Equal(t, info.Mode().Perm(), os.FileMode(0o600))
	for line := range strings.Lines(first) {
		if key, found := strings.CutPrefix(strings.TrimSpace(line), "privateKey: "); found {
			_, err := base64.StdEncoding.DecodeString(key)
			assert.NilError(t, err)
			assert.Check(t, !strings.Contains(out+errs, key))
		}
	}
	assert.Check(t, !strings.Contains(first, "status") && !strings.Contains(first, "creationTimestamp"), first)

	code, out, errs = isthmusctl(t, append(args, "--json")...)
	assert.Equal(t, code, 0, errs)
	assert.Check(t, is.Contains(out, filepath.Join(dir, "milan", "peering.yaml")))
	assert.Equal(t, read(), first)

	// Of the port of the nodes and the one that is dialled, one is enough.
	code, _, errs = isthmusctl(t, offline(dir, "--server-address", "a", "--server-service-type", "NodePort", "--server-node-port", "31840")...)
	assert.Equal(t, code, 0, errs)
	for id, want := range map[string]string{"milan": "nodePort: 31840", "rome": "port: 31840"} {
		text, err := os.ReadFile(filepath.Join(dir, id, "peering.yaml"))
		assert.NilError(t, err)
		assert.Check(t, is.Contains(string(text), want))
	}

	assert.NilError(t, os.WriteFile(filepath.Join(dir, "rome", "secret.yaml"), []byte("kind: Secret\ndata: {}\n"), 0o600))
	code, _, errs = isthmusctl(t, args...)
	assert.Equal(t, code, 1)
	assert.Check(t, is.Contains(errs, "move it away to have new keys made"))
}

// What is wrong is said by its flag, and nothing is written.
func TestPeerManifestsRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "peering")
	for _, tt := range []struct {
		args []string
		want string
	}{
		{offline(dir), "--server-address, --server-port"},
		{offline(dir, "--server-address", "a", "--client-pod-cidr", "10.1.0.1/16"), `--client-pod-cidr "10.1.0.1/16" is not a network`},
		{offline(dir, "--server-address", "a", "--client-id", "../rome"), `--client-id "../rome" is not the ID of a cluster`},
		{offline(dir, "--server-address", "https://a:1"), `--server-address "https://a:1": write an address or a name`},
		{offline(dir, "--server-address", "a", "--server-service-type", "NodePort"), "say which port of the nodes the client dials"},
		{offline(dir, "--server-address", "a", "--client-id", "milan"), "the two sides have the same ID"},
		{offline(dir, "--server-address", "a", "--server-service-type", "Ingress"), `"Ingress" is not LoadBalancer`},
		{[]string{"peer", "manifests", "--out", dir, "--server-id", "milan"}, "which cluster is the client: name it by --client-context"},
		{[]string{"peer", "manifests", "--out", dir, "--server-id", "milan", "--client-id", "rome", "--client-pod-cidr", "10.1.0.0/16"}, "--client-external-cidr is missing"},
		{[]string{"peer", "manifests", "--out", dir, "--client-kubeconfig", "/does/not/exist"}, "the client: stat /does/not/exist"},
		{[]string{"peer", "manifests"}, `required flag(s) "out" not set`},
	} {
		code, _, errs := isthmusctl(t, tt.args...)
		assert.Equal(t, code, 1, "%q", tt.args)
		assert.Check(t, is.Contains(errs, tt.want))
		_, err := os.Stat(dir)
		assert.Check(t, os.IsNotExist(err), "%q has written something", tt.args)
	}
}
