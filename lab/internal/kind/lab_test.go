package kind

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/kind/pkg/log"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane/controlplanetest"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// An engine is what kind's library finds instead of Docker; see
// testdata/docker.
type engine struct{ dir string }

// newEngine puts it before everything else in the PATH.
func newEngine(t *testing.T) engine {
	t.Helper()
	e := engine{t.TempDir()}
	bin := t.TempDir()
	script, err := filepath.Abs("testdata/docker")
	assert.NilError(t, err)
	assert.NilError(t, os.Symlink(script, filepath.Join(bin, "docker")))
	t.Setenv("PATH", bin+":/usr/bin:/bin")
	t.Setenv("ENGINE", e.dir)
	t.Setenv("HOME", t.TempDir())
	t.Setenv(engineVariable, "")
	t.Setenv("KUBECONFIG", "")
	return e
}

// calls are what the engine was asked, a line each, those that start so.
func (e engine) calls(t *testing.T, start string) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(e.dir, "calls"))
	assert.NilError(t, err)
	var out []string
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, start) {
			out = append(out, line)
		}
	}
	return out
}

// file is what was written to a path of a container.
func (e engine) file(t *testing.T, container, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(e.dir, container, path))
	assert.NilError(t, err)
	return string(b)
}

// foreign makes a cluster of kind that is no lab's.
func (e engine) foreign(t *testing.T, cluster string) {
	t.Helper()
	dir := filepath.Join(e.dir, cluster+"-control-plane")
	assert.NilError(t, os.Mkdir(dir, 0o755))
	assert.NilError(t, os.WriteFile(filepath.Join(dir, "cluster"), []byte(cluster), 0o600))
}

// containers are the names of those that there are.
func (e engine) containers(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(e.dir, "*", "cluster"))
	assert.NilError(t, err)
	var out []string
	for _, f := range files {
		out = append(out, filepath.Base(filepath.Dir(f)))
	}
	return out
}

