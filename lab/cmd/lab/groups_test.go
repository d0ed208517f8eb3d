package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// parse reads scenarios of this test.
func parse(t *testing.T, sources map[string]string) []*scenario.Scenario {
	t.Helper()
	var all []*scenario.Scenario
	for _, name := range []string{"both", "geneve", "any"} {
		if src, ok := sources[name]; ok {
			s, err := scenario.Parse(name+".yaml", []byte("description: x\ntopology: two-clusters\n"+src), "../../../topologies")
			assert.NilError(t, err)
			s.Topology.Name = "of-this-test" // and of no lab that is up
			all = append(all, s)
		}
	}
	return all
}

const reaches = `
steps:
  - name: it answers
    expect: { reach: { from: milan/web, to: rome/web, proto: "{proto}" } }
sabotage:
  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it answers }
  - { when: { overlay: vxlan }, withhold: routeconfiguration/milan-gw-pods, in: milan, fails: it answers }
`

func three(t *testing.T) []*scenario.Scenario {
	without := strings.Replace(strings.Join(strings.Split(reaches, "\n")[:6], "\n"), "{proto}", "tcp", 1)
	return parse(t, map[string]string{
		"both":   "matrix: { overlay: [geneve, vxlan], proto: [tcp, udp] }" + reaches,
		"geneve": "requires: [geneve]" + without,
		"any":    "requires: [wireguard]" + without,
	})
}

// shown is the groups as text, one a line.
func shown(all []*group) []string {
	var out []string
	for _, g := range all {
		line := g.name() + ":"
		for _, part := range [][]choice{g.rows, g.sabotages} {
			for _, c := range part {
				for _, i := range c.items {
					line += " " + i.row.Name
					if i.sabotage != nil {
						what := strings.TrimPrefix(i.sabotage.Withhold, "routeconfiguration/")
						if i.sabotage.Plant != nil {
							what = i.sabotage.Plant.Run
						}
						line += "[" + what + "]"
					}
					if i.skip != "" {
						line += "!"
					}
				}
			}
		}
		out = append(out, line)
	}
	return out
}

