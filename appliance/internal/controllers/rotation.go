package controllers

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Reasons of events about keys.
const (
	reasonKeysRotated    = "KeysRotated"
	reasonKeysNotRotated = "KeysNotRotated"
	reasonPeerRotated    = "PeerKeyRotated"
	reasonPeerNotRotated = "PeerKeyNotRotated"
)

// rotations takes changes of keys one step further: it makes the keys that somebody wishes
// for, and records what the gateways have agreed on.
// It returns when time alone leads to a pass; 0: never.
func (r *reconciler) rotations(ctx context.Context, o kube.Objects) (again time.Duration, err error) {
	r.dog.At("rotations of keys")
	w := &writer{reconciler: r, latest: map[objectKey]client.Object{}, told: time.Now()}
	h := &handovers{writer: w, o: o}
	rotate := func(g *rotating) {
		if err := h.rotate(ctx, g); err != nil {
			w.fail(fmt.Errorf("keys of %s %s/%s: %w", g.kind, g.gateway.GetNamespace(), g.gateway.GetName(), err))
		}
		if g.due > 0 && (again == 0 || g.due < again) {
			again = g.due
		}
	}
	for i := range o.GatewayServers {
		g := &o.GatewayServers[i]
		rotate(&rotating{side: side{gateway: g, kind: "GatewayServer", secretRef: g.Status.SecretRef}, ownKeys: g.Spec.SecretRef.Name != ""})
	}
	for i := range o.GatewayClients {
		g := &o.GatewayClients[i]
		rotate(&rotating{side: side{gateway: g, kind: "GatewayClient", secretRef: g.Status.SecretRef}, ownKeys: g.Spec.SecretRef.Name != ""})
	}
	return again, errors.Join(w.errs...)
}

// A rotating is what a pass knows of the keys of a gateway.
type rotating struct {
	side
	ownKeys bool           // they are in a Secret of the user's
	secret  *corev1.Secret // of the rotation; nil: there is none
	keys    *corev1.Secret
	have    rotation.Secret
	due     time.Duration // in how long the next change begins by itself; 0: it does not
}

func (h *handovers) rotate(ctx context.Context, g *rotating) (err error) {
	g.remoteID = g.gateway.GetLabels()[v1beta1.LabelRemoteClusterID]
	if g.gateway.GetDeletionTimestamp() != nil || g.remoteID == "" || g.secretRef == nil {
		return nil
	}
	namespace := g.gateway.GetNamespace()
	g.keys, g.secret = h.secret(namespace, g.secretRef.Name), h.secret(namespace, plan.RotationName(g.gateway.GetName()))
	if g.keys == nil || len(g.keys.Data[v1beta1.PrivateKeyField]) != len(invitation.Key{}) {
		return nil
	}
	if g.secret != nil {
		if g.have, err = rotation.ReadSecret(g.secret.Data); err != nil {
			return fmt.Errorf("Secret %s/%s: %w: delete it to begin anew", namespace, g.secret.Name, err)
		}
	}
	want := g.have
	want.Rules.Accept = !h.cfg.RefuseRotation
	if g.replaced() {
		want.Order, want.State = nil, rotation.State{}
	}
	tell, err := h.recordKeys(ctx, g, &want)
	if err != nil {
		return err
	}
	w, more, err := h.wish(g, &want)
	if err == nil && w != nil {
		more, err = h.begin(ctx, g, &want, *w)
	}
	if err != nil {
		return err
	}
	data, err := want.Fields()
	if err != nil {
		return err
	}
	if g.secret != nil {
		err = h.update(ctx, g.secret, data)
	} else {
		s := &corev1.Secret{Type: v1beta1.SecretTypeRotation, Data: data}
		s.Namespace, s.Name = namespace, plan.RotationName(g.gateway.GetName())
		s.Labels = map[string]string{v1beta1.LabelRemoteClusterID: g.remoteID, v1beta1.LabelGatewayResource: "true", v1beta1.LabelManagedBy: v1beta1.ManagedBy}
		s.OwnerReferences = []metav1.OwnerReference{{APIVersion: v1beta1.GroupVersion.String(), Kind: g.kind, Name: g.gateway.GetName(), UID: g.gateway.GetUID()}}
		err = h.make(ctx, secretKind(), s)
	}
	if err != nil {
		return err
	}
	// What was not stored is done, and told, again.
	for _, c := range append(tell, more...) {
		h.tellChange(g, c)
	}
	return nil
}

