package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
)

const (
	// established is how many connections packets are sent on.
	established = 1000
	// maxConnections bounds a measurement: each connection has a port of its
	// own, so none is there already.
	maxConnections = 60_000
	// timeEvery is after how many packets a sender looks at the clock.
	timeEvery = 64
)

// FirewallConfig is how to measure.
type FirewallConfig struct {
	Cases    []FirewallCase
	Pairs    int           // how often each case is measured
	Duration time.Duration // of one measurement
	Progress func(pair int, text string)
}

// MeasureFirewall measures each case in network namespaces of its own: a peer,
// a gateway and a node. The cases take turns, each right after the first one,
// which it is compared with.
func MeasureFirewall(ctx context.Context, c FirewallConfig) (samples []FirewallSamples, err error) {
	sites := make([]*firewallSite, len(c.Cases))
	samples = make([]FirewallSamples, len(c.Cases))
	for i, fc := range c.Cases {
		site, applied, err := newFirewallSite(ctx, fc)
		if site != nil {
			defer site.close()
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", fc, err)
		}
		sites[i], samples[i].Applied = site, applied
	}
	for pair := range c.Pairs {
		for i := range sites {
			if c.Progress != nil {
				c.Progress(pair+1, c.Cases[i].String())
			}
			for _, m := range []struct {
				measure func(*firewallSite, time.Duration) (float64, error)
				pairs   *[][2]float64
			}{
				{(*firewallSite).connections, &samples[i].Connections}, {(*firewallSite).packets, &samples[i].Packets},
			} {
				var values [2]float64
				for j, s := range []*firewallSite{sites[0], sites[i]} {
					if err := ctx.Err(); err != nil {
						return nil, err
					}
					if values[j], err = m.measure(s, c.Duration); err != nil {
						return nil, fmt.Errorf("pair %d, %s: %w", pair+1, s.FirewallCase, err)
					}
				}
				*m.pairs = append(*m.pairs, values)
			}
		}
	}
	return samples, nil
}

// A firewallSite is a gateway between two neighbours. One of them sends, and
// whatever reaches the other one is counted and dropped.
type firewallSite struct {
	FirewallCase
	gateway, sender, sink *os.File // network namespaces
	sinkLink              string
	socket                int // of the sender; -1: none
	kernel                *kernel.NetNS
}

func (s *firewallSite) close() {
	if s.kernel != nil {
		_ = s.kernel.Close()
	}
	if s.socket >= 0 {
		_ = unix.Close(s.socket)
	}
	for _, ns := range []*os.File{s.gateway, s.sender, s.sink} {
		if ns != nil {
			_ = ns.Close()
		}
	}
}

