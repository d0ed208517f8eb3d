package world

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A packet is a frame as it was captured.
type packet struct {
	time      time.Time
	ifindex   int32
	hatype    uint16 // ARPHRD_*: what the frame begins with
	protocol  uint16 // EtherType
	direction Direction
	length    int // on the interface; data may be shorter
	data      []byte
}

// A ring keeps the newest packets of a namespace, up to a number of bytes.
type ring struct {
	mu      sync.Mutex
	packets []packet // oldest first, from head on
	head    int
	bytes   int
	limit   int
	lost    int       // overwritten, or dropped by the kernel
	lostAt  time.Time // of the newest packet that was lost
}

// packetOverhead is what a packet costs beyond its bytes.
const packetOverhead = 96

func newRing(limit int) *ring { return &ring{limit: limit} }

func (r *ring) add(p packet) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.packets = append(r.packets, p)
	r.bytes += len(p.data) + packetOverhead
	for r.bytes > r.limit && r.head < len(r.packets)-1 {
		old := &r.packets[r.head]
		r.bytes -= len(old.data) + packetOverhead
		r.lost++
		r.lostAt = old.time
		*old = packet{}
		r.head++
	}
	// Move what is left to the front when half of the slice is gone.
	if r.head > 1024 && r.head > len(r.packets)/2 {
		r.packets = append([]packet(nil), r.packets[r.head:]...)
		r.head = 0
	}
}

// dropped counts packets that the kernel could not give us.
func (r *ring) dropped(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost += n
	r.lostAt = time.Now()
}

// between returns the packets of a time; a zero time is no limit. Their data
// must not be changed. lost is the number of packets that are not there any
// more, when some of them may be of that time.
func (r *ring) between(since, until time.Time) (packets []packet, lost int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.packets[r.head:] {
		if !since.IsZero() && p.time.Before(since) || !until.IsZero() && p.time.After(until) {
			continue
		}
		packets = append(packets, p)
	}
	if r.lost > 0 && !r.lostAt.Before(since) {
		lost = r.lost
	}
	return packets, lost
}

// frameStart is the part of a frame that the kernel put before the network
// header.
func (p packet) hasEthernet() bool {
	return p.hatype == unix.ARPHRD_ETHER || p.hatype == unix.ARPHRD_LOOPBACK
}
