// Package snapshot keeps snapshots of virtual machines in the lab's cache: it
// writes them so that nobody ever sees half of one, finds them by what they
// depend on, says when one is truncated, and keeps their number small. What is
// in them it does not know.
package snapshot

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A Level says how far a machine had come.
type Level string

// Levels.
const (
	Booted    Level = "L1" // booted, modules loaded, nothing of a lab
	Converged Level = "L2" // a lab that has converged, with its control planes
)

// keep is how many snapshots of a level are kept: one of each is there for
// every topology of the suite in both overlays. A booted machine takes 70 MB,
// a lab of two clusters 600.
var keep = map[Level]int{Booted: 8, Converged: 8}

// abandoned is the age from which a snapshot that is still being written has
// nobody any more who writes it.
const abandoned = time.Hour

// Files of a snapshot.
const (
	infoFile   = "snapshot.json"
	memoryFile = "memory"
)

// An Info says what a snapshot is.
type Info struct {
	Level    Level     `json:"level"`
	Key      string    `json:"key"` // a hash of all that it depends on
	Topology string    `json:"topology,omitempty"`
	Overlay  string    `json:"overlay,omitempty"`
	Machine  string    `json:"machine"` // for people: memory, processors, kernel
	Created  time.Time `json:"created"`
	Size     int64     `json:"size"` // bytes of everything
	// Memory and MemorySum are the length and the CRC-32C of the file with
	// the machine's memory.
	Memory    int64  `json:"memory"`
	MemorySum uint32 `json:"memorySum"`
}

// A Snapshot is one that is complete.
type Snapshot struct {
	Info
	Dir string `json:"dir"`
}

// A Store is a directory of snapshots.
type Store struct{ dir string }

// Open returns the store in a cache directory. It need not exist.
func Open(cacheDir string) *Store { return &Store{filepath.Join(cacheDir, "snapshots")} }

func name(level Level, key string) string { return string(level) + "-" + key }

// Find returns the snapshot with that key, or false when there is none.
func (s *Store) Find(level Level, key string) (Snapshot, bool) {
	snap, err := read(filepath.Join(s.dir, name(level, key)))
	if err != nil || snap.Level != level || snap.Key != key {
		return Snapshot{}, false
	}
	// Only a memory of when it was last of use, by which Prune goes.
	now := time.Now()
	_ = os.Chtimes(snap.Dir, now, now)
	return snap, true
}

func read(dir string) (snap Snapshot, err error) {
	b, err := os.ReadFile(filepath.Join(dir, infoFile))
	if err != nil {
		return snap, err
	}
	if err := json.Unmarshal(b, &snap.Info); err != nil {
		return snap, fmt.Errorf("%s: %w", dir, err)
	}
	snap.Dir = dir
	return snap, nil
}

// List returns all snapshots, the one that was used last first. One that
// cannot be read is left out: it is never used either.
func (s *Store) List() ([]Snapshot, error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("snapshots: %w", err)
	}
	var out []Snapshot
	used := map[string]time.Time{}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		snap, err := read(filepath.Join(s.dir, e.Name()))
		if err != nil {
			continue
		}
		if st, err := os.Stat(snap.Dir); err == nil {
			used[snap.Dir] = st.ModTime()
		}
		out = append(out, snap)
	}
	slices.SortFunc(out, func(a, b Snapshot) int { return used[b.Dir].Compare(used[a.Dir]) })
	return out, nil
}

// Save makes a snapshot: fill writes its files into a directory, the memory by
// WriteMemory among them. One with the same key is replaced. The oldest ones
// beyond the number that is kept go.
func (s *Store) Save(info Info, fill func(d *Draft) error) (Snapshot, error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return Snapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	tmp, err := os.MkdirTemp(s.dir, ".tmp-")
	if err != nil {
		return Snapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	defer os.RemoveAll(tmp)
	d := &Draft{dir: tmp}
	if err := fill(d); err != nil {
		return Snapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	info.Created, info.Memory, info.MemorySum = time.Now(), d.memory, d.sum
	if info.Size, err = treeSize(tmp); err != nil {
		return Snapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	b, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return Snapshot{}, err
	}
	if err := os.WriteFile(filepath.Join(tmp, infoFile), b, 0o600); err != nil {
		return Snapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	dir := filepath.Join(s.dir, name(info.Level, info.Key))
	// A directory that is not empty cannot be renamed over.
	if err := os.RemoveAll(dir); err != nil {
		return Snapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, fs.ErrExist) { // another one made it meanwhile
		return Snapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	for level, n := range keep {
		if _, err := s.prune(level, n); err != nil {
			return Snapshot{}, err
		}
	}
	return Snapshot{info, dir}, nil
}

// Remove removes a snapshot. A machine that is being restored from it keeps
// its files.
func (s *Store) Remove(snap Snapshot) error {
	if err := os.RemoveAll(snap.Dir); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}

// Prune removes all snapshots, and what is left of those that were never
// finished. It returns those that went.
func (s *Store) Prune() ([]Snapshot, error) {
	var out []Snapshot
	for level := range keep {
		gone, err := s.prune(level, 0)
		out = append(out, gone...)
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

// prune keeps those n snapshots of a level that were used last.
func (s *Store) prune(level Level, n int) ([]Snapshot, error) {
	drafts, err := filepath.Glob(filepath.Join(s.dir, ".tmp-*"))
	if err != nil {
		return nil, err
	}
	for _, d := range drafts {
		if st, err := os.Stat(d); err == nil && time.Since(st.ModTime()) > abandoned {
			os.RemoveAll(d)
		}
	}
	all, err := s.List()
	if err != nil {
		return nil, err
	}
	var gone []Snapshot
	for _, snap := range all {
		if snap.Level != level {
			continue
		}
		if n--; n >= 0 {
			continue
		}
		if err := s.Remove(snap); err != nil {
			return gone, err
		}
		gone = append(gone, snap)
	}
	return gone, nil
}

// A Draft is a snapshot that is being written.
type Draft struct {
	dir    string
	memory int64
	sum    uint32
}

// Dir is where its files go.
func (d *Draft) Dir() string { return d.dir }

// WriteMemory writes the machine's memory: all that comes from r.
func (d *Draft) WriteMemory(r io.Reader) error {
	f, err := os.OpenFile(filepath.Join(d.dir, memoryFile), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	d.memory, err = copyLarge(io.MultiWriter(f, sum), r)
	d.sum = sum.Sum32()
	return errors.Join(err, f.Close())
}

// ReadMemory writes the machine's memory to w. It is an error when it is not
// what was saved, which may be known only at its end.
func (s Snapshot) ReadMemory(w io.Writer) error {
	f, err := os.Open(filepath.Join(s.Dir, memoryFile))
	if err != nil {
		return err
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() != s.Memory {
		return fmt.Errorf("%s has %d bytes of %d", f.Name(), st.Size(), s.Memory)
	}
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if _, err := copyLarge(io.MultiWriter(w, sum), f); err != nil {
		return err
	}
	if got := sum.Sum32(); got != s.MemorySum {
		return fmt.Errorf("%s has the checksum %08x, want %08x", f.Name(), got, s.MemorySum)
	}
	return nil
}

// copyLarge copies in pieces that are worth a system call.
func copyLarge(w io.Writer, r io.Reader) (int64, error) {
	// Without the methods of files, which would copy past the checksum.
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 1<<20))
}

func treeSize(dir string) (n int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
		return err
	})
	return n, err
}
