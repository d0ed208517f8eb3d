package daemon

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A Handover is the Secret by which a gateway takes part in an invitation.
type Handover interface {
	// Start runs the informer until ctx is done.
	Start(ctx context.Context) error
	// Changed yields a value whenever Read may return something new.
	Changed() <-chan struct{}
	// Read returns what is known; the zero value: there is no invitation.
	Read(ctx context.Context) (invitation.Handover, error)
	// Write writes over the version that Read returned last, or fails.
	Write(ctx context.Context, h invitation.Handover) error
}

const (
	// replyTime is how long a gateway that has invited waits for the controller before it
	// tells its peer to ask again.
	replyTime = 10 * time.Second
	// exchangeTime is the longest time of one exchange.
	exchangeTime = 30 * time.Second
	// dialTime is how long the other gateway may take to be there. WireGuard begins a
	// handshake again after 5 s (REKEY_TIMEOUT).
	dialTime = 6 * time.Second
	// askAgain is the time between two exchanges.
	askAgain = time.Second
	// confirmTime is how long who has an accepted reply tries to say so.
	confirmTime = 30 * time.Second
)

// A handover is what the gateway does for an invitation.
type handover struct {
	api     Handover
	arrived chan struct{} // yields when what the API server says has changed, and after a pass

	mu    sync.Mutex
	known invitation.Handover
	place int // which of the addresses of a server is dialled
}

func newHandover(api Handover) *handover {
	return &handover{api: api, arrived: make(chan struct{}, 1)}
}

// now returns what is known.
func (h *handover) now() invitation.Handover {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.known
}

// runHandover takes part in invitations until ctx is done.
func (gw *gateway) runHandover(ctx context.Context, g *group) error {
	h := gw.handover
	g.run("handover informer", func() error { return h.api.Start(ctx) })
	if gw.cfg.Mode == cluster.Client {
		g.run("handover", func() error { return gw.answer(ctx) })
	} else {
		g.run("handover", func() error { return gw.listenForAnswers(ctx) })
	}
	once := newOnce(gw.log)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-h.api.Changed():
		}
		known, err := h.api.Read(ctx)
		once.report("handover", err)
		if err != nil {
			continue
		}
		if r := known.Reply; r != nil && r.PresharedKey != nil {
			gw.keys.learn(*r.PresharedKey) // the volume has it later
		}
		h.mu.Lock()
		h.known = known
		h.mu.Unlock()
		notify(gw.repair)
		notify(h.arrived)
	}
}

// handOver adds the temporary tunnel to what a pass works with, if there is one.
func (gw *gateway) handOver(in *desired.GatewayInput) {
	if gw.handover == nil {
		return
	}
	offer := gw.handover.now().Offer
	if offer == nil || (gw.cfg.Mode == cluster.Client) != (offer.PrivateKey != nil) {
		gw.keys.lend(nil)
		return
	}
	in.Handover = &desired.Handover{Key: netstate.Key(offer.Key)}
	gw.keys.lend(offer.PrivateKey)
	if gw.cfg.Mode == cluster.Client {
		in.PublicKey, _ = gw.keys.publicKey()
		gw.handover.mu.Lock()
		in.PeerEndpoint = gw.resolvers[gw.handover.place%len(gw.resolvers)].endpoint()
		gw.handover.mu.Unlock()
	}
}

// inTemporaryTunnel reports whether the last pass has made one.
func (gw *gateway) inTemporaryTunnel() bool {
	gw.mu.Lock()
	defer gw.mu.Unlock()
	return gw.temporary
}

// listenForAnswers takes answers by the temporary tunnel for as long as there is one.
func (gw *gateway) listenForAnswers(ctx context.Context) error {
	own, _ := desired.TunnelAddresses(gw.cfg.Mode)
	once := newOnce(gw.log)
	for {
		wait := time.Hour
		if gw.handover.now().Offer != nil && gw.inTemporaryTunnel() {
			wait = askAgain
			once.report("listen for answers to the invitation", gw.takeAnswers(ctx, netip.AddrPortFrom(own.Addr(), desired.HandoverPort)))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-gw.handover.arrived:
		case <-time.After(wait):
		}
	}
}

