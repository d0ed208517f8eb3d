package controllers

import (
	"net/netip"
	"strings"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// testInvitation invites genoa, and accepts an invitation of bern.
func (w *world) testInvitation() {
	const id = "0123456789abcdef"
	networks := func(pod, external string) invitation.Networks {
		return invitation.Networks{Pod: []netip.Prefix{netip.MustParsePrefix(pod)}, External: []netip.Prefix{netip.MustParsePrefix(external)}}
	}
	server := &v1beta1.GatewayServer{ObjectMeta: w.tenantOf("genoa")}
	server.Spec.Endpoint = v1beta1.Endpoint{ServiceType: corev1.ServiceTypeNodePort, Ports: []int32{51840}}
	server.Spec.ServerTemplateRef = corev1.ObjectReference{APIVersion: v1beta1.GroupVersion.String(), Kind: "WgGatewayServerTemplate", Namespace: "liqo", Name: "wireguard-server"}
	w.create(server)
	ends := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	rec := invitation.Record{ID: id, From: "milan", To: "genoa", Key: invitation.Key{9}, Expires: ends, Approve: true, Follow: map[string]string{v1beta1.AnnotationFollow: "10.64.0.0/10"}}
	own := w.record("genoa", server, rec)
	w.create(own)

	handover := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-genoa", Name: "gw-genoa-handover"}}
	w.until("its gateway has the temporary peer", func() bool {
		h := w.handover(handover)
		return h.Offer != nil && h.Offer.Key == rec.Key && h.Offer.PrivateKey == nil
	})
	assert.Check(w.t, is.Equal(handover.Type, corev1.SecretType(v1beta1.SecretTypeHandover)))
	w.until("and may write that one Secret", func() bool { return w.may("genoa", "update", handover.Name) })
	for _, no := range []struct{ verb, name string }{{"update", own.Name}, {"update", "gw-genoa"}, {"get", "gw-genoa"}, {"list", ""}, {"delete", handover.Name}} {
		assert.Check(w.t, !w.may("genoa", no.verb, no.name), "it may %s %q", no.verb, no.name)
	}

	answer := invitation.Answer{ID: id, From: "genoa", To: "milan", Key: invitation.Key{8}, Networks: networks("10.8.0.0/16", "10.78.0.0/16")}
	leaked := invitation.Key{6}
	blocked := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: v1beta1.BlockedKeysConfigMap}, Data: map[string]string{invitation.Fingerprint(leaked): "by anna: a secret reason"}}
	w.create(blocked)
	for _, c := range []struct {
		name   string
		change func(*invitation.Answer)
		want   string
	}{
		{"a key that is blocked", func(a *invitation.Answer) { a.Key = leaked }, "the key of your gateway, with the fingerprint " + invitation.Fingerprint(leaked) + ", is blocked there"},
		{"another cluster", func(a *invitation.Answer) { a.From = "paris" }, "is for cluster genoa"},
		{"another invitation", func(a *invitation.Answer) { a.ID = "fedcba9876543210" }, "another invitation"},
		{"networks that can't be", func(a *invitation.Answer) { a.Networks = networks("10.8.0.0/16", "10.8.7.0/24") }, "overlaps"},
	} {
		a := answer
		c.change(&a)
		w.hand(handover, func(h *invitation.Handover) { h.Answer, h.Reply = &a, nil })
		w.until(c.name+" is refused", func() bool {
			h := w.handover(handover)
			return h.Reply != nil && h.Reply.Verdict == invitation.Refused && is.Contains(h.Reply.Reason, c.want)().Success()
		})
	}
	assert.Check(w.t, !strings.Contains(w.handover(handover).Reply.Reason, "secret reason"))
	conf := &v1beta1.Configuration{ObjectMeta: w.at("genoa")}
	assert.Check(w.t, !w.get(conf), "something was made for an answer that was refused")

	w.hand(handover, func(h *invitation.Handover) { h.Answer, h.Reply = &answer, nil })
	w.until("somebody has to say yes", func() bool {
		h := w.handover(handover)
		return h.Reply != nil && h.Reply.Verdict == invitation.Waiting && w.get(own) && w.read(own).Asks != nil
	})
	assert.Check(w.t, !w.get(conf), "something was made before somebody said yes")
	rec = w.read(own)
	rec.Approved = &answer.Key
	w.store(own, rec)
	w.until("it is accepted", func() bool {
		h := w.handover(handover)
		return h.Reply != nil && h.Reply.Verdict == invitation.Accepted && h.Reply.PresharedKey != nil
	})
	first := *w.handover(handover).Reply
	assert.DeepEqual(w.t, texts(first.Pod), []string{"10.0.0.0/16"})
	assert.DeepEqual(w.t, texts(first.External), []string{"10.70.0.0/16"})
	w.until("its networks are known", func() bool { return w.get(conf) && conf.Status.Remote != nil })
	assert.Equal(w.t, conf.Annotations[v1beta1.AnnotationFollow], "10.64.0.0/10")
	key := &v1beta1.PublicKey{ObjectMeta: w.at("genoa")}
	assert.Check(w.t, !w.get(key), "its key is known before the temporary tunnel is gone")

	// Somebody else with the same text is late, and the same answer gets the first reply.
	other := answer
	other.Key = invitation.Key{7}
	w.hand(handover, func(h *invitation.Handover) { h.Answer, h.Reply = &other, nil })
	w.until("it was used already", func() bool {
		h := w.handover(handover)
		return h.Reply != nil && h.Reply.Verdict == invitation.Refused && is.Contains(h.Reply.Reason, "used already")().Success()
	})
	w.hand(handover, func(h *invitation.Handover) { h.Answer, h.Reply = &answer, nil })
	w.until("the same answer gets the first reply", func() bool {
		h := w.handover(handover)
		return h.Reply != nil && h.Reply.PresharedKey != nil && *h.Reply.PresharedKey == *first.PresharedKey
	})

	w.hand(handover, func(h *invitation.Handover) { h.Delivered = true })
	w.until("the temporary peer goes, and the real one comes", func() bool {
		return w.get(key) && w.get(handover) && len(handover.Data) == 0 && w.get(own) && w.read(own).Done
	})
	assert.DeepEqual(w.t, key.Spec.PublicKey, answer.Key[:])
	assert.Equal(w.t, key.Annotations[v1beta1.AnnotationPresharedKey], netstate.FingerprintOf(*first.PresharedKey).String())
	assert.Check(w.t, w.read(own).PresharedKey == nil, "the shared key is kept twice")
	keys := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-genoa", Name: "gw-genoa"}}
	assert.Assert(w.t, w.get(keys))
	assert.DeepEqual(w.t, keys.Data[v1beta1.PresharedKeyField], first.PresharedKey[:])
	w.testQuiet()

	// A block that comes later counts, too, and so does its end.
	accepted := func(want string) func() bool {
		return func() bool {
			if !w.get(key) {
				return false
			}
			c := meta.FindStatusCondition(key.Status.Conditions, plan.ConditionAccepted)
			return c != nil && c.Reason == want
		}
	}
	blocked.Data[invitation.Fingerprint(answer.Key)] = "by anna: leaked"
	assert.NilError(w.t, w.c.Update(w.t.Context(), blocked))
	w.until("its key is blocked", accepted(v1beta1.ReasonBlocked))
	w.delete(blocked)
	w.until("its key is no longer blocked", accepted(plan.ReasonAccepted))
	w.testRotation(server, key, keys)
	w.testExpired(answer)
	w.testAccepting()
	w.delete(server)
	w.delete(conf)
}

