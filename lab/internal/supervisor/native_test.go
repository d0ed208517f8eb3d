package supervisor_test

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gopacket/gopacket/pcapgo"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// sh runs a shell command in a target and returns what it printed.
func sh(t *testing.T, c *world.Client, target, script string) string {
	t.Helper()
	r, err := c.Exec(t.Context(), world.ExecRequest{Target: target, Argv: []string{"sh", "-c", script}})
	assert.NilError(t, err)
	assert.Equal(t, r.Code, 0, "%s: %s: %s%s", target, script, r.Stdout, r.Stderr)
	return string(r.Stdout)
}

func TestTheNetworkIsAsPlanned(t *testing.T) {
	c := native(t)
	ctx := t.Context()

	for _, tt := range []struct{ name, from, script string }{
		{"a node reaches its control plane", "milan/node-1", "busybox ping -c1 -W2 172.18.1.2"},
		{"a node reaches the other one", "milan/node-1", "busybox ping -c1 -W2 172.18.1.12"},
		{"a node reaches a node of the other cluster", "milan/node-1", "busybox ping -c1 -W2 172.18.2.11"},
		{"a control plane reaches outside", "rome/control-plane", "busybox ping -c1 -W2 203.0.113.101"},
		{"the host outside reaches a node", "user", "busybox ping -c1 -W2 172.18.2.11"},
		{"what clients keep of a cluster is the lab's", "rome/control-plane", `[ "$KUBECACHEDIR" = "$(dirname "$KUBECONFIG")/kube-cache" ]`},
	} {
		t.Run(tt.name, func(t *testing.T) { sh(t, c, tt.from, tt.script) })
	}

	t.Run("the router translates pods and no nodes", func(t *testing.T) {
		sh(t, c, "milan/node-1", "ip address add 10.0.7.7/32 dev lo")
		sh(t, c, "milan/router", "ip route add 10.0.7.7/32 via 172.18.1.11")
		since := time.Now()
		sh(t, c, "milan/node-1", "busybox ping -c1 -W2 -I 10.0.7.7 203.0.113.101; busybox ping -c1 -W2 203.0.113.101")
		w, err := c.WirePackets(ctx, world.WireQuery{On: "wan", Since: since})
		assert.NilError(t, err)
		var sources []string
		for _, f := range w.Flows {
			if f.Proto == "icmp" && f.Dst.String() == "203.0.113.101" {
				sources = append(sources, f.Src.String())
			}
		}
		slices.Sort(sources)
		assert.DeepEqual(t, sources, []string{"172.18.1.11", "203.0.113.1"})
	})

	t.Run("a token is found on every hop", func(t *testing.T) {
		const token = "5ca1ab1e5ca1ab1e"
		since := time.Now()
		r, err := c.Exec(ctx, world.ExecRequest{Target: "user", Argv: []string{"bash", "-c", fmt.Sprintf("echo '%s>' > /dev/udp/172.18.1.11/7777", token)}})
		assert.NilError(t, err)
		assert.Equal(t, r.Code, 0, "%s", r.Stderr)
		var got []string
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			s, err := c.Sightings(ctx, world.SightingQuery{Token: token})
			if err != nil {
				return poll.Error(err)
			}
			got = nil
			for _, x := range s {
				if x.Proto == "udp" {
					got = append(got, fmt.Sprintf("%s:%s %s %s %s", x.Host, x.Interface, x.Direction, x.Dst, x.Marker))
				}
			}
			if len(got) < 5 {
				return poll.Continue("%d sightings", len(got))
			}
			return poll.Success()
		})
		for _, want := range []string{
			"user:eth0 out 172.18.1.11:7777 >", "wan:w-out1 in 172.18.1.11:7777 >", "milan/router:eth1 in 172.18.1.11:7777 >",
			"milan/router:eth0 out 172.18.1.11:7777 >", "milan/node-1:eth0 in 172.18.1.11:7777 >",
		} {
			assert.Check(t, is.Contains(got, want))
		}
		w, err := c.WirePackets(ctx, world.WireQuery{On: "wan", Since: since, Contains: []string{token, "never sent"}})
		assert.NilError(t, err)
		assert.Check(t, w.Found[0] >= 1 && w.Found[1] == 0, "found %v", w.Found)
		assert.Equal(t, w.Lost, 0)
	})

	t.Run("the capture file names hosts and interfaces", func(t *testing.T) {
		var b bytes.Buffer
		assert.NilError(t, c.WritePcap(ctx, &b))
		r, err := pcapgo.NewNgReader(&b, pcapgo.NgReaderOptions{WantMixedLinkType: true})
		assert.NilError(t, err)
		n := 0
		for {
			if _, _, err := r.ReadPacketData(); err != nil {
				break
			}
			n++
		}
		var names []string
		for i := range r.NInterfaces() {
			intf, err := r.Interface(i)
			assert.NilError(t, err)
			names = append(names, intf.Name)
		}
		assert.Check(t, n > 20, "%d packets", n)
		for _, want := range []string{"milan/node-1:eth0", "milan/router:eth1", "user:eth0", "wan:w-router1"} {
			assert.Check(t, is.Contains(names, want))
		}
	})

	t.Run("a terminal", func(t *testing.T) {
		var out bytes.Buffer
		code, err := c.ExecStream(ctx, world.ExecRequest{Target: "milan/node-2", Argv: []string{"sh"}, TTY: true, Rows: 33, Cols: 99},
			strings.NewReader("stty size; ip -br address show eth0; exit 5\n"), &out, &out, nil)
		assert.NilError(t, err)
		assert.Equal(t, code, 5)
		assert.Check(t, is.Contains(out.String(), "33 99"))
		assert.Check(t, is.Contains(out.String(), "172.18.1.12/24"))
	})

	t.Run("input, both outputs and the exit code", func(t *testing.T) {
		for _, target := range []string{"milan/node-1", "rome/control-plane"} {
			r, err := c.Exec(ctx, world.ExecRequest{Target: target, Argv: []string{"sh", "-c", "cat; echo $X >&2; exit 9"}, Stdin: []byte("in"), Env: []string{"X=err"}})
			assert.NilError(t, err)
			assert.DeepEqual(t, r, world.ExecResult{Stdout: []byte("in"), Stderr: []byte("err\n"), Code: 9})
		}
	})

	t.Run("the state of every host", func(t *testing.T) {
		s, err := c.State(ctx)
		assert.NilError(t, err)
		var hosts []string
		for _, h := range s {
			hosts = append(hosts, h.Host)
			for _, section := range h.Sections {
				if h.Host == "milan/router" && section.Command == "nft list ruleset" {
					assert.Check(t, is.Contains(section.Output, "ip saddr 10.0.0.0/16 ip saddr != 172.18.1.0/24 masquerade"))
				}
			}
		}
		assert.DeepEqual(t, hosts, []string{"milan/node-1", "milan/node-2", "milan/router", "rome/node-1", "rome/router", "user", "wan"})
	})

	t.Run("unknown targets are answered with those that exist", func(t *testing.T) {
		_, err := c.Exec(ctx, world.ExecRequest{Target: "milan/node-9", Argv: []string{"true"}})
		assert.ErrorIs(t, err, world.ErrNoTarget)
		assert.ErrorContains(t, err, "milan/node-2")
	})
}

