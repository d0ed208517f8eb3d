package prober

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// A Probe is one question. Proto, To and Token are required; the port of To
// is ignored for ICMP and defaults to Port.
type Probe struct {
	Proto   string // tcp, udp or icmp
	To      netip.AddrPort
	Token   string
	Timeout time.Duration // for the whole probe; default 1 s
	Count   int           // attempts of UDP and ICMP within the timeout; default 1
}

// Dial sends one probe. What went wrong on the network is part of the Result;
// the error is for a probe that could not be sent at all.
func Dial(ctx context.Context, p Probe) (Result, error) {
	if p.Token == "" || !p.To.Addr().IsValid() {
		return Result{}, fmt.Errorf("a probe needs a token and an address")
	}
	if p.Timeout == 0 {
		p.Timeout = time.Second
	}
	p.Count = max(p.Count, 1)
	if p.To.Port() == 0 {
		p.To = netip.AddrPortFrom(p.To.Addr(), Port)
	}
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	switch p.Proto {
	case "tcp":
		return dialTCP(ctx, p), nil
	case "udp":
		return dialUDP(ctx, p), nil
	case "icmp":
		return ping(ctx, p)
	}
	return Result{}, fmt.Errorf("unknown protocol %q: tcp, udp or icmp", p.Proto)
}

func failed(proto string, err error) Result {
	return Result{Error: classify(proto, err), Message: err.Error()}
}

func dialTCP(ctx context.Context, p Probe) Result {
	start := time.Now()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", p.To.String())
	if err != nil {
		return failed("tcp", err)
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return failed("tcp", err)
	}
	if _, err := conn.Write(request(p.Token)); err != nil {
		return failed("tcp", err)
	}
	line, err := bufio.NewReader(conn).ReadBytes('\n')
	if err != nil {
		return failed("tcp", err)
	}
	return answered(conn, p, line, start)
}

func dialUDP(ctx context.Context, p Probe) Result {
	start := time.Now()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "udp", p.To.String())
	if err != nil {
		return failed("udp", err)
	}
	defer conn.Close()
	end, _ := ctx.Deadline()
	each := time.Until(end) / time.Duration(p.Count)
	buf := make([]byte, 64<<10)
	var res Result
	for range p.Count {
		if _, err := conn.Write(request(p.Token)); err != nil {
			return failed("udp", err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(each)); err != nil {
			return failed("udp", err)
		}
		n, err := conn.Read(buf)
		if err == nil {
			return answered(conn, p, buf[:n], start)
		}
		if res = failed("udp", err); res.Error != ErrorTimeout {
			return res
		}
	}
	return res
}

func answered(conn net.Conn, p Probe, line []byte, start time.Time) Result {
	r, err := parseReply(p.Token, line)
	if err != nil {
		return Result{Error: ErrorOther, Message: err.Error()}
	}
	return Result{OK: true, SeenAs: r.Peer, By: r.Local, Server: r.Server, Local: addrPort(conn.LocalAddr()), RTT: time.Since(start)}
}
