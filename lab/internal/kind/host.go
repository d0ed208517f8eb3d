package kind

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// podmanVariable names Podman's file of settings. The lab's own is no file of a
// disk: it is gone with this process. The user's files are not touched, and not
// read: Podman 4.3, which Debian 12 has, knows no file that comes on top of others.
const podmanVariable = "CONTAINERS_CONF"

// podmanSettings are what a Podman of root needs on this machine to start kind's
// containers, as containers.conf(5) has it; empty: nothing.
func podmanSettings(hasSysResource, cgroup1 bool, files, processes uint64) string {
	var b strings.Builder
	if !hasSysResource {
		// Nobody can have more than this process may: Podman's own
		// defaults, 1,048,576 files, are "operation not permitted".
		fmt.Fprintf(&b, "[containers]\ndefault_ulimits = [\"nofile=%[1]d:%[1]d\", \"nproc=%[2]d:%[2]d\"]\n", files, processes)
	}
	if cgroup1 {
		b.WriteString("[engine]\nruntime = \"runc\"\n") // crun takes version 2 only where systemd has both
	}
	return b.String()
}

// usePodmanSettings makes the clients of Podman that this process starts, those
// of kind's library included, go by what this machine needs. A user who names a
// file, or is not root, has what works there.
var usePodmanSettings = sync.OnceValue(func() error {
	if os.Getenv(podmanVariable) != "" || os.Geteuid() != 0 {
		return nil
	}
	text, err := settingsHere()
	if err != nil || text == "" {
		return err
	}
	fd, err := unix.MemfdCreate(podmanVariable, unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	if _, err := unix.Write(fd, []byte(text)); err != nil {
		return fmt.Errorf("settings of Podman: %w", err)
	}
	return os.Setenv(podmanVariable, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd))
})

// settingsHere are the settings for this machine and this process.
func settingsHere() (string, error) {
	var files, processes unix.Rlimit
	if err := errors.Join(unix.Getrlimit(unix.RLIMIT_NOFILE, &files), unix.Getrlimit(unix.RLIMIT_NPROC, &processes)); err != nil {
		return "", fmt.Errorf("limits of this process: %w", err)
	}
	hasSysResource, err := capable(unix.CAP_SYS_RESOURCE)
	if err != nil {
		return "", err
	}
	// Podman lowers its own limit of processes to this number
	// (containers/common, pkg/config/default_linux.go).
	pids, err := readNumber("/proc/sys/kernel/pid_max")
	if err != nil {
		return "", err
	}
	_, err = os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return podmanSettings(hasSysResource, err != nil, files.Max, min(processes.Max, pids)), nil
}

// readNumber reads a file that has a number.
func readNumber(file string) (uint64, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", file, err)
	}
	return n, nil
}

// capable tells whether this process has a capability.
func capable(capability int) (bool, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false, fmt.Errorf("capabilities of this process: %w", err)
	}
	return data[capability/32].Effective&(1<<(capability%32)) != 0, nil
}

// modules is a directory that kind gives to every node, which an engine has to
// have.
const modules = "/lib/modules"

// forwarding are the sysctls that an engine switches on for a network of its
// own, and leaves on.
var forwarding = []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv6/conf/default/forwarding"}

// A host is what of this machine a lab changes, or an engine for it. The last of
// the labs puts it back: each takes over what those that are there have found. It
// is empty when the engine's machine is another one, or this user could change
// nothing.
type host struct {
	Sysctls map[string]string `json:"sysctls"`                 // by path below /proc/sys, as they were; nil: nobody has looked
	Modules bool              `json:"modules,omitempty"`       // the directory is a lab's
	Engine  string            `json:"engine,omitempty"`        // that it is about
	Network string            `json:"engineNetwork,omitempty"` // the engine's, where that is a lab's
	Chains  bool              `json:"chains,omitempty"`        // netavark's chains are a lab's
}

