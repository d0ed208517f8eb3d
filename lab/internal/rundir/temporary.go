package rundir

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// temporaries has the temporary directories of this user's labs and commands.
func temporaries() string {
	return filepath.Join(os.TempDir(), "isthmus-lab-"+strconv.Itoa(os.Getuid()))
}

// Temporary makes a directory for files that this process needs for a while: only its user can
// look into it. remove removes it. When the process is killed before, the next one that makes
// such a directory, or removes what dead labs have left (RemoveUnfinished), does so.
func Temporary() (dir string, remove func() error, err error) {
	base := temporaries()
	// Looked at before, since another user's lock could be waited for without an end.
	if err := private(base); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", nil, err
	}
	unlock, err := LockBase(base)
	if err != nil {
		return "", nil, err
	}
	defer unlock()
	if err := private(base); err != nil {
		return "", nil, err
	}
	removeUnfinished(base)
	dir = filepath.Join(base, unfinished+rand.Text()[:12])
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", nil, err
	}
	lock, err := Hold(filepath.Join(dir, lockFile))
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return dir, func() error {
		defer lock.Close()
		unlock, err := lockBase(base, unix.LOCK_EX)
		if err != nil {
			return errors.Join(err, os.RemoveAll(dir))
		}
		defer unlock()
		err = os.RemoveAll(dir)
		_ = os.Remove(base) // another process may have one
		return err
	}, nil
}

// private tells that a directory below one that everybody may write is this user's alone.
func private(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if uid := int(info.Sys().(*syscall.Stat_t).Uid); !info.IsDir() || uid != os.Getuid() || info.Mode().Perm() != 0o700 {
		return fmt.Errorf("%s is not a directory that only this user can open (it is %s, of %s): remove it, or set TMPDIR to another directory", dir, info.Mode(), UserName(uid))
	}
	return nil
}
