package kind

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// lockFile is held by the process that makes a lab, and by the one that an ephemeral lab is to
// end with. The kernel lets go of it when that process ends, whatever has ended it.
const lockFile = "kind.lock"

// leavingFile is held by a process that takes a lab down. The record is the maker's to write.
const leavingFile = "kind.leaving"

// claim makes the lab's run directory, with the record of a lab that has nothing yet, and takes
// its lock. That there is one of this name is an error.
func (l *Lab) claim() error {
	unlock, err := rundir.LockBase(filepath.Dir(l.dir))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Lstat(l.dir); err == nil {
		return l.isThere()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err = rundir.Make(l.dir, func(made string) (err error) {
		if l.lock, err = rundir.Hold(filepath.Join(made, lockFile)); err != nil {
			return err
		}
		return l.record.write(made)
	})
	if err != nil {
		l.release()
	}
	return err
}

// withdraw takes the run directory away of a lab that has made nothing.
func (l *Lab) withdraw() error {
	unlock, err := rundir.LockBase(filepath.Dir(l.dir))
	if err != nil {
		return err
	}
	defer unlock()
	return errors.Join(l.forget(), rundir.Discard(l.dir))
}

// ErrUp is the error where all clusters of a lab are there already. Whether everything is
// installed in them that is to be, the lab does not know.
var ErrUp = errors.New("is up already")

// isThere says what a run directory that is there means.
func (l *Lab) isThere() error {
	name := filepath.Base(l.dir)
	r, err := readRecord(l.dir)
	switch {
	case err != nil:
		return fmt.Errorf("lab %s: there is something in %s that can't be read (%w): see that no container of the lab is left, and remove the directory", name, l.dir, err)
	case l.leaving():
		return fmt.Errorf("lab %s is being taken down: wait until that is done", name)
	case r.Lost:
		return fmt.Errorf("lab %s %w: lab down %[1]s removes it", name, ErrLost)
	case !r.Ready:
		return fmt.Errorf("lab %s was begun at %s and is not complete: its process is still at work, or was killed: lab down %[1]s removes it", name, r.Started.Format(time.TimeOnly))
	}
	return fmt.Errorf("lab %s %w: lab down %[1]s takes it down", name, ErrUp)
}

// release lets go of the lock.
func (l *Lab) release() {
	if l.lock != nil {
		_ = l.lock.Close()
		l.lock = nil
	}
}

// Dead returns the names of the caller's labs in base that a killed process has left: labs that
// it was still making, and labs that were to end with it.
func Dead(base string) ([]string, error) {
	names, err := List(base)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, name := range names {
		dir := filepath.Join(base, name)
		r, err := readRecord(dir)
		if err == nil && rundir.Mine(dir) && (!r.Ready || r.Ephemeral) && abandoned(filepath.Join(dir, lockFile)) {
			out = append(out, name)
		}
	}
	return out, nil
}

// RemoveDead takes a lab down whose process was killed (Dead). It returns rundir.ErrInUse where
// another process does that, or has made a new lab of that name.
func RemoveDead(ctx context.Context, base, name string) error {
	file := filepath.Join(base, name, lockFile)
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return rundir.ErrInUse // it is gone
	}
	defer f.Close()
	if err := takeLock(f); err != nil {
		return rundir.ErrInUse
	}
	mine, err := f.Stat()
	if err != nil {
		return err
	}
	if now, err := os.Stat(file); err != nil || !os.SameFile(mine, now) {
		return rundir.ErrInUse
	}
	l, err := Open(filepath.Join(base, name))
	if err != nil {
		return err
	}
	if l.record.Ready && !l.record.Ephemeral {
		return rundir.ErrInUse // it was finished in between, which is why nobody holds its lock
	}
	return l.Down(ctx)
}

// abandoned reports whether there is a lock that nobody holds.
func abandoned(lock string) bool {
	there, held := lookAt(lock)
	return there && !held
}

// lookAt tells whether there is a lock, and whether somebody holds it.
func lookAt(lock string) (there, held bool) {
	f, err := os.Open(lock)
	if err != nil {
		return false, false
	}
	defer f.Close()
	return true, unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil
}

// lookTime is longer than anybody has a lock who looks whether somebody has it (lookAt).
const lookTime = time.Second

// takeLock takes a lock, and waits for those who only look at it.
func takeLock(f *os.File) error {
	var err error
	for end := time.Now().Add(lookTime); ; time.Sleep(time.Millisecond) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(end) {
			return err
		}
	}
}

// markLeaving says to others that this process takes the lab down, until done is called or the
// process ends. Who can't say so takes it down all the same.
func (l *Lab) markLeaving() (done func()) {
	f, err := os.OpenFile(filepath.Join(l.dir, leavingFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return func() {}
	}
	_ = takeLock(f) // another process may be at it, too
	return func() { _ = f.Close() }
}

// leaving tells whether a process takes the lab down.
func (l *Lab) leaving() bool {
	_, held := lookAt(filepath.Join(l.dir, leavingFile))
	return held
}

// clientsTime is how long clients of the engine may be waited for, be it that a killed process has
// left them or that kind does not wait for them.
const clientsTime = 30 * time.Second

// quietTime is how long no client must have been seen until the wait ends. For one node kind starts
// two clients, one after the other: with Podman one makes a volume, the next one the container.
const quietTime = time.Second

// awaitClients waits until no client of the engine is at work on the lab's containers. Where its
// process was killed, one may still make a container, which nobody would look for afterwards.
func (l *Lab) awaitClients(ctx context.Context) {
	var names []string
	for _, c := range l.record.Clusters {
		names = append(names, c.Kind)
	}
	for _, o := range l.record.Outside {
		names = append(names, o.Container)
	}
	l.awaitClientsOf(ctx, names...)
}

// awaitClientsOf waits until no client of the engine is at work on containers whose names begin so:
// for quietTime, since one client may follow another one.
func (l *Lab) awaitClientsOf(ctx context.Context, names ...string) {
	quiet := time.Now()
	_ = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, clientsTime, true, func(context.Context) (bool, error) {
		if slices.ContainsFunc(names, func(name string) bool { return hasClient(l.record.Engine, name) }) {
			quiet = time.Now()
		}
		return time.Since(quiet) >= quietTime, nil
	})
}

// hasClient reports whether a program of that name makes or changes something that a text in its
// arguments names. Who only reads a container's log does not. The program may be a script, whose
// interpreter comes first then.
func hasClient(program, text string) bool {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		args := strings.Split(string(b), "\x00")
		named := slices.ContainsFunc(args[:min(2, len(args))], func(arg string) bool { return filepath.Base(arg) == program })
		if named && !slices.Contains(args[:min(3, len(args))], "logs") && slices.ContainsFunc(args[1:], func(arg string) bool { return strings.Contains(arg, text) }) {
			return true
		}
	}
	return false
}