// replaced reports whether somebody has written other keys than those that were agreed on:
// they count then.
func (g *rotating) replaced() bool {
	s := g.have.State
	recorded := (s.Own == nil || s.Own.Phase != rotation.Committed || g.have.Recorded.Own == s.Own.ID) &&
		(s.Theirs == nil || s.Theirs.Phase != rotation.Committed || g.have.Recorded.Theirs == s.Theirs.ID)
	if !recorded {
		return false
	}
	if !g.ownKeys && s.Learned != nil && !sameKey(g.keys.Data[v1beta1.PresharedKeyField], s.Learned.PresharedKey) {
		return true
	}
	o := g.have.Order
	if o == nil {
		return false
	}
	private := g.keys.Data[v1beta1.PrivateKeyField]
	if s.Own != nil && s.Own.ID == o.ID && s.Own.Phase == rotation.Committed {
		return !sameKey(private, &o.To)
	}
	return !sameKey(private, &o.From)
}

func sameKey(data []byte, key *invitation.Key) bool {
	if key == nil {
		return len(data) == 0
	}
	return string(data) == string(key[:])
}

// A keyChange is what is told of one, by an event and a metric.
type keyChange struct {
	by              string // v1beta1.RotationByUs or RotationByPeer
	reason, message string
	failed          bool
}

// recordKeys writes what was committed into the Secret with the keys and the status of the
// PublicKey, and returns what there is to tell.
func (h *handovers) recordKeys(ctx context.Context, g *rotating, want *rotation.Secret) (tell []keyChange, err error) {
	s := want.State
	if own := s.Own; own != nil && want.Recorded.Own != own.ID {
		switch own.Phase {
		case rotation.Committed:
			if want.Order == nil || want.Order.ID != own.ID || s.Learned == nil {
				break
			}
			if err := h.keep(ctx, g, &want.Order.To, s.Learned); err != nil {
				return nil, err
			}
			want.Recorded.Own = own.ID
			tell = append(tell, keyChange{v1beta1.RotationByUs, reasonKeysRotated,
				fmt.Sprintf("the gateway has a new key pair, with the public key %s, and the peer knows it; there was no session for %v", publicText(want.Order.To), own.Took.Round(time.Millisecond)), false})
		case rotation.Aborted:
			want.Recorded.Own = own.ID
			tell = append(tell, keyChange{v1beta1.RotationByUs, reasonKeysNotRotated, "the gateway has the keys that it had: " + own.Reason, true})
		}
	}
	if theirs := s.Theirs; theirs != nil && want.Recorded.Theirs != theirs.ID {
		switch theirs.Phase {
		case rotation.Committed:
			if s.Learned == nil {
				break
			}
			if err := h.keep(ctx, g, nil, s.Learned); err != nil {
				return nil, err
			}
			want.Recorded.Theirs = theirs.ID
			tell = append(tell, keyChange{v1beta1.RotationByPeer, reasonPeerRotated,
				fmt.Sprintf("the peer's gateway has a new public key, %s: see status.learned of its PublicKey", netstate.Key(theirs.Key)), false})
		case rotation.Aborted:
			want.Recorded.Theirs = theirs.ID
			tell = append(tell, keyChange{v1beta1.RotationByPeer, reasonPeerNotRotated, "the peer's gateway has offered a new key and taken that back", true})
		}
	}
	return tell, nil
}

// keep writes the keys in use: into the Secret that the gateway has them from, unless that is
// the user's, and what is known of the peer into the status of its PublicKey.
func (h *handovers) keep(ctx context.Context, g *rotating, private *invitation.Key, l *rotation.Learned) error {
	if !g.ownKeys {
		if err := h.keepSecret(ctx, g, private, l.PresharedKey); err != nil {
			return err
		}
	}
	return h.keepPeer(ctx, g, l)
}

func (h *handovers) keepSecret(ctx context.Context, g *rotating, private, shared *invitation.Key) error {
	data := map[string][]byte{}
	for field, value := range g.keys.Data {
		data[field] = value
	}
	if private != nil {
		public, err := private.Public()
		if err != nil {
			return err
		}
		data[v1beta1.PrivateKeyField], data[v1beta1.PublicKeyField] = private[:], public[:]
	}
	if delete(data, v1beta1.PresharedKeyField); shared != nil {
		data[v1beta1.PresharedKeyField] = shared[:]
	}
	return h.update(ctx, g.keys, data)
}

