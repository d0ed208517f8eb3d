package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// lab runs the program in the repository.
func lab(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

// TestUsage is about mistakes that nobody should have to look up.
func TestUsage(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "topologies", "bad.yaml")
	assert.NilError(t, os.MkdirAll(filepath.Dir(bad), 0o755))
	assert.NilError(t, os.WriteFile(bad, []byte("# drawing\nclusters:\n  milan: { nodess: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.0.0.0/33 }\n"), 0o644))
	folder := filepath.Join(t.TempDir(), "folder.yaml")
	assert.NilError(t, os.Mkdir(folder, 0o755))
	for _, tc := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"rnu"}, 2, `unknown command "rnu"`},
		{[]string{"up", "two-cluster"}, 2, `did you mean "two-clusters"?`},
		{[]string{"up", bad}, 2, `bad.yaml:3:12: unknown key "nodess"`},
		{[]string{"up", bad}, 2, `"10.0.0.0/33" is not a CIDR`},
		{[]string{"up", "two-clusters", "--world", "moon"}, 2, `--world "moon": auto, native, vm, kind or kubeconfig`},
		{[]string{"up", "flat", "--world", "kind"}, 2, "clusters.rome.flat: the engine gives nodes their addresses"},
		{[]string{"up", "two-clusters", "--overlay", "ipip"}, 2, `--overlay "ipip": auto, geneve or vxlan`},
		{[]string{"up", "two-clusters", "--snapshot", "on"}, 2, `--snapshot "on": auto or off`},
		{[]string{"run", "--snapshot", "never"}, 2, `--snapshot "never": auto or off`},
		{[]string{"run", "--sabotage=before"}, 2, "--sabotage=after for rows first"},
		{[]string{"run", "--jobs", "0"}, 2, "at least one lab at a time"},
		{[]string{"run", "--time", "-1s"}, 2, "or 0 to run all rows"},
		{[]string{"run", "pod-to-pot"}, 2, `did you mean "pod-to-pod"?`},
		{[]string{"run", "pod-to-pod@genev"}, 2, "\"pod-to-pod@genev\": \"genev\" is neither an overlay nor the world kind\ndid you mean \"geneve\"?"},
		{[]string{"run", "pod-to-pot@geneve"}, 2, "no row matches \"pod-to-pot@geneve\"\ndid you mean \"pod-to-pod\"?"},
		{[]string{"run", "geneve-ping@vxlan"}, 2, `"geneve-ping@vxlan": none of its rows runs in overlay vxlan`},
		{[]string{"run", "@vxlan"}, 2, `"@vxlan" names no rows: write '*@vxlan' for all of them`},
		{[]string{"run", "--shard", "5/4"}, 2, "write 1/4 for the first of four parts"},
		{[]string{"run", "--pcap", "sometimes"}, 2, "fail, always or never"},
		{[]string{"run", "--scenarios", "/nonexistent"}, 2, "no scenarios in /nonexistent"},
		{[]string{"run", "--kubeconfig", "milan=a.yaml"}, 2, "--kubeconfig and --probe-image are for --world kubeconfig"},
		{[]string{"run", "--world", "kubeconfig"}, 2, "say which clusters: --kubeconfig milan=a.yaml"},
		{[]string{"run", "--world", "kubeconfig", "--kubeconfig", "milan=a.yaml"}, 2, "--probe-image registry.example.com"},
		{[]string{"run", "--world", "kubeconfig", "--kubeconfig", "a.yaml", "--probe-image", "x"}, 2, `"a.yaml": write the name that scenarios have for the cluster`},
		{[]string{"run", "--world", "kubeconfig", "--kubeconfig", "milan=/no/such.yaml", "--probe-image", "x"}, 3, "--kubeconfig milan=/no/such.yaml: stat /no/such.yaml"},
		{[]string{"run", "--world", "kubeconfig", "--kubeconfig", "milan=a", "--probe-image", "x", "--keep"}, 2, "the lab's pods go when the run ends"},
		{[]string{"run", "--world", "kubeconfig", "--kubeconfig", "milan=a", "--probe-image", "x", "--jobs", "2"}, 2, "in the same clusters"},
		{[]string{"run", "--world", "kubeconfig", "--kubeconfig", "milan=a", "--probe-image", "x", "--fresh"}, 2, "no lab is built"},
		{[]string{"run", "--world", "kubeconfig", "--kubeconfig", "milan=a", "--probe-image", "x", "--snapshot", "off"}, 2, "there is no virtual machine"},
		{[]string{"up", "two-clusters", "--world", "kubeconfig"}, 2, "is for lab run"},
		{[]string{"bench", "datapath", "--world", "kubeconfig"}, 2, "is for lab run"},
		{[]string{"bench", "datapath", "--implementation", "boringtun"}, 2, `--implementation "boringtun": auto, kernel or userspace`},
		{[]string{"bench", "datapath", "--pairs", "0"}, 2, "at least one, and 5 for a claim"},
		{[]string{"bench", "datapath", "--duration", "0"}, 2, "a millisecond at least"},
		{[]string{"lint", folder}, 2, folder + " is a folder: name files in it"},
		{[]string{"up", folder}, 2, folder + " is a folder: name files in it"},
		{[]string{"lint", filepath.Join(bad, "none.yaml")}, 2, "none.yaml: not a directory"},
		{[]string{"lint", "--root", folder}, 2, "--root " + folder + ": there is no folder topologies in it"},
		{[]string{"exec", "milan/web", "--lab", "no-such-lab", "--", "true"}, 3, `no lab "no-such-lab" is running`},
	} {
		code, stdout, stderr := lab(t, tc.args...)
		assert.Equal(t, code, tc.code, "%v: %s", tc.args, stderr)
		assert.Assert(t, strings.Contains(stdout+stderr, tc.want), "%v:\n%s%s", tc.args, stdout, stderr)
	}
}