// TestGroups: rows share a lab when topology, world and overlay are the same;
// sabotages run on rows of this kernel where there are any, spread over them, and
// those that depend on the overlay in that one.
func TestGroups(t *testing.T) {
	for _, tt := range []struct {
		name, world, overlay, sabotage string
		lacks, patterns                []string
		want                           []string
	}{
		{"a kernel without Geneve", "auto", "auto", "", []string{"geneve", "wireguard"}, nil, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp both/vxlan/udp",
			"of-this-test-vm-geneve: both/geneve/tcp both/geneve/udp geneve any",
		}},
		{"a kernel that has all", "auto", "auto", "", nil, nil, []string{
			"of-this-test-native-geneve: both/geneve/tcp both/geneve/udp geneve any",
			"of-this-test-native-vxlan: both/vxlan/tcp both/vxlan/udp",
		}},
		{"VXLAN only", "auto", "vxlan", "", []string{"geneve"}, nil, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp both/vxlan/udp any",
		}},
		{"what native can't run is skipped there", "native", "auto", "", []string{"geneve"}, nil, []string{
			"of-this-test-native-geneve: both/geneve/tcp! both/geneve/udp! geneve!",
			"of-this-test-native-vxlan: both/vxlan/tcp both/vxlan/udp any",
		}},
		{"sabotage", "auto", "auto", "only", []string{"geneve", "wireguard"}, nil, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp[rome-node-gw] both/vxlan/udp[milan-gw-pods]",
			"of-this-test-vm-geneve: geneve[rome-node-gw] any[rome-node-gw]",
		}},
		{"rows, then sabotage", "auto", "auto", "after", []string{"geneve", "wireguard"}, []string{"both/*/udp", "any"}, []string{
			"of-this-test-native-vxlan: both/vxlan/udp both/vxlan/udp[rome-node-gw] both/vxlan/udp[milan-gw-pods]",
			"of-this-test-vm-geneve: both/geneve/udp any any[rome-node-gw]",
		}},
		{"patterns with overlays", "auto", "auto", "", []string{"geneve", "wireguard"}, []string{"*@vxlan", "both/*/udp@geneve"}, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp both/vxlan/udp",
			"of-this-test-vm-geneve: both/geneve/udp",
			"of-this-test-vm-vxlan: any",
		}},
		{"a row that is about no overlay, in both", "auto", "auto", "", []string{"geneve"}, []string{"any@vxlan", "any@geneve"}, []string{
			"of-this-test-native-vxlan: any",
			"of-this-test-vm-geneve: any",
		}},
		{"a pattern's overlay goes before the flag's", "auto", "vxlan", "", []string{"geneve"}, []string{"both/*/tcp", "both/*/udp@geneve"}, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp",
			"of-this-test-vm-geneve: both/geneve/udp",
		}},
		{"left out", "auto", "auto", "", []string{"geneve"}, []string{"*@vxlan", "both@geneve", "!both/*/udp", "!any"}, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp",
			"of-this-test-vm-geneve: both/geneve/tcp",
		}},
		{"all but those left out", "auto", "vxlan", "", []string{"geneve"}, []string{"!any"}, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp both/vxlan/udp",
		}},
		{"named with its overlay and without", "auto", "auto", "", []string{"geneve"}, []string{"both/*/tcp", "both@geneve", "any@vxlan", "any"}, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp any",
			"of-this-test-vm-geneve: both/geneve/tcp both/geneve/udp",
		}},
		{"sabotages of each overlay that is asked for", "auto", "auto", "only", []string{"geneve"}, []string{"both@vxlan", "both@geneve"}, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp[rome-node-gw] both/vxlan/udp[milan-gw-pods]",
			"of-this-test-vm-geneve: both/geneve/tcp[rome-node-gw]",
		}},
		{"a sabotage is made in one of them, and each has one", "auto", "auto", "only", []string{"geneve"}, []string{"any@vxlan", "any@geneve", "both/geneve@geneve", "both/vxlan@vxlan"}, []string{
			"of-this-test-native-vxlan: any[rome-node-gw] both/vxlan/tcp[rome-node-gw] both/vxlan/udp[milan-gw-pods]",
			"of-this-test-vm-geneve: any[rome-node-gw] both/geneve/tcp[rome-node-gw]",
		}},
		{"sabotage of the rows that can run", "native", "auto", "only", []string{"geneve"}, []string{"both"}, []string{
			"of-this-test-native-vxlan: both/vxlan/tcp[rome-node-gw] both/vxlan/udp[milan-gw-pods]",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := runOptions{world: tt.world, overlay: tt.overlay, sabotage: tt.sabotage, seed: "a"}
			selected, err := choose(three(t), tt.patterns, o)
			assert.NilError(t, err)
			c, err := newChooser(tt.world, tt.overlay, machine(t, tt.lacks...), nil)
			assert.NilError(t, err)
			assert.DeepEqual(t, sorted(shown(groups(selected, c, o))), sorted(tt.want))
		})
	}
}

