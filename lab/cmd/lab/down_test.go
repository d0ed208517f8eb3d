package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

func TestWhichLabsGoDown(t *testing.T) {
	running := []string{"alices", "two-clusters-native-geneve", "two-clusters-native-vxlan"}
	owner := func(lab string) (string, bool) {
		if lab == "alices" {
			return "alice (user 1000)", false
		}
		return "bob (user 1001)", true
	}
	stays := []string{"lab alices is alice (user 1000)'s and stays: lab down alices --force takes it down"}
	for _, tt := range []struct {
		name       string
		d          downRequest
		running    []string
		want, left []string
		err        string
	}{
		{name: "one by its name", d: downRequest{name: "two-clusters-native-vxlan"}, running: running, want: running[2:]},
		{name: "one by how it starts", d: downRequest{name: "two-clusters-native-v"}, running: running, want: running[2:]},
		{name: "may be several", d: downRequest{name: "two"}, running: running, err: "may be any of the labs two-clusters-native-geneve, two-clusters-native-vxlan"},
		{name: "the only one of mine", running: running[:2], want: running[1:2], left: stays},
		{name: "none of mine", running: running[:1], left: stays},
		{name: "none", err: ""},
		{name: "all of mine", d: downRequest{all: true}, running: running, want: running[1:], left: stays},
		{name: "another user's", d: downRequest{name: "alices"}, running: running, err: "lab alices is alice (user 1000)'s: ask, or take it down with lab down alices --force"},
		{name: "another user's by how it starts", d: downRequest{name: "alice"}, running: running, err: `no lab "alice" is running`},
		{name: "another user's by force", d: downRequest{name: "alices", force: true}, running: running, want: running[:1]},
		{name: "by force and how it starts", d: downRequest{name: "alice", force: true}, running: running, err: `no lab "alice" is running`},
		{name: "by force and no name", d: downRequest{force: true}, running: running, err: "--force: give the whole name of the lab"},
		{name: "all by force", d: downRequest{all: true, force: true}, running: running, err: "--force: give the whole name of the lab"},
		{name: "all and a name", d: downRequest{name: "alices", all: true}, running: running, err: `--all: "alices" is one of them`},
		{name: "one that was dead", d: downRequest{name: "three-c", removed: []string{"three-clusters-native-vxlan"}}, running: running},
		{name: "one that never was", d: downRequest{name: "four", removed: []string{"three-clusters-native-vxlan"}}, running: running, err: `no lab "four" is running`},
		{name: "one that lives beside a dead one", d: downRequest{name: "two-clusters-native-v", removed: []string{"two-clusters-native-v1"}}, running: running, want: running[2:]},
	} {
		t.Run(tt.name, func(t *testing.T) {
			names, left, err := tt.d.labs(tt.running, owner)
			if tt.err != "" {
				assert.ErrorContains(t, err, tt.err)
				return
			}
			assert.NilError(t, err)
			assert.DeepEqual(t, names, tt.want)
			assert.DeepEqual(t, left, tt.left)
		})
	}
}

func TestRemoveDead(t *testing.T) {
	base := t.TempDir()
	var labs []*rundir.Lab
	for _, name := range []string{"dead", "lives"} {
		lab, err := rundir.Claim(filepath.Join(base, name), false)
		assert.NilError(t, err)
		labs = append(labs, lab)
	}
	assert.NilError(t, labs[0].Lock.Close())
	defer labs[1].Lock.Close()
	var out bytes.Buffer
	names, err := removeDead(t.Context(), &out, base, "")
	assert.NilError(t, err)
	assert.DeepEqual(t, names, []string{"dead"})
	assert.Equal(t, strings.ReplaceAll(out.String(), base, "BASE"), "lab dead was killed: removed the run directory BASE/dead\n")
	entries, err := os.ReadDir(base)
	assert.NilError(t, err)
	assert.Equal(t, len(entries), 1)
	assert.Equal(t, entries[0].Name(), "lives")
}

// TestRemoveDeadTells: somebody who looks at labs hears of one that is from before the machine was
// started again, once.
func TestRemoveDeadTells(t *testing.T) {
	machine, err := os.ReadFile("/etc/machine-id")
	assert.Assert(t, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
	base, kept := t.TempDir(), t.TempDir()
	id := strings.TrimSuffix(strings.TrimSpace(string(machine)), "uninitialized") // machine-id(5): it has none yet
	record := fmt.Sprintf(`{"name": "before", "engine": "docker", "ready": true, "start": {"machine": %q, "boot": "before"}}`, id)
	assert.NilError(t, os.WriteFile(filepath.Join(kept, "before.json"), []byte(record), 0o600))
	assert.NilError(t, os.WriteFile(filepath.Join(kept, "bad.json"), []byte("{"), 0o600))
	probe := probeDead(base, kept)
	assert.Check(t, !probe.OK)
	assert.Check(t, is.Contains(probe.Detail, "before is from before the machine was started again, and has left clusters of kind"))
	for _, want := range []string{"lab before is from before the machine was started again: lab down before removes its clusters of kind\n", ""} {
		var out bytes.Buffer
		names, err := removeDead(t.Context(), &out, base, kept)
		assert.NilError(t, err)
		assert.Check(t, is.Len(names, 0))
		bad, rest, _ := strings.Cut(out.String(), "\n")
		assert.Check(t, is.Contains(bad, "labs from before the machine was started again: the copy of the record of lab bad can't be read"))
		assert.Equal(t, rest, want)
	}
	assert.Check(t, is.Contains(probeDead(base, kept).Detail, "before is from before"))
}
