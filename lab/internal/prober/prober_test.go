package prober_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
)

// web is who the servers of these tests say they are.
var web = prober.Server{Cluster: "milan", Pod: "web", UID: "1-2-3", Node: "node-1"}

// isWeb checks that web answered, and returns which process it was.
func isWeb(t *testing.T, got prober.Server) string {
	t.Helper()
	process := got.Process
	assert.Assert(t, process != "")
	got.Process = ""
	assert.Equal(t, got, web)
	return process
}

// serve starts a server on a free port of an address.
func serve(t *testing.T, host string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		nettest.SkipOrFail(t, "address "+host, err)
	}
	address := netip.MustParseAddrPort(l.Addr().String())
	assert.NilError(t, l.Close())
	done := make(chan error, 1)
	go func() { done <- prober.Serve(t.Context(), address.String(), web, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() { assert.NilError(t, <-done) })
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		// It answers once it listens to both protocols.
		got, err := prober.Dial(t.Context(), prober.Probe{Proto: "tcp", To: address, Token: "t", Timeout: time.Minute})
		if err != nil || !got.OK {
			return poll.Continue("%v %+v", err, got)
		}
		return poll.Success()
	}, poll.WithTimeout(time.Minute))
	return address
}

func TestDial(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		t.Run(host, func(t *testing.T) {
			to := serve(t, host)
			for _, proto := range []string{"tcp", "udp", "icmp"} {
				t.Run(proto, func(t *testing.T) {
					if proto == "icmp" {
						needICMP(t, to.Addr())
					}
					got, err := prober.Dial(t.Context(), prober.Probe{Proto: proto, To: to, Token: "0123456789abcdef"})
					assert.NilError(t, err)
					assert.Assert(t, got.OK, "%+v", got)
					if proto != "icmp" {
						assert.Equal(t, got.SeenAs.Addr().String(), host)
						assert.Equal(t, got.SeenAs, got.Local)
						isWeb(t, got.Server)
					}
				})
			}
		})
	}
}

// needICMP skips the test where we may not send an echo by either kind of
// socket that can.
func needICMP(t *testing.T, to netip.Addr) {
	t.Helper()
	family, proto := unix.AF_INET, unix.IPPROTO_ICMP
	if to.Is6() {
		family, proto = unix.AF_INET6, unix.IPPROTO_ICMPV6
	}
	var errs []error
	for _, kind := range []int{unix.SOCK_RAW, unix.SOCK_DGRAM} {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, proto)
		if err == nil {
			assert.NilError(t, unix.Close(fd))
			return
		}
		errs = append(errs, err)
	}
	nettest.SkipOrFail(t, "ICMP sockets", fmt.Errorf("raw: %w; datagram: %w: run the test as root, or put its group into net.ipv4.ping_group_range", errs[0], errs[1]))
}

func TestDialFailures(t *testing.T) {
	closed := netip.MustParseAddrPort("127.0.0.1:1")
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	assert.NilError(t, err)
	defer silent.Close()
	for _, tc := range []struct {
		proto   string
		to      netip.AddrPort
		timeout time.Duration
		want    string
	}{
		{"tcp", closed, time.Minute, prober.ErrorRefused},
		{"udp", closed, time.Minute, prober.ErrorICMPPort},
		{"udp", netip.MustParseAddrPort(silent.LocalAddr().String()), 200 * time.Millisecond, prober.ErrorTimeout},
	} {
		got, err := prober.Dial(t.Context(), prober.Probe{Proto: tc.proto, To: tc.to, Token: "t", Timeout: tc.timeout})
		assert.NilError(t, err)
		assert.Assert(t, !got.OK)
		assert.Equal(t, got.Error, tc.want, got.Message)
	}
}

