package kind

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/kind/pkg/cluster"
	"sigs.k8s.io/kind/pkg/log"

	"github.com/isthmus-net/isthmus/lab/internal/clusters"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A Spec is a lab to create. All fields but Kept and Progress are required.
type Spec struct {
	Name     string
	Topology *topology.Topology
	Dir      string // its run directory, which is made
	BinDir   string // has what Files says
	ChartDir string // Isthmus' Helm chart
	Engine   Engine // as FindEngine finds it
	Kept     string // where a copy of its record is, for Recover; empty: nowhere
	// Ephemeral labs end with Lab.Close. The engine keeps the containers of one whose
	// process was killed: the next command of the lab removes them (Dead).
	Ephemeral bool
	Progress  func(message string, took time.Duration) // hears what was done
}

// A Lab is a lab whose nodes are containers. It is safe for concurrent use.
type Lab struct {
	*clusters.Set
	dir      string
	record   record
	provider *cluster.Provider
	lock     *os.File             // nil: it is not held
	maker    bool                 // this process makes it
	say      func(message string) // nil: nobody listens

	capture  sync.Mutex
	follower *follower // nil: nothing is captured

	mu    sync.Mutex        // of all that follows; nobody waits for an engine with it
	nodes map[string]near   // by the name of the container
	pids  map[string]int    // of first processes, by the name of the container
	admin map[string]string // while the lab is made: administrators' kubeconfigs within the engine's network, by cluster
}

// recordFile is what a lab leaves in its run directory so that others find it.
const recordFile = "kind.json"

// clusterLabel is the label that kind gives the containers of a cluster.
const clusterLabel = "io.x-k8s.kind.cluster"

// removeAll are the commands that remove what a lab's clusters have in an engine. Podman's kind
// gives volumes names, and those stay: see deleteVolumes.
func removeAll(engine, lab string, clusters []string) string {
	labelled := func(label, value string) string {
		return fmt.Sprintf("%[1]s ps -aq --filter label=%[2]s=%[3]s | xargs -r %[1]s rm -f -v", engine, label, value)
	}
	var out []string
	for _, c := range clusters {
		out = append(out, labelled(clusterLabel, c))
		if engine == podman {
			out = append(out, fmt.Sprintf("podman volume ls --format '{{.Name}} {{.Labels}}' | awk '/%s-/ { print $1 }' | xargs -r podman volume rm", c))
		}
	}
	return strings.Join(append(out, labelled(labLabel, lab)), "; ")
}

// A record is what there is to know of a lab.
type record struct {
	Name    string    `json:"name"`
	Engine  string    `json:"engine"`
	Network string    `json:"network"` // of the engine's, which all nodes are on
	Started time.Time `json:"started"`
	Ready   bool      `json:"ready"` // everything of it has been made
	// Ephemeral: it is to end with the process that made it.
	Ephemeral bool `json:"ephemeral,omitempty"`
	// Kept is the directory that has a copy of this record; empty: none has.
	Kept string `json:"kept,omitempty"`
	// Start is the start of the machine in which it was made.
	Start start `json:"start"`
	// Saved is when the copy was written.
	Saved time.Time `json:"saved"`
	// Lost: it is of an earlier start, and Recover has made its run directory.
	Lost     bool            `json:"lost,omitempty"`
	Clusters []clusterRecord `json:"clusters"` // those that the lab has begun to make
	// Spec is what a plan of the topology says, with the addresses that the
	// engine gave the nodes.
	Spec    world.Spec      `json:"spec"`
	Outside []outsideRecord `json:"outside,omitempty"` // those that the lab has begun to make
	Host    host            `json:"host"`
	Shared  bool            `json:"shared,omitempty"` // all hosts have a directory of this machine
}

// A clusterRecord is one cluster.
type clusterRecord struct {
	Name       string            `json:"name"`       // of the topology
	Kind       string            `json:"kind"`       // as kind calls it
	Containers map[string]string `json:"containers"` // of "node-1" and the like, and of the control plane
}

// kubeconfig is the file by which an administrator reaches a cluster. It is not
// the user's own ~/.kube/config.
func (l *Lab) kubeconfig(cluster string) string {
	return filepath.Join(l.dir, cluster+".kubeconfig")
}

