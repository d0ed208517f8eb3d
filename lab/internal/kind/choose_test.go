package kind

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// TestCannotRun: what a row's own steps do, name and expect decides.
func TestCannotRun(t *testing.T) {
	const reach = "expect: { reach: { from: milan/web, to: rome/web, proto: tcp } }"
	step := func(body string) string { return "steps: [ { name: it, " + body + " } ]" }
	after := func(body string) string {
		return "steps: [ { name: before, " + reach + " }, { name: it, " + body + " } ]"
	}
	for _, tt := range []struct {
		name, top, source string
		want              string // empty: it can
	}{
		{"a probe from pod to pod", "two-clusters", step(reach), ""},
		{"from a node", "two-clusters", step("expect: { reach: { from: milan/node-1, to: rome/web } }"), ""},
		{"from a gateway", "two-clusters", step("expect: { reach: { from: milan/gateway, to: rome/web, proto: icmp } }"), ""},
		{"the source of a connection", "two-clusters", after("expect: { source: { seenBy: rome/web, is: milan/web } }"), ""},
		{"the source of an echo", "two-clusters", "steps: [ { name: it, expect: { reach: { from: milan/web, to: rome/web, proto: icmp }, source: { seenBy: rome/web, is: milan/web } } } ]", "an echo's source"},
		{"a stream", "two-clusters", step("do: { flow: { name: s, from: milan/web, to: rome/web } }, expect: { flow: { name: s, alive: true } }"), ""},
		{"a path", "two-clusters", after("expect: { path: { via: [milan/web, rome/web] } }"), noCapture},
		{"an absence on the wire", "two-clusters", after("expect: { never: { payload: token, on: wan } }"), noCapture},
		{"a segment size", "two-clusters", after("expect: { mss: { seenBy: rome/web, is: 1340 } }"), noCapture},
		{"a path MTU", "two-clusters", after("expect: { mtu: { from: milan/web, to: rome/web } }"), ""},
		{"conntrack of a gateway", "two-clusters", after("expect: { conntrack: { on: rome/gateway, seenBy: rome/web } }"), ""},
		{"kubectl", "two-clusters", after("expect: { kubectl: { in: milan, get: internalnode/node-1 } }"), ""},
		{"a log and what is left", "two-clusters", after("do: { kill: milan/gateway }, expect: { log: { of: milan/gateway, line: x }, gone: {} }"), ""},
		{"a host outside", "two-clusters", step("expect: { reach: { from: milan/web, to: user, proto: icmp } }"), ""},
		{"a router on the way", "two-clusters", "captures" + after("expect: { path: { via: [milan/web, milan/router, rome/web] } }"), ""},
		{"a path that is captured", "two-clusters", "captures" + after("expect: { path: { via: [milan/web, milan/gateway, rome/web] } }"), ""},
		{"the wire between clusters", "two-clusters", "captures" + after("expect: { never: { payload: token, on: wan } }"), ""},
		{"the wire of a router", "two-clusters", "captures" + after("expect: { never: { payload: token, on: milan/router } }"), noRouter},
		{"a router", "two-clusters", step("expect: { reach: { from: milan/web, to: milan/router, proto: icmp } }"), noRouter},
		{"an address of a load balancer", "two-clusters", step("expect: { reach: { from: milan/web, to: 'ingress(rome, web)', answeredBy: rome/web } }"), noBalancer},
		{"a command on a node", "two-clusters", after("do: { exec: { on: milan/gateway.othernode, run: ip rule; nft list ruleset } }"), ""},
		{"a command of a control plane", "two-clusters", after("do: { exec: { on: milan/control-plane, run: kubernetes kubectl get nodes } }"), ""},
		{"a program that nodes have not", "two-clusters", after("do: { exec: { on: milan/gateway, run: 'ip link; isthmus version' } }"), "no isthmus"},
		{"a word that is no program", "two-clusters", after("do: { exec: { on: milan/gateway, run: ip link show type isthmus } }"), ""},
		{"a command on a router", "two-clusters", after("do: { exec: { on: rome/router, run: conntrack -F } }"), noRouter},
		{"a router in a text", "two-clusters", after("do: { exec: { on: rome/node-1, run: 'ip route get {rome/router.ip}' } }"), "rome/router.ip: " + noRouter},
		{"objects with an address outside", "two-clusters", after("do: { apply: { in: milan, objects: '{ apiVersion: v1, kind: ConfigMap, metadata: { name: a }, data: { a: \"{user.ip}\" } }' } }"), ""},
		{"a component that stops", "two-clusters", after("do: { stop: { in: milan, component: kube-apiserver, for: 1s } }, " + reach), "go by the API server"},
		{"a container that is killed", "two-clusters", after("do: { kill: milan/gateway }"), ""},
		{"a node that leaves", "two-clusters", after("do: { nodeLeaves: milan/node-2 }"), "at once, and for good"},
		{"a node that is drained", "two-clusters", after("do: { nodeDrained: milan/gateway.node }"), ""},
		{"a command of an administrator", "two-clusters", after("do: { kubectl: { in: milan, run: rollout restart -n liqo daemonset/isthmus-node } }"), ""},
		{"a gateway that moves", "two-clusters", after("do: { gatewayMoves: { of: milan, to: milan/gateway.othernode } }"), ""},
		{"a peering that comes and goes", "hub-joins", after("do: [ { connect: { server: milan, client: naples } }, { disconnect: { in: naples, peer: milan } } ]"), ""},
		{"a topology that kind can't make", "flat", step(reach), "of topology flat, clusters.milan.cni: "},
		{"another world", "two-clusters", "world: native\n" + step(reach), "asks for the native world"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text, captures := strings.CutPrefix(tt.source, "captures")
			// A step that a sabotage can break.
			source := strings.TrimSuffix(text, " ]") + ", { name: that, expect: { reach: { from: milan/web, to: rome/web } } } ]"
			src := "description: x\ntopology: " + tt.top + "\n" + source + "\nsabotage: [ { withhold: routeconfiguration/rome-node-gw, in: milan, fails: that } ]\n"
			s, err := scenario.Parse("test.yaml", []byte(src), "../../../topologies")
			assert.NilError(t, err)
			lack, ok := CannotRun(s, s.Rows[0], captures)
			assert.Equal(t, ok, tt.want != "", lack.What)
			assert.Check(t, is.Contains(lack.What, tt.want))
			if lack.At != "" {
				assert.Check(t, strings.HasPrefix(lack.At, `step "it": `), lack.At)
			}
		})
	}
}

