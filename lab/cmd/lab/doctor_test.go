package main

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
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
		{Name: "nftables NAT", Detail: "this kernel has it not: no such file", Fix: "use --world vm, or a kernel with that module", Needed: native},
		{Name: "geneve", Detail: "this kernel has it not: operation not supported"},
		{Name: "wireguard", Detail: "this kernel has it not: operation not supported"},
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

func TestChooseWorld(t *testing.T) {
	for _, tt := range []struct {
		name, wanted string
		lacks        []string
		want, why    string
		err          []string // nothing: it can run
		code         int
	}{
		{"a kernel that has all", "auto", nil, "native", "", nil, 0},
		{"a kernel without Geneve", "auto", []string{"geneve"}, "vm", " (this kernel has no geneve)", nil, 0},
		{"a kernel without either", "auto", []string{"geneve", "wireguard"}, "vm", " (this kernel has no geneve and no wireguard)", nil, 0},
		{"a kernel without what nodes need", "auto", []string{"nftables NAT"}, "vm", " (the native world lacks nftables NAT)", nil, 0},
		{"native is asked for, for what needs no Geneve", "native", []string{"geneve"}, "native", "", nil, 0},
		{"a machine without QEMU that does not need it", "auto", []string{"qemu-system-x86_64"}, "native", "", nil, 0},
		{"less memory than two clusters need, and the world is asked for", "vm", []string{"memory"}, "vm", "", nil, 0},

		{"no QEMU", "vm", []string{"qemu-system-x86_64"}, "", "", []string{
			"lab: the vm world can't run here:", "qemu-system-x86_64: not installed", "→ make deps, or apt-get install qemu-system-x86",
		}, 3},
		{"neither Geneve nor QEMU", "auto", []string{"geneve", "qemu-system-x86_64"}, "", "", []string{
			"lab: this kernel has no geneve, and the vm world can't run here:", "→ make deps, or apt-get install qemu-system-x86",
		}, 3},
		{"nothing was built", "auto", []string{"binaries"}, "", "", []string{
			"lab: the native world lacks binaries, and the vm world can't run here:", "binaries: not in /bin: isthmus", "→ make build kubernetes cni",
		}, 3},
		{"a kernel without what nodes need, and native is asked for", "native", []string{"nftables NAT"}, "", "", []string{
			"lab: the native world can't run here:", "nftables NAT: this kernel has it not", "→ use --world vm, or a kernel with that module",
		}, 3},
		{"not root, so nothing else is known", "auto", []string{"root", "geneve", "binaries"}, "", "", []string{"lab: user 1000: run it with sudo"}, 3},
		{"no such world", "moon", []string{"root"}, "", "", []string{`lab: --world "moon": auto, native or vm`}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, why, err := chooseWorld(tt.wanted, machine(t, tt.lacks...))
			assert.Equal(t, got, tt.want)
			assert.Equal(t, why, tt.why)
			if tt.err == nil {
				assert.NilError(t, err)
				return
			}
			for _, want := range tt.err {
				assert.ErrorContains(t, err, want)
			}
			var exit exitError
			assert.Assert(t, errors.As(err, &exit))
			assert.Equal(t, exit.code, tt.code)
		})
	}
}

// TestMissingKernelFeature: a scenario that this kernel can't run is skipped
// before anything is built, with what can run it; in CI that fails.
func TestMissingKernelFeature(t *testing.T) {
	for _, tt := range []struct {
		name, pinned string
		requires     []string
		features     []string
		want         string
	}{
		{"Geneve", "auto", []string{"geneve"}, []string{"wireguard"}, "this kernel has no geneve; run it with --world vm"},
		{"both", "auto", []string{"geneve", "wireguard"}, nil, "this kernel has no geneve and no wireguard; run it with --world vm"},
		{"a scenario of the native world", "native", []string{"geneve"}, nil, "this kernel has no geneve; the scenario asks for the native world, so take a kernel that has it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sc, err := scenario.Load("../../../scenarios/geneve-ping.yaml", "../../../topologies")
			assert.NilError(t, err)
			sc.Requires, sc.World = tt.requires, tt.pinned
			sc.Topology.Name = "of-this-test" // and of no lab that is up

			var out bytes.Buffer
			dir, err := report.NewDir(t.TempDir(), time.Now(), "0000")
			assert.NilError(t, err)
			s := &session{
				app: &app{stdout: &out, stderr: &out}, out: &out, features: tt.features, dir: dir,
				run: &report.Run{World: "native", Labs: []report.Lab{}},
			}
			s.runGroup(t.Context(), group{sc.Topology.Name, "native", []choice{{sc, sc.Rows}}})
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
	t.Run("the virtual machine's kernel has them all", func(t *testing.T) {
		s := &session{}
		assert.Equal(t, len(s.unsupported(group{"x", "vm", []choice{{scenario: &scenario.Scenario{Name: "x", Requires: scenario.Features()}}}})), 0)
	})
}