// binaries makes a folder with what nodes are given.
func binaries(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{world.ImagesDir, "cni", World} {
		assert.NilError(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	for _, file := range needs(dir) {
		assert.NilError(t, os.WriteFile(file, []byte("binary "+filepath.Base(file)), 0o755))
	}
	for program, image := range map[string]string{"isthmus": "ghcr.io/isthmus-net/isthmus:0.1.0", "probe": "docker.io/isthmus-lab/probe:dev"} {
		tag, err := name.NewTag(image)
		assert.NilError(t, err)
		assert.NilError(t, tarball.WriteToFile(archive(dir, program), tag, empty.Image))
	}
	tag, err := name.NewTag("localhost/isthmus-lab/kind-node:1")
	assert.NilError(t, err)
	assert.NilError(t, tarball.WriteToFile(nodeImage(dir), tag, empty.Image))
	return dir
}

// TestFindEngine: what answers is taken, and what is missing is said.
func TestFindEngine(t *testing.T) {
	newEngine(t)
	e, err := FindEngine(t.Context())
	assert.NilError(t, err)
	assert.DeepEqual(t, e, Engine{Name: "docker", Version: "28.2.2"})
	here, err := os.Hostname()
	assert.NilError(t, err)
	t.Setenv("ENGINE_MACHINE", here)
	e, err = FindEngine(t.Context())
	assert.NilError(t, err)
	assert.Check(t, e.Local)

	bin := binaries(t)
	for _, p := range Doctor(t.Context(), bin) {
		assert.Check(t, p.OK, "%v", p)
		assert.DeepEqual(t, p.Needed, []string{World})
	}
	assert.NilError(t, os.Remove(archive(bin, "probe")))
	images := Doctor(t.Context(), bin)[1]
	assert.Check(t, !images.OK)
	assert.Check(t, is.Contains(images.Detail, "images/probe-"))

	t.Setenv("ENGINE_DOWN", "yes")
	t.Setenv(engineVariable, "docker") // and no other that this machine may have
	_, err = FindEngine(t.Context())
	assert.ErrorContains(t, err, "docker is installed but can't be used: Cannot connect to the Docker daemon")
	probe := Doctor(t.Context(), bin)[0]
	assert.Check(t, !probe.OK, "%v", probe)
	assert.Check(t, is.Contains(probe.Fix, "unset "+engineVariable))
	interrupted, interrupt := context.WithCancel(t.Context())
	interrupt()
	_, err = FindEngine(interrupted)
	assert.ErrorIs(t, err, context.Canceled)

	t.Setenv(engineVariable, "podman")
	t.Setenv("PATH", t.TempDir())
	_, err = FindEngine(t.Context())
	assert.ErrorContains(t, err, "podman, which is not installed")
	t.Setenv(engineVariable, "lxd")
	_, err = FindEngine(t.Context())
	assert.ErrorContains(t, err, "is no engine that kind can use")
	t.Setenv(engineVariable, "")
	_, err = FindEngine(t.Context())
	assert.ErrorContains(t, err, "none of docker, nerdctl, finch, podman is installed")
}

// TestRootlessPodman: what kind would refuse when a lab begins is said before.
func TestRootlessPodman(t *testing.T) {
	const named = "podman is installed but can't be used: it runs without root, and "
	for host, want := range map[string]string{
		`{"cgroupVersion": "v1", "security": {"rootless": false}}`:                                                           "",
		`{"cgroupVersion": "v1", "security": {"rootless": true}}`:                                                            named + "kind needs cgroup version 2 for that, and this machine has v1; run the lab as root",
		`{"cgroupVersion": "v2", "security": {"rootless": true}}`:                                                            "", // before 4.0
		`{"cgroupVersion": "v2", "cgroupControllers": ["cpu", "memory", "pids"], "security": {"rootless": true}}`:            "",
		`{"cgroupVersion": "v2", "cgroupControllers": ["memory", "pids"], "security": {"rootless": true}}`:                   named + "systemd does not let it limit what kind limits (cgroup controllers cpu): set Delegate=yes",
		`{"cgroupVersion": "v2", "cgroupControllers": [], "security": {"rootless": true}, "slirp4netns": {"executable": 1}}`: named + "systemd does not let it limit what kind limits (cgroup controllers memory, pids, cpu): set Delegate=yes",
		`running`: "podman is installed but can't be used: read what it says of its host: invalid character",
	} {
		if err := refusedPodman(host); want == "" {
			assert.Check(t, is.Nil(err), host)
		} else {
			assert.Check(t, is.ErrorContains(err, want), host)
		}
	}
}

// TestPodmanHelpers: what Podman's networks need is looked for where Podman looks, and no lab is
// refused for it.
func TestPodmanHelpers(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir()}
	p := probeHelpers(dirs)
	assert.Check(t, !p.OK)
	assert.Equal(t, p.Detail, "Podman lacks aardvark-dns, which answers for the names of containers: nodes wait for names that nobody answers; netavark, which makes its networks")
	assert.Equal(t, len(p.Needed), 0)
	assert.NilError(t, os.WriteFile(filepath.Join(dirs[1], "netavark"), nil, 0o755))
	assert.Equal(t, probeHelpers(dirs).Detail, "Podman lacks aardvark-dns, which answers for the names of containers: nodes wait for names that nobody answers")
	assert.NilError(t, os.WriteFile(filepath.Join(dirs[0], "aardvark-dns"), nil, 0o755))
	assert.Check(t, probeHelpers(dirs).OK)
}

// TestLab goes all the way through kind's library with an engine that only
// remembers what it is asked, and a real API server: what is asked of the engine,
// what every node is given, and what others find of the lab.
func TestLab(t *testing.T) {
	binary := nettest.Built(t, "kubernetes")
	e := newEngine(t)
	top := parse(t, "clusters: { milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 } }\noutside: { user: {} }")
	const lab = "test-kind-vxlan"
	kindName := ClusterName(lab, "milan")
	client := apiServer(t, e, binary, kindName)

	base, bin := t.TempDir(), binaries(t)
	var said []string
	spec := Spec{
		Name: lab, Topology: top, Dir: filepath.Join(base, lab), BinDir: bin, Engine: Engine{Name: "docker"},
		Progress: func(message string, _ time.Duration) { said = append(said, message) },
	}
	_, err := Create(t.Context(), spec)
	assert.NilError(t, err)
	assert.Check(t, slices.Contains(said, "cluster milan created"), "%q", said)

	t.Run("containers", func(t *testing.T) {
		var names []string
		outside := e.calls(t, "run --detach")
		assert.Equal(t, len(outside), 1)
		assert.Check(t, is.Contains(outside[0], "--label isthmus-lab="+lab+" --net kind"))
		for _, call := range e.calls(t, "run --name") {
			f := strings.Fields(call)
			names = append(names, f[2])
			assert.Check(t, is.Contains(call, "--net kind"))
			assert.Check(t, is.Contains(call, "--label io.x-k8s.kind.cluster="+kindName))
		}
		slices.Sort(names)
		assert.DeepEqual(t, names, []string{kindName + "-control-plane", kindName + "-worker", kindName + "-worker2"})
	})
	t.Run("kubeadm", func(t *testing.T) {
		for container, node := range map[string]string{"-worker": "node-1", "-worker2": "node-2"} {
			conf := e.file(t, kindName+container, "kind/kubeadm.conf")
			_, join, _ := strings.Cut(conf, "kind: JoinConfiguration")
			assert.Check(t, is.Contains(join, "  name: "+node+"\n"))
			assert.Check(t, is.Contains(conf, "podSubnet: 10.0.0.0/16"))
			assert.Check(t, is.Contains(conf, "mode: nftables"))
		}
		conf := e.file(t, kindName+"-control-plane", "kind/kubeadm.conf")
		assert.Check(t, !strings.Contains(conf, "name: node-1"), conf)
	})
	t.Run("network", func(t *testing.T) {
		conf := e.file(t, kindName+"-worker", "etc/cni/net.d/10-lab.conflist")
		assert.Check(t, is.Contains(conf, `"type": "bridge"`))
		assert.Check(t, is.Contains(conf, `"subnet": "10.0.`))
		assert.Check(t, is.Contains(e.file(t, kindName+"-worker", "nft"), "daddr != 10.0.0.0/16 masquerade"))
		assert.Equal(t, len(e.calls(t, "exec --privileged "+kindName+"-worker ip route replace 10.0.")), 1)
		assert.Equal(t, len(e.calls(t, "exec --privileged "+kindName+"-control-plane ip route replace 10.0.")), 2)
	})
	t.Run("images", func(t *testing.T) {
		for _, c := range []string{"-worker", "-worker2"} {
			assert.Equal(t, len(strings.Fields(e.file(t, kindName+c, "imported"))), 2)
			tags := e.calls(t, "exec --privileged "+kindName+c+" ctr --namespace=k8s.io images tag")
			assert.Equal(t, len(tags), 1, "%q", tags)
			assert.Check(t, is.Contains(tags[0], "ghcr.io/isthmus-net/isthmus:0.1.0 docker.io/library/isthmus:dev"))
			assert.Equal(t, e.file(t, kindName+c, "usr/local/bin/probe"), "binary probe")
		}
	})
	t.Run("the control plane is no node", func(t *testing.T) {
		_, err := client.CoreV1().Nodes().Get(t.Context(), kindName+"-control-plane", metav1.GetOptions{})
		assert.Check(t, apierrors.IsNotFound(err), "%v", err)
	})
	t.Run("the user's files", func(t *testing.T) {
		_, err := os.Stat(filepath.Join(os.Getenv("HOME"), ".kube"))
		assert.ErrorIs(t, err, os.ErrNotExist)
	})

	names, err := List(base)
	assert.NilError(t, err)
	assert.DeepEqual(t, names, []string{lab})
	l, err := Open(spec.Dir)
	assert.NilError(t, err)
	t.Run("status", func(t *testing.T) { status(t, l, client) })
	t.Run("commands", func(t *testing.T) { commands(t, l, e, kindName) })

	assert.NilError(t, l.Down(t.Context()))
	rm := e.calls(t, "rm ")
	assert.Equal(t, len(rm), 1)
	assert.Equal(t, strings.Count(rm[0], kindName), 3, rm[0])
	names, err = List(base)
	assert.NilError(t, err)
	assert.Equal(t, len(names), 0)
	_, err = Open(spec.Dir)
	assert.ErrorIs(t, err, world.ErrNotRunning)
}

// TestPortTaken: another program takes the port of an API server between the moment in which kind has
// found it free and the one in which the engine serves it, again and again. The other node is made
// when kind has given up. Nothing of the lab stays.
func TestPortTaken(t *testing.T) {
	e := newEngine(t)
	const lab = "port-kind-vxlan"
	top := parse(t, "clusters: { milan: { nodes: 1, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 } }")
	base := t.TempDir()
	e.foreign(t, "somebodys")
	t.Setenv("ENGINE_PORT_TAKEN", "--name "+ClusterName(lab, "milan")+"-control-plane")
	t.Setenv("ENGINE_LATE", "--name "+ClusterName(lab, "milan")+"-worker")
	_, err := Create(t.Context(), Spec{Name: lab, Topology: top, Dir: filepath.Join(base, lab), BinDir: binaries(t), Engine: Engine{Name: "docker"}})
	assert.ErrorContains(t, err, "cluster milan: ")
	assert.ErrorContains(t, err, "127.0.0.1:6443: bind: address already in use")
	assert.ErrorContains(t, err, "kind create: tried 3 times: ")
	tries := slices.DeleteFunc(e.calls(t, "run "), func(call string) bool { return !strings.Contains(call, "-control-plane ") })
	assert.Equal(t, len(tries), 3, tries)
	assert.DeepEqual(t, e.containers(t), []string{"somebodys-control-plane"})
	names, err := List(base)
	assert.NilError(t, err)
	assert.Check(t, is.Len(names, 0))
}

// apiServer starts the one that stands for that of the nodes, with the Nodes
// that kubeadm would make.
func apiServer(t *testing.T, e engine, binary, kindName string) kubernetes.Interface {
	t.Helper()
	cp, err := controlplane.Start(t.Context(), controlplane.Config{
		Name: "milan", Dir: t.TempDir(), Binary: binary, Address: netip.MustParseAddr("127.0.0.1"), Ports: controlplanetest.FreePorts(t),
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"), PodCIDR: netip.MustParsePrefix("10.0.0.0/16"),
	})
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, cp.Close()) })
	t.Setenv("API_PORT", fmt.Sprint(cp.Address().Port()))
	kubeconfig, err := cp.Kubeconfig("admin")
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(filepath.Join(e.dir, "admin.conf"), kubeconfig, 0o600))
	for i, n := range []struct{ name, container string }{
		{kindName + "-control-plane", kindName + "-control-plane"}, {"node-1", kindName + "-worker"}, {"node-2", kindName + "-worker2"},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}, Spec: corev1.NodeSpec{ProviderID: "kind://docker/" + kindName + "/" + n.container}}
		if i == 0 {
			node.Labels = map[string]string{controlPlaneLabel: ""}
		}
		_, err := cp.Client().CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
		assert.NilError(t, err)
		says := corev1.NodeStatus{
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: n.container}, {Type: corev1.NodeInternalIP, Address: fmt.Sprintf("172.18.0.%d", i+2)}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}},
		}
		// The controller-manager writes to it, too.
		assert.NilError(t, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			node, err := cp.Client().CoreV1().Nodes().Get(t.Context(), n.name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			node.Status = says
			_, err = cp.Client().CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
			return err
		}))
	}
	return cp.Client()
}

