package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// TestForKind: what clusters of kind have not is said once for each scenario and
// thing, with how many rows it keeps from running.
func TestForKind(t *testing.T) {
	all := parse(t, map[string]string{
		"both": "matrix: { overlay: [geneve, vxlan], proto: [tcp, udp, icmp] }" + `
steps:
  - name: it answers
    expect: { reach: { from: milan/web, to: rome/web, proto: "{proto}" }, source: { seenBy: rome/web, is: milan/web } }
  - name: nobody reads it
    when: { proto: udp }
    expect: { never: { payload: token, on: wan } }
sabotage:
  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it answers, expectation: reach }
  - { plant: { on: milan/router, run: ip rule add to 10.0.0.0/8, undo: ip rule del to 10.0.0.0/8 }, fails: it answers, expectation: reach }
`,
		"any": `
steps:
  - name: it answers
    expect: { reach: { from: milan/web, to: rome/web }, path: { via: [milan/web, rome/web] } }
sabotage:
  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it answers, expectation: reach }
`[1:],
	})
	o := runOptions{world: "kind", overlay: "auto", seed: "a", sabotage: sabotageAfter}
	selected, err := choose(all, nil, o)
	assert.NilError(t, err)
	var out bytes.Buffer
	left := ofKind(false).leave(&out, selected, true)
	assert.Equal(t, out.String(), `not selected: both, 2 rows: packets are captured in the world kind by root only, where the engine's containers are processes of this machine
    step "nobody reads it": expect nothing readable on wan
not selected: both, 2 rows: an echo's source is seen in captures only; packets are captured in the world kind by root only, where the engine's containers are processes of this machine
    step "it answers": expect rome/web sees milan/web
not selected: both, 1 sabotage: all nodes of the world kind are on one network, without routers
    plant on milan/router: ip rule add to 10.0.0.0/8
not selected: any, 1 row: packets are captured in the world kind by root only, where the engine's containers are processes of this machine
    step "it answers": expect path milan/web → rome/web
`)
	c, err := newChooser("kind", "auto", machine(t), nil)
	assert.NilError(t, err)
	assert.DeepEqual(t, sorted(shown(groups(left, c, o))), sorted([]string{
		"of-this-test-kind-geneve: both/geneve/tcp both/geneve/tcp[rome-node-gw]",
		"of-this-test-kind-vxlan: both/vxlan/tcp",
	}))

	selected, err = choose(all, []string{"any@vxlan", "both@vxlan"}, o)
	assert.NilError(t, err)
	left = ofKind(false).leave(&out, selected, true)
	assert.DeepEqual(t, shown(groups(left, c, o)), []string{"of-this-test-kind-vxlan: both/vxlan/tcp both/vxlan/tcp[rome-node-gw]"})
	assert.Equal(t, left[0].at, at{overlay: "vxlan"})
}

// TestAtKind: rows that are named with @kind run there beside those of other worlds,
// each group with a sabotage that can be made in it.
func TestAtKind(t *testing.T) {
	all := parse(t, map[string]string{"both": "matrix: { overlay: [geneve, vxlan], proto: [tcp, udp] }" + `
steps: [ { name: it answers, expect: { reach: { from: milan/web, to: rome/web, proto: "{proto}" } } } ]
sabotage:
  - { plant: { on: milan/router, run: ip rule add to 10.0.0.0/8, undo: ip rule del to 10.0.0.0/8 }, fails: it answers, expectation: reach }
  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it answers, expectation: reach }
  - { withhold: routeconfiguration/rome-gw-ext, in: milan, fails: it answers, expectation: reach }
`})
	o := runOptions{world: "auto", overlay: "auto", seed: "a", sabotage: sabotageAfter, jobs: 3}
	selected, err := choose(all, []string{"both@vxlan", "both/vxlan/tcp@kind"}, o)
	assert.NilError(t, err)
	assert.Equal(t, selected[1].pattern(selected[1].rows[0].Name), "both/vxlan/tcp@kind")
	c, err := newChooser("auto", "auto", machine(t), nil)
	assert.NilError(t, err)
	assert.DeepEqual(t, shown(groups(selected, c, o)), []string{
		"of-this-test-kind-vxlan: both/vxlan/tcp both/vxlan/tcp[rome-node-gw]",
		"of-this-test-native-vxlan: both/vxlan/tcp both/vxlan/udp both/vxlan/tcp[ip rule add to 10.0.0.0/8] both/vxlan/tcp[rome-node-gw] both/vxlan/udp[rome-gw-ext]",
	})
}

// TestRunWithoutEngine: rows that clusters of kind could run are skipped where no
// engine runs, each with what to do.
func TestRunWithoutEngine(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv("CI", "")
	t.Setenv("KIND_EXPERIMENTAL_PROVIDER", "")
	root := emptyRoot(t)
	code, stdout, stderr := lab(t, "--root", root, "run", "--world", "kind", "bad-objects/vxlan", "--fresh")
	assert.Equal(t, code, 4, stdout+stderr)
	assert.Check(t, is.Contains(stdout, "none of docker, nerdctl, finch, podman is installed (make kind installs Podman"))
	// Those that would need captures, too.
	code, stdout, stderr = lab(t, "--root", root, "run", "--world", "kind", "pod-to-pod/vxlan/tcp/milan-web/rome-web", "--fresh")
	assert.Equal(t, code, 4, stdout+stderr)
	assert.Check(t, is.Contains(stdout, "none of docker, nerdctl, finch, podman is installed (make kind installs Podman"))
	code, _, stderr = lab(t, "up", "two-clusters", "--world", "kind")
	assert.Equal(t, code, 3)
	assert.Check(t, strings.HasPrefix(stderr, "lab: the kind world can't run here: container engine: none of docker"), stderr)
}

// TestAsksEngines: an engine that does not answer keeps nobody waiting who asks
// for another world.
func TestAsksEngines(t *testing.T) {
	bin, root := t.TempDir(), emptyRoot(t)
	asked := filepath.Join(bin, "asked")
	assert.NilError(t, os.WriteFile(filepath.Join(bin, "docker"), []byte("#!/bin/sh\n: >"+asked+"\nexit 1\n"), 0o755))
	t.Setenv("PATH", bin)
	t.Setenv("KIND_EXPERIMENTAL_PROVIDER", "")
	t.Setenv("CI", "") // where a skipped row fails
	for _, tt := range []struct {
		args []string
		want bool
	}{
		{[]string{"up", "two-clusters"}, false},
		{[]string{"up", "two-clusters", "--world", "native"}, false},
		{[]string{"up", "two-clusters", "--world", "kind"}, true},
		{[]string{"run", "bad-objects/vxlan"}, false},
		{[]string{"run", "bad-objects/vxlan", "--world", "vm"}, false},
		{[]string{"run", "bad-objects/vxlan", "--world", "kind"}, true},
		{[]string{"doctor"}, true},
	} {
		code, stdout, stderr := lab(t, append([]string{"--root", root}, tt.args...)...)
		assert.Check(t, code == 3 || code == 4, "%q: nothing can run here: %d: %s%s", tt.args, code, stdout, stderr)
		_, err := os.Stat(asked)
		assert.Equal(t, err == nil, tt.want, "%q: %v", tt.args, err)
		assert.NilError(t, os.RemoveAll(asked))
	}
}

// emptyRoot is a repository in which nothing was built.
func emptyRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"topologies", "scenarios"} {
		from, err := filepath.Abs("../../../" + dir)
		assert.NilError(t, err)
		assert.NilError(t, os.Symlink(from, filepath.Join(root, dir)))
	}
	return root
}