// TestAtMost: of each scenario and @ no more rows and sabotages run than --rows and
// --sabotages say. Rows are spread over all that there are; the seed draws sabotages.
func TestAtMost(t *testing.T) {
	o := runOptions{world: "auto", overlay: "auto", sabotage: sabotageAfter, seed: "a", rows: 1, sabotages: 1}
	selected, err := choose(three(t), []string{"*@vxlan", "both/*/udp@geneve", "both/*/tcp@geneve"}, o)
	assert.NilError(t, err)
	c, err := newChooser("auto", "auto", machine(t, "geneve"), nil)
	assert.NilError(t, err)
	assert.DeepEqual(t, sorted(shown(groups(selected, c, o))), sorted([]string{
		"of-this-test-native-vxlan: both/vxlan/tcp any both/vxlan/tcp[milan-gw-pods] any[rome-node-gw]",
		"of-this-test-vm-geneve: both/geneve/tcp both/geneve/tcp[rome-node-gw]",
	}))
	// Where there is no time for all sabotages of a lab, each run begins with others.
	first := map[string]bool{}
	for seed := range 20 {
		o.seed, o.sabotageTime.every = fmt.Sprint(seed), time.Second
		for _, g := range groups(selected, c, o) {
			if len(g.sabotages) > 1 {
				first[g.sabotages[0].scenario.Name] = true
			}
		}
	}
	assert.DeepEqual(t, first, map[string]bool{"both": true, "any": true})
	made := map[string]bool{}
	o.sabotageTime, o.rows = sabotageTimes{}, 0
	for seed := range 20 {
		o.seed = fmt.Sprint(seed)
		for _, g := range groups(selected, c, o) {
			for _, of := range g.sabotages {
				assert.Equal(t, len(of.items), 1, "seed %s", o.seed)
				if g.overlay == "vxlan" && of.scenario.Name == "both" {
					made[of.items[0].sabotage.Withhold] = true
				}
			}
		}
	}
	assert.DeepEqual(t, made, map[string]bool{"routeconfiguration/rome-node-gw": true, "routeconfiguration/milan-gw-pods": true})
	assert.DeepEqual(t, spread([]int{0, 1, 2, 3, 4, 5, 6}, 3), []int{0, 2, 4})
	assert.DeepEqual(t, spread([]int{0, 1}, 3), []int{0, 1})
	assert.DeepEqual(t, spread([]int{0, 1}, 0), []int{0, 1})
	for want, o := range map[string]runOptions{
		"--rows -1: at most so many rows of each scenario, or 0 for all":               {rows: -1},
		"--sabotages -1: at most so many sabotages of each scenario, or 0 for all":     {sabotages: -1, sabotage: sabotageOnly},
		"--sabotages and --sabotage-time say which sabotages are made: add --sabotage": {sabotages: 1},
		"--stretch 9: from 1, as scenarios say, to 5 times as long":                    {stretch: 9},
	} {
		o.snapshot, o.pcap, o.jobs, o.stretch = "auto", "fail", 1, max(o.stretch, 1)
		assert.ErrorContains(t, o.check(), want)
	}
}

// sorted forgets in which order the seed has put rows.
func sorted(lines []string) []map[string]int {
	var out []map[string]int
	for _, l := range lines {
		words := map[string]int{}
		for w := range strings.FieldsSeq(l) {
			words[w]++
		}
		out = append(out, words)
	}
	return out
}

// TestLongestFirst: where labs run beside each other, the one with the most to
// do does not come last.
func TestLongestFirst(t *testing.T) {
	c, err := newChooser("native", "auto", machine(t, "geneve"), nil)
	assert.NilError(t, err)
	for jobs, want := range map[int]string{1: "of-this-test-native-geneve", 2: "of-this-test-native-vxlan"} {
		o := runOptions{world: "native", overlay: "auto", sabotage: "after", jobs: jobs}
		selected, err := choose(three(t), nil, o)
		assert.NilError(t, err)
		assert.Equal(t, groups(selected, c, o)[0].name(), want)
	}
}

// TestQueue: where labs run beside each other, virtual machines begin, and where
// they are emulated they leave half of the labs to this kernel, as long as it has
// something to do.
func TestQueue(t *testing.T) {
	vm, native := func(n int) *group { return weighing("vm", n) }, func(n int) *group { return weighing("native", n) }
	all := []*group{native(40), vm(3), native(7), vm(9), native(1)}
	for _, tt := range []struct {
		name     string
		jobs     int
		emulated bool
		want     []string // that run beside each other, after each that ends: the first of them
	}{
		{"one lab at a time", 1, true, []string{"native-1", "native-40", "native-7", "vm-3", "vm-9"}},
		{"two", 2, true, []string{"vm-9 native-40", "native-40 vm-3", "vm-3 native-7", "native-7 native-1", "native-1"}},
		{"two, and real machines", 2, false, []string{"vm-9 vm-3", "vm-3 native-40", "native-40 native-7", "native-7 native-1", "native-1"}},
		{"four", 4, true, []string{"vm-9 native-40 native-7 native-1", "native-40 native-7 native-1 vm-3", "native-7 native-1 vm-3", "native-1 vm-3", "vm-3"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			groups := slices.Clone(all)
			slices.SortFunc(groups, inTurn(tt.jobs))
			q := newQueue(groups, tt.jobs, tt.emulated, 8, 112)
			var running []*group
			var got []string
			for {
				for len(running) < tt.jobs {
					g := q.pick(false)
					if g == nil {
						break
					}
					running = append(running, g)
				}
				if len(running) == 0 {
					break
				}
				var names []string
				for _, g := range running {
					names = append(names, g.topology.Name)
				}
				got = append(got, strings.Join(names, " "))
				q.done(running[0])
				running = running[1:]
			}
			assert.DeepEqual(t, got, tt.want)
		})
	}
}

