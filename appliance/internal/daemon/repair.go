package daemon

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/exchange"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// formerKey returns the key that is known for the repair of the peer only; zero: there is none.
func (gw *gateway) formerKey() netstate.Key {
	if gw.rotating == nil {
		return netstate.Key{}
	}
	gw.rotating.mu.Lock()
	defer gw.rotating.mu.Unlock()
	return gw.rotating.former
}

// rehandshakeFormer has WireGuard begin anew with the former key of the peer, too. What has
// that key would not learn of the port that this gateway has changed, nor be heard if its
// clock was put back.
func (gw *gateway) rehandshakeFormer(endpoint netip.AddrPort) {
	key := gw.formerKey()
	if key == (netstate.Key{}) {
		return
	}
	if err := gw.ns.Rehandshake(desired.TunnelInterface, key, endpoint, false); err != nil {
		gw.log.Info("no new handshake with the peer's key of before", "err", err)
		notify(gw.repair)
	}
}

// repairs reports whether the peer knows this gateway by its former key only.
func (r *rotating) repairs() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state.Repairs(r.secret.Order)
}

// runRepair offers new keys by the address for repairs while the peer takes nothing else,
// until ctx is done.
func (gw *gateway) runRepair(ctx context.Context) error {
	once := newOnce(gw.log)
	_, peer := desired.ControlAddresses(gw.cfg.Mode)
	for ctx.Err() == nil {
		if gw.rotating.repairs() {
			c, err := gw.dialFromGateway(ctx, netip.AddrPortFrom(peer, desired.ExchangePort))
			if err == nil {
				err = gw.talkOfKeys(ctx, c)
			}
			once.report("repair", err)
		}
		pause(ctx, tellAgain)
	}
	return nil
}

// listenToFormer takes part in repairs of the peer, until ctx is done.
func (gw *gateway) listenToFormer(ctx context.Context) error {
	own, peer := desired.ControlAddresses(gw.cfg.Mode)
	calls := func(c net.Conn) bool { return isFrom(c, peer) && gw.wantsPeer() }
	for ctx.Err() == nil {
		// There is no such address most of the time.
		_ = gw.takeCalls(ctx, netip.AddrPortFrom(own.Addr(), desired.ExchangePort), calls, gw.talkOfKeys)
		pause(ctx, tellAgain)
	}
	return nil
}

// talkOfKeys is one exchange about keys and nothing else: who has a former key of the peer
// is told nothing of this cluster. It ends the connection.
func (gw *gateway) talkOfKeys(ctx context.Context, c net.Conn) error {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err := c.SetDeadline(time.Now().Add(tellTime)); err != nil {
		return err
	}
	m, err := exchange.Meet(c, exchange.Message{Version: exchange.Version, Program: gw.exchange.says().Program, Keys: gw.rotating.tell()})
	if err != nil || m.Keys == nil {
		return err
	}
	if gw.rotating.repairs() {
		gw.rotating.hear(*m.Keys)
	} else {
		// That a rotation was committed, or that the peer is ready, is for those to say
		// who have its key.
		gw.rotating.hear(rotation.Message{Offer: m.Keys.Offer, Ended: m.Keys.Ended})
	}
	return nil
}
