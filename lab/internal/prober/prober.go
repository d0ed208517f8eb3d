// Package prober is both ends of the lab's test traffic: a server that says
// who it saw, and clients that send one probe or a long numbered stream.
//
// Every message carries a token, so that captures find it on every interface,
// and behind it a marker that tells requests from replies. Server and clients
// are part of the lab's one binary and run where a scenario wants them.
package prober

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"
)

// Port is where the server listens, TCP and UDP.
const Port = 8080

// What follows the token in a message.
const (
	MarkRequest = '>'
	MarkReply   = '<'
)

// Kinds of failure of a probe.
const (
	ErrorTimeout  = "timeout"   // nothing came back
	ErrorReset    = "reset"     // the connection was reset
	ErrorRefused  = "refused"   // a TCP reset answered the SYN
	ErrorICMPPort = "icmp-port" // port unreachable
	ErrorICMPHost = "icmp-host" // host unreachable
	ErrorICMPNet  = "icmp-net"  // network unreachable, or no route here
	ErrorICMPAdm  = "icmp-admin"
	ErrorOther    = "other"
)

// A Reply is what the server says about a request.
type Reply struct {
	Peer   netip.AddrPort `json:"peer"`   // whom it came from
	Local  netip.AddrPort `json:"local"`  // whom it was addressed to
	Server Server         `json:"server"` // who answers
}

// A Result is the outcome of one probe.
type Result struct {
	OK      bool           `json:"ok"`
	SeenAs  netip.AddrPort `json:"seenAs,omitzero"` // our address as the server saw it; not for ICMP
	Local   netip.AddrPort `json:"local,omitzero"`  // our address as we see it
	By      netip.AddrPort `json:"by,omitzero"`     // the server's address as it sees it; not for ICMP
	Server  Server         `json:"server,omitzero"` // who answered; not for ICMP, which a kernel answers
	Error   string         `json:"error,omitempty"` // one of the kinds
	Message string         `json:"message,omitempty"`
	RTT     time.Duration  `json:"rtt,omitempty"`
}

func request(token string) []byte { return append([]byte(token), MarkRequest, '\n') }

func reply(token string, r Reply) []byte {
	body, err := json.Marshal(r)
	if err != nil { // addresses and texts always marshal
		panic(err)
	}
	return append(append([]byte(token), MarkReply), append(body, '\n')...)
}

// parseRequest returns the token of a request and whether it opens a stream.
// Only the first line counts: a datagram of a stream has its number below.
func parseRequest(message string) (token string, stream bool, err error) {
	line, _, _ := strings.Cut(message, "\n")
	token, rest, ok := strings.Cut(line, string(MarkRequest))
	if !ok || token == "" {
		return "", false, fmt.Errorf("not a probe: %q", line)
	}
	return token, rest == streamWord, nil
}

func parseReply(token string, line []byte) (Reply, error) {
	var r Reply
	rest, ok := strings.CutPrefix(string(line), token+string(MarkReply))
	if !ok {
		return r, fmt.Errorf("not the reply to this probe: %.80q", line)
	}
	return r, json.Unmarshal([]byte(rest), &r)
}

// classify says which kind of failure an error is.
func classify(proto string, err error) string {
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED) && proto == "udp":
		return ErrorICMPPort
	case errors.Is(err, syscall.ECONNREFUSED):
		return ErrorRefused
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return ErrorReset
	case errors.Is(err, syscall.EHOSTUNREACH):
		return ErrorICMPHost
	case errors.Is(err, syscall.ENETUNREACH):
		return ErrorICMPNet
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return ErrorICMPAdm
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, syscall.ETIMEDOUT):
		return ErrorTimeout
	}
	return ErrorOther
}

func addrPort(a net.Addr) netip.AddrPort {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
