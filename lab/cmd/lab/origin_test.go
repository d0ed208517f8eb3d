package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// TestMain lets the tests' own program be a lab's processes.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "supervise" || os.Args[1] == "agent") {
		main()
	}
	os.Exit(m.Run())
}

const originTopology = `# drawing
clusters:
  milan: { nodes: 1, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 }
`

// checkout makes a folder with all that a lab of a topology is made from.
func checkout(t *testing.T) (place, labConfig) {
	t.Helper()
	p := place{t.TempDir()}
	write := func(path, text string) {
		t.Helper()
		assert.NilError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		assert.NilError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	file := filepath.Join(p.topologies(), "small.yaml")
	write(file, originTopology)
	write(filepath.Join(p.chart(), "values.yaml"), "overlay: vxlan\n")
	top, err := topology.Load(file)
	assert.NilError(t, err)
	c := labConfig{name: "origin-" + strings.ToLower(newSeed()), topology: top, world: supervisor.Native, overlay: "vxlan"}
	cfg := builder{place: p}.config(c)
	for _, f := range cfg.Files() {
		write(filepath.Join(p.bin(), f), f)
	}
	return p, c
}

// TestReuse: lab run uses a lab that is up only when it is whole, the user's own,
// and made from the very files that it would be made from now.
func TestReuse(t *testing.T) {
	nettest.NeedRoot(t)
	p, c := checkout(t)
	find := func(p place) (bool, string) {
		client, why := newReuse(p).find(t.Context(), c)
		return client != nil, why
	}
	used, why := find(p)
	assert.Equal(t, used, false)
	assert.Equal(t, why, "") // no lab runs, so there is nothing to say

	client, err := supervisor.Start(t.Context(), supervisor.Config{
		Name: c.name, World: supervisor.Native, Spec: world.Plan(c.topology), BinDir: p.bin(), Ephemeral: true, KubernetesLess: true,
	})
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, client.Close()) })
	_, why = find(p)
	assert.Check(t, is.Contains(why, "it has not come up whole"))
	assert.Check(t, is.Contains(upAlready(c.name), "it may not be whole"))

	from, err := builder{place: p}.originOf(c)
	assert.NilError(t, err)
	assert.NilError(t, from.keep(c.name))
	assert.Check(t, is.Contains(upAlready(c.name), "is up already"))
	used, why = find(p)
	assert.Equal(t, used, true, why)
	assert.Equal(t, newReuse(p).up(t.Context())(c.topology, c.world, c.overlay), false) // another name

	other, _ := checkout(t)
	for _, tt := range []struct {
		name   string
		place  place
		change func(t *testing.T)
		want   string
	}{
		{"another user", p, func(t *testing.T) { t.Setenv("SUDO_UID", "4711") }, "root (user 0) has made it"},
		{"another checkout", other, func(*testing.T) {}, "it is of the checkout " + p.root},
		{"a new daemon", p, func(t *testing.T) { change(t, filepath.Join(p.bin(), "isthmus")) }, "bin/isthmus is another one since it was made"},
		{"another chart", p, func(t *testing.T) { change(t, filepath.Join(p.chart(), "values.yaml")) }, "the chart is another one since it was made"},
		{"a file more in the chart", p, func(t *testing.T) { change(t, filepath.Join(p.chart(), "crds", "more.yaml")) }, "the chart is another one since it was made"},
		{"another topology", p, func(t *testing.T) { change(t, c.topology.File) }, "the topology is another one since it was made"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("SUDO_UID", "")
			tt.change(t)
			used, why := find(tt.place)
			assert.Equal(t, used, false)
			assert.Equal(t, why, tt.want)
		})
		used, why := find(p)
		assert.Equal(t, used, true, why)
	}
}

// change changes a file until the test ends.
func change(t *testing.T, path string) {
	t.Helper()
	was, err := os.ReadFile(path)
	if err == nil {
		t.Cleanup(func() { assert.Check(t, os.WriteFile(path, was, 0o644)) })
	} else {
		t.Cleanup(func() { assert.Check(t, os.RemoveAll(filepath.Dir(path))) })
	}
	assert.NilError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	assert.NilError(t, os.WriteFile(path, append(was, "# changed\n"...), 0o644))
}

// TestOriginIsWhatSnapshotsDependOn: a snapshot of a lab is of use exactly where
// the lab itself would be.
func TestOriginIsWhatSnapshotsDependOn(t *testing.T) {
	p, c := checkout(t)
	before, err := builder{place: p}.originOf(c)
	assert.NilError(t, err)
	again, err := builder{place: p}.originOf(c)
	assert.NilError(t, err)
	assert.DeepEqual(t, before.parts(), again.parts())
	for _, path := range []string{filepath.Join(p.bin(), "isthmus"), filepath.Join(p.chart(), "values.yaml"), c.topology.File} {
		t.Run(filepath.Base(path), func(t *testing.T) {
			change(t, path)
			now, err := builder{place: p}.originOf(c)
			assert.NilError(t, err)
			assert.Assert(t, strings.Join(now.parts(), ",") != strings.Join(before.parts(), ","))
		})
	}
}
