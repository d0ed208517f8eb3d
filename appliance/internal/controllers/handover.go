package controllers

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// onBehalf is the field manager of what an invitation leads to: who has run isthmusctl
// wanted it, and isthmusctl may go on with it.
const onBehalf = client.FieldOwner("isthmusctl")

// handovers takes the invitations one step further. What it writes leads to the next pass.
// It returns when time alone does; 0: never.
func (r *reconciler) handovers(ctx context.Context, o kube.Objects) (again time.Duration, err error) {
	r.dog.At("invitations")
	w := &writer{reconciler: r, latest: map[objectKey]client.Object{}, told: time.Now()}
	h := &handovers{writer: w, o: o, s: kube.Snapshot(o)}
	for i := range o.Secrets {
		s := &o.Secrets[i]
		if s.DeletionTimestamp != nil {
			continue
		}
		var err error
		switch s.Type {
		case v1beta1.SecretTypeInvitation:
			var wait time.Duration
			if wait, err = h.invited(ctx, s); wait > 0 && (again == 0 || wait < again) {
				again = wait
			}
		case v1beta1.SecretTypeHandover:
			err = h.handed(ctx, s)
		}
		if err != nil {
			w.fail(fmt.Errorf("Secret %s/%s: %w", s.Namespace, s.Name, err))
		}
	}
	return again, errors.Join(w.errs...)
}

// handovers is one pass over the invitations.
type handovers struct {
	*writer
	o kube.Objects
	s cluster.Snapshot
}

// A side is what an invitation is about on the side of this cluster.
type side struct {
	gateway   client.Object
	kind      string
	remoteID  string
	secretRef *corev1.ObjectReference // of the gateway's keys; nil: there are none yet
	handover  *corev1.Secret          // nil: there is none
}

// find returns the gateway that a Secret belongs to; nil: it is not there.
func (h *handovers) find(of *corev1.Secret) *side {
	owned := func(g client.Object) bool {
		return g.GetNamespace() == of.Namespace && g.GetDeletionTimestamp() == nil &&
			slices.ContainsFunc(of.OwnerReferences, func(r metav1.OwnerReference) bool { return r.UID == g.GetUID() })
	}
	var out *side
	for i := range h.o.GatewayServers {
		if g := &h.o.GatewayServers[i]; owned(g) {
			out = &side{gateway: g, kind: "GatewayServer", secretRef: g.Status.SecretRef}
		}
	}
	for i := range h.o.GatewayClients {
		if g := &h.o.GatewayClients[i]; owned(g) {
			out = &side{gateway: g, kind: "GatewayClient", secretRef: g.Status.SecretRef}
		}
	}
	if out == nil {
		return nil
	}
	out.remoteID = out.gateway.GetLabels()[v1beta1.LabelRemoteClusterID]
	out.handover = h.secret(of.Namespace, plan.HandoverName(out.gateway.GetName()))
	return out
}

func (h *handovers) secret(namespace, name string) *corev1.Secret {
	i := slices.IndexFunc(h.o.Secrets, func(s corev1.Secret) bool {
		return s.Namespace == namespace && s.Name == name && s.DeletionTimestamp == nil
	})
	if i < 0 {
		return nil
	}
	return &h.o.Secrets[i]
}

// invited goes on with an invitation, of this cluster or that it has accepted. It returns
// when it ends.
func (h *handovers) invited(ctx context.Context, s *corev1.Secret) (time.Duration, error) {
	rec, err := invitation.ReadRecord(s.Data)
	if err != nil {
		return 0, err
	}
	side := h.find(s)
	if side == nil {
		return 0, nil
	}
	var known invitation.Handover
	if side.handover != nil {
		if known, err = invitation.ReadHandover(side.handover.Data); err != nil {
			known = invitation.Handover{} // the gateway writes it anew
		}
	}
	if rec.Accepting {
		return 0, h.accepting(ctx, s, rec, side, known)
	}
	if side.kind != "GatewayServer" || side.remoteID != rec.To {
		return 0, nil
	}
	left := rec.Expires.Add(invitation.Grace).Sub(h.o.Now)
	again := left
	if open := rec.Expires.Sub(h.o.Now); open > 0 {
		again = open // who waits for a yes is told then that it comes no more
	}
	delivered := rec.Used != nil && known.Delivered && known.Answer != nil && known.Answer.Equal(*rec.Used)
	switch {
	case rec.Used != nil && !rec.Done && (delivered || left <= 0):
		return 0, h.finish(ctx, s, rec, side)
	case rec.Done || left <= 0:
		return 0, h.close(ctx, side)
	case known.Offer == nil || known.Offer.ID != rec.ID:
		return again, h.hand(ctx, side, invitation.Handover{Offer: &invitation.Offer{ID: rec.ID, Key: rec.Key}})
	case rec.Used != nil: // a pass that was ended before has not made it
		if err := h.configure(ctx, side, rec.Used.Networks, rec.Follow); err != nil {
			return again, err
		}
	}
	if known.Answer == nil || known.Reply != nil && known.Reply.Verdict != invitation.Waiting {
		return again, nil
	}
	return again, h.judge(ctx, s, rec, side, known)
}

