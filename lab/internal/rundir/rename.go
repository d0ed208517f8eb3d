package rundir

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// unfinished is the beginning of the names of three kinds of directory: one that is about to be a
// run directory, one that was, and a temporary one. A run directory comes and goes by a rename,
// with all that is in it, so a process that is killed leaves none without a record.
const unfinished = ".isthmus-lab-"

// Make makes a run directory, which belongs to who has called the lab (Caller). fill is told
// where to put what is in it: nobody takes that for a lab before all is there. The caller has the
// lock of what the directory is in (LockBase). That something is there already is an error, unless
// it is an empty directory.
func Make(dir string, fill func(dir string) error) error {
	base := filepath.Dir(dir)
	removeUnfinished(base)
	made := filepath.Join(base, unfinished+rand.Text())
	if err := os.Mkdir(made, 0o700); err != nil {
		if failed, ok := errors.AsType[*fs.PathError](err); ok {
			failed.Path = dir // the caller knows no other
		}
		return err
	}
	err := Own(made)
	if err == nil {
		err = fill(made)
	}
	if err == nil {
		// os.Rename refuses any directory that is there, an empty one, too.
		if err = unix.Rename(made, dir); errors.Is(err, fs.ErrExist) {
			err = fmt.Errorf("%s is there, without a record of a lab: see that nobody needs it, and remove it", dir)
		} else if err != nil {
			err = &os.LinkError{Op: "rename", Old: made, New: dir, Err: err}
		}
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(made))
	}
	return nil
}

// Discard removes a run directory. At once nobody takes it for a lab's any more. The caller has
// the lock of what it is in (LockBase). One that is not there is no error. It makes nothing, so
// that it works where no space is left.
func Discard(dir string) error {
	base := filepath.Dir(dir)
	removeUnfinished(base)
	gone := filepath.Join(base, unfinished+rand.Text())
	if err := os.Rename(dir, gone); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // somebody has removed it by hand
		}
		return err
	}
	return os.RemoveAll(gone)
}

// RemoveUnfinished removes what processes have left in base that were killed while they made or
// removed a run directory, and the temporary directories (Temporary) of killed processes.
func RemoveUnfinished(base string) error {
	if temporaries := temporaries(); private(temporaries) == nil {
		if err := removeUnfinishedOf(temporaries); err != nil {
			return err
		}
	}
	return removeUnfinishedOf(base)
}

// removeUnfinishedOf is RemoveUnfinished for one directory. It takes the lock.
func removeUnfinishedOf(base string) error {
	unlock, err := lockBase(base, unix.LOCK_EX)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil // the caller has no labs
	}
	if err != nil {
		return err
	}
	defer unlock()
	removeUnfinished(base)
	if base == Base() || base == temporaries() {
		_ = os.Remove(base) // a lab, or a process that needs a directory, may be there
	}
	return nil
}

// removeUnfinished is RemoveUnfinished for who has the lock of base: nobody is making or removing
// a run directory, and who needs a temporary one holds its lock.
func removeUnfinished(base string) {
	left, _ := filepath.Glob(filepath.Join(base, unfinished+"*"))
	for _, dir := range left {
		if !held(dir) {
			_ = os.RemoveAll(dir) // it hinders nobody
		}
	}
}

// isUnfinished tells whether a directory is about to be a run directory, or was one.
func isUnfinished(dir string) bool { return strings.HasPrefix(filepath.Base(dir), unfinished) }

// removeLockOnly removes a directory that has a lock, which nobody holds, and nothing else: an
// older lab was killed before it had written its record.
func removeLockOnly(dir string) {
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) == 1 && entries[0].Name() == lockFile {
		_ = os.RemoveAll(dir) // Make says that it is there
	}
}
