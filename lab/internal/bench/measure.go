package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/lane"
	"github.com/isthmus-net/isthmus/lab/internal/load"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A World is what is needed of a lab; *world.Client is one.
type World interface {
	lane.World
	PauseCaptures(ctx context.Context) (resume func() error, err error)
}

// A Lane is where a path begins and ends.
type Lane struct {
	Path Path
	lane.Lane
}

// Config is how to measure. All is required but Progress.
type Config struct {
	World    World
	Lanes    []Lane        // one for each of Paths
	Pairs    int           // how often each path is measured
	Duration time.Duration // of one measurement
	Progress func(pair int, text string)
}

// measurements are what is measured on each path, one after the other.
func measurements() []load.Measurement {
	return []load.Measurement{
		{Kind: load.Throughput, Streams: 1}, {Kind: load.Throughput, Streams: 1, LongFirst: true}, {Kind: load.Throughput, Streams: 4},
		{Kind: load.Packets}, {Kind: load.Connections}, {Kind: load.Latency},
	}
}

// Time is what Measure takes at least.
func (c Config) Time() time.Duration {
	return time.Duration(c.Pairs*len(measurements())*len(c.Lanes)) * c.Duration
}

// Measure starts a server at the end of each path, and measures each thing on
// all paths in turn, with the lab's captures paused. The servers end with it.
func Measure(ctx context.Context, c Config) (s Samples, err error) {
	resume, err := c.World.PauseCaptures(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, resume()) }()
	for _, l := range c.Lanes {
		if l.Path == Tunnel {
			undo, failed := loop(ctx, c.World, l.Lane)
			if failed != nil {
				return nil, failed
			}
			defer func() { err = errors.Join(err, undo()) }()
		}
		stop, err := l.Serve(ctx, c.World)
		if err != nil {
			return nil, err
		}
		defer stop()
	}
	s = Samples{}
	for pair := range c.Pairs {
		for _, m := range measurements() {
			for _, l := range c.Lanes {
				if c.Progress != nil {
					c.Progress(pair+1, fmt.Sprintf("%s ×%d, %s", m.Kind, max(m.Streams, 1), l.Path))
				}
				m.Duration = c.Duration
				r, err := l.Measure(ctx, c.World, m)
				if err != nil {
					return nil, fmt.Errorf("pair %d, %s, %s: %w", pair+1, l.Path, l, err)
				}
				s.add(l.Path, r)
			}
		}
	}
	return s, nil
}

// run runs a command to its end in the network namespace of a target.
func run(ctx context.Context, w World, target string, argv ...string) ([]byte, error) {
	res, err := w.Exec(ctx, world.ExecRequest{Target: target, Host: true, Argv: argv})
	if err != nil {
		return nil, fmt.Errorf("%s on %s: %w", argv[0], target, err)
	}
	if res.Code != 0 {
		return nil, fmt.Errorf("%s on %s: exit code %d: %s", argv[0], target, res.Code, strings.TrimSpace(string(res.Stderr)))
	}
	return res.Stdout, nil
}

// A TunnelEnd is a gateway's end of the tunnel.
type TunnelEnd struct {
	Implementation string // of WireGuard, as topologies call them
	Addr           netip.Addr
}

// FindTunnelEnd looks at the tunnel's interface in a gateway. What it is made
// of is what counts, not what was asked for.
func FindTunnelEnd(ctx context.Context, w World, gateway string) (TunnelEnd, error) {
	out, err := run(ctx, w, gateway, "ip", "-details", "-json", "address", "show", "dev", networkingv1beta1.TunnelInterface)
	if err != nil {
		return TunnelEnd{}, err
	}
	end, err := parseTunnelEnd(out)
	if err != nil {
		return end, fmt.Errorf("%s of %s: %w", networkingv1beta1.TunnelInterface, gateway, err)
	}
	return end, nil
}

// parseTunnelEnd reads what ip(8) prints as JSON.
func parseTunnelEnd(out []byte) (end TunnelEnd, err error) {
	var links []struct {
		LinkInfo struct {
			Kind string `json:"info_kind"`
		} `json:"linkinfo"`
		AddrInfo []struct {
			Family string     `json:"family"`
			Local  netip.Addr `json:"local"`
		} `json:"addr_info"`
	}
	if err := json.Unmarshal(out, &links); err != nil {
		return end, fmt.Errorf("output of ip: %w", err)
	}
	for _, l := range links {
		switch l.LinkInfo.Kind {
		case "wireguard":
			end.Implementation = topology.ImplementationKernel
		case "tun":
			end.Implementation = topology.ImplementationUserspace
		case "":
			continue // with an old ip(8), an empty object for each other link
		default:
			return end, fmt.Errorf("it is of kind %q, neither wireguard nor tun", l.LinkInfo.Kind)
		}
		for _, a := range l.AddrInfo {
			if a.Family == "inet" {
				end.Addr = a.Local
			}
		}
	}
	if end.Implementation == "" || !end.Addr.IsValid() {
		return end, errors.New("there is no such interface with an IPv4 address")
	}
	return end, nil
}
