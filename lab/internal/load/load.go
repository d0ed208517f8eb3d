// Package load is both ends of the traffic by which `lab bench` measures a
// path: a server that counts what arrives and echoes what shall come back, and
// a client that measures one thing for a while. It knows nothing of labs, and
// says nothing of whether a number is good.
package load

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// Port is where the server listens, TCP. Datagrams go to ports that it opens
// and names.
const Port = 8090

// A Kind is what a client measures.
type Kind string

// Kinds.
const (
	Throughput  Kind = "throughput"  // TCP, in bulk: bytes received
	Packets     Kind = "packets"     // UDP, small, a window of them on the way: packets received
	Connections Kind = "connections" // TCP: connect, one byte there and back, close
	Latency     Kind = "latency"     // TCP: one byte there and back, again and again
)

// Kinds returns all kinds.
func Kinds() []Kind { return []Kind{Throughput, Packets, Connections, Latency} }

const (
	// smallPayload makes the smallest Ethernet frame: 64 bytes with its header
	// (14), IPv4's (20), UDP's (8) and the checksum (4).
	smallPayload = 18
	// bulkWrite is handed to the kernel at once: the most that segmentation
	// makes one large packet of.
	bulkWrite = 64 << 10
	// Window is how many packets are on the way at most. A flood would measure
	// who gets the processor: with one for all, a sender that nothing slows
	// down leaves the receiver none. A socket's default buffer (net.core.
	// rmem_default, 208 KiB) has room for some 270 packets of 768 bytes, which
	// is what the kernel counts for a small one.
	Window = 256
	// ackEvery is after how many packets the receiver says which was the
	// newest: seldom enough not to count, often enough to keep the window open.
	ackEvery = 32
	// stall is how long the sender waits for an answer before it takes what is
	// on the way for lost.
	stall = 200 * time.Millisecond
	// patience is how long a peer may be silent before a measurement fails: a
	// lost SYN is sent again after 1, 3 and 7 seconds (tcp(7), tcp_syn_retries).
	patience = 10 * time.Second
)

// The first byte of a connection says what it is for.
const (
	wantBulk  = 'b' // bytes until the end; then a count comes back
	wantCount = 'c' // a UDP port comes back; the end of the bytes ends counting, and a count comes back
	wantEcho  = 'e' // every byte comes back, this one included
)

// A count is what the server has received.
type count struct {
	Port    uint16        `json:"port,omitempty"` // the answer to wantCount; the count follows
	Bytes   int64         `json:"bytes,omitempty"`
	Packets int64         `json:"packets,omitempty"`
	Elapsed time.Duration `json:"elapsed"` // bulk: since the request; packets: from the first to the last
}

// A Measurement is what to measure. Kind and To are required.
type Measurement struct {
	Kind     Kind
	To       netip.AddrPort // port 0: Port
	Duration time.Duration  // default 1 s
	// Streams is the number of connections at a time: of Throughput (default
	// 1) and of Connections (default 4, so that not only latency counts).
	Streams int
	// LongFirst sends long packets first: see sendLong.
	LongFirst bool
}

// A Result is what was measured. Fields of other kinds are zero.
type Result struct {
	Kind    Kind          `json:"kind"`
	Elapsed time.Duration `json:"elapsed"` // that the counts are for
	Streams int           `json:"streams,omitempty"`
	// LongFirst: long packets went before.
	LongFirst bool  `json:"longFirst,omitempty"`
	Bytes     int64 `json:"bytes,omitempty"`   // throughput: received
	Packets   int64 `json:"packets,omitempty"` // packets: received after the first, with which Elapsed begins
	Sent      int64 `json:"sent,omitempty"`    // packets: handed to the kernel
	// Count is the number of connections, or of round trips.
	Count  int           `json:"count,omitempty"`
	Median time.Duration `json:"median,omitempty"` // latency
	P99    time.Duration `json:"p99,omitempty"`    // latency
}

// withDefaults fills in what may be left out, and checks the rest.
func (m Measurement) withDefaults() (Measurement, error) {
	if !m.To.Addr().IsValid() {
		return m, errors.New("load: the address to measure to is missing")
	}
	if m.To.Port() == 0 {
		m.To = netip.AddrPortFrom(m.To.Addr(), Port)
	}
	if m.Duration == 0 {
		m.Duration = time.Second
	}
	if m.Duration < 0 || m.Streams < 0 {
		return m, fmt.Errorf("load: duration %v and %d streams: neither can be negative", m.Duration, m.Streams)
	}
	switch m.Kind {
	case Throughput:
		m.Streams = max(m.Streams, 1)
	case Connections:
		if m.Streams == 0 {
			m.Streams = 4
		}
	case Packets, Latency:
		if m.Streams > 1 {
			return m, fmt.Errorf("load: %s is measured with one stream, not %d", m.Kind, m.Streams)
		}
		m.Streams = 1
	default:
		return m, fmt.Errorf("load: unknown kind %q: one of %v", m.Kind, Kinds())
	}
	return m, nil
}

func addrPort(a net.Addr) netip.AddrPort {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
