package kind

import (
	"cmp"
	"errors"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// CannotRun says why a row of a scenario can't run in this world, or nothing:
// what its topology has, or what one of its steps does, names or expects.
// captures tells whether packets can be captured; see CanCapture.
func CannotRun(s *scenario.Scenario, r scenario.Row, captures bool) (lack scenario.Lack, ok bool) {
	if s.World != scenario.WorldAuto {
		return scenario.Lack{What: "the scenario asks for the " + s.World + " world"}, true
	}
	if slices.Contains(r.Requires, world.PublicProgram) {
		return scenario.Lack{What: "the nodes of the world " + World + " have no images of the public system"}, true
	}
	var refused *Refused
	if errors.As(Refuse(s.Topology), &refused) {
		return scenario.Lack{What: "of topology " + refused.Topology + ", " + strings.Join(refused.Problems, "; ")}, true
	}
	n := needed{topology: s.Topology, captures: captures, byICMP: map[string]bool{}}
	return s.FirstLack(r, n.action, n.expectation)
}

// CannotSabotage says why a sabotage can't be made in this world, or nothing.
func CannotSabotage(t *topology.Topology, s scenario.Sabotage) (lack scenario.Lack, ok bool) {
	if s.Plant == nil {
		return scenario.Lack{}, false
	}
	n := needed{topology: t}
	why := cmp.Or(n.operand(s.Plant.On.Operand), n.commands(s.Plant.Run, s.Plant.Undo))
	return scenario.Lack{What: why, At: s.String()}, why != ""
}

// needed walks through a row and says what of it this world has not.
type needed struct {
	topology *topology.Topology
	captures bool
	byICMP   map[string]bool // ends that an echo has reached last, by their host's name
}

const (
	noCapture  = "packets are captured in the world " + World + " by root only, where the engine's containers are processes of this machine"
	noRouter   = "all nodes of the world " + World + " are on one network, without routers"
	noBalancer = "nobody gives Services of the world " + World + " an address of a load balancer"
)

func (n *needed) action(a scenario.Action) string {
	switch a := a.(type) {
	case *scenario.Apply:
		return n.text(a.Objects)
	case *scenario.Rewrite:
		return n.text(a.Versions)
	case *scenario.Exec:
		return cmp.Or(n.operand(a.On.Operand), n.commands(a.Run, a.Undo))
	case *scenario.Flow:
		return cmp.Or(n.operand(a.From.Operand), n.operand(a.To.Operand))
	case *scenario.Kill:
		return n.operand(a.Of.Operand)
	case *scenario.Kubectl:
		return cmp.Or(n.text(a.Run), n.text(a.Undo))
	case *scenario.Install, *scenario.Upgrade, *scenario.Uninstall, *scenario.Remember,
		*scenario.Delete, *scenario.NodeDrained, *scenario.GatewayMoves, *scenario.PodMoves, *scenario.Connect, *scenario.Disconnect:
		return ""
	case *scenario.Stop:
		return "probes of the world " + World + " go by the API server, which such a step takes away"
	case *scenario.NodeLeaves, *scenario.NodeLost, *scenario.NodeJoins:
		return "kind makes the nodes of a cluster at once, and for good"
	case *scenario.Impair:
		return noRouter
	case *scenario.NodeReboots:
		return "kind's library starts no node again"
	}
	return "the world " + World + " has no way to do that"
}

func (n *needed) expectation(e expect.Expectation) string {
	switch e := e.(type) {
	case *expect.Reach:
		end := e.To
		if e.AnsweredBy.Kind != "" {
			end = e.AnsweredBy
		}
		n.byICMP[end.HostName(n.topology)] = e.Proto == "icmp"
		return cmp.Or(n.operand(e.From.Operand), n.operand(e.To.Operand), n.operand(e.AnsweredBy.Operand))
	case *expect.Unreachable:
		return cmp.Or(n.operand(e.From.Operand), n.operand(e.To.Operand))
	case *expect.Source:
		if n.byICMP[e.SeenBy.HostName(n.topology)] && !n.captures {
			return "an echo's source is seen in captures only; " + noCapture
		}
		return cmp.Or(n.operand(e.SeenBy.Operand), n.operand(e.Is.Operand))
	case *expect.MTU:
		return cmp.Or(n.operand(e.From.Operand), n.operand(e.To.Operand))
	case *expect.Conntrack:
		return cmp.Or(n.operand(e.On.Operand), n.operand(e.SeenBy.Operand), n.operand(e.Mark.Operand))
	case *expect.Output:
		return cmp.Or(n.text(e.Contains), n.text(e.Lacks), n.text(e.Matches))
	case *expect.Kubectl, *expect.Event:
		return n.text(e.String())
	case *expect.Log:
		return n.operand(e.Of.Operand)
	case *expect.Flow, *expect.Gone, *expect.Same:
		return ""
	case *expect.Path:
		for _, v := range e.Via {
			if v.Kind == operand.Router { // this world has none, and paths leave them out
				continue
			}
			if why := n.operand(v.Operand); why != "" {
				return why
			}
		}
		return n.capture()
	case *expect.Never:
		if e.On.Kind == operand.WAN { // see Lab.between
			return n.capture()
		}
		return cmp.Or(n.operand(e.On.Operand), n.capture())
	case *expect.MSS:
		return n.capture()
	}
	return "the world " + World + " has no way to see that"
}

// capture says why no packets can be captured.
func (n *needed) capture() string {
	if n.captures {
		return ""
	}
	return noCapture
}

// operand says why an operand stands for nothing.
func (n *needed) operand(o operand.Operand) string {
	switch o.Kind {
	case operand.Router, operand.WAN:
		return noRouter
	case operand.Ingress:
		return noBalancer
	case operand.External:
		return n.operand(*o.Inner)
	}
	return ""
}

// text says which name in a text stands for nothing.
func (n *needed) text(text string) string {
	for _, o := range expect.Operands(text, n.topology) {
		if why := n.operand(o); why != "" {
			return o.String() + ": " + why
		}
	}
	return ""
}

// missing finds programs, as the first word of a command, that hosts of other
// worlds have, and containers have not.
var missing = regexp.MustCompile(`(?m)(?:^|[;|&({]|\$\()\s*(isthmus)\s`)

// commands says what shell commands need that nodes have not.
func (n *needed) commands(texts ...string) string {
	for _, t := range texts {
		if why := n.text(t); why != "" {
			return why
		}
		if m := missing.FindStringSubmatch(t); m != nil {
			return "nodes have no " + m[1]
		}
	}
	return ""
}
