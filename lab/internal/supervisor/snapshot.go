package supervisor

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// What is in a snapshot of a lab beside the machine's memory: a directory for
// each cluster, and a file.
const (
	savedClusters = "clusters"
	savedEtcd     = "etcd"
	savedKeys     = "keys"
	savedLab      = "lab.json"
)

// A labState is what the supervisor knows of a lab that is saved.
type labState struct {
	Present map[string][]string       `json:"present"` // nodes, by cluster
	Watches map[string]map[string]int `json:"watches"` // that each API server serves, by what is watched
}

func openSnapshots() (*snapshot.Store, error) {
	cache, err := vm.DefaultCacheDir()
	if err != nil {
		return nil, err
	}
	return snapshot.Open(cache), nil
}

// SnapshotKey is a hash of all that a snapshot of a lab depends on: the machine,
// the binaries in it and outside, the plan of its networks, and parts, in which
// the caller says what it will do to the lab.
func SnapshotKey(ctx context.Context, cfg Config, parts ...string) (string, error) {
	c, _, err := machineConfig(ctx, cfg, func(string) {})
	if err != nil {
		return "", err
	}
	if c.Accelerator == vm.KVM {
		return "", errors.New("snapshots of labs are made under emulation only: nobody has tried them under KVM")
	}
	spec, err := json.Marshal(cfg.Spec)
	if err != nil {
		return "", err
	}
	// This program makes the objects and reads the snapshot, so it counts too.
	files := []string{c.Image.Binaries, filepath.Join(cfg.BinDir, "kubernetes"), "/proc/self/exe"}
	return c.ConvergedKey(ctx, files, append(parts, string(spec))...)
}

// serveSnapshot saves the lab.
func (l *lab) serveSnapshot(w http.ResponseWriter, r *http.Request) {
	var req world.SnapshotRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
		http.Error(w, "request: "+err.Error(), http.StatusBadRequest)
		return
	}
	answer, err := l.save(r.Context(), req)
	if err != nil {
		world.WriteError(w, err)
		return
	}
	world.WriteJSON(w, answer)
}

func (l *lab) save(ctx context.Context, req world.SnapshotRequest) (world.SnapshotAnswer, error) {
	a := l.currentAgent()
	if a == nil || a.vm == nil {
		return world.SnapshotAnswer{}, errors.New("only labs of the vm world that run can be saved")
	}
	store, err := openSnapshots()
	if err != nil {
		return world.SnapshotAnswer{}, err
	}
	state := labState{Present: map[string][]string{}, Watches: map[string]map[string]int{}}
	for _, c := range l.clusters {
		l.mu.Lock()
		state.Present[c.spec.Name] = c.presentNodes()
		l.mu.Unlock()
		if state.Watches[c.spec.Name], err = c.watches(ctx); err != nil {
			return world.SnapshotAnswer{}, err
		}
	}
	b, err := json.Marshal(state)
	if err != nil {
		return world.SnapshotAnswer{}, err
	}
	l.mu.Lock()
	machine := fmt.Sprintf("%d MiB, %d NICs, kernel %s", machineMemory(l.cfg.Spec), len(l.cfg.Spec.Clusters)+1, l.status.VM.Kernel)
	l.mu.Unlock()
	info := snapshot.Info{Level: snapshot.Converged, Key: req.Key, Topology: req.Topology, Overlay: req.Overlay, Machine: machine}
	start := time.Now()
	snap, err := store.Save(info, func(d *snapshot.Draft) error {
		if err := os.WriteFile(filepath.Join(d.Dir(), savedLab), b, 0o600); err != nil {
			return err
		}
		if err := a.client.Freeze(ctx); err != nil {
			return err
		}
		// The machine first: etcd then has all that the machine was told.
		if err := a.vm.Pause(); err != nil {
			return err
		}
		var g errgroup.Group
		g.Go(func() error { return a.vm.SaveMemory(ctx, d.WriteMemory) })
		for _, c := range l.clusters {
			g.Go(func() error {
				dir := filepath.Join(d.Dir(), savedClusters, c.spec.Name)
				if err := os.MkdirAll(dir, 0o700); err != nil {
					return err
				}
				return errors.Join(c.cp.SaveKeys(filepath.Join(dir, savedKeys)), c.cp.SaveEtcd(filepath.Join(dir, savedEtcd)))
			})
		}
		return errors.Join(g.Wait(), a.vm.Resume())
	})
	// It goes on whatever happened, also when nobody waits any more.
	thawing, cancel := context.WithTimeout(context.WithoutCancel(ctx), thawTimeout)
	defer cancel()
	err = errors.Join(err, a.client.Thaw(thawing, false))
	if err != nil {
		return world.SnapshotAnswer{}, err
	}
	answer := world.SnapshotAnswer{Size: snap.Size, Pause: time.Since(start)}
	return answer, syncClock(ctx, a.client, 0)
}

