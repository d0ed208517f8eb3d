package world

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// socketBuffer bridges the time in which nobody reads. It is a limit: the
// kernel takes memory only for packets that wait.
const socketBuffer = 32 << 20

// A packetSocket has the packets of all interfaces of a network namespace
// (packet(7)). Nobody waits for them: the socket is read now and then, and to the
// end. So the kernel need not wake a reader for each packet on each interface, and
// who reads has all packets that have passed.
type packetSocket struct {
	mu     sync.Mutex
	fd     int // -1: closed
	packet []byte
	oob    []byte
}

// openPacketSocket opens a socket in the caller's namespace. Nothing arrives
// before [packetSocket.start].
func openPacketSocket() (*packetSocket, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("packet socket", err)
	}
	return &packetSocket{fd: fd, packet: make([]byte, snapLength), oob: make([]byte, unix.CmsgSpace(int(unsafe.Sizeof(unix.Timespec{}))))}, nil
}

// start puts the filter in place and lets packets come.
func (s *packetSocket) start(filter []bpf.RawInstruction) error {
	if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBuffer); err != nil {
		return fmt.Errorf("receive buffer: %w", err)
	}
	if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1); err != nil {
		return fmt.Errorf("time stamps: %w", err)
	}
	raw := make([]unix.SockFilter, len(filter))
	for i, f := range filter {
		raw[i] = unix.SockFilter{Code: f.Op, Jt: f.Jt, Jf: f.Jf, K: f.K}
	}
	prog := unix.SockFprog{Len: uint16(len(raw)), Filter: &raw[0]}
	if err := unix.SetsockoptSockFprog(s.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	return s.bind(unix.ETH_P_ALL)
}

// bind decides which packets come from now on. A closed socket stays closed.
func (s *packetSocket) bind(protocol uint16) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return os.ErrClosed
	}
	if err := unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: htons(protocol)}); err != nil {
		return fmt.Errorf("bind to all interfaces: %w", err)
	}
	return nil
}

// read calls each with every packet that waits. It returns how many more packets
// the kernel has dropped since the last read, because the buffer was full. A closed
// socket has no packets.
func (s *packetSocket) read(each func(packet)) (dropped int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.fd >= 0 {
		n, oobn, _, from, err := unix.Recvmsg(s.fd, s.packet, s.oob, unix.MSG_TRUNC)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENETDOWN): // an interface went down
			continue
		case err != nil: // EAGAIN: there are no more
			return s.drops()
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		if !ok {
			continue
		}
		p := packet{time: stamp(s.oob[:oobn]), ifindex: int32(ll.Ifindex), hatype: ll.Hatype, protocol: htons(ll.Protocol), direction: In, length: n}
		if ll.Pkttype == unix.PACKET_OUTGOING {
			p.direction = Out
		}
		p.data = append([]byte(nil), s.packet[:min(n, len(s.packet))]...)
		each(p)
	}
	return 0
}

// drops asks the kernel how many packets it had no room for. Asking resets its
// counter.
func (s *packetSocket) drops() int {
	stats, err := unix.GetsockoptTpacketStats(s.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return 0
	}
	return int(stats.Drops)
}

// close closes the socket, once.
func (s *packetSocket) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 {
		unix.Close(s.fd)
		s.fd = -1
	}
}

// stamp is when the kernel had the packet.
func stamp(oob []byte) time.Time {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err == nil {
		for _, m := range messages {
			if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SCM_TIMESTAMPNS && len(m.Data) >= int(unsafe.Sizeof(unix.Timespec{})) {
				ts := *(*unix.Timespec)(unsafe.Pointer(&m.Data[0]))
				return time.Unix(ts.Unix())
			}
		}
	}
	return time.Now()
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }
