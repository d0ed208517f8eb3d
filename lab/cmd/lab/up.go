package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/runner"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A builder builds labs and prints each phase with the time it took.
type builder struct {
	place place
	out   io.Writer
	// Of the world kubeconfig: the clusters, and the image of the probe.
	clusters   []kubeconfig.Cluster
	probeImage string
}

// A labConfig is a lab to build.
type labConfig struct {
	name           string
	topology       *topology.Topology
	world, overlay string
	ephemeral      bool     // it ends with this process
	snapshots      bool     // it may be restored from one, and leaves one
	image          vm.Image // of the vm world; build sets it
}

// A built lab is one that runs, with its phases.
type builtLab struct {
	client   labClient
	name     string
	topology *topology.Topology
	overlay  string
	mu       sync.Mutex // of phases
	phases   []report.Phase
	runner   *runner.Runner // of lab run
	found    bool           // it was up before
	emulated bool           // so everything takes longer
}

// longer is how long something may take of which d is said, on a machine that goes on to be as
// busy as it was in the last half minute.
func (lab *builtLab) longer(d time.Duration) time.Duration {
	if lab.runner == nil {
		return d
	}
	return lab.runner.Pace.Longer(d, time.Now().Add(-30*time.Second), time.Time{})
}

func (b builder) phase(lab *builtLab, name string, took time.Duration) {
	lab.mu.Lock()
	defer lab.mu.Unlock()
	lab.phases = append(lab.phases, report.Phase{Name: name, Took: report.Duration(took)})
	fmt.Fprintf(b.out, "   %-52s %6s\n", name, report.Duration(took))
}

// build starts a lab and installs the appliance in its clusters, or restores one
// that was saved when it had just been built. The lab that failed on its way is
// taken down.
func (b builder) build(ctx context.Context, c labConfig) (*builtLab, error) {
	from := sync.OnceValues(func() (origin, error) { return b.originOf(c) })
	lab, err := b.buildFrom(ctx, c, from)
	if err != nil || c.ephemeral {
		return lab, err
	}
	// Whoever finds the lab asks for it: it tells that the lab is whole.
	o, err := from()
	if err == nil {
		err = o.keep(c.name)
	}
	if err != nil {
		fmt.Fprintf(b.out, "   lab run can't use this lab: %v\n", err)
	}
	return lab, nil
}

// buildFrom is build without a memory of what the lab was built from, which from
// reads as it is now, the first time.
func (b builder) buildFrom(ctx context.Context, c labConfig, from func() (origin, error)) (*builtLab, error) {
	if c.world != supervisor.VM {
		if !c.ephemeral {
			go from() // beside what takes longer
		}
		return b.fresh(ctx, c)
	}
	// Here, where the Internet is: a lab's own network has no way there.
	var err error
	if c.image, err = buildImage(ctx, b.place, b.out); err != nil {
		return nil, err
	}
	key := ""
	if c.snapshots {
		o, err := from()
		if err == nil {
			key, err = b.snapshotKey(ctx, c, o)
		}
		if err != nil {
			fmt.Fprintf(b.out, "   without a snapshot: %v\n", err)
		}
	}
	if key != "" {
		if lab, err := b.restore(ctx, c, key); lab != nil || err != nil {
			return lab, err
		}
	}
	lab, err := b.fresh(ctx, c)
	if err == nil && key != "" {
		b.save(ctx, c, lab, key)
	}
	return lab, err
}

// start starts the lab.
func (b builder) start(ctx context.Context, c labConfig, restore string) (*builtLab, error) {
	lab := &builtLab{name: c.name, topology: c.topology, overlay: c.overlay}
	cfg := b.config(c)
	cfg.Restore = restore
	cfg.Progress = func(p world.Progress) {
		switch {
		case p.Took > 0 || p.Error != "":
			b.phase(lab, strings.TrimSpace(p.Message+" "+p.Error), p.Took)
		case p.Message != "":
			fmt.Fprintln(b.out, "  ", p.Message)
		}
	}
	start := time.Now()
	client, err := b.startWorld(ctx, c, lab, cfg)
	if err != nil {
		return nil, fmt.Errorf("start lab %s: %w", c.name, err)
	}
	lab.client = client
	b.phase(lab, "world and control planes ready", time.Since(start))
	return lab, nil
}

