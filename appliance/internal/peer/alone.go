package peer

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Actions in one of the two clusters alone: of the other one there is an ID.
const (
	// Remove deletes what Reset does, in one cluster.
	Remove Action = "remove"
	// Invite makes a GatewayServer and an invitation for it.
	Invite Action = "invite"
	// Revoke takes that back, unless it has led to a peering.
	Revoke Action = "revoke"
	// Accept makes a GatewayClient that hands in the answer to an invitation.
	Accept Action = "accept"
)

// alone reports whether the action is about one cluster.
func (a Action) alone() bool { return a == Remove || a == Invite || a == Revoke || a == Accept }

// Invited is what the text of an invitation needs of the gateway.
type Invited struct {
	PublicKey []byte
	Endpoint  v1beta1.EndpointStatus
	MTU       int // bytes; 0: derived
}

// InvitationName is the name of the Secret of an invitation, in the tenant namespace.
func InvitationName(peer string) string { return peer + "-invitation" }

// lookInvitation adds to the facts of a side what there is of an invitation.
func (f *Facts) lookInvitation(ctx context.Context, peer string) error {
	if f.Namespace.UID == "" {
		return nil
	}
	names := []string{InvitationName(peer)}
	for i := range f.Servers {
		names = append(names, plan.HandoverName(f.Servers[i].Name))
	}
	for i := range f.Clients {
		names = append(names, plan.HandoverName(f.Clients[i].Name))
	}
	for _, name := range names {
		s := &corev1.Secret{}
		err := f.Cluster.Client.Get(ctx, client.ObjectKey{Namespace: f.Namespace.Name, Name: name}, s)
		if apierrors.IsNotFound(err) || err == nil && s.DeletionTimestamp != nil {
			continue
		}
		if err != nil {
			return &ReadError{f.Cluster, err}
		}
		switch s.Type {
		case v1beta1.SecretTypeInvitation:
			r, err := invitation.ReadRecord(s.Data)
			if err != nil {
				return fmt.Errorf("Secret %s/%s: %w: delete it", s.Namespace, s.Name, err)
			}
			f.Invitation, f.Record = s, r
		case v1beta1.SecretTypeHandover:
			// The gateway may be writing it.
			if h, err := invitation.ReadHandover(s.Data); err == nil {
				f.Reply = h.Reply
			}
		}
	}
	return nil
}

// invite returns what is next on the way to an open invitation.
func invite(b *Both, o *Options) Step {
	s := Step{Problems: o.Check()}
	f, id := &b[Local], b[Remote].ID
	checkAlone(b, &s)
	if o.ServiceType == corev1.ServiceTypeClusterIP {
		s.problem("flags", "--"+FlagServiceType, fmt.Sprintf("choose another type, or let the other side invite: there, isthmusctl peer invite %s", f.ID),
			"a Service of the type ClusterIP is reached from inside this cluster only")
	}
	mine := f.Invitation != nil && f.Record.ID == o.Invitation.ID
	switch {
	case f.Invitation != nil && !mine:
		f.unfinished(id, o.Now(), &s)
	case len(f.Configurations)+len(f.Keys)+len(f.Clients) > 0:
		taken(b, &s)
	}
	checkTemplate(b, Local, o.Server, "--"+FlagServerTemplate, &s)
	checkService(b, Local, o, &s)
	gateways := adoptGateways(b, Local, o, &s)
	if len(s.Problems) > 0 {
		return s
	}
	if ground(b, o, &s); s.busy() {
		return s
	}
	if s.Changes = gateways; s.busy() {
		return s
	}
	g := &f.Servers[0]
	if accepted(b, Local, g, g.Status.Conditions, &s); s.busy() {
		return s
	}
	s.InPlace = append(s.InPlace, b.ref(Local, g))
	switch {
	case dialled(g.Status.Endpoint, o) == nil:
		s.wait(Local, false, "%s to have an endpoint: %s", b.ref(Local, g), noEndpoint(g))
	case len(f.PublicKey) == 0:
		s.wait(Local, false, "%s to have keys", b.ref(Local, g))
	case f.Starting != "":
		s.wait(Local, false, "the gateway of %s to run: %s", f.ID, f.Starting)
	case f.Invitation == nil:
		s.Changes = append(s.Changes, Change{On: Local, Deed: Create, Object: b.newInvitation(o, g)})
	default:
		s.InPlace = append(s.InPlace, b.ref(Local, f.Invitation))
		if e := dialled(g.Status.Endpoint, o); !reachedFromAfar(e.Addresses) {
			s.Notes = append(s.Notes, fmt.Sprintf("the gateway is at %s, which other networks do not lead to: if the nodes of %s can't reach that, say by --%s what leads there from outside, or let the other side invite: there, isthmusctl peer invite %s",
				place(e.Addresses, *e.Port), id, FlagClientAddress, f.ID))
		}
	}
	return s
}

