package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/niceness"
)

// A NIC is a network card of a machine: an open tap device.
type NIC struct {
	MAC net.HardwareAddr
	Tap *os.File
}

// A Port is a character device of the guest, /dev/vport*p<n> in the order of
// Config.Ports, from 2: what the guest writes goes to the file. The first one
// is for the guest's orders.
type Port struct {
	Name string
	To   *os.File
}

// Config describes a machine.
type Config struct {
	Image       Image
	NICs        []NIC
	Ports       []Port
	Payload     string   // path of one more disk, raw and read-only; optional
	CommandLine []string // added to the kernel's
	Dir         string   // for the console's log
	Accelerator string   // TCG or KVM; default TCG
	Memory      int      // MiB; default 2048
	CPUs        int      // default: as many as do the machine good
	// Start starts QEMU; default (*exec.Cmd).Start. A lab starts it in a
	// namespace.
	Start func(*exec.Cmd) error
}

// emulatedCPU is a plain processor with what TLS and WireGuard use. The newest
// features ("max": five levels of page tables, AVX, SMAP) are emulated at a
// price: a third more processor time for the same work.
const emulatedCPU = "Nehalem,+aes,+pclmulqdq,+rdrand"

// emulatedNice is the niceness of an emulated machine. Beside two labs with their 30
// processes it got half a processor, and kernel tests that take one minute were not done
// after fifteen. At this niceness it weighs as much as nine other processes
// (sched_prio_to_weight in the kernel's kernel/sched/core.c), so it gets nearly a whole
// processor.
const emulatedNice = -10

// cpus is how many processors a machine gets. An emulated one leaves one of the
// host's to what runs beside it: with as many as the host has, its processors
// wait for each other's locks while the other one is not running; on two cores
// the same work took 29 s of processor time on two against 17 s on one.
func cpus(accelerator string) int {
	if accelerator == KVM {
		return min(4, runtime.NumCPU())
	}
	return max(1, min(4, runtime.NumCPU()-1))
}

// Accelerators.
const (
	TCG = "tcg" // emulation: works everywhere
	KVM = "kvm"
)

// A Machine is a running virtual machine.
type Machine struct {
	cmd     *exec.Cmd
	console string
	stderr  bytes.Buffer
	done    chan struct{}
	err     error
	monitor *monitor
	control *net.UnixConn // the guest's first port
}

// kernelArgs leave out what an emulated machine only loses time with. A guest
// whose kernel has a bug ends at once. Without autogroups a process' niceness
// counts among all processes, not just in its session (sched(7)).
var kernelArgs = []string{"console=ttyS0", "panic=-1", "oops=panic", "loglevel=5", "mitigations=off", "nokaslr", "no_timer_check", "audit=0", "noautogroup", "apparmor=0", "cryptomgr.notests",
	"8250.nr_uarts=1", "random.trust_cpu=on", "net.ifnames=0"}

// complete sets the defaults.
func (c *Config) complete() {
	if c.Memory == 0 {
		c.Memory = 2048
	}
	if c.CPUs == 0 {
		c.CPUs = cpus(c.Accelerator)
	}
	if c.Start == nil {
		c.Start = (*exec.Cmd).Start
	}
}

