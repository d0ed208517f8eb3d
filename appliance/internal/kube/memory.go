package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

const (
	// memoryPatience is how long a daemon that starts waits for the first answers, before
	// it asks whether there is an API server, and how long it waits for an answer then.
	memoryPatience = 2 * time.Second
	// memoryPause is between two writes of what is known, and memoryRetry after one
	// that failed.
	memoryPause, memoryRetry = time.Second, time.Minute
)

// bootID changes with every boot (random(4)).
const bootID = "/proc/sys/kernel/random/boot_id"

// A memory keeps the objects that a daemon knew last, in a file, for the process after
// it: one that starts while the API server is away goes on with them. They are
// those that somebody else than the daemon itself decides; no Secret is
// among them. After a boot they are worth nothing: the addresses of gateways' pods are
// others by then, or those of somebody else.
type memory struct {
	file  string
	owner string // whose objects they are
	boot  string
	log   *slog.Logger
	wake  chan struct{} // yields when what is known has changed

	// lists are what the process before this one knew, by kind of list; nil: nothing.
	// They are never changed.
	lists   map[string]json.RawMessage
	written time.Time   // when that was
	inUse   atomic.Bool // a daemon goes on with the lists
}

// A memoryFile is what the file holds.
type memoryFile struct {
	Owner   string                     `json:"owner"`
	Boot    string                     `json:"boot"`
	Written time.Time                  `json:"written"`
	Lists   map[string]json.RawMessage `json:"lists"`
}

// openMemory reads what the process before this one has written; an empty file name
// is no memory. What can't be read, or is of another boot or owner, is not used.
func openMemory(file, owner string, log *slog.Logger) *memory {
	if file == "" {
		return nil
	}
	m := &memory{file: file, owner: owner, log: log, wake: make(chan struct{}, 1)}
	id, err := os.ReadFile(bootID)
	if err != nil {
		log.Warn("objects are not remembered for the next process: this boot can't be told from others", "err", err)
		return nil
	}
	m.boot = strings.TrimSpace(string(id))
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return m
	}
	var f memoryFile
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	switch {
	case err != nil:
		log.Warn("the remembered objects can't be read; nothing is applied before the API server answers", "file", file, "err", err)
	case f.Owner != owner || f.Boot != m.boot:
		log.Info("the remembered objects are not used: they are of another boot, or of somebody else", "file", file, "written", f.Written)
	default:
		m.lists, m.written = f.Lists, f.Written
	}
	return m
}

// usable reports whether there is something to go on with.
func (m *memory) usable() bool { return m != nil && m.lists != nil }

// use notes that the daemon goes on with what is remembered.
func (m *memory) use() {
	if !m.inUse.Swap(true) {
		m.log.Warn("the API server is away: going on with the objects that were known last", "file", m.file, "written", m.written)
	}
}

// touch notes that what is known has changed.
func (m *memory) touch() {
	if m == nil {
		return
	}
	select {
	case m.wake <- struct{}{}:
	default: // it is noted already
	}
}

// list fills l with the remembered objects of its kind.
func (m *memory) list(_ context.Context, l client.ObjectList) error {
	text, known := m.lists[listName(l)]
	if !known {
		return fmt.Errorf("%s has no %s", m.file, listName(l))
	}
	return json.Unmarshal(text, l)
}

// run writes down what is known now, and again whenever that has changed, until ctx
// is done. Nobody waits for it.
func (m *memory) run(ctx context.Context, from client.Reader, lists func() []client.ObjectList) {
	var sum [sha256.Size]byte // of the lists in the file
	failing := false
	for {
		err := m.save(ctx, from, lists(), &sum)
		if ctx.Err() != nil {
			return
		}
		wait := memoryPause
		if err != nil {
			// An old file would be worse than none.
			sum, wait = [sha256.Size]byte{}, memoryRetry
			err = errors.Join(err, removeFile(m.file), removeFile(m.file+".new"))
			if !failing {
				m.log.Warn("objects are not remembered: a daemon that starts while the API server is away applies nothing", "file", m.file, "err", err)
			}
			m.touch() // to be tried again
		}
		failing = err != nil
		if !pause(ctx, wait) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		}
	}
}

