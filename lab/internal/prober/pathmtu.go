package prober

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A PathMTU search finds the longest datagram that passes without being
// fragmented, and what happens to a longer one. To and Token are required.
type PathMTU struct {
	To          netip.AddrPort
	Token       string
	Least, Most int           // lengths of IP packets; default 576 and 1500
	Timeout     time.Duration // for the answer to one datagram; default 300 ms
}

// What happened to a datagram that is one byte too long.
const (
	AboveError    = "error"    // the sender was told, by its own link or by an ICMP error
	AboveSilent   = "silent"   // nothing came back
	AboveAnswered = "answered" // it passed
)

// A PathMTUResult is what was found. Lengths are those of IP packets.
type PathMTUResult struct {
	Largest int    `json:"largest"`         // 0: not even the least passes
	Above   string `json:"above"`           // what became of one byte more
	PMTU    int    `json:"pmtu"`            // what the sender's kernel knows afterwards
	Server  Server `json:"server,omitzero"` // who answered
}

// attempts at one length: the first packet may find an empty neighbour table.
const attempts = 2

// Search sends datagrams with DF set and halves the range until it knows. When two servers
// answer, there is no one path to tell the length of, and that is an error.
func (p PathMTU) Search(ctx context.Context) (PathMTUResult, error) {
	var res PathMTUResult
	if p.Token == "" || !p.To.Addr().IsValid() {
		return res, fmt.Errorf("a search needs a token and an address")
	}
	if p.To.Port() == 0 {
		p.To = netip.AddrPortFrom(p.To.Addr(), Port)
	}
	if p.Least == 0 {
		p.Least = 576
	}
	if p.Most == 0 {
		p.Most = 1500
	}
	if p.Timeout == 0 {
		p.Timeout = 300 * time.Millisecond
	}
	// What the kernel has learned of the path does not bound these.
	probe, err := p.dial(ctx, unix.IP_PMTUDISC_PROBE)
	if err != nil {
		return res, err
	}
	defer probe.Close()
	low, high := p.Least-1, p.Most+1 // passes; does not
	for high-low > 1 && ctx.Err() == nil {
		// The first look is at the least: without it there is no path.
		size := (low + high) / 2
		if low < p.Least {
			size = p.Least
		}
		above, err := p.try(probe, size, &res.Server)
		switch {
		case err != nil:
			return res, err
		case above == AboveAnswered:
			low = size
		case size == p.Least:
			return res, nil
		default:
			high = size
		}
	}
	res.Largest = low
	// Those of an application: the kernel learns from errors.
	ordinary, err := p.dial(ctx, unix.IP_PMTUDISC_DO)
	if err != nil {
		return res, err
	}
	defer ordinary.Close()
	if res.Above, err = p.try(ordinary, low+1, &res.Server); err != nil {
		return res, err
	}
	res.PMTU, err = knownMTU(ordinary)
	return res, errors.Join(err, ctx.Err())
}

// try sends a packet of that length until it is answered or refused. by is who has answered
// before, and learns who does.
func (p PathMTU) try(conn *net.UDPConn, size int, by *Server) (string, error) {
	token := fmt.Sprintf("%s%05d", p.Token, size)
	message := append(request(token), make([]byte, size)...)
	message = message[:size-p.headers()]
	buf := make([]byte, 2048)
	for range attempts {
		if _, err := conn.Write(message); err != nil {
			if errors.Is(err, syscall.EMSGSIZE) {
				return AboveError, nil
			}
			return "", err
		}
		if err := conn.SetReadDeadline(time.Now().Add(p.Timeout)); err != nil {
			return "", err
		}
		for {
			n, err := conn.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if errors.Is(err, syscall.EMSGSIZE) {
				return AboveError, nil
			}
			if err != nil {
				return "", err
			}
			reply, err := parseReply(token, buf[:n])
			if err != nil {
				continue
			}
			if *by != (Server{}) && *by != reply.Server {
				return "", fmt.Errorf("two servers answer at %s: %s (process %s), and then %s (process %s)", p.To, by, by.Process, reply.Server, reply.Server.Process)
			}
			*by = reply.Server
			return AboveAnswered, nil
		}
	}
	return AboveSilent, nil
}

// headers is the length of the headers of IP and UDP.
func (p PathMTU) headers() int {
	if p.To.Addr().Is4() {
		return 20 + 8
	}
	return 40 + 8
}

func (p PathMTU) dial(ctx context.Context, discovery int) (*net.UDPConn, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		level, option := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
		if !p.To.Addr().Is4() {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER // with the same values
		}
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, discovery) }), err)
	}}
	conn, err := d.DialContext(ctx, "udp", p.To.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}

// knownMTU is what the kernel knows of the path of a connected socket.
func knownMTU(conn *net.UDPConn) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	level, option := unix.IPPROTO_IP, unix.IP_MTU
	if addrPort(conn.RemoteAddr()).Addr().Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU
	}
	mtu, getErr := 0, error(nil)
	err = raw.Control(func(fd uintptr) { mtu, getErr = unix.GetsockoptInt(int(fd), level, option) })
	return mtu, errors.Join(err, getErr)
}
