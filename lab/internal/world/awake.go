package world

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// An AwakeRequest is what a machine that was restored from a snapshot must be
// told. It is never logged.
type AwakeRequest struct {
	Now  time.Time `json:"now"`
	Seed []byte    `json:"seed"` // for the random pool
}

// freeze stops every process of the machine but this one and PID 1 (kill(2)),
// the node's programs and all containers: a machine that is saved so has, when
// it is restored, its one processor for what must be done before they go on.
func (a *agent) freeze() error {
	a.registry.Sleep()
	return a.signalAll(unix.SIGSTOP)
}

// A thawRequest says how processes go on that were frozen.
type thawRequest struct {
	// NewServers: the API servers are others than before and know nothing of
	// the connections that there are.
	NewServers bool `json:"newServers,omitempty"`
}

// thaw lets the processes go on that freeze has stopped, and then the kubelets
// report. Connections to API servers that know nothing of them end before, at
// once rather than when somebody next sends something.
func (a *agent) thaw(ctx context.Context, req thawRequest) error {
	if req.NewServers {
		if err := a.endConnections(); err != nil {
			return err
		}
		if err := thawInTurn(ctx, "/proc"); err != nil {
			return err
		}
	}
	if err := a.signalAll(unix.SIGCONT); err != nil {
		return err
	}
	a.registry.Wake()
	return nil
}

func (a *agent) signalAll(s unix.Signal) error {
	if !a.cfg.Machine {
		return errors.New("these processes belong to the host")
	}
	if err := unix.Kill(-1, s); err != nil && !errors.Is(err, unix.ESRCH) { // there is nobody else
		return fmt.Errorf("%s to all processes: %w", unix.SignalName(s), err)
	}
	return nil
}

// awake makes a machine that was restored from a snapshot, and is frozen, one of
// its own: its clock is set and its random pool reseeded, and the sessions of
// WireGuard end, whose keys another machine of the same snapshot has too.
//
// What cannot be renewed: the keys in the clusters' objects, WireGuard's among
// them, and the secrets by which this kernel numbers TCP connections. Machines
// of one snapshot share those; they never meet.
func (a *agent) awake(req AwakeRequest) error {
	if err := a.setClock(req.Now); err != nil {
		return err
	}
	if err := reseed(req.Seed); err != nil {
		return err
	}
	return a.everywhere(endSessions)
}

// endConnections ends all connections to API servers.
func (a *agent) endConnections() error {
	a.mu.Lock()
	n := a.network
	a.mu.Unlock()
	if n == nil {
		return errNotBuilt
	}
	servers := map[netip.AddrPort]bool{}
	for _, at := range APIServices(n.spec) {
		servers[at] = true
	}
	for _, c := range n.spec.Clusters {
		servers[netip.AddrPortFrom(c.ControlPlane, APIServerPort)] = true
	}
	return a.everywhere(func() error { return endConnections(servers) })
}

// everywhere calls fn in the namespace of each host and pod.
func (a *agent) everywhere(fn func() error) error {
	for _, h := range a.namespaces() {
		if err := h.ns.Do(fn); err != nil {
			return fmt.Errorf("%s: %w", h.name, err)
		}
	}
	return nil
}

// reseed adds to the kernel's random pool and makes it use that at once
// (random(4)).
func reseed(seed []byte) error {
	const rndAddEntropy, rndReseedCRNG = 0x40085203, 0x5207
	pool, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("random pool: %w", err)
	}
	defer pool.Close()
	// struct rand_pool_info: the entropy in bits, the size in bytes, the bytes.
	info := binary.NativeEndian.AppendUint32(nil, uint32(8*len(seed)))
	info = binary.NativeEndian.AppendUint32(info, uint32(len(seed)))
	info = append(info, seed...)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, pool.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&info[0]))); errno != 0 {
		return fmt.Errorf("random pool: add entropy: %w", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, pool.Fd(), rndReseedCRNG, 0); errno != 0 {
		return fmt.Errorf("random pool: reseed: %w", errno)
	}
	return nil
}

// endConnections ends the TCP connections of the thread's namespace to those
// addresses. Programs see them aborted.
func endConnections(to map[netip.AddrPort]bool) error {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		sockets, err := netlink.SocketDiagTCP(family)
		if err != nil {
			return fmt.Errorf("list TCP sockets: %w", err)
		}
		for _, s := range sockets {
			remote, _ := netip.AddrFromSlice(s.ID.Destination)
			if !to[netip.AddrPortFrom(remote.Unmap(), s.ID.DestinationPort)] {
				continue
			}
			if err := destroySocket(family, s.ID); err != nil && !errors.Is(err, unix.ENOENT) { // it has ended itself
				return fmt.Errorf("end the TCP connection to %s: %w", remote, err)
			}
		}
	}
	return nil
}

// destroySocket ends a connection (SOCK_DESTROY of sock_diag(7)).
func destroySocket(family uint8, id netlink.SocketID) error {
	// struct inet_diag_req_v2 with a struct inet_diag_sockid.
	b := []byte{family, unix.IPPROTO_TCP, 0, 0}
	b = binary.NativeEndian.AppendUint32(b, ^uint32(0)) // in every state
	b = binary.BigEndian.AppendUint16(b, id.SourcePort)
	b = binary.BigEndian.AppendUint16(b, id.DestinationPort)
	for _, addr := range [][]byte{id.Source, id.Destination} {
		ip, _ := netip.AddrFromSlice(addr)
		var full [16]byte
		if family == unix.AF_INET {
			ip = ip.Unmap()
		}
		copy(full[:], ip.AsSlice())
		b = append(b, full[:]...)
	}
	b = binary.NativeEndian.AppendUint32(b, id.Interface)
	b = binary.NativeEndian.AppendUint32(b, id.Cookie[0])
	b = binary.NativeEndian.AppendUint32(b, id.Cookie[1])
	req := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	req.AddRawData(b)
	_, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	return err
}

// endSessions makes the WireGuard links of the thread's namespace forget the
// keys of their sessions: one does when its private key changes
// (wg_set_device), so it gets another one and its own back. The next packet
// makes a new handshake. A userspace WireGuard, of which the kernel knows
// nothing, makes new ones within its two minutes.
func endSessions() (err error) {
	wg, err := wgctrl.New()
	if err != nil {
		return fmt.Errorf("end WireGuard's sessions: %w", err)
	}
	defer func() { err = errors.Join(err, wg.Close()) }()
	devices, err := wg.Devices()
	if err != nil {
		return fmt.Errorf("list WireGuard's links: %w", err)
	}
	for _, d := range devices {
		if d.Type != wgtypes.LinuxKernel {
			continue
		}
		other, err := wgtypes.GeneratePrivateKey()
		if err != nil {
			return err
		}
		for _, key := range []wgtypes.Key{other, d.PrivateKey} {
			if err := wg.ConfigureDevice(d.Name, wgtypes.Config{PrivateKey: &key}); err != nil {
				return fmt.Errorf("end the sessions of %s: %w", d.Name, err)
			}
		}
	}
	return nil
}
