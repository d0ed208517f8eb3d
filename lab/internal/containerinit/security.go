package containerinit

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Security is who a process is and what it may do.
//
// It follows containerd and runc: the bounding, permitted and effective sets
// are the default ones changed by add and drop; nothing is inheritable or
// ambient. So a process with a UID other than 0 has no capability at all after
// exec, whatever the pod adds: in a real cluster it is the same, and a
// manifest that counts on more must fail here too.
type Security struct {
	UID, GID     uint32
	Groups       []uint32
	Capabilities uint64 // bit n is capability n
	NoNewPrivs   bool
}

// CapabilityNames by number, as capability.h has them.
var CapabilityNames = []string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE",
	"NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE",
	"SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE",
	"AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
	"CHECKPOINT_RESTORE",
}

// AllCapabilities is the set of all of them.
func AllCapabilities() uint64 { return 1<<len(CapabilityNames) - 1 }

// Apply changes the calling thread, which must be locked, and through it what
// that thread starts or becomes.
func (s Security) Apply() error {
	for n := range 64 {
		if s.Capabilities&(1<<n) != 0 {
			continue
		}
		// EINVAL: the kernel does not know that many.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("drop capability %d from the bounding set: %w", n, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	if s.UID != 0 {
		// Keep the permitted set over the change of the UID, so that
		// capset below decides; exec then takes it away.
		if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("keep capabilities: %w", err)
		}
	}
	// Package syscall would change all threads of this process. These change
	// one, which is what a kubelet that execs on a throw-away thread needs.
	groups := s.Groups
	if len(groups) == 0 {
		groups = []uint32{s.GID}
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&groups[0])), 0); e != 0 {
		return fmt.Errorf("set groups: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(s.GID), uintptr(s.GID), uintptr(s.GID)); e != 0 {
		return fmt.Errorf("set group %d: %w", s.GID, e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(s.UID), uintptr(s.UID), uintptr(s.UID)); e != 0 {
		return fmt.Errorf("set user %d: %w", s.UID, e)
	}
	var held [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capget(&header, &held[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	want := [2]uint32{uint32(s.Capabilities), uint32(s.Capabilities >> 32)}
	for i := range held {
		// Not more than this process has: the lab itself may be confined.
		held[i].Permitted &= want[i]
		held[i].Effective = held[i].Permitted
		held[i].Inheritable = 0
	}
	if err := unix.Capset(&header, &held[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	if s.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	return nil
}
