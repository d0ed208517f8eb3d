// Package rundir is about run directories of labs: where they are, whose they
// are, which labs live, and what dead ones have left on this machine.
//
// A lab's processes hold the lock of its run directory, so the kernel lets go of
// it when the last of them ends, whatever has ended it. What a lab has outside
// of its own namespaces is in the record beside the lock. Who removes a lab goes
// by that record, and by nothing else: no name of anything says that it is a
// lab's.
//
// Labs come, go and are looked at one at a time: each of these takes the lock of
// the directory that has the run directories, and holds it for moments.
package rundir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/lab/internal/cgroup"
)

// Files of a run directory that every lab has.
const (
	lockFile   = "lock"
	recordFile = "record.json"
)

// ErrInUse is the error for a run directory whose lab lives.
var ErrInUse = errors.New("it is in use")

// Base has the run directories of this user's labs, and root's of everybody's.
func Base() string {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" && os.Getuid() != 0 {
		return filepath.Join(dir, "isthmus-lab")
	}
	return "/run/isthmus-lab"
}

// Path is the run directory of the lab of that name.
func Path(name string) string { return filepath.Join(Base(), name) }

// A Record is what a lab has on this machine outside of its namespaces and its
// run directory.
type Record struct {
	// Cgroup is the lab's, in all hierarchies, and nobody else's; empty: it has
	// none.
	Cgroup string `json:"cgroup,omitempty"`
	// Controllers are those that the children of the machine's first cgroup
	// (version 2) have because a lab needs them.
	Controllers []string `json:"controllers,omitempty"`
}

// A Lab is one whose run directory this process has claimed.
type Lab struct {
	Record
	// Lock is held as long as it is open here or in a process that has it.
	Lock *os.File
}

// Claim makes a run directory (Make) and takes its lock. What a dead lab has left there goes
// first. A lab that wants a cgroup has it afterwards, with a name that no other lab has had.
func Claim(dir string, wantsCgroup bool) (*Lab, error) {
	unlock, err := LockBase(filepath.Dir(dir))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := remove(dir); err != nil {
		return nil, err
	}
	removeLockOnly(dir)
	lab := &Lab{}
	var cgroups cgroup.FS
	err = Make(dir, func(made string) (err error) {
		if lab.Lock, err = Hold(filepath.Join(made, lockFile)); err != nil {
			return err
		}
		if wantsCgroup {
			if cgroups, err = cgroup.Open(); err != nil {
				return err
			}
			lab.Cgroup = newCgroup(filepath.Base(dir))
			if lab.Controllers, err = cgroups.Missing(); err != nil {
				return err
			}
		}
		// Written down before it is done: this process may end at any time.
		return lab.write(made)
	})
	if err == nil && wantsCgroup {
		err = lab.makeCgroup(cgroups)
	}
	if err != nil {
		if lab.Lock != nil {
			lab.Lock.Close()
		}
		return nil, errors.Join(err, remove(dir))
	}
	return lab, nil
}

func (l *Lab) makeCgroup(cgroups cgroup.FS) error {
	if err := cgroups.Give(l.Controllers); err != nil {
		return err
	}
	return cgroups.Make(l.Cgroup)
}

