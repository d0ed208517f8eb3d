package main

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/appliance/nettest/apiserver"
)

// init keeps the goroutines of tests off the main thread, which does not end
// with a goroutine that has taken it into a namespace.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) { os.Exit(nettest.Main(m)) }

// startAPI starts a real API server with our CRDs.
//
// The daemons reach it by the kubeconfig only through a wire of their own,
// which cut cuts.
func startAPI(t *testing.T) (admin client.Client, kubeconfig string, cut func()) {
	t.Helper()
	plane, config := apiserver.Start(t, "../../../k8s/crds")
	var err error
	admin, err = client.New(config, client.Options{Scheme: kube.Scheme()})
	assert.NilError(t, err)
	user, err := plane.AddUser(envtest.User{Name: "daemon", Groups: []string{"system:masters"}}, nil)
	assert.NilError(t, err)
	server, err := url.Parse(user.Config().Host)
	assert.NilError(t, err)
	address, cut := relay(t, server.Host)
	user.Config().Host = "https://" + address
	b, err := user.KubeConfig()
	assert.NilError(t, err)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	assert.NilError(t, os.WriteFile(kubeconfig, b, 0o600))
	return admin, kubeconfig, cut
}

// relay passes connections on to an address, until it is cut.
func relay(t *testing.T, to string) (address string, cut func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	assert.NilError(t, err)
	var mu sync.Mutex
	var over bool
	conns := []io.Closer{l}
	cut = func() {
		mu.Lock()
		defer mu.Unlock()
		over = true
		for _, c := range conns {
			_ = c.Close()
		}
	}
	t.Cleanup(cut)
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, in, out)
			if over { // it was cut meanwhile
				_, _ = in.Close(), out.Close()
			}
			mu.Unlock()
			for _, ends := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() {
					_, _ = io.Copy(ends[0], ends[1])
					_ = ends[0].Close()
				}()
			}
		}
	}()
	return l.Addr().String(), cut
}

// syncBuffer is a buffer that is read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// start runs a command line in a namespace until the test ends.
func start(t *testing.T, ns *nettest.NS, args ...string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var log syncBuffer
	code := make(chan int, 1)
	go ns.Do(func() { code <- run(ctx, args, &log, &log) })
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if c := <-code; c != 0 {
				t.Errorf("isthmus %s: exit status %d", args[0], c)
			}
		})
	}
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("log of isthmus %s:\n%s", strings.Join(args, " "), log.String())
		}
	})
	return stop
}

// within polls until check is nil, for at most d, or 30 s where that is longer: a busy
// machine may take that for what takes a moment.
func within(t *testing.T, d time.Duration, check func() error) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if err := check(); err != nil {
			return poll.Continue("%v", err)
		}
		return poll.Success()
	}, poll.WithDelay(20*time.Millisecond), poll.WithTimeout(max(d, 30*time.Second)))
}