func newFirewallSite(ctx context.Context, c FirewallCase) (s *firewallSite, applied time.Duration, err error) {
	s = &firewallSite{FirewallCase: c, socket: -1}
	want, err := c.state()
	if err != nil {
		return s, 0, err
	}
	for _, ns := range []**os.File{&s.gateway, &s.sender, &s.sink} {
		if *ns, err = netns.New(); err != nil {
			return s, 0, fmt.Errorf("%w: run it as root", err)
		}
	}
	peer, node := s.sender, s.sink
	s.sinkLink = "node"
	if c.Networks > 0 || c.Nodes > 0 {
		peer, node, s.sinkLink = s.sink, s.sender, "peer"
	}
	if err := s.link(ctx, peer, desired.TunnelInterface, "peer", netip.PrefixFrom(peerAddr(), 30)); err != nil {
		return s, 0, err
	}
	if err := s.link(ctx, node, nodeLink, "node", netip.PrefixFrom(nodeAddr(), 24)); err != nil {
		return s, 0, err
	}
	if c.Nodes > 0 {
		if err := s.addNodes(ctx, c.destination(0).String()); err != nil {
			return s, 0, err
		}
	}
	if err := setForwarding(s.gateway, "1"); err != nil {
		return s, 0, err
	}
	err = netns.Do(s.gateway, func() error {
		s.kernel, err = kernel.Open(kernel.Config{})
		return err
	})
	if err != nil {
		return s, 0, err
	}
	start := time.Now()
	if err := s.kernel.Apply(ctx, netstate.Diff(netstate.State{}, want)); err != nil {
		return s, 0, err
	}
	applied = time.Since(start)
	have, err := s.kernel.Observe(ctx)
	if err != nil {
		return s, 0, err
	}
	if left := netstate.Diff(have, want); !left.Empty() {
		return s, 0, fmt.Errorf("%d changes are left to do after all was applied", left.Len())
	}
	return s, applied, netns.Do(s.sender, func() error {
		s.socket, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
}

// link joins the gateway and a neighbour, which sends all that it has to the
// gateway.
func (s *firewallSite) link(ctx context.Context, other *os.File, near, far string, addr netip.Prefix) error {
	gateway := addr.Masked().Addr().Next() // the first of the network; the neighbour has the second
	err := netns.Do(s.gateway, func() error {
		return runIP(ctx,
			[]string{"link", "add", near, "type", "veth", "peer", "name", far, "netns", netns.Path(other)},
			[]string{"address", "add", netip.PrefixFrom(gateway, addr.Bits()).String(), "dev", near},
			[]string{"link", "set", near, "up"})
	})
	if err != nil {
		return err
	}
	err = netns.Do(other, func() error {
		return runIP(ctx,
			[]string{"address", "add", addr.String(), "dev", far},
			[]string{"link", "set", far, "up"},
			[]string{"route", "add", "default", "via", gateway.String()})
	})
	return errors.Join(err, setForwarding(other, "0")) // what arrives is not sent back
}

func runIP(ctx context.Context, commands ...[]string) error {
	for _, args := range commands {
		if out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
		}
	}
	return nil
}

// runBatch runs the lines of a batch, each a command without its "ip".
func runBatch(ctx context.Context, lines string) error {
	cmd := exec.CommandContext(ctx, "ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(lines)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip -batch: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

func setForwarding(ns *os.File, value string) error {
	return netns.Do(ns, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte(value), 0)
	})
}

// send sends packets until the time is over or next has no more.
func (s *firewallSite) send(d time.Duration, next func(i int) (unix.SockaddrInet4, bool)) (elapsed time.Duration, err error) {
	payload := make([]byte, 18) // with its headers the smallest Ethernet frame
	start := time.Now()
	for i := 0; ; i++ {
		to, more := next(i)
		if !more {
			return time.Since(start), nil
		}
		if err := unix.Sendto(s.socket, payload, 0, &to); err != nil {
			return 0, fmt.Errorf("send to %v:%d: %w", to.Addr, to.Port, err)
		}
		if i%timeEvery == timeEvery-1 {
			if elapsed = time.Since(start); elapsed >= d {
				return elapsed, nil
			}
		}
	}
}

// connections returns how many connections are made in a second, each to a
// random destination.
func (s *firewallSite) connections(d time.Duration) (float64, error) {
	if err := s.forget(); err != nil {
		return 0, err
	}
	before, err := s.tracked()
	if err != nil {
		return 0, err
	}
	elapsed, err := s.send(d, func(i int) (unix.SockaddrInet4, bool) {
		return unix.SockaddrInet4{Port: 1 + i, Addr: s.destination(rand.IntN(MaxFirewall)).As4()}, i < maxConnections
	})
	if err != nil {
		return 0, err
	}
	after, err := s.tracked()
	return float64(after-before) / elapsed.Seconds(), err
}

// packets returns how many packets of connections that are there arrive in a
// second, or how many are answered where nodes are measured.
func (s *firewallSite) packets(d time.Duration) (float64, error) {
	if err := s.forget(); err != nil {
		return 0, err
	}
	if s.Nodes > 0 {
		return s.roundTrips(d)
	}
	flows := make([]unix.SockaddrInet4, established)
	for i := range flows {
		flows[i] = unix.SockaddrInet4{Port: 1 + i, Addr: s.destination(rand.IntN(MaxFirewall)).As4()}
	}
	if _, err := s.send(time.Hour, func(i int) (to unix.SockaddrInet4, more bool) {
		if i == len(flows) {
			return to, false
		}
		return flows[i], true
	}); err != nil {
		return 0, err
	}
	before, err := s.arrived()
	if err != nil {
		return 0, err
	}
	elapsed, err := s.send(d, func(int) (unix.SockaddrInet4, bool) { return flows[rand.IntN(len(flows))], true })
	if err != nil {
		return 0, err
	}
	after, err := s.arrived()
	return float64(after-before) / elapsed.Seconds(), err
}

// tracked returns the number of connections that the gateway knows.
func (s *firewallSite) tracked() (n int, err error) {
	err = netns.Do(s.gateway, func() error {
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if err != nil {
			return err
		}
		n, err = strconv.Atoi(strings.TrimSpace(string(text)))
		return err
	})
	return n, err
}

// arrived returns the number of packets that the sink has received.
func (s *firewallSite) arrived() (n int, err error) {
	err = netns.Do(s.sink, func() error {
		f, err := os.Open("/proc/thread-self/net/dev")
		if err != nil {
			return err
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			name, counters, _ := strings.Cut(strings.TrimSpace(lines.Text()), ":")
			if fields := strings.Fields(counters); name == s.sinkLink && len(fields) > 1 {
				n, err = strconv.Atoi(fields[1])
				return err
			}
		}
		return fmt.Errorf("/proc/net/dev: no link %s", s.sinkLink)
	})
	return n, err
}

// forget makes the gateway forget all connections: a request of ctnetlink to
// delete without saying what, as "conntrack -F" sends it.
func (s *firewallSite) forget() error {
	return netns.Do(s.gateway, func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		const deleteConntrack = 2 // IPCTNL_MSG_CT_DELETE
		msg := binary.NativeEndian.AppendUint32(nil, unix.NLMSG_HDRLEN+4)
		msg = binary.NativeEndian.AppendUint16(msg, unix.NFNL_SUBSYS_CTNETLINK<<8|deleteConntrack)
		msg = binary.NativeEndian.AppendUint16(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
		msg = append(msg, make([]byte, 8)...)                      // sequence, port
		msg = append(msg, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0) // nfgenmsg
		if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		answer := make([]byte, 4096)
		n, _, err := unix.Recvfrom(fd, answer, 0)
		if err != nil {
			return err
		}
		if n < unix.NLMSG_HDRLEN+4 {
			return errors.New("ctnetlink: an answer that is none")
		}
		if code := int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:])); code != 0 {
			return fmt.Errorf("forget connections: %w", unix.Errno(-code))
		}
		return nil
	})
}
