package prober

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// idle is how long a connection may be silent; a stream speaks all the time.
const idle = 2 * time.Minute

// Serve answers probes on TCP and UDP at an address such as ":8080" until ctx
// ends. Every answer says that it comes from as; Serve chooses as.Process.
func Serve(ctx context.Context, address string, as Server, logger *slog.Logger) error {
	as.Process = rand.Text()
	name, err := json.Marshal(as)
	if err != nil {
		return err
	}
	var lc net.ListenConfig
	tcp, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve probes: %w", explainListen(address, err))
	}
	defer tcp.Close()
	udp, err := lc.ListenPacket(ctx, "udp", tcp.Addr().String())
	if err != nil {
		return fmt.Errorf("serve probes: %w", explainListen(address, err))
	}
	defer udp.Close()
	if err := keepMore(udp.(*net.UDPConn)); err != nil {
		return err
	}
	logger.Info("serving probes", "address", tcp.Addr().String(), "as", as.String(), "process", as.Process)

	stop := context.AfterFunc(ctx, func() { tcp.Close(); udp.Close() })
	defer stop()
	failed := make(chan error, 2)
	go func() { failed <- serveTCP(tcp, as, name, logger) }()
	go func() { failed <- serveUDP(udp.(*net.UDPConn), as, name) }()
	err = <-failed
	tcp.Close()
	udp.Close()
	<-failed
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func explainListen(address string, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s is in use; stop what listens there (ss -lntup) or choose another --listen: %w", address, err)
	}
	return err
}

func serveTCP(l net.Listener, as Server, name []byte, logger *slog.Logger) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			if err := answer(conn, as, name); err != nil {
				logger.Info("probe ended", "peer", conn.RemoteAddr().String(), "err", err)
			}
		}()
	}
}

// streamAnswer is the answer to a message of a stream: the message, and who
// answers it, as JSON, behind its number.
func streamAnswer(message, name []byte) []byte {
	message = bytes.TrimRight(message, "\n")
	return slices.Concat(message, []byte(" "), name, []byte("\n"))
}

// answer replies to one probe, or line by line to a stream.
func answer(conn net.Conn, as Server, name []byte) error {
	r := bufio.NewReader(conn)
	if err := conn.SetDeadline(time.Now().Add(idle)); err != nil {
		return err
	}
	line, err := r.ReadString('\n')
	if err != nil {
		return nil // closed without a word: a readiness probe
	}
	token, stream, err := parseRequest(line)
	if err != nil {
		return err
	}
	if _, err := conn.Write(reply(token, Reply{addrPort(conn.RemoteAddr()), addrPort(conn.LocalAddr()), as})); err != nil {
		return err
	}
	for stream {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return nil // the client has had enough
		}
		if err := conn.SetDeadline(time.Now().Add(idle)); err != nil {
			return err
		}
		if _, err := conn.Write(streamAnswer(line, name)); err != nil {
			return err
		}
	}
	return nil
}

// serveUDP answers from the address that was asked: with several addresses on
// a host the kernel might choose another one.
func serveUDP(conn *net.UDPConn, as Server, name []byte) error {
	p4, p6 := ipv4.NewPacketConn(conn), ipv6.NewPacketConn(conn)
	// A socket of one family refuses the other's option.
	err4 := p4.SetControlMessage(ipv4.FlagDst, true)
	err6 := p6.SetControlMessage(ipv6.FlagDst, true)
	if err4 != nil && err6 != nil {
		return fmt.Errorf("ask for destination addresses: %w", errors.Join(err4, err6))
	}
	port := addrPort(conn.LocalAddr()).Port()
	buf, oob := make([]byte, 64<<10), make([]byte, 256)
	for {
		n, oobn, _, peer, err := conn.ReadMsgUDPAddrPort(buf, oob)
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			continue // an ICMP error to an earlier reply
		}
		peer = netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port())
		local := destination(oob[:oobn])
		token, stream, err := parseRequest(string(buf[:n]))
		out := reply(token, Reply{peer, netip.AddrPortFrom(local, port), as})
		switch {
		case err != nil:
			continue
		case stream:
			// The number of the datagram follows the header in its own line.
			out = streamAnswer(buf[:n], name)
		}
		if _, _, err := conn.WriteMsgUDPAddrPort(out, source(local), peer); err != nil {
			continue
		}
	}
}

func destination(oob []byte) netip.Addr {
	var m4 ipv4.ControlMessage
	if m4.Parse(oob) == nil && m4.Dst != nil {
		a, _ := netip.AddrFromSlice(m4.Dst)
		return a.Unmap()
	}
	var m6 ipv6.ControlMessage
	if m6.Parse(oob) == nil && m6.Dst != nil {
		a, _ := netip.AddrFromSlice(m6.Dst)
		return a.Unmap()
	}
	return netip.Addr{}
}

// source makes the control message that sets a datagram's source address.
func source(a netip.Addr) []byte {
	switch {
	case a.Is4():
		return (&ipv4.ControlMessage{Src: a.AsSlice()}).Marshal()
	case a.Is6():
		return (&ipv6.ControlMessage{Src: a.AsSlice()}).Marshal()
	}
	return nil
}