// arguments are QEMU's for this machine. All files and all that tells one
// start of the machine from another come from the functions.
func (c Config) arguments(path func(string) string, inherit func(*os.File) int, monitor, control *os.File) []string {
	disks := []string{c.Image.Disk}
	commandLine := slices.Concat(kernelArgs, c.CommandLine)
	for _, late := range []struct{ name, path string }{{"binaries", c.Image.Binaries}, {"payload", c.Payload}} {
		if late.path != "" {
			commandLine = append(commandLine, fmt.Sprintf("lab.%s=vd%c", late.name, 'a'+len(disks)))
			disks = append(disks, late.path)
		}
	}
	args := []string{"-M", "pc", "-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-rtc", "base=utc",
		"-m", fmt.Sprint(c.Memory), "-smp", fmt.Sprint(c.CPUs),
		"-serial", "file:" + path(filepath.Join(c.Dir, consoleFile)),
		"-kernel", path(c.Image.Kernel.Image), "-initrd", path(c.Image.Initrd),
		"-append", strings.Join(commandLine, " "),
		"-device", "virtio-rng-pci"}
	if c.Accelerator == KVM {
		args = append(args, "-accel", "kvm", "-cpu", "host")
	} else {
		args = append(args, "-accel", "tcg,thread=multi", "-cpu", emulatedCPU)
	}
	for i, disk := range disks {
		args = append(args, "-drive", fmt.Sprintf("file=%s,if=none,id=d%d,format=raw,readonly=on,cache=unsafe,aio=threads", path(disk), i),
			"-device", fmt.Sprintf("virtio-blk-pci,drive=d%d", i))
	}
	for i, nic := range c.NICs {
		args = append(args, "-netdev", fmt.Sprintf("tap,id=n%d,fd=%d", i, inherit(nic.Tap)),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=n%d,mac=%s,romfile=", i, nic.MAC))
	}
	args = append(args, "-chardev", fmt.Sprintf("socket,id=qmp,fd=%d", inherit(monitor)), "-mon", "chardev=qmp,mode=control",
		"-device", "virtio-serial-pci",
		"-chardev", fmt.Sprintf("socket,id=control,fd=%d", inherit(control)), "-device", "virtserialport,chardev=control,name=lab.control,nr=1")
	for i, p := range c.Ports {
		args = append(args, "-chardev", fmt.Sprintf("file,id=p%d,path=/proc/self/fd/%d", i, inherit(p.To)),
			"-device", fmt.Sprintf("virtserialport,chardev=p%d,name=%s,nr=%d", i, p.Name, i+2))
	}
	return args
}

// consoleFile is in Config.Dir.
const consoleFile = "console.log"

// Boot starts a machine. It does not wait for anything in it.
func Boot(cfg Config) (*Machine, error) { return launch(cfg, nil) }

// launch starts QEMU. With incoming it waits for a machine's memory from there.
func launch(cfg Config, incoming *os.File) (*Machine, error) {
	qemu, err := look("qemu-system-x86_64")
	if err != nil {
		return nil, fmt.Errorf("virtual machine: %w", err)
	}
	cfg.complete()
	m := &Machine{console: filepath.Join(cfg.Dir, consoleFile), done: make(chan struct{})}
	var files []*os.File
	inherit := func(f *os.File) int {
		files = append(files, f)
		return 2 + len(files)
	}
	var theirs [2]*os.File
	var ours [2]*net.UnixConn
	for i := range theirs {
		if ours[i], theirs[i], err = socketPair(); err != nil {
			return nil, err
		}
		defer theirs[i].Close()
	}
	m.monitor, m.control = newMonitor(ours[0]), ours[1]
	args := cfg.arguments(func(p string) string { return p }, inherit, theirs[0], theirs[1])
	if incoming != nil {
		args = append(args, "-incoming", fmt.Sprintf("fd:%d", inherit(incoming)))
	}
	m.cmd = exec.Command(qemu, args...)
	m.cmd.ExtraFiles = files
	m.cmd.Stdout, m.cmd.Stderr = &m.stderr, &m.stderr
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := os.WriteFile(m.console, nil, 0o644); err != nil {
		return nil, err
	}
	if err := cfg.Start(m.cmd); err != nil {
		ours[0].Close()
		ours[1].Close()
		return nil, fmt.Errorf("virtual machine: start %s: %w", qemu, err)
	}
	if cfg.Accelerator != KVM {
		// Without the privilege the machine is as quick as what runs beside it lets it be.
		_ = niceness.SetProcess(m.cmd.Process.Pid, emulatedNice)
	}
	go func() {
		m.err = m.cmd.Wait()
		for _, c := range ours {
			c.Close()
		}
		close(m.done)
	}()
	return m, nil
}

// Done is closed when the machine has ended.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Kill ends the machine and waits for that.
func (m *Machine) Kill() {
	m.cmd.Process.Kill()
	<-m.done
}

// Console is what the guest has written on its console.
func (m *Machine) Console() string {
	b, err := os.ReadFile(m.console)
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(string(b), "\r", "")
}

// Ended explains why a machine has ended: what QEMU said, or the end of the
// console.
func (m *Machine) Ended() error {
	if s := strings.TrimSpace(m.stderr.String()); s != "" && m.err != nil {
		return fmt.Errorf("QEMU ended (%w): %s", m.err, s)
	}
	return fmt.Errorf("the virtual machine ended; its console's end:\n%s", consoleTail(m.Console(), 25))
}

// alarm are the lines of a kernel in trouble.
var alarm = regexp.MustCompile(`(?m)^.*(Kernel panic|BUG: |WARNING: |Oops: |general protection fault|INFO: rcu_.*stall|blocked for more than|Out of memory:|soft lockup).*$`)

// Alarms are the lines on the console that say that the kernel is in trouble.
func (m *Machine) Alarms() []string { return alarm.FindAllString(m.Console(), -1) }

func consoleTail(s string, lines int) string {
	all := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// stuckAfter is how long a boot may print nothing before it counts as stuck, and tooLate how long it may
// take in all: a kernel in trouble prints now and then. The first steps take two seconds under TCG, ten on
// a loaded machine.
const (
	stuckAfter = 40 * time.Second
	tooLate    = 10 * stuckAfter
	retries    = 2
)

// errStuck is a boot that did not get anywhere.
var errStuck = errors.New("the virtual machine did not boot")

// WaitBooted waits until the guest has come so far that it waits for its orders.
func (m *Machine) WaitBooted(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.NewTimer(stuckAfter)
	defer deadline.Stop()
	limit := time.After(tooLate)
	printed := 0
	for {
		b, err := os.ReadFile(m.console)
		if err == nil && bytes.Contains(b, []byte(markReady)) {
			return nil
		}
		if len(b) > printed {
			printed = len(b)
			deadline.Reset(stuckAfter)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-m.done:
			return m.Ended()
		case <-deadline.C:
			return fmt.Errorf("%w: nothing was printed for %s; its console's end:\n%s", errStuck, stuckAfter, consoleTail(m.Console(), 15))
		case <-limit:
			return fmt.Errorf("%w: it still prints after %s; its console's end:\n%s", errStuck, tooLate, consoleTail(m.Console(), 15))
		case <-tick.C:
		}
	}
}

// bootAgain boots a machine until it waits for its orders; a boot that is stuck
// is tried again, twice. It returns how often that was so.
func bootAgain(ctx context.Context, cfg Config) (m *Machine, stuck int, err error) {
	for stuck = 0; ; stuck++ {
		if m, err = Boot(cfg); err != nil {
			return nil, stuck, err
		}
		if err = m.WaitBooted(ctx); err == nil {
			return m, stuck, nil
		}
		m.Kill()
		if !errors.Is(err, errStuck) || stuck == retries {
			return nil, stuck, err
		}
	}
}
