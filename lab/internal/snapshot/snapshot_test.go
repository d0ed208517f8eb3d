package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

func save(t *testing.T, s *Store, level Level, key, memory string) Snapshot {
	t.Helper()
	snap, err := s.Save(Info{Level: level, Key: key, Machine: "test"}, func(d *Draft) error {
		return d.WriteMemory(strings.NewReader(memory))
	})
	assert.NilError(t, err)
	return snap
}

func keys(t *testing.T, s *Store) string {
	t.Helper()
	all, err := s.List()
	assert.NilError(t, err)
	var out []string
	for _, snap := range all {
		out = append(out, string(snap.Level)+" "+snap.Key)
	}
	return strings.Join(out, ", ")
}

func TestWhatWasSavedIsFound(t *testing.T) {
	s := Open(t.TempDir())
	assert.Equal(t, keys(t, s), "")
	save(t, s, Booted, "a", "memory")
	snap, ok := s.Find(Booted, "a")
	assert.Assert(t, ok)
	assert.Assert(t, time.Since(snap.Created) < time.Minute)
	assert.Equal(t, snap.Size, int64(len("memory")))
	var got bytes.Buffer
	assert.NilError(t, snap.ReadMemory(&got))
	assert.Equal(t, got.String(), "memory")
	for _, tt := range []struct {
		level Level
		key   string
	}{{Booted, "b"}, {Converged, "a"}} {
		_, ok := s.Find(tt.level, tt.key)
		assert.Assert(t, !ok, "%s %s", tt.level, tt.key)
	}
	save(t, s, Booted, "a", "another") // replaces
	snap, ok = s.Find(Booted, "a")
	assert.Assert(t, ok)
	assert.NilError(t, snap.ReadMemory(new(bytes.Buffer)))
	assert.Equal(t, snap.Memory, int64(len("another")))
}

func TestASnapshotThatIsNotWhatItWas(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(memory string) error
		want  string
	}{
		{"truncated", func(f string) error { return os.Truncate(f, 3) }, "has 3 bytes of 6"},
		{"changed", func(f string) error { return os.WriteFile(f, []byte("mEmory"), 0o600) }, "checksum"},
		{"gone", os.Remove, "no such file"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := Open(t.TempDir())
			snap := save(t, s, Booted, "a", "memory")
			assert.NilError(t, tt.spoil(filepath.Join(snap.Dir, memoryFile)))
			assert.ErrorContains(t, snap.ReadMemory(new(bytes.Buffer)), tt.want)
		})
	}
	t.Run("without its description", func(t *testing.T) {
		s := Open(t.TempDir())
		snap := save(t, s, Booted, "a", "memory")
		assert.NilError(t, os.Truncate(filepath.Join(snap.Dir, infoFile), 10))
		_, ok := s.Find(Booted, "a")
		assert.Assert(t, !ok)
		assert.Equal(t, keys(t, s), "")
		save(t, s, Booted, "a", "memory") // takes its place
		assert.Equal(t, keys(t, s), "L1 a")
	})
}

func TestACrashHalfWayLeavesNothingThatIsUsed(t *testing.T) {
	s := Open(t.TempDir())
	save(t, s, Booted, "a", "old")
	_, err := s.Save(Info{Level: Booted, Key: "a"}, func(d *Draft) error {
		assert.NilError(t, d.WriteMemory(strings.NewReader("half of the n")))
		assert.Equal(t, keys(t, s), "L1 a", "a draft must not be listed")
		return errors.New("crash")
	})
	assert.ErrorContains(t, err, "crash")
	snap, ok := s.Find(Booted, "a")
	assert.Assert(t, ok)
	assert.Equal(t, snap.Memory, int64(len("old")))

	// A process that was killed could not even clean up.
	draft := filepath.Join(s.dir, ".tmp-1")
	assert.NilError(t, os.MkdirAll(draft, 0o700))
	assert.NilError(t, os.WriteFile(filepath.Join(draft, infoFile), []byte(`{"level":"L1","key":"b"}`), 0o600))
	_, ok = s.Find(Booted, "b")
	assert.Assert(t, !ok)
	old := time.Now().Add(-2 * abandoned)
	assert.NilError(t, os.Chtimes(draft, old, old))
	save(t, s, Booted, "c", "x")
	_, err = os.Stat(draft)
	assert.ErrorIs(t, err, os.ErrNotExist)
}

func TestOnlySoManyAreKept(t *testing.T) {
	s := Open(t.TempDir())
	save(t, s, Converged, "other", "x")
	for i := range keep[Booted] {
		snap := save(t, s, Booted, fmt.Sprint(i), "x")
		age := time.Now().Add(time.Duration(i-100) * time.Minute)
		assert.NilError(t, os.Chtimes(snap.Dir, age, age))
	}
	_, ok := s.Find(Booted, "0") // the oldest one, but of use just now
	assert.Assert(t, ok)
	save(t, s, Booted, "new", "x")
	all, err := s.List()
	assert.NilError(t, err)
	assert.Equal(t, len(all), keep[Booted]+1)
	_, ok = s.Find(Booted, "0")
	assert.Assert(t, ok)
	_, ok = s.Find(Booted, "1")
	assert.Assert(t, !ok)

	gone, err := s.Prune()
	assert.NilError(t, err)
	assert.Equal(t, len(gone), keep[Booted]+1)
	assert.Equal(t, keys(t, s), "")
}
