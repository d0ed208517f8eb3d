package scenario_test

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

const topologies = "../../../topologies"

// TestRepository checks every scenario of the repository, as lab lint does.
func TestRepository(t *testing.T) {
	all, err := scenario.LoadAll("../../../scenarios", topologies)
	assert.NilError(t, err)
	var names []string
	for _, s := range all {
		names = append(names, s.Name)
		for _, r := range s.Rows {
			assert.Assert(t, len(s.Build(r)) > 0, r.Name)
			assert.Assert(t, len(s.BuildSabotage(r)) > 0, r.Name)
		}
	}
	for _, want := range []string{"pod-to-pod", "geneve-ping", "internal-node", "daemon-restart", "api-server-gone", "drift", "bad-objects", "user-firewall"} {
		assert.Assert(t, strings.Contains(strings.Join(names, " "), want), want)
	}
}

// TestMistakes reads every testdata/bad/*.yaml, each with mistakes, and
// compares the messages.
func TestMistakes(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.yaml")
	assert.NilError(t, err)
	assert.Assert(t, len(files) > 0)
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".yaml")
		t.Run(name, func(t *testing.T) {
			_, err := scenario.Load(path, topologies)
			assert.Assert(t, err != nil, "the file was accepted")
			golden.Assert(t, err.Error()+"\n", "bad/"+name+".golden")
		})
	}
}

const matrix = `
description: a matrix
topology: two-clusters
matrix: { proto: [tcp, icmp], from: [milan/web, rome/web], to: [rome/probe, milan/probe] }
exclude:
  - { from: milan/web, to: milan/probe }
  - { from: rome/web, to: [rome/probe] }
steps:
  - name: "{from} reaches {to}"
    do:
      exec: { on: "{from.node}", run: "echo {to.ip} {from.cluster} {to.nodename} {from.peer}" }
    expect:
      reach: { from: "{from}", to: "{to}", proto: "{proto}" }
      path: { via: ["{from}", "{from.cluster}/gateway", "{to}"] }
    within: 3s
sabotage:
  - { withhold: "routeconfiguration/{from.peer}-node-gw", in: "{from.cluster}", fails: "{from} reaches {to}", expectation: reach }
`

func TestMatrix(t *testing.T) {
	s, err := scenario.Parse("dir/some.yaml", []byte(matrix), topologies)
	assert.NilError(t, err)
	var names []string
	for _, r := range s.Rows {
		names = append(names, r.Name)
	}
	assert.DeepEqual(t, names, []string{
		"some/tcp/milan-web/rome-probe",
		"some/tcp/rome-web/milan-probe",
		"some/icmp/milan-web/rome-probe",
		"some/icmp/rome-web/milan-probe",
	})
	steps := s.Build(s.Rows[3])
	assert.Equal(t, len(steps), 1)
	st := steps[0]
	assert.Equal(t, st.Name, "rome/web reaches milan/probe")
	assert.Equal(t, st.Within.String(), "3s")
	assert.Equal(t, st.Do[0].String(), "on rome/node-1: echo {milan/probe.ip} rome node-2 milan")
	assert.Equal(t, st.Expect[0].String(), "rome/web reaches milan/probe by icmp")
	assert.Equal(t, st.Expect[1].String(), "path rome/web → rome/gateway → milan/probe")
	sab := s.BuildSabotage(s.Rows[0])[0]
	assert.Equal(t, sab.String(), "withhold routeconfiguration/rome-node-gw in milan")
	assert.Equal(t, sab.Fails, "milan/web reaches rome/probe")
}

const overlays = `
description: overlays
topology: two-clusters
requires: [netem, { feature: wireguard, when: { overlay: geneve } }]
matrix: { overlay: [geneve, vxlan], proto: [tcp, udp] }
steps:
  - name: it answers
    expect:
      reach: { from: milan/web, to: rome/web, proto: "{proto}" }
  - name: the path
    when: { overlay: geneve }
    expect:
      path: { via: [milan/web, milan/gateway, rome/web] }
  - name: the path
    when: { overlay: vxlan }
    expect:
      path: { via: [milan/web, milan/gateway.node, milan/gateway, rome/web] }
  - name: datagrams in VXLAN
    when: { overlay: [vxlan], proto: udp }
    expect:
      reach: { from: "rome/{proto}", to: milan/web }
sabotage:
  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it answers }
  - { when: { overlay: vxlan }, withhold: routeconfiguration/rome-symmetric, in: milan, fails: the path }
`

