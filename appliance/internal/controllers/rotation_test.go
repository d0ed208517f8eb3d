package controllers

import (
	"fmt"
	"strings"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// testRotation changes the key pair of a gateway and then that of its peer; the gateway is
// played.
func (w *world) testRotation(server *v1beta1.GatewayServer, key *v1beta1.PublicKey, keys *corev1.Secret) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: server.Namespace, Name: "gw-genoa-rotation"}}
	w.until("the Secret of rotations is there", func() bool { return w.rotation(secret).Rules.Accept })
	assert.Check(w.t, is.Equal(secret.Type, corev1.SecretType(v1beta1.SecretTypeRotation)))
	w.until("the gateway may write it", func() bool { return w.may("genoa", "update", secret.Name) })
	assert.Check(w.t, !w.may("genoa", "delete", secret.Name))

	const own, theirs = "00000000000000aa", "00000000000000bb"
	wish := func(id string, alone bool) {
		text, err := rotation.Wish{ID: id, By: "jane", At: time.Now(), Alone: alone, Manner: rotation.Manner{Compromised: true}}.Text()
		assert.NilError(w.t, err)
		w.patch(server, fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, v1beta1.AnnotationRotate, text))
	}
	wish(own, false)
	w.until("the next keys are made", func() bool { return w.rotation(secret).Order != nil })
	order := *w.rotation(secret).Order
	assert.Assert(w.t, w.get(keys))
	assert.Equal(w.t, order.ID, own)
	assert.Equal(w.t, order.Manner, rotation.Manner{Compromised: true})
	assert.DeepEqual(w.t, keys.Data[v1beta1.PrivateKeyField], order.From[:])
	assert.Assert(w.t, order.PresharedKey != nil && order.To != order.From)

	assert.Assert(w.t, w.get(key))
	over := rotation.PublicKeyRef{UID: string(key.UID), Generation: key.Generation}
	w.agree(secret, func(s *rotation.State) {
		s.Own = &rotation.Attempt{ID: own, At: order.At, Phase: rotation.Committed, Since: time.Now().Add(-rotation.Told), Over: over}
		s.Learned = &rotation.Learned{Over: over, PresharedKey: order.PresharedKey}
	})
	w.until("they are the gateway's keys", func() bool {
		return w.get(keys) && string(keys.Data[v1beta1.PrivateKeyField]) == string(order.To[:]) && w.rotation(secret).Recorded.Own == own
	})
	public, err := order.To.Public()
	assert.NilError(w.t, err)
	assert.DeepEqual(w.t, keys.Data[v1beta1.PublicKeyField], public[:])
	assert.DeepEqual(w.t, keys.Data[v1beta1.PresharedKeyField], order.PresharedKey[:])
	spec := key.Spec.PublicKey
	assert.Assert(w.t, w.get(key))
	assert.DeepEqual(w.t, key.Spec.PublicKey, spec)
	assert.DeepEqual(w.t, *key.Status.Learned, v1beta1.LearnedKey{ObservedGeneration: key.Generation, PublicKey: spec, PresharedKey: netstate.FingerprintOf(*order.PresharedKey).String()})

	next, shared := invitation.Key{5}, invitation.Key{6}
	w.agree(secret, func(s *rotation.State) {
		s.Theirs = &rotation.Change{ID: theirs, At: time.Now(), Key: next, PresharedKey: &shared, Phase: rotation.Committed, Since: time.Now(), Over: over}
		s.Learned = &rotation.Learned{Over: over, Key: &next, PresharedKey: &shared}
	})
	w.until("the peer's key is known", func() bool {
		return w.rotation(secret).Recorded.Theirs == theirs && w.get(key) && key.Status.Learned != nil && string(key.Status.Learned.PublicKey) == string(next[:])
	})
	assert.Assert(w.t, w.get(keys))
	assert.DeepEqual(w.t, keys.Data[v1beta1.PresharedKeyField], shared[:])
	w.until("both are told", func() bool {
		var list eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &list))
		var all []string
		for _, e := range list.Items {
			all = append(all, e.Reason)
		}
		text := strings.Join(all, " ")
		return strings.Contains(text, reasonKeysRotated) && strings.Contains(text, reasonPeerRotated)
	})
	w.testQuiet()

	// Somebody writes another key: that counts, and the pre-shared one stays.
	w.patch(key, `{"spec":{"publicKey":"`+"CQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="+`"}}`)
	w.until("the key that was learned is forgotten", func() bool {
		if !w.get(key) {
			return false
		}
		l := key.Status.Learned
		return l != nil && string(l.PublicKey) == string(key.Spec.PublicKey) && l.PresharedKey == netstate.FingerprintOf(shared).String()
	})

	before := string(order.To[:])
	wish("00000000000000cc", true)
	w.until("without the peer the key pair is changed at once", func() bool {
		return w.get(keys) && string(keys.Data[v1beta1.PrivateKeyField]) != before && w.rotation(secret).Order == nil
	})
	assert.DeepEqual(w.t, keys.Data[v1beta1.PresharedKeyField], shared[:])
	w.testQuiet()

	// A controller that is killed between the two Secrets makes no other pair: who has begun
	// may have told the peer of the first.
	assert.Assert(w.t, w.get(keys))
	alone := string(keys.Data[v1beta1.PrivateKeyField])
	w.until("the controller knows nothing of that", func() bool {
		r := w.rotation(secret)
		r.Recorded.Wish, r.Order, r.State = "", &order, rotation.State{Own: &rotation.Attempt{ID: own, At: order.At, Phase: rotation.Aborted, Since: time.Now().Add(-rotation.Told), Over: over}}
		r.Recorded.Own = own
		var err error
		secret.Data, err = r.Fields()
		assert.NilError(w.t, err)
		return w.c.Update(w.t.Context(), secret) == nil
	})
	w.until("it records what was done", func() bool {
		r := w.rotation(secret)
		return r.Recorded.Wish == "00000000000000cc" && r.Order == nil
	})
	w.testQuiet()
	assert.Assert(w.t, w.get(keys))
	assert.Equal(w.t, string(keys.Data[v1beta1.PrivateKeyField]), alone)
}

func (w *world) rotation(s *corev1.Secret) rotation.Secret {
	if !w.get(s) {
		return rotation.Secret{}
	}
	r, err := rotation.ReadSecret(s.Data)
	assert.NilError(w.t, err)
	return r
}

// agree writes what a gateway does.
func (w *world) agree(s *corev1.Secret, change func(*rotation.State)) {
	w.until("the gateway has written it", func() bool {
		r := w.rotation(s)
		change(&r.State)
		var err error
		s.Data, err = r.Fields()
		assert.NilError(w.t, err)
		return w.c.Update(w.t.Context(), s) == nil
	})
}