// reachedFromAfar reports whether one of these addresses is a public one, or a name, which may
// lead to one. Those of carriers' NAT are not (RFC 6598).
func reachedFromAfar(addresses []string) bool {
	shared := netip.MustParsePrefix("100.64.0.0/10")
	return slices.ContainsFunc(addresses, func(text string) bool {
		a, err := netip.ParseAddr(text)
		return err != nil || a.IsGlobalUnicast() && !a.IsPrivate() && !shared.Contains(a.Unmap())
	})
}

// accept returns what is next on the way to a peering with who has invited.
func accept(b *Both, o *Options) Step {
	var s Step
	f, id := &b[Local], b[Remote].ID
	checkAlone(b, &s)
	mine := f.Invitation != nil && f.Record.Accepting && f.Record.ID == o.Invitation.ID
	if !mine && (f.Invitation != nil || len(f.Configurations)+len(f.Keys)+len(f.Servers) > 0) {
		taken(b, &s)
	}
	// A run that was ended before it has made the Secret has left the gateway.
	if !mine && slices.ContainsFunc(f.Clients, func(c v1beta1.GatewayClient) bool {
		return c.Annotations[v1beta1.AnnotationInvitation] != o.Invitation.ID
	}) {
		taken(b, &s)
	}
	checkTemplate(b, Local, o.Client, "--"+FlagClientTemplate, &s)
	if follow := o.Follow[Local]; mine && len(f.Configurations) == 0 && len(follow.Ranges) > 0 && !maps.Equal(f.Record.Follow, follow.Annotations()) {
		s.problem("invitation", fmt.Sprintf("the invitation of %s", id), "leave the flag out, and once the clusters are peers run "+b.followCommand(Local, follow),
			"it was accepted already, without --%s or with another value of it", FlagFollow)
	}
	if len(s.Problems) > 0 {
		return s
	}
	if ground(b, o, &s); s.busy() {
		return s
	}
	if len(f.Clients) == 0 {
		c := b.newClient(Local, o, o.Endpoint)
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, v1beta1.AnnotationInvitation, o.Invitation.ID)
		s.Changes = append(s.Changes, Change{On: Local, Deed: Create, Object: c})
		return s
	}
	c := &f.Clients[0]
	if accepted(b, Local, c, c.Status.Conditions, &s); s.busy() {
		return s
	}
	s.InPlace = append(s.InPlace, b.ref(Local, c))
	if f.Invitation == nil {
		s.Changes = append(s.Changes, Change{On: Local, Deed: Create, Object: b.newInvitation(o, c)})
		return s
	}
	if !f.Record.Done {
		answered(b, o, &s)
		return s
	}
	if len(f.Configurations) > 0 {
		b.follow(Local, &f.Configurations[0], o.Follow[Local], &s)
	}
	if configured(b, Local, &s); s.busy() || !o.Wait {
		return s
	}
	if why, ok := f.connected(); !ok {
		s.wait(Local, false, "the tunnel: %s", cmp.Or(f.Starting, why))
	}
	return s
}

// ground finds what a gateway of this side needs before it can be made: the tenant
// namespace, and the networks of the cluster.
func ground(b *Both, o *Options, s *Step) {
	f := &b[Local]
	if namespace(b, Local, o, s); !s.busy() && f.Pending != "" {
		s.wait(Local, false, "%s of %s to have a network", f.Pending, f.ID)
	}
}

