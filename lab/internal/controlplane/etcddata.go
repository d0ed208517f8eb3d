package controlplane

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// dataDir is where etcd keeps its data.
func (c *Config) dataDir() string { return filepath.Join(c.Dir, "etcd") }

// sumsFile is beside the data in a saved directory: the SHA-256 of each of its
// files, by their path.
const sumsFile = "sums.json"

// SaveEtcd copies etcd's data into dir, which must not exist: all that the API
// server was told is written. etcd stands still meanwhile, for the 10 to 50 ms
// that a few MB take; to it the copy looks like its own death at that moment,
// of which its log knows the way back.
//
// RestoreEtcd, and Config.EtcdData, start from such a directory.
func (c *ControlPlane) SaveEtcd(dir string) error {
	return c.WithEtcdPaused(func() error { return saveEtcd(c.cfg.dataDir(), dir) })
}

// WithEtcdPaused runs fn while etcd stands still, so that what fn copies is of
// one moment. An API server that waits for more than a few seconds gives up its
// watches, so fn must be quick.
func (c *ControlPlane) WithEtcdPaused(fn func() error) (err error) {
	c.mu.Lock()
	p := c.procs[Etcd]
	c.mu.Unlock()
	if p == nil || !p.running() {
		return fn()
	}
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("cluster %s: pause etcd: %w", c.cfg.Name, err)
	}
	defer func() { err = errors.Join(err, p.cmd.Process.Signal(syscall.SIGCONT)) }()
	if err := p.waitStopped(); err != nil {
		return fmt.Errorf("cluster %s: pause etcd: %w", c.cfg.Name, err)
	}
	return fn()
}

// waitStopped waits until every thread has heard of a SIGSTOP: kill(2) only
// makes the signal pending.
func (p *process) waitStopped() error {
	for {
		stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
		if err != nil {
			return err
		}
		running := len(stats) == 0
		for _, path := range stats {
			stat, err := os.ReadFile(path)
			if err != nil {
				return err // no thread comes or goes while they stop, so all have
			}
			// "tid (comm) state …", where comm may have brackets of its own.
			_, state, _ := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
			running = running || !strings.HasPrefix(state, "T")
		}
		if !running {
			return nil
		}
		select {
		case <-p.done:
			return errors.New("it has ended")
		case <-time.After(time.Millisecond):
		}
	}
}

func saveEtcd(from, to string) error {
	sums, err := copyTree(from, to)
	if err != nil {
		return fmt.Errorf("save etcd's data: %w", err)
	}
	b, err := json.Marshal(sums)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(to, sumsFile), b, 0o600)
}

// RestoreEtcd copies a directory that SaveEtcd made to dir, the data directory
// of an etcd that does not run. It fails when a file is not what was saved.
func RestoreEtcd(from, dir string) error {
	b, err := os.ReadFile(filepath.Join(from, sumsFile))
	if err != nil {
		return fmt.Errorf("restore etcd's data: %w", err)
	}
	var want map[string]string
	if err := json.Unmarshal(b, &want); err != nil {
		return fmt.Errorf("restore etcd's data: %s: %w", filepath.Join(from, sumsFile), err)
	}
	got, err := copyTree(from, dir)
	if err != nil {
		return fmt.Errorf("restore etcd's data: %w", err)
	}
	if err := os.Remove(filepath.Join(dir, sumsFile)); err != nil {
		return err
	}
	for name, sum := range want {
		if got[name] != sum {
			return fmt.Errorf("restore etcd's data: %s is not what was saved", filepath.Join(from, name))
		}
	}
	return nil
}

// copyTree copies the files of a directory and returns their sums by their
// paths in it.
func copyTree(from, to string) (sums map[string]string, err error) {
	if err := os.Mkdir(to, 0o700); err != nil {
		return nil, err
	}
	sums = map[string]string{}
	err = filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == from {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			return os.Mkdir(filepath.Join(to, name), 0o700)
		case filepath.Ext(name) == ".tmp": // the log's next segment: made anew when it is not there
			return nil
		}
		sums[name], err = copyFile(path, filepath.Join(to, name))
		return err
	})
	return sums, err
}

func copyFile(from, to string) (sum string, err error) {
	in, err := os.Open(from)
	if err != nil {
		return "", err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	_, err = io.Copy(io.MultiWriter(out, h), in)
	return hex.EncodeToString(h.Sum(nil)), errors.Join(err, out.Close())
}

// startEtcd starts etcd with the data that the configuration wants it to have:
// those of EtcdData as they are, or those of a warm copy without what belongs
// to the control plane that they were copied from.
func (c *ControlPlane) startEtcd(ctx context.Context) error {
	if c.cfg.EtcdData != "" {
		if err := RestoreEtcd(c.cfg.EtcdData, c.cfg.dataDir()); err != nil {
			return fmt.Errorf("cluster %s: %w", c.cfg.Name, err)
		}
		return c.StartComponent(ctx, Etcd)
	}
	if c.cfg.CacheDir == "" {
		return c.StartComponent(ctx, Etcd)
	}
	path, err := c.cfg.warmPath()
	if err != nil {
		c.cold = err.Error()
		return c.StartComponent(ctx, Etcd)
	}
	err = c.startEtcdOn(ctx, path)
	if err == nil {
		c.warm = true
		return nil
	}
	if c.cold = "there was no copy"; !errors.Is(err, fs.ErrNotExist) {
		// Nobody shall try it again.
		c.cold = fmt.Sprintf("%v; the copy is removed", err)
		err := errors.Join(os.RemoveAll(path), c.StopComponent(Etcd))
		if err != nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
	}
	if err := os.RemoveAll(c.cfg.dataDir()); err != nil {
		return err
	}
	return c.StartComponent(ctx, Etcd)
}

// startEtcdOn starts etcd on a warm copy and renews what is not of this
// control plane.
func (c *ControlPlane) startEtcdOn(ctx context.Context, path string) error {
	if _, err := os.Stat(path); err != nil {
		return err
	}
	if err := RestoreEtcd(path, c.cfg.dataDir()); err != nil {
		return err
	}
	// A copy that etcd does not start on must not take all the time there is.
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout/4)
	defer cancel()
	if err := c.StartComponent(ctx, Etcd); err != nil {
		return err
	}
	return c.until(ctx, "etcd on a copy", c.renew)
}
