package daemon

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/exchange"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// formerKey returns the key that the peer had before its last change of keys, while it is
// taken for a repair; zero: none is.
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
				err = gw.talkOfKeys(ctx, c, rotation.State.TellRepair, func(r *rotating, m rotation.Message) {
					r.answer = &rotation.Message{Ready: m.Ready, Refused: m.Refused}
				})
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
	calls := func(c net.Conn) bool {
		return isFrom(c, peer) && gw.wantsPeer() && gw.down() && gw.formerKey() != netstate.Key{}
	}
	talk := func(ctx context.Context, c net.Conn) error {
		return gw.talkOfKeys(ctx, c, func(s rotation.State, _ *rotation.Order) rotation.Message { return s.TellFormer() }, func(r *rotating, m rotation.Message) {
			r.byFormer = &rotation.Message{Offer: m.Offer, Ended: m.Ended}
		})
	}
	once := newOnce(gw.log)
	for ctx.Err() == nil {
		err := gw.takeCalls(ctx, netip.AddrPortFrom(own.Addr(), desired.ExchangePort), calls, talk)
		if !errors.Is(err, unix.EADDRNOTAVAIL) { // there is no such address most of the time
			once.report("listen to a peer with its key of before", err)
		}
		pause(ctx, tellAgain)
	}
	return nil
}

// talkOfKeys is one exchange about keys and nothing else: who has a former key is told
// nothing of this cluster. It ends the connection.
func (gw *gateway) talkOfKeys(ctx context.Context, c net.Conn, tell func(rotation.State, *rotation.Order) rotation.Message, hear func(*rotating, rotation.Message)) error {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err := c.SetDeadline(time.Now().Add(tellTime)); err != nil {
		return err
	}
	r := gw.rotating
	m, err := exchange.Meet(c, exchange.Message{Version: exchange.Version, Program: repairProgram, Keys: r.tellBy(tell)})
	if err != nil || m.Keys == nil {
		return err
	}
	r.mu.Lock()
	hear(r, *m.Keys)
	r.mu.Unlock()
	notify(r.came)
	return nil
}

// repairProgram stands for the version of the program, which who has a former key is not told.
const repairProgram = "repair"