// takeAnswers listens until there is no temporary tunnel any more. Answers are taken one at a
// time and slowly: there is one peer, and each other answer is written to the API server.
func (gw *gateway) takeAnswers(parent context.Context, at netip.AddrPort) error {
	ctx, cancel := context.WithCancel(parent)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		defer cancel()
		tick := time.NewTicker(askAgain)
		defer tick.Stop()
		for gw.handover.now().Offer != nil {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return gw.takeCalls(ctx, at, func(net.Conn) bool { return true }, func(_ context.Context, c net.Conn) error {
		defer c.Close()
		// The tunnel may end while the answer that ends it is being confirmed.
		if err := gw.takeAnswer(parent, c); err != nil {
			return fmt.Errorf("an answer to the invitation was not taken: %w", err)
		}
		return nil
	})
}

// listenInTunnel listens on TCP, and on no other protocol that would look the same: the
// firewall opens TCP.
func (gw *gateway) listenInTunnel(ctx context.Context, at netip.AddrPort) (l net.Listener, err error) {
	err = gw.ns.Do(func() (err error) {
		var cfg net.ListenConfig
		cfg.SetMultipathTCP(false)
		l, err = cfg.Listen(ctx, "tcp", at.String())
		return err
	})
	return l, err
}

// dialInTunnel dials a TCP port of the gateway at the other end.
func (gw *gateway) dialInTunnel(ctx context.Context, port uint16) (net.Conn, error) {
	_, peer := desired.TunnelAddresses(gw.cfg.Mode)
	return gw.dialFromGateway(ctx, netip.AddrPortFrom(peer, port))
}

// dialFromGateway dials a TCP port out of the network namespace that has the tunnel.
func (gw *gateway) dialFromGateway(ctx context.Context, to netip.AddrPort) (c net.Conn, err error) {
	err = gw.ns.Do(func() (err error) {
		d := net.Dialer{Timeout: dialTime}
		d.SetMultipathTCP(false)
		c, err = d.DialContext(ctx, "tcp", to.String())
		return err
	})
	return c, err
}

// takeAnswer hands an answer to the controller, and its reply to the peer.
func (gw *gateway) takeAnswer(ctx context.Context, c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(exchangeTime)); err != nil {
		return err
	}
	a, err := invitation.Read[invitation.Answer](c)
	if err != nil {
		return err
	}
	offer := gw.handover.now().Offer
	if offer == nil {
		return errors.New("there is no invitation any more")
	}
	reply, err := gw.askController(ctx, a)
	if err != nil {
		return err
	}
	if reply == nil {
		reply = &invitation.Reply{ID: a.ID, Verdict: invitation.Delayed, Reason: fmt.Sprintf("its gateway answers, but its controller has not within %v: ask its administrator whether it runs", replyTime)}
	}
	b, err := invitation.Encode(*reply)
	if err != nil {
		return err
	}
	if _, err := c.Write(b); err != nil {
		return err
	}
	if reply.Verdict != invitation.Accepted {
		return nil
	}
	receipt, err := invitation.Read[invitation.Receipt](c)
	if err != nil {
		return err
	}
	if receipt.ID != a.ID {
		return errors.New("a receipt of another invitation")
	}
	h, err := gw.handover.api.Read(ctx)
	if err != nil {
		return err
	}
	if h.Answer == nil || !h.Answer.Equal(a) {
		return errors.New("there is another answer by now")
	}
	h.Delivered = true
	if err := gw.handover.api.Write(ctx, h); err != nil {
		return err // without the receipt the peer comes again
	}
	b, err = invitation.Encode(receipt)
	if err == nil {
		_, err = c.Write(b)
	}
	return err
}