// TestANodeLeavesAndJoins is about the host of a node, its cable and its
// namespace; what Kubernetes sees of it is TestANodeOfAClusterLeavesAndJoins.
func TestANodeLeavesAndJoins(t *testing.T) {
	c := native(t)
	ctx := t.Context()
	ports := func() string { return sh(t, c, "wan", "ls /sys/class/net") }
	hosts := func() []string {
		s, err := c.Inventory(ctx)
		assert.NilError(t, err)
		var names []string
		for _, h := range s {
			names = append(names, h.Host)
		}
		return names
	}
	sh(t, c, "milan/node-1", "busybox ping -c1 -W2 172.18.1.12")
	inode := strings.TrimSpace(sh(t, c, "milan/node-2", "readlink /proc/self/ns/net"))
	pin(t, []string{inode})

	assert.NilError(t, c.LeaveNode(ctx, "milan", "node-2"))
	assert.Check(t, !strings.Contains(ports(), "l1-node2"), "the cable is still there")
	assert.Check(t, !slices.Contains(hosts(), "milan/node-2"))
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		return ended(t, inode)
	}, poll.WithTimeout(30*time.Second))
	_, err := c.Exec(ctx, world.ExecRequest{Target: "milan/node-2", Argv: []string{"true"}})
	assert.ErrorIs(t, err, world.ErrNoTarget)
	s, err := c.Status(ctx)
	assert.NilError(t, err)
	assert.DeepEqual(t, s.Clusters[0].Nodes, []string{"node-1"})
	assert.NilError(t, c.LeaveNode(ctx, "milan", "node-2"), "a node that has left can't leave again")

	assert.NilError(t, c.JoinNode(ctx, "milan", "node-2"))
	assert.NilError(t, c.JoinNode(ctx, "milan", "node-2"), "a node that is there can't join again")
	since := time.Now()
	sh(t, c, "milan/node-1", "busybox ping -c1 -W2 172.18.1.12")
	w, err := c.WirePackets(ctx, world.WireQuery{On: "milan/node-2", Since: since})
	assert.NilError(t, err)
	assert.Check(t, w.Packets >= 2, "what the node that came back sees is not captured: %+v", w)
	s, err = c.Status(ctx)
	assert.NilError(t, err)
	assert.DeepEqual(t, s.Clusters[0].Nodes, []string{"node-1", "node-2"})

	assert.ErrorContains(t, c.JoinNode(ctx, "milan", "node-9"), `cluster milan has no node "node-9"`)
	assert.ErrorIs(t, c.LeaveNode(ctx, "oslo", "node-1"), world.ErrNoTarget)
}