// status is what others learn of the lab: the engine's addresses, and pods that
// run.
func status(t *testing.T, l *Lab, client kubernetes.Interface) {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "probe", Image: "isthmus-lab/probe:dev"}}},
	}
	p, err := client.CoreV1().Pods("default").Create(t.Context(), p, metav1.CreateOptions{})
	assert.NilError(t, err)
	p.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: "10.0.1.2", PodIPs: []corev1.PodIP{{IP: "10.0.1.2"}},
		ContainerStatuses: []corev1.ContainerStatus{{Name: "probe", RestartCount: 2}},
	}
	_, err = client.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
	assert.NilError(t, err)

	s, err := l.Status(t.Context())
	assert.NilError(t, err)
	assert.Equal(t, s.Phase, world.PhaseReady)
	assert.Equal(t, s.World, World)
	assert.Equal(t, len(s.Spec.Outside), 1)
	assert.Equal(t, s.Spec.Outside[0].Addr.String(), "172.18.0.9")
	milan, _ := s.Spec.Cluster("milan")
	assert.Equal(t, milan.ControlPlane.String(), "172.18.0.2")
	assert.Check(t, !milan.Router.IsValid())
	for i, n := range milan.Nodes {
		assert.Equal(t, n.Addr.String(), fmt.Sprintf("172.18.0.%d", i+3))
	}
	assert.DeepEqual(t, s.Clusters[0].Nodes, []string{"node-1", "node-2"})
	assert.Equal(t, len(s.Clusters[0].Pods), 1)
	web := s.Clusters[0].Pods[0]
	assert.Equal(t, web.IP.String(), "10.0.1.2")
	assert.DeepEqual(t, web.Containers, []world.ContainerStatus{{Name: "probe", Restarts: 2}})

	// While somebody takes it down its API servers are not asked.
	done := l.markLeaving()
	s, err = l.Status(t.Context())
	assert.ErrorContains(t, l.isThere(), "is being taken down")
	done()
	assert.NilError(t, err)
	assert.Equal(t, s.Phase, world.PhaseStopping)
	assert.Equal(t, len(s.Clusters[0].Pods), 0)
}

