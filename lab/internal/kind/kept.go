package kind

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// keptSuffix is the end of the name of a copy of a lab's record.
const keptSuffix = ".json"

// Kept returns the directory with copies of the records of this user's labs. Run directories are in
// memory: after the machine was started again they are gone, and the engine still has the
// containers. The copies are on a disk (hier(7); XDG Base Directory Specification, XDG_STATE_HOME).
// Kept returns "" where labs have no copies: the user has no home directory, or the machine has no
// machine-id, by which the lab knows its copies from those of another machine.
func Kept() string {
	if machineID() == "" {
		return ""
	}
	if os.Getuid() == 0 {
		return "/var/lib/isthmus-lab"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "isthmus-lab")
	}
	home, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(home) {
		return ""
	}
	return filepath.Join(home, ".local", "state", "isthmus-lab")
}

// A start is one start of one machine.
type start struct {
	Machine string `json:"machine"` // machine-id(5)
	Boot    string `json:"boot"`    // random(4), boot_id
}

// thisStart is the present one.
func thisStart() (start, error) {
	boot, err := readLine("/proc/sys/kernel/random/boot_id")
	return start{machineID(), boot}, err
}

// machineID is empty where the machine has none, or not yet (machine-id(5)).
func machineID() string {
	id, err := readLine("/etc/machine-id")
	if err != nil || id == "uninitialized" {
		return ""
	}
	return id
}

func readLine(file string) (string, error) {
	b, err := os.ReadFile(file)
	return strings.TrimSpace(string(b)), err
}

// Lost returns the names of the caller's labs that are from before this machine was started again.
// Those that were to end with their process, or were not complete, are dead as well (Dead) once
// Recover has found them. Copies that can't be read are in the error; the names are right.
func Lost(base, kept string) ([]string, error) {
	all, err := lost(base, kept)
	if err != nil {
		return nil, err
	}
	var names []string
	var errs []error
	for _, l := range all {
		switch {
		case l.err != nil:
			errs = append(errs, l.unreadable())
		case rundir.Mine(l.file):
			names = append(names, l.name)
		}
	}
	found, err := List(base)
	for _, name := range found {
		dir := filepath.Join(base, name)
		if r, err := readRecord(dir); err == nil && r.Lost && rundir.Mine(dir) {
			names = append(names, name)
		}
	}
	return names, errors.Join(append(errs, err)...)
}

// ErrLost is the error for a lab that Recover has found.
var ErrLost = errors.New("is from before the machine was started again")

// A lostLab is one of which there is the copy of the record only.
type lostLab struct {
	name, file string
	record     record
	err        error // why the copy can't be read
}

func (l lostLab) unreadable() error {
	return fmt.Errorf("the copy of the record of lab %s can't be read: %w: see that no container of the lab is left, and remove %s", l.name, l.err, l.file)
}

// lost looks for copies of another start of this machine. A lab of the present one has its
// processes, maybe, wherever its run directory is.
func lost(base, kept string) ([]lostLab, error) {
	if kept == "" {
		return nil, nil
	}
	files, err := filepath.Glob(filepath.Join(kept, "*"+keptSuffix))
	if err != nil || len(files) == 0 {
		return nil, err
	}
	now, err := thisStart()
	if err != nil {
		return nil, err
	}
	var out []lostLab
	for _, file := range files {
		l := lostLab{name: strings.TrimSuffix(filepath.Base(file), keptSuffix), file: file}
		if !noRunDir(filepath.Join(base, l.name)) {
			continue // it is there, or another lab of this name
		}
		l.record, l.err = readRecordFile(file)
		if at := l.record.Start; l.err != nil || at.Machine == now.Machine && at.Boot != now.Boot {
			out = append(out, l)
		}
	}
	return out, nil
}

// noRunDir tells whether a run directory is missing. Docker starts nodes again by itself, and makes
// the directory that they share.
func noRunDir(dir string) bool {
	entries, err := os.ReadDir(dir)
	return errors.Is(err, fs.ErrNotExist) || err == nil && !slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() != sharedDir })
}

// Recover gives labs a run directory again that are from before this machine was started again, and
// returns their names. Down takes them down. Those that were to end with their process, or were not
// complete, are dead (Dead). What else they had in their run directory is gone, such as kubeconfigs.
// That a copy can't be used is in the error, and the other labs have their run directory.
func Recover(base, kept string) ([]string, error) {
	all, err := lost(base, kept)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	unlock, err := rundir.LockBase(base)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if all, err = lost(base, kept); err != nil { // somebody may have done it in between
		return nil, err
	}
	var names []string
	var errs []error
	for _, l := range all {
		if err := l.recover(filepath.Join(base, l.name)); err != nil {
			errs = append(errs, err)
			continue
		}
		names = append(names, l.name)
	}
	return names, errors.Join(errs...)
}

