package rundir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// unfinished is the beginning of the names of two kinds of directory: one that is about to be a
// run directory, and one that was. A run directory comes and goes by a rename, with all that is
// in it, so a process that is killed leaves none without a record.
const unfinished = ".unfinished-"

// Make makes a run directory, which belongs to who has called the lab (Caller). fill is told
// where to put what is in it: nobody takes that for a lab before all is there. The caller has the
// lock of what the directory is in (LockBase). That there is something of that name already is an error.
func Make(dir string, fill func(dir string) error) error {
	base := filepath.Dir(dir)
	removeUnfinished(base)
	made, err := os.MkdirTemp(base, unfinished)
	if err != nil {
		return err
	}
	if err = Own(made); err == nil {
		err = fill(made)
	}
	if err == nil {
		err = os.Rename(made, dir)
	}
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("%s is there, without a record of a lab: see that nobody needs it, and remove it", dir)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(made))
	}
	return nil
}

// Discard removes a run directory. At once nobody takes it for a lab's any more. The caller has
// the lock of what it is in (LockBase). One that is not there is no error.
func Discard(dir string) error {
	base := filepath.Dir(dir)
	removeUnfinished(base)
	gone, err := os.MkdirTemp(base, unfinished)
	if err != nil {
		return err
	}
	err = os.Rename(dir, filepath.Join(gone, filepath.Base(dir)))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // somebody has removed it by hand
	}
	return errors.Join(err, os.RemoveAll(gone))
}

// RemoveUnfinished removes what processes have left in base that were killed while they made or
// removed a run directory.
func RemoveUnfinished(base string) error {
	unlock, err := lockBase(base, unix.LOCK_EX)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil // the caller has no labs
	}
	if err != nil {
		return err
	}
	defer unlock()
	removeUnfinished(base)
	return nil
}

// removeUnfinished is RemoveUnfinished for who has the lock of base, so that nobody is at work.
func removeUnfinished(base string) {
	left, _ := filepath.Glob(filepath.Join(base, unfinished+"*"))
	for _, dir := range left {
		_ = os.RemoveAll(dir) // it hinders nobody
	}
}

// isUnfinished tells whether a directory is about to be a run directory, or was one.
func isUnfinished(dir string) bool { return strings.HasPrefix(filepath.Base(dir), unfinished) }