func TestLintAndPlan(t *testing.T) {
	code, stdout, stderr := lab(t, "lint")
	assert.Equal(t, code, 0, stdout+stderr)
	code, stdout, _ = lab(t, "run", "--plan", "pod-to-pod/geneve/tcp")
	assert.Equal(t, code, 0)
	assert.Assert(t, strings.Contains(stdout, "expect path milan/web → milan/node-1 → milan/gateway → rome/gateway → rome/node-1 → rome/web, and back, inside geneve"), stdout)
	assert.Assert(t, strings.HasSuffix(stdout, "1 scenarios, 8 rows\n"), stdout)
	code, stdout, _ = lab(t, "run", "--plan", "overlay-auto@vxlan", "overlay-auto@geneve")
	assert.Equal(t, code, 0)
	assert.Assert(t, strings.Contains(stdout, "\n  overlay-auto@vxlan\n") && strings.Contains(stdout, "\n  overlay-auto@geneve\n"), stdout)
	assert.Assert(t, strings.HasSuffix(stdout, "1 scenarios, 2 rows\n"), stdout)
	code, stdout, _ = lab(t, "run", "--plan", "--sabotage", "pod-to-pod")
	assert.Equal(t, code, 0)
	assert.Assert(t, strings.Contains(stdout, "withhold routeconfiguration/rome-node-gw in milan\n      must fail: the pod answers"), stdout)
}

func TestSchemas(t *testing.T) {
	for _, kind := range []string{"topology", "scenario"} {
		code, stdout, _ := lab(t, "schema", kind)
		assert.Equal(t, code, 0)
		assert.Assert(t, json.Valid([]byte(stdout)))
	}
}

// TestShards: every row is in one part, and stays there.
func TestShards(t *testing.T) {
	all, err := scenario.LoadAll("../../../scenarios", "../../../topologies")
	assert.NilError(t, err)
	seen := map[string]int{}
	for _, shard := range []string{"1/3", "2/3", "3/3"} {
		selected, err := choose(all, nil, runOptions{shard: shard, seed: "a"})
		assert.NilError(t, err)
		for _, c := range selected {
			for _, r := range c.rows {
				seen[r.Name]++
			}
		}
	}
	n := 0
	for _, s := range all {
		for _, r := range s.Rows {
			n++
			assert.Equal(t, seen[r.Name], 1, r.Name)
		}
	}
	assert.Equal(t, len(seen), n)
}

func TestMatches(t *testing.T) {
	const row = "pod-to-pod/tcp/milan-web/rome-web"
	for text, want := range map[string]bool{
		"pod-to-pod": true, "pod-to-pod/": true, "pod-to-pod/tcp": true, row: true,
		"*/tcp": true, "*/*/milan-*": true, "pod-*": true,
		"pod": false, "pod-to-pod/udp": false, "*/udp/*": false, "tcp": false,
	} {
		p, err := parsePattern(text)
		assert.NilError(t, err)
		assert.Equal(t, p.matches(row), want, text)
	}
}