func TestCannotSabotage(t *testing.T) {
	s, err := scenario.Parse("test.yaml", []byte(`
description: x
topology: two-clusters
steps: [ { name: it, expect: { reach: { from: milan/web, to: rome/web } } } ]
sabotage:
  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it }
  - { plant: { on: milan/gateway, run: nft add table ip x, undo: nft delete table ip x }, fails: it }
  - { plant: { on: milan/router, run: ip rule add to 10.0.0.0/8, undo: ip rule del to 10.0.0.0/8 }, fails: it }
  - { plant: { on: milan/gateway, run: isthmus version, undo: "true" }, fails: it }
`), "../../../topologies")
	assert.NilError(t, err)
	var got []string
	for _, sab := range s.BuildSabotage(s.Rows[0]) {
		lack, _ := CannotSabotage(s.Topology, sab)
		got = append(got, lack.What)
	}
	assert.DeepEqual(t, got, []string{"", "", noRouter, "nodes have no isthmus"})
}

// TestScenarios: which scenarios of the repository run, and why others do not, is
// the list that the README names. go test ./lab/internal/kind -update writes it.
func TestScenarios(t *testing.T) {
	all, err := scenario.LoadAll("../../../scenarios", "../../../topologies")
	assert.NilError(t, err)
	var b strings.Builder
	b.WriteString("# Scenarios in clusters of kind\n\nRows that `lab run --world kind` selects as root, with Podman on the same machine, and what the others lack.\n\n| scenario | rows that run | the others lack |\n|---|---|---|\n")
	for _, s := range all {
		run := 0
		var lacks []string
		for _, r := range s.Rows {
			lack, ok := CannotRun(s, r, true)
			if !ok {
				run++
				continue
			}
			assert.Check(t, lack.What != "", r.Name)
			if !slices.Contains(lacks, lack.What) {
				lacks = append(lacks, lack.What)
			}
		}
		fmt.Fprintf(&b, "| %s | %d of %d | %s |\n", s.Name, run, len(s.Rows), strings.Join(lacks, "<br>"))
	}
	golden.Assert(t, b.String(), "scenarios.md")
}
