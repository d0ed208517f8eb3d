package main

import (
	"errors"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// machine is what the probes find on a machine that lacks the named things.
func machine(t *testing.T, lacks ...string) []world.Probe {
	t.Helper()
	native, vm := []string{"native"}, []string{"vm"}
	both := append(native, vm...)
	probes := []world.Probe{
		{Name: "root", Detail: "user 1000", Fix: "run it with sudo", Needed: both},
		{Name: "binaries", Detail: "not in /bin: isthmus", Fix: "make build kubernetes cni", Needed: both},
		{Name: "memory", Detail: "1.0 GiB available, two clusters need 4", Fix: "end other programs", Needed: both},
		{Name: "qemu-system-x86_64", Detail: "not installed", Fix: "make deps, or apt-get install qemu-system-x86", Needed: vm},
		{Name: "container engine", Detail: "none is installed", Fix: "install Docker", Needed: []string{"kind"}},
		{Name: "nftables NAT", Detail: "this kernel has it not: no such file", Fix: "use --world vm, or a kernel with that module", Needed: native},
	}
	for _, f := range []string{world.ContainerdProbe, "geneve", "wireguard", "vxlan", "dummy", "vrf", "netem", "flowtable"} {
		probes = append(probes, world.Probe{Name: f, Detail: "this kernel has it not: operation not supported"})
	}
	for _, program := range world.Programs() {
		probes = append(probes, world.Probe{Name: program, Detail: "not in /bin", Fix: "make " + program})
	}
	known := map[string]bool{}
	for i := range probes {
		probes[i].OK = true
		known[probes[i].Name] = true
		for _, l := range lacks {
			if probes[i].Name == l {
				probes[i].OK = false
			}
		}
	}
	for _, l := range lacks {
		assert.Assert(t, known[l], "the test knows no probe %q", l)
	}
	return probes
}

// TestSites: what is needed runs in the fastest world that has it.
func TestSites(t *testing.T) {
	some := &topology.Topology{Name: "some"}
	kernelOnly := &topology.Topology{Name: "some", Peerings: []topology.Peering{{Implementation: topology.ImplementationKernel}}}
	containerd := &topology.Topology{Name: "real", Clusters: []topology.Cluster{{Name: "milan"}, {Name: "rome", Runtime: topology.RuntimeContainerd}}}
	chooses := &topology.Topology{Name: "chooses", Overlay: topology.OverlayAuto}
	type flags struct{ world, overlay string }
	auto := flags{"auto", "auto"}
	for _, tt := range []struct {
		name  string
		flags flags
		lacks []string
		up    string
		need  need
		want  site
	}{
		{"a kernel that has all", auto, nil, "", need{topology: some, world: "auto"}, site{world: "native", overlay: "geneve"}},
		{"a kernel without Geneve", auto, []string{"geneve"}, "", need{topology: some, world: "auto"}, site{world: "native", overlay: "vxlan"}},
		{"Geneve is asked for", flags{"auto", "geneve"}, []string{"geneve"}, "", need{topology: some, world: "auto"},
			site{world: "vm", overlay: "geneve", lacks: []string{"geneve"}}},
		{"a row for Geneve", auto, []string{"geneve", "wireguard"}, "", need{topology: some, world: "auto", overlay: "geneve"},
			site{world: "vm", overlay: "geneve", lacks: []string{"geneve"}}},
		{"a row for VXLAN, where the kernel has Geneve", auto, nil, "", need{topology: some, world: "auto", overlay: "vxlan"}, site{world: "native", overlay: "vxlan"}},
		{"a row for VXLAN does with WireGuard in user space", auto, []string{"geneve", "wireguard"}, "", need{topology: some, world: "auto", overlay: "vxlan"},
			site{world: "native", overlay: "vxlan"}},
		{"a row that needs the kernel's", auto, []string{"geneve", "wireguard"}, "", need{topology: some, world: "auto", overlay: "vxlan", features: []string{"wireguard"}},
			site{world: "vm", overlay: "vxlan", lacks: []string{"wireguard"}}},
		{"a topology that needs the kernel's", auto, []string{"geneve", "wireguard"}, "", need{topology: kernelOnly, world: "auto"},
			site{world: "vm", overlay: "geneve", lacks: []string{"wireguard"}}},
		{"a row with a bad network", auto, []string{"netem", "vrf"}, "", need{topology: some, world: "auto", features: []string{"vrf", "netem"}},
			site{world: "vm", overlay: "geneve", lacks: []string{"vrf", "netem"}}},
		{"a kernel without what nodes need", auto, []string{"nftables NAT"}, "", need{topology: some, world: "auto"}, site{world: "vm", overlay: "geneve"}},
		{"a scenario of the virtual machine", auto, nil, "", need{topology: some, world: "vm"}, site{world: "vm", overlay: "geneve"}},
		{"a lab in the virtual machine is up", auto, nil, "some-vm-vxlan", need{topology: some, world: "auto", overlay: "vxlan"}, site{world: "vm", overlay: "vxlan"}},
		{"another one is up", auto, nil, "some-vm-vxlan", need{topology: some, world: "auto", overlay: "geneve"}, site{world: "native", overlay: "geneve"}},
		{"native is asked for", flags{"native", "auto"}, []string{"geneve"}, "", need{topology: some, world: "auto"}, site{world: "native", overlay: "vxlan"}},
		{"native is asked for, and cannot", flags{"native", "auto"}, []string{"geneve", "netem"}, "", need{topology: some, world: "auto", overlay: "geneve", features: []string{"netem"}},
			site{world: "native", overlay: "geneve", lacks: []string{"geneve", "netem"}, skip: "this kernel has no geneve and no netem; run it with --world vm"}},
		{"a scenario of the native world", auto, []string{"geneve"}, "", need{topology: some, world: "native", overlay: "geneve"},
			site{world: "native", overlay: "geneve", lacks: []string{"geneve"}, skip: "this kernel has no geneve; the scenario asks for the native world, so take a kernel that has it"}},
		{"the installation chooses VXLAN", auto, []string{"geneve"}, "", need{topology: chooses, world: "auto"}, site{world: "native", overlay: "vxlan"}},
		{"the installation chooses Geneve", flags{"vm", "auto"}, []string{"geneve"}, "", need{topology: chooses, world: "auto"}, site{world: "vm", overlay: "geneve"}},
		{"the installation would choose another one", flags{"native", "vxlan"}, nil, "", need{topology: chooses, world: "auto"},
			site{world: "native", overlay: "vxlan", skip: "topology chooses leaves the overlay to the installation, which takes geneve in the native world"}},
		{"neither Geneve nor QEMU", auto, []string{"geneve", "qemu-system-x86_64"}, "", need{topology: some, world: "auto", overlay: "geneve"},
			site{world: "vm", overlay: "geneve", lacks: []string{"geneve"}, skip: "this kernel has no geneve, and the vm world can't run here: qemu-system-x86_64: not installed (make deps, or apt-get install qemu-system-x86)"}},
		{"nodes with containerd", auto, []string{"geneve"}, "", need{topology: containerd, world: "auto"}, site{world: "native", overlay: "vxlan"}},
		{"nodes with containerd, in the virtual machine", flags{"vm", "auto"}, nil, "", need{topology: containerd, world: "auto"},
			site{world: "vm", overlay: "geneve", skip: "the nodes of topology real have containerd, which is for the native world"}},
		{"nodes that can't have containerd", flags{"native", "auto"}, []string{world.ContainerdProbe}, "", need{topology: containerd, world: "auto"},
			site{world: "native", overlay: "geneve", skip: "the nodes of topology real can't have containerd here: containerd: this kernel has it not: operation not supported ()"}},
		{"a program that was built", auto, nil, "", need{topology: some, world: "auto", features: []string{"liqoctl"}}, site{world: "native", overlay: "geneve"}},
		{"a program that nobody asks for", auto, []string{"liqoctl"}, "", need{topology: some, world: "auto"}, site{world: "native", overlay: "geneve"}},
		{"a program that was not built", auto, []string{"liqoctl"}, "", need{topology: some, world: "auto", features: []string{"liqoctl"}},
			site{world: "native", overlay: "geneve", skip: "a program is missing: liqoctl: not in /bin (make liqoctl)"}},
		{"a program that was not built, for kind", flags{"kind", "auto"}, []string{"liqoctl"}, "", need{topology: some, world: "auto", features: []string{"liqoctl"}},
			site{world: "kind", overlay: "geneve", skip: "a program is missing: liqoctl: not in /bin (make liqoctl)"}},
		{"kind is asked for", flags{"kind", "auto"}, []string{"qemu-system-x86_64", "nftables NAT"}, "", need{topology: some, world: "auto"}, site{world: "kind", overlay: "geneve"}},
		{"kind, on a kernel without Geneve", flags{"kind", "auto"}, []string{"geneve"}, "", need{topology: some, world: "auto", overlay: "geneve"},
			site{world: "kind", overlay: "geneve", lacks: []string{"geneve"}, skip: "this kernel has no geneve; run it with --world vm"}},
		{"kind needs no root, and then nobody knows the kernel", flags{"kind", "auto"}, []string{"root", "geneve"}, "", need{topology: some, world: "auto", overlay: "geneve"},
			site{world: "kind", overlay: "geneve", lacks: []string{"geneve"}}},
		{"kind without an engine", flags{"kind", "auto"}, []string{"container engine"}, "", need{topology: some, world: "auto"},
			site{world: "kind", overlay: "geneve", skip: "the kind world can't run here: container engine: none is installed (install Docker)"}},
		{"a lab of kind is up", flags{"kind", "auto"}, []string{"container engine"}, "some-kind-geneve", need{topology: some, world: "auto"}, site{world: "kind", overlay: "geneve"}},
		{"nodes with containerd, which those of kind have", flags{"kind", "auto"}, []string{world.ContainerdProbe}, "", need{topology: containerd, world: "auto"}, site{world: "kind", overlay: "geneve"}},
		{"an engine is not taken by itself", auto, nil, "some-kind-geneve", need{topology: some, world: "auto"}, site{world: "native", overlay: "geneve"}},
		{"less memory than two clusters need, and the world is asked for", flags{"vm", "auto"}, []string{"memory"}, "", need{topology: some, world: "auto"}, site{world: "vm", overlay: "geneve"}},
		{"the lab that is up took the memory", flags{"native", "auto"}, []string{"memory"}, "some-native-geneve", need{topology: some, world: "auto"}, site{world: "native", overlay: "geneve"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := newChooser(tt.flags.world, tt.flags.overlay, machine(t, tt.lacks...), func(top *topology.Topology, world, overlay string) bool { return labName(top, world, overlay) == tt.up })
			assert.NilError(t, err)
			got := c.choose(tt.need)
			assert.Equal(t, got.world, tt.want.world)
			assert.Equal(t, got.overlay, tt.want.overlay)
			assert.Equal(t, got.skip, tt.want.skip)
			assert.DeepEqual(t, got.lacks, tt.want.lacks)
		})
	}
}

// TestNoWorld: whoever can't run anything hears what to do before anything is
// built.
func TestNoWorld(t *testing.T) {
	for _, tt := range []struct {
		name, world, overlay string
		lacks                []string
		want                 []string
		code                 int
	}{
		{"no QEMU", "vm", "auto", []string{"qemu-system-x86_64"}, []string{
			"lab: the vm world can't run here:", "qemu-system-x86_64: not installed", "→ make deps, or apt-get install qemu-system-x86",
		}, 3},
		{"nothing was built", "auto", "auto", []string{"binaries"}, []string{
			"lab: the native world lacks binaries, and the vm world can't run here:", "binaries: not in /bin: isthmus", "→ make build kubernetes cni",
		}, 3},
		{"a kernel without what nodes need, and native is asked for", "native", "auto", []string{"nftables NAT"}, []string{
			"lab: the native world can't run here:", "nftables NAT: this kernel has it not", "→ use --world vm, or a kernel with that module",
		}, 3},
		{"not root, so nothing else is known", "auto", "auto", []string{"root", "geneve", "binaries"}, []string{"lab: user 1000: run it with sudo"}, 3},
		{"no such world", "moon", "auto", []string{"root"}, []string{`lab: --world "moon": auto, native, vm, kind or kubeconfig`}, 2},
		{"no such overlay", "auto", "ipip", nil, []string{`lab: --overlay "ipip": auto, geneve or vxlan`}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := newChooser(tt.world, tt.overlay, machine(t, tt.lacks...), nil)
			for _, want := range tt.want {
				assert.ErrorContains(t, err, want)
			}
			var exit exitError
			assert.Assert(t, errors.As(err, &exit))
			assert.Equal(t, exit.code, tt.code)
		})
	}
}

