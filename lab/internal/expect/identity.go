package expect

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// isNamed tells whether a server is what an operand names. An address proves
// nothing: clusters with the same networks have the same addresses. An operand
// whose packets are those of many, or of nobody, names no server.
func isNamed(s prober.Server, o operand.Operand) bool {
	switch o.Kind {
	case operand.Pod:
		return s.Cluster == o.Cluster && s.Pod == o.Name
	case operand.Node, operand.Daemon:
		return s.Cluster == o.Cluster && s.HostNetwork && s.Node == operand.NodeName(o.Node)
	case operand.Outside:
		return s.Cluster == "" && s.Host == o.Name
	case operand.External:
		return isNamed(s, *o.Inner)
	}
	return false
}

// hasServer tells whether the lab may have a server that is what an operand names.
func hasServer(o operand.Operand) bool {
	switch o.Kind {
	case operand.Pod, operand.Node, operand.Daemon, operand.GatewayNode, operand.Outside:
		return true
	case operand.External:
		return hasServer(*o.Inner)
	}
	return false
}

// A verdict says whether whom a probe was meant for has answered it.
type verdict struct {
	impostor string // that somebody else answered, and who; empty: the right one did
	note     string // what could not be found out
}

// Impostor says that somebody answered a probe instead of whom it was meant for,
// and who: "rome/web answered (10.0.1.4)"; empty: the right one did. The probe
// must have been answered.
//
// A server names itself in its answer. An echo is answered by a kernel, which
// has no name, so captures must tell: the host that sent the reply first is the
// one that made it. Where nobody captures, a datagram to the same address is
// answered by a server instead of the kernel, if there is one.
func (row *Row) Impostor(ctx context.Context, p Probe) (string, error) {
	v, err := row.judge(ctx, p)
	return v.impostor, err
}

func (row *Row) judge(ctx context.Context, p Probe) (verdict, error) {
	to, err := row.Directory.Settle(ctx, p.To)
	if _, is := ofProduct(err); is {
		return verdict{impostor: answered(p.Result.Server.String(), p) + ", and " + err.Error()}, nil
	} else if err != nil {
		return verdict{}, err
	}
	if p.Proto == "icmp" {
		return row.judgeEcho(ctx, p, to)
	}
	if !isNamed(p.Result.Server, to) {
		return verdict{impostor: answered(p.Result.Server.String(), p)}, nil
	}
	former, err := row.Directory.former(ctx, p.Result.Server)
	if err != nil || !former {
		return verdict{}, err
	}
	return verdict{impostor: answered(fmt.Sprintf("a pod %s that is no more", p.Result.Server), p)}, nil
}

// answered says who answered a probe, with the address that the server has.
func answered(who string, p Probe) string {
	if by := p.Result.By.Addr(); by.IsValid() {
		return fmt.Sprintf("%s answered (%s)", who, by)
	}
	return who + " answered"
}

// captureLag is how long a packet may take from an interface to those who ask
// for it, on a machine that has other things to do.
const captureLag = 500 * time.Millisecond

// judgeEcho finds out who answered an echo. to is settled.
func (row *Row) judgeEcho(ctx context.Context, p Probe, to operand.Operand) (verdict, error) {
	want := to.HostName(row.Topology)
	for deadline := time.Now().Add(captureLag); ; {
		seen, err := row.sightings(ctx, p)
		if errors.Is(err, world.ErrNoCaptures) {
			return row.judgeByDatagram(ctx, p, to)
		}
		if err != nil {
			return verdict{}, err
		}
		// Captures are read one after the other, so what is seen first now may
		// not have been the first.
		got := echoedBy(seen)
		switch {
		case got == want && got != "":
			return verdict{}, nil
		case time.Now().Before(deadline):
			timer := time.NewTimer(captureLag / 10)
			select {
			case <-ctx.Done():
				timer.Stop()
				return verdict{}, ctx.Err()
			case <-timer.C:
			}
		case got == "":
			return verdict{impostor: "an answer came, and none of the captures shows from which host"}, nil
		default:
			return verdict{impostor: got + " answered"}, nil
		}
	}
}

// echoedBy is the host that made the first echo reply: all hosts have one clock.
func echoedBy(seen []world.Sighting) string {
	host, first := "", time.Time{}
	for _, s := range seen {
		if s.Marker == string(prober.MarkReply) && (host == "" || s.Time.Before(first)) {
			host, first = s.Host, s.Time
		}
	}
	return host
}

// judgeByDatagram asks the server at the address that answered an echo for its
// name. to is settled.
func (row *Row) judgeByDatagram(ctx context.Context, p Probe, to operand.Operand) (verdict, error) {
	unknown := verdict{note: fmt.Sprintf("who answered the echo to %s can't be told: nobody captures packets here, and nothing listens there", p.Dst)}
	if !hasServer(to) {
		return unknown, nil
	}
	sent := len(row.Probes)
	beside, err := row.SendBy(ctx, p.From, p.Dst, p.To, "udp", p.Port)
	row.Probes = row.Probes[:sent] // no step is about this one
	switch {
	case err != nil:
		return verdict{}, err
	case beside.Result.OK:
		return row.judge(ctx, beside)
	case beside.Result.Error == prober.ErrorICMPPort && (to.Kind == operand.Node || to.Kind == operand.Daemon):
		return unknown, nil // a node without a server in its network
	}
	return verdict{impostor: "nobody that has a name answered: a datagram beside the echo had " + describeFailure(beside)}, nil
}