// TestANodeOfAClusterLeavesAndJoins: a node that was absent at the start joins
// a real cluster, leaves it and joins again.
func TestANodeOfAClusterLeavesAndJoins(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Slow(t, "starts a control plane")
	for _, b := range []string{"kubernetes", "kube-proxy", "isthmus", "lab", "probe", "cni/bridge"} {
		nettest.Built(t, b)
	}
	spec := two(t)
	spec.Clusters = spec.Clusters[:1]
	spec.Clusters[0].Nodes[1].Absent = true
	ctx := t.Context()
	c, err := supervisor.Start(ctx, supervisor.Config{
		Name: "nodes", World: supervisor.Native, Spec: spec, BinDir: binDir(t), RunDir: runDir(t), Ephemeral: true,
		Progress: func(p world.Progress) { t.Log(p.Message, p.Took) },
	})
	assert.NilError(t, err)
	t.Cleanup(func() { c.Close() })
	cfg, err := c.RESTConfig(ctx, "milan")
	assert.NilError(t, err)
	api, err := kubernetes.NewForConfig(cfg)
	assert.NilError(t, err)
	nodes := func() map[string]string { // podCIDRs
		list, err := api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		assert.NilError(t, err)
		out := map[string]string{}
		for _, n := range list.Items {
			out[n.Name] = n.Spec.PodCIDR
		}
		return out
	}
	routed := func(host, podCIDR string, want bool) {
		t.Helper()
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			routes := sh(t, c, host, "ip route")
			if strings.Contains(routes, podCIDR+" via 172.18.1.12") != want {
				return poll.Continue("%s: route to %s, wanted %v:\n%s", host, podCIDR, want, routes)
			}
			return poll.Success()
		}, poll.WithTimeout(10*time.Second))
	}
	assert.DeepEqual(t, nodes(), map[string]string{"node-1": "10.0.0.0/24"})

	given := map[string]bool{"": true, "10.0.0.0/24": true}
	for range 2 {
		start := time.Now()
		assert.NilError(t, c.JoinNode(ctx, "milan", "node-2"))
		t.Logf("node-2 joined in %v", time.Since(start).Round(time.Millisecond))
		podCIDR := ""
		// The controller-manager gives it, the next one or one after it. A node
		// that comes back gets a new one.
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			if podCIDR = nodes()["node-2"]; given[podCIDR] {
				return poll.Continue("node-2 has the podCIDR %q, of those that were given: %v", podCIDR, given)
			}
			return poll.Success()
		}, poll.WithTimeout(20*time.Second))
		given[podCIDR] = true
		routed("milan/node-1", podCIDR, true)
		routed("milan/router", podCIDR, true)
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			if !strings.Contains(sh(t, c, "milan/node-2", "nft list tables"), "kube-proxy") {
				return poll.Continue("kube-proxy has no rules on the node that joined")
			}
			return poll.Success()
		}, poll.WithTimeout(20*time.Second))
		inode := strings.TrimSpace(sh(t, c, "milan/node-2", "readlink /proc/self/ns/net"))
		pin(t, []string{inode})

		start = time.Now()
		assert.NilError(t, c.LeaveNode(ctx, "milan", "node-2"))
		t.Logf("node-2 left in %v", time.Since(start).Round(time.Millisecond))
		assert.DeepEqual(t, nodes(), map[string]string{"node-1": "10.0.0.0/24"})
		routed("milan/node-1", podCIDR, false)
		routed("milan/router", podCIDR, false)
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			return ended(t, inode)
		}, poll.WithTimeout(30*time.Second))
	}
}

