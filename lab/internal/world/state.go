package world

import (
	"context"
	"os/exec"
	"slices"
	"strings"
	"sync"
)

// stateCommands is what is asked on every host. Those whose program is not
// installed are left out.
var stateCommands = []string{
	"ip -d address",
	"ip rule",
	"ip route show table all",
	"ip -6 rule",
	"ip -6 route show table all",
	"ip neigh",
	"bridge fdb show",
	"nft list ruleset",
	"wg show",
	"conntrack -L",
}

// StateCommands is what explains the state of a host, a command line each.
func StateCommands() []string { return slices.Clone(stateCommands) }

// A namedNamespace is a host or a pod with a namespace of its own.
type namedNamespace struct {
	name string
	ns   *Namespace
}

func (a *agent) namespaces() []namedNamespace {
	all := a.registry.Pods()
	gateways := gatewaysByCluster(all)
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []namedNamespace
	if a.network != nil {
		for _, h := range a.network.all() {
			out = append(out, namedNamespace{h.name, h.ns})
		}
	}
	for _, p := range all {
		if ns := p.Own(); ns != nil {
			out = append(out, namedNamespace{podHost(p, gateways), &Namespace{File: ns}})
		}
	}
	return out
}

// state asks the tools on every host, two hosts at a time.
func (a *agent) state(ctx context.Context) []HostState {
	namespaces := a.namespaces()
	out := make([]HostState, len(namespaces))
	var wg sync.WaitGroup
	slots := make(chan struct{}, 2)
	for i, n := range namespaces {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			out[i] = hostState(ctx, n)
		})
	}
	wg.Wait()
	slices.SortFunc(out, func(a, b HostState) int { return strings.Compare(a.Host, b.Host) })
	return out
}

func hostState(ctx context.Context, n namedNamespace) HostState {
	s := HostState{Host: n.name}
	for _, command := range stateCommands {
		if ctx.Err() != nil {
			return s
		}
		argv := strings.Fields(command)
		if _, err := exec.LookPath(argv[0]); err != nil {
			continue
		}
		var out strings.Builder
		code, err := RunIn(ctx, n.ns, ExecRequest{Argv: argv}, Streams{Stdout: &out, Stderr: &out})
		switch {
		case err != nil:
			out.WriteString(err.Error())
		case code != 0 && argv[0] == "wg": // this kernel has no WireGuard
			continue
		}
		s.Sections = append(s.Sections, StateSection{Command: command, Output: out.String()})
	}
	return s
}