// write writes a record, all of it or nothing.
func (r Record) write(dir string) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, recordFile)
	if err := os.WriteFile(file+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// read reads the record of a run directory. Without one it is fs.ErrNotExist,
// and the directory is not a lab's, or one of the world kind's.
func read(dir string) (Record, error) {
	var r Record
	b, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err == nil {
		if err = json.Unmarshal(b, &r); err != nil {
			err = fmt.Errorf("%s: %w", filepath.Join(dir, recordFile), err)
		}
	}
	return r, err
}

// Remove removes what a dead lab has left: its cgroup, its run directory, and
// what it has changed of the first cgroup, unless another lab needs it. Where
// the lab's last processes are about to end it waits for them, until ctx ends.
// A directory that is not a lab's, or is not there, stays as it is.
func Remove(ctx context.Context, dir string) error {
	for {
		err := removeLocked(dir)
		if !errors.Is(err, ErrInUse) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func removeLocked(dir string) error {
	unlock, err := lockBase(filepath.Dir(dir), unix.LOCK_EX)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	if err := remove(dir); err != nil {
		return err
	}
	if filepath.Dir(dir) == Base() {
		_ = os.Remove(Base()) // another lab may be there
	}
	return nil
}

// RemoveOwn removes the calling process's own lab, of which nothing else runs
// any more. labs is the directory that has its run directory, opened where that
// had its name: it may be mounted over by now.
func RemoveOwn(labs *os.File, name string) error {
	if err := lock(labs, unix.LOCK_EX); err != nil {
		return err
	}
	at := fmt.Sprintf("/proc/self/fd/%d", labs.Fd())
	if err := removeDead(filepath.Join(at, name)); err != nil {
		return err
	}
	if labs.Name() == Base() {
		_ = os.Remove(at + "/../" + filepath.Base(Base())) // another lab may be there
	}
	return nil
}

// remove is Remove for who holds the lock of all run directories. ErrInUse:
// the lab lives.
func remove(dir string) error {
	if held(dir) {
		return fmt.Errorf("run directory %s: %w", dir, ErrInUse)
	}
	return removeDead(dir)
}

func removeDead(dir string) error {
	r, err := read(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if r.Cgroup != "" {
		if err := r.removeCgroup(dir); err != nil {
			return err // the record is needed again
		}
	}
	return Discard(dir)
}

func (r Record) removeCgroup(dir string) error {
	cgroups, err := cgroup.Open()
	if err != nil {
		return err
	}
	if err := cgroups.Remove(r.Cgroup); err != nil {
		return err
	}
	kept, err := r.handOver(dir)
	if err != nil || kept {
		return err
	}
	return cgroups.TakeBack(r.Controllers)
}

// handOver leaves the controllers that this lab has given to another one that
// has a cgroup too, and tells whether there is one.
func (r Record) handOver(dir string) (bool, error) {
	if len(r.Controllers) == 0 {
		return true, nil
	}
	dirs, err := directories(filepath.Dir(dir))
	if err != nil {
		return false, err
	}
	for _, d := range dirs {
		other, err := read(d)
		if filepath.Base(d) == filepath.Base(dir) || err != nil || other.Cgroup == "" {
			continue
		}
		for _, c := range r.Controllers {
			if !slices.Contains(other.Controllers, c) {
				other.Controllers = append(other.Controllers, c)
			}
		}
		return true, other.write(d)
	}
	return false, nil
}

// Running tells whether the lab of a run directory lives.
func Running(dir string) bool {
	unlock, err := lockBase(filepath.Dir(dir), unix.LOCK_SH)
	if err != nil {
		return false
	}
	defer unlock()
	return held(dir)
}

// Hold makes a lock file in a directory that nobody else knows yet, and holds the lock until the
// file is closed here and in every process that has it.
func Hold(file string) (*os.File, error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock of %s: %w", file, err)
	}
	return f, nil
}

// held tells whether somebody holds the lock of a run directory. The caller
// holds the one of all.
func held(dir string) bool {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil
}

// A Dead lab is one of which no process is left, but other things are.
type Dead struct {
	Name, Dir string
	Cgroup    string // empty: it has none
}

// String says what is left.
func (d Dead) String() string {
	left := "the run directory " + d.Dir
	if d.Cgroup != "" {
		left += " and the cgroups " + d.Cgroup
	}
	return left
}

// FindDead returns the dead labs of the caller in a directory of run
// directories, in the order of their names. It changes nothing. Where the caller
// may not look, the caller has no labs.
func FindDead(base string) ([]Dead, error) {
	unlock, err := lockBase(base, unix.LOCK_SH)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer unlock()
	dirs, err := directories(base)
	if err != nil {
		return nil, err
	}
	var out []Dead
	for _, d := range dirs {
		r, err := read(d)
		if errors.Is(err, fs.ErrNotExist) || held(d) || !Mine(d) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, Dead{filepath.Base(d), d, r.Cgroup})
	}
	return out, nil
}

// directories are those in a directory, by name.
func directories(base string) ([]string, error) {
	entries, err := os.ReadDir(base)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() && !isUnfinished(e.Name()) {
			out = append(out, filepath.Join(base, e.Name()))
		}
	}
	return out, err
}

// LockBase makes a directory that has run directories, and takes its lock: until unlock is
// called no lab comes or goes there, in this process or another one.
func LockBase(base string) (unlock func(), err error) {
	for {
		if err := os.MkdirAll(base, 0o700); err != nil {
			return nil, err
		}
		// The last lab may take it away in between.
		if unlock, err = lockBase(base, unix.LOCK_EX); !errors.Is(err, fs.ErrNotExist) {
			return unlock, err
		}
	}
}

// lockBase takes the lock of a directory that has run directories, and waits
// for it.
func lockBase(base string, how int) (unlock func(), err error) {
	for {
		f, err := os.Open(base)
		if err != nil {
			return nil, err
		}
		if err := lock(f, how); err != nil {
			f.Close()
			return nil, err
		}
		// Who had the lock may have removed the directory.
		mine, err := f.Stat()
		if err == nil {
			var now os.FileInfo
			if now, err = os.Stat(base); err == nil && os.SameFile(mine, now) {
				return func() { f.Close() }, nil
			}
		}
		f.Close()
		if err != nil {
			return nil, err
		}
	}
}

// lock takes the lock of an open file, and waits for it.
func lock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock of %s: %w", f.Name(), err)
		}
	}
}