// TestWhen: rows have the steps, the sabotages and the requirements that are
// for them.
func TestWhen(t *testing.T) {
	src := strings.Replace(overlays, `"rome/{proto}"`, "rome/web", 1)
	s, err := scenario.Parse("some.yaml", []byte(src), topologies)
	assert.NilError(t, err)
	for i, want := range []struct {
		name, overlay string
		requires      []string
		steps         []string
		sabotages     int
	}{
		{"some/geneve/tcp", "geneve", []string{"netem", "wireguard", "geneve"}, []string{"it answers", "path milan/web → milan/gateway → rome/web"}, 1},
		{"some/geneve/udp", "geneve", []string{"netem", "wireguard", "geneve"}, []string{"it answers", "path milan/web → milan/gateway → rome/web"}, 1},
		{"some/vxlan/tcp", "vxlan", []string{"netem", "vxlan"}, []string{"it answers", "path milan/web → milan/gateway.node → milan/gateway → rome/web"}, 2},
		{"some/vxlan/udp", "vxlan", []string{"netem", "vxlan"}, []string{"it answers", "path milan/web → milan/gateway.node → milan/gateway → rome/web", "datagrams in VXLAN"}, 2},
	} {
		r := s.Rows[i]
		assert.Equal(t, r.Name, want.name)
		assert.Equal(t, r.Overlay, want.overlay, r.Name)
		assert.DeepEqual(t, r.Requires, want.requires)
		var steps []string
		for _, st := range s.Build(r) {
			name := st.Name
			if name == "the path" {
				name = st.Expect[0].String()
			}
			steps = append(steps, name)
		}
		assert.DeepEqual(t, steps, want.steps)
		sabotages := s.BuildSabotage(r)
		assert.Equal(t, len(sabotages), want.sabotages, r.Name)
		assert.Equal(t, sabotages[0].Depends, false)
		for _, sab := range sabotages[1:] {
			assert.Equal(t, sab.Depends, true)
		}
	}
	// What is not for a row need not make sense there, but elsewhere it must.
	_, err = scenario.Parse("some.yaml", []byte(overlays), topologies)
	assert.ErrorContains(t, err, `some.yaml:21:22: cluster rome has no "udp"`)
	assert.Assert(t, !strings.Contains(err.Error(), `"tcp"`), err)
}

// TestOverlay: without the key, the features that a scenario requires say in
// which overlay it runs.
func TestOverlay(t *testing.T) {
	for requires, want := range map[string]string{
		"[]": "", "[wireguard]": "", "[geneve]": "geneve", "vxlan": "vxlan", "[geneve, vxlan]": "",
		"[{ feature: geneve, when: { proto: tcp } }]": "geneve", "[{ feature: geneve, when: { proto: udp } }]": "",
	} {
		src := strings.Replace(matrix, "topology:", "requires: "+requires+"\ntopology:", 1)
		src = strings.Replace(src, "[tcp, icmp]", "[tcp, udp]", 1)
		s, err := scenario.Parse("some.yaml", []byte(src), topologies)
		assert.NilError(t, err, requires)
		assert.Equal(t, s.Rows[0].Overlay, want, requires)
	}
}

// TestBuildAnew: expectations remember what they saw, so every run of a row
// has its own.
func TestBuildAnew(t *testing.T) {
	s, err := scenario.Parse("some.yaml", []byte(matrix), topologies)
	assert.NilError(t, err)
	a, b := s.Build(s.Rows[0]), s.Build(s.Rows[0])
	assert.Assert(t, a[0].Expect[0].Expectation != b[0].Expect[0].Expectation)
}

func TestSchema(t *testing.T) {
	b, err := json.MarshalIndent(scenario.Schema(), "", " ")
	assert.NilError(t, err)
	for _, want := range []string{`"reach"`, `"withhold"`, `"kubectl"`, `"flow"`, `"additionalProperties": false`, `"when"`, `"flowtable"`, `"liqoctl"`} {
		assert.Assert(t, strings.Contains(string(b), want), want)
	}
}

func TestParseObjects(t *testing.T) {
	objects, err := scenario.ParseObjects("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: b}\n")
	assert.NilError(t, err)
	assert.Equal(t, len(objects), 2)
	_, err = scenario.ParseObjects("kind: Pod\nmetadata: {name: a}\n")
	assert.Error(t, err, "object 1 needs apiVersion, kind and metadata.name")
}

const installation = `
description: an installation
topology: two-real-clusters
matrix: { level: [debug, warn] }
steps:
  - name: it is upgraded
    do:
      - remember: { name: before }
      - upgrade:
          in: milan
          values: { logLevel: "{level}", metrics: { enabled: true }, ipam: { pools: [10.0.0.0/8] }, controllerManager: { replicas: 2 }, image: { version: ~ } }
      - uninstall: { in: milan, with: helm }
  - name: it is as before
    expect:
      same: { as: before, of: kernels }
sabotage:
  - plant: { on: milan/control-plane, run: a  b, undo: c }
    before: it is as before
    fails: it is as before
  - pause: milan/node-1
    fails: it is as before
`

// TestInstallation: values are any YAML, with the row's in it.
func TestInstallation(t *testing.T) {
	s, err := scenario.Parse("some.yaml", []byte(installation), topologies)
	assert.NilError(t, err)
	steps := s.Build(s.Rows[1])
	upgrade := steps[0].Do[1].(*scenario.Upgrade)
	assert.DeepEqual(t, map[string]any(upgrade.Values), map[string]any{
		"logLevel": "warn", "metrics": map[string]any{"enabled": true}, "ipam": map[string]any{"pools": []any{"10.0.0.0/8"}},
		"controllerManager": map[string]any{"replicas": uint64(2)}, "image": map[string]any{"version": nil},
	})
	assert.Equal(t, steps[0].Do[0].String(), "remember milan, rome as before")
	assert.Equal(t, steps[0].Do[2].String(), "uninstall in milan by helm")
	assert.Equal(t, steps[1].Expect[0].String(), "kernels are as in before")
	sabotages := s.BuildSabotage(s.Rows[0])
	assert.Equal(t, sabotages[0].String(), `plant on milan/control-plane: a b, before "it is as before"`)
	assert.Equal(t, sabotages[1].String(), `pause the daemons of milan/node-1`)
	assert.Equal(t, sabotages[1].Plant.On.Operand.String(), "milan/node-1")
	assert.Equal(t, strings.Replace(sabotages[1].Plant.Run, "-STOP", "-CONT", 1), sabotages[1].Plant.Undo)
}