// commands run where their target says, and end with their own exit code.
func commands(t *testing.T, l *Lab, e engine, kindName string) {
	run := func(target string, argv ...string) (world.ExecResult, error) {
		return l.Exec(t.Context(), world.ExecRequest{Target: target, Host: true, Argv: argv})
	}
	res, err := run("milan/node-1", "ip", "rule")
	assert.NilError(t, err)
	assert.Equal(t, string(res.Stdout), "0: from all lookup local\n")
	res, err = run("milan/node-2", "false")
	assert.NilError(t, err)
	assert.Equal(t, res.Code, 7)
	_, err = run("milan/control-plane", "kubernetes", "kubectl", "get", "nodes")
	assert.NilError(t, err)
	assert.Equal(t, len(e.calls(t, "exec --privileged -e TMPDIR=/tmp -e KUBECONFIGS=/kind/kubeconfigs "+kindName+"-control-plane kubernetes kubectl get nodes")), 1)
	_, err = run("milan/node-3", "true")
	assert.ErrorIs(t, err, world.ErrNoTarget)
	_, err = run("naples/node-1", "true")
	assert.ErrorIs(t, err, world.ErrNoTarget)

	// With the node's tools in the pod's network namespace.
	_, err = run("milan/web", "ip", "route")
	assert.NilError(t, err)
	in := e.calls(t, "exec --privileged -e TMPDIR=/tmp "+kindName+"-worker sh -c set -e pod=$(crictl")
	assert.Equal(t, len(in), 1)
	assert.Check(t, strings.HasSuffix(in[0], "sh default web ip route"), in[0])

	assert.NilError(t, l.KillContainer(t.Context(), "milan/web", ""))
	kill := e.calls(t, "exec --privileged "+kindName+"-worker sh -c set -e pod=$(crictl")
	assert.Check(t, is.Contains(kill[len(kill)-1], "kill -KILL"))

	// A stream of the probe on a node ends with the context: its input does.
	ctx, cancel := context.WithCancel(t.Context())
	var out bytes.Buffer
	cancel()
	_, err = l.ExecStream(ctx, world.ExecRequest{Target: "milan/node-1", Host: true, Argv: []string{"probe", "flow", "--to", "10.1.0.5"}}, nil, &out, &out, nil)
	assert.ErrorIs(t, err, context.Canceled)
	_, err = l.ExecStream(t.Context(), world.ExecRequest{Target: "milan/node-1", Host: true, Argv: []string{"probe", "flow", "--to", "10.1.0.5"}}, nil, &out, &out, nil)
	assert.NilError(t, err)
	flows := e.calls(t, "exec --privileged -i -e TMPDIR=/tmp "+kindName+"-worker probe --until-eof flow")
	assert.Equal(t, len(flows), 2)

	_, err = l.ExecStream(t.Context(), world.ExecRequest{Target: "milan/node-1", Host: true, TTY: true, Argv: []string{"sh", "-i"}}, nil, &out, &out, nil)
	assert.ErrorContains(t, err, "docker exec -it "+kindName+"-worker sh -i")

	hosts, err := l.Inventory(t.Context())
	assert.NilError(t, err)
	assert.Equal(t, len(hosts), 2)
	assert.Equal(t, hosts[0].Host, "milan/node-1")
	assert.DeepEqual(t, hosts[0].Lines, []string{"0: from all lookup local"})

	// A tool that fails has not found nothing; the state shows what it says.
	t.Setenv("ENGINE_FAILS", "nft list tables")
	_, err = l.Inventory(t.Context())
	assert.ErrorContains(t, err, "inventory of milan/node-1: nft list tables: exit code 1: netlink: No buffer space available")
	command := world.StateCommands()[0]
	t.Setenv("ENGINE_FAILS", command)
	state, err := l.State(t.Context())
	assert.NilError(t, err)
	assert.DeepEqual(t, state[0].Sections[0], world.StateSection{Command: command, Output: "netlink: No buffer space available\n"})
}

