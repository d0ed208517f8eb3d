package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// overlayAuto is Geneve where the world's kernel has it, and VXLAN elsewhere.
const overlayAuto = "auto"

// tryVM is the advice for what this kernel lacks.
const tryVM = "; run it with --world vm"

// A site is where a row runs: the world and the overlay of its lab.
type site struct {
	world, overlay string
	lacks          []string // features that it needs and this kernel has not
	skip           string   // why it can't run; then the rest is where it should
}

// A chooser finds sites: from what this machine has, what the flags say, and
// which labs are up.
type chooser struct {
	probes         []world.Probe
	world, overlay string // as asked for; auto leaves them open
	up             labUp  // none is when nil
	// clusters are those of the world kubeconfig.
	clusters []kubeconfig.Cluster
}

// limits are those of the world that a selection runs in.
func (c chooser) limits(sel selection) limits {
	switch cmp.Or(sel.at.world, c.world) {
	case kind.World:
		return ofKind(true)
	case kubeconfig.World:
		return ofClusters(c.clusters, c.overlay)
	}
	return limits{}
}

// lacks tells whether a sabotage can't be made where a selection runs; limits.leave
// has said why.
func (c chooser) lacks(sel selection, sab scenario.Sabotage) bool {
	return c.limits(sel).lacks(sel.scenario, sab)
}

// A labUp tells whether a lab is up that can be used.
type labUp func(t *topology.Topology, world, overlay string) bool

// newChooser checks the flags, and that a world can run here at all: whoever
// can't run anything hears it before anything is built, with what to do for
// each thing that is missing.
func newChooser(worldName, overlay string, probes []world.Probe, up labUp) (chooser, error) {
	c := chooser{probes: probes, world: worldName, overlay: overlay, up: up}
	if !slices.Contains([]string{scenario.WorldAuto, supervisor.Native, supervisor.VM, kind.World, kubeconfig.World}, worldName) {
		return c, usageError("--world %q: auto, native, vm, kind or kubeconfig", worldName)
	}
	if overlay != overlayAuto && !slices.Contains(scenario.Overlays(), overlay) {
		return c, usageError("--overlay %q: auto, geneve or vxlan", overlay)
	}
	if worldName == kind.World || worldName == kubeconfig.World {
		return c, nil // where kind can't run, rows are skipped: see try; the other one needs nothing of this machine
	}
	for _, p := range probes {
		if p.Name == "root" && !p.OK { // what the others found says nothing then
			return c, exitError{report.ExitInfra, fmt.Sprintf("lab: %s: %s", p.Detail, p.Fix)}
		}
	}
	if worldName != scenario.WorldAuto {
		if missing := slices.DeleteFunc(lacking(probes, worldName), estimate); len(missing) > 0 {
			return c, cannotRun(worldName, "", missing)
		}
		return c, nil
	}
	native, vm := lacking(probes, supervisor.Native), lacking(probes, supervisor.VM)
	if len(native) > 0 && len(vm) > 0 {
		return c, cannotRun(supervisor.VM, "the native world lacks "+probeNames(native)+", and ", vm)
	}
	return c, nil
}

// need is what a row, or a topology, needs of its site.
type need struct {
	topology *topology.Topology
	features []string // and programs
	overlay  string   // empty: any
	world    string   // scenario.WorldAuto: any
}

// needOf is what a row of a selection needs: a row that is about no overlay has
// that of the pattern.
func needOf(sel selection, r scenario.Row) need {
	return need{sel.scenario.Topology, r.Requires, cmp.Or(r.Overlay, sel.at.overlay), cmp.Or(sel.at.world, sel.scenario.World)}
}

// choose returns the fastest site that has what is needed: a lab that is up,
// then this kernel, then the virtual machine.
func (c chooser) choose(n need) site {
	w := c.world
	if n.world != scenario.WorldAuto {
		w = n.world
	}
	if w != scenario.WorldAuto {
		return c.try(n, w)
	}
	native, vm := c.try(n, supervisor.Native), c.try(n, supervisor.VM)
	switch {
	case native.skip == "" && c.isUp(n, native):
		return native
	case vm.skip == "" && c.isUp(n, vm):
		return vm
	case native.skip == "":
		return native
	case vm.skip == "":
		return vm
	case vm.skip == native.skip: // a program that is missing is so in both
		return native
	}
	vm.skip = strings.TrimSuffix(native.skip, tryVM) + ", and " + vm.skip
	return vm
}

// try returns the site in one world.
func (c chooser) try(n need, w string) site {
	if w == kubeconfig.World {
		return site{world: w, overlay: kubeconfig.Overlay(n.topology, c.clusters)} // limits have left what runs there
	}
	overlay := n.overlay
	if overlay == "" {
		overlay = c.overlay
	}
	features := append(slices.Clone(n.features), overlay) // auto is none
	features = append(features, n.topology.Features()...)
	here := nativeFeatures(c.probes)
	has := scenario.Features() // the virtual machine's kernel has them all
	if w == supervisor.Native || w == kind.World && c.knows() {
		has = here
	}
	preferred := scenario.OverlayVXLAN
	if slices.Contains(has, scenario.OverlayGeneve) {
		preferred = scenario.OverlayGeneve
	}
	if overlay == overlayAuto {
		overlay = preferred
	}
	if n.topology.Overlay == topology.OverlayAuto && overlay != preferred {
		return site{world: w, overlay: overlay, skip: fmt.Sprintf("topology %s leaves the overlay to the installation, which takes %s in the %s world", n.topology.Name, preferred, w)}
	}
	s := site{world: w, overlay: overlay, lacks: without(features, here)}
	missing := without(append(features, overlay), has)
	cannot := lacking(c.probes, w)
	if c.world == w || w == kind.World { // which is only taken where it is named
		cannot = slices.DeleteFunc(cannot, estimate)
	}
	containerd := containerdProbe(c.probes, n.topology)
	if w == kind.World {
		containerd = nil // its nodes have their own
	}
	programs := missingPrograms(c.probes, n.features)
	switch {
	case len(programs) > 0:
		s.skip = "a program is missing: " + probeFixes(programs)
	case containerd != nil && w == supervisor.VM:
		s.skip = fmt.Sprintf("the nodes of topology %s have containerd, which is for the native world", n.topology.Name)
	case containerd != nil && !containerd.OK:
		s.skip = fmt.Sprintf("the nodes of topology %s can't have containerd here: %s", n.topology.Name, probeFixes([]world.Probe{*containerd}))
	case len(missing) > 0 && n.world == supervisor.Native:
		s.skip = lackText(missing) + "; the scenario asks for the native world, so take a kernel that has it"
	case len(missing) > 0:
		s.skip = lackText(missing) + tryVM
	case len(cannot) > 0 && !c.isUp(n, s):
		s.skip = fmt.Sprintf("the %s world can't run here: %s", w, probeFixes(cannot))
	}
	return s
}

