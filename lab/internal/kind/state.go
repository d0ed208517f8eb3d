package kind

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// hosts are the nodes and gateways of a lab: where the appliance has state in a
// kernel.
func (l *Lab) hosts(ctx context.Context) ([]string, error) {
	var out []string
	for _, c := range l.record.Clusters {
		spec, _ := l.record.Spec.Cluster(c.Name)
		for _, n := range spec.Nodes {
			out = append(out, c.Name+"/"+n.Name)
		}
		all, err := l.PodStatus(ctx, c.Name)
		if err != nil {
			return nil, fmt.Errorf("cluster %s: %w", c.Name, err)
		}
		out = append(out, gateways(c.Name, all)...)
	}
	slices.Sort(out)
	return out, nil
}

// gateways are the names of a cluster's gateways that have a network of their
// own: those that operands have, since pods come and go.
func gateways(cluster string, all []world.PodStatus) []string {
	var peers []string
	for _, p := range all {
		peer := p.Labels[netv1beta1.LabelRemoteClusterID]
		if p.Labels[netv1beta1.LabelComponent] == netv1beta1.ComponentGateway && !p.HostNet && !slices.Contains(peers, peer) {
			peers = append(peers, peer)
		}
	}
	if len(peers) == 1 {
		return []string{cluster + "/" + world.GatewayHost}
	}
	for i := range peers {
		peers[i] = cluster + "/" + world.GatewayHost + "." + peers[i]
	}
	return peers
}

// answers are what commands printed on a host, in the commands' order.
type answers struct {
	host    string
	results []world.ExecResult
}

// ask runs commands on every host, one after the other on each. A command that
// ran is no error, whatever its exit code.
func (l *Lab) ask(ctx context.Context, commands []string) ([]answers, error) {
	hosts, err := l.hosts(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]answers, len(hosts))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(4) // each is a client of the engine
	for i, host := range hosts {
		g.Go(func() error {
			a := answers{host: host}
			for _, command := range commands {
				res, err := l.Exec(ctx, world.ExecRequest{Target: host, Host: true, Argv: strings.Fields(command)})
				if err != nil {
					return fmt.Errorf("%s on %s: %w", command, host, err)
				}
				a.results = append(a.results, res)
			}
			out[i] = a
			return nil
		})
	}
	return out, g.Wait()
}

// State is what ip, nft, wg and conntrack say on every node and gateway. What a
// command complains about is part of the state.
func (l *Lab) State(ctx context.Context) ([]world.HostState, error) {
	commands := world.StateCommands()
	all, err := l.ask(ctx, commands)
	if err != nil {
		return nil, err
	}
	out := make([]world.HostState, len(all))
	for i, a := range all {
		out[i].Host = a.host
		for j, res := range a.results {
			out[i].Sections = append(out[i].Sections, world.StateSection{Command: commands[j], Output: string(res.Stdout) + string(res.Stderr)})
		}
	}
	return out, nil
}

// Commands that list what only somebody's doing changes in a kernel.
const (
	listLinks     = "ip -o link"
	listAddresses = "ip -o address"
	listRules     = "ip rule"
	listRules6    = "ip -6 rule"
	listRoutes    = "ip -o route show table all"
	listRoutes6   = "ip -6 -o route show table all"
	listChains    = "nft list chains"
	listTables    = "nft list tables"
)

// Inventory is what only somebody's doing changes in the kernel of every node
// and gateway, as the tools print it. A tool that fails is an error: nothing
// would look the same before and after.
func (l *Lab) Inventory(ctx context.Context) ([]world.Inventory, error) {
	commands := []string{listLinks, listAddresses, listRules, listRules6, listRoutes, listRoutes6, listTables, listChains}
	all, err := l.ask(ctx, commands)
	if err != nil {
		return nil, err
	}
	out := make([]world.Inventory, len(all))
	for i, a := range all {
		out[i].Host = a.host
		for j, res := range a.results {
			if res.Code != 0 {
				return nil, fmt.Errorf("inventory of %s: %s: exit code %d: %s", a.host, commands[j], res.Code, strings.TrimSpace(string(res.Stderr)))
			}
			out[i].Lines = append(out[i].Lines, inventory(commands[j], string(res.Stdout))...)
		}
		slices.Sort(out[i].Lines)
	}
	return out, nil
}

// inventory makes lines that can be compared of what a command printed: without
// numbers that the kernel gives, times, and links of pods, whose names are
// random.
func inventory(command, output string) []string {
	if command == listChains {
		return chains(output)
	}
	var out []string
	for line := range strings.Lines(output) {
		f := strings.Fields(strings.ReplaceAll(line, `\`, " "))
		if len(f) < 2 || podLink(f) || slices.ContainsFunc(f, func(s string) bool { return strings.HasPrefix(s, "fe80:") }) {
			continue
		}
		switch command {
		case listLinks:
			name, _, _ := strings.Cut(strings.TrimSuffix(f[1], ":"), "@")
			f = []string{"link", name}
		case listAddresses:
			f = []string{"address", f[3], "dev", f[1]}
		case listRoutes, listRoutes6:
			f = append([]string{"route"}, withoutOption(f, "expires")...)
		}
		if !world.OfOthers(strings.Join(f, " ")) {
			out = append(out, strings.Join(f, " "))
		}
	}
	return out
}

// podLink tells whether a line is about the link of a pod.
func podLink(fields []string) bool {
	return slices.ContainsFunc(fields, func(s string) bool { return world.IsPodLink(s) })
}

// withoutOption takes an option with its value out of a route: what expires is
// a number that changes.
func withoutOption(fields []string, option string) []string {
	if i := slices.Index(fields, option); i >= 0 && i+1 < len(fields) {
		return slices.Delete(slices.Clone(fields), i, i+2)
	}
	return fields
}

// chains are the chains of nft's listing, each with its table.
func chains(output string) []string {
	var out []string
	table := ""
	for line := range strings.Lines(output) {
		f := strings.Fields(line)
		switch {
		case len(f) >= 3 && f[0] == "table":
			table = f[1] + " " + f[2]
		case len(f) >= 2 && f[0] == "chain" && !world.OfOthers(table+" "+f[1]):
			out = append(out, "chain "+table+" "+f[1])
		}
	}
	return out
}