// answered waits for the reply to the answer of this side.
func answered(b *Both, o *Options, s *Step) {
	f, id := &b[Local], b[Remote].ID
	c := &f.Clients[0]
	at := place(c.Spec.Endpoint.Addresses, first(c.Spec.Endpoint.Port, c.Spec.Endpoint.Ports))
	switch {
	case f.Starting != "":
		s.wait(Local, false, "the gateway of %s to run: %s", f.ID, f.Starting)
	case f.Reply == nil:
		expired := ""
		if o.Now().After(f.Record.Expires) {
			expired = fmt.Sprintf("; by the clock of %s it has expired at %s", f.ID, f.Record.Expires.UTC().Format(time.RFC3339))
		}
		s.wait(Local, false, "the gateway of %s to answer at %s: UDP has to reach it there, and the invitation must not have been used, revoked or have expired long ago%s", id, at, expired)
	case f.Reply.Verdict == invitation.Refused:
		s.problem("invitation", fmt.Sprintf("the invitation of %s", id), "", "refused: %s", f.Reply.Reason)
	case f.Reply.Verdict == invitation.Delayed:
		s.wait(Local, false, "cluster %s: %s", id, f.Reply.Reason)
	case f.Reply.Verdict == invitation.Waiting:
		how := "until the invitation expires, at " + f.Record.Expires.UTC().Format(time.RFC3339)
		if o.ApprovalTimeout > 0 {
			how = fmt.Sprintf("for %v at most, or %s", o.ApprovalTimeout, how)
		}
		s.wait(Local, false, "cluster %s: %s. This waits %s", id, f.Reply.Reason, how)
		s.Waits[0].Until = decision(f.Record.Expires, o.Now())
	default:
		s.wait(Local, false, "the controller of %s to make the peering", f.ID)
	}
}

// decision returns until when to wait for the yes of the other side, by this machine's clock.
// now is the time of this cluster. An invitation expires by the clock of the other one, which
// still waits: where it has expired by this cluster's, the clocks differ by nobody knows how
// much, and the usual lifetime is waited for.
func decision(expires, now time.Time) time.Time {
	left := expires.Add(invitation.Grace).Sub(now)
	if left <= invitation.Grace {
		left = invitation.DefaultLifetime
	}
	return time.Now().Add(left)
}

// revoke returns what is next on the way to no invitation.
func revoke(b *Both, o *Options) Step {
	f, id := &b[Local], b[Remote].ID
	var s Step
	checkAlone(b, &s)
	switch {
	case f.Invitation == nil && !o.began && !f.halfInvited():
		s.problem("invitation", fmt.Sprintf("the invitation of %s", id), fmt.Sprintf("%s peer invite --list shows those there are", f.Cluster.Isthmusctl), "there is none")
	case f.Invitation != nil && f.Record.Accepting:
		s.problem("invitation", fmt.Sprintf("the invitation of %s", id), fmt.Sprintf("%s peer remove %s", f.Cluster.Isthmusctl, id), "it was %s who has invited", id)
	case f.Invitation != nil && f.Record.Used != nil:
		s.problem("invitation", fmt.Sprintf("the invitation of %s", id), fmt.Sprintf("%s peer remove %s ends the peering", f.Cluster.Isthmusctl, id),
			"it was used already, by a gateway with the fingerprint %s", invitation.Fingerprint(f.Record.Used.Key))
	case f.Invitation != nil:
		s.Changes = append(s.Changes, Change{On: Local, Deed: Delete, Object: f.Invitation})
	}
	if s.busy() {
		return s
	}
	if len(f.Servers) == 1 {
		if by := writer(&f.Servers[0], "spec.endpoint"); by != "" {
			s.Notes = append(s.Notes, fmt.Sprintf("%s stays, since it was written by %s: %s peer remove %s takes it away", b.ref(Local, &f.Servers[0]), by, f.Cluster.Isthmusctl, id))
			return s
		}
	}
	return remove(b, Reset, o)
}