// rememberHost writes into the record what of this machine will change. No other lab looks
// at the machine until it finds that record.
func (l *Lab) rememberHost(engine Engine) error {
	if !engine.Local || os.Geteuid() != 0 {
		return l.save()
	}
	unlock, err := rundir.LockBase(filepath.Dir(l.dir))
	if err != nil {
		return err
	}
	defer unlock()
	names, err := List(filepath.Dir(l.dir))
	if err != nil {
		return err
	}
	var before host // what a lost lab has made of this machine; sysctls are not among it
	for _, name := range names {
		r, err := readRecord(filepath.Join(filepath.Dir(l.dir), name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("lab %s: its record can't be read, so nobody knows what labs have changed of this machine: %w: remove %s when no container of that lab is left", name, err, filepath.Join(filepath.Dir(l.dir), name))
		}
		switch {
		case r.Host.Sysctls != nil && r.Lost:
			before = r.Host
		case r.Host.Sysctls != nil:
			l.record.Host = r.Host
			return l.save()
		}
	}
	h := host{Sysctls: map[string]string{}, Engine: engine.Name}
	sysctls := []string{inotify}
	if engine.Name == podman { // the others have a daemon, which was there before
		sysctls = append(append(sysctls, forwarding...), bridgeFilters...)
		missing, err := networkMissing(context.Background(), l.record.Network)
		if err != nil {
			return err
		}
		if missing {
			h.Network = l.record.Network
		}
		h.Chains = netavarkMissing(context.Background())
		_, err = os.Stat(modules)
		h.Modules = errors.Is(err, fs.ErrNotExist)
	}
	h.Network, h.Modules = cmp.Or(h.Network, before.Network), h.Modules || before.Modules
	for _, s := range sysctls {
		if b, err := os.ReadFile("/proc/sys/" + s); err == nil {
			h.Sysctls[s] = strings.TrimSpace(string(b))
		}
	}
	l.record.Host = h
	return l.save()
}

// networkMissing tells whether Podman has no network for kind, so that the one to come is a
// lab's. That it can't be asked is an error: the network may be somebody's.
func networkMissing(ctx context.Context, network string) (bool, error) {
	_, err := run(ctx, podman, "network", "exists", network)
	var code *exec.ExitError
	if errors.As(err, &code) && code.ExitCode() == 1 { // podman-network-exists(1)
		return true, nil
	}
	return false, err
}

// lockNetwork makes clusters of this user wait for each other where the engine has no
// network for kind yet, until the first of them has made it or has given up: each would
// make it, and all but one would fail.
func (l *Lab) lockNetwork(ctx context.Context) (unlock func(), err error) {
	there := func(ctx context.Context) (bool, error) {
		_, err := run(ctx, l.record.Engine, "network", "inspect", l.record.Network)
		return err == nil, nil
	}
	release, err := rundir.LockBase(filepath.Dir(l.dir))
	if err != nil {
		return nil, err
	}
	if is, _ := there(ctx); is {
		release()
		return func() {}, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	context.AfterFunc(ctx, release)
	go func() {
		defer cancel()
		_ = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, false, there)
	}()
	return cancel, nil
}

// prepareHost makes what is missing, and says what it leaves as it is.
func (l *Lab) prepareHost(engine Engine, say func(message string)) error {
	if !engine.Local || os.Geteuid() != 0 {
		return nil
	}
	if l.record.Host.Modules {
		if err := os.Mkdir(modules, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("%s, which kind gives to every node: %w", modules, err)
		}
	}
	if engine.Name == podman {
		if err := l.unfilterBridges(say); err != nil {
			return err
		}
	}
	return raise(inotify, inotifyWanted, "nodes need so many instances of inotify")
}

// raise sets a sysctl that is lower than is wanted.
func raise(sysctl string, wanted int, why string) error {
	is, err := readNumber("/proc/sys/" + sysctl)
	if err != nil || is >= uint64(wanted) {
		return err
	}
	if err := os.WriteFile("/proc/sys/"+sysctl, []byte(strconv.Itoa(wanted)), 0); err != nil {
		return fmt.Errorf("sysctl %s is %d, and can't be set to %d: %s: %w: set it on the machine, or run the lab where /proc/sys can be written", strings.ReplaceAll(sysctl, "/", "."), is, wanted, why, err)
	}
	return nil
}

// bridgeFilters have this machine's iptables see what one container sends to another
// through the engine's bridge: 1 where a kernel has them
// (Documentation/networking/ip-sysctl.rst, "/proc/sys/net/bridge").
var bridgeFilters = []string{"net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"}

// unfilterBridges has nodes be on a link as others are. Podman's network masquerades what
// a node sends to an address outside of it, even if another node is the way there: who
// answers sees the bridge. Where containers of somebody's run it is left as it is, since
// they may need it.
func (l *Lab) unfilterBridges(say func(message string)) error {
	running, err := run(context.Background(), podman, "ps", "--quiet")
	if err != nil {
		return err
	}
	var on []string
	for _, s := range bridgeFilters {
		is, err := readNumber("/proc/sys/" + s)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		case is != 0:
			on = append(on, s)
		}
	}
	if len(on) > 0 && strings.TrimSpace(running) != "" {
		names := strings.ReplaceAll(strings.Join(on, "=0 "), "/", ".") + "=0"
		say("other containers run in Podman, so this machine's iptables see what nodes send each other: some of it gets the address of Podman's bridge, and rows about sources fail; stop those containers before lab up, or run sysctl -w " + names)
		return nil
	}
	for _, s := range on {
		if err := os.WriteFile("/proc/sys/"+s, []byte("0"), 0); err != nil {
			return fmt.Errorf("sysctl %s=0, so that nodes see each other's addresses: %w: run the lab where /proc/sys can be written", strings.ReplaceAll(s, "/", "."), err)
		}
	}
	return nil
}

