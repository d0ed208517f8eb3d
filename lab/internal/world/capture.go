package world

import (
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

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
)

// AgentPort is where the agent listens in a virtual machine.
const AgentPort = 7000

// Ports of the control plane: the API server, the kubelet and the agent. What
// goes there is not captured: it is a lot, no scenario is about it, and a
// question to the agent about a token is no sighting of the token.
var controlPorts = []uint32{APIServerPort, 10250, AgentPort}

// A capture has the packets of one network namespace in a ring, from all of its
// interfaces, those that come later included.
type capture struct {
	host   string
	ring   *ring
	socket *packetSocket
	links  sync.Map // ifindex int32 → name string
	done   chan struct{}
	wg     sync.WaitGroup
}

// startCapture captures in the namespace until close. When it returns the
// socket is in place. The API server's service address is left out like its
// own. Somebody has to call catchUp now and then.
func startCapture(ns *os.File, hostName string, api []netip.AddrPort) (*capture, error) {
	filter, err := captureFilter(api)
	if err != nil {
		return nil, err
	}
	c := &capture{host: hostName, ring: newRing(ringBytes), done: make(chan struct{})}
	n := &Namespace{File: ns}
	if err := n.Do(func() error {
		var err error
		c.socket, err = openPacketSocket()
		return err
	}); err != nil {
		return nil, fmt.Errorf("capture on %s: %w", hostName, err)
	}
	if err := c.socket.start(filter); err != nil {
		c.socket.close()
		return nil, fmt.Errorf("capture on %s: %w", hostName, err)
	}

	updates := make(chan netlink.LinkUpdate, 64)
	handle := nsfd.NsHandle(ns.Fd())
	if err := netlink.LinkSubscribeWithOptions(updates, c.done, netlink.LinkSubscribeOptions{Namespace: &handle, ListExisting: true, ErrorCallback: func(error) {}}); err != nil {
		c.socket.close()
		return nil, fmt.Errorf("capture on %s: link events: %w", hostName, err)
	}
	c.wg.Go(func() { c.followLinks(updates) })
	return c, nil
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
	if err := c.socket.bind(protocol); err != nil {
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

// catchUp reads what has passed up to now.
func (c *capture) catchUp() {
	if c.socket == nil { // of a test
		return
	}
	if n := c.socket.read(c.ring.add); n > 0 {
		c.ring.dropped(n)
	}
}

// between are the packets of a time, up to now, and how many of that time are
// lost, as those of a ring.
func (c *capture) between(since, until time.Time) (packets []packet, lost int) {
	c.catchUp()
	return c.ring.between(since, until)
}

// close ends the capture. What has passed is in the ring, and stays.
func (c *capture) close() {
	c.catchUp()
	close(c.done)
	c.socket.close()
	c.wg.Wait()
}
