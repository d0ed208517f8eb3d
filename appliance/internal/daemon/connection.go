package daemon

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/probe"
)

// ConnectionStatus is Connection.status.
type ConnectionStatus struct {
	Value     string // Connected, Connecting, Error
	Latency   string // text, N/A for none
	At        time.Time
	Connected Condition // why it is so
	// Peer is what the peer tells of its cluster, and nil before it has told anything. Tells
	// and Networks are the conditions PeerTells and NetworksMatch; without a Type: there
	// is nothing to say yet.
	Peer            *PeerStatus
	Tells, Networks Condition
	Rotation        RotationStatus
}

// RotationStatus is Connection.status.rotation; the zero value: there is none.
type RotationStatus struct {
	ID      string
	ByPeer  bool
	Phase   string
	Message string
	Silence time.Duration // 0: not known
}

// Conditions are those that there are.
func (s ConnectionStatus) Conditions() []Condition {
	return slices.DeleteFunc([]Condition{s.Connected, s.Tells, s.Networks}, func(c Condition) bool { return c.Type == "" })
}

// sessionTime is how long WireGuard uses the keys of a handshake
// (REJECT_AFTER_TIME, §6.1 of the paper).
const sessionTime = 180 * time.Second

// tunnelFacts are what says why a tunnel works or not.
type tunnelFacts struct {
	state               probe.State
	mode                string // cluster.Server or cluster.Client
	remoteID, namespace string
	wanted              bool          // the objects ask for a peer: its key is known
	temporary           bool          // the tunnel is that of an invitation
	blocked             string        // the sentence of what cuts the peer off; empty: nothing does
	problem             string        // of the last pass; empty: none
	peer                bool          // WireGuard has one
	places              string        // where a client dials, as it is written
	resolved            bool          // one of the places has an address
	handshake           time.Duration // since the last one; negative: there was none
}

// connected returns the condition Connected of a Connection. Its message has nothing that
// changes by itself, so that it is written once.
func (f tunnelFacts) connected() Condition {
	no := func(reason, format string, args ...any) Condition {
		return Condition{v1beta1.ConditionConnected, reason, fmt.Sprintf(format, args...), false}
	}
	client := f.mode == cluster.Client
	switch {
	case f.blocked != "" && f.peer:
		return no("NotApplied", "WireGuard still has the peer, although %s: it is removed in the next seconds", f.blocked)
	case f.blocked != "":
		return no(v1beta1.ReasonBlocked, "%s", f.blocked)
	case f.state == probe.Connected:
		return Condition{v1beta1.ConditionConnected, "Connected", "the gateway of the peer answers through the tunnel", true}
	case f.temporary && client:
		return no("Invitation", "this gateway has a temporary tunnel, by which it answers the invitation of cluster %s: the tunnel for traffic comes after that", f.remoteID)
	case f.temporary:
		return no("Invitation", "an invitation is open, and until it ends this gateway has a temporary tunnel only, for the answer of cluster %[1]s: isthmusctl peer invite %[1]s --revoke ends it now", f.remoteID)
	case !f.wanted:
		return no("NoPublicKey", "this cluster has no usable public key of the peer's gateway: create a PublicKey in namespace %s with the label %s=%s, or see the condition of the one that is there",
			f.namespace, v1beta1.LabelRemoteClusterID, f.remoteID)
	case !f.peer && f.problem != "":
		return no("NotApplied", "WireGuard could not be set up: %s", f.problem)
	case !f.peer:
		return no("NotApplied", "WireGuard has no peer yet, or somebody has removed it: it is set up in the next seconds")
	case client && !f.resolved:
		return no("NoEndpoint", "no address is known of the peer's endpoint, %s: see the log of this gateway for the answer of the DNS server", f.places)
	case f.handshake > sessionTime:
		return no("SessionExpired", "the gateway of the peer was there, and WireGuard has not heard it for three minutes: see whether it runs, and whether UDP still reaches it")
	case f.state == probe.Connecting && f.handshake < 0 && client:
		return no("Connecting", "this gateway dials the peer at %s", f.places)
	case f.state == probe.Connecting && f.handshake < 0:
		return no("Connecting", "this gateway waits for the peer's gateway, which dials")
	case f.state == probe.Connecting:
		return no("Connecting", "WireGuard has a session with the peer, whose gateway has not answered a probe yet")
	case f.handshake < 0 && client:
		return no("NoHandshake", "%s does not answer WireGuard: see whether UDP reaches it, whether it is the gateway of cluster %s, and whether both clusters have each other's current public key", f.places, f.remoteID)
	case f.handshake < 0:
		return no("NoHandshake", "nobody has dialled this gateway with the key of cluster %s: see whether the peer's gateway dials the endpoint of this one, whether UDP reaches it, and whether both clusters have each other's current public key", f.remoteID)
	}
	return no("NoAnswer", "WireGuard has had a session with the peer in the last three minutes, but the peer's gateway does not answer: it may have ended, or what goes through the tunnel is lost")
}