// TestCreateFails: nothing is left of a lab that fails on its way, and what kind
// refuses is refused by kind's own checks.
func TestCreateFails(t *testing.T) {
	e := newEngine(t)
	base := t.TempDir()
	top := parse(t, "clusters: { milan: { nodes: 1, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 } }")
	spec := Spec{Name: "fails-kind-vxlan", Topology: top, Dir: filepath.Join(base, "fails-kind-vxlan"), BinDir: binaries(t), Engine: Engine{Name: "docker"}}

	// There is no admin.conf: kubeadm "succeeds", and kind finds no cluster.
	_, err := Create(t.Context(), spec)
	assert.ErrorContains(t, err, "cluster milan: "+ClusterName(spec.Name, "milan")+": kind create: ")
	assert.Equal(t, len(e.calls(t, "run ")), 2)
	left := e.containers(t)
	assert.Equal(t, len(left), 0, "%q", left)
	_, err = os.Stat(spec.Dir)
	assert.ErrorIs(t, err, os.ErrNotExist)

	// kind validates what it is given.
	spec.Topology.Clusters[0].KubeProxy = "ebpf"
	_, err = Create(t.Context(), spec)
	assert.ErrorContains(t, err, "invalid kubeProxyMode: ebpf")
	spec.Topology.Clusters[0].KubeProxy = "nftables"

	assert.NilError(t, os.Remove(filepath.Join(spec.BinDir, "probe")))
	_, err = Create(t.Context(), spec)
	assert.ErrorContains(t, err, "make kind makes it")
	spec.Topology = load(t, "flat")
	_, err = Create(t.Context(), spec)
	assert.ErrorContains(t, err, "can't be made of clusters of kind")
	assert.Equal(t, len(e.calls(t, "run ")), 2)
}

