package main

import (
	"fmt"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// TestBenchSites: which combinations are measured where, and why others are
// not.
func TestBenchSites(t *testing.T) {
	two := &topology.Topology{Name: "two", Peerings: []topology.Peering{{Implementation: topology.ImplementationAuto}}}
	for _, tt := range []struct {
		name  string
		o     benchOptions
		lacks []string
		want  []string
	}{
		{"everything", benchOptions{world: "auto", overlay: "auto", implementation: "auto"}, nil, []string{
			"native geneve kernel", "native geneve userspace", "native vxlan kernel", "native vxlan userspace",
			"vm geneve kernel", "vm geneve userspace", "vm vxlan kernel", "vm vxlan userspace",
		}},
		{"a kernel with neither", benchOptions{world: "auto", overlay: "auto", implementation: "auto"}, []string{"geneve", "wireguard"}, []string{
			"native geneve kernel: this kernel has no geneve and no wireguard", "native geneve userspace: this kernel has no geneve",
			"native vxlan kernel: this kernel has no wireguard", "native vxlan userspace",
			"vm geneve kernel", "vm geneve userspace", "vm vxlan kernel", "vm vxlan userspace",
		}},
		{"native is asked for", benchOptions{world: "native", overlay: "geneve", implementation: "auto"}, []string{"geneve", "wireguard"}, []string{
			"native geneve kernel: this kernel has no geneve and no wireguard; run it with --world vm",
			"native geneve userspace: this kernel has no geneve; run it with --world vm",
		}},
		{"one", benchOptions{world: "vm", overlay: "vxlan", implementation: "userspace"}, []string{"geneve"}, []string{"vm vxlan userspace"}},
		{"no QEMU", benchOptions{world: "auto", overlay: "vxlan", implementation: "userspace"}, []string{"qemu-system-x86_64"}, []string{
			"native vxlan userspace",
			"vm vxlan userspace: the vm world can't run here: qemu-system-x86_64: not installed (make deps, or apt-get install qemu-system-x86)",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := newChooser(tt.o.world, tt.o.overlay, machine(t, tt.lacks...), nil)
			assert.NilError(t, err)
			var got []string
			for _, s := range benchSites(two, tt.o, c) {
				line := fmt.Sprintf("%s %s %s", s.World, s.Overlay, s.Implementation)
				if s.skip != "" {
					line += ": " + s.skip
				}
				got = append(got, line)
				assert.Equal(t, s.topology.Peerings[0].Implementation, s.Implementation)
			}
			assert.DeepEqual(t, got, tt.want)
		})
	}
	assert.Equal(t, two.Peerings[0].Implementation, topology.ImplementationAuto, "the topology itself stays")
}

// TestBenchPod: the pod is not on the gateway's node.
func TestBenchPod(t *testing.T) {
	two, err := topology.Load("../../../topologies/two-clusters.yaml")
	assert.NilError(t, err)
	for node, want := range map[int]string{1: "milan/probe", 2: "milan/web"} {
		o, err := benchPod(two, "milan", node)
		assert.NilError(t, err)
		assert.Equal(t, o.String(), want)
	}
	two.Pods = two.Pods[:1]
	_, err = benchPod(two, "milan", 1)
	assert.ErrorContains(t, err, "has no pod in milan outside node 1, where the gateway is")
}
