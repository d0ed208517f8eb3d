package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/nettest/sysctl"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// innerEnv is set in the environment of a lab's processes: to its run directory.
const innerEnv = "ISTHMUS_LAB_RUN_DIR"

// graceful is how long the supervisor may take to stop everything in order.
const graceful = 10 * time.Second

// runInit is PID 1 of a lab: it sets up the mounts, starts the supervisor
// proper and collects orphans until that ends. Then it ends what is left, and
// removes what the lab has on the host. A lab whose supervisor has not ended in
// order leaves that, with its log, to the next one who looks for dead labs.
func runInit(ctx context.Context, cfg Config, config *os.File, logger *slog.Logger) error {
	if cfg.Ephemeral {
		endWithParent()
	}
	// Held open: what has been mounted on top by then does not matter.
	labs, err := os.Open(filepath.Dir(cfg.RunDir))
	if err != nil {
		return fmt.Errorf("run directory: %w", err)
	}
	defer labs.Close()
	if err := sysctl.Reset(); err != nil {
		return err
	}
	unix.Umask(0o022) // users of pods read files of the lab, whatever the caller's is
	if err := setUpMounts(cfg.RunDir); err != nil {
		return err
	}
	if err := runSupervisor(ctx, cfg, config, logger); err != nil {
		return err
	}
	endAll()
	for _, dir := range []string{filepath.Join(cfg.RunDir, stateDir), cfg.RunDir} {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	return rundir.RemoveOwn(labs, filepath.Base(cfg.RunDir))
}

// endAll ends all processes of this PID namespace but its first, which is this
// one, and returns when they are gone.
func endAll() {
	_ = syscall.Kill(-1, syscall.SIGKILL) // there may be none
	for {
		if _, err := syscall.Wait4(-1, nil, 0, nil); err != nil && !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}

// runSupervisor runs the supervisor proper until it ends, or ctx does.
func runSupervisor(ctx context.Context, cfg Config, config *os.File, logger *slog.Logger) error {
	child := exec.Command("/proc/self/exe", "supervise")
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	child.ExtraFiles = []*os.File{config, os.NewFile(lockFD, "lock")}
	if cfg.Ephemeral {
		child.ExtraFiles = append(child.ExtraFiles, os.NewFile(lifelineFD, "lifeline"))
	}
	if err := child.Start(); err != nil {
		return fmt.Errorf("start the supervisor: %w", err)
	}
	ended := make(chan syscall.WaitStatus, 1)
	go reap(child.Process.Pid, ended)
	select {
	case status := <-ended:
		return exitStatus(status)
	case <-ctx.Done():
	}
	logger.Info("the lab is ended from outside")
	child.Process.Signal(syscall.SIGTERM)
	select {
	case status := <-ended:
		return exitStatus(status)
	case <-time.After(graceful + 2*time.Second):
		return errors.New("the supervisor did not end: everything is killed")
	}
}

func exitStatus(s syscall.WaitStatus) error {
	switch {
	case s.Signaled():
		return fmt.Errorf("the supervisor was ended by %s", s.Signal())
	case s.ExitStatus() != 0:
		return fmt.Errorf("the supervisor ended with exit code %d", s.ExitStatus())
	}
	return nil
}

// reap collects every child until the one ends.
func reap(pid int, ended chan<- syscall.WaitStatus) {
	for {
		var status syscall.WaitStatus
		got, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil: // there is none left, which cannot be while it runs
			ended <- status
			return
		case got == pid:
			ended <- status
			return
		}
	}
}

// endWithParent asks for SIGTERM when the process that started the lab ends.
// The pipe says so too; this works even when somebody has inherited its other
// end. The kernel keeps the wish per thread, so the thread must stay.
func endWithParent() {
	asked := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		// It cannot fail with a valid signal.
		_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGTERM), 0, 0, 0)
		close(asked)
		select {}
	}()
	<-asked
}

// setUpMounts makes the mount namespace the lab's own: nothing that is mounted
// from here on is seen outside, and everything goes with it.
func setUpMounts(runDir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	// Programs leave locks and sockets in /run: in ours, not the host's. Our
	// run directory stays what it is.
	keep, err := unix.Open(runDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("run directory %s: %w", runDir, err)
	}
	defer unix.Close(keep)
	if err := unix.Mount("run", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	if err := os.MkdirAll("/run/lock", 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(runDir, 0o700); err != nil { // where it is below /run
		return err
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", keep), runDir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("keep %s: %w", runDir, err)
	}
	// Keys, etcd's data, logs and pods' volumes: in memory, gone with the lab.
	state := filepath.Join(runDir, stateDir)
	if err := unix.Mount("state", state, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return fmt.Errorf("mount %s: %w", state, err)
	}
	return nil
}