func (h *handovers) keepPeer(ctx context.Context, g *rotating, l *rotation.Learned) error {
	// It is the gateway that says which one: it speaks of its own peer only.
	i := slices.IndexFunc(h.o.PublicKeys, func(k v1beta1.PublicKey) bool {
		return string(k.UID) == l.Over.UID && k.Namespace == g.gateway.GetNamespace() && k.Labels[v1beta1.LabelRemoteClusterID] == g.remoteID
	})
	if i < 0 || h.o.PublicKeys[i].Generation != l.Over.Generation {
		return nil // somebody has written another key, which counts
	}
	k := h.o.PublicKeys[i].DeepCopy()
	learned := &v1beta1.LearnedKey{ObservedGeneration: k.Generation}
	learned.PublicKey, _, _ = k.Current()
	if l.Key != nil {
		learned.PublicKey = l.Key[:]
	}
	if l.PresharedKey != nil {
		learned.PresharedKey = netstate.FingerprintOf(*l.PresharedKey).String()
	}
	k.Status.Learned = learned
	key := objectKey{v1beta1.GroupVersion.WithKind("PublicKey"), client.ObjectKeyFromObject(k)}
	if err := h.cache.Status().Update(ctx, k, client.FieldOwner(name)); err != nil {
		return fmt.Errorf("%v: status: %w", key, err)
	}
	h.log.Info("status", "object", key.String(), "changed", "learned")
	h.metrics.wrote(key.Kind, "status")
	h.wrote(key, k, "")
	return nil
}

// wishTime is how old a wish may be that is the first one that the controller knows of: who
// deletes the Secret of a rotation, or restores a gateway, does not wish for it again.
const wishTime = 10 * time.Minute

// wish begins what the gateway's annotation asks for, once, or what is due.
func (h *handovers) wish(g *rotating, want *rotation.Secret) (*rotation.Wish, []keyChange, error) {
	no := func(id, format string, args ...any) (*rotation.Wish, []keyChange, error) {
		want.Recorded.Wish = id
		return nil, []keyChange{{v1beta1.RotationByUs, reasonKeysNotRotated, fmt.Sprintf(format, args...), true}}, nil
	}
	busy := want.Order != nil && (want.State.Own == nil || want.State.Own.ID != want.Order.ID || want.Recorded.Own != want.Order.ID) ||
		want.State.Theirs != nil && want.State.Theirs.Phase == rotation.Committed && want.Recorded.Theirs != want.State.Theirs.ID
	if text, ok := g.gateway.GetAnnotations()[v1beta1.AnnotationRotate]; ok && text != want.Recorded.Wish {
		w, err := rotation.ParseWish(text)
		switch {
		case err != nil:
			return no(text, "annotation %s: %v", v1beta1.AnnotationRotate, err)
		case w.ID == want.Recorded.Wish: // it was done
		case h.o.Now.Sub(w.At) > wishTime && want.Recorded.Wish == "" && !g.made(w): // what it wished for was recorded in a Secret that is gone
			return no(w.ID, "annotation %s is of %s, older than %v: begin again; by the clock of this controller it is %s", v1beta1.AnnotationRotate, w.At.UTC().Format(time.RFC3339), wishTime, h.o.Now.UTC().Format(time.RFC3339))
		case g.ownKeys:
			return no(w.ID, "the keys are in the Secret %s, which spec.secretRef names: who has made it changes them", g.keys.Name)
		case busy:
			return nil, nil, nil // one after the other
		case w.Alone && want.State.Own != nil && h.o.Now.Sub(want.State.Own.Since) < rotation.Told:
			// Without a tunnel it would not learn of the keys that it has agreed to.
			g.due = rotation.Told - h.o.Now.Sub(want.State.Own.Since)
			return nil, nil, nil
		default:
			want.Recorded.Wish = w.ID
			return &w, nil, nil
		}
	}
	if h.cfg.RotateEvery == 0 || g.ownKeys || busy {
		return nil, nil, nil
	}
	if g.due = want.Due(h.cfg.RotateEvery, g.keys.CreationTimestamp.Time, h.o.Now); g.due > 0 {
		return nil, nil, nil
	}
	if !slices.ContainsFunc(h.o.Connections, func(c v1beta1.Connection) bool {
		return c.Namespace == g.gateway.GetNamespace() && c.Name == plan.GatewayName(g.gateway.GetName()) && c.AgreesOnKeys()
	}) {
		return nil, nil, nil // it is a change of the Connection that leads to the next pass
	}
	id, err := rotation.NewID(rand.Reader)
	return &rotation.Wish{ID: id, By: "the value networking.keyRotation.every", At: h.o.Now}, nil, err
}