// TestWhy: the line of a lab says why it is in its world.
func TestWhy(t *testing.T) {
	for _, tt := range []struct {
		world, of string
		lacks     []string
		machine   []string
		up        bool
		want      string
	}{
		{"auto", "native", nil, nil, false, "this kernel has what it takes"},
		{"auto", "vm", []string{"geneve", "netem"}, nil, false, "this kernel has no geneve and no netem"},
		{"auto", "vm", nil, []string{"nftables NAT"}, false, "the native world lacks nftables NAT"},
		{"auto", "vm", nil, nil, false, "the scenarios ask for it"},
		{"auto", "vm", []string{"geneve"}, nil, true, "it is up"},
		{"vm", "vm", []string{"geneve"}, nil, false, "--world vm"},
	} {
		c, err := newChooser(tt.world, "auto", machine(t, tt.machine...), nil)
		assert.NilError(t, err)
		assert.Equal(t, c.why(tt.of, tt.lacks, tt.up), tt.want)
	}
}

// TestPick: a lab's name may be cut short as long as it is clear which is
// meant.
func TestPick(t *testing.T) {
	three := []string{"two-clusters-native-vxlan", "two-clusters-vm-geneve", "two-clusters-vm-geneve-run-8f3a"}
	for _, tt := range []struct {
		running   []string
		name      string
		want, err string
	}{
		{three[:1], "", three[0], ""},
		{three[:1], "two-clusters", three[0], ""},
		{three, "two-clusters-n", three[0], ""},
		{three, "two-clusters-vm-geneve", three[1], ""}, // exactly
		{three, "two-clusters", "", `"two-clusters" may be any of the labs two-clusters-native-vxlan, two-clusters-vm-geneve, two-clusters-vm-geneve-run-8f3a: write more of the name`},
		{three, "", "", "several labs are running: say --lab two-clusters-native-vxlan|two-clusters-vm-geneve|two-clusters-vm-geneve-run-8f3a"},
		{three, "hub", "", `no lab "hub" is running`},
		{nil, "two-clusters", "", `no lab "two-clusters" is running`},
		{nil, "", "", "lab up two-clusters starts one"},
	} {
		got, err := pick(tt.running, tt.name)
		assert.Equal(t, got, tt.want, tt.name)
		if tt.err == "" {
			assert.NilError(t, err)
		} else {
			assert.ErrorContains(t, err, tt.err)
		}
	}
}

// TestTight: that a machine has less memory than labs take keeps nobody from trying who
// names a world, but it is said, in the world kind as well.
func TestTight(t *testing.T) {
	probes := machine(t, "memory", "nftables NAT")
	for i := range probes {
		if probes[i].Name == "memory" {
			probes[i].Needed = append(probes[i].Needed, "kind")
		}
	}
	for _, name := range []string{"native", "kind"} {
		assert.DeepEqual(t, chooser{probes: probes}.tight(name), []string{
			"a lab of the " + name + " world may fail here: memory: 1.0 GiB available, two clusters need 4 (end other programs)",
		})
	}
	assert.Equal(t, len(chooser{probes: machine(t)}.tight("kind")), 0)
}
