package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
)

// stopGrace is how long a component may take to end after SIGTERM. The API
// server would wait for its watchers, which never leave by themselves.
const stopGrace = 2 * time.Second

// Settings of Go's runtime for a component of a small cluster that lives for minutes. What
// the caller's own environment says holds over them. lab up two-clusters took, in
// processor time:
//
//   - collectLater, a heap of five times of what lives in it before garbage is collected,
//     instead of twice: 17.0 s instead of 24.0 s.
//   - oneThread that runs Go code, so that none is woken for each small piece of work: 34 s
//     instead of 43 s, on a machine where that is dear (page faults of 15 µs, system calls
//     of 1 µs).
const (
	collectLater = "GOGC=400"
	oneThread    = "GOMAXPROCS=1"
)

// process is one running component.
type process struct {
	component string
	cmd       *exec.Cmd
	done      chan struct{} // closed when it has ended
	err       error         // why; read after done
}

func (c *Config) logFile(component string) string {
	return filepath.Join(c.Dir, "log", component+".log")
}

func (c *Config) dial(ctx context.Context, network, address string) (net.Conn, error) {
	return netns.DialContext(ctx, c.NetNS, network, address)
}

// binary returns the program and the leading arguments of a component. The
// assets of controller-runtime's envtest are honoured when they are there.
func (c *Config) binary(component string) (string, []string) {
	if assets := os.Getenv("KUBEBUILDER_ASSETS"); assets != "" {
		path := filepath.Join(assets, component)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return c.Binary, []string{component}
}

// launch starts a component with its log appended to its file.
func (c *Config) launch(component string, flags []string) (*process, error) {
	path, args := c.binary(component)
	log, err := os.OpenFile(c.logFile(component), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(path, append(args, flags...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = c.Dir
	cmd.Env = append([]string{collectLater, oneThread}, os.Environ()...)
	// A group of its own: a Ctrl-C at the terminal is for the lab, which
	// stops the components in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := netns.Do(c.NetNS, cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s of cluster %s: %w", component, c.Name, err)
	}
	p := &process{component: component, cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// stop ends the process: politely, then not.
func (p *process) stop() {
	select {
	case <-p.done:
		return
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	t := time.NewTimer(stopGrace)
	defer t.Stop()
	select {
	case <-p.done:
	case <-t.C:
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// ended explains why a component is no longer there, with the end of its log.
func (c *Config) ended(p *process) error {
	return fmt.Errorf("%s of cluster %s ended (%v); the end of %s:\n%s",
		p.component, c.Name, p.err, c.logFile(p.component), tail(c.logFile(p.component), 2000))
}

func tail(path string, n int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd)
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

// portsFree fails when a port is taken, which a component would say only in
// its log and after a while.
func (c *Config) portsFree(ctx context.Context) error {
	loopback := netip.MustParseAddr("127.0.0.1")
	var errs []error
	for _, p := range []struct {
		component string
		addr      netip.Addr
		port      uint16
	}{
		{APIServer, c.Address, c.Ports.APIServer},
		{Etcd, loopback, c.Ports.EtcdClient},
		{Etcd, loopback, c.Ports.EtcdPeer},
		{ControllerManager, loopback, c.Ports.ControllerManager},
		{Scheduler, loopback, c.Ports.Scheduler},
	} {
		address := netip.AddrPortFrom(p.addr, p.port).String()
		l, err := netns.Listen(ctx, c.NetNS, "tcp", address)
		if err != nil {
			errs = append(errs, fmt.Errorf("cluster %s: %s cannot listen on %s: %w: %s", c.Name, p.component, address, err, cureListen(err)))
			continue
		}
		l.Close()
	}
	return errors.Join(errs...)
}

// cureListen says what to do about an address that nobody can listen on.
func cureListen(err error) string {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return "end what uses the port (ss -ltnp names it), or choose another one in Config.Ports"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "Config.Address must be on a link of Config.NetNS that is up"
	}
	return "look at Config.Address and Config.Ports"
}