// toRestore returns the sysctls to put back. Where somebody's containers run, forwarding is
// theirs by now: an engine has it on for every network.
func (h host) toRestore(somebodys bool) map[string]string {
	out := maps.Clone(h.Sysctls)
	if somebodys {
		for _, s := range forwarding {
			delete(out, s)
		}
	}
	return out
}

// leave takes the lab's record away, and puts back what labs have changed of this machine
// when it is the last one. Of two labs that end at once the second one is the last: each
// looks for others and is gone before another one looks.
func (l *Lab) leave() error {
	unlock, err := rundir.LockBase(filepath.Dir(l.dir))
	if err != nil {
		return err
	}
	defer unlock()
	names, err := List(filepath.Dir(l.dir))
	if err != nil {
		return err
	}
	// One that has only been claimed knows nothing of the machine yet, and looks at it after this.
	// A lost one has no sysctls to put back.
	last := !slices.ContainsFunc(names, func(name string) bool {
		r, err := readRecord(filepath.Join(filepath.Dir(l.dir), name))
		return name != filepath.Base(l.dir) && (err != nil || r.Host.Sysctls != nil && !r.Lost)
	})
	if last && l.record.Host.Sysctls != nil {
		if err := l.restoreHost(); err != nil {
			return err
		}
	}
	return errors.Join(l.forget(), rundir.Discard(l.dir))
}

// restoreHost puts back what has changed, except what containers of somebody's need.
func (l *Lab) restoreHost() error {
	engine := cmp.Or(l.record.Host.Engine, l.record.Engine)
	running, err := run(context.Background(), engine, "ps", "--quiet", "--filter", "status=running", "--filter", "status=paused")
	if err != nil {
		return err
	}
	somebodys := strings.TrimSpace(running) != ""
	var errs []error
	for s, was := range l.record.Host.toRestore(somebodys) {
		now, err := os.ReadFile("/proc/sys/" + s)
		if err == nil && strings.TrimSpace(string(now)) != was {
			errs = append(errs, os.WriteFile("/proc/sys/"+s, []byte(was), 0))
		}
	}
	if somebodys {
		return errors.Join(errs...)
	}
	if l.record.Host.Network != "" {
		_, _ = run(context.Background(), engine, "network", "rm", l.record.Host.Network) // somebody's containers that do not run may have it
	}
	if l.record.Host.Chains {
		errs = append(errs, removeNetavark(context.Background()))
	}
	if l.record.Host.Modules {
		if err := os.Remove(modules); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Instances of inotify that a user may have: a node takes 18, for systemd,
// containerd and a kubelet with its pods, and where none is left a kubelet does not
// start, and no message says why. Kernels allow 128 by default; wanted is what
// kind's documentation recommends
// (https://kind.sigs.k8s.io/docs/user/known-issues, "Pod errors due to too many open files").
const (
	inotify        = "fs/inotify/max_user_instances"
	inotifyPerNode = 18
	inotifyWanted  = 512
)

// probeInotify asks for the number of instances of inotify, for a lab of two
// clusters with two nodes each. Root's labs raise it.
func probeInotify() world.Probe {
	const nodes = 6 // control planes are containers, too
	p := world.Probe{Name: "inotify instances", Needed: []string{World}, Fix: fmt.Sprintf("sysctl -w %s=%d", strings.ReplaceAll(inotify, "/", "."), inotifyWanted)}
	limit, err := readNumber("/proc/sys/" + inotify)
	if err != nil {
		p.Detail = err.Error()
		return p
	}
	p.Detail = fmt.Sprintf("this user may have %d; the nodes of two clusters take %d", limit, nodes*inotifyPerNode)
	canRaise := unix.Access("/proc/sys/"+inotify, unix.W_OK) == nil
	p.OK = limit >= nodes*inotifyPerNode || canRaise
	return p
}