// testExpired revokes an invitation, and lets one expire.
func (w *world) testExpired(answer invitation.Answer) {
	server := &v1beta1.GatewayServer{ObjectMeta: w.tenantOf("bonn")}
	server.Spec.Endpoint = v1beta1.Endpoint{ServiceType: corev1.ServiceTypeNodePort, Ports: []int32{51840}}
	server.Spec.ServerTemplateRef = corev1.ObjectReference{APIVersion: v1beta1.GroupVersion.String(), Kind: "WgGatewayServerTemplate", Namespace: "liqo", Name: "wireguard-server"}
	w.create(server)
	rec := invitation.Record{ID: answer.ID, From: "milan", To: "bonn", Key: invitation.Key{9}, Expires: time.Now().Add(-time.Minute).UTC().Truncate(time.Second)}
	own := w.record("bonn", server, rec)
	w.create(own)
	handover := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-bonn", Name: "gw-bonn-handover"}}
	w.until("one that has just expired is still answered", func() bool { return w.handover(handover).Offer != nil })
	answer.From = "bonn"
	w.hand(handover, func(h *invitation.Handover) { h.Answer = &answer })
	w.until("with the reason", func() bool {
		h := w.handover(handover)
		return h.Reply != nil && is.Contains(h.Reply.Reason, "has expired at")().Success()
	})
	rec.Expires = rec.Expires.Add(-invitation.Grace)
	assert.Assert(w.t, w.get(own))
	w.store(own, rec)
	w.until("later it is not", func() bool { return w.get(handover) && len(handover.Data) == 0 })

	rec.Approve, rec.Expires = true, time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	assert.Assert(w.t, w.get(own))
	w.store(own, rec)
	w.until("one that is open", func() bool { return w.handover(handover).Offer != nil })
	w.hand(handover, func(h *invitation.Handover) { h.Answer = &answer })
	replied := func(verdict invitation.Verdict) func() bool {
		return func() bool {
			h := w.handover(handover)
			return h.Reply != nil && h.Reply.Verdict == verdict
		}
	}
	w.until("somebody has to say yes", replied(invitation.Waiting))
	assert.Assert(w.t, w.get(own))
	rec = w.read(own)
	rec.Expires = time.Now().Add(3 * time.Second).UTC().Truncate(time.Second)
	w.store(own, rec)
	w.until("who waits for that is told by time alone that it comes no more", replied(invitation.Refused))
	assert.Assert(w.t, w.get(own))
	rec = w.read(own)
	rec.Approve, rec.Asks, rec.Expires = false, nil, rec.Expires.Add(-2*invitation.Grace)
	w.store(own, rec)
	w.until("and it ends", func() bool { return w.get(handover) && len(handover.Data) == 0 })

	rec.Expires = time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	assert.Assert(w.t, w.get(own))
	w.store(own, rec)
	w.until("an open one", func() bool { return w.handover(handover).Offer != nil })
	w.delete(own)
	w.until("is revoked", func() bool { return w.get(handover) && len(handover.Data) == 0 })
	assert.Check(w.t, !w.get(&v1beta1.Configuration{ObjectMeta: w.at("bonn")}), "something was made")
	w.delete(server)
}

