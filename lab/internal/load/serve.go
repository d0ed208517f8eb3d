package load

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
)

// Serve serves measurements at an address such as ":8090" until ctx ends.
// Ready is called once it listens.
func Serve(ctx context.Context, address string, logger *slog.Logger, ready func(netip.AddrPort)) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("serve load: %s is in use; stop what listens there (ss -lntp) or choose another --listen: %w", address, err)
	} else if err != nil {
		return fmt.Errorf("serve load: %w", err)
	}
	var conns sync.WaitGroup
	defer conns.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	ready(addrPort(l.Addr()))
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("serve load: %w", err)
		}
		conns.Go(func() {
			stop := context.AfterFunc(ctx, func() { conn.Close() })
			defer stop()
			defer conn.Close()
			if err := serve(ctx, conn.(*net.TCPConn)); err != nil && ctx.Err() == nil && !errors.Is(err, syscall.ECONNRESET) {
				logger.Info("measurement ended", "peer", conn.RemoteAddr().String(), "err", err)
			}
		})
	}
}

// serve does for one connection what its first byte says.
func serve(ctx context.Context, conn *net.TCPConn) error {
	buf := make([]byte, bulkWrite)
	if _, err := io.ReadFull(conn, buf[:1]); err != nil {
		return nil // closed without a word
	}
	switch buf[0] {
	case wantBulk:
		return receiveBulk(conn, buf)
	case wantCount:
		return receivePackets(ctx, conn, buf)
	case wantEcho:
		return echo(conn, buf)
	}
	return fmt.Errorf("unknown request %q", buf[0])
}

// echo sends back what comes, the byte that asked for it first.
func echo(conn *net.TCPConn, buf []byte) error {
	for n := 1; ; {
		if _, err := conn.Write(buf[:n]); err != nil {
			return err
		}
		var err error
		if n, err = conn.Read(buf); err != nil {
			return ended(err)
		}
	}
}

func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// receiveBulk counts bytes until the client has no more.
func receiveBulk(conn *net.TCPConn, buf []byte) error {
	var c count
	start := time.Now()
	for {
		n, err := conn.Read(buf)
		c.Bytes += int64(n)
		if errors.Is(err, io.EOF) {
			c.Elapsed = time.Since(start)
			return json.NewEncoder(conn).Encode(c)
		} else if err != nil {
			return err
		}
	}
}

// receivePackets opens a UDP port on the address that the client knows, and
// counts what arrives until the client says that it has sent everything.
func receivePackets(ctx context.Context, conn *net.TCPConn, buf []byte) error {
	local := addrPort(conn.LocalAddr())
	var lc net.ListenConfig
	pc, err := lc.ListenPacket(ctx, "udp", netip.AddrPortFrom(local.Addr(), 0).String())
	if err != nil {
		return err
	}
	udp := pc.(*net.UDPConn)
	defer udp.Close()
	out := json.NewEncoder(conn)
	if err := out.Encode(count{Port: addrPort(udp.LocalAddr()).Port()}); err != nil {
		return err
	}
	counted := make(chan count, 1)
	go func() { counted <- countPackets(udp) }()
	_, readErr := conn.Read(buf) // EOF: the client has sent everything
	if err := udp.SetReadDeadline(time.Now().Add(settle)); err != nil {
		return err
	}
	c := <-counted
	if err := ended(readErr); err != nil {
		return err
	}
	return out.Encode(c)
}

// settle is how long packets may still arrive once the client, which says so
// on the same path, has sent all.
const settle = 200 * time.Millisecond

// countPackets counts datagrams until the socket's deadline, and now and then
// says which was the newest. The first is when the time begins, so it is not
// counted itself.
func countPackets(udp *net.UDPConn) (c count) {
	buf := make([]byte, 2048)
	var first, last time.Time
	var newest uint64
	for {
		n, peer, err := udp.ReadFromUDPAddrPort(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			break
		} else if err != nil || n < 8 {
			continue
		}
		last = time.Now()
		newest = max(newest, binary.BigEndian.Uint64(buf))
		if first.IsZero() {
			first = last
			continue
		}
		if c.Packets++; c.Packets%ackEvery == 0 {
			// The sender takes an answer that is lost for lost packets.
			_, _ = udp.WriteToUDPAddrPort(binary.BigEndian.AppendUint64(nil, newest), peer)
		}
	}
	c.Elapsed = last.Sub(first)
	return c
}
