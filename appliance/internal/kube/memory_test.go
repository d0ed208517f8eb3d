package kube_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// nowhere is config for an API server that refuses connections.
func nowhere(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Host = "https://127.0.0.1:1" // tcpmux, which nobody serves
	return config
}

// startWithoutAPI starts a source whose API server is away, until the test ends.
func startWithoutAPI(t *testing.T, cfg kube.NodeSourceConfig) *kube.NodeSource {
	t.Helper()
	cfg.Config = nowhere(cfg.Config)
	s, err := kube.NewNodeSource(cfg)
	assert.NilError(t, err)
	startUntilEnd(t, s.Start)
	return s
}

func startGatewayWithoutAPI(t *testing.T, cfg kube.GatewaySourceConfig) *kube.GatewaySource {
	t.Helper()
	cfg.Config = nowhere(cfg.Config)
	s, err := kube.NewGatewaySource(cfg)
	assert.NilError(t, err)
	startUntilEnd(t, s.Start)
	return s
}

// remembered waits until a process that starts without an API server reads what is wanted: it
// is written down a moment after it was known.
func remembered(t *testing.T, want []string, read func(context.Context) ([]string, error)) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // who finds nothing written waits for ever
		defer cancel()
		got, err := read(ctx)
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			return poll.Continue("nothing is written down")
		case err != nil:
			return poll.Error(err)
		}
		if !slices.Equal(got, want) {
			return poll.Continue("%v instead of %v", got, want)
		}
		return poll.Success()
	}, poll.WithTimeout(time.Minute), poll.WithDelay(200*time.Millisecond))
}

func startUntilEnd(t *testing.T, start func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- start(ctx) }()
	t.Cleanup(func() {
		cancel()
		assert.NilError(t, <-done)
	})
}

// objectsOf returns the names of values, sorted.
func objectsOf[T any](out []string, list []T, meta func(T) cluster.Meta) []string {
	for _, x := range list {
		m := meta(x)
		out = append(out, m.Ref.String()+" "+m.UID)
	}
	slices.Sort(out)
	return out
}

func nodeObjects(v kube.NodeView) []string {
	out := objectsOf(nil, v.Input.Fabrics, func(x cluster.InternalFabric) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.Tunnels, func(x cluster.GeneveTunnel) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.Nodes, func(x cluster.InternalNode) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.Routes, func(x cluster.RouteConfiguration) cluster.Meta { return x.Meta })
	return objectsOf(out, v.Input.Firewalls, func(x cluster.FirewallConfiguration) cluster.Meta { return x.Meta })
}

func gatewayObjects(v kube.GatewayView) []string {
	if v.Connection == nil || v.Gateway == nil {
		return nil
	}
	out := objectsOf(nil, v.Input.Fabrics, func(x cluster.InternalFabric) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.Configurations, func(x cluster.Configuration) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.PublicKeys, func(x cluster.PublicKey) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.Tunnels, func(x cluster.GeneveTunnel) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.Nodes, func(x cluster.InternalNode) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.Routes, func(x cluster.RouteConfiguration) cluster.Meta { return x.Meta })
	out = objectsOf(out, v.Input.Firewalls, func(x cluster.FirewallConfiguration) cluster.Meta { return x.Meta })
	out = objectsOf(out, []cluster.Connection{*v.Connection}, func(x cluster.Connection) cluster.Meta { return x.Meta })
	return objectsOf(out, []cluster.Gateway{*v.Gateway}, func(x cluster.Gateway) cluster.Meta { return x.Meta })
}

// An API server that takes requests and never answers is away, too; one that refuses
// what is asked for is not, and nothing is applied that it may have changed.
func TestMemoryAndServersThatDoNotList(t *testing.T) {
	cfg := kube.NodeSourceConfig{Config: &rest.Config{}, Node: "node-1", StateDir: t.TempDir()}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	assert.NilError(t, err)
	kinds := []string{"InternalNode", "GeneveTunnel", "InternalFabric", "RouteConfiguration", "FirewallConfiguration", "Pod"}
	lists := make([]string, 0, len(kinds))
	for _, k := range kinds {
		lists = append(lists, fmt.Sprintf(`"%sList": {"items": [{"metadata": {"name": "node-1", "namespace": "x"}}]}`, k))
	}
	assert.NilError(t, os.WriteFile(filepath.Join(cfg.StateDir, "node.json"),
		fmt.Appendf(nil, `{"owner": "node-1", "boot": %q, "lists": {%s}}`, strings.TrimSpace(string(boot)), strings.Join(lists, ",")), 0o600))
	for _, tc := range []struct {
		name   string
		serve  http.HandlerFunc
		usable bool
	}{
		{"never answers", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, true},
		{"forbids", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := httptest.NewServer(tc.serve)
			t.Cleanup(server.Close)
			cfg := cfg
			cfg.Config = &rest.Config{Host: server.URL}
			s, err := kube.NewNodeSource(cfg)
			assert.NilError(t, err)
			startUntilEnd(t, s.Start)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			v, err := s.Read(ctx)
			if !tc.usable {
				assert.ErrorIs(t, err, context.DeadlineExceeded)
				return
			}
			assert.NilError(t, err)
			assert.Equal(t, len(v.Input.Nodes), 1)
		})
	}
}
