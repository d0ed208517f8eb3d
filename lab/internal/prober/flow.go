package prober

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// streamWord behind the marker asks the server for a stream.
const streamWord = "stream"

// A Flow is a long-lived numbered stream: message n goes out every Interval
// and the server sends it back. Proto, To and Token are required.
type Flow struct {
	Proto    string // tcp or udp
	To       netip.AddrPort
	From     netip.AddrPort // optional: what to bind to
	Token    string
	Interval time.Duration // default 50 ms
	Report   time.Duration // a line this often; default 250 ms
	// Fresh sends every message from a socket of its own, so that the kernels
	// on the way see a new flow each time and translate it anew. UDP only.
	Fresh bool
}

// freshTimeout is how long a socket of a Fresh stream waits for its answer.
const freshTimeout = time.Second

// A FlowReport is how a stream stands. Gap is about the time since the report
// before: the longest silence that ended in it or still lasts.
type FlowReport struct {
	Time     time.Time     `json:"time"`
	Sent     int           `json:"sent"`
	Received int           `json:"received"`
	Lost     int           `json:"lost"` // UDP: numbers that later ones overtook
	Gap      time.Duration `json:"gap"`
	Alive    bool          `json:"alive"` // TCP: not reset; UDP: always
	Error    string        `json:"error,omitempty"`
	Message  string        `json:"message,omitempty"`
}

// stream is the state that sender, receiver and reporter share.
type stream struct {
	mu       sync.Mutex
	report   FlowReport
	last     time.Time // of the last message received
	next     int       // number expected
	gap      time.Duration
	finished error
}

// Run sends the stream until ctx ends or the connection breaks, and writes a
// [FlowReport] as a line of JSON now and then and at the end.
func (f Flow) Run(ctx context.Context, w io.Writer) error {
	if f.Proto != "tcp" && f.Proto != "udp" {
		return fmt.Errorf("a stream is tcp or udp, not %q", f.Proto)
	}
	if f.Fresh && (f.Proto != "udp" || f.From.IsValid()) {
		return errors.New("only a stream of udp without an address to bind to can have a new socket for each message")
	}
	if f.Interval == 0 {
		f.Interval = 50 * time.Millisecond
	}
	if f.Report == 0 {
		f.Report = 250 * time.Millisecond
	}
	if f.To.Port() == 0 {
		f.To = netip.AddrPortFrom(f.To.Addr(), Port)
	}
	s := &stream{next: 1, report: FlowReport{Alive: true}}
	out := json.NewEncoder(w)
	if f.Fresh {
		return f.runFresh(ctx, s, out)
	}
	d := net.Dialer{Timeout: 5 * time.Second}
	switch {
	case !f.From.IsValid():
	case f.Proto == "tcp":
		d.LocalAddr = net.TCPAddrFromAddrPort(f.From)
	default:
		d.LocalAddr = net.UDPAddrFromAddrPort(f.From)
	}
	if f.From.IsValid() { // the stream before may have ended just now
		d.Control = func(_, _ string, c syscall.RawConn) error {
			var err error
			return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }), err)
		}
	}
	conn, err := d.DialContext(ctx, f.Proto, f.To.String())
	if err != nil {
		s.end(f.Proto, err)
		return out.Encode(s.take(time.Now()))
	}
	defer conn.Close()
	header := append([]byte(f.Token), (string(MarkRequest) + streamWord + "\n")...)
	if f.Proto == "tcp" {
		if _, err := conn.Write(header); err != nil {
			s.end(f.Proto, err)
			return out.Encode(s.take(time.Now()))
		}
	}
	s.last = time.Now()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var receiver sync.WaitGroup
	receiver.Go(func() {
		defer cancel()
		if f.Proto == "tcp" {
			s.receiveTCP(conn)
		} else {
			s.receiveUDP(conn, header)
		}
	})
	send, report := time.NewTicker(f.Interval), time.NewTicker(f.Report)
	defer send.Stop()
	defer report.Stop()
	for {
		select {
		case <-ctx.Done():
			conn.Close()
			receiver.Wait()
			return out.Encode(s.take(time.Now()))
		case <-report.C:
			if err := out.Encode(s.take(time.Now())); err != nil {
				return err
			}
		case <-send.C:
			s.send(conn, f.Proto, header)
		}
	}
}