// TestQueueOfMachines: a second emulated machine runs beside the first one only where
// there is room, or no other lab runs or waits; a third one never, and none is forgotten.
func TestQueueOfMachines(t *testing.T) {
	first, second, third, native := weighing("vm", 3), weighing("vm", 2), weighing("vm", 1), weighing("native", 9)
	q := newQueue([]*group{first, second, third, native}, 3, true, 8, 112)
	assert.Equal(t, q.pick(false), first)
	assert.Equal(t, q.pick(false), native)
	assert.Assert(t, q.pick(false) == nil, "a machine began beside another one and a native lab")
	q.done(native)
	assert.Equal(t, q.pick(false), second)
	assert.Assert(t, q.pick(false) == nil, "a third machine began")
	q.done(first)
	assert.Equal(t, q.pick(false), third)
	assert.Assert(t, q.empty())

	q = newQueue([]*group{first, second, third, native}, 3, true, 8, 112)
	assert.Equal(t, q.pick(false), first)
	assert.Equal(t, q.pick(true), second, "there was room")
	assert.Equal(t, q.pick(true), native, "for a third machine there is none")
	q.done(first)
	assert.Assert(t, q.pick(false) == nil, "a machine began beside another one and a native lab")
	assert.Equal(t, q.pick(true), third)

	alone := newQueue([]*group{first, second}, 1, true, 8, 112)
	assert.Equal(t, alone.pick(false), first)
	assert.Assert(t, alone.pick(false) == nil)
}

// TestQueueOfEmulated: emulated machines and labs with containerd do not run beside each
// other, whichever began; real machines do.
func TestQueueOfEmulated(t *testing.T) {
	first, second, native, ofKind, real := weighing("vm", 2), weighing("vm", 1), weighing("native", 9), weighing("kind", 3), weighing("native", 1)
	real.topology.Clusters = []topology.Cluster{{Runtime: topology.RuntimeContainerd}}
	q := newQueue([]*group{first, second, real, native, ofKind}, 3, true, 8, 112)
	assert.Equal(t, q.pick(false), first)
	assert.Equal(t, q.pick(false), native)
	assert.Assert(t, q.pick(false) == nil, "a lab with containerd began beside an emulated machine")
	q.done(first)
	assert.Equal(t, q.pick(false), second)
	q.done(second)
	assert.Equal(t, q.pick(false), real)
	assert.Assert(t, q.pick(false) == nil)
	q.done(real)
	assert.Equal(t, q.pick(false), ofKind)
	assert.Assert(t, q.empty())

	q = newQueue([]*group{real, first}, 3, true, 8, 112)
	assert.Equal(t, q.pick(true), real)
	assert.Assert(t, q.pick(true) == nil, "an emulated machine began beside a lab with containerd")
	q.done(real)
	assert.Equal(t, q.pick(true), first)

	q = newQueue([]*group{first, real}, 3, false, 8, 112)
	assert.Equal(t, q.pick(false), first)
	assert.Equal(t, q.pick(false), real)

	// On two processors each of them has the machine for itself, whichever began, except that one
	// plain lab of this kernel is beside an emulated machine that leaves it room.
	another := weighing("native", 8)
	q = newQueue([]*group{first, native, second, ofKind, real, another}, 3, true, 2, 112)
	assert.Equal(t, q.pick(true), first)
	assert.Assert(t, q.pick(false) == nil, "something began beside an emulated machine that leaves no room")
	assert.Equal(t, q.pick(true), native)
	assert.Assert(t, q.pick(true) == nil, "a third lab began beside an emulated machine")
	q.done(first)
	assert.Equal(t, q.pick(false), second, "the next machine has the room that the first one left")
	assert.Assert(t, q.pick(true) == nil, "a third lab began beside an emulated machine")
	q.done(second)
	assert.Equal(t, q.pick(false), another, "what began beside another lab on two processors is no plain lab of this kernel")
	assert.Assert(t, q.pick(true) == nil, "something heavy began beside two labs")
	q.done(native)
	assert.Assert(t, q.pick(true) == nil, "something heavy began beside a lab")
	q.done(another)
	for _, g := range []*group{ofKind, real} {
		assert.Equal(t, q.pick(true), g)
		assert.Assert(t, q.pick(true) == nil, "something began beside %s", g.topology.Name)
		q.done(g)
	}
	assert.Assert(t, q.empty())

	// Two labs leave none to a machine, and no kind of lab with containerd has any beside it.
	q = newQueue([]*group{native, another, first, real}, 3, true, 2, 112)
	assert.Equal(t, q.pick(false), native)
	assert.Equal(t, q.pick(false), another)
	assert.Assert(t, q.pick(true) == nil, "a machine began beside two labs")
	q = newQueue([]*group{first, real, ofKind}, 3, true, 2, 112)
	assert.Equal(t, q.pick(false), first)
	assert.Assert(t, q.pick(true) == nil, "a lab with containerd began beside an emulated machine")
}