func (l lostLab) recover(dir string) error {
	if l.err != nil {
		return l.unreadable()
	}
	uid, err := rundir.Owner(l.file)
	if err != nil {
		return fmt.Errorf("lab %s: %w", l.name, err)
	}
	r := l.record
	r.Lost, r.Kept = true, filepath.Dir(l.file)
	if r.Host.Sysctls != nil { // what labs had changed has ended with that start
		r.Host.Sysctls = map[string]string{}
	}
	_ = os.Remove(filepath.Join(dir, sharedDir)) // see noRunDir
	_ = os.Remove(dir)
	err = rundir.Make(dir, func(made string) error {
		if !r.Ready || r.Ephemeral { // nobody holds the lock of the dead
			if err := os.WriteFile(filepath.Join(made, lockFile), nil, 0o600); err != nil {
				return err
			}
		}
		if err := r.write(made); err != nil {
			return err
		}
		return os.Chown(made, uid, -1)
	})
	if err != nil {
		return fmt.Errorf("lab %s %w, and it can't have a run directory again: %w", l.name, ErrLost, err)
	}
	return nil
}

// spareNewer takes out of the record of a lost lab what was made after the lab. It has the same
// names, and is of somebody who has removed what was left and made a lab of their own. spared says
// what stays.
func (l *Lab) spareNewer(ctx context.Context) (spared, err error) {
	// A complete lab has made all its containers before the copy was written. One that was killed
	// before that has made them before the machine was started again.
	end := l.record.Saved.Add(time.Minute) // the engine may have another clock
	if !l.record.Ready {
		if end, err = bootTime(); err != nil {
			return nil, err
		}
	}
	var clusters []string
	var errs []error
	newer := func(label, value string) bool {
		is, err := l.madeSince(ctx, end, label+"="+value)
		errs = append(errs, err)
		return is
	}
	l.record.Clusters = slices.DeleteFunc(l.record.Clusters, func(c clusterRecord) bool {
		is := newer(clusterLabel, c.Kind)
		if is {
			clusters = append(clusters, c.Kind)
		}
		return is
	})
	stay := slices.Clone(clusters)
	if len(l.record.Outside) > 0 && newer(labLabel, l.record.Name) {
		stay = append(stay, "the hosts outside")
		l.record.Outside = nil
	}
	if len(stay) > 0 {
		spared = fmt.Errorf("%s of %s stay, since they were made after lab %s; if nobody needs them, run: %s",
			strings.Join(stay, " and "), l.record.Engine, l.record.Name, removeAll(l.record.Engine, l.record.Name, clusters))
	}
	return spared, errors.Join(errs...)
}

// madeSince tells whether one of the containers with a label was made after a time.
func (l *Lab) madeSince(ctx context.Context, end time.Time, label string) (bool, error) {
	text, err := run(ctx, l.record.Engine, "ps", "--all", "--quiet", "--filter", "label="+label)
	if err != nil {
		return false, err
	}
	for _, id := range strings.Fields(text) {
		text, err := run(ctx, l.record.Engine, "inspect", "--format", "{{json .Created}}", id)
		if err != nil {
			return false, err
		}
		var created time.Time
		if err := json.Unmarshal([]byte(text), &created); err != nil {
			return false, fmt.Errorf("%s does not say when it has made container %s (%w): remove the container if it is of lab %s, and run lab down again", l.record.Engine, id, err, l.record.Name)
		}
		if created.After(end) {
			return true, nil
		}
	}
	return false, nil
}

// bootTime is when the machine was started, by its present clock (proc_stat(5), btime).
func bootTime() (time.Time, error) {
	const file = "/proc/stat"
	b, err := os.ReadFile(file)
	if err != nil {
		return time.Time{}, err
	}
	for line := range strings.Lines(string(b)) {
		if text, ok := strings.CutPrefix(line, "btime "); ok {
			seconds, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
			return time.Unix(seconds, 0), err
		}
	}
	return time.Time{}, fmt.Errorf("%s has no line btime", file)
}

// copyFile is the path of the copy of the record, for a lab that has one (record.Kept).
func (l *Lab) copyFile() string {
	return filepath.Join(l.record.Kept, filepath.Base(l.dir)+keptSuffix)
}

// keep writes the copy of the record. Who can't write it has a lab without one.
func (l *Lab) keep() {
	if l.record.Kept == "" {
		return
	}
	err := l.writeCopy()
	if err == nil {
		return
	}
	_ = l.forget() // an older copy does not say all
	l.record.Kept = ""
	if l.say != nil {
		l.say(fmt.Sprintf("after a restart of the machine lab down will not find the lab's containers: the copy of the lab's record can't be written: %v", err))
	}
}

func (l *Lab) writeCopy() error {
	file := l.copyFile()
	l.record.Saved = time.Now()
	b, err := l.record.encode()
	if err != nil {
		return err
	}
	for range 3 { // the last lab of another process may take the directory away in between
		if err = os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			return err
		}
		if err = writeSynced(file, b); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return err
}

// writeSynced writes a file of the caller's, all of it or nothing, and returns when it is on the
// disk (fsync(2)).
func writeSynced(file string, b []byte) error {
	f, err := os.OpenFile(file+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = rundir.Own(file + ".new")
	}
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file+".new"))
	}
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// forget removes the copy of the record, unless it is that of another lab of this name.
func (l *Lab) forget() error {
	if l.record.Kept == "" {
		return nil
	}
	file := l.copyFile()
	if r, err := readRecordFile(file); err == nil && r.Started.Equal(l.record.Started) {
		_ = os.Remove(file + ".new") // of a process that was killed
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	_ = os.Remove(l.record.Kept) // other labs may have copies there
	return nil
}