// askController writes an answer for the controller, unless it has this one already, and
// waits for the reply to it; nil: there is none yet.
func (gw *gateway) askController(ctx context.Context, a invitation.Answer) (*invitation.Reply, error) {
	ctx, cancel := context.WithTimeout(ctx, replyTime)
	defer cancel()
	tick := time.NewTicker(askAgain / 5)
	defer tick.Stop()
	for {
		h, err := gw.handover.api.Read(ctx)
		if err != nil {
			return nil, err
		}
		switch {
		case h.Offer == nil:
			return nil, errors.New("there is no invitation any more")
		case h.Answer != nil && h.Answer.Equal(a) && h.Reply != nil:
			return h.Reply, nil
		case h.Answer == nil || !h.Answer.Equal(a):
			// A conflict: what is read next is newer.
			if err := gw.handover.api.Write(ctx, invitation.Handover{Offer: h.Offer, Answer: &a}); err != nil {
				gw.log.Debug("write an answer", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil, nil
		case <-tick.C:
		}
	}
}

// answer hands in what this cluster answers to an invitation, until it is accepted or
// refused.
func (gw *gateway) answer(ctx context.Context) error {
	once := newOnce(gw.log)
	var accepted time.Time // when there was an accepted reply
	for {
		h := gw.handover.now()
		wait := askAgain
		switch {
		case !gw.inTemporaryTunnel() || h.Offer == nil || h.Answer == nil || h.Delivered || h.Reply != nil && h.Reply.Verdict == invitation.Refused:
			accepted, wait = time.Time{}, time.Hour
		default:
			if accepted.IsZero() && h.Reply != nil && h.Reply.Verdict == invitation.Accepted {
				accepted = time.Now()
			}
			err := gw.handIn(ctx, h)
			once.report("hand in the answer to the invitation", err)
			if err != nil && !accepted.IsZero() && time.Since(accepted) > confirmTime {
				// The other side took the tunnel away, so it knows.
				h.Delivered = true
				once.report("tell the controller of the reply", gw.handover.api.Write(ctx, h))
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-gw.handover.arrived:
			if wait > askAgain {
				continue
			}
			pause(ctx, askAgain)
		case <-time.After(wait):
		}
	}
}

// handIn makes one exchange.
func (gw *gateway) handIn(ctx context.Context, h invitation.Handover) error {
	c, err := gw.dialInTunnel(ctx, desired.HandoverPort)
	if err != nil {
		gw.handover.mu.Lock()
		gw.handover.place++ // a server may be at several places
		gw.handover.mu.Unlock()
		notify(gw.repair)
		return fmt.Errorf("nobody answers at %v by the temporary tunnel: the invitation may be used, revoked or expired, or UDP does not reach the other side: %w", gw.cfg.EndpointHosts, err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(exchangeTime)); err != nil {
		return err
	}
	b, err := invitation.Encode(*h.Answer)
	if err != nil {
		return err
	}
	if _, err := c.Write(b); err != nil {
		return err
	}
	reply, err := invitation.Read[invitation.Reply](c)
	if err != nil {
		return err
	}
	if reply.ID != h.Answer.ID {
		return errors.New("the reply is to another invitation")
	}
	if h.Reply == nil || !sameReply(*h.Reply, reply) {
		h.Reply = &reply
		if err := gw.handover.api.Write(ctx, h); err != nil {
			return err
		}
	}
	if reply.Verdict != invitation.Accepted {
		return nil
	}
	if b, err = invitation.Encode(invitation.Receipt{ID: reply.ID, Received: true}); err != nil {
		return err
	}
	if _, err := c.Write(b); err != nil {
		return err
	}
	// The gateway that has invited sends the receipt back once it has noted it. Before that this
	// one must not go on: it would take away the tunnel by which the other still waits.
	if _, err := invitation.Read[invitation.Receipt](c); err != nil {
		return fmt.Errorf("the gateway that has invited has not confirmed the receipt of its reply: %w", err)
	}
	gw.await(ctx, reply)
	h.Reply, h.Delivered = &reply, true
	return gw.handover.api.Write(ctx, h)
}

// await waits until the informer knows of a reply that was written: over an older version
// nothing more can be written.
func (gw *gateway) await(ctx context.Context, reply invitation.Reply) {
	ctx, cancel := context.WithTimeout(ctx, replyTime)
	defer cancel()
	for ctx.Err() == nil {
		if h, err := gw.handover.api.Read(ctx); err == nil && h.Reply != nil && sameReply(*h.Reply, reply) {
			return
		}
		pause(ctx, askAgain/5)
	}
}

func sameReply(a, b invitation.Reply) bool {
	if (a.PresharedKey == nil) != (b.PresharedKey == nil) {
		return false
	}
	if a.PresharedKey != nil && subtle.ConstantTimeCompare(a.PresharedKey[:], b.PresharedKey[:]) != 1 {
		return false
	}
	return a.ID == b.ID && a.Verdict == b.Verdict && a.Reason == b.Reason
}
