package vm

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
)

// A Beginning says how a machine came up.
type Beginning struct {
	Restored bool          // from a snapshot, rather than booted
	Took     time.Duration // from QEMU's start until the guest had its orders
	Stuck    int           // boots that got nowhere before
	Useless  error         // why a snapshot that was there could not be used
	Saved    *snapshot.Snapshot
	Saving   time.Duration
	NotSaved error // why the machine was not saved
}

func (b Beginning) String() string {
	if b.Restored {
		return fmt.Sprintf("virtual machine restored from a snapshot in %.1f s", b.Took.Seconds())
	}
	s := fmt.Sprintf("virtual machine booted in %.1f s", b.Took.Seconds())
	if b.Stuck > 0 {
		s += fmt.Sprintf(" (%d stuck boots before)", b.Stuck)
	}
	if b.Useless != nil {
		s += fmt.Sprintf("; its snapshot could not be used (%v)", b.Useless)
	}
	switch {
	case b.Saved != nil:
		s += fmt.Sprintf("; snapshot saved (%d MB, %.1f s)", b.Saved.Size/1e6, b.Saving.Seconds())
	case b.NotSaved != nil:
		s += fmt.Sprintf("; snapshot not saved: %v", b.NotSaved)
	}
	return s
}

// Start returns a machine that has booted and has its orders. Where snapshots
// are wanted it is restored from one; else it boots, and leaves one behind. A
// snapshot that cannot be used is removed, and the machine boots.
//
// Under KVM machines boot as quickly as they are restored.
func Start(ctx context.Context, cfg Config, snapshots *snapshot.Store) (*Machine, Beginning, error) {
	var how Beginning
	cfg.complete()
	key := ""
	if snapshots != nil && cfg.Accelerator != KVM {
		var err error
		if key, err = cfg.Key(ctx); err != nil {
			return nil, how, err
		}
		if snap, ok := snapshots.Find(snapshot.Booted, key); ok {
			start := time.Now()
			m, err := Incoming(ctx, cfg, snap)
			if err == nil {
				if err = errors.Join(m.Resume(), m.order(ctx)); err == nil {
					how.Restored, how.Took = true, time.Since(start)
					return m, how, nil
				}
				m.Kill()
			}
			if ctx.Err() != nil {
				return nil, how, context.Cause(ctx)
			}
			how.Useless = errors.Join(err, snapshots.Remove(snap))
		}
	}
	start := time.Now()
	m, stuck, err := bootAgain(ctx, cfg)
	how.Stuck = stuck
	if err != nil {
		return nil, how, err
	}
	booted := time.Since(start)
	if key != "" {
		start = time.Now()
		saved, err := m.save(ctx, cfg, snapshots, key)
		if err == nil {
			how.Saved = &saved
		}
		how.NotSaved, how.Saving = err, time.Since(start)
	}
	start = time.Now()
	if err := m.order(ctx); err != nil {
		m.Kill()
		return nil, how, err
	}
	how.Took = booted + time.Since(start)
	return m, how, nil
}

// Key is a hash of all that a snapshot of the machine depends on while the
// guest waits for its orders: QEMU, its arguments, the kernel, the initramfs
// and the disk that is mounted. Disks that get their driver later do not count,
// but that they are there does. Files stand for their content by size and time:
// those in the cache never change, they are made again, and the same content
// then is at another place of the disk.
func (c Config) Key(ctx context.Context) (string, error) {
	c.complete()
	qemu, err := look("qemu-system-x86_64")
	if err != nil {
		return "", fmt.Errorf("virtual machine: %w", err)
	}
	version, err := exec.CommandContext(ctx, qemu, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", qemu, err)
	}
	h := newHash()
	h.text(string(version))
	for _, f := range []string{qemu, c.Image.Kernel.Image, c.Image.Initrd, c.Image.Disk} {
		if err := h.identity(f); err != nil {
			return "", err
		}
	}
	fd := 2
	args := c.arguments(func(string) string { return "" }, func(*os.File) int { fd++; return fd }, nil, nil)
	h.text(strings.Join(args, "\x00"))
	return h.String(), nil
}