// connectionStatus returns what there is to say of the connection now. It is false before
// the first pass, which says what is wanted.
func (gw *gateway) connectionStatus() (ConnectionStatus, bool) {
	st := gw.prober.Status()
	known, leaving := gw.endpoints()
	f := tunnelFacts{
		state: st.State, mode: gw.cfg.Mode, remoteID: gw.cfg.RemoteID, namespace: gw.cfg.Namespace,
		places: places(gw.cfg.EndpointHosts, gw.cfg.EndpointPort), resolved: len(known)+len(leaving) > 0, handshake: -1,
	}
	if p, ok := gw.shown(); ok {
		f.peer = true
		if !p.LastHandshake.IsZero() {
			f.handshake = max(0, time.Since(p.LastHandshake))
		}
	}
	heard := gw.exchange.show(time.Now())
	gw.mu.Lock()
	defer gw.mu.Unlock()
	f.wanted, f.temporary, f.blocked = gw.wanted, gw.temporary, gw.blocked
	if !gw.ready.OK {
		f.problem = gw.ready.Message
	}
	value := st.State
	if f.blocked != "" {
		value = probe.Error // the last answer came before the block
	}
	return ConnectionStatus{
		Value: string(value), Latency: probe.LatencyText(st.Latency), At: time.Now(), Connected: f.connected(),
		Peer: heard.peer, Tells: heard.tells(), Networks: networksMatch(heard.peer, gw.configuration), Rotation: gw.rotationStatus(),
	}, gw.computed
}

// blockedBy says what cuts the peer off; empty: nothing does.
func blockedBy(in desired.GatewayInput) string {
	c, blocked := in.Blocked()
	if !blocked {
		if k, blocked := in.BlockedKey(); blocked {
			return "the peer has " + k.String()
		}
		return ""
	}
	return fmt.Sprintf("this cluster has blocked the peer by the annotation %s of %s (%s): isthmusctl peer unblock %s ends that",
		v1beta1.AnnotationBlocked, c.Ref, cmp.Or(c.Block, "without a reason"), c.RemoteID)
}

// places writes down where a client dials.
func places(hosts []string, port uint16) string {
	out := make([]string, len(hosts))
	for i, h := range hosts {
		out[i] = net.JoinHostPort(strings.Trim(h, "[]"), strconv.Itoa(int(port)))
	}
	return strings.Join(out, " or ")
}

// tell has the connection written: always, or only if there is something else to say than how
// long an answer takes.
func (gw *gateway) tell(always bool) {
	now, known := gw.connectionStatus()
	was, told := gw.connection.latest()
	if known && (always || !told || was.Value != now.Value || was.Connected != now.Connected ||
		was.Peer != now.Peer || was.Tells != now.Tells || was.Networks != now.Networks || was.Rotation != now.Rotation) {
		gw.connection.set(now)
	}
}
