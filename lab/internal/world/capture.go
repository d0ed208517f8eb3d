package world

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	nsfd "github.com/vishvananda/netns"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

const (
	// snapLength is how much of a frame is kept. Frames may be 64 KiB long
	// before segmentation; what we look for is at their start.
	snapLength = 2048
	// ringBytes is the memory for the packets of one namespace.
	ringBytes = 8 << 20
	// socketBuffer bridges the time in which nobody reads, in an emulated
	// machine.
	socketBuffer = 8 << 20
)

// AgentPort is where the agent listens in a virtual machine.
const AgentPort = 7000

// Ports of the control plane: the API server, the kubelet and the agent. What
// goes there is not captured: it is a lot, no scenario is about it, and a
// question to the agent about a token is no sighting of the token.
var controlPorts = []uint32{APIServerPort, 10250, AgentPort}

// A capture reads all packets of one network namespace into a ring, from all
// of its interfaces, those that come later included.
type capture struct {
	host  string
	ring  *ring
	file  *os.File
	links sync.Map // ifindex int32 → name string
	done  chan struct{}
	wg    sync.WaitGroup
}

// startCapture captures in the namespace until close. When it returns the
// socket is in place. The API server's service address is left out like its
// own.
func startCapture(ns *os.File, hostName string, api []netip.AddrPort) (*capture, error) {
	c := &capture{host: hostName, ring: newRing(ringBytes), done: make(chan struct{})}
	n := &Namespace{File: ns}
	var fd int
	err := n.Do(func() error {
		var err error
		// Protocol 0: nothing arrives before the filter is in place.
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("capture on %s: packet socket: %w", hostName, err)
	}
	if err := prepareSocket(fd, api); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("capture on %s: %w", hostName, err)
	}
	c.file = os.NewFile(uintptr(fd), "packet:"+hostName)

	updates := make(chan netlink.LinkUpdate, 64)
	handle := nsfd.NsHandle(ns.Fd())
	if err := netlink.LinkSubscribeWithOptions(updates, c.done, netlink.LinkSubscribeOptions{Namespace: &handle, ListExisting: true, ErrorCallback: func(error) {}}); err != nil {
		c.file.Close()
		return nil, fmt.Errorf("capture on %s: link events: %w", hostName, err)
	}
	c.wg.Go(func() { c.followLinks(updates) })
	c.wg.Go(c.read)
	return c, nil
}

func prepareSocket(fd int, api []netip.AddrPort) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBuffer); err != nil {
		return fmt.Errorf("receive buffer: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1); err != nil {
		return fmt.Errorf("time stamps: %w", err)
	}
	filter, err := captureFilter(api)
	if err != nil {
		return err
	}
	raw := make([]unix.SockFilter, len(filter))
	for i, f := range filter {
		raw[i] = unix.SockFilter{Code: f.Op, Jt: f.Jt, Jf: f.Jf, K: f.K}
	}
	prog := unix.SockFprog{Len: uint16(len(raw)), Filter: &raw[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	return bindCapture(fd, unix.ETH_P_ALL)
}

func bindCapture(fd int, protocol uint16) error {
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(protocol)}); err != nil {
		return fmt.Errorf("bind to all interfaces: %w", err)
	}
	return nil
}

// nobodysProtocol is for local experiments (IEEE 802, EtherType 88-B5): the
// kernel asks the socket about no other frame then. Binding to protocol 0
// would leave the one there is (packet(7)).
const nobodysProtocol = 0x88b5

// pause takes the socket out of the packets' way: each packet costs a copy and
// a wakeup for every interface that it passes, and slows down what is measured.
func (c *capture) pause() error { return c.bind(nobodysProtocol) }

// resume captures again. What passed in between is lost, who knows how much.
func (c *capture) resume() error {
	c.ring.dropped(1)
	return c.bind(unix.ETH_P_ALL)
}

func (c *capture) bind(protocol uint16) error {
	conn, err := c.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("capture on %s: %w", c.host, err)
	}
	var bindErr error
	err = conn.Control(func(fd uintptr) { bindErr = bindCapture(int(fd), protocol) })
	if err = errors.Join(err, bindErr); err != nil {
		return fmt.Errorf("capture on %s: %w", c.host, err)
	}
	return nil
}