// Create makes the clusters of a topology, with the images of the appliance and
// of the probe in them, and returns when all nodes are ready. A lab that fails
// on its way is taken down. Where the engine has a cluster of the lab's names
// already, nothing is made, and nothing of what is there is touched.
func Create(ctx context.Context, s Spec) (*Lab, error) {
	if err := Refuse(s.Topology); err != nil {
		return nil, err
	}
	for _, file := range needs(s.BinDir) {
		if _, err := os.Stat(file); err != nil {
			return nil, fmt.Errorf("%w: bin lacks what clusters of kind are made of: make kind makes it (make kind-image, where there is an engine other than Podman)", err)
		}
	}
	p, err := provider(s.Engine.Name, log.NoopLogger{})
	if err != nil {
		return nil, err
	}
	l := newLab(s.Dir, record{Name: s.Name, Engine: s.Engine.Name, Network: networkOf(s.Engine.Name), Shared: s.Engine.Local, Ephemeral: s.Ephemeral, Started: time.Now(), Spec: world.Plan(s.Topology)}, p)
	l.maker = true
	if began, err := thisStart(); err == nil && s.Kept != "" { // else another start can't be told from this one
		l.record.Kept, l.record.Start = s.Kept, began
	}
	if progress := s.Progress; progress != nil { // one at a time
		var mu sync.Mutex
		s.Progress = func(message string, took time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			progress(message, took)
		}
	}
	l.say = func(message string) { s.say(message, time.Now()) }
	var names []string
	for _, c := range s.Topology.Clusters {
		names = append(names, ClusterName(s.Name, c.Name))
	}
	if err := l.claim(); err != nil {
		return nil, err
	}
	err = l.refuseExisting(names...)
	if err == nil {
		err = l.rememberHost(s.Engine)
	}
	if err != nil { // nothing is made or changed
		err = errors.Join(err, l.withdraw()) // before it can be taken for a dead one
		l.release()
		return nil, err
	}
	if err := l.create(ctx, s); err != nil {
		return nil, errors.Join(err, l.delete())
	}
	if !s.Ephemeral {
		l.release()
	}
	return l, nil
}

func newLab(dir string, r record, p *cluster.Provider) *Lab {
	l := &Lab{dir: dir, record: r, provider: p, nodes: map[string]near{}, pids: map[string]int{}, admin: map[string]string{}}
	l.Set = &clusters.Set{World: World, Names: l.clusterNames, Load: l.load}
	return l
}

// load reads the administrator's access to a cluster.
func (l *Lab) load(cluster string) (*rest.Config, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", l.kubeconfig(cluster))
	if err == nil {
		cfg.QPS, cfg.Burst = 200, 400 // the lab's API servers have nothing else to do
	}
	return cfg, err
}

// clusterNames are those of the clusters that the lab has begun to make.
func (l *Lab) clusterNames() []string {
	var out []string
	for _, c := range l.record.Clusters {
		out = append(out, c.Name)
	}
	return out
}

// create makes all clusters side by side: much of the time each waits for systemd
// and for kubeadm's polls.
func (l *Lab) create(ctx context.Context, s Spec) error {
	began := time.Now()
	if err := l.prepareHost(s.Engine, func(message string) { s.say(message, began) }); err != nil {
		return err
	}
	if dir := l.shared(); dir != "" {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
	}
	image, err := l.ensureNodeImage(ctx, s.BinDir, s.say)
	if err != nil {
		return err
	}
	// All are entered before any is made: nobody writes the record meanwhile.
	for _, c := range s.Topology.Clusters {
		if err := l.begin(c.Name, ClusterName(s.Name, c.Name)); err != nil {
			return fmt.Errorf("cluster %s: %w", c.Name, err)
		}
	}
	l.record.Spec.WAN = netip.Prefix{} // there are no routers
	taken := map[string]bool{}         // clusters that somebody else has made since they were entered
	var mu sync.Mutex
	g, gctx := errgroup.WithContext(ctx)
	for i, c := range s.Topology.Clusters {
		g.Go(func() error {
			err := l.createCluster(gctx, s, c, image, &l.record.Spec.Clusters[i])
			if err == nil {
				return nil
			}
			if errors.As(err, new(takenError)) {
				mu.Lock()
				defer mu.Unlock()
				taken[c.Name] = true
			}
			return fmt.Errorf("cluster %s: %w", c.Name, err)
		})
	}
	if err := g.Wait(); err != nil {
		// What is in the record is deleted.
		l.record.Clusters = slices.DeleteFunc(l.record.Clusters, func(c clusterRecord) bool { return taken[c.Name] })
		return errors.Join(err, l.save())
	}
	if err := l.shareKubeconfigs(ctx); err != nil {
		return err
	}
	if len(s.Topology.Outside) > 0 {
		start := time.Now()
		if err := l.createOutside(ctx, s, image); err != nil {
			return err
		}
		s.say("hosts outside the clusters ready", start)
	}
	l.record.Ready = true
	return l.save()
}