// startWorld starts what nodes live in.
func (b builder) startWorld(ctx context.Context, c labConfig, lab *builtLab, cfg supervisor.Config) (labClient, error) {
	progress := func(message string, took time.Duration) { cfg.Progress(world.Progress{Message: message, Took: took}) }
	switch c.world {
	case kubeconfig.World:
		return kubeconfig.Create(ctx, kubeconfig.Spec{Name: c.name, Topology: c.topology, Clusters: b.clusters, Image: b.probeImage, Progress: progress})
	case supervisor.Native, supervisor.VM:
		return supervisor.Start(ctx, cfg)
	}
	engine, err := kind.FindEngine(ctx)
	if err != nil {
		return nil, err
	}
	return kind.Create(ctx, kind.Spec{
		Name: c.name, Topology: c.topology, Dir: filepath.Join(kindLabs(), c.name), BinDir: b.place.bin(), ChartDir: b.place.chart(), Engine: engine, Ephemeral: c.ephemeral,
		Kept: kind.Kept(), Progress: progress,
	})
}

func (b builder) config(c labConfig) supervisor.Config {
	cfg := supervisor.Config{
		Name: c.name, World: c.world, Spec: world.Plan(c.topology), BinDir: b.place.bin(), Ephemeral: c.ephemeral, Snapshots: c.snapshots,
		Image: c.image,
	}
	if c.topology.Install == topology.InstallChart {
		cfg.CRDs = filepath.Join(b.place.chart(), "crds")
	} else {
		cfg.Programs = []string{deploy.ByIsthmusctl, deploy.ByHelm} // which bring the CRDs
	}
	return cfg
}

// fresh builds the lab from nothing.
func (b builder) fresh(ctx context.Context, c labConfig) (*builtLab, error) {
	start := time.Now()
	lab, err := b.start(ctx, c, "")
	if err != nil {
		return nil, err
	}
	return lab, b.install(ctx, lab, start)
}

// serviceTime is how long kube-proxies may take: under TCG a binary of that
// size takes its time to start.
const serviceTime = 4 * time.Minute

// waitServices waits until every node can reach the API server by its
// service. Daemons that are started earlier fail, are started again and again,
// and under TCG take away the time that kube-proxy needs.
func waitServices(ctx context.Context, c expect.World, t *topology.Topology) error {
	ctx, cancel := context.WithTimeout(ctx, serviceTime)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	for _, cl := range t.Clusters {
		service := cl.ServiceCIDR.Masked().Addr().Next()
		for _, n := range cl.Present() {
			g.Go(func() error {
				return waitService(ctx, c, cl.Name+"/"+operand.NodeName(n), listServices[cl.KubeProxy], service)
			})
		}
	}
	return g.Wait()
}

// listServices is what prints the services of a kube-proxy, by its mode. One program is
// asked, and once a second: where processors are emulated, four nodes that asked for all
// of them five times a second took a fifth of what a lab needed to come up.
var listServices = map[string]string{
	topology.ProxyNFTables: "nft list map ip kube-proxy service-ips",
	topology.ProxyIPTables: "iptables-save -t nat",
	topology.ProxyIPVS:     "ipset save KUBE-CLUSTER-IP",
}

// waitService waits for a service in what a program prints on a node. A
// shell on the node looks again and again: starting one for each look would
// take the emulated processors from kube-proxy.
func waitService(ctx context.Context, c expect.World, target, list string, service netip.Addr) error {
	has := fmt.Sprintf("until %s 2>/dev/null | grep -q -F %s; do sleep 1; done", list, service)
	res, err := c.Exec(ctx, world.ExecRequest{Target: target, Argv: []string{"sh", "-c", has}})
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("exit code %d: %s", res.Code, strings.TrimSpace(string(res.Stderr)))
	}
	if err != nil {
		return fmt.Errorf("kube-proxy of %s has no rules for service %s; is the machine busy (uptime), or what does its log say: %w", target, service, err)
	}
	return nil
}

// errAppliance is the error when a lab came up, but the appliance in it did
// not. That is the product's failure, which is not tried again.
var errAppliance = errors.New("the appliance did not come up")

