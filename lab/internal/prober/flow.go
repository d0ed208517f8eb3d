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
	"slices"
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
	Interval time.Duration // default [FlowInterval]
	Report   time.Duration // a line this often; default 250 ms
	// Fresh sends every message from a socket of its own, so that the kernels
	// on the way see a new flow each time and translate it anew. UDP only.
	Fresh bool
	// Late is how long an answer may take until its number counts as lost;
	// default [LateTime].
	Late time.Duration
}

// FlowInterval is the time between two messages where nobody has said another one.
const FlowInterval = 50 * time.Millisecond

// LateTime is after how long a number counts as lost that later ones have
// overtaken: on a busy machine answers overtake each other all the time.
const LateTime = time.Second

// stallTime is by how much a message must go out late for that to count as time in which the
// stream had no processor. What is less may be the clock's, and is nothing to the silences that
// anybody asks for.
const stallTime = 50 * time.Millisecond

// freshTimeout is how long a socket of a Fresh stream waits for its answer: an
// answer that comes late is silence, but nothing was lost, and a stream that stood
// still reads it later.
const freshTimeout = 20 * time.Second

// dialTimeout is how long a stream of TCP may take to begin.
const dialTimeout = 15 * time.Second

// A FlowReport is how a stream stands. Gap and By are about the time since the
// report before: the longest silence that ended in it or still lasts, and who
// answered. Who does not speak hears nothing: time in which the stream got no processor
// to send is not silence.
type FlowReport struct {
	Time       time.Time     `json:"time"`
	Sent       int           `json:"sent"`
	Received   int           `json:"received"`             // numbers that came back
	Lost       int           `json:"lost"`                 // UDP: numbers that later ones overtook, and that have not come back for Flow.Late
	Duplicates int           `json:"duplicates,omitempty"` // answers to numbers that had come back already
	Gap        time.Duration `json:"gap"`
	Newest     time.Time     `json:"newest,omitzero"` // when the latest of the numbers that came back was sent
	Alive      bool          `json:"alive"`           // TCP: not reset; UDP: always
	By         []Server      `json:"by,omitempty"`
	Error      string        `json:"error,omitempty"`
	Message    string        `json:"message,omitempty"`
}

