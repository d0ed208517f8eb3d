package supervisor

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// An agent is the other end in the world: a process, or a machine.
type agent struct {
	client *world.Client
	dial   func(ctx context.Context) (net.Conn, error)
	done   <-chan struct{}
	why    func() error // after done: why it has ended
	stop   func()
	vm     *vm.Machine
}

// startNative starts the agent in a network namespace of its own, in which the
// uplinks come to be.
func (l *lab) startNative(ctx context.Context) (*agent, error) {
	ns, err := l.worldNamespace()
	if err != nil {
		return nil, err
	}
	socket := l.state("agent.sock")
	logPath := l.state("agent.log")
	log, err := os.Create(logPath)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	if err := os.MkdirAll(l.state("world"), 0o755); err != nil {
		return nil, err
	}
	cmd := exec.Command(l.cfg.Executable, "agent", "--listen", socket, "--dir", l.state("world"), "--bin-dir", l.cfg.BinDir)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := ns.Start(cmd); err != nil {
		return nil, fmt.Errorf("start the agent: %w", err)
	}
	done := make(chan struct{})
	var waitErr error
	go func() {
		waitErr = cmd.Wait()
		close(done)
	}()
	a := &agent{
		done: done,
		dial: func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "unix", socket) },
		why: func() error {
			return fmt.Errorf("the agent ended (%v); the end of its log:\n%s", waitErr, logEnd(logPath))
		},
	}
	a.stop = func() {
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-done:
		case <-time.After(graceful / 2):
			cmd.Process.Kill()
			<-done
		}
	}
	a.client = world.NewAgentClient(a.dial)
	if err := a.waitAnswer(ctx, 5*time.Minute); err != nil {
		a.stop()
		return nil, err
	}
	return a, nil
}

// waitAnswer waits until the agent answers.
func (a *agent) waitAnswer(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("the agent did not answer within %s", timeout))
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		_, err := a.client.Clock(attempt, time.Time{})
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-a.done:
			return a.why()
		case <-ctx.Done():
			return fmt.Errorf("%w (%v)", context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}

// worldNamespace is the network namespace of the native agent.
func (l *lab) worldNamespace() (*world.Namespace, error) {
	l.worldNS.once.Do(func() { l.worldNS.ns, l.worldNS.err = world.NewNamespace() })
	return l.worldNS.ns, l.worldNS.err
}

type onceNamespace struct {
	once sync.Once
	ns   *world.Namespace
	err  error
}

func (l *lab) wireNative() error {
	ns, err := l.worldNamespace()
	if err != nil {
		return err
	}
	for _, c := range l.clusters {
		if err := world.Wire(ns, world.UplinkName(c.spec.Index), c.ns, uplink); err != nil {
			return fmt.Errorf("cluster %s: %w", c.spec.Name, err)
		}
		if err := addressUplink(c); err != nil {
			return err
		}
	}
	return nil
}

// The management network joins the supervisor and the machine; it is in no
// cluster.
var (
	managementHost  = netip.MustParsePrefix("169.254.1.1/30")
	managementGuest = netip.AddrPortFrom(netip.MustParseAddr("169.254.1.2"), world.AgentPort)
)

// wireMachine makes the tap devices: one in the supervisor's namespace, and one
// in each control plane's.
func (l *lab) wireMachine() error {
	root, err := world.CurrentNamespace()
	if err != nil {
		return err
	}
	defer root.Close()
	taps := make([]*os.File, len(l.cfg.Spec.Clusters)+1)
	add := func(k int, name string) (err error) {
		if taps[k], err = world.OpenTap(name); err != nil {
			return err
		}
		// Always the same: a machine that is restored remembers it.
		return root.SetMAC(name, world.TapMAC(k))
	}
	if err := add(0, "management"); err != nil {
		return err
	}
	if err := root.SetUp("management"); err != nil {
		return err
	}
	if err := root.AddAddress("management", managementHost); err != nil {
		return err
	}
	for _, c := range l.clusters {
		name := world.UplinkName(c.spec.Index)
		if err := add(c.spec.Index, name); err != nil {
			return err
		}
		if err := world.MoveLink(root, name, c.ns, uplink); err != nil {
			return fmt.Errorf("cluster %s: %w", c.spec.Name, err)
		}
		if err := addressUplink(c); err != nil {
			return err
		}
	}
	l.taps <- taps
	return nil
}