// captureFilter accepts everything but IPv4 TCP from and to the control plane.
// Offsets are relative to the network header, so it works with and without a
// link layer.
func captureFilter(api []netip.AddrPort) ([]bpf.RawInstruction, error) {
	const network = 0xfff00000 // SKF_NET_OFF
	type test struct {
		load bpf.Instruction
		port uint32
	}
	// Layout: the tests jump to "drop", the last instruction but one from the end.
	prologue := []bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtProto},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.ETH_P_IP},
		bpf.LoadAbsolute{Off: network + 9, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP},
	}
	ports := controlPorts
	var body []bpf.Instruction
	for _, off := range []uint32{network + 20, network + 22} { // no IP options in a lab
		body = append(body, bpf.LoadAbsolute{Off: off, Size: 2})
		for _, p := range ports {
			body = append(body, bpf.JumpIf{Cond: bpf.JumpEqual, Val: p})
		}
	}
	for _, ap := range api {
		if !ap.Addr().Is4() {
			continue
		}
		b := ap.Addr().As4()
		v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
		for _, off := range []uint32{network + 12, network + 16} {
			body = append(body, bpf.LoadAbsolute{Off: off, Size: 4}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: v})
		}
	}
	prog := append(prologue, body...)
	accept, drop := len(prog), len(prog)+1
	for i, ins := range prog {
		j, ok := ins.(bpf.JumpIf)
		if !ok {
			continue
		}
		target := drop
		if i < len(prologue) {
			target = accept
		}
		if target-i-1 > 255 {
			return nil, fmt.Errorf("the capture filter has too many addresses: %d", len(api))
		}
		j.SkipTrue = uint8(target - i - 1)
		prog[i] = j
	}
	prog = append(prog, bpf.RetConstant{Val: snapLength}, bpf.RetConstant{Val: 0})
	return bpf.Assemble(prog)
}

// followLinks keeps the names of interfaces. A name is never forgotten: packets
// in the ring outlive their interface.
func (c *capture) followLinks(updates <-chan netlink.LinkUpdate) {
	for u := range updates { // closed after done
		if u.Header.Type == unix.RTM_NEWLINK {
			c.links.Store(int32(u.Attrs().Index), u.Attrs().Name)
		}
	}
}

func (c *capture) linkName(index int32) string {
	if name, ok := c.links.Load(index); ok {
		return name.(string)
	}
	return fmt.Sprintf("if%d", index)
}

func (c *capture) read() {
	conn, err := c.file.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, snapLength)
	oob := make([]byte, unix.CmsgSpace(int(unsafe.Sizeof(unix.Timespec{}))))
	lastStats := time.Now()
	for {
		var n, oobn int
		var from unix.Sockaddr
		var rerr error
		err := conn.Read(func(fd uintptr) bool {
			n, oobn, _, from, rerr = unix.Recvmsg(int(fd), buf, oob, unix.MSG_TRUNC)
			return rerr != unix.EAGAIN
		})
		switch {
		case err != nil: // closed
			return
		case errors.Is(rerr, syscall.EINTR), errors.Is(rerr, syscall.ENETDOWN): // an interface went down
			continue
		case rerr != nil:
			return
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		if !ok {
			continue
		}
		p := packet{time: stamp(oob[:oobn]), ifindex: int32(ll.Ifindex), hatype: ll.Hatype, protocol: htons(ll.Protocol), direction: In, length: n}
		if ll.Pkttype == unix.PACKET_OUTGOING {
			p.direction = Out
		}
		p.data = append([]byte(nil), buf[:min(n, len(buf))]...)
		c.ring.add(p)
		if p.time.Sub(lastStats) > time.Second {
			lastStats = p.time
			c.countDrops(conn)
		}
	}
}

// countDrops asks the kernel how many packets it had no room for. Asking
// resets its counter.
func (c *capture) countDrops(conn syscall.RawConn) {
	conn.Control(func(fd uintptr) {
		if stats, err := unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS); err == nil && stats.Drops > 0 {
			c.ring.dropped(int(stats.Drops))
		}
	})
}

// close ends the capture. What is in the ring stays.
func (c *capture) close() {
	close(c.done)
	c.file.Close()
	c.wg.Wait()
}

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