func (b builder) install(ctx context.Context, lab *builtLab, start time.Time) error {
	if there, ok := lab.client.(*kubeconfig.Lab); ok {
		converged := time.Now()
		if err := there.Converged(ctx); err != nil {
			return err
		}
		b.phase(lab, "converged", time.Since(converged))
		return nil
	}
	var services error
	_, kubeadm := lab.client.(*kind.Lab)
	res, err := deploy.Install(ctx, deploy.Config{
		Topology: lab.topology, Overlay: networkingv1beta1.Overlay(lab.overlay), Clusters: clusters{ctx, lab.client}, ChartDir: b.place.chart(),
		Exec:     lab.client.Exec,
		OwnDNS:   kubeadm,
		Progress: func(p deploy.Phase) { b.phase(lab, p.Name, p.Took) },
		Services: func(ctx context.Context) error {
			start := time.Now()
			services = waitServices(ctx, lab.client, lab.topology)
			if services == nil {
				b.phase(lab, "kube-proxies have their rules", time.Since(start))
			}
			return services
		},
		Reach: reachOf(lab),
	})
	if err != nil {
		err = fmt.Errorf("install in lab %s: %w", lab.name, err)
		if _, gone := lab.client.Status(ctx); gone == nil && services == nil {
			err = fmt.Errorf("%w: %w", errAppliance, err)
		}
		return err
	}
	if !res.FirstReply.IsZero() {
		b.phase(lab, "from the peering's objects to the first reply", max(0, res.FirstReply.Sub(res.PeeringApplied)))
	}
	if !res.PeeringApplied.IsZero() {
		b.phase(lab, "from the peering's objects to converged", time.Since(res.PeeringApplied))
	}
	b.phase(lab, "total", time.Since(start))
	b.processorTime(ctx, lab)
	return nil
}

// processorTime prints what the lab's processes have taken so far.
func (b builder) processorTime(ctx context.Context, lab *builtLab) {
	if s, err := lab.client.Status(ctx); err == nil && len(s.CPU) > 0 {
		fmt.Fprintf(b.out, "   processor time: %s\n", processorTime(s.CPU))
	}
}

// processorTime lists the programs that took most of it, and the sum.
func processorTime(of map[string]time.Duration) string {
	var sum time.Duration
	for _, d := range of {
		sum += d
	}
	names := slices.SortedFunc(maps.Keys(of), func(a, b string) int { return cmp.Or(cmp.Compare(of[b], of[a]), strings.Compare(a, b)) })
	var most []string
	for _, n := range names[:min(5, len(names))] {
		most = append(most, fmt.Sprintf("%s %s", n, report.Duration(of[n])))
	}
	return fmt.Sprintf("%s, of which %s", report.Duration(sum), strings.Join(most, ", "))
}

// firstReplyTime is how long the first answer may take once both sides have
// each other's key, where the machine is not emulated.
const firstReplyTime = 80 * time.Second

// reachOf returns a function that sends probes from one pod to another until
// one is answered. That a cluster has chosen an address that it must not choose,
// or that somebody else answers all the time, is no error of it: the product is
// wrong then, and the rows say so.
func reachOf(lab *builtLab) func(ctx context.Context, from, to topology.Pod) error {
	api := expect.NewAPI(lab.client.RESTConfig)
	return func(ctx context.Context, from, to topology.Pod) error {
		start, timeout, probeTimeout := time.Now(), lab.longer(firstReplyTime), time.Duration(0)
		if status, err := lab.client.Status(ctx); err == nil && isEmulated(status) {
			timeout *= emulatedPatience
			probeTimeout = emulatedTimeout
		}
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		row := &expect.Row{
			World: lab.client, Topology: lab.topology, API: api,
			Directory: expect.NewDirectory(lab.client, api, lab.topology),
			NewToken:  func() string { return strings.ToLower(rand.Text()[:16]) }, ProbeTimeout: probeTimeout,
		}
		var ends [2]operand.Operand
		for i, p := range []topology.Pod{from, to} {
			o, err := operand.Parse(p.Cluster+"/"+p.Name, lab.topology)
			if err != nil {
				return err
			}
			ends[i] = o
		}
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		var last error // why the latest probe that ended was not the answer
		impostor := ""
		for {
			if _, err := row.Directory.Address(ctx, ends[1], ends[0].Cluster); errors.Is(err, expect.ErrChoice) {
				return nil
			}
			p, err := row.Send(ctx, ends[0], ends[1], "tcp", 0)
			by := ""
			if err == nil && p.Result.OK {
				by, err = row.Impostor(ctx, p)
			}
			switch {
			case err == nil && p.Result.OK && by == "":
				return nil
			case ctx.Err() != nil && last != nil: // the time was over in the middle of it
			case err != nil:
				last, impostor = err, ""
			default:
				last, impostor = fmt.Errorf("%s %s", p.Result.Error, p.Result.Message), by
			}
			select {
			case <-ctx.Done():
				if impostor != "" {
					return nil
				}
				return fmt.Errorf("%s has had no answer from %s in %s: %w; lab inspect shows the path", ends[0], ends[1], time.Since(start).Round(time.Second), last)
			case <-tick.C:
			}
		}
	}
}