// testAccepting accepts an invitation of bern.
func (w *world) testAccepting() {
	template := &v1beta1.WgGatewayClientTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "for-bern"}}
	template.Spec.ObjectKind = v1beta1.TemplateObjectKind{APIVersion: v1beta1.GroupVersion.String(), Kind: "WgGatewayClient"}
	template.Spec.Template = runtime.RawExtension{Raw: []byte(`{"spec": {"deployment": {"spec": {"template": {"spec": {"containers": [{"name": "gateway", "image": "isthmus:dev", "args": ["gateway", "--mode=client"]}]}}}}}}`)}
	port := int32(30000)
	dialler := &v1beta1.GatewayClient{ObjectMeta: w.tenantOf("bern")}
	dialler.Spec.Endpoint = v1beta1.EndpointStatus{Addresses: []string{"203.0.113.7"}, Port: &port}
	dialler.Spec.ClientTemplateRef = corev1.ObjectReference{APIVersion: v1beta1.GroupVersion.String(), Kind: "WgGatewayClientTemplate", Namespace: "liqo", Name: "for-bern"}
	w.create(template, dialler)
	temporary, shared := invitation.Key{3}, invitation.Key{4}
	rec := invitation.Record{
		Accepting: true, ID: "0123456789abcdef", From: "bern", To: "milan", Key: invitation.Key{2}, PrivateKey: &temporary, Expires: time.Now().Add(time.Hour).UTC().Truncate(time.Second),
		Follow: map[string]string{v1beta1.AnnotationFollow: "10.12.0.0/14", v1beta1.AnnotationFollowMax: "2"},
	}
	own := w.record("bern", dialler, rec)
	w.create(own)
	handover := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-bern", Name: "gw-bern-handover"}}
	w.until("its gateway knows what to dial and what to answer", func() bool {
		h := w.handover(handover)
		return h.Offer != nil && h.Offer.PrivateKey != nil && *h.Offer.PrivateKey == temporary && h.Offer.Key == rec.Key && h.Answer != nil
	})
	keys := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-bern", Name: "gw-bern"}}
	assert.Assert(w.t, w.get(keys))
	answer := w.handover(handover).Answer
	assert.DeepEqual(w.t, answer.Key[:], keys.Data[v1beta1.PublicKeyField])
	assert.Equal(w.t, answer.From+" to "+answer.To, "milan to bern")
	assert.DeepEqual(w.t, texts(answer.Pod), []string{"10.0.0.0/16"})

	reply := invitation.Reply{ID: rec.ID, Verdict: invitation.Accepted, PresharedKey: &shared, Networks: invitation.Networks{
		Pod: []netip.Prefix{netip.MustParsePrefix("10.12.0.0/16")}, External: []netip.Prefix{netip.MustParsePrefix("10.82.0.0/16")},
	}}
	// What the gateway says of the other side's key does not count.
	w.hand(handover, func(h *invitation.Handover) { h.Reply, h.Delivered, h.Offer.Key = &reply, true, invitation.Key{66} })
	key, conf := &v1beta1.PublicKey{ObjectMeta: w.at("bern")}, &v1beta1.Configuration{ObjectMeta: w.at("bern")}
	w.until("the peering is made, and the temporary key is gone", func() bool {
		return w.get(key) && w.get(conf) && w.get(handover) && len(handover.Data) == 0 && w.get(own) && w.read(own).Done
	})
	assert.DeepEqual(w.t, key.Spec.PublicKey, rec.Key[:])
	assert.Check(w.t, w.read(own).PrivateKey == nil, "the temporary key stays")
	assert.Equal(w.t, string(conf.Spec.Remote.CIDR.Pod[0]), "10.12.0.0/16")
	assert.Equal(w.t, conf.Annotations[v1beta1.AnnotationFollow]+" at most "+conf.Annotations[v1beta1.AnnotationFollowMax], "10.12.0.0/14 at most 2")
	assert.Assert(w.t, w.get(keys))
	assert.DeepEqual(w.t, keys.Data[v1beta1.PresharedKeyField], shared[:])

	// An accepted invitation is used up on this side as well.
	again := reply
	again.Pod = []netip.Prefix{netip.MustParsePrefix("10.13.0.0/16")}
	w.hand(handover, func(h *invitation.Handover) {
		h.Offer, h.Answer, h.Reply, h.Delivered = &invitation.Offer{ID: rec.ID, Key: invitation.Key{66}}, answer, &again, true
	})
	w.until("the gateway can't begin it anew", func() bool { return w.get(handover) && len(handover.Data) == 0 })
	assert.Assert(w.t, w.get(conf))
	assert.Equal(w.t, string(conf.Spec.Remote.CIDR.Pod[0]), "10.12.0.0/16")
	w.delete(dialler)
	w.delete(conf)
}

