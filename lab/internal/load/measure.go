package load

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Measure measures one thing, for the time that m says and the time that it
// takes to set up. An error says what could not be measured, and of whom.
func Measure(ctx context.Context, m Measurement) (Result, error) {
	m, err := m.withDefaults()
	if err != nil {
		return Result{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, m.Duration+2*patience)
	defer cancel()
	measure := map[Kind]func(context.Context, Measurement) (Result, error){
		Throughput: throughput, Packets: packets, Connections: connections, Latency: latency,
	}[m.Kind]
	if m.LongFirst {
		if err := sendLong(ctx, m.To); err != nil {
			return Result{}, fmt.Errorf("load: long packets to %s: %w", m.To, err)
		}
	}
	r, err := measure(ctx, m)
	if err != nil {
		return Result{}, fmt.Errorf("load: %s to %s: %w", m.Kind, m.To, err)
	}
	r.Kind, r.Streams, r.LongFirst = m.Kind, m.Streams, m.LongFirst
	return r, nil
}

// sendLong sends a datagram of each length, in steps of 16 bytes, that Ethernet
// carries and the least MTU of IPv6 does not, none of which may be fragmented.
// Whoever on the way has no room for one says so, and somebody may draw the wrong
// conclusion.
func sendLong(ctx context.Context, to netip.AddrPort) error {
	const most, least, step, headers = 1500, 1280, 16, 28
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		level, option := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
		if !to.Addr().Is4() {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER // with the same values
		}
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, unix.IP_PMTUDISC_PROBE) }), err)
	}}
	conn, err := d.DialContext(ctx, "udp", to.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	for size := most; size > least; size -= step {
		// That it is too long, or that nobody listens, is what it is for.
		_, _ = conn.Write(make([]byte, size-headers))
	}
	return nil
}

// dial connects, and lets go of the connection's reads and writes when ctx
// ends.
func dial(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: patience}
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			conn.Close()
			return nil, err
		}
	}
	return conn.(*net.TCPConn), nil
}

// throughput sends on all streams at once for the time, and adds up what the
// server has received. The slowest stream's time counts for all.
func throughput(ctx context.Context, m Measurement) (Result, error) {
	conns := make([]*net.TCPConn, m.Streams)
	for i := range conns {
		conn, err := dial(ctx, m.To)
		if err != nil {
			return Result{}, err
		}
		defer conn.Close()
		conns[i] = conn
	}
	counts := make([]count, m.Streams)
	end := time.Now().Add(m.Duration)
	var g errgroup.Group
	for i, conn := range conns {
		g.Go(func() error {
			if err := sendBulk(conn, end); err != nil {
				return err
			}
			return json.NewDecoder(conn).Decode(&counts[i])
		})
	}
	if err := g.Wait(); err != nil {
		return Result{}, err
	}
	var r Result
	for _, c := range counts {
		r.Bytes += c.Bytes
		r.Elapsed = max(r.Elapsed, c.Elapsed)
	}
	return r, nil
}

func sendBulk(conn *net.TCPConn, end time.Time) error {
	if _, err := conn.Write([]byte{wantBulk}); err != nil {
		return err
	}
	buf := make([]byte, bulkWrite)
	for { // at least one write: on a busy machine the time may be over before the first one
		if _, err := conn.Write(buf); err != nil {
			return err
		}
		if !time.Now().Before(end) {
			return conn.CloseWrite()
		}
	}
}

// packets sends small datagrams, as many as fit into the window.
func packets(ctx context.Context, m Measurement) (Result, error) {
	control, err := dial(ctx, m.To)
	if err != nil {
		return Result{}, err
	}
	defer control.Close()
	if _, err := control.Write([]byte{wantCount}); err != nil {
		return Result{}, err
	}
	in := json.NewDecoder(control)
	var at, c count
	if err := in.Decode(&at); err != nil {
		return Result{}, fmt.Errorf("ask for a UDP port: %w", err)
	}
	var d net.Dialer
	udp, err := d.DialContext(ctx, "udp", netip.AddrPortFrom(m.To.Addr(), at.Port).String())
	if err != nil {
		return Result{}, err
	}
	defer udp.Close()
	sent, err := sendPackets(udp, time.Now().Add(m.Duration))
	if err != nil {
		return Result{}, err
	}
	if err := control.CloseWrite(); err != nil {
		return Result{}, err
	}
	if err := in.Decode(&c); err != nil {
		return Result{}, fmt.Errorf("ask for the count: %w", err)
	}
	if c.Packets == 0 {
		return Result{}, fmt.Errorf("of %d UDP packets to port %d no two arrived; is there a firewall, or a path for TCP only", sent, at.Port)
	}
	return Result{Packets: c.Packets, Sent: sent, Elapsed: c.Elapsed}, nil
}