// save writes the file unless its lists are as sum says.
func (m *memory) save(ctx context.Context, from client.Reader, lists []client.ObjectList, sum *[sha256.Size]byte) error {
	f := memoryFile{Owner: m.owner, Boot: m.boot, Written: time.Now(), Lists: map[string]json.RawMessage{}}
	hash := sha256.New()
	for _, l := range lists {
		text, err := bareList(ctx, from, l)
		if err != nil {
			return err
		}
		f.Lists[listName(l)] = text
		hash.Write(text)
	}
	now := [sha256.Size]byte(hash.Sum(nil))
	if now == *sum {
		return nil
	}
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	// Whole or not at all. It need not be on the disk: after a boot it is not used.
	if err := os.WriteFile(m.file+".new", text, 0o600); err != nil {
		return err
	}
	if err := os.Rename(m.file+".new", m.file); err != nil {
		return err
	}
	*sum = now
	return nil
}

// removeFile removes a file that may not be there.
func removeFile(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// bareList returns the objects of a kind, by name, without what no daemon reads: reports
// of every node on every object among them.
func bareList(ctx context.Context, from client.Reader, l client.ObjectList) ([]byte, error) {
	if err := from.List(ctx, l, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	items := []client.Object{}
	err := meta.EachListItem(l, func(o runtime.Object) error {
		switch o := o.(type) {
		case *networkingv1beta1.InternalNode:
			bare := *o
			bare.Status.Applied, bare.Status.Conditions = nil, nil
			items = append(items, &bare)
		case *networkingv1beta1.RouteConfiguration:
			bare := *o
			bare.Status = networkingv1beta1.RouteConfigurationStatus{}
			items = append(items, &bare)
		case *networkingv1beta1.FirewallConfiguration:
			bare := *o
			bare.Status = networkingv1beta1.FirewallConfigurationStatus{}
			items = append(items, &bare)
		case *networkingv1beta1.Connection: // the gateway's own, which it measures every few seconds
			bare := *o
			bare.Status = networkingv1beta1.ConnectionStatus{Peer: o.Status.Peer} // where the peer may be
			items = append(items, &bare)
		case client.Object:
			items = append(items, o)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(items, func(a, b client.Object) int {
		return cmp.Or(strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
	})
	return json.Marshal(map[string]any{"items": items})
}

// listName is the kind of a list.
func listName(l client.ObjectList) string { return reflect.TypeOf(l).Elem().Name() }

// BareMeta returns what is read of the metadata of other people's objects.
func BareMeta(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion, Generation: m.Generation,
		Labels: m.Labels, CreationTimestamp: m.CreationTimestamp, DeletionTimestamp: m.DeletionTimestamp,
	}
}

// BarePod returns what is read of a pod: where it is, and whether it runs.
func BarePod(p *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{ObjectMeta: BareMeta(p.ObjectMeta)}
	out.Spec.NodeName, out.Spec.HostNetwork = p.Spec.NodeName, p.Spec.HostNetwork
	out.Status.Phase, out.Status.PodIP, out.Status.PodIPs = p.Status.Phase, p.Status.PodIP, p.Status.PodIPs
	if p.Labels[networkingv1beta1.LabelComponent] == networkingv1beta1.ComponentGateway {
		out.Status.StartTime = p.Status.StartTime
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			out.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	if IsPull(p) { // there are few
		out.Spec.Containers = p.Spec.Containers
		out.Status.Reason, out.Status.Message, out.Status.Conditions = p.Status.Reason, p.Status.Message, p.Status.Conditions
		out.Status.ContainerStatuses = p.Status.ContainerStatuses
	}
	return out
}
