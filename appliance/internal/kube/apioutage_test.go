package kube_test

import (
	"context"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/nettest/apiserver"
)

// A daemon follows again soon after the API server is back, however long that
// was away.
func TestOutage(t *testing.T) {
	plane, config := apiserver.Start(t, "../../../k8s/crds")
	ctx, cancel := context.WithCancel(t.Context())
	admin, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	assert.NilError(t, err)
	node, err := kube.NewNodeSource(kube.NodeSourceConfig{Config: config, Node: "node-1"})
	assert.NilError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- node.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		assert.NilError(t, <-ended)
	})
	create := func(name string) func() error {
		return func() error {
			return admin.Create(ctx, &v1beta1.InternalFabric{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: v1beta1.InternalFabricSpec{
				RemoteCIDRs: []v1beta1.CIDR{"10.1.0.0/16"}, GatewayIP: "10.127.65.9",
				Interface: v1beta1.InternalFabricSpecInterface{
					Node:    v1beta1.InternalFabricNodeInterface{Name: "liqo." + name},
					Gateway: v1beta1.InternalFabricGatewayInterface{IP: "10.80.0.5"},
				},
			}})
		}
	}
	fabrics := func(n int) func(kube.NodeView) bool {
		return func(v kube.NodeView) bool { return len(v.Input.Fabrics) == n }
	}
	assert.NilError(t, create("rome")())
	eventually(t, node, "the fabric", fabrics(1))

	api := plane.GetAPIServer()
	if err := api.Stop(); err != nil {
		assert.ErrorContains(t, err, "timeout") // killed
	}
	release := hold(t, api.SecureServing.ListenAddr)
	drain(node.Changed())
	select {
	case <-node.Changed():
		t.Error("the outage is a change")
	case <-time.After(15 * time.Second): // reflectors would be backing off for up to 25 s
	}
	v, err := node.Read(ctx)
	assert.NilError(t, err)
	assert.Assert(t, fabrics(1)(v))

	release()
	began := time.Now()
	assert.NilError(t, api.Start())
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if err := create("oslo")(); err != nil {
			return poll.Continue("%v", err)
		}
		return poll.Success()
	}, poll.WithTimeout(time.Minute), poll.WithDelay(50*time.Millisecond))
	ready := time.Now()
	busy := ready.Sub(began) // to start an API server
	for deadline := time.After(10*time.Second + 2*busy); ; {
		select {
		case <-node.Changed():
		case <-deadline:
			t.Fatal("nobody was told")
		}
		v, err := node.Read(ctx)
		assert.NilError(t, err)
		if fabrics(2)(v) {
			break
		}
	}
	t.Logf("followed after %v", time.Since(ready))
}

// hold keeps others from a port of TCP until release is called. Who dials it is refused.
func hold(t *testing.T, at envtest.ListenAddr) (release func()) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	assert.NilError(t, err)
	release = sync.OnceFunc(func() { _ = unix.Close(fd) })
	t.Cleanup(release)
	assert.NilError(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)) // connections of before may not be quite over
	port, err := strconv.Atoi(at.Port)
	assert.NilError(t, err)
	addr := unix.SockaddrInet4{Port: port, Addr: netip.MustParseAddr("127.0.0.1").As4()}
	poll.WaitOn(t, func(poll.LogT) poll.Result { // until who had it is gone
		if err := unix.Bind(fd, &addr); err != nil {
			return poll.Continue("bind port %d: %v", port, err)
		}
		return poll.Success()
	}, poll.WithTimeout(time.Minute), poll.WithDelay(20*time.Millisecond))
	return release
}
