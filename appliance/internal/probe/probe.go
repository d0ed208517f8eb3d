// Package probe says whether the tunnel to the peer works, by a datagram that
// goes through it and comes back (conncheck).
//
// Both gateways of a peering listen on the same UDP port and send each other
// small JSON objects; whoever gets a PING turns it into a PONG and sends it
// back. The format is that of the public system, so a gateway of ours and one
// of theirs understand each other. The messages are not authenticated beyond
// what WireGuard does: they only count when they come from the peer's address
// inside the tunnel, and a PONG only when it answers a PING that was sent.
//
// The package knows nothing of Connection objects; whoever writes them reads
// [Prober.Status].
package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Port is the UDP port of the protocol.
const Port = 12345

// Config is what a Prober needs. Peer is required.
type Config struct {
	// Peer is the address of the other gateway inside the tunnel.
	Peer netip.AddrPort
	// Listen is the address to listen on; the zero value is the port of Peer
	// on all addresses of both families.
	Listen netip.AddrPort
	// ClusterID is sent along and comes back; the public system puts the
	// ID of the remote cluster in it.
	ClusterID string
	// Interval is the time between probes (default 2 s). While one is missing
	// they are four times as many. The tunnel is in Error when nothing came
	// back for Interval × Threshold (default 5) from the first probe or the latest
	// answer on, in which as many probes left as Threshold says. Time in which this
	// process did not run is no silence.
	Interval  time.Duration
	Threshold int
	// RoundTrip is told how long each answer took; it must not block.
	// Optional.
	RoundTrip func(time.Duration)
	Logger    *slog.Logger // optional
}

func (c *Config) setDefaults() error {
	if !c.Peer.IsValid() || c.Peer.Port() == 0 {
		return fmt.Errorf("probe: Config.Peer %q is not an address with a port", c.Peer)
	}
	if c.Interval <= 0 {
		c.Interval = 2 * time.Second
	}
	if c.Threshold <= 0 {
		c.Threshold = 5
	}
	if c.RoundTrip == nil {
		c.RoundTrip = func(time.Duration) {}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// A Prober watches one tunnel.
type Prober struct {
	cfg     Config
	conn    *net.UDPConn
	changed chan struct{}
	late    chan struct{}

	mu      sync.Mutex
	track   *tracker
	mtu     int // that PINGs say
	peerMTU int // that the peer's say
}

// Open binds the socket, in the network namespace of the calling thread. The
// probing starts with [Prober.Run].
func Open(ctx context.Context, cfg Config) (*Prober, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	listen := fmt.Sprintf(":%d", cfg.Peer.Port()) // both families where the kernel has both
	if cfg.Listen.IsValid() {
		listen = cfg.Listen.String()
	}
	pc, err := new(net.ListenConfig).ListenPacket(ctx, "udp", listen)
	if err != nil {
		return nil, fmt.Errorf("listen for conncheck on udp %s: %w", listen, err)
	}
	return &Prober{
		cfg:     cfg,
		conn:    pc.(*net.UDPConn),
		changed: make(chan struct{}, 1),
		late:    make(chan struct{}, 1),
		track:   newTracker(cfg.Interval, cfg.Threshold),
	}, nil
}

// LocalAddr is where the Prober listens.
func (p *Prober) LocalAddr() netip.AddrPort {
	return p.conn.LocalAddr().(*net.UDPAddr).AddrPort()
}

// Changed yields a value after the State changed, or what the peer says of its MTU.
func (p *Prober) Changed() <-chan struct{} { return p.changed }

// Late yields values while a probe has not been answered for as long as
// [Prober.Hurry], or for two round trips where that is longer.
func (p *Prober) Late() <-chan struct{} { return p.late }

// Hurry is the time between probes while one is missing: a quarter of the
// Interval.
func (p *Prober) Hurry() time.Duration { return max(p.cfg.Interval/4, time.Millisecond) }

// Status is the reading now.
func (p *Prober) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := p.track.status(time.Now())
	st.PeerMTU = p.peerMTU
	return st
}

// SetMTU has the peer told what the longest packet is that the network below has
// room for in the tunnel: with the next probe, and at once when it is another one than
// before.
func (p *Prober) SetMTU(mtu int) {
	p.mu.Lock()
	news := mtu != p.mtu
	p.mtu = mtu
	p.mu.Unlock()
	if news {
		p.Probe()
	}
}

// Probe sends a probe at once, besides those that are due. Before Run it does nothing.
func (p *Prober) Probe() {
	p.mu.Lock()
	running := p.track.sent > 0
	p.mu.Unlock()
	if running {
		p.sendPing(true)
	}
}

// Run probes and answers until ctx is done, then closes the socket.
func (p *Prober) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() {
		<-ctx.Done()
		p.conn.Close()
	})
	wg.Go(func() { p.ping(ctx) })
	return p.read(ctx)
}

