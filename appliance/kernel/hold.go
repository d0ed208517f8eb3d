package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A NamedNetNS is a network namespace with a name in the file system, as "ip
// netns add" makes it: it stays when all processes in it are gone. Making and
// naming it takes CAP_SYS_ADMIN.
type NamedNetNS struct {
	path string
	fd   int
}

// HoldNetNS makes a network namespace and mounts it at path. If keep is the
// number of the one that is there already, that one is held: whoever held it
// before has ended and the pod that it belongs to has not. Any other one is a
// leftover and is removed first, with all that is in it.
func HoldNetNS(path string, keep uint64) (*NamedNetNS, error) {
	h := &NamedNetNS{path: path, fd: -1}
	if id, err := NetNSID(path); err == nil && id == keep {
		h.fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", path, err)
		}
		return h, nil
	}
	if err := removeNetNS(path); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	made := make(chan error)
	onOtherThread(func() {
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			h.fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
		made <- err
	})
	if err := <-made; err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	if err := h.Keep(); err != nil {
		return nil, errors.Join(err, unix.Close(h.fd))
	}
	return h, nil
}

// ID returns the number of the namespace, as "readlink /proc/self/ns/net"
// shows it.
func (h *NamedNetNS) ID() (uint64, error) { return NetNSID("/proc/self/fd/" + strconv.Itoa(h.fd)) }

// Keep mounts the namespace again if somebody has removed its name. Another
// one that has it stays: it is that of a newer pod.
func (h *NamedNetNS) Keep() error {
	own, err := h.ID()
	if err != nil {
		return err
	}
	if id, err := NetNSID(h.path); err == nil {
		if id != own {
			return fmt.Errorf("%s is another network namespace by now", h.path)
		}
		return nil
	}
	if err := removeNetNS(h.path); err != nil {
		return err
	}
	f, err := os.OpenFile(h.path, os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	f.Close()
	if err := unix.Mount("/proc/self/fd/"+strconv.Itoa(h.fd), h.path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount the network namespace at %s: %w", h.path, err)
	}
	return nil
}

// Remove takes the name away. The namespace ends when no process is in it and
// none has it open, and all that is in it with it. A name that another one has
// stays.
func (h *NamedNetNS) Remove() error {
	own, err := h.ID()
	if id, taken := NetNSID(h.path); err == nil && (taken != nil || id == own) {
		err = removeNetNS(h.path)
	}
	return errors.Join(err, unix.Close(h.fd))
}

func removeNetNS(path string) error {
	for {
		switch err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); {
		case err == nil:
			continue // there may be one below
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		break
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// NetNSID returns the number of the network namespace that is mounted at a
// path. It is an error if there is none.
func NetNSID(path string) (uint64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return 0, fmt.Errorf("network namespace %s: %w", path, err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		return 0, fmt.Errorf("network namespace %s: nothing is mounted there", path)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("network namespace %s: %w", path, err)
	}
	return st.Ino, nil
}

// GiveUpSysAdmin takes CAP_SYS_ADMIN from all threads of the process, for good.
func GiveUpSysAdmin() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	const sysAdmin = uint32(1) << unix.CAP_SYS_ADMIN // below 32
	data[0].Effective &^= sysAdmin
	data[0].Permitted &^= sysAdmin
	data[0].Inheritable &^= sysAdmin
	if _, _, err := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0); err != 0 {
		return fmt.Errorf("give up CAP_SYS_ADMIN: %w", err)
	}
	return nil
}
