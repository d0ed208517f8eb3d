package controllers

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
)

// Nobody has wished for new keys: they come where a value says so, once they are due and the
// gateways can agree on them.
func TestRotationByItself(t *testing.T) {
	now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	const day = 24 * time.Hour
	for _, c := range []struct {
		name     string
		every    time.Duration
		age      time.Duration // of the keys
		features []string      // of the peer
		value    v1beta1.ConnectionStatusValue
		ownKeys  bool
		order    *rotation.Order
		own      *rotation.Attempt
		alone    bool
		wish     string
		wished   time.Duration // how long ago
		first    bool          // nothing is recorded
		made     bool          // the keys of the wish are there
		want     string        // who wishes; empty: nobody
		told     string        // that it is not done
		due      time.Duration
	}{
		{name: "no value", age: 100 * day},
		{name: "not yet", every: 30 * day, age: 29 * day, due: day},
		{name: "now", every: 30 * day, age: 30 * day, want: "the value networking.keyRotation.every"},
		{name: "the peer does not take part", every: 30 * day, age: 30 * day, features: []string{"mtu"}},
		{name: "there is no connection", every: 30 * day, age: 30 * day, value: v1beta1.ConnectionError},
		{name: "the keys are the user's", every: 30 * day, age: 30 * day, ownKeys: true},
		{name: "one is under way", every: 30 * day, age: 30 * day, order: &rotation.Order{ID: "00000000000000aa"}},
		{name: "somebody wishes", every: 30 * day, wish: "00000000000000bb", want: "jane"},
		{name: "somebody wishes, without the peer", wish: "00000000000000bb", alone: true, own: &rotation.Attempt{Phase: rotation.Committed, Since: now.Add(-rotation.Told)}, want: "jane"},
		{name: "the peer may not know of the last one", wish: "00000000000000bb", alone: true, own: &rotation.Attempt{Phase: rotation.Committed, Since: now.Add(-time.Second)}, due: rotation.Told - time.Second},
		{name: "an old wish, of before a restore", wish: "00000000000000bb", wished: time.Hour, first: true, alone: true, told: "older than 10m0s"},
		{name: "an old wish, whose keys were made and not recorded", wish: "00000000000000bb", wished: time.Hour, first: true, alone: true, made: true, want: "jane"},
		{name: "what was wished for is done", every: 30 * day, age: 30 * day, wish: "00000000000000cc", want: "the value networking.keyRotation.every"},
	} {
		t.Run(c.name, func(t *testing.T) {
			gateway := &v1beta1.GatewayServer{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "rome"}}
			if c.wish != "" {
				text, err := rotation.Wish{ID: c.wish, By: "jane", At: now.Add(-c.wished), Alone: c.alone}.Text()
				assert.NilError(t, err)
				gateway.Annotations = map[string]string{v1beta1.AnnotationRotate: text}
			}
			conn := v1beta1.Connection{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "gw-rome"}}
			conn.Status.Value, conn.Status.Peer = v1beta1.Connected, &v1beta1.ConnectionPeer{Features: []string{v1beta1.FeatureKeys}}
			if c.value != "" {
				conn.Status.Value = c.value
			}
			if c.features != nil {
				conn.Status.Peer.Features = c.features
			}
			h := &handovers{
				writer: &writer{reconciler: &reconciler{cfg: Config{RotateEvery: c.every}}},
				o:      kube.Objects{Now: now, Connections: []v1beta1.Connection{conn}},
			}
			g := &rotating{
				side: side{gateway: gateway, kind: "GatewayServer"}, ownKeys: c.ownKeys,
				keys: &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "gw-rome", CreationTimestamp: metav1.NewTime(now.Add(-c.age))}},
			}
			if c.made {
				g.keys.Annotations = map[string]string{v1beta1.AnnotationRotated: c.wish}
			}
			want := rotation.Secret{Order: c.order, State: rotation.State{Own: c.own}, Recorded: rotation.Recorded{Wish: "00000000000000cc"}}
			if c.first {
				want.Recorded.Wish = ""
			}
			w, told, err := h.wish(g, &want)
			assert.NilError(t, err)
			if c.told != "" {
				assert.Assert(t, is.Len(told, 1))
				assert.Check(t, is.Contains(told[0].message, c.told))
				return
			}
			assert.Check(t, is.Len(told, 0))
			by := ""
			if w != nil {
				by = w.By
			}
			assert.Check(t, is.Equal(by, c.want))
			assert.Check(t, is.Equal(max(g.due, 0), c.due))
			if c.want != "jane" { // who asks by hand again has another ID
				assert.Check(t, is.Equal(want.Recorded.Wish, "00000000000000cc"))
			}
		})
	}
}

// TestKeyChangesAreTold: each change of keys is an event on its gateway, and counted by
// peer, by whose key it is, and by how it ended.
func TestKeyChangesAreTold(t *testing.T) {
	recorder, m := record.NewFakeRecorder(10), newMetrics()
	h := &handovers{writer: &writer{reconciler: &reconciler{log: slog.New(slog.DiscardHandler), recorder: recorder, metrics: m}}}
	gateway := &v1beta1.GatewayServer{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "rome"}}
	g := &rotating{side: side{gateway: gateway, kind: "GatewayServer", remoteID: "rome"}}
	for _, c := range []keyChange{
		{v1beta1.RotationByUs, reasonKeysRotated, "new keys", false},
		{v1beta1.RotationByPeer, reasonKeysRotated, "the peer has new keys", false},
		{v1beta1.RotationByPeer, reasonKeysRotated, "the peer has newer keys", false},
		{v1beta1.RotationByUs, reasonKeysNotRotated, "no handshake", true},
	} {
		h.tellChange(g, c)
	}
	for _, want := range []string{"Normal KeysRotated new keys", "Normal KeysRotated the peer has new keys", "Normal KeysRotated the peer has newer keys", "Warning KeysNotRotated no handshake"} {
		assert.Check(t, is.Equal(<-recorder.Events, want))
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(m.keyChanges)
	families, err := registry.Gather()
	assert.NilError(t, err)
	assert.Assert(t, is.Len(families, 1))
	assert.Check(t, is.Equal(families[0].GetName(), "isthmus_controller_key_changes_total"))
	got := map[string]float64{}
	for _, metric := range families[0].GetMetric() {
		var labels []string // in the order of their names
		for _, l := range metric.GetLabel() {
			labels = append(labels, l.GetName()+"="+l.GetValue())
		}
		got[strings.Join(labels, " ")] = metric.GetCounter().GetValue()
	}
	assert.Check(t, is.DeepEqual(got, map[string]float64{
		"by=us outcome=changed peer=rome": 1, "by=peer outcome=changed peer=rome": 2, "by=us outcome=failed peer=rome": 1,
	}))
}
