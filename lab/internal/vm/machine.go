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
	"strings"
	"syscall"
	"time"
)

// A NIC is a network card of a machine: an open tap device.
type NIC struct {
	MAC net.HardwareAddr
	Tap *os.File
}

// A Port is a character device of the guest, /dev/vport*p<n> in the order of
// Config.Ports, from 1: what the guest writes goes to the file.
type Port struct {
	Name string
	To   *os.File
}

// Config describes a machine.
type Config struct {
	Image       Image
	NICs        []NIC
	Ports       []Port
	Disks       []string // raw and read-only, after the image's own
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
}

// kernelArgs leave out what an emulated machine only loses time with. A guest
// whose kernel has a bug ends at once. Without autogroups a process' niceness
// counts among all processes, not just in its session (sched(7)).
var kernelArgs = []string{"console=ttyS0", "panic=-1", "oops=panic", "loglevel=5", "mitigations=off", "nokaslr", "no_timer_check", "audit=0", "noautogroup", "apparmor=0", "cryptomgr.notests",
	"8250.nr_uarts=1", "random.trust_cpu=on", "net.ifnames=0"}

// Boot starts a machine. It does not wait for anything in it.
func Boot(cfg Config) (*Machine, error) {
	qemu, err := look("qemu-system-x86_64")
	if err != nil {
		return nil, fmt.Errorf("virtual machine: %w", err)
	}
	if cfg.Memory == 0 {
		cfg.Memory = 2048
	}
	if cfg.CPUs == 0 {
		cfg.CPUs = cpus(cfg.Accelerator)
	}
	if cfg.Start == nil {
		cfg.Start = (*exec.Cmd).Start
	}
	m := &Machine{console: filepath.Join(cfg.Dir, "console.log"), done: make(chan struct{})}
	args := []string{"-M", "pc", "-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-rtc", "base=utc",
		"-m", fmt.Sprint(cfg.Memory), "-smp", fmt.Sprint(cfg.CPUs),
		"-serial", "file:" + m.console,
		"-kernel", cfg.Image.Kernel.Image, "-initrd", cfg.Image.Initrd,
		"-append", strings.Join(append(append([]string(nil), kernelArgs...), cfg.CommandLine...), " "),
		"-device", "virtio-rng-pci"}
	if cfg.Accelerator == KVM {
		args = append(args, "-accel", "kvm", "-cpu", "host")
	} else {
		args = append(args, "-accel", "tcg,thread=multi", "-cpu", emulatedCPU)
	}
	for i, disk := range append([]string{cfg.Image.Disk}, cfg.Disks...) {
		args = append(args, "-drive", fmt.Sprintf("file=%s,if=none,id=d%d,format=raw,readonly=on,cache=unsafe,aio=threads", disk, i),
			"-device", fmt.Sprintf("virtio-blk-pci,drive=d%d", i))
	}
	var files []*os.File
	inherit := func(f *os.File) int {
		files = append(files, f)
		return 2 + len(files)
	}
	for i, nic := range cfg.NICs {
		args = append(args, "-netdev", fmt.Sprintf("tap,id=n%d,fd=%d", i, inherit(nic.Tap)),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=n%d,mac=%s,romfile=", i, nic.MAC))
	}
	if len(cfg.Ports) > 0 {
		args = append(args, "-device", "virtio-serial-pci")
	}
	for i, p := range cfg.Ports {
		args = append(args, "-chardev", fmt.Sprintf("file,id=p%d,path=/proc/self/fd/%d", i, inherit(p.To)),
			"-device", fmt.Sprintf("virtserialport,chardev=p%d,name=%s,nr=%d", i, p.Name, i+1))
	}
	m.cmd = exec.Command(qemu, args...)
	m.cmd.ExtraFiles = files
	m.cmd.Stdout, m.cmd.Stderr = &m.stderr, &m.stderr
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := os.WriteFile(m.console, nil, 0o644); err != nil {
		return nil, err
	}
	if err := cfg.Start(m.cmd); err != nil {
		return nil, fmt.Errorf("virtual machine: start %s: %w", qemu, err)
	}
	go func() {
		m.err = m.cmd.Wait()
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

// How long the first steps of a boot may take before it counts as stuck. They
// take two seconds under TCG, ten on a loaded machine.
const (
	stuckAfter = 40 * time.Second
	retries    = 2
)

// errStuck is a boot that did not get anywhere.
var errStuck = errors.New("the virtual machine did not boot")

// WaitBooted waits until the guest has mounted its disk.
func (m *Machine) WaitBooted(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.NewTimer(stuckAfter)
	defer deadline.Stop()
	for {
		if b, err := os.ReadFile(m.console); err == nil && bytes.Contains(b, []byte(markRoot)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-m.done:
			return m.Ended()
		case <-deadline.C:
			return fmt.Errorf("%w in %s; its console's end:\n%s", errStuck, stuckAfter, consoleTail(m.Console(), 15))
		case <-tick.C:
		}
	}
}

// BootAgain boots a machine until its disk is mounted; a boot that is stuck is
// tried again, twice. It returns how often that was so.
func BootAgain(ctx context.Context, cfg Config) (m *Machine, stuck int, err error) {
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
