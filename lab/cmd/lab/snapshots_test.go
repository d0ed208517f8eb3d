package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
)

func TestSnapshotsAreListedAndPruned(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	code, stdout, _ := lab(t, "vm", "snapshots")
	assert.Equal(t, code, 0)
	assert.Equal(t, stdout, "there are no snapshots: lab up --world vm makes some\n")
	_, stdout, _ = lab(t, "vm", "snapshots", "--json")
	assert.Equal(t, stdout, "[]\n")

	store, err := openSnapshots()
	assert.NilError(t, err)
	for _, info := range []snapshot.Info{
		{Level: snapshot.Booted, Key: "aaa", Machine: "2048 MiB"},
		{Level: snapshot.Converged, Key: "bbb", Topology: "two-clusters", Overlay: "vxlan", Machine: "2048 MiB"},
	} {
		_, err := store.Save(info, func(d *snapshot.Draft) error { return d.WriteMemory(strings.NewReader(strings.Repeat("x", 2e6))) })
		assert.NilError(t, err)
	}
	code, stdout, _ = lab(t, "vm", "snapshots")
	assert.Equal(t, code, 0)
	for _, want := range []string{"L1     -", "L2     two-clusters (vxlan)", "2 MB", "bbb", "2048 MiB"} {
		assert.Assert(t, strings.Contains(stdout, want), "%q is missing:\n%s", want, stdout)
	}
	_, stdout, _ = lab(t, "vm", "snapshots", "--json")
	var all []snapshot.Snapshot
	assert.NilError(t, json.Unmarshal([]byte(stdout), &all))
	assert.Equal(t, len(all), 2)

	var out bytes.Buffer
	printSnapshots(&out, all, time.Now().Add(90*time.Minute))
	assert.Assert(t, strings.Contains(out.String(), " 90m "), out.String())

	code, stdout, _ = lab(t, "vm", "snapshots", "prune")
	assert.Equal(t, code, 0)
	assert.Equal(t, stdout, "2 snapshots are gone (4 MB)\n")
	code, stdout, _ = lab(t, "vm", "snapshots", "prune")
	assert.Equal(t, code, 0)
	assert.Equal(t, stdout, "0 snapshots are gone (0 MB)\n")
}