// TestPathMTU: over the loopback everything up to the most passes; what a link
// does not carry is refused at once.
func TestPathMTU(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		to := serve(t, host)
		got, err := prober.PathMTU{To: to, Token: "0123456789abcdef", Least: 1300, Most: 1400}.Search(t.Context())
		assert.NilError(t, err)
		assert.Equal(t, got.Largest, 1400, host)
		assert.Equal(t, got.Above, prober.AboveAnswered, host)
		assert.Assert(t, got.PMTU > 1400, "%s: %+v", host, got)
		isWeb(t, got.Server)
	}
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	assert.NilError(t, err)
	defer silent.Close()
	got, err := prober.PathMTU{To: netip.MustParseAddrPort(silent.LocalAddr().String()), Token: "t", Timeout: 20 * time.Millisecond}.Search(t.Context())
	assert.NilError(t, err)
	assert.Equal(t, got.Largest, 0, "nobody answers")

	// One of two that have the same address answers to short datagrams, the other one to long ones.
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	assert.NilError(t, err)
	defer conn.Close()
	go func() {
		for buf := make([]byte, 2048); ; {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			token, _, _ := strings.Cut(string(buf[:n]), ">")
			cluster := "milan"
			if n > 1300 {
				cluster = "rome"
			}
			_, _ = fmt.Fprintf(writerTo{conn, from}, `%s<{"peer":"192.0.2.1:1","local":"192.0.2.2:2","server":{"cluster":%q,"pod":"web"}}`+"\n", token, cluster)
		}
	}()
	_, err = prober.PathMTU{To: netip.MustParseAddrPort(conn.LocalAddr().String()), Token: "t", Most: 1400}.Search(t.Context())
	assert.ErrorContains(t, err, "two servers answer at 127.0.0.1:")
	assert.ErrorContains(t, err, "milan/web (process ), and then rome/web")
}

// writerTo sends what is written in a datagram to addr.
type writerTo struct {
	conn net.PacketConn
	addr net.Addr
}

func (w writerTo) Write(b []byte) (int, error) { return w.conn.WriteTo(b, w.addr) }

func TestServePortInUse(t *testing.T) {
	to := serve(t, "127.0.0.1")
	err := prober.Serve(t.Context(), to.String(), web, slog.New(slog.DiscardHandler))
	assert.ErrorContains(t, err, "is in use; stop what listens there")
}

// TestServerName: every answer names the process that gave it, and two servers
// of one pod are two processes.
func TestServerName(t *testing.T) {
	one, other := serve(t, "127.0.0.1"), serve(t, "127.0.0.1")
	process := func(to netip.AddrPort, proto string) string {
		got, err := prober.Dial(t.Context(), prober.Probe{Proto: proto, To: to, Token: "t"})
		assert.NilError(t, err)
		return isWeb(t, got.Server)
	}
	assert.Equal(t, process(one, "tcp"), process(one, "udp"))
	assert.Assert(t, process(one, "tcp") != process(other, "tcp"))
	for _, tc := range []struct {
		prober.Server
		want string
	}{
		{web, "milan/web"},
		{prober.Server{Host: "user", Process: "p"}, "user"},
		{prober.Server{Process: "p"}, "a server without a name (process p)"},
		{prober.Server{}, "a server that does not say who it is"},
	} {
		assert.Equal(t, tc.Server.String(), tc.want)
	}
}

