package pods

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
)

// TestFollowInner: a gateway in a namespace of its node may start while the one
// before it has its own mounted at the same path. The lab looks into the one that
// the gateway mounts there later, and lets go of the other.
func TestFollowInner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "liqo-netns")
	assert.NilError(t, os.WriteFile(path, nil, 0o444))
	t.Cleanup(func() {
		for unix.Unmount(path, unix.MNT_DETACH) == nil {
		}
	})
	mount := func() os.FileInfo {
		ns, err := netns.New()
		assert.NilError(t, err)
		defer ns.Close()
		for unix.Unmount(path, unix.MNT_DETACH) == nil {
		}
		assert.NilError(t, unix.Mount(netns.Path(ns), path, "", unix.MS_BIND, ""))
		info, err := ns.Stat()
		assert.NilError(t, err)
		return info
	}

	registry := NewRegistry()
	p := &pod{
		node: &node{cfg: NodeConfig{Cluster: "milan", Name: "node-1", Registry: registry}, log: slog.New(slog.DiscardHandler)}, uid: "1", gone: make(chan struct{}),
		api: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "gateway"}, Spec: corev1.PodSpec{HostNetwork: true}},
	}
	p.life, p.end = context.WithCancel(t.Context())
	registry.Add(p.registered(), nil)
	seen := make(chan *os.File, 2)
	defer registry.Watch(func(e Event) {
		if e.Pod.Inner != nil {
			seen <- e.Pod.Inner
		}
	})()
	done := make(chan struct{})
	go func() { defer close(done); p.followInner(path) }()

	leftover := mount()
	first := <-seen
	info, err := first.Stat()
	assert.NilError(t, err)
	assert.Assert(t, os.SameFile(info, leftover))

	own := mount()
	second := <-seen
	info, err = second.Stat()
	assert.NilError(t, err)
	assert.Assert(t, os.SameFile(info, own))
	assert.Equal(t, registry.Pods()[0].Own(), second)

	p.end()
	close(p.gone)
	<-done
	for _, f := range []*os.File{first, second} {
		_, err := f.Stat()
		assert.ErrorIs(t, err, os.ErrClosed)
	}
}