// containerdProbe is what the topology's nodes depend on when they have
// containerd; nil: they have not.
func containerdProbe(probes []world.Probe, t *topology.Topology) *world.Probe {
	if !t.Containerd() {
		return nil
	}
	p := found(probes, world.ContainerdProbe)
	return &p
}

// missingPrograms are the probes of the programs that are required and not there.
func missingPrograms(probes []world.Probe, required []string) []world.Probe {
	var out []world.Probe
	for _, name := range world.Programs() {
		if p := found(probes, name); slices.Contains(required, name) && !p.OK {
			out = append(out, p)
		}
	}
	return out
}

// found is the probe of that name.
func found(probes []world.Probe, name string) world.Probe {
	for _, p := range probes {
		if p.Name == name {
			return p
		}
	}
	return world.Probe{Name: name, Detail: "it was not looked for"}
}

// knows tells whether the probes have seen what this kernel has: only root
// does. The kernel of an engine's containers is this one, unless the engine is
// another machine's.
func (c chooser) knows() bool {
	return slices.ContainsFunc(c.probes, func(p world.Probe) bool { return p.Name == "root" && p.OK })
}

func (c chooser) isUp(n need, s site) bool {
	return c.up != nil && c.up(n.topology, s.world, s.overlay)
}

// why says for people why something runs in this world.
func (c chooser) why(w string, lacks []string, up bool) string {
	switch {
	case up:
		return "it is up"
	case c.world != scenario.WorldAuto:
		return "--world " + w
	case w == supervisor.VM && len(lacks) > 0:
		return lackText(lacks)
	case w == supervisor.VM:
		if missing := lacking(c.probes, supervisor.Native); len(missing) > 0 {
			return "the native world lacks " + probeNames(missing)
		}
		return "the scenarios ask for it"
	}
	return "this kernel has what it takes"
}

// labName is the name of a topology's lab.
func labName(t *topology.Topology, worldName, overlay string) string {
	return t.Name + "-" + worldName + "-" + overlay
}

// lacking are the probes that failed and that a world can't be without.
func lacking(probes []world.Probe, name string) []world.Probe {
	var out []world.Probe
	for _, p := range probes {
		if !p.OK && slices.Contains(p.Needed, name) {
			out = append(out, p)
		}
	}
	return out
}

func probeNames(probes []world.Probe) string {
	var names []string
	for _, p := range probes {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

// probeFixes says what is missing and what to do, on one line.
func probeFixes(probes []world.Probe) string {
	var all []string
	for _, p := range probes {
		all = append(all, fmt.Sprintf("%s: %s (%s)", p.Name, p.Detail, p.Fix))
	}
	return strings.Join(all, "; ")
}

// estimate tells whether a probe's bound is rounded up: a small lab, or one
// that is up already, does with less. Whoever names a world has decided.
func estimate(p world.Probe) bool { return p.Name == "memory" || p.Name == "disk space" }

// tight says, a line each, of what a world has less here than labs are known to take.
func (c chooser) tight(world string) []string {
	var out []string
	for _, p := range lacking(c.probes, world) {
		if estimate(p) {
			out = append(out, fmt.Sprintf("a lab of the %s world may fail here: %s: %s (%s)", world, p.Name, p.Detail, p.Fix))
		}
	}
	return out
}

// nativeFeatures are the features of this kernel that scenarios can require.
func nativeFeatures(probes []world.Probe) []string {
	var out []string
	for _, f := range scenario.Features() {
		for _, p := range probes {
			if p.OK && strings.EqualFold(p.Name, f) {
				out = append(out, f)
			}
		}
	}
	return out
}

// without are the wanted features that are not there, each once, in the order
// of scenario.Features.
func without(wanted, has []string) []string {
	var out []string
	for _, f := range scenario.Features() {
		if slices.Contains(wanted, f) && !slices.Contains(has, f) {
			out = append(out, f)
		}
	}
	return out
}

// lackText says that this kernel has not these features.
func lackText(features []string) string {
	return "this kernel has no " + strings.Join(features, " and no ")
}

// cannotRun is the error for a world that lacks something.
func cannotRun(name, because string, missing []world.Probe) error {
	var b strings.Builder
	fmt.Fprintf(&b, "lab: %sthe %s world can't run here:", because, name)
	for _, p := range missing {
		fmt.Fprintf(&b, "\n  %s: %s\n    → %s", p.Name, p.Detail, p.Fix)
	}
	return exitError{report.ExitInfra, b.String()}
}