// TestFlowBy: the answers of a stream say who gave them, those of one that is
// silent say nothing.
func TestFlowBy(t *testing.T) {
	for _, f := range []prober.Flow{{Proto: "tcp"}, {Proto: "udp"}, {Proto: "udp", Fresh: true}} {
		t.Run(fmt.Sprintf("%s fresh %v", f.Proto, f.Fresh), func(t *testing.T) {
			f.To, f.Token, f.Interval, f.Report = serve(t, "127.0.0.1"), "tok", 5*time.Millisecond, 20*time.Millisecond
			reports := run(t, f)
			before := 0
			for n := 0; n < 10; {
				var got prober.FlowReport
				assert.NilError(t, reports.Decode(&got))
				if got.Received == 0 { // it has just begun
					continue
				}
				n++
				assert.Assert(t, len(got.By) <= 1, "%+v", got)
				for _, by := range got.By {
					isWeb(t, by)
				}
				assert.Equal(t, len(got.By), min(1, got.Received-before), "%+v", got)
				before = got.Received
			}
		})
	}
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	assert.NilError(t, err)
	defer silent.Close()
	reports := run(t, prober.Flow{Proto: "udp", To: netip.MustParseAddrPort(silent.LocalAddr().String()), Token: "tok", Interval: 5 * time.Millisecond, Report: 20 * time.Millisecond, Late: 100 * time.Millisecond})
	var got prober.FlowReport
	for got.Sent < 10 {
		assert.NilError(t, reports.Decode(&got))
		assert.Equal(t, len(got.By), 0)
	}
}

// run starts a stream that lasts as long as the test.
func run(t *testing.T, f prober.Flow) *json.Decoder {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.CloseWithError(f.Run(ctx, w))
	}()
	t.Cleanup(func() {
		cancel()
		r.Close()
		<-ended
	})
	return json.NewDecoder(r)
}

// TestFlowCounts: an answer that comes twice is no answer to a number that was
// lost; one that comes late is.
func TestFlowCounts(t *testing.T) {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	assert.NilError(t, err)
	defer conn.Close()
	go func() {
		buf := make([]byte, 2048)
		answers := map[int][]int{5: nil, 6: nil, 8: {8, 8, 8}, 10: nil, 12: {12, 10}, 20: {20, 1000, 0, -3}}
		for n := 1; ; n++ {
			size, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			header, _, _ := bytes.Cut(buf[:size], []byte("\n"))
			numbers, ok := answers[n]
			if !ok {
				numbers = []int{n}
			}
			for _, m := range numbers {
				conn.WriteToUDPAddrPort(fmt.Appendf(bytes.Clone(header), "\n%d\n", m), from)
			}
		}
	}()
	reports := run(t, prober.Flow{Proto: "udp", To: conn.LocalAddr().(*net.UDPAddr).AddrPort(), Token: "tok", Interval: 5 * time.Millisecond, Report: 20 * time.Millisecond, Late: 2 * time.Second})
	var got prober.FlowReport
	for got.Received < 30 || got.Lost < 2 {
		assert.NilError(t, reports.Decode(&got))
		assert.Assert(t, got.Sent < 5000 && got.Lost <= 2, "%+v", got)
	}
	assert.Equal(t, got.Lost, 2, "5 and 6; 10 came late")
	assert.Equal(t, got.Duplicates, 2)
	assert.Assert(t, got.Received <= got.Sent-2, "%+v", got)
}

// TestFlow breaks a stream in the middle and looks for the gap.
func TestFlow(t *testing.T) {
	to := serve(t, "127.0.0.1")
	relay := newRelay(t, to)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	go func() {
		f := prober.Flow{Proto: "udp", To: relay.address(), Token: "tok", Interval: 5 * time.Millisecond, Report: 20 * time.Millisecond, Late: 100 * time.Millisecond}
		w.CloseWithError(f.Run(ctx, w))
	}()
	reports := json.NewDecoder(r)
	var gap time.Duration
	var blocked time.Time
	var before int // how many were lost before the last block
	for n := 0; ; n++ {
		var got prober.FlowReport
		assert.NilError(t, reports.Decode(&got))
		assert.Assert(t, got.Alive)
		gap = max(gap, got.Gap)
		switch {
		case got.Received > 5 && got.Lost-before <= 10 && time.Since(blocked) > time.Second: // once, unless too few were sent in that time
			blocked, before, gap = time.Now(), got.Lost, 0
			relay.block(150 * time.Millisecond)
		case got.Lost-before > 10:
			// The way was blocked for 150 ms. Time in which this process had no processor is not
			// counted, but it has sent ten messages at least, one every 5 ms.
			assert.Assert(t, gap >= 40*time.Millisecond && gap < 2*time.Second, "gap %v", gap)
			return
		}
		assert.Assert(t, n < 500, "no loss reported: %+v", got)
	}
}