// judge replies to an answer. The invitation is used up before: of two controllers, or two
// answers, one is late.
func (h *handovers) judge(ctx context.Context, s *corev1.Secret, rec invitation.Record, side *side, known invitation.Handover) error {
	own, ready := h.networks()
	if !ready {
		return nil // they come
	}
	reply, next, err := rec.Judge(*known.Answer, h.o.Now, own,
		func(a invitation.Answer) string {
			// Why, and by whom, is not for the other side to read.
			if _, blocked := h.s.BlockedKeys.Of(a.Key[:]); blocked {
				return fmt.Sprintf("the key of your gateway, with the fingerprint %s, is blocked there", invitation.Fingerprint(a.Key))
			}
			return plan.PeerProblem(h.s, h.configuration(side, a.Networks), cluster.PublicKey{
				Meta: h.meta(side, "PublicKey"), RemoteID: side.remoteID, Key: a.Key[:],
			})
		},
		func() (invitation.Key, error) { return invitation.NewKey(rand.Reader) })
	if err != nil {
		return err
	}
	before, err := rec.Fields()
	if err != nil {
		return err
	}
	after, err := next.Fields()
	if err != nil {
		return err
	}
	if !equalData(before, after) {
		if err := h.update(ctx, s, after); err != nil {
			return err
		}
	}
	if known.Reply != nil && known.Reply.Verdict == reply.Verdict && known.Reply.Reason == reply.Reason {
		return nil
	}
	h.log.Info("invitation answered", "peer", side.remoteID, "fingerprint", invitation.Fingerprint(known.Answer.Key), "verdict", reply.Verdict, "reason", reply.Reason)
	if reply.Verdict == invitation.Accepted {
		if err := h.configure(ctx, side, next.Used.Networks, rec.Follow); err != nil {
			return err
		}
	}
	known.Reply = &reply
	return h.hand(ctx, side, known)
}

// finish ends the temporary tunnel, and has the gateways know each other.
func (h *handovers) finish(ctx context.Context, s *corev1.Secret, rec invitation.Record, side *side) error {
	if rec.PresharedKey == nil {
		return errors.New("the invitation is used, and its pre-shared key is missing: revoke it, and invite again")
	}
	if err := h.configure(ctx, side, rec.Used.Networks, rec.Follow); err != nil {
		return err
	}
	if err := h.share(ctx, side, *rec.PresharedKey); err != nil {
		return err
	}
	if err := h.know(ctx, side, rec.Used.Key, *rec.PresharedKey); err != nil {
		return err
	}
	if err := h.close(ctx, side); err != nil {
		return err
	}
	rec.Done, rec.PresharedKey = true, nil
	data, err := rec.Fields()
	if err != nil {
		return err
	}
	return h.update(ctx, s, data)
}