// TestForeignClusters: clusters of the lab's names that the lab has not made
// stay, whether they are there before or come while it is made.
func TestForeignClusters(t *testing.T) {
	e := newEngine(t)
	top := parse(t, `clusters:
  milan: { nodes: 1, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 }
  rome: { nodes: 1, podCIDR: 10.1.0.0/16, serviceCIDR: 10.97.0.0/16 }
`)
	const lab = "same-kind-vxlan"
	milan, rome := ClusterName(lab, "milan"), ClusterName(lab, "rome")
	spec := Spec{Name: lab, Topology: top, Dir: filepath.Join(t.TempDir(), lab), BinDir: binaries(t), Engine: Engine{Name: "docker"}}

	t.Run("while it is made", func(t *testing.T) {
		spec := spec
		comes := sync.OnceFunc(func() { e.foreign(t, rome) })
		spec.Progress = func(string, time.Duration) { comes() }
		_, err := Create(t.Context(), spec)
		assert.ErrorContains(t, err, "docker has "+rome+" already, of another lab "+lab)
		assert.DeepEqual(t, e.containers(t), []string{rome + "-control-plane"})
		_, err = os.Stat(spec.Dir)
		assert.ErrorIs(t, err, os.ErrNotExist)
	})
	made := len(e.calls(t, "run "))
	t.Run("before", func(t *testing.T) {
		_, err := Create(t.Context(), spec)
		assert.Error(t, err, "docker has "+rome+" already, of another lab "+lab+": another user's, or one whose record is lost. Its owner takes it down with lab down "+lab+
			"; when nobody needs it any more, run: docker ps -aq --filter label=io.x-k8s.kind.cluster="+rome+" | xargs -r docker rm -f -v"+
			"; docker ps -aq --filter label=isthmus-lab="+lab+" | xargs -r docker rm -f -v")
		_, err = os.Stat(spec.Dir)
		assert.ErrorIs(t, err, os.ErrNotExist)
	})
	t.Run("podman", func(t *testing.T) {
		assert.Equal(t, removeAll("podman", "it", []string{"it-milan-1"}), "podman ps -aq --filter label=io.x-k8s.kind.cluster=it-milan-1 | xargs -r podman rm -f -v; "+
			"podman volume ls --format '{{.Name}} {{.Labels}}' | awk '/it-milan-1-/ { print $1 }' | xargs -r podman volume rm; "+
			"podman ps -aq --filter label=isthmus-lab=it | xargs -r podman rm -f -v")
	})
	t.Run("before the second cluster", func(t *testing.T) {
		p, err := provider("docker", log.NoopLogger{})
		assert.NilError(t, err)
		l := newLab(t.TempDir(), record{Name: lab, Engine: "docker"}, p)
		assert.NilError(t, l.begin("milan", milan))
		e.foreign(t, milan) // as if kind had made it for this lab
		assert.ErrorContains(t, l.begin("rome", rome), "label=io.x-k8s.kind.cluster="+rome)
		assert.NilError(t, l.delete())
	})
	assert.DeepEqual(t, e.containers(t), []string{rome + "-control-plane"})
	assert.Equal(t, len(e.calls(t, "run ")), made)
}