// TestFlowFresh: every message comes from a port of its own, and one that is not
// answered is lost.
func TestFlowFresh(t *testing.T) {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	assert.NilError(t, err)
	defer conn.Close()
	ports := make(chan uint16, 10_000)
	go func() {
		defer close(ports)
		buf := make([]byte, 2048)
		for n := 1; ; n++ {
			size, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil || len(ports) == cap(ports) {
				return
			}
			ports <- from.Port()
			if n == 5 {
				continue // not answered
			}
			if _, err := conn.WriteToUDPAddrPort(buf[:size], from); err != nil {
				return
			}
		}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	go func() {
		f := prober.Flow{
			Proto: "udp", To: conn.LocalAddr().(*net.UDPAddr).AddrPort(), Token: "tok", Fresh: true,
			Interval: 5 * time.Millisecond, Report: 20 * time.Millisecond, Late: 2 * time.Second,
		}
		w.CloseWithError(f.Run(ctx, w))
	}()
	reports := json.NewDecoder(r)
	var got prober.FlowReport
	for n := 0; got.Received < 20 || got.Lost < 1; n++ {
		assert.NilError(t, reports.Decode(&got))
		assert.Assert(t, n < 500 && got.Lost <= 1, "%+v", got)
	}
	cancel()
	for {
		if err := reports.Decode(&got); err != nil {
			assert.ErrorIs(t, err, io.EOF)
			break
		}
	}
	assert.NilError(t, conn.Close())
	seen := map[uint16]bool{}
	messages := 0
	for p := range ports {
		seen[p] = true
		messages++
	}
	// The kernel takes ports at random out of 28,000: of 400 some three are the same as
	// another one.
	assert.Assert(t, messages >= 20 && len(seen) >= messages*9/10, "%d ports for %d messages", len(seen), messages)

	err = prober.Flow{Proto: "tcp", To: netip.MustParseAddrPort("127.0.0.1:1"), Fresh: true}.Run(t.Context(), io.Discard)
	assert.ErrorContains(t, err, "only a stream of udp")
}

func TestFlowReset(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	assert.NilError(t, err)
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		c.Read(make([]byte, 100))
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}()
	var out bytes.Buffer
	f := prober.Flow{Proto: "tcp", To: netip.MustParseAddrPort(l.Addr().String()), Token: "tok", Interval: time.Millisecond}
	assert.NilError(t, f.Run(t.Context(), &out))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	var got prober.FlowReport
	assert.NilError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &got))
	assert.Assert(t, !got.Alive)
	assert.Equal(t, got.Error, prober.ErrorReset, fmt.Sprintf("%+v", got))
}

// A relay passes datagrams on, except while blocked.
type relay struct {
	conn    *net.UDPConn
	blocked chan time.Duration
}

func newRelay(t *testing.T, to netip.AddrPort) *relay {
	t.Helper()
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	assert.NilError(t, err)
	t.Cleanup(func() { conn.Close() })
	r := &relay{conn: conn, blocked: make(chan time.Duration, 1)}
	go func() {
		var client netip.AddrPort
		var until time.Time
		buf := make([]byte, 2048)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			select {
			case d := <-r.blocked:
				until = time.Now().Add(d)
			default:
			}
			if time.Now().Before(until) {
				continue
			}
			next := client
			if from != to {
				client, next = from, to
			}
			conn.WriteToUDPAddrPort(buf[:n], next)
		}
	}()
	return r
}

func (r *relay) address() netip.AddrPort {
	return netip.MustParseAddrPort(r.conn.LocalAddr().String())
}

func (r *relay) block(d time.Duration) {
	select {
	case r.blocked <- d:
	default:
	}
}