// made reports whether the key pair is there already that somebody wishes for without asking
// the peer.
func (g *rotating) made(w rotation.Wish) bool {
	return w.Alone && g.keys.Annotations[v1beta1.AnnotationRotated] == w.ID
}

// begin makes the next keys.
func (h *handovers) begin(ctx context.Context, g *rotating, want *rotation.Secret, w rotation.Wish) ([]keyChange, error) {
	from := invitation.Key(g.keys.Data[v1beta1.PrivateKeyField])
	if g.made(w) { // a pass that was ended before has not recorded it
		want.Recorded.Begun, want.Order, want.State = h.o.Now, nil, rotation.State{}
		return aloneChange(w, from), nil
	}
	next, err := invitation.NewKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	if w.Alone {
		public, err := next.Public()
		if err != nil {
			return nil, err
		}
		marked := g.keys.DeepCopy()
		metav1.SetMetaDataAnnotation(&marked.ObjectMeta, v1beta1.AnnotationRotated, w.ID)
		data := maps.Clone(marked.Data)
		data[v1beta1.PrivateKeyField], data[v1beta1.PublicKeyField] = next[:], public[:]
		if err := h.update(ctx, marked, data); err != nil {
			return nil, err
		}
		want.Recorded.Begun, want.Order, want.State = h.o.Now, nil, rotation.State{}
		return aloneChange(w, next), nil
	}
	order := &rotation.Order{ID: w.ID, At: h.o.Now, From: from, To: next, Manner: w.Manner}
	if want.Order != nil && !order.At.After(want.Order.At) {
		order.At = want.Order.At.Add(time.Second) // the clock was put back
	}
	// A peer that has a later pre-shared key, which this side has lost, takes no less than one.
	if w.Share || w.Repair || len(g.keys.Data[v1beta1.PresharedKeyField]) > 0 {
		shared, err := invitation.NewKey(rand.Reader)
		if err != nil {
			return nil, err
		}
		order.PresharedKey = &shared
	}
	want.Order, want.Recorded.Begun = order, order.At
	h.log.Info("rotation of keys", "gateway", g.gateway.GetName(), "peer", g.remoteID, "rotation", w.ID, "by", w.By)
	return nil, nil
}

// aloneChange is what is told of a key pair that was made without asking the peer.
func aloneChange(w rotation.Wish, private invitation.Key) []keyChange {
	return []keyChange{{v1beta1.RotationByUs, reasonKeysRotated, fmt.Sprintf(
		"the gateway has a new key pair, as %s wished; the peer was not asked, so there is no connection until its PublicKey says %s", cmp.Or(w.By, "somebody"), publicText(private)), false}}
}

func publicText(private invitation.Key) string {
	public, err := private.Public()
	if err != nil {
		return err.Error()
	}
	return netstate.Key(public).String()
}

// tellChange makes an event and counts.
func (h *handovers) tellChange(g *rotating, c keyChange) {
	kind, outcome := corev1.EventTypeNormal, "changed"
	if c.failed {
		kind, outcome = corev1.EventTypeWarning, "failed"
	}
	ref := &corev1.ObjectReference{APIVersion: v1beta1.GroupVersion.String(), Kind: g.kind, Namespace: g.gateway.GetNamespace(), Name: g.gateway.GetName(), UID: g.gateway.GetUID()}
	h.log.Info("event", "object", describeRef(g.kind, ref.Namespace, ref.Name), "type", kind, "reason", c.reason, "message", c.message)
	h.recorder.Event(ref, kind, c.reason, c.message)
	h.metrics.keyChanges.WithLabelValues(g.remoteID, strings.ToLower(c.by), outcome).Inc()
}