func newUpCommand(a *app, root *string) *cobra.Command {
	var worldName, overlay, snapshots string
	cmd := &cobra.Command{
		Use:   "up TOPOLOGY",
		Short: "build a topology, install the appliance in it, and leave it up",
		Long: `up builds a topology in a world, installs the appliance with an overlay, and
leaves the lab up. Its name says what it is: two-clusters-native-vxlan. Commands
that take a lab's name are content with how it starts.`,
		Example: `  lab up two-clusters
  lab up two-clusters --world vm
  lab up two-clusters --overlay vxlan
  lab up path/to/mine.yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := findPlace(*root)
			if err != nil {
				return err
			}
			t, err := p.topologyNamed(args[0])
			if err != nil {
				return err
			}
			warm, err := useSnapshots(snapshots)
			if err != nil {
				return err
			}
			if worldName == kubeconfig.World {
				return usageError("--world kubeconfig is for lab run: clusters that are there are up already")
			}
			if worldName == kind.World {
				if err := kind.Refuse(t); err != nil {
					return usageError("%v\n--world native and vm have all that topologies can have", err)
				}
			}
			c, err := newChooser(worldName, overlay, probe(cmd.Context(), p, worldName == kind.World), nil)
			if err != nil {
				return err
			}
			at := c.choose(need{topology: t, world: scenario.WorldAuto})
			if at.skip != "" {
				return exitError{report.ExitInfra, "lab: " + at.skip}
			}
			name := labName(t, at.world, at.overlay)
			if _, err := removeDead(cmd.Context(), a.stdout, rundir.Base(), kind.Kept()); err != nil {
				return err
			}
			// One of kind says itself whether it is up, begun, or being taken down.
			if _, err := findLab(name); err == nil && at.world != kind.World {
				return exitError{report.ExitInfra, upAlready(name)}
			} else if err != nil && !errors.Is(err, world.ErrNotRunning) {
				return infraError(err)
			}
			fmt.Fprintf(a.stdout, "%s in the %s world (%s)\n", name, at.world, c.why(at.world, at.lacks, false))
			printLines(a.stdout, c.tight(at.world))
			config := labConfig{name: name, topology: t, world: at.world, overlay: at.overlay, snapshots: warm}
			lab, err := builder{place: p, out: a.stdout}.build(cmd.Context(), config)
			if errors.Is(err, kind.ErrUp) {
				return exitError{report.ExitInfra, upAlready(name)}
			}
			if err != nil && cmd.Context().Err() != nil {
				return interruptedUp(context.WithoutCancel(cmd.Context()), config, lab, err)
			}
			if err != nil {
				if lab != nil {
					err = fmt.Errorf("%w\nit is still up: look at it with lab inspect, take it down with lab down", err)
				}
				return infraError(err)
			}
			fmt.Fprintf(a.stdout, `
%s
Next:
  lab inspect
  lab kubectl %[2]s -- get pods -A -o wide
  lab exec %[2]s/node-1 -- ip rule
  lab run
  lab down
`, t.Drawing, t.Clusters[0].Name)
			return nil
		},
	}
	cmd.Flags().StringVar(&worldName, "world", "auto", "auto, native, vm or kind; auto is one of the first two")
	cmd.Flags().StringVar(&overlay, "overlay", overlayAuto, "between the nodes of a cluster: geneve or vxlan; auto: geneve where the world's kernel has it")
	snapshotFlag(cmd, &snapshots)
	return cmd
}

// upAlready says of a lab that is there whether it is whole.
func upAlready(name string) string {
	if _, err := readOrigin(name); errors.Is(err, fs.ErrNotExist) {
		return fmt.Sprintf("lab: lab %s is there, but it may not be whole: its lab up is still at work, has failed, or was killed. lab inspect shows what there is, lab down %[1]s takes it down", name)
	}
	return fmt.Sprintf("lab: lab %s is up already: lab down %[1]s takes it down", name)
}

// interruptedUp takes down what there is of a lab whose up was interrupted.
func interruptedUp(ctx context.Context, c labConfig, lab *builtLab, why error) error {
	if lab != nil {
		if err := takeDown(ctx, c, lab); err != nil {
			return infraError(fmt.Errorf("interrupted, and lab %s could not be taken down: %w", c.name, err))
		}
	} else if _, err := findLab(c.name); err == nil { // of kind: it could not be taken down
		return infraError(fmt.Errorf("interrupted, and something of lab %s is left: %w", c.name, why))
	}
	return exitError{report.ExitInfra, fmt.Sprintf("lab: interrupted: nothing of lab %s is left", c.name)}
}

func newInspectCommand(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "inspect",
		Short:   "show what there is of a lab: hosts, addresses, pods",
		Example: "  lab inspect\n  lab inspect --json | jq .clusters",
		Args:    cobra.NoArgs,
	}
	name := labFlag(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := running(*name)
		if err != nil {
			return err
		}
		s, err := c.Status(cmd.Context())
		if err != nil {
			return infraError(err)
		}
		if asJSON {
			return writeJSON(a.stdout, s)
		}
		printStatus(a.stdout, s)
		return nil
	}
	return cmd
}

func printStatus(w io.Writer, s world.Status) {
	supervisor := ""
	if s.PID != 0 {
		supervisor = fmt.Sprintf(" · supervisor %d", s.PID)
	}
	fmt.Fprintf(w, "%s · %s world · %s · up %s%s\n", s.Name, s.World, s.Phase, report.Duration(time.Since(s.Started)), supervisor)
	if s.Error != "" {
		fmt.Fprintf(w, "  error: %s\n", s.Error)
	}
	if s.VM != nil {
		how := "booted"
		if s.VM.Restored {
			how = "restored from a snapshot"
		}
		fmt.Fprintf(w, "  machine: %s, kernel %s, %s in %s\n", s.VM.Accelerator, s.VM.Kernel, how, report.Duration(s.VM.Boot))
		for _, warning := range s.VM.Warnings {
			fmt.Fprintf(w, "  %s\n", warning)
		}
	}
	for _, c := range s.Clusters {
		spec, _ := s.Spec.Cluster(c.Name)
		fmt.Fprintf(w, "\n%s   pods %s, services %s\n", c.Name, spec.PodCIDR, spec.ServiceCIDR)
		for name, state := range c.Components {
			if state != "running" {
				fmt.Fprintf(w, "  %s is %s\n", name, state)
			}
		}
		if spec.Router.IsValid() {
			fmt.Fprintf(w, "  %-36s %-16s %s\n", c.Name+"/router", spec.Router, spec.RouterWAN)
		}
		fmt.Fprintf(w, "  %-36s %s\n", c.Name+"/control-plane", spec.ControlPlane)
		for _, n := range spec.Nodes {
			away := ""
			if !slices.Contains(c.Nodes, n.Name) {
				away = "   has not joined, or has left"
			}
			fmt.Fprintf(w, "  %-36s %s%s\n", c.Name+"/"+n.Name, n.Addr, away)
			for _, p := range c.Pods {
				if p.Node == n.Name {
					fmt.Fprintf(w, "    %-34s %s%s\n", p.Namespace+"/"+p.Name, p.IP, restarts(p))
				}
			}
		}
	}
	for _, h := range s.Spec.Outside {
		fmt.Fprintf(w, "\n%-38s %s\n", h.Name, h.Addr)
	}
}

func restarts(p world.PodStatus) string {
	n := 0
	for _, c := range p.Containers {
		n += c.Restarts
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("   %d restarts", n)
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return infraError(e.Encode(v))
}