// TestQueueOfKind: labs of kind and labs of this kernel with containerd do not run
// beside each other; all others do, as real machines do. Who asks before waits for them.
func TestQueueOfKind(t *testing.T) {
	machine, native, one, two, real := weighing("vm", 1), weighing("native", 9), weighing("kind", 3), weighing("kind", 2), weighing("native", 1)
	real.topology.Clusters = []topology.Cluster{{Runtime: topology.RuntimeContainerd}}
	q := newQueue([]*group{machine, one, real, native, two}, 4, false, 8, 112)
	assert.Equal(t, q.take(false), machine)
	assert.Equal(t, q.take(false), one)
	assert.Equal(t, q.take(false), native)
	assert.Equal(t, q.take(false), two)
	waited := make(chan *group)
	go func() { waited <- q.take(false) }()
	q.done(native)
	q.done(one)
	assert.Assert(t, q.pick(false) == nil, "a lab with containerd began beside one of kind")
	q.done(two)
	assert.Equal(t, <-waited, real)

	q = newQueue([]*group{real, native, one}, 4, false, 8, 112)
	assert.Equal(t, q.take(false), real)
	assert.Equal(t, q.take(false), native)
	assert.Assert(t, q.pick(false) == nil, "a lab of kind began beside one with containerd")
	q.done(real)
	assert.Equal(t, q.take(false), one)
	assert.Assert(t, q.take(false) == nil)
}

// TestQueueOfInotify: labs of this kernel begin only where the instances of inotify suffice
// for all of them, and one that takes more than there are runs alone. Machines and kind
// take none of these.
func TestQueueOfInotify(t *testing.T) {
	of := func(rows int, clusters ...topology.Cluster) *group {
		g := weighing("native", rows)
		g.topology.Clusters = clusters
		return g
	}
	real := topology.Cluster{Runtime: topology.RuntimeContainerd, Nodes: 2} // takes 36
	first, second, hub, huge := of(1, real, real), of(2, real, real), of(3, make([]topology.Cluster, 3)...), of(4, real, real, real, real)
	machine, ofKind := weighing("vm", 1), weighing("kind", 1)
	q := newQueue([]*group{first, second, huge, hub, machine}, 9, false, 8, 112)
	assert.Equal(t, q.pick(true), first)
	assert.Equal(t, q.pick(true), hub, "72 and 72 are more than 112; 72 and 30 are not")
	assert.Equal(t, q.pick(true), machine)
	assert.Assert(t, q.pick(true) == nil)
	q.done(first)
	assert.Equal(t, q.pick(true), second)
	q.done(second)
	assert.Assert(t, q.pick(true) == nil, "what takes more than there is began beside another one")
	q.done(hub)
	assert.Equal(t, q.pick(true), huge, "nothing else takes any")

	q = newQueue([]*group{hub, ofKind, first}, 9, true, 8, 20)
	assert.Equal(t, q.pick(true), hub)
	assert.Equal(t, q.pick(true), ofKind)
	assert.Assert(t, q.pick(true) == nil)
}