// stream is the state that sender, receiver and reporter share.
type stream struct {
	mu       sync.Mutex
	report   FlowReport
	last     time.Time // of the last message received
	next     int       // number expected
	back     []bool    // by number: it has come back
	late     time.Duration
	sent     []time.Time   // by number
	due      time.Time     // when the next message should go out; zero while one does
	stood    time.Duration // how long the stream had no processor to send, in sum
	atLast   time.Duration // what that was when the last message was received
	missing  map[int]bool  // overtaken, and not back
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
		f.Interval = FlowInterval
	}
	if f.Report == 0 {
		f.Report = 250 * time.Millisecond
	}
	if f.To.Port() == 0 {
		f.To = netip.AddrPortFrom(f.To.Addr(), Port)
	}
	if f.Late == 0 {
		f.Late = LateTime
	}
	s := &stream{next: 1, report: FlowReport{Alive: true}, late: f.Late, sent: make([]time.Time, 1), missing: map[int]bool{}}
	out := json.NewEncoder(w)
	if f.Fresh {
		return f.runFresh(ctx, s, out)
	}
	d := net.Dialer{Timeout: dialTimeout}
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
		return out.Encode(s.take())
	}
	defer conn.Close()
	if udp, ok := conn.(*net.UDPConn); ok {
		if err := keepMore(udp); err != nil {
			return err
		}
	}
	header := append([]byte(f.Token), (string(MarkRequest) + streamWord + "\n")...)
	if f.Proto == "tcp" {
		if _, err := conn.Write(header); err != nil {
			s.end(f.Proto, err)
			return out.Encode(s.take())
		}
	}
	s.last = time.Now()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var receiver sync.WaitGroup
	receiver.Go(func() {
		defer cancel()
		if f.Proto == "tcp" {
			s.receiveTCP(conn, f.Token)
		} else {
			s.receiveUDP(conn, header)
		}
	})
	send, report := time.NewTicker(f.Interval), time.NewTicker(f.Report)
	defer send.Stop()
	defer report.Stop()
	for {
		s.wait(f.Interval)
		select {
		case <-ctx.Done():
			conn.Close()
			receiver.Wait()
			return out.Encode(s.take())
		case <-report.C:
			if err := out.Encode(s.take()); err != nil {
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
		s.wait(f.Interval)
		select {
		case <-ctx.Done():
			open.Wait()
			return out.Encode(s.take())
		case <-report.C:
			if err := out.Encode(s.take()); err != nil {
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

// wait says that the next message goes out within an interval if there is a processor for that.
// A message that is on its way out and cannot go is no reason to wait: see [stream.send].
func (s *stream) wait(interval time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.due.IsZero() {
		s.due = time.Now().Add(interval)
	}
}

// stoodStill is how long the stream has had no processor to send, in sum up to now.
func (s *stream) stoodStill(now time.Time) time.Duration {
	if late := now.Sub(s.due); !s.due.IsZero() && late >= stallTime {
		return s.stood + late
	}
	return s.stood
}

// silence is how long nothing has come back although the stream was sending.
func (s *stream) silence(now time.Time) time.Duration {
	return now.Sub(s.last) - (s.stoodStill(now) - s.atLast)
}

func (s *stream) send(conn net.Conn, proto string, header []byte) {
	s.mu.Lock()
	now := time.Now()
	s.stood, s.due = s.stoodStill(now), time.Time{}
	s.report.Sent++
	s.sent = append(s.sent, now)
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

// receiveTCP reads the reply that names who is at the other end, and then the
// answers.
func (s *stream) receiveTCP(conn net.Conn, token string) {
	r := bufio.NewReader(conn)
	line, err := r.ReadBytes('\n')
	if err != nil {
		s.end("tcp", err)
		return
	}
	first, err := parseReply(token, line)
	if err != nil {
		s.end("tcp", err)
		return
	}
	s.heard(first.Server)
	for {
		line, err := r.ReadBytes('\n')
		if err != nil {
			s.end("tcp", err)
			return
		}
		s.gotAnswer(line)
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
		s.gotAnswer(rest)
	}
}

// gotAnswer reads a number and who answered it. Whoever gives no name has
// answered, too: as a [Server] without any.
func (s *stream) gotAnswer(line []byte) {
	text, name, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
	n, err := strconv.Atoi(string(text))
	if err != nil {
		return
	}
	var by Server
	if err := json.Unmarshal(name, &by); err != nil {
		by = Server{}
	}
	s.got(n, by)
}

// heard remembers for the next report who answered.
func (s *stream) heard(by Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.by(by)
}

// by is heard, for who has the lock.
func (s *stream) by(who Server) {
	if !slices.Contains(s.report.By, who) {
		s.report.By = append(s.report.By, who)
	}
}

// got counts the answer to the number n. A number that comes back late is not
// lost any more; one that comes back again says nothing of any other.
func (s *stream) got(n int, by Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now() // who waits for the lock may lose the processor
	s.by(by)
	if n < 1 || n > s.report.Sent {
		return // nobody has asked
	}
	if grow := n + 1 - len(s.back); grow > 0 {
		s.back = append(s.back, make([]bool, grow)...)
	}
	if s.back[n] {
		s.report.Duplicates++
		return
	}
	s.back[n] = true
	s.report.Received++
	if at := s.sent[n]; at.After(s.report.Newest) {
		s.report.Newest = at
	}
	s.gap = max(s.gap, s.silence(now))
	s.last, s.atLast = now, s.stoodStill(now)
	delete(s.missing, n)
	for ; s.next < n; s.next++ {
		s.missing[s.next] = true
	}
	s.next = max(s.next, n+1)
}

func (s *stream) end(proto string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// After a reset one goroutine gets ECONNRESET and the other one EOF. The reset is what happened.
	if s.finished == nil || errors.Is(s.finished, io.EOF) && classify(proto, err) == ErrorReset {
		s.finished = err
		s.report.Alive, s.report.Error, s.report.Message = false, classify(proto, err), err.Error()
	}
}

// take returns the report up to now and begins the next period.
func (s *stream) take() FlowReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	r := s.report
	for n := range s.missing {
		if now.Sub(s.sent[n]) >= s.late {
			r.Lost++
		}
	}
	r.Time, r.Gap = now, s.gap
	if !s.last.IsZero() {
		r.Gap = max(r.Gap, s.silence(now))
	}
	s.gap, s.report.By = 0, nil
	return r
}