// machineConfig describes the virtual machine of a lab, without what only a lab
// that runs has: taps and a directory.
func machineConfig(ctx context.Context, cfg Config, progress func(string)) (c vm.Config, why string, err error) {
	if c.Image = cfg.Image; c.Image == (vm.Image{}) {
		kernel, err := vm.FindKernel(ctx, "", "", progress)
		if err != nil {
			return c, "", err
		}
		if c.Image, err = vm.BuildImage(ctx, kernel, vm.ImageConfig{BinDir: cfg.BinDir, Progress: progress}); err != nil {
			return c, "", err
		}
	}
	c.Accelerator, why = vm.Accelerator(ctx, c.Image, "")
	c.Memory = machineMemory(cfg.Spec)
	c.CommandLine = []string{"lab.mode=agent", "lab.agent=" + managementGuest.String()}
	for k := range len(cfg.Spec.Clusters) + 1 {
		c.NICs = append(c.NICs, vm.NIC{MAC: world.UplinkMAC(k)})
	}
	return c, why, nil
}

// prepareMachine is machineConfig for this lab.
func (l *lab) prepareMachine(ctx context.Context) (vm.Config, error) {
	start := time.Now()
	c, why, err := machineConfig(ctx, l.cfg, l.sayText)
	if err != nil {
		return c, err
	}
	l.say(world.Progress{Message: fmt.Sprintf("image ready, kernel %s; %s: %s", c.Image.Kernel.Release, c.Accelerator, why), Took: time.Since(start)})
	select {
	case taps := <-l.taps:
		for k := range c.NICs {
			c.NICs[k].Tap = taps[k]
		}
	case <-ctx.Done():
		return c, ctx.Err()
	}
	c.Dir = l.state("vm")
	return c, os.MkdirAll(c.Dir, 0o755)
}

// agentOf is the agent in a machine.
func agentOf(m *vm.Machine) *agent {
	dial := func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", managementGuest.String())
	}
	return &agent{client: world.NewAgentClient(dial), dial: dial, done: m.Done(), why: m.Ended, stop: m.Kill, vm: m}
}

// startMachine brings up the virtual machine with the agent in it.
func (l *lab) startMachine(ctx context.Context) (*agent, error) {
	cfg, err := l.prepareMachine(ctx)
	if err != nil {
		return nil, err
	}
	var snapshots *snapshot.Store
	if l.cfg.Snapshots {
		if snapshots, err = openSnapshots(); err != nil {
			return nil, err
		}
	}
	start := time.Now()
	m, how, err := vm.Start(ctx, cfg, snapshots)
	if err != nil {
		return nil, err
	}
	for _, nic := range cfg.NICs { // QEMU has its own
		nic.Tap.Close()
	}
	a := agentOf(m)
	if err := a.waitAnswer(ctx, 90*time.Second); err != nil {
		m.Kill()
		return nil, fmt.Errorf("%w; its console's end:\n%s", err, tailLines(m.Console(), 25))
	}
	l.mu.Lock()
	l.status.VM = &world.VMStatus{Accelerator: cfg.Accelerator, Kernel: cfg.Image.Kernel.Release, Boot: time.Since(start), Restored: how.Restored, Retries: how.Stuck}
	l.mu.Unlock()
	l.say(world.Progress{Message: how.String()})
	l.say(world.Progress{Message: "the machine's agent answers", Took: time.Since(start)})
	if err := syncClock(ctx, a.client, 0); err != nil {
		m.Kill()
		return nil, err
	}
	go l.keepClock(ctx, a)
	return a, nil
}

// machineMemory is 1 GiB for the machine and 256 MiB for each node's daemons.
func machineMemory(spec world.Spec) int {
	nodes := 0
	for _, c := range spec.Clusters {
		nodes += len(c.Nodes)
	}
	return 1024 + 256*max(nodes, 2)
}

func (l *lab) sayText(s string) { l.say(world.Progress{Message: s}) }

// Clocks under emulation run a few per cent wrong. Time stamps of packets,
// leases and tokens are compared with the host's, so the guest's is set right
// whenever it is off by more than this.
const (
	clockTolerance = 20 * time.Millisecond
	clockInterval  = 3 * time.Second
)

func (l *lab) keepClock(ctx context.Context, a *agent) {
	tick := time.NewTicker(clockInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.done:
			return
		case <-tick.C:
			if err := syncClock(ctx, a.client, clockTolerance); err != nil && ctx.Err() == nil {
				l.logger.Warn("the virtual machine's clock was not set", "err", err)
			}
		}
	}
}

// syncClock sets the guest's clock when it is off by more than tolerance. The
// answer is taken to be from the middle of the round trip.
func syncClock(ctx context.Context, c *world.Client, tolerance time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	before := time.Now()
	guest, err := c.Clock(ctx, time.Time{})
	if err != nil {
		return err
	}
	trip := time.Since(before)
	offset := guest.Sub(before.Add(trip / 2))
	if offset.Abs() <= max(tolerance, trip/2) && tolerance > 0 {
		return nil
	}
	_, err = c.Clock(ctx, time.Now().Add(trip/2))
	return err
}

func tailLines(s string, n int) string {
	for i := len(s) - 1; i >= 0; i-- {
		if s[i] == '\n' && i < len(s)-1 {
			if n--; n == 0 {
				return s[i+1:]
			}
		}
	}
	return s
}