// sendPackets numbers packets from 1 and keeps at most a window of them on the
// way until the end.
func sendPackets(udp net.Conn, end time.Time) (sent int64, err error) {
	acks, read := make(chan int64, 1), make(chan struct{})
	go func() {
		defer close(read)
		readAcks(udp, acks)
	}()
	defer func() {
		err = errors.Join(err, udp.SetReadDeadline(time.Now()))
		<-read
	}()
	payload := make([]byte, smallPayload)
	wait := time.NewTimer(0)
	defer wait.Stop()
	for done := int64(0); ; {
		for sent-done < Window {
			binary.BigEndian.PutUint64(payload, uint64(sent+1))
			_, err := udp.Write(payload)
			if errors.Is(err, syscall.ENOBUFS) { // a queue on the way is full
				break
			} else if err != nil {
				return sent, err
			}
			sent++
		}
		now := time.Now()
		if !now.Before(end) {
			return sent, nil
		}
		wait.Reset(min(stall, end.Sub(now)))
		select {
		case n := <-acks:
			done = max(done, n)
		case <-wait.C:
			done = sent
		}
	}
}

// readAcks passes on the newest number that has arrived, until the socket's
// deadline.
func readAcks(udp net.Conn, acks chan int64) {
	buf := make([]byte, 64)
	newest := int64(0)
	for {
		n, err := udp.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil || n < 8 {
			continue
		}
		newest = max(newest, int64(binary.BigEndian.Uint64(buf)))
		select {
		case <-acks: // nobody has taken the older one
		default:
		}
		acks <- newest
	}
}

// connections opens connections, one after the other on each stream, and
// counts those that had their byte back in time. On a machine so slow that none
// had, the first of each stream count, with the time that they took.
func connections(ctx context.Context, m Measurement) (Result, error) {
	done := make([]int, m.Streams)
	start := time.Now()
	end := start.Add(m.Duration)
	g, ctx := errgroup.WithContext(ctx)
	for i := range done {
		g.Go(func() error {
			for {
				if err := connectOnce(ctx, m.To); err != nil {
					return err
				}
				if time.Now().After(end) {
					return nil
				}
				done[i]++
			}
		})
	}
	if err := g.Wait(); err != nil {
		return Result{}, err
	}
	r := Result{Elapsed: m.Duration}
	for _, n := range done {
		r.Count += n
	}
	if r.Count == 0 {
		return Result{Elapsed: time.Since(start), Count: m.Streams}, nil
	}
	return r, nil
}

// connectOnce closes by a reset: ports that wait for late packets (TIME_WAIT)
// would be used up after some twenty thousand connections.
func connectOnce(ctx context.Context, to netip.AddrPort) error {
	conn, err := dial(ctx, to)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetLinger(0); err != nil {
		return err
	}
	return thereAndBack(conn)
}

func thereAndBack(conn *net.TCPConn) error {
	b := [1]byte{wantEcho}
	if _, err := conn.Write(b[:]); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, b[:])
	return err
}

// latency sends one byte and waits for it, again and again.
func latency(ctx context.Context, m Measurement) (Result, error) {
	conn, err := dial(ctx, m.To)
	if err != nil {
		return Result{}, err
	}
	defer conn.Close()
	if err := thereAndBack(conn); err != nil { // the way is known now, to all caches
		return Result{}, err
	}
	var trips []time.Duration
	start := time.Now()
	last := start
	for last.Sub(start) < m.Duration {
		if err := thereAndBack(conn); err != nil {
			return Result{}, err
		}
		now := time.Now()
		trips = append(trips, now.Sub(last))
		last = now
	}
	slices.Sort(trips)
	return Result{
		Elapsed: last.Sub(start), Count: len(trips),
		Median: quantile(trips, 50), P99: quantile(trips, 99),
	}, nil
}

// quantile returns the smallest of the sorted values that is not below so many
// per cent of them; there must be one.
func quantile(sorted []time.Duration, percent int) time.Duration {
	i := (len(sorted)*percent + 99) / 100
	return sorted[max(i, 1)-1]
}
