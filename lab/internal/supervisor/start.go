package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// File descriptors that the supervisor inherits.
const (
	configFD   = 3 // the Config as JSON
	lockFD     = 4 // holds the lock of the run directory
	lifelineFD = 5 // ends when the process that started an ephemeral lab does
)

// answerTimeout is how long the supervisor may take to listen.
const answerTimeout = time.Minute

// Start starts a lab and returns when its control planes serve and its nodes
// are ready, or with the reason why they are not; then nothing is left of it
// but its log. Closing the client of an ephemeral lab ends the lab.
func Start(ctx context.Context, cfg Config) (*world.Client, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("the lab needs root: it makes network namespaces in which pods run as any user; use sudo")
	}
	claimed, err := claim(cfg)
	if err != nil {
		return nil, err
	}
	cfg.Cgroup = claimed.Cgroup
	p, err := startProcess(cfg, claimed.Lock)
	claimed.Lock.Close()
	if err != nil {
		return nil, errors.Join(err, removeRest(context.WithoutCancel(ctx), cfg.RunDir))
	}
	defer p.log.Close()
	end := func() error {
		p.end()
		return removeRest(context.WithoutCancel(ctx), cfg.RunDir)
	}
	client := newClient(cfg.RunDir)
	client.OnClose(func() error {
		if cfg.Ephemeral {
			return end()
		}
		return nil
	})
	fail := func(err error) (*world.Client, error) {
		if ctx.Err() != nil { // neither it nor its log tells of more than the end
			err = ctx.Err()
		}
		// Nothing of the lab stays; its log can be read as long as it is open.
		if err2 := end(); err2 != nil {
			err = fmt.Errorf("%w\nit is not gone altogether: %w", err, err2)
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("lab %s: %w", cfg.Name, err)
		}
		if log := strings.TrimSpace(logEnd(fmt.Sprintf("/proc/self/fd/%d", p.log.Fd()))); log != "" && !strings.Contains(log, err.Error()) {
			err = fmt.Errorf("%w\nthe end of the supervisor's log:\n%s", err, log)
		}
		return nil, fmt.Errorf("lab %s: %w", cfg.Name, err)
	}
	if err := p.waitListening(ctx, filepath.Join(cfg.RunDir, socketFile)); err != nil {
		return fail(err)
	}
	if err := client.Watch(ctx, cfg.Progress); err != nil {
		return fail(err)
	}
	return client, nil
}

// claim makes the run directory and takes its lock. What a lab that was killed
// has left there goes.
func claim(cfg Config) (*rundir.Lab, error) {
	dir := cfg.RunDir
	l, err := rundir.Claim(dir, cfg.wantsCgroup())
	switch {
	case errors.Is(err, rundir.ErrInUse):
		return nil, fmt.Errorf("lab %s runs already (%s is in use): `lab down %[1]s` ends it, `--name` gives another one", cfg.Name, dir)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return nil, fmt.Errorf("run directory: %w: make it writable, the lab keeps its socket and its log there", err)
	case err != nil:
		return nil, noSpace(dir, fmt.Errorf("run directory: %w", err))
	}
	if err := os.MkdirAll(filepath.Join(dir, stateDir), 0o700); err != nil {
		l.Lock.Close()
		return nil, errors.Join(noSpace(dir, err), rundir.Remove(context.Background(), dir))
	}
	return l, nil
}

func noSpace(dir string, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: there is no space left for %s: make some (df -h and df -i show what is full)", err, dir)
	}
	return err
}

// A process is a supervisor that we started.
type process struct {
	cmd      *exec.Cmd
	log      *os.File // of the supervisor, to read also when it has no name any more
	lifeline *os.File // ours to close; nil for a lab that stays
	done     chan struct{}
}