// restore brings the lab up from a snapshot: the machine is read and the control
// planes start side by side, then the machine goes on. It returns when every
// node has reported and every watch that there was is there again, so that what
// is written from now on is seen by everybody.
func (l *lab) restore(ctx context.Context) error {
	store, err := openSnapshots()
	if err != nil {
		return err
	}
	snap, ok := store.Find(snapshot.Converged, l.cfg.Restore)
	if !ok {
		return fmt.Errorf("there is no snapshot %s", l.cfg.Restore)
	}
	b, err := os.ReadFile(filepath.Join(snap.Dir, savedLab))
	if err != nil {
		return err
	}
	var state labState
	if err := json.Unmarshal(b, &state); err != nil {
		return fmt.Errorf("%s: %w", filepath.Join(snap.Dir, savedLab), err)
	}
	if err := l.makeClusters(func(cluster string, n world.NodeSpec) bool { return slices.Contains(state.Present[cluster], n.Name) }); err != nil {
		return err
	}
	if err := l.wire(); err != nil {
		return err
	}
	start := time.Now()
	g, gctx := errgroup.WithContext(ctx)
	serving := make(chan struct{}, len(l.clusters))
	g.Go(func() error {
		m, err := l.incoming(gctx, snap)
		if err != nil {
			return err
		}
		a := agentOf(m)
		l.mu.Lock()
		l.agent = a
		l.mu.Unlock()
		l.failWithAgent(ctx)
		if err := l.awake(ctx, a); err != nil {
			return err
		}
		// Not before its API servers answer, or everybody in it would try
		// again and again, and ever more slowly.
		for range l.clusters {
			select {
			case <-serving:
			case <-gctx.Done():
				return gctx.Err()
			}
		}
		return l.step("the machine's programs go on", func() error { return a.client.Thaw(ctx, true) })
	})
	for _, c := range l.clusters {
		g.Go(func() error {
			return l.startControlPlane(gctx, c, filepath.Join(snap.Dir, savedClusters, c.spec.Name), func() { serving <- struct{}{} })
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, c := range l.clusters {
		go l.balanceLoads(ctx, c)
	}
	l.mu.Lock()
	l.status.VM.Boot = time.Since(start)
	l.mu.Unlock()
	return l.step("nodes report and watch again", func() error {
		var g errgroup.Group
		for _, c := range l.clusters {
			g.Go(func() error { return l.waitBack(ctx, c, start, state.Watches[c.spec.Name]) })
		}
		return g.Wait()
	})
}

// incoming reads a snapshot's machine, which is paused.
func (l *lab) incoming(ctx context.Context, snap snapshot.Snapshot) (*vm.Machine, error) {
	cfg, err := l.prepareMachine(ctx)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	m, err := vm.Incoming(ctx, cfg, snap)
	if err != nil {
		return nil, err
	}
	for _, nic := range cfg.NICs { // QEMU has its own
		nic.Tap.Close()
	}
	l.mu.Lock()
	l.status.VM = &world.VMStatus{Accelerator: cfg.Accelerator, Kernel: cfg.Image.Kernel.Release, Restored: true}
	l.mu.Unlock()
	l.say(world.Progress{Message: fmt.Sprintf("the machine's memory is read (%d MB)", snap.Memory/1e6), Took: time.Since(start)})
	return m, nil
}

// awake lets a restored machine go on, frozen as it was saved, and tells its
// agent what it missed.
func (l *lab) awake(ctx context.Context, a *agent) error {
	err := l.step("the machine answers", func() error {
		if err := a.vm.Resume(); err != nil {
			return err
		}
		return a.waitAnswer(ctx, 30*time.Second)
	})
	if err != nil {
		return err
	}
	return l.step("the machine is awake", func() error {
		seed := make([]byte, 64)
		rand.Read(seed) // never fails
		if err := a.client.Awake(ctx, world.AwakeRequest{Now: time.Now(), Seed: seed}); err != nil {
			return err
		}
		if err := syncClock(ctx, a.client, 0); err != nil {
			return err
		}
		go l.keepClock(ctx, a)
		return nil
	})
}

// thawTimeout is how long a machine that was saved may take to go on: some
// milliseconds.
const thawTimeout = 30 * time.Second

// backTimeout is how long nodes and daemons may take to be back when all of the
// machine's programs go on: 5 to 8 s on a host with 20 others that want its two
// cores, and 30 s where somebody has not heard that a connection has ended.
const backTimeout = 3 * time.Minute

// backInterval is the time from one look to the next: an API server takes some
// 30 ms of processor time to count its metrics.
const backInterval = 500 * time.Millisecond

// waitBack waits until every node of a cluster has renewed its lease after that
// moment, and everything is watched that was.
func (l *lab) waitBack(ctx context.Context, c *cluster, after time.Time, watches map[string]int) error {
	err := poll(ctx, backTimeout, backInterval, func(ctx context.Context) (string, error) {
		if missing, err := c.silent(ctx, after); missing != "" || err != nil {
			return missing, err
		}
		return c.unwatched(ctx, watches)
	})
	if err != nil {
		return fmt.Errorf("cluster %s: %w", c.spec.Name, err)
	}
	return nil
}

// silent says which node has not renewed its lease since then, or nothing.
func (c *cluster) silent(ctx context.Context, since time.Time) (string, error) {
	leases, err := c.cp.Client().CoordinationV1().Leases(corev1.NamespaceNodeLease).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("list the leases of nodes: %w", err)
	}
	for _, l := range leases.Items {
		if c.present[l.Name] && (l.Spec.RenewTime == nil || l.Spec.RenewTime.Time.Before(since)) {
			return "node " + l.Name + " has not renewed its lease", nil
		}
	}
	return "", nil
}

// unwatched says what has fewer watches than it had, or nothing.
func (c *cluster) unwatched(ctx context.Context, had map[string]int) (string, error) {
	now, err := c.watches(ctx)
	if err != nil {
		return "", err
	}
	return fewerWatches(had, now), nil
}

// fewerWatches says what has fewer watches than it had, or nothing.
func fewerWatches(had, now map[string]int) string {
	var out []string
	for _, what := range slices.Sorted(maps.Keys(had)) {
		if now[what] < had[what] {
			out = append(out, fmt.Sprintf("%d of %d of %s", now[what], had[what], what))
		}
	}
	if len(out) == 0 {
		return ""
	}
	return "watches are missing: " + strings.Join(out, ", ")
}

// watches counts the watches that the API server serves, by what is watched.
func (c *cluster) watches(ctx context.Context) (map[string]int, error) {
	b, err := c.cp.Client().Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("metrics of the API server of %s: %w", c.spec.Name, err)
	}
	return countWatches(string(b))
}

// countWatches reads the gauge of requests that last, which the API server
// keeps stable.
func countWatches(metrics string) (map[string]int, error) {
	out := map[string]int{}
	lines := bufio.NewScanner(strings.NewReader(metrics))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		labels, ok := strings.CutPrefix(lines.Text(), "apiserver_longrunning_requests{")
		if !ok || !strings.Contains(labels, `verb="WATCH"`) {
			continue
		}
		labels, value, ok := strings.Cut(labels, "} ")
		n, err := strconv.ParseFloat(value, 64)
		if !ok || err != nil {
			return nil, fmt.Errorf("metric apiserver_longrunning_requests: %q is not a number", value)
		}
		out[labelOf(labels, "resource")+"."+labelOf(labels, "group")] += int(n)
	}
	return out, lines.Err()
}

// labelOf returns the value of a label of a metric.
func labelOf(labels, name string) string {
	for l := range strings.SplitSeq(labels, ",") {
		if v, ok := strings.CutPrefix(l, name+`="`); ok {
			return strings.TrimSuffix(v, `"`)
		}
	}
	return ""
}
