package pods

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/lab/internal/containerinit"
)

// defaultCapabilities are what containerd gives to a container.
var defaultCapabilities = []corev1.Capability{
	"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
	"NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
}

// containerSecurity computes what a container may do from its own and its
// pod's securityContext.
func containerSecurity(pod *corev1.Pod, c *corev1.Container, image Image) (containerinit.Security, error) {
	ps, cs := pod.Spec.SecurityContext, c.SecurityContext
	if ps == nil {
		ps = &corev1.PodSecurityContext{}
	}
	if cs == nil {
		cs = &corev1.SecurityContext{}
	}
	s := containerinit.Security{UID: image.UID, GID: image.GID}
	first := func(own, pod *int64, image uint32) uint32 {
		switch {
		case own != nil:
			return uint32(*own)
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
		s.Capabilities = containerinit.AllCapabilities()
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
		set = containerinit.AllCapabilities()
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
	n := slices.Index(containerinit.CapabilityNames, strings.TrimPrefix(strings.ToUpper(string(c)), "CAP_"))
	if n < 0 {
		return 0, fmt.Errorf("unknown capability %q; names are as in capabilities(7) without CAP_", c)
	}
	return n, nil
}