// runFresh sends the stream with a socket for each message.
func (f Flow) runFresh(ctx context.Context, s *stream, out *json.Encoder) error {
	header := append([]byte(f.Token), (string(MarkRequest) + streamWord + "\n")...)
	s.last = time.Now()
	send, report := time.NewTicker(f.Interval), time.NewTicker(f.Report)
	defer send.Stop()
	defer report.Stop()
	var open sync.WaitGroup
	defer open.Wait()
	for {
		select {
		case <-ctx.Done():
			open.Wait()
			return out.Encode(s.take(time.Now()))
		case <-report.C:
			if err := out.Encode(s.take(time.Now())); err != nil {
				return err
			}
		case <-send.C:
			conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(f.To))
			if err != nil {
				return fmt.Errorf("socket to %s: %w", f.To, err)
			}
			if err := conn.SetReadDeadline(time.Now().Add(freshTimeout)); err != nil {
				return errors.Join(err, conn.Close())
			}
			s.send(conn, f.Proto, header)
			open.Go(func() {
				defer conn.Close()
				defer context.AfterFunc(ctx, func() { conn.Close() })()
				s.receiveOne(conn, header)
			})
		}
	}
}

func (s *stream) send(conn net.Conn, proto string, header []byte) {
	s.mu.Lock()
	s.report.Sent++
	line := append(strconv.AppendInt(nil, int64(s.report.Sent), 10), '\n')
	s.mu.Unlock()
	if proto == "udp" {
		// An ICMP error to an earlier datagram is no reason to stop.
		_, _ = conn.Write(append(bytes.Clone(header), line...))
		return
	}
	// A full send buffer must not stop the reports.
	if err := conn.SetWriteDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		s.end(proto, err)
		return
	}
	if _, err := conn.Write(line); err != nil && classify(proto, err) != ErrorTimeout {
		s.end(proto, err)
	}
}

func (s *stream) receiveTCP(conn net.Conn) {
	r := bufio.NewReader(conn)
	for first := true; ; first = false {
		line, err := r.ReadString('\n')
		if err != nil {
			s.end("tcp", err)
			return
		}
		if n, err := strconv.Atoi(string(bytes.TrimSpace([]byte(line)))); err == nil && !first {
			s.got(n)
		}
	}
}

func (s *stream) receiveUDP(conn net.Conn, header []byte) {
	buf := make([]byte, 2048)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			if classify("udp", err) == ErrorOther { // closed
				return
			}
			continue
		}
		s.gotDatagram(buf[:n], header)
	}
}

// receiveOne waits for the answer to the only message of a socket.
func (s *stream) receiveOne(conn net.Conn, header []byte) {
	buf := make([]byte, 2048)
	if n, err := conn.Read(buf); err == nil { // otherwise it is lost
		s.gotDatagram(buf[:n], header)
	}
}

func (s *stream) gotDatagram(b, header []byte) {
	if rest, ok := bytes.CutPrefix(b, header); ok {
		if i, err := strconv.Atoi(string(bytes.TrimSpace(rest))); err == nil {
			s.got(i)
		}
	}
}

func (s *stream) got(n int) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.Received++
	s.gap = max(s.gap, now.Sub(s.last))
	s.last = now
	switch {
	case n >= s.next:
		s.report.Lost += n - s.next
		s.next = n + 1
	case s.report.Lost > 0: // late, not lost
		s.report.Lost--
	}
}

func (s *stream) end(proto string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.finished == nil {
		s.finished = err
		s.report.Alive, s.report.Error, s.report.Message = false, classify(proto, err), err.Error()
	}
}

// take returns the report up to now and begins the next period.
func (s *stream) take(now time.Time) FlowReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.report
	r.Time, r.Gap = now, s.gap
	if !s.last.IsZero() {
		r.Gap = max(r.Gap, now.Sub(s.last))
	}
	s.gap = 0
	return r
}