// identity adds a file's size and time of change.
func (h hash) identity(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	h.text(fmt.Sprintf("%s %d %d", path, st.Size(), st.ModTime().UnixNano()))
	return nil
}

// save makes a snapshot of a machine that waits for its orders.
func (m *Machine) save(ctx context.Context, cfg Config, to *snapshot.Store, key string) (snapshot.Snapshot, error) {
	if err := m.Pause(); err != nil {
		return snapshot.Snapshot{}, err
	}
	snap, err := to.Save(snapshot.Info{Level: snapshot.Booted, Key: key, Machine: cfg.describe()}, func(d *snapshot.Draft) error {
		return m.SaveMemory(ctx, d.WriteMemory)
	})
	return snap, errors.Join(err, m.Resume())
}

func (c Config) describe() string {
	c.complete()
	return fmt.Sprintf("%d MiB, %d CPUs, %d NICs, kernel %s", c.Memory, c.CPUs, len(c.NICs), c.Image.Kernel.Release)
}

// Incoming returns the machine of a snapshot, which is paused.
func Incoming(ctx context.Context, cfg Config, snap snapshot.Snapshot) (*Machine, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	// Larger pieces, fewer turns of the two ends; without it, it just takes
	// longer.
	_, _ = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 1<<20)
	m, err := launch(cfg, r)
	r.Close()
	if err != nil {
		w.Close()
		return nil, err
	}
	read := make(chan error, 1)
	go func() {
		err := snap.ReadMemory(w)
		read <- errors.Join(err, w.Close())
	}()
	stop := context.AfterFunc(ctx, func() { m.cmd.Process.Kill() })
	defer stop()
	// A snapshot that is shorter than it should be ends QEMU; what it says
	// about that means little, what the reader says counts more.
	if bad := <-read; bad != nil {
		m.Kill()
		return nil, bad
	}
	if err := m.monitor.migration(ctx); err != nil {
		m.Kill()
		return nil, m.because(err)
	}
	return m, nil
}

// because adds to an error what QEMU said when it ended.
func (m *Machine) because(err error) error {
	if s := lastLine(m.stderr.Bytes()); s != "" {
		return fmt.Errorf("%w: %s", err, s)
	}
	return err
}

// orderTime is how long the guest may take to set its clock and to mount its
// disks: a tenth of a second, seconds on a busy host.
const orderTime = 40 * time.Second

// order gives the guest its orders, with the time and fresh randomness, and
// waits until it has carried out the first ones.
func (m *Machine) order(ctx context.Context) error {
	var seed [64]byte
	rand.Read(seed[:]) // never fails
	ctx, cancel := context.WithTimeoutCause(ctx, orderTime, fmt.Errorf("the guest did not answer in %s", orderTime))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { m.control.SetDeadline(time.Now()) })
	defer stop()
	now := time.Now()
	if _, err := fmt.Fprintf(m.control, "go %d %d %s\n", now.Unix(), now.Nanosecond()/1000, hex.EncodeToString(seed[:])); err != nil {
		return fmt.Errorf("the guest's orders: %w", err)
	}
	answer, err := bufio.NewReader(m.control).ReadString('\n')
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, io.EOF), errors.Is(err, os.ErrClosed):
		<-m.done
		return m.Ended()
	case err != nil:
		return fmt.Errorf("the guest's orders: %w", err)
	case strings.TrimSpace(answer) != "ok":
		return fmt.Errorf("the guest answered %q to its orders", answer)
	}
	return nil
}

// ConvergedKey is Key for a snapshot that is made later, of a machine that has
// mounted its other disk and run programs: files and parts are what it depends
// on besides.
func (c Config) ConvergedKey(ctx context.Context, files []string, parts ...string) (string, error) {
	booted, err := c.Key(ctx)
	if err != nil {
		return "", err
	}
	h := newHash()
	h.text(booted)
	for _, f := range files {
		if err := h.identity(f); err != nil {
			return "", err
		}
	}
	for _, p := range parts {
		h.text(p)
	}
	return h.String(), nil
}
