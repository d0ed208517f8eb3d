package prober

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

const (
	protoICMP   = 1
	protoICMPv6 = 58
	// icmpHeader is the part of an echo that an ICMP error quotes for sure.
	icmpHeader = 8
)

// ping sends an echo with the token as payload. It needs NET_RAW, or a group
// in net.ipv4.ping_group_range.
func ping(ctx context.Context, p Probe) (Result, error) {
	raw, unprivileged, proto := "ip4:icmp", "udp4", protoICMP
	var echo icmp.Type = ipv4.ICMPTypeEcho
	if p.To.Addr().Is6() {
		raw, unprivileged, proto, echo = "ip6:ipv6-icmp", "udp6", protoICMPv6, ipv6.ICMPTypeEchoRequest
	}
	var dst net.Addr = &net.IPAddr{IP: p.To.Addr().AsSlice(), Zone: p.To.Addr().Zone()}
	conn, err := icmp.ListenPacket(raw, "")
	if err != nil {
		var err2 error
		if conn, err2 = icmp.ListenPacket(unprivileged, ""); err2 != nil {
			return Result{}, fmt.Errorf("open a socket for ICMP (give the container NET_RAW): %w", err)
		}
		dst = &net.UDPAddr{IP: p.To.Addr().AsSlice(), Zone: p.To.Addr().Zone()}
	}
	defer conn.Close()

	start := time.Now()
	end, _ := ctx.Deadline()
	each := time.Until(end) / time.Duration(p.Count)
	id := rand.IntN(1 << 16)
	res := Result{Error: ErrorTimeout, Message: "no echo reply from " + p.To.Addr().String()}
	for seq := 1; seq <= p.Count; seq++ {
		msg := icmp.Message{Type: echo, Body: &icmp.Echo{ID: id, Seq: seq, Data: request(p.Token)}}
		b, err := msg.Marshal(nil)
		if err != nil {
			return Result{}, err
		}
		if _, err := conn.WriteTo(b, dst); err != nil {
			return failed("icmp", err), nil
		}
		if err := conn.SetReadDeadline(time.Now().Add(each)); err != nil {
			return Result{}, err
		}
		r, err := awaitEcho(conn, proto, p, id)
		switch {
		case err == nil && r.OK:
			r.RTT = time.Since(start)
			return r, nil
		case err == nil:
			return r, nil
		case !os.IsTimeout(err):
			return failed("icmp", err), nil
		}
	}
	return res, nil
}

// awaitEcho reads until the reply to our echo, or an ICMP error about it.
func awaitEcho(conn *icmp.PacketConn, proto int, p Probe, id int) (Result, error) {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return Result{}, err
		}
		m, err := icmp.ParseMessage(proto, buf[:n])
		if err != nil {
			continue
		}
		switch body := m.Body.(type) {
		case *icmp.Echo:
			isReply := m.Type == ipv4.ICMPTypeEchoReply || m.Type == ipv6.ICMPTypeEchoReply
			if isReply && bytes.Equal(body.Data, request(p.Token)) {
				return Result{OK: true}, nil
			}
		case *icmp.DstUnreach:
			if quotes(body.Data, proto, p.To.Addr(), id) {
				return Result{Error: unreachable(proto, m.Code), Message: fmt.Sprintf("%s says %v, code %d", hostOf(from), m.Type, m.Code)}, nil
			}
		}
	}
}

// quotes tells whether an ICMP error is about our echo.
func quotes(data []byte, proto int, to netip.Addr, id int) bool {
	var inner []byte
	var dst net.IP
	if proto == protoICMP {
		h, err := icmp.ParseIPv4Header(data)
		if err != nil || len(data) < h.Len+icmpHeader {
			return false
		}
		inner, dst = data[h.Len:], h.Dst
	} else {
		h, err := ipv6.ParseHeader(data)
		if err != nil || len(data) < ipv6.HeaderLen+icmpHeader {
			return false
		}
		inner, dst = data[ipv6.HeaderLen:], h.Dst
	}
	a, _ := netip.AddrFromSlice(dst)
	return a.Unmap() == to.Unmap() && int(inner[4])<<8|int(inner[5]) == id
}

func unreachable(proto, code int) string {
	if proto == protoICMPv6 {
		switch code {
		case 0:
			return ErrorICMPNet
		case 1, 5, 6:
			return ErrorICMPAdm
		case 4:
			return ErrorICMPPort
		}
		return ErrorICMPHost
	}
	switch code {
	case 0, 6, 11:
		return ErrorICMPNet
	case 3:
		return ErrorICMPPort
	case 9, 10, 13:
		return ErrorICMPAdm
	}
	return ErrorICMPHost
}

func hostOf(a net.Addr) string {
	switch a := a.(type) {
	case *net.IPAddr:
		return a.IP.String()
	case *net.UDPAddr:
		return a.IP.String()
	}
	return a.String()
}