// TestInTurn: what waits for others starts before what does not, however long that takes.
func TestInTurn(t *testing.T) {
	real := weighing("native", 3)
	real.topology = &topology.Topology{Name: "real", Clusters: []topology.Cluster{{Runtime: topology.RuntimeContainerd}}}
	ofKind := weighing("kind", 4)
	ofKind.topology = &topology.Topology{Name: "kind", Clusters: real.topology.Clusters}
	all := []*group{weighing("native", 100), real, ofKind, weighing("vm", 1), weighing("native", 9)}
	slices.SortFunc(all, inTurn(3))
	var names []string
	for _, g := range all {
		names = append(names, g.topology.Name)
	}
	assert.DeepEqual(t, names, []string{"vm-1", "real", "native-100", "kind", "native-9"})
}

// weighing is a group of so many rows in a world.
func weighing(world string, rows int) *group {
	return &group{
		topology: &topology.Topology{Name: fmt.Sprintf("%s-%d", world, rows)}, world: world,
		rows: []choice{{items: make([]item, rows)}},
	}
}

// TestDescribe: one line a lab says what runs where and why.
func TestDescribe(t *testing.T) {
	o := runOptions{world: "auto", overlay: "auto", sabotage: "after"}
	selected, err := choose(three(t), nil, o)
	assert.NilError(t, err)
	c, err := newChooser("auto", "auto", machine(t, "geneve", "wireguard"), nil)
	assert.NilError(t, err)
	var lines []string
	for _, g := range groups(selected, c, o) {
		lines = append(lines, g.describe(c.why(g.world, g.lacks, false)))
	}
	assert.DeepEqual(t, lines, []string{
		"of-this-test-native-vxlan: 2 rows and 2 sabotages in the native world (this kernel has what it takes)",
		"of-this-test-vm-geneve: 4 rows and 2 sabotages in the vm world (this kernel has no geneve and no wireguard)",
	})
}

// TestMissingKernelFeature: a scenario that this kernel can't run is skipped
// before anything is built, with what can run it; in CI that fails.
func TestMissingKernelFeature(t *testing.T) {
	for _, tt := range []struct {
		name, pinned string
		lacks        []string
		want         string
	}{
		{"Geneve", "auto", []string{"geneve"}, "this kernel has no geneve; run it with --world vm"},
		{"a scenario of the native world", "native", []string{"geneve"}, "this kernel has no geneve; the scenario asks for the native world, so take a kernel that has it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all := three(t)[1:2]
			all[0].World = tt.pinned
			o := runOptions{world: "native", overlay: "auto", jobs: 2}
			selected, err := choose(all, nil, o)
			assert.NilError(t, err)
			c, err := newChooser("native", "auto", machine(t, tt.lacks...), nil)
			assert.NilError(t, err)

			var out bytes.Buffer
			dir, err := report.NewDir(t.TempDir(), time.Now(), "0000")
			assert.NilError(t, err)
			s := &session{
				app: &app{stdout: &out, stderr: &out}, out: &out, dir: dir, options: o,
				run: &report.Run{World: "native", Labs: []report.Lab{}},
			}
			s.runGroups(t.Context(), groups(selected, c, o), c)
			for _, r := range s.run.Scenarios[0].Rows {
				assert.Equal(t, r.Verdict, report.Skip)
				assert.Equal(t, r.Reason, tt.want)
			}
			assert.Check(t, is.Contains(out.String(), "skipped: "+tt.want))
			assert.Check(t, !strings.Contains(out.String(), "the lab failed"), out.String())

			var exit exitError
			assert.Assert(t, errors.As(s.finish(), &exit))
			assert.Equal(t, exit.code, report.ExitNone)
			s.options.ci = true
			assert.Assert(t, errors.As(s.finish(), &exit))
			assert.Equal(t, exit.code, report.ExitFail)
			_, err = os.Stat(dir.Path + "/result.json")
			assert.NilError(t, err)
		})
	}
}