// accepting goes on with an invitation that this cluster has accepted.
func (h *handovers) accepting(ctx context.Context, s *corev1.Secret, rec invitation.Record, side *side, known invitation.Handover) error {
	switch {
	case side.kind != "GatewayClient" || side.remoteID != rec.From:
		return nil
	case rec.Done:
		return h.close(ctx, side)
	case rec.PrivateKey == nil:
		return errors.New("the private key of the temporary tunnel is missing: remove the peering, and ask for a new invitation")
	case known.Offer == nil || known.Offer.ID != rec.ID:
		answer := h.answer(rec, side)
		if answer == nil {
			return nil // what it takes comes
		}
		return h.hand(ctx, side, invitation.Handover{Offer: &invitation.Offer{ID: rec.ID, Key: rec.Key, PrivateKey: rec.PrivateKey}, Answer: answer})
	case !known.Delivered || known.Reply == nil || known.Reply.Verdict != invitation.Accepted:
		return nil
	}
	if err := h.configure(ctx, side, known.Reply.Networks, rec.Follow); err != nil {
		return err
	}
	if err := h.share(ctx, side, *known.Reply.PresharedKey); err != nil {
		return err
	}
	if err := h.know(ctx, side, rec.Key, *known.Reply.PresharedKey); err != nil {
		return err
	}
	rec.Done, rec.PrivateKey = true, nil
	data, err := rec.Fields()
	if err != nil {
		return err
	}
	if err := h.update(ctx, s, data); err != nil {
		return err
	}
	return h.close(ctx, side)
}

// answer returns what this cluster answers; nil: its gateway has no keys yet, or it has no
// networks.
func (h *handovers) answer(rec invitation.Record, side *side) *invitation.Answer {
	own, ready := h.networks()
	if !ready || side.secretRef == nil {
		return nil
	}
	keys := h.secret(side.gateway.GetNamespace(), side.secretRef.Name)
	if keys == nil || len(keys.Data[v1beta1.PublicKeyField]) != len(invitation.Key{}) {
		return nil
	}
	return &invitation.Answer{ID: rec.ID, From: rec.To, To: rec.From, Key: invitation.Key(keys.Data[v1beta1.PublicKeyField]), Networks: own}
}

// handed ends what belongs to an invitation that was revoked.
func (h *handovers) handed(ctx context.Context, s *corev1.Secret) error {
	for i := range h.o.Secrets {
		if x := &h.o.Secrets[i]; x.Type == v1beta1.SecretTypeInvitation && x.Namespace == s.Namespace && x.DeletionTimestamp == nil {
			return nil
		}
	}
	if len(s.Data) == 0 {
		return nil
	}
	return h.update(ctx, s, nil)
}

// networks returns those of this cluster, and whether they are known.
func (h *handovers) networks() (invitation.Networks, bool) {
	var out invitation.Networks
	for _, n := range h.s.Networks {
		if n.Namespace != h.o.Namespace {
			continue
		}
		switch n.Labels[v1beta1.LabelNetworkType] {
		case v1beta1.NetworkTypePod:
			out.Pod = append(out.Pod, n.Status)
		case v1beta1.NetworkTypeExternal:
			out.External = append(out.External, n.Status)
		}
	}
	known := func(list []netip.Prefix) bool {
		return len(list) > 0 && !slices.ContainsFunc(list, func(p netip.Prefix) bool { return !p.IsValid() })
	}
	return out, known(out.Pod) && known(out.External)
}

func (h *handovers) meta(side *side, kind string) cluster.Meta {
	return cluster.Meta{Ref: cluster.Ref{APIVersion: v1beta1.GroupVersion.String(), Kind: kind, Namespace: side.gateway.GetNamespace(), Name: side.remoteID}}
}

func (h *handovers) configuration(side *side, n invitation.Networks) cluster.Configuration {
	return cluster.Configuration{Meta: h.meta(side, "Configuration"), RemoteID: side.remoteID, Remote: cluster.CIDRs{Pod: n.Pod, External: n.External}}
}

// configure makes the Configuration of the peer, with these annotations, unless there is
// one.
func (h *handovers) configure(ctx context.Context, side *side, n invitation.Networks, annotations map[string]string) error {
	c := &v1beta1.Configuration{ObjectMeta: h.objectMeta(side)}
	c.Annotations = maps.Clone(annotations)
	for _, p := range n.Pod {
		c.Spec.Remote.CIDR.Pod = append(c.Spec.Remote.CIDR.Pod, v1beta1.CIDR(p.String()))
	}
	for _, p := range n.External {
		c.Spec.Remote.CIDR.External = append(c.Spec.Remote.CIDR.External, v1beta1.CIDR(p.String()))
	}
	return h.make(ctx, v1beta1.GroupVersion.WithKind("Configuration"), c)
}