// unfinished says what an invitation stands in the way of, in the state that it is in.
func (f *Facts) unfinished(id string, now time.Time, s *Step) {
	again := fmt.Sprintf("%s peer invite %s --revoke ends it; then invite again, since the text that was printed is kept nowhere", f.Cluster.Isthmusctl, id)
	what, r := fmt.Sprintf("the invitation of %s", id), &f.Record
	switch {
	case r.Accepting && r.Done, r.Used != nil && r.Done:
		s.problem("invitation", what, fmt.Sprintf("%s peer list shows how they are connected", f.Cluster.Isthmusctl), "it was accepted: the clusters are peers already")
	case r.Accepting:
		s.problem("invitation", "the invitation of this cluster by "+id, fmt.Sprintf("run the same peer accept again to go on with it, or %s peer remove %s to give it up", f.Cluster.Isthmusctl, id), "it is being accepted here")
	case r.Used != nil:
		s.problem("invitation", what, fmt.Sprintf("wait until the clusters are peers; if that comes to nothing: %s peer remove %s", f.Cluster.Isthmusctl, id),
			"it is being accepted, by a gateway with the fingerprint %s", invitation.Fingerprint(r.Used.Key))
	case r.State(now) == "expired":
		s.problem("invitation", what, again, "there is one that has expired at %s", r.Expires.UTC().Format(time.RFC3339))
	case r.Undecided():
		s.problem("invitation", what, fmt.Sprintf("%s peer invite %s --approve asks you whether it is the right one", f.Cluster.Isthmusctl, id),
			"a gateway has answered it, with the fingerprint %s, and waits for a yes", invitation.Fingerprint(r.Asks.Key))
	default:
		s.problem("invitation", what, again, "there is one already, which can be accepted until %s", r.Expires.UTC().Format(time.RFC3339))
	}
}

// halfInvited tells whether a run of peer invite was ended before it had made the Secret, the
// last of its objects.
func (f *Facts) halfInvited() bool {
	return len(f.Servers) == 1 && writer(&f.Servers[0], "spec.endpoint") == "" && len(f.Configurations)+len(f.Keys)+len(f.Clients) == 0
}

// checkAlone finds what makes it impossible that the cluster has such a peer.
func checkAlone(b *Both, s *Step) {
	if b[Local].ID == b[Remote].ID {
		s.problem("clusters", "cluster "+b[Local].ID, "name the cluster at the other end", "it is this cluster's own ID")
		return
	}
	checkTunnelEndpoints(b, s)
	checkTwice(b, s)
}

// taken says that there is a peering already.
func taken(b *Both, s *Step) {
	f, id := &b[Local], b[Remote].ID
	s.problem("objects", fmt.Sprintf("the peering with %s", id),
		fmt.Sprintf("%s peer remove %s, if it is to be made anew, or is that of another cluster with the same ID", f.Cluster.Isthmusctl, id),
		"there are objects of one in namespace %s already (%s peer list)", f.Namespace.Name, f.Cluster.Isthmusctl)
}

// newInvitation is the Secret of an invitation. It goes with the gateway.
func (b *Both) newInvitation(o *Options, gateway client.Object) *corev1.Secret {
	s := &corev1.Secret{ObjectMeta: b.meta(Local, o), Type: v1beta1.SecretTypeInvitation}
	s.Name = InvitationName(b[Remote].ID)
	s.Labels[v1beta1.LabelGatewayResource] = "true"
	version, kind := kindOf(gateway)
	s.OwnerReferences = []metav1.OwnerReference{{APIVersion: version, Kind: kind, Name: gateway.GetName(), UID: gateway.GetUID()}}
	s.Data = o.sealed
	return s
}

// invited returns what the text needs; nil: there is no invitation.
func (b *Both) invited(o *Options) *Invited {
	f := &b[Local]
	if f.Invitation == nil || len(f.Servers) == 0 {
		return nil
	}
	g := &f.Servers[0]
	e := dialled(g.Status.Endpoint, o)
	if e == nil {
		return nil
	}
	return &Invited{PublicKey: f.PublicKey, Endpoint: *e, MTU: g.Spec.MTU}
}
