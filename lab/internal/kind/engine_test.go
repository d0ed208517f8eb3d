package kind

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// TestEngine makes a small cluster where a container engine runs, and probes a
// pod from itself and from another node.
func TestEngine(t *testing.T) {
	nettest.Slow(t, "makes a cluster of three containers")
	bin := filepath.Dir(nettest.Built(t, "probe"))
	// An engine may be installed where nobody has built the image of its nodes:
	// this test belongs to make test-kind.
	for _, p := range Doctor(t.Context(), bin) {
		if !p.OK {
			nettest.SkipOrFail(t, World, fmt.Errorf("%s: %s: %s", p.Name, p.Detail, p.Fix))
		}
	}
	engine, err := FindEngine(t.Context())
	assert.NilError(t, err)
	// Where the lab has its clusters of kind: "lab down --all" takes this one down, too.
	dir := filepath.Join(rundir.Base(), "engine-test")
	takeDown(t, dir) // what a run that was killed has left
	before, alone := thisMachine(t, engine)
	l, err := Create(t.Context(), Spec{
		Name: "engine-test", Dir: dir, BinDir: bin, Engine: engine,
		Topology: parse(t, "clusters: { milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16, cni: ptp } }"),
		Progress: func(message string, took time.Duration) { t.Log(message, took) },
	})
	// Another process takes it down, which knows no more of it than its directory has.
	t.Cleanup(func() {
		if l != nil {
			assert.Check(t, l.Close())
		}
		takeDown(t, dir)
		after, stillAlone := thisMachine(t, engine)
		assert.Check(t, cmp.Len(clusterHas(t, engine, ClusterName("engine-test", "milan")), 0))
		if !alone || !stillAlone {
			t.Log("containers of somebody else's run: what they change of this machine meanwhile is theirs, and only what the cluster had is looked for")
			return
		}
		assert.Check(t, cmp.DeepEqual(after, before))
	})
	assert.NilError(t, err)
	want := 3 // nodes
	if engine.Name == podman {
		want *= 2 // each has a volume that names it
	}
	assert.Check(t, cmp.Len(clusterHas(t, engine, ClusterName("engine-test", "milan")), want))

	if CanCapture(engine) {
		assert.NilError(t, l.Capture(t.Context()))
	}
	client, err := l.Client("milan")
	assert.NilError(t, err)
	_, err = client.CoreV1().Pods(deploy.PodNamespace).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.PodSpec{
			NodeSelector: map[string]string{corev1.LabelHostname: "node-1"},
			Containers:   []corev1.Container{{Name: "probe", Image: deploy.ProbeImage, ImagePullPolicy: corev1.PullNever, Args: []string{"serve"}}},
		},
	}, metav1.CreateOptions{})
	assert.NilError(t, err)
	var web world.PodStatus
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		s, err := l.Status(t.Context())
		if err != nil {
			return poll.Error(err)
		}
		for _, web = range s.Clusters[0].Pods {
			if web.Name == "web" {
				return poll.Success()
			}
		}
		return poll.Continue("the pod does not run")
	}, poll.WithTimeout(2*time.Minute))

	for _, target := range []string{"milan/web", "milan/node-2"} {
		res, err := l.Exec(t.Context(), world.ExecRequest{
			Target: target, Host: true,
			Argv: []string{"probe", "dial", "--to", web.IP.String(), "--token", "5ca1ab1e5ca1ab1e", "--timeout", "5s"},
		})
		assert.NilError(t, err)
		assert.Equal(t, res.Code, 0, "%s", res.Stderr)
		var got prober.Result
		assert.NilError(t, json.Unmarshal(res.Stdout, &got))
		assert.Check(t, got.OK, "%s: %v", target, got)
	}
	if CanCapture(engine) {
		seen, err := l.Sightings(t.Context(), world.SightingQuery{Token: "5ca1ab1e5ca1ab1e"})
		assert.NilError(t, err)
		at := map[string]bool{}
		for _, s := range seen {
			at[s.Host] = true
		}
		assert.Check(t, at["milan/web"] && at["milan/node-1"] && at["milan/node-2"], "the probe was seen on %v", at)
	}
	// Kind waits half a minute for this target where the machine has cgroup version 2.
	res, err := l.Exec(t.Context(), world.ExecRequest{Target: "milan/node-1", Host: true, Argv: []string{"systemctl", "show", "--property", "After", "--value", "multi-user.target"}})
	assert.NilError(t, err)
	assert.Check(t, cmp.Contains(string(res.Stdout), "basic.target"))
	for _, slow := range []string{"load-images.service", "kubelet.service"} {
		assert.Check(t, !strings.Contains(string(res.Stdout), slow), "multi-user.target waits for %s", slow)
	}
	if CanCapture(engine) { // commands enter nodes by themselves, and nobody waits for what they leave behind
		res, err = l.Exec(t.Context(), world.ExecRequest{Target: "milan/node-1", Host: true, Argv: []string{"sh", "-c", "echo begun; sleep infinity &"}})
		assert.NilError(t, err)
		assert.Equal(t, string(res.Stdout), "begun\n")
		assert.Equal(t, res.Code, 0)
	}
	res, err = l.Exec(t.Context(), world.ExecRequest{Target: "milan/web", Host: true, Argv: []string{"ip", "-o", "address", "show", "eth0"}})
	assert.NilError(t, err)
	assert.Equal(t, res.Code, 0, "%s", res.Stderr)
	res, err = l.Exec(t.Context(), world.ExecRequest{Target: "milan/node-1", Argv: []string{"sh", "-c", "pwd; hostname; exit 7"}})
	assert.NilError(t, err)
	assert.Equal(t, string(res.Stdout)+string(res.Stderr), "/\n"+ClusterName("engine-test", "milan")+"-worker\n")
	assert.Equal(t, res.Code, 7)
	logs, err := l.Logs(t.Context(), nil)
	assert.NilError(t, err)
	assert.Check(t, len(logs) > 0)
}

