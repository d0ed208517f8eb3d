package pods

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// security is who a process is and what it may do.
//
// It follows containerd and runc: the bounding, permitted and effective sets
// are the default ones changed by add and drop; nothing is inheritable or
// ambient. So a process with a UID other than 0 has no capability at all after
// exec, whatever the pod adds: in a real cluster it is the same, and a
// manifest that counts on more must fail here too.
type security struct {
	UID, GID     uint32
	Groups       []uint32
	Capabilities uint64 // bit n is capability n
	NoNewPrivs   bool
}

// capabilityNames by number, as capability.h has them.
var capabilityNames = []string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE",
	"NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE",
	"SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE",
	"AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
	"CHECKPOINT_RESTORE",
}

// defaultCapabilities are what containerd gives to a container.
var defaultCapabilities = []corev1.Capability{
	"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
	"NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
}

// containerSecurity computes what a container may do from its own and its
// pod's securityContext.
func containerSecurity(pod *corev1.Pod, c *corev1.Container, image Image) (security, error) {
	ps, cs := pod.Spec.SecurityContext, c.SecurityContext
	if ps == nil {
		ps = &corev1.PodSecurityContext{}
	}
	if cs == nil {
		cs = &corev1.SecurityContext{}
	}
	s := security{UID: image.UID, GID: image.GID}
	first := func(container, pod *int64, image uint32) uint32 {
		switch {
		case container != nil:
			return uint32(*container)
		case pod != nil:
			return uint32(*pod)
		}
		return image
	}
	s.UID = first(cs.RunAsUser, ps.RunAsUser, image.UID)
	s.GID = first(cs.RunAsGroup, ps.RunAsGroup, image.GID)
	nonRoot := ps.RunAsNonRoot
	if cs.RunAsNonRoot != nil {
		nonRoot = cs.RunAsNonRoot
	}
	if nonRoot != nil && *nonRoot && s.UID == 0 {
		return s, fmt.Errorf("container %s has runAsNonRoot and would run as root; set runAsUser", c.Name)
	}
	for _, g := range ps.SupplementalGroups {
		s.Groups = append(s.Groups, uint32(g))
	}
	if ps.FSGroup != nil {
		s.Groups = append(s.Groups, uint32(*ps.FSGroup))
	}
	s.NoNewPrivs = cs.AllowPrivilegeEscalation != nil && !*cs.AllowPrivilegeEscalation
	if privileged(c) {
		s.Capabilities = allCapabilities()
		return s, nil
	}
	var add, drop []corev1.Capability
	if cs.Capabilities != nil {
		add, drop = cs.Capabilities.Add, cs.Capabilities.Drop
	}
	var err error
	s.Capabilities, err = capabilitySet(defaultCapabilities, add, drop)
	if err != nil {
		return s, fmt.Errorf("container %s: %w", c.Name, err)
	}
	return s, nil
}

func privileged(c *corev1.Container) bool {
	return c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
}

// capabilitySet starts from base; ALL is handled first and single names win
// over it, as in CRI.
func capabilitySet(base, add, drop []corev1.Capability) (uint64, error) {
	var set uint64
	if !slices.ContainsFunc(drop, isAll) {
		for _, c := range base {
			n, err := capabilityNumber(c)
			if err != nil {
				return 0, err
			}
			set |= 1 << n
		}
	}
	if slices.ContainsFunc(add, isAll) {
		set = allCapabilities()
	}
	for _, c := range add {
		if isAll(c) {
			continue
		}
		n, err := capabilityNumber(c)
		if err != nil {
			return 0, err
		}
		set |= 1 << n
	}
	for _, c := range drop {
		if isAll(c) {
			continue
		}
		n, err := capabilityNumber(c)
		if err != nil {
			return 0, err
		}
		set &^= 1 << n
	}
	return set, nil
}

func isAll(c corev1.Capability) bool { return strings.EqualFold(string(c), "ALL") }

func capabilityNumber(c corev1.Capability) (int, error) {
	n := slices.Index(capabilityNames, strings.TrimPrefix(strings.ToUpper(string(c)), "CAP_"))
	if n < 0 {
		return 0, fmt.Errorf("unknown capability %q; names are as in capabilities(7) without CAP_", c)
	}
	return n, nil
}

func allCapabilities() uint64 { return 1<<len(capabilityNames) - 1 }

// apply changes the calling thread, which must be locked, and through it what
// that thread starts or becomes.
func (s security) apply() error {
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