// TestSequence: what labs write at the same time is printed one after another,
// the first one's at once.
func TestSequence(t *testing.T) {
	var out bytes.Buffer
	q := newSequence(&out)
	for range 3 {
		q.add()
	}
	say := func(part int, text, want string) {
		t.Helper()
		fmt.Fprint(q.parts[part], text)
		assert.Equal(t, out.String(), want)
	}
	end := func(part int, want string) {
		t.Helper()
		assert.NilError(t, q.parts[part].Close())
		assert.Equal(t, out.String(), want)
	}
	say(0, "a1 ", "a1 ")
	say(1, "b1 ", "a1 ")
	say(2, "c1 ", "a1 ")
	end(2, "a1 ")
	say(0, "a2 ", "a1 a2 ")
	end(0, "a1 a2 b1 ")
	say(1, "b2 ", "a1 a2 b1 b2 ")
	end(1, "a1 a2 b1 b2 c1 ")
}

// TestTime: once a run has had its time, no row and no sabotage begins, no lab is built, and what is left
// out is named. What could not run anyway has its verdict; where somebody ends the run, each row has.
func TestTime(t *testing.T) {
	o := runOptions{world: "native", overlay: "vxlan", sabotage: "after", time: time.Minute}
	selected, err := choose(three(t)[:1], nil, o)
	assert.NilError(t, err)
	c, err := newChooser("native", "vxlan", machine(t), nil)
	assert.NilError(t, err)
	ended, end := context.WithCancel(t.Context())
	end()
	all := []string{
		"both/vxlan/tcp", "both/vxlan/udp",
		"both/vxlan/tcp: withhold routeconfiguration/rome-node-gw in milan", "both/vxlan/udp: withhold routeconfiguration/milan-gw-pods in milan",
	}
	for _, tt := range []struct {
		name      string
		ctx       context.Context
		began     time.Duration // ago
		skip      bool
		dead      error
		outOfTime []string
		verdicts  []report.Verdict
	}{
		{"its time is over", t.Context(), 61 * time.Second, false, nil, all, nil},
		{"there is time", t.Context(), 0, false, errors.New("no lab came up"), nil, slices.Repeat([]report.Verdict{report.Infra}, 4)},
		{"no lab came up in time", t.Context(), 61 * time.Second, false, errors.New("no lab came up"), nil, slices.Repeat([]report.Verdict{report.Infra}, 4)},
		{"nothing can run", t.Context(), 61 * time.Second, true, nil, nil, slices.Repeat([]report.Verdict{report.Skip}, 4)},
		{"the run is ended", ended, 61 * time.Second, false, nil, nil, slices.Repeat([]report.Verdict{report.Infra}, 4)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			g := groups(selected, c, o)[0]
			for _, c := range slices.Concat(g.rows, g.sabotages) {
				for n := range c.items {
					if tt.skip {
						c.items[n].skip = "this kernel has no vxlan"
					}
				}
			}
			r := &groupRun{session: &session{options: o, run: &report.Run{Started: time.Now().Add(-tt.began)}}, group: g, out: &out}
			r.dead = tt.dead
			if tt.outOfTime == nil { // there is no lab to open
				for _, c := range g.rows {
					r.choice(tt.ctx, r.inTime(tt.ctx, c), false)
				}
				r.sabotages(tt.ctx)
			} else {
				r.all(tt.ctx)
			}
			slices.Sort(r.result.OutOfTime)
			slices.Sort(tt.outOfTime)
			assert.DeepEqual(t, r.result.OutOfTime, tt.outOfTime)
			assert.Equal(t, strings.Contains(out.String(), "left out: 2. The run has had its 1m0s"), tt.outOfTime != nil, out.String())
			var verdicts []report.Verdict
			for _, sc := range r.scenarios {
				for _, row := range sc.Rows {
					verdicts = append(verdicts, row.Verdict)
				}
			}
			assert.DeepEqual(t, verdicts, tt.verdicts)
		})
	}
}