// ping sends the probes, and looks for silence four times between two.
func (p *Prober) ping(ctx context.Context) {
	send := time.NewTicker(p.cfg.Interval)
	defer send.Stop()
	look := time.NewTicker(p.Hurry())
	defer look.Stop()
	p.sendPing(false)
	for {
		select {
		case <-ctx.Done():
			return
		case <-send.C:
			p.sendPing(false)
		case <-look.C:
			if p.missing() {
				p.sendPing(true)
			}
		}
	}
}

// missing looks for silence, tells when there is some, and reports whether the
// next probe should hurry: a lost one and a dead tunnel look the same until
// then.
func (p *Prober) missing() (hurry bool) {
	now := time.Now()
	var late bool
	p.update(func(t *tracker) {
		t.check(now)
		// A probe that left with the last look is as old as this one, but for
		// what the timers are inexact.
		late = t.late(now, p.Hurry()*3/4)
		hurry = late && t.extras < maxExtras
	})
	if late {
		select {
		case p.late <- struct{}{}:
		default: // a value is waiting already
		}
	}
	return hurry
}

// sendPing sends one probe. That the tunnel isn't there yet, or has no
// endpoint, is what the probe is for: the probe is lost.
func (p *Prober) sendPing(hurry bool) {
	m := message{ClusterID: p.cfg.ClusterID, Type: typePing}
	p.update(func(t *tracker) { m.Time, m.MTU = t.send(time.Now(), hurry), p.mtu })
	b, err := m.encode()
	if err == nil {
		_, err = p.conn.WriteToUDPAddrPort(b, p.cfg.Peer)
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		p.cfg.Logger.Debug("conncheck: probe not sent", "peer", p.cfg.Peer, "err", err)
	}
}

// read answers PINGs and notes PONGs.
func (p *Prober) read(ctx context.Context) error {
	buf := make([]byte, maxMessage)
	for {
		n, from, err := p.conn.ReadFromUDPAddrPort(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("conncheck: %w", err)
		case err != nil: // an ICMP error about an earlier probe, say
			p.cfg.Logger.Debug("conncheck: read", "err", err)
			select { // an error that stays must not keep a core busy
			case <-ctx.Done():
			case <-time.After(p.cfg.Interval / 10):
			}
			continue
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if from.Addr() != p.cfg.Peer.Addr() {
			p.cfg.Logger.Debug("conncheck: message from a stranger ignored", "from", from)
			continue
		}
		if err := p.handle(buf[:n], from); err != nil {
			p.cfg.Logger.Debug("conncheck: message ignored", "from", from, "err", err)
		}
	}
}

func (p *Prober) handle(b []byte, from netip.AddrPort) error {
	m, err := decode(b)
	if err != nil {
		return err
	}
	if m.Type == typePong {
		var took time.Duration
		var counts bool
		p.update(func(t *tracker) { took, counts = t.receive(time.Now(), m.Time) })
		if counts {
			p.cfg.RoundTrip(took)
		}
		return nil
	}
	p.hear(m.MTU)
	reply, err := answer(b)
	if err != nil {
		return err
	}
	if _, err := p.conn.WriteToUDPAddrPort(reply, from); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	return nil
}

// hear notes what the peer says of its MTU.
func (p *Prober) hear(mtu int) {
	p.mu.Lock()
	before := p.peerMTU
	p.peerMTU = mtu
	p.mu.Unlock()
	if before == mtu {
		return
	}
	p.cfg.Logger.Info("the peer says what it has room for", "mtu", mtu, "was", before, "peer", p.cfg.Peer)
	p.tell()
}

// tell has Changed yield a value.
func (p *Prober) tell() {
	select {
	case p.changed <- struct{}{}:
	default: // a value is waiting already
	}
}

// update changes the tracker and tells when the State became another.
func (p *Prober) update(f func(*tracker)) {
	p.mu.Lock()
	before := p.track.state
	f(p.track)
	after := p.track.state
	p.mu.Unlock()
	if before == after {
		return
	}
	p.cfg.Logger.Info("connection "+string(after), "was", before, "peer", p.cfg.Peer)
	p.tell()
}