// startProcess starts the supervisor in namespaces of its own.
func startProcess(cfg Config, lock *os.File) (*process, error) {
	configRead, configWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer configRead.Close()
	defer configWrite.Close()
	log, err := os.OpenFile(filepath.Join(cfg.RunDir, logFile), os.O_CREATE|os.O_TRUNC|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, noSpace(cfg.RunDir, err)
	}
	p := &process{log: log, done: make(chan struct{})}
	kept := false
	defer func() {
		if !kept {
			log.Close()
		}
	}()
	p.cmd = exec.Command(cfg.Executable, "supervise")
	p.cmd.Env = environment(os.Getenv, cfg)
	p.cmd.Dir = "/"
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.ExtraFiles = []*os.File{configRead, lock}
	if cfg.Ephemeral {
		lifelineRead, lifelineWrite, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		defer lifelineRead.Close()
		p.cmd.ExtraFiles = append(p.cmd.ExtraFiles, lifelineRead)
		p.lifeline = lifelineWrite
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC,
		Setsid:     true, // a Ctrl-C at the terminal is for us
	}
	started := make(chan error)
	go func() {
		// The supervisor hears of the death of the thread that started it,
		// so this one stays until the supervisor has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		if p.lifeline != nil {
			p.lifeline.Close()
		}
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EUSERS) {
			return nil, fmt.Errorf("new namespaces: %w: the limits in /proc/sys/user/max_*_namespaces are reached: raise them, or end other labs", err)
		}
		return nil, fmt.Errorf("start the supervisor: %w", err)
	}
	cfg.HostPID = p.cmd.Process.Pid
	if err := json.NewEncoder(configWrite).Encode(cfg); err != nil {
		p.end()
		return nil, fmt.Errorf("start the supervisor: %w", err)
	}
	kept = true
	return p, nil
}

// kept are the variables of the caller's environment that a lab has too: where
// files are kept, and what somebody sets to change the lab itself.
var kept = []string{"HOME", "XDG_CACHE_HOME", "TMPDIR", "GOGC", "GOMAXPROCS", "GODEBUG", "GOCOVERDIR", "KUBEBUILDER_ASSETS", vm.KernelEnv}

// environment is that of the supervisor and of all that it starts. Proxies, a
// kubeconfig, the API server of a pod that the lab runs in and a language are
// the caller's: programs in a lab would look at them, and do something else than
// on another machine. The lab's binaries come first in the PATH, and root's
// directories, which a user's may lack, last.
func environment(caller func(string) string, cfg Config) []string {
	path := strings.Join([]string{cfg.BinDir, caller("PATH"), "/usr/local/sbin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}, ":")
	env := []string{"PATH=" + path, "LC_ALL=C", "TZ=UTC", innerEnv + "=" + cfg.RunDir}
	for _, name := range kept {
		if value := caller(name); value != "" {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// waitListening waits until the control socket answers.
func (p *process) waitListening(ctx context.Context, socket string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	timeout := time.NewTimer(answerTimeout)
	defer timeout.Stop()
	for {
		if _, err := os.Stat(socket); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.done:
			return fmt.Errorf("the supervisor ended at once (%s)", p.cmd.ProcessState)
		case <-timeout.C:
			return fmt.Errorf("the supervisor did not listen within %s", answerTimeout)
		case <-tick.C:
		}
	}
}

// endTimeout is how long a lab may take to end by itself.
const endTimeout = 15 * time.Second

// end ends the lab and waits until the kernel has taken its namespaces down.
func (p *process) end() {
	if p.lifeline != nil {
		p.lifeline.Close()
	}
	timeout := time.NewTimer(endTimeout)
	defer timeout.Stop()
	// The kernel gives PID 1 of a namespace no signal that it has no handler for:
	// one that has just started would never hear of it.
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for {
		p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.done:
			return
		case <-timeout.C:
			p.cmd.Process.Kill()
			<-p.done
			return
		case <-again.C:
		}
	}
}

func logEnd(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	const most = 4000
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return string(b)
}