// TestTaken: somebody makes a cluster of a lab's name when it stands in the lab's record already. It
// is left alone.
func TestTaken(t *testing.T) {
	e := newEngine(t)
	t.Setenv("ENGINE_STOPS", "network")
	const lab = "taken-kind-vxlan"
	name := ClusterName(lab, "milan")
	top := parse(t, "clusters: { milan: { nodes: 1, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 } }")
	spec := Spec{Name: lab, Topology: top, Dir: filepath.Join(t.TempDir(), lab), BinDir: binaries(t), Engine: Engine{Name: "docker"}}
	made := make(chan error)
	go func() {
		_, err := Create(t.Context(), spec)
		made <- err
	}()
	stopped := filepath.Join(e.dir, "stopped")
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if _, err := os.Stat(stopped); err != nil {
			return poll.Continue("the engine is not asked for its network")
		}
		return poll.Success()
	}, poll.WithTimeout(time.Minute))
	e.foreign(t, name)
	assert.NilError(t, os.Remove(stopped))
	assert.ErrorContains(t, <-made, "docker has "+name+" already, of another lab "+lab)
	assert.DeepEqual(t, e.containers(t), []string{name + "-control-plane"})
	_, err := os.Stat(spec.Dir)
	assert.ErrorIs(t, err, os.ErrNotExist)
}