// tenantOf makes the tenant namespace of a peer, and returns the metadata of an object in it.
func (w *world) tenantOf(id string) metav1.ObjectMeta {
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-" + id, Labels: map[string]string{v1beta1.LabelTenantNamespace: "true", v1beta1.LabelRemoteClusterID: id}}})
	return w.at(id)
}

func (w *world) at(id string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "liqo-tenant-" + id, Name: id, Labels: map[string]string{v1beta1.LabelRemoteClusterID: id}}
}

// record returns the Secret of an invitation, as isthmusctl writes it.
func (w *world) record(id string, gateway client.Object, rec invitation.Record) *corev1.Secret {
	data, err := rec.Fields()
	assert.NilError(w.t, err)
	kind := "GatewayServer"
	if rec.Accepting {
		kind = "GatewayClient"
	}
	s := &corev1.Secret{ObjectMeta: w.at(id), Type: v1beta1.SecretTypeInvitation, Data: data}
	s.Name += "-invitation"
	s.Labels[v1beta1.LabelGatewayResource] = "true"
	s.OwnerReferences = []metav1.OwnerReference{{APIVersion: v1beta1.GroupVersion.String(), Kind: kind, Name: gateway.GetName(), UID: gateway.GetUID()}}
	return s
}

func (w *world) read(s *corev1.Secret) invitation.Record {
	rec, err := invitation.ReadRecord(s.Data)
	assert.NilError(w.t, err)
	return rec
}

func (w *world) store(s *corev1.Secret, rec invitation.Record) {
	var err error
	s.Data, err = rec.Fields()
	assert.NilError(w.t, err)
	assert.NilError(w.t, w.c.Update(w.t.Context(), s))
}

func (w *world) handover(s *corev1.Secret) invitation.Handover {
	if !w.get(s) {
		return invitation.Handover{}
	}
	h, err := invitation.ReadHandover(s.Data)
	assert.NilError(w.t, err)
	return h
}

// hand writes what a gateway does.
func (w *world) hand(s *corev1.Secret, change func(*invitation.Handover)) {
	w.until("the gateway has written it", func() bool {
		h := w.handover(s)
		change(&h)
		var err error
		s.Data, err = h.Fields()
		assert.NilError(w.t, err)
		return w.c.Update(w.t.Context(), s) == nil
	})
}

// may reports whether the gateway of a peer may do something with a Secret of its namespace.
func (w *world) may(id, verb, name string) bool {
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:               "system:serviceaccount:liqo-tenant-" + id + ":gw-" + id,
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "liqo-tenant-" + id, Verb: verb, Resource: "secrets", Name: name},
	}}
	assert.NilError(w.t, w.c.Create(w.t.Context(), review))
	return review.Status.Allowed
}

func texts(list []netip.Prefix) []string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	return out
}