// begin enters a cluster in the record: from then on the lab deletes what the
// engine has of that name. Somebody else may have made one since Create looked.
func (l *Lab) begin(name, kindName string) error {
	if err := l.refuseExisting(kindName); err != nil {
		return err
	}
	l.record.Clusters = append(l.record.Clusters, clusterRecord{Name: name, Kind: kindName, Containers: map[string]string{}})
	return l.save()
}

// refuseExisting is an error when the engine has clusters of these names: those
// of another user's lab of the same name, or of one whose run directory is lost.
func (l *Lab) refuseExisting(names ...string) error {
	all, err := l.provider.List()
	if err != nil {
		return fmt.Errorf("clusters that %s has: %w", l.record.Engine, err)
	}
	there := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !slices.Contains(all, name) })
	if len(there) == 0 {
		return nil
	}
	return fmt.Errorf("%s has %s already, of another lab %s: another user's, or one whose record is lost. Its owner takes it down with lab down %[3]s; when nobody needs it any more, run: %s",
		l.record.Engine, strings.Join(there, " and "), l.record.Name, removeAll(l.record.Engine, l.record.Name, there))
}

func (s Spec) say(message string, start time.Time) {
	if s.Progress != nil {
		s.Progress(message, time.Since(start))
	}
}

func (l *Lab) save() error {
	l.keep()
	return l.record.write(l.dir)
}

// write writes a record into a run directory. Nobody ever reads half of it, and a process that
// is killed leaves what was there.
func (r record) write(dir string) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	file := filepath.Join(dir, recordFile)
	if err := os.WriteFile(file+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

func (r record) encode() ([]byte, error) { return json.MarshalIndent(r, "", "  ") }

// List returns the names of the labs that have their run directories in base.
func List(base string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(base, "*", recordFile))
	var names []string
	for _, f := range files {
		// The names of those that come or go begin with a dot, which Glob does not leave out.
		if name := filepath.Base(filepath.Dir(f)); !strings.HasPrefix(name, ".") {
			names = append(names, name)
		}
	}
	return names, err
}

// Open returns the lab of a run directory, or world.ErrNotRunning.
func Open(dir string) (*Lab, error) {
	r, err := readRecord(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("lab %s: %w", filepath.Base(dir), world.ErrNotRunning)
	}
	if err != nil {
		return nil, err
	}
	p, err := provider(r.Engine, log.NoopLogger{})
	if err != nil {
		return nil, fmt.Errorf("lab %s: %w", r.Name, err)
	}
	return newLab(dir, r, p), nil
}

func readRecord(dir string) (record, error) { return readRecordFile(filepath.Join(dir, recordFile)) }

func readRecordFile(file string) (record, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return record{}, err
	}
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return record{}, fmt.Errorf("%s: %w", file, err)
	}
	r.Network = cmp.Or(r.Network, defaultNetwork)
	return r, nil
}

// Close ends an ephemeral lab; another one goes on.
func (l *Lab) Close() error {
	if !l.maker || !l.record.Ephemeral {
		return l.endCaptures()
	}
	return l.delete()
}

// Down deletes the clusters, those that were made in part as well. What has
// failed to go is in the error, and the lab can be taken down again.
func (l *Lab) Down(context.Context) error { return l.delete() }

// delete deletes to the end: kind's library knows no contexts.
func (l *Lab) delete() error {
	defer l.markLeaving()()
	if !l.record.Ready {
		l.awaitClients(context.Background())
	}
	var spared error
	if l.record.Lost {
		var err error
		if spared, err = l.spareNewer(context.Background()); err != nil {
			return err
		}
	}
	errs := make([]error, 1+len(l.record.Clusters))
	captured := l.endCaptures()
	var side sync.WaitGroup
	side.Go(func() { errs[0] = l.deleteOutside() })
	for i, c := range l.record.Clusters {
		side.Go(func() {
			l.kill(c)
			// kind's own lock, of a process that was killed: kind would wait for it, and fail.
			_ = os.Remove(l.kubeconfig(c.Name) + ".lock")
			if err := l.provider.Delete(c.Kind, l.kubeconfig(c.Name)); err != nil {
				errs[1+i] = fmt.Errorf("cluster %s: kind delete %s: %w", c.Name, c.Kind, err)
			}
		})
	}
	side.Wait()
	// Not beside the others: "podman volume ls" fails where a volume goes while it lists them.
	for _, c := range l.record.Clusters {
		errs = append(errs, l.deleteVolumes(c))
	}
	if err := errors.Join(append(errs, captured)...); err != nil {
		return err
	}
	if err := l.leave(); err != nil {
		return err
	}
	l.release()
	return spared
}