// takeDown takes a lab down, as the next process does after the one that made it was killed.
func takeDown(t *testing.T, dir string) {
	t.Helper()
	l, err := Open(dir)
	if errors.Is(err, world.ErrNotRunning) {
		return
	}
	assert.NilError(t, err)
	assert.NilError(t, l.Down(context.Background()))
}

// clusterHas is what an engine has of a cluster: containers by name, and volumes by labels,
// which name the nodes.
func clusterHas(t *testing.T, engine Engine, cluster string) []string {
	t.Helper()
	var out []string
	for _, list := range []string{"ps --all --format {{.Names}}", "volume ls --format {{.Labels}}"} {
		text, err := run(context.Background(), engine.Name, strings.Fields(list)...)
		assert.NilError(t, err)
		for line := range strings.Lines(text) {
			if strings.Contains(line, cluster) {
				out = append(out, strings.TrimSpace(line))
			}
		}
	}
	return out
}

// thisMachine is what clusters change of it: its settings, and what the engine has; and
// whether no other lab and nobody's containers are there.
func thisMachine(t *testing.T, engine Engine) (out map[string]string, alone bool) {
	t.Helper()
	out = map[string]string{}
	for _, name := range slices.Concat([]string{inotify}, forwarding, bridgeFilters) {
		if b, err := os.ReadFile("/proc/sys/" + name); err == nil {
			out[name] = strings.TrimSpace(string(b))
		}
	}
	if _, err := os.Stat(modules); err == nil {
		out[modules] = "is there"
	}
	if !netavarkMissing(context.Background()) {
		out["chains of netavark"] = "are there"
	}
	for what, all := range map[string][]string{"container": {"-a"}, "volume": nil, "network": nil} {
		names, err := run(context.Background(), engine.Name, append([]string{what, "ls", "-q"}, all...)...)
		assert.NilError(t, err)
		out[what] = names
	}
	labs, err := List(rundir.Base())
	assert.NilError(t, err)
	return out, out["container"] == "" && len(labs) == 0
}
