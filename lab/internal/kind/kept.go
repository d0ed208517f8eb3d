package kind

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// keptSuffix is the end of the name of a copy of a lab's record.
const keptSuffix = ".json"

// Kept is the directory with copies of the records of this user's labs. Run directories are in
// memory: where the machine is started again they are gone, and the engine has the containers
// still. It is on a disk (hier(7); XDG Base Directory Specification, XDG_STATE_HOME). Where a user
// has no home it is empty: there are no copies.
func Kept() string {
	if os.Getuid() == 0 {
		return "/var/lib/isthmus-lab"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "isthmus-lab")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".local", "state", "isthmus-lab")
}

// Lost returns the names of labs that have lost their run directory: those of which kept has a
// copy of the record, and base has nothing.
func Lost(base, kept string) ([]string, error) {
	if kept == "" {
		return nil, nil
	}
	files, err := filepath.Glob(filepath.Join(kept, "*"+keptSuffix))
	var names []string
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), keptSuffix)
		if _, err := os.Lstat(filepath.Join(base, name)); errors.Is(err, fs.ErrNotExist) {
			names = append(names, name)
		}
	}
	return names, err
}

// Recover gives labs a run directory again that have lost it (Lost), and returns their names. Down
// takes them down. Those that were to end with their process, or were not complete, are dead
// (Dead). What the lab had in its run directory is lost, such as its kubeconfigs. That the record of
// one of them can't be used is in the error, and the others have their run directory.
func Recover(base, kept string) ([]string, error) {
	names, err := Lost(base, kept)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	unlock, err := rundir.LockBase(base)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if names, err = Lost(base, kept); err != nil { // somebody may have done it in between
		return nil, err
	}
	var errs []error
	names = slices.DeleteFunc(names, func(name string) bool {
		file := filepath.Join(kept, name+keptSuffix)
		err := recoverLab(filepath.Join(base, name), file)
		if err != nil {
			errs = append(errs, fmt.Errorf("lab %s %s, and the copy of its record can't be used (%w): see that no container of the lab is left, and remove %s", name, lost, err, file))
		}
		return err != nil
	})
	return names, errors.Join(errs...)
}

func recoverLab(dir, file string) error {
	r, err := readRecordFile(file)
	if err != nil {
		return err
	}
	uid, err := rundir.Owner(file)
	if err != nil {
		return err
	}
	r.Lost = true
	if boot, err := bootID(); err != nil {
		return err
	} else if r.Boot != boot {
		r.Host.Sysctls = sysctlsNow(r.Host.Sysctls) // the labs' changes are gone
	}
	err = rundir.Make(dir, func(made string) error {
		if !r.Ready || r.Ephemeral { // nobody holds the lock of the dead
			if err := os.WriteFile(filepath.Join(made, lockFile), nil, 0o600); err != nil {
				return err
			}
		}
		return r.write(made)
	})
	if err != nil {
		return err
	}
	return os.Chown(dir, uid, -1)
}

// sysctlsNow are the same sysctls as the machine has them now.
func sysctlsNow(sysctls map[string]string) map[string]string {
	if sysctls == nil {
		return nil
	}
	out := map[string]string{}
	for s := range sysctls {
		if b, err := os.ReadFile("/proc/sys/" + s); err == nil {
			out[s] = strings.TrimSpace(string(b))
		}
	}
	return out
}

// bootID tells one start of the machine from another (random(4), boot_id).
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// copyFile is the copy of the record; empty: there is none.
func (l *Lab) copyFile() string {
	if l.record.Kept == "" {
		return ""
	}
	return filepath.Join(l.record.Kept, filepath.Base(l.dir)+keptSuffix)
}

// keep writes the copy of the record.
func (l *Lab) keep() error {
	file := l.copyFile()
	if file == "" {
		return nil
	}
	err := os.MkdirAll(l.record.Kept, 0o700)
	if err == nil {
		err = l.record.writeFile(file)
	}
	if err == nil {
		err = rundir.Own(file)
	}
	if err != nil {
		return fmt.Errorf("a copy of the record, by which the lab's containers are found after the machine was started again: %w", err)
	}
	return nil
}

// forget removes the copy of the record.
func (l *Lab) forget() error {
	file := l.copyFile()
	if file == "" {
		return nil
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	_ = os.Remove(l.record.Kept) // other labs may have copies there
	return nil
}

// writeFile writes a record. Nobody ever reads half of it, and a process that is killed leaves
// what was there.
func (r record) writeFile(file string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// lost is what has become of a lab that Recover has found.
const lost = "has lost its run directory, as when the machine is started again"