// kill ends the nodes of a cluster at once: nobody wants what systemd saves in
// the ten seconds that engines wait for it.
func (l *Lab) kill(c clusterRecord) {
	all, err := l.provider.ListInternalNodes(c.Kind)
	if err != nil || len(all) == 0 {
		return
	}
	args := []string{"kill"}
	for _, n := range all {
		args = append(args, n.String())
	}
	_, _ = run(context.Background(), l.record.Engine, args...) // they are deleted all the same
}

// deleteVolumes deletes the volumes of nodes whose containers were never made:
// kind makes a node's volume first, labels it with the name of the node, and deletes
// it with the container. Other engines make volumes with containers.
func (l *Lab) deleteVolumes(c clusterRecord) error {
	if l.record.Engine != podman {
		return nil
	}
	ctx := context.Background()
	text, err := run(ctx, podman, "volume", "ls", "--format", "{{.Name}} {{.Labels}}")
	if err != nil {
		return err
	}
	var volumes []string
	for line := range strings.Lines(text) {
		volume, labels, _ := strings.Cut(strings.TrimSpace(line), " ")
		// Names of labs' clusters end with a sum, so none begins another.
		if strings.Contains(labels, c.Kind+"-") {
			volumes = append(volumes, volume)
		}
	}
	if len(volumes) == 0 {
		return nil
	}
	_, err = run(ctx, podman, append([]string{"volume", "rm", "--force"}, volumes...)...)
	return err
}

// cluster returns what there is to know of a cluster.
func (l *Lab) cluster(name string) (clusterRecord, bool) {
	i := slices.IndexFunc(l.record.Clusters, func(c clusterRecord) bool { return c.Name == name })
	if i < 0 {
		return clusterRecord{}, false
	}
	return l.record.Clusters[i], true
}

// node returns the container of "node-1" or "control-plane" in a cluster.
func (l *Lab) node(cluster, name string) (near, error) {
	c, ok := l.cluster(cluster)
	container, ok2 := c.Containers[name]
	if !ok || !ok2 {
		return near{}, fmt.Errorf("%w: %s/%s", world.ErrNoTarget, cluster, name)
	}
	l.mu.Lock()
	n, known := l.nodes[container]
	l.mu.Unlock()
	if known {
		return n, nil
	}
	all, err := l.provider.ListInternalNodes(c.Kind)
	if err != nil {
		return near{}, fmt.Errorf("nodes of %s: %w", c.Kind, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range all {
		l.nodes[n.String()] = near{n, l}
	}
	if n, ok := l.nodes[container]; ok {
		return n, nil
	}
	return near{}, fmt.Errorf("%w: %s/%s is container %s, which %s has no more", world.ErrNoTarget, cluster, name, container, l.record.Engine)
}

// containerOf is the container of a Node, from its spec.providerID:
// kind://docker/<cluster>/<container>.
func containerOf(providerID string) string { return path.Base(providerID) }

// A progressLogger passes on what kind says to its users of a cluster.
type progressLogger struct {
	cluster string
	say     func(string, time.Duration)
}

var _ log.Logger = progressLogger{}

func (p progressLogger) line(text string) {
	// A phase is told when it begins, too, for spinners.
	if text = strings.TrimSpace(text); p.say != nil && text != "" && !strings.HasPrefix(text, "•") {
		p.say(p.cluster+": "+text, 0)
	}
}

// Warn passes on a warning.
func (p progressLogger) Warn(message string) { p.line(message) }

// Warnf passes on a warning.
func (p progressLogger) Warnf(format string, args ...any) { p.line(fmt.Sprintf(format, args...)) }

// Error passes on an error that kind goes on after.
func (p progressLogger) Error(message string) { p.line(message) }

// Errorf passes on an error that kind goes on after.
func (p progressLogger) Errorf(format string, args ...any) { p.line(fmt.Sprintf(format, args...)) }

// V returns what hears what kind tells everybody (0), and nothing for more.
func (p progressLogger) V(level log.Level) log.InfoLogger {
	if level > 0 {
		return log.NoopInfoLogger{}
	}
	return infoLogger{p}
}

type infoLogger struct{ progressLogger }

// Info passes on a line.
func (i infoLogger) Info(message string) { i.line(message) }

// Infof passes on a line.
func (i infoLogger) Infof(format string, args ...any) { i.line(fmt.Sprintf(format, args...)) }

// Enabled is always so: there is somebody who looks.
func (infoLogger) Enabled() bool { return true }