// TestUnderlayChecks is about what a topology wants of the nodes' links and of
// the LAN.
func TestUnderlayChecks(t *testing.T) {
	nettest.NeedRoot(t)
	spec := two(t)
	spec.Clusters[0].SourceCheck, spec.Clusters[0].RPFilter = true, topology.RPFilterStrict
	spec.Clusters[0].Nodes[1].Absent = true
	c, err := supervisor.Start(t.Context(), supervisor.Config{
		Name: "checks", World: supervisor.Native, Spec: spec, BinDir: binDir(t), RunDir: runDir(t), Ephemeral: true, KubernetesLess: true,
	})
	assert.NilError(t, err)
	t.Cleanup(func() { c.Close() })
	s, err := c.Status(t.Context())
	assert.NilError(t, err)
	assert.DeepEqual(t, s.Clusters[0].Nodes, []string{"node-1"})
	assert.NilError(t, c.JoinNode(t.Context(), "milan", "node-2"))

	sh(t, c, "milan/node-2", "test $(cat /proc/sys/net/ipv4/conf/eth0/rp_filter) = 1 && test $(cat /proc/sys/net/ipv4/conf/all/rp_filter) = 0")
	sh(t, c, "rome/node-1", "test $(cat /proc/sys/net/ipv4/conf/eth0/rp_filter) = 2")
	// A foreign source leaves rome's node, and not milan's. The neighbour is asked
	// for with an address that it answers, first.
	for _, node := range []string{"milan/node-2", "rome/node-1"} {
		sh(t, c, node, "ip address add 192.0.2.9/32 dev lo")
	}
	since := time.Now()
	sh(t, c, "milan/node-2", "busybox ping -c1 -W2 172.18.1.11; ! busybox ping -c1 -W1 -I 192.0.2.9 172.18.1.11")
	sh(t, c, "rome/node-1", "busybox ping -c1 -W2 172.18.2.1; ! busybox ping -c1 -W1 -I 192.0.2.9 172.18.2.1")
	for host, want := range map[string][]string{"milan/node-1": {"172.18.1.12"}, "rome/router": {"192.0.2.9"}} {
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			w, err := c.WirePackets(t.Context(), world.WireQuery{On: host, Since: since})
			if err != nil {
				return poll.Error(err)
			}
			var sources []string
			for _, f := range w.Flows {
				if from := f.Src.String(); f.Proto == "icmp" && (from == "172.18.1.12" || from == "192.0.2.9") {
					sources = append(sources, from)
				}
			}
			if !slices.Equal(sources, want) {
				return poll.Continue("%s has seen %q, not %q", host, sources, want)
			}
			return poll.Success()
		}, poll.WithTimeout(30*time.Second))
	}
	assert.Check(t, is.Contains(sh(t, c, "wan", "nft list ruleset"), `iifname "l1-node2" ip saddr != @l1_node2 counter packets 1 `))
}

func TestTheSameLabTwice(t *testing.T) {
	nettest.NeedRoot(t)
	cfg := supervisor.Config{Name: "twice", World: supervisor.Native, Spec: two(t), BinDir: binDir(t), RunDir: runDir(t), Ephemeral: true, KubernetesLess: true}
	c, err := supervisor.Start(t.Context(), cfg)
	assert.NilError(t, err)
	defer c.Close()
	_, err = supervisor.Start(t.Context(), cfg)
	assert.ErrorContains(t, err, "lab twice runs already")
	assert.ErrorContains(t, err, "`lab down twice` ends it")
}

func TestWhatIsMissingIsNamed(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  supervisor.Config
		want string
	}{
		{"no binaries", supervisor.Config{Name: "x", World: supervisor.Native, BinDir: t.TempDir()}, "isthmus is missing in "},
		{"no such world", supervisor.Config{Name: "x", World: "kind", KubernetesLess: true}, `world "kind": use native or vm`},
		{"a name that is no directory", supervisor.Config{Name: "../x", World: supervisor.Native, KubernetesLess: true}, `lab name "../x": use up to 63 small letters`},
		{"a path too long for a socket", supervisor.Config{Name: "x", World: supervisor.Native, RunDir: "/" + strings.Repeat("x", 120), KubernetesLess: true}, "too long for a socket"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := supervisor.Start(t.Context(), tt.cfg)
			assert.ErrorContains(t, err, tt.want)
		})
	}
}

func TestTheRunDirectoryCannotBeMade(t *testing.T) {
	nettest.NeedRoot(t)
	for _, tt := range []struct {
		name    string
		flags   uintptr // of the tmpfs it shall be in
		options string
		want    string
	}{
		{"no space", 0, "size=4096,nr_inodes=1", "there is no space left for %s: make some (df -h and df -i show what is full)"},
		{"no space for what is in it", 0, "size=4096,nr_inodes=2", "there is no space left for %s: make some"},
		{"read-only", syscall.MS_RDONLY, "", "run directory: mkdir %s: read-only file system: make it writable"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := runDir(t)
			assert.NilError(t, syscall.Mount("full", dir, "tmpfs", tt.flags, tt.options))
			t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
			dir = filepath.Join(dir, "x")
			_, err := supervisor.Start(t.Context(), supervisor.Config{Name: "full", World: supervisor.Native, RunDir: dir, BinDir: binDir(t), KubernetesLess: true})
			assert.ErrorContains(t, err, fmt.Sprintf(tt.want, dir))
		})
	}
}
