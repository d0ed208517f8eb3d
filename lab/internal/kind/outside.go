package kind

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/lab/internal/clusters"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// networkVariables are how users tell kind of a network of theirs, for the engines for which
// it asks (kind's pkg/cluster/internal/providers/*/provider.go).
var networkVariables = map[string]string{"docker": "KIND_EXPERIMENTAL_DOCKER_NETWORK", podman: "KIND_EXPERIMENTAL_PODMAN_NETWORK"}

// defaultNetwork is kind's own.
const defaultNetwork = "kind"

// networkOf is an engine's network for the nodes of all clusters of kind.
func networkOf(engine string) string {
	return cmp.Or(os.Getenv(networkVariables[engine]), defaultNetwork)
}

// labLabel is on containers that are a lab's, but no nodes of kind's: its value is
// the name of the lab.
const labLabel = "isthmus-lab"

// outsideContainer is the container of a host outside the clusters.
func outsideContainer(lab, host string) string { return "lab-" + ClusterName(lab, host) }

// createOutside makes the hosts outside the clusters: containers on the engine's
// network, beside the nodes, that answer probes. A host behind a cluster's router
// has its own address on its link, to which only that cluster's nodes have a route.
func (l *Lab) createOutside(ctx context.Context, s Spec, image string) error {
	// All are entered before any is made: nobody writes the record meanwhile.
	for _, o := range s.Topology.Outside {
		l.record.Outside = append(l.record.Outside, outsideRecord{o.Name, outsideContainer(s.Name, o.Name)})
	}
	if err := l.save(); err != nil {
		return err
	}
	// One that fails does not stop the others: an engine's client that is killed may leave a container
	// that nobody can list.
	var g errgroup.Group
	for i, o := range s.Topology.Outside {
		g.Go(func() error {
			addr, err := l.startOutside(ctx, s, o, l.record.Outside[i].Container, image)
			if err == nil && o.Via != "" {
				err = l.leadTo(ctx, o, addr)
			}
			if err != nil {
				return fmt.Errorf("host %s: %w", o.Name, err)
			}
			h := &l.record.Spec.Outside[i]
			h.LAN = netip.Prefix{}
			if o.Via == "" {
				h.Addr = addr
			}
			return nil
		})
	}
	return g.Wait()
}

// startOutside starts a host, and returns its address on the engine's network.
func (l *Lab) startOutside(ctx context.Context, s Spec, o topology.Outside, container, image string) (netip.Addr, error) {
	engine := l.record.Engine
	args := []string{"run", "--detach", "--name", container, "--hostname", container, "--label", labLabel + "=" + s.Name,
		"--net", l.record.Network, "--privileged", "--entrypoint", "/usr/bin/sleep"}
	if dir := l.shared(); dir != "" {
		args = append(args, "--volume", dir+":"+sharedOnNode)
	}
	if _, err := run(ctx, engine, append(args, image, "infinity")...); err != nil {
		return netip.Addr{}, err
	}
	if _, err := run(ctx, engine, "cp", filepath.Join(s.BinDir, expect.ProbeProgram), container+":"+probeOnNode); err != nil {
		return netip.Addr{}, err
	}
	text, err := run(ctx, engine, "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", container) // nerdctl has another name for the network
	if err != nil {
		return netip.Addr{}, err
	}
	addr, err := netip.ParseAddr(strings.TrimSpace(text))
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%s says that its address is %q: %w", engine, strings.TrimSpace(text), err)
	}
	script := insideScript
	if o.Via != "" {
		script += "ip address add " + o.Address.String() + " dev " + nodeLink + "\n"
	}
	if _, err := run(ctx, engine, "exec", container, "sh", "-c", script); err != nil {
		return netip.Addr{}, err
	}
	_, err = run(ctx, engine, "exec", "--detach", container, probeOnNode, "serve", "--host", o.Name)
	return addr, err
}

// leadTo gives the nodes of a cluster a route to a host behind its router.
func (l *Lab) leadTo(ctx context.Context, o topology.Outside, by netip.Addr) error {
	spec, _ := l.record.Spec.Cluster(o.Via)
	for _, node := range spec.Nodes {
		n, err := l.node(o.Via, node.Name)
		if err != nil {
			return err
		}
		if err := runOn(ctx, n, nil, "ip", "route", "replace", o.Address.String(), "via", by.String(), "dev", nodeLink); err != nil {
			return err
		}
	}
	return nil
}

// An outsideRecord is a host outside the clusters.
type outsideRecord struct {
	Name      string `json:"name"`
	Container string `json:"container"`
}

// outside is the container of a host outside the clusters.
func (l *Lab) outside(name string) (container string, ok bool) {
	for _, o := range l.record.Outside {
		if o.Name == name {
			return o.Container, true
		}
	}
	return "", false
}

// onOutside runs a command in the container of such a host.
func (l *Lab) onOutside(ctx context.Context, container string, req world.ExecRequest, s clusters.Streams) (int, error) {
	if req.TTY {
		return 0, fmt.Errorf("exec on %s: run: %s exec -it %s %s", req.Target, l.record.Engine, container, strings.Join(req.Argv, " "))
	}
	cmd := l.direct(ctx, container, req.Argv)
	if cmd != nil {
		cmd.Env = slices.Concat(cmd.Env, []string{l.temp()}, req.Env)
	} else {
		args := []string{"exec", "--interactive"}
		for _, e := range append([]string{l.temp()}, req.Env...) {
			args = append(args, "--env", e)
		}
		cmd = exec.CommandContext(ctx, l.record.Engine, append(append(args, container), req.Argv...)...)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.Stdin, s.Stdout, s.Stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	return exitCode(err)
}

// deleteOutside deletes these hosts, if they are this lab's.
func (l *Lab) deleteOutside() error {
	if len(l.record.Outside) == 0 {
		return nil
	}
	ctx := context.Background()
	text, err := run(ctx, l.record.Engine, "ps", "--all", "--quiet", "--filter", "label="+labLabel+"="+l.record.Name)
	if ids := strings.Fields(text); err == nil && len(ids) > 0 {
		_, err = run(ctx, l.record.Engine, append([]string{"rm", "--force", "--volumes"}, ids...)...)
	}
	if err != nil {
		return fmt.Errorf("hosts outside: %w", err)
	}
	return nil
}