// TestDaemons runs a node and both gateways of a peering, as they are started
// in a cluster, against a real API server: what they are told to do, do and
// report.
func TestDaemons(t *testing.T) {
	nettest.Slow(t, "starts an API server")
	nettest.Need(t, "ip")
	admin, kubeconfig, cut := startAPI(t)
	ctx := t.Context()
	const L, milan, rome = "liqo", "liqo-tenant-milan", "liqo-tenant-rome"
	create := func(objects ...client.Object) {
		t.Helper()
		for _, o := range objects {
			assert.NilError(t, admin.Create(ctx, o))
		}
	}
	for _, ns := range []string{L, milan, rome} {
		create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
	}

	// The pods of two gateways with a wire between them, and a node.
	a, b, host := nettest.Another(t), nettest.Another(t), nettest.Another(t)
	a.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0",
		"netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), b.FD()))
	for ns, addr := range map[*nettest.NS][2]string{a: {"203.0.113.1", "203.0.113.2"}, b: {"203.0.113.2", "203.0.113.1"}} {
		ns.Run("ip", "link", "set", "lo", "up")
		ns.Run("ip", "address", "add", addr[0]+"/24", "dev", "eth0")
		ns.Run("ip", "link", "set", "eth0", "up")
		ns.Run("ip", "route", "add", "default", "via", addr[1])
	}

	host.Run("ip", "link", "add", "eth0", "type", "bridge")
	host.Run("ip", "address", "add", "172.18.1.11/24", "dev", "eth0")
	host.Run("ip", "link", "set", "eth0", "up")
	host.Run("ip", "route", "add", "default", "via", "172.18.1.1")

	// What the user and the controller of each cluster have made. One API
	// server is both clusters here: the gateways don't know.
	keys := map[string]string{} // by tenant namespace, the directory
	public := map[string][]byte{}
	for _, tenant := range []string{milan, rome} {
		k, err := ecdh.X25519().GenerateKey(rand.Reader)
		assert.NilError(t, err)
		keys[tenant] = t.TempDir()
		public[tenant] = k.PublicKey().Bytes()
		assert.NilError(t, os.WriteFile(filepath.Join(keys[tenant], "privateKey"), k.Bytes(), 0o600))
		assert.NilError(t, os.WriteFile(filepath.Join(keys[tenant], "publicKey"), public[tenant], 0o600))
	}
	for _, p := range []struct {
		tenant, other, peer, pods string
		typ                       v1beta1.ConnectionType
	}{
		{rome, milan, "rome", "10.2.0.0/16", v1beta1.ConnectionTypeServer},
		{milan, rome, "milan", "10.1.0.0/16", v1beta1.ConnectionTypeClient},
	} {
		m := func(name string) metav1.ObjectMeta {
			return metav1.ObjectMeta{Namespace: p.tenant, Name: name, Labels: map[string]string{v1beta1.LabelRemoteClusterID: p.peer}}
		}
		create(
			&v1beta1.Configuration{ObjectMeta: m(p.peer), Spec: v1beta1.ConfigurationSpec{
				Remote: v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{v1beta1.CIDR(p.pods)}}},
			}},
			&v1beta1.PublicKey{ObjectMeta: m(p.peer), Spec: v1beta1.PublicKeySpec{PublicKey: public[p.other]}},
			&v1beta1.Connection{ObjectMeta: m("gw-" + p.peer), Spec: v1beta1.ConnectionSpec{Type: p.typ}},
			&v1beta1.GatewayReport{ObjectMeta: m("gw-" + p.peer)},
		)
	}
	dst, dev, scope := v1beta1.CIDR("10.9.0.0/16"), "eth0", v1beta1.LinkScope
	create(
		&v1beta1.InternalNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: v1beta1.InternalNodeSpec{
			Interface: v1beta1.InternalNodeSpecInterface{
				Gateway: v1beta1.InternalNodeGatewayInterface{Name: "liqo.n1"},
				Node:    v1beta1.InternalNodeNodeInterface{IP: "10.80.0.2"},
			},
		}},
		&v1beta1.RouteConfiguration{
			ObjectMeta: metav1.ObjectMeta{Namespace: L, Name: "user", Labels: map[string]string{v1beta1.LabelRouteCategory: v1beta1.CategoryFabric}},
			Spec: v1beta1.RouteConfigurationSpec{Table: v1beta1.RouteTable{Name: "user", Rules: []v1beta1.Rule{{
				Dst: &dst, Routes: []v1beta1.Route{{Dst: &dst, Dev: &dev, Scope: &scope}},
			}}}},
		},
	)
	create(&v1beta1.InternalFabric{ObjectMeta: metav1.ObjectMeta{Namespace: rome, Name: "rome", Labels: map[string]string{
		v1beta1.LabelRemoteClusterID: "rome",
	}}, Spec: v1beta1.InternalFabricSpec{
		GatewayIP: "203.0.113.2", GatewayNode: "n2",
		Interface: v1beta1.InternalFabricSpecInterface{
			Node:    v1beta1.InternalFabricNodeInterface{Name: "liqo.rome"},
			Gateway: v1beta1.InternalFabricGatewayInterface{IP: "10.80.0.9"},
		},
	}})

	common := []string{"--kubeconfig", kubeconfig}
	stopNode := start(t, host, append([]string{"node", "--node-name", "n1"}, common...)...)
	gateway := func(tenant, name, mode string, more ...string) []string {
		return append(append([]string{
			"gateway", "--name", name, "--namespace", tenant, "--remote-cluster-id", name, "--mode", mode, "--node-name", "n1",
			"--keys-dir", keys[tenant], "--state-dir", t.TempDir(), "--ping-interval", "200ms",
		}, more...), common...)
	}
	start(t, a, gateway(rome, "rome", "server")...)
	start(t, b, gateway(milan, "milan", "client", "--endpoint-address", "203.0.113.1", "--endpoint-port", "51840")...)

	// The node: address found, object applied, said so.
	within(t, 20*time.Second, func() error {
		var n v1beta1.InternalNode
		if err := admin.Get(ctx, client.ObjectKey{Name: "n1"}, &n); err != nil {
			return err
		}
		st := n.Status
		if st.NodeIP.Remote == nil || *st.NodeIP.Remote != "172.18.1.11" || st.NodeIP.Local != nil || st.Kernel == "" ||
			len(st.Applied) != 1 || !st.Applied[0].OK || st.Applied[0].Name != "user" || len(st.Conditions) != 4 {
			return fmt.Errorf("status %+v", st)
		}
		return nil
	})
	hasRule := func() error {
		if out := host.Run("ip", "rule", "show"); !strings.Contains(out, "to 10.9.0.0/16") {
			return errors.New(out)
		}
		return nil
	}
	assert.NilError(t, hasRule())

	// The gateways: connected, said so, with what there is to know.
	for _, g := range []struct {
		tenant, name string
		conditions   int // a client says, too, whether it dials where its spec says
	}{{rome, "gw-rome", 3}, {milan, "gw-milan", 4}} {
		key := client.ObjectKey{Namespace: g.tenant, Name: g.name}
		within(t, 30*time.Second, func() error {
			var c v1beta1.Connection
			if err := admin.Get(ctx, key, &c); err != nil {
				return err
			}
			if c.Status.Value != v1beta1.Connected || !strings.HasSuffix(c.Status.Latency.Value, "s") {
				return fmt.Errorf("Connection %s: %+v", key, c.Status)
			}
			var r v1beta1.GatewayReport
			if err := admin.Get(ctx, key, &r); err != nil {
				return err
			}
			if r.Status.MTU != 1440 || r.Status.Endpoint == "" || r.Status.LastHandshake == nil || r.Status.Implementation == "" || len(r.Status.Conditions) != g.conditions {
				return fmt.Errorf("GatewayReport %s: %+v", key, r.Status)
			}
			return nil
		})
	}

	// Without the API server everything stays, and drift is repaired.
	cut()
	host.Run("ip", "rule", "delete", "to", "10.9.0.0/16")
	within(t, 2*time.Second, hasRule)
	b.Do(func() { // the other gateway answers what a gateway of the public system sends
		c, err := net.Dial("udp", "169.254.18.1:12345")
		if !assert.Check(t, err) {
			return
		}
		defer c.Close()
		buf := make([]byte, 1024)
		within(t, 20*time.Second, func() error { // a gateway that hears nothing for 150 ms begins anew, and one answer is lost
			if _, err := c.Write([]byte(`{"clusterID":"rome","msgType":"PING","timeStamp":"2026-03-14T12:00:00.5Z"}`)); err != nil {
				return err
			}
			if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
				return err
			}
			n, err := c.Read(buf)
			if err == nil && !strings.Contains(string(buf[:n]), `"msgType":"PONG"`) {
				err = errors.New(string(buf[:n]))
			}
			return err
		})
	})
	stopNode()
	assert.NilError(t, hasRule(), "the end of a daemon must leave everything in place")
}