// know makes the PublicKey of the peer's gateway, unless there is one. It goes with the
// gateway of this side.
func (h *handovers) know(ctx context.Context, side *side, key, shared invitation.Key) error {
	k := &v1beta1.PublicKey{ObjectMeta: h.objectMeta(side)}
	k.Labels[v1beta1.LabelGatewayResource] = "true"
	k.Annotations = map[string]string{v1beta1.AnnotationPresharedKey: netstate.FingerprintOf(shared).String()}
	k.OwnerReferences = []metav1.OwnerReference{{APIVersion: v1beta1.GroupVersion.String(), Kind: side.kind, Name: side.gateway.GetName(), UID: side.gateway.GetUID()}}
	k.Spec.PublicKey = key[:]
	return h.make(ctx, v1beta1.GroupVersion.WithKind("PublicKey"), k)
}

func (h *handovers) objectMeta(side *side) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: side.gateway.GetNamespace(), Name: side.remoteID, Labels: map[string]string{v1beta1.LabelRemoteClusterID: side.remoteID}}
}

func (h *handovers) make(ctx context.Context, kind schema.GroupVersionKind, o client.Object) error {
	key := objectKey{kind, client.ObjectKeyFromObject(o)}
	live, err := h.live(ctx, key)
	if live != nil || err != nil {
		return err
	}
	if err := h.cache.Create(ctx, o, onBehalf); err != nil {
		return fmt.Errorf("%v: %w", key, err)
	}
	h.log.Info("created", "object", key.String())
	h.metrics.wrote(kind.Kind, "create")
	h.wrote(key, o, "")
	return nil
}

// share writes the pre-shared key into the Secret with the gateway's keys.
func (h *handovers) share(ctx context.Context, side *side, shared invitation.Key) error {
	name := plan.GatewayName(side.gateway.GetName())
	if side.secretRef != nil {
		name = cmp.Or(side.secretRef.Name, name)
	}
	s := h.secret(side.gateway.GetNamespace(), name)
	if s == nil {
		return fmt.Errorf("Secret %s with the keys of the gateway is not there", name)
	}
	data := map[string][]byte{}
	for field, value := range s.Data {
		data[field] = value
	}
	data[v1beta1.PresharedKeyField] = shared[:]
	return h.update(ctx, s, data)
}

// close has nothing of an invitation left in the Secret of the handover.
func (h *handovers) close(ctx context.Context, side *side) error {
	if side.handover == nil || len(side.handover.Data) == 0 {
		return nil
	}
	return h.update(ctx, side.handover, nil)
}

// hand writes the Secret of a handover, and makes it where there is none.
func (h *handovers) hand(ctx context.Context, side *side, what invitation.Handover) error {
	data, err := what.Fields()
	if err != nil {
		return err
	}
	if side.handover != nil {
		return h.update(ctx, side.handover, data)
	}
	g := side.gateway
	s := &corev1.Secret{Type: v1beta1.SecretTypeHandover, Data: data}
	s.Namespace, s.Name = g.GetNamespace(), plan.HandoverName(g.GetName())
	s.Labels = map[string]string{v1beta1.LabelRemoteClusterID: side.remoteID, v1beta1.LabelGatewayResource: "true", v1beta1.LabelManagedBy: v1beta1.ManagedBy}
	s.OwnerReferences = []metav1.OwnerReference{{APIVersion: v1beta1.GroupVersion.String(), Kind: side.kind, Name: g.GetName(), UID: g.GetUID()}}
	return h.make(ctx, secretKind(), s)
}

func secretKind() schema.GroupVersionKind { return corev1.SchemeGroupVersion.WithKind("Secret") }

// update writes other data over the version of a Secret that was read.
func (h *handovers) update(ctx context.Context, s *corev1.Secret, data map[string][]byte) error {
	if equalData(s.Data, data) {
		return nil
	}
	out := s.DeepCopy()
	out.Data = data
	if err := h.cache.Update(ctx, out, client.FieldOwner(name)); err != nil {
		return err
	}
	key := objectKey{secretKind(), client.ObjectKeyFromObject(s)}
	h.log.Info("updated", "object", key.String())
	h.metrics.wrote(key.Kind, "update")
	h.wrote(key, out, "")
	*s = *out // a second write of this pass is over this one
	return nil
}

func equalData(a, b map[string][]byte) bool {
	if len(a) != len(b) {
		return false
	}
	for field, value := range a {
		other, ok := b[field]
		if !ok || string(value) != string(other) {
			return false
		}
	}
	return true
}
