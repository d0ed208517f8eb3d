package peer

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

// one are the facts of milan, about its peer rome that is nowhere to be seen.
func one() *Both {
	b := two()
	b[Remote] = Facts{Identity: Identity{ID: "rome"}, Cluster: Cluster{Name: "cluster rome"}}
	return b
}

func alone(t *testing.T, rec invitation.Record) *Options {
	t.Helper()
	o := defaults()
	o.ServiceType, o.Now = corev1.ServiceTypeNodePort, func() time.Time { return rec.Expires.Add(-time.Minute) }
	port := int32(30000)
	o.Invitation, o.Endpoint = rec, &v1beta1.EndpointStatus{Addresses: []string{"203.0.113.7"}, Port: &port}
	var err error
	o.sealed, err = rec.Fields()
	assert.NilError(t, err)
	return o
}

func record(accepting bool) invitation.Record {
	rec := invitation.Record{ID: "0123456789abcdef", From: "milan", To: "rome", Key: invitation.Key{1}, Expires: time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)}
	if accepting {
		rec.Accepting, rec.From, rec.To, rec.PrivateKey = true, "rome", "milan", &invitation.Key{2}
	}
	return rec
}

// next plans and applies until there is nothing to do, and returns what was made and what is
// waited for.
func (b *Both) next(t *testing.T, plan func(*Both, *Options) Step, o *Options) (made []string, s Step) {
	t.Helper()
	for range 20 {
		s = plan(b, o)
		if len(s.Changes) == 0 {
			return made, s
		}
		for _, c := range s.Changes {
			made = append(made, b.ref(c.On, c.Object).Kind+" "+c.Object.GetName())
			if secret, ok := c.Object.(*corev1.Secret); ok {
				var err error
				b[Local].Invitation = secret
				b[Local].Record, err = invitation.ReadRecord(secret.Data)
				assert.NilError(t, err)
			}
		}
		o.began = true
		b.apply(t, s.Changes)
		b.settle(Local)
	}
	t.Fatal("it does not end")
	return nil, s
}

// TestRevoke takes back what was made for the invitation, and not the gateway that was there before.
func TestRevoke(t *testing.T) {
	deleted := func(b *Both) (list []string, s Step) {
		o := alone(t, record(false))
		o.began = true
		for _, c := range revoke(b, o).Changes {
			list = append(list, string(c.Deed)+" "+b.ref(c.On, c.Object).String())
		}
		b[Local].Invitation = nil
		s = revoke(b, o)
		for _, c := range s.Changes {
			list = append(list, string(c.Deed)+" "+b.ref(c.On, c.Object).String())
		}
		return list, s
	}
	b := one()
	b.next(t, invite, alone(t, record(false)))
	list, _ := deleted(b)
	assert.DeepEqual(t, list, []string{"deleted Secret liqo-tenant-rome/rome-invitation in milan", "deleted GatewayServer liqo-tenant-rome/rome in milan"})

	b = one()
	o := alone(t, record(false))
	g := b.newServer(Local, o)
	g.ManagedFields = by("argocd-controller", `{"f:spec":{"f:endpoint":{}}}`)
	b[Local].Servers = []v1beta1.GatewayServer{*g}
	b.settle(Local)
	made, _ := b.next(t, invite, o)
	assert.DeepEqual(t, made, []string{"Namespace liqo-tenant-rome", "Secret rome-invitation"})
	list, s := deleted(b)
	assert.DeepEqual(t, list, []string{"deleted Secret liqo-tenant-rome/rome-invitation in milan"})
	assert.DeepEqual(t, s.Notes, []string{"GatewayServer liqo-tenant-rome/rome in milan stays, since it was written by argocd-controller: isthmusctl --context milan peer remove rome takes it away"})
}

// TestConnectInvited does not begin while an invitation is open on either side: its gateway has
// nothing but the temporary tunnel.
func TestConnectInvited(t *testing.T) {
	for _, side := range []Side{Local, Remote} {
		b, o := two(), alone(t, record(false))
		o.ServiceType = DefaultServiceType
		b[side].Invitation, b[side].Record = &corev1.Secret{}, record(false)
		s := connect(b, Connect, o)
		assert.Check(t, is.Len(s.Changes, 0))
		if assert.Check(t, is.Len(s.Problems, 1)) {
			assert.Check(t, is.Contains(s.Problems[0].Fix, "isthmusctl --context "+b[side].ID+" peer invite "+b[side.other()].ID+" --revoke"))
		}
		o.Now = func() time.Time { return record(false).Expires.Add(invitation.Grace) }
		assert.Check(t, is.Len(connect(b, Connect, o).Problems, 0), "it is over")
		o.Now = nil
		b[side].Record.Expires, b[side].Record.Done = time.Now().Add(time.Hour), true
		assert.Check(t, is.Len(connect(b, Connect, o).Problems, 0), "it was used")
	}
}

func TestInvite(t *testing.T) {
	b := one()
	o := alone(t, record(false))
	made, s := b.next(t, invite, o)
	assert.DeepEqual(t, made, []string{"Namespace liqo-tenant-rome", "GatewayServer rome", "Secret rome-invitation"})
	assert.Check(t, is.Len(s.Problems, 0))
	assert.Check(t, is.Len(s.Waits, 0))
	secret := b[Local].Invitation
	assert.Equal(t, string(secret.Type), v1beta1.SecretTypeInvitation)
	assert.Equal(t, secret.OwnerReferences[0].Kind, "GatewayServer")
	assert.DeepEqual(t, b.invited(o).Endpoint.Addresses, []string{"203.0.113.7"})
	assert.Check(t, is.Len(s.Notes, 0))
	// Somebody far away does not get there.
	b[Local].Servers[0].Status.Endpoint.Addresses = []string{"172.18.0.2", "100.64.1.2", "fd00::2"}
	_, s = b.next(t, invite, o)
	assert.Assert(t, is.Len(s.Notes, 1))
	assert.Check(t, is.Contains(s.Notes[0], "the gateway is at 172.18.0.2, 100.64.1.2, fd00::2 port 30000, which other networks do not lead to"))
	o.Address = "vpn.example.com"
	_, s = b.next(t, invite, o)
	assert.Check(t, is.Len(s.Notes, 0))
}

// TestDecision waits for a yes also where the clock of this cluster is ahead.
func TestDecision(t *testing.T) {
	expires := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		now  time.Time
		left time.Duration
	}{
		{expires.Add(-20 * time.Minute), 20*time.Minute + invitation.Grace},
		{expires.Add(time.Minute), invitation.DefaultLifetime},
		{expires.Add(24 * time.Hour), invitation.DefaultLifetime},
	} {
		left := time.Until(decision(expires, c.now))
		assert.Check(t, left > c.left-time.Minute && left <= c.left, "%v at %v", left, c.now)
	}
}

func TestAccept(t *testing.T) {
	b := one()
	o := alone(t, record(true))
	made, s := b.next(t, accept, o)
	assert.DeepEqual(t, made, []string{"Namespace liqo-tenant-rome", "GatewayClient rome", "Secret rome-invitation"})
	assert.Assert(t, is.Len(s.Waits, 1))
	assert.Check(t, is.Contains(s.Waits[0].Text, "the gateway of rome to answer at 203.0.113.7 port 30000"))
	assert.Check(t, !strings.Contains(s.Waits[0].Text, "expired at"))
	f := &b[Local]
	// The clock of this cluster does not decide.
	was := o.Now
	o.Now = func() time.Time { return f.Record.Expires.Add(24 * time.Hour) }
	_, s = b.next(t, accept, o)
	assert.Check(t, is.Contains(s.Waits[0].Text, "; by the clock of milan it has expired at 2026-03-14T12:00:00Z"))
	o.Now = was
	for _, c := range []struct {
		reply invitation.Reply
		want  string
	}{
		{invitation.Reply{Verdict: invitation.Waiting, Reason: "somebody has to say yes"}, "cluster rome: somebody has to say yes"},
		{invitation.Reply{Verdict: invitation.Accepted}, "the controller of milan to make the peering"},
	} {
		f.Reply = &c.reply
		_, s = b.next(t, accept, o)
		assert.Check(t, is.Contains(s.Waits[0].Text, c.want))
	}
	f.Reply = &invitation.Reply{Verdict: invitation.Refused, Reason: "it has expired"}
	_, s = b.next(t, accept, o)
	assert.Check(t, is.Equal(s.Problems[0].Message, "refused: it has expired"))

	f.Reply, f.Record.Done = nil, true
	f.Configurations = []v1beta1.Configuration{{}}
	f.Keys = []v1beta1.PublicKey{{}}
	b.settle(Local)
	_, s = b.next(t, accept, o)
	assert.Check(t, is.Contains(s.Waits[0].Text, "the tunnel: "))
	f.Connections[0].Status.Value = v1beta1.Connected
	_, s = b.next(t, accept, o)
	assert.Check(t, !s.busy(), "%+v", s)
}

// A run that was ended after any write is gone on with.
func TestAcceptResumes(t *testing.T) {
	all := []string{"Namespace liqo-tenant-rome", "GatewayClient rome", "Secret rome-invitation"}
	for writes := range len(all) + 1 {
		b := one()
		o := alone(t, record(true))
		for range writes {
			c := accept(b, o).Changes
			assert.Assert(t, is.Len(c, 1))
			if secret, ok := c[0].Object.(*corev1.Secret); ok {
				b[Local].Invitation, b[Local].Record = secret, o.Invitation
			}
			b.apply(t, c)
			b.settle(Local)
			o.began = true
		}
		again := alone(t, record(true))
		made, s := b.next(t, accept, again)
		assert.DeepEqual(t, made, all[writes:], cmpopts.EquateEmpty())
		assert.Check(t, is.Len(s.Problems, 0))
		assert.Equal(t, b[Local].Clients[0].Annotations[v1beta1.AnnotationInvitation], record(true).ID)
		assert.Equal(t, len(b[Local].Invitation.Annotations), 0)
	}
}

// What the peer may add is in the record from the start. Whoever asks for something else
// later is told how.
func TestAcceptFollows(t *testing.T) {
	follow := Follow{Ranges: []string{"10.64.0.0/10", "fd64::/16"}, Max: 2}
	rec := record(true)
	rec.Follow = follow.Annotations()
	b := one()
	o := alone(t, rec)
	o.Follow[Local] = follow
	_, s := b.next(t, accept, o)
	assert.Check(t, is.Len(s.Problems, 0))
	f := &b[Local]
	assert.DeepEqual(t, f.Record.Follow, map[string]string{v1beta1.AnnotationFollow: "10.64.0.0/10,fd64::/16", v1beta1.AnnotationFollowMax: "2"})

	asks := func(want int, change func()) {
		t.Helper()
		change()
		s := accept(b, o)
		assert.Assert(t, is.Len(s.Problems, want))
		for _, p := range s.Problems {
			assert.Check(t, is.Contains(p.Fix, "leave the flag out, and once the clusters are peers run isthmusctl --context milan peer follow rome --range 10.96.0.0/11"))
		}
	}
	asks(1, func() { o.Follow[Local] = Follow{Ranges: []string{"10.96.0.0/11"}} })
	asks(0, func() { o.Follow[Local] = Follow{} })
	// There is a Configuration: it says what is so.
	c := v1beta1.Configuration{}
	c.Annotations = maps.Clone(rec.Follow)
	f.Configurations, f.Record.Done = []v1beta1.Configuration{c}, true
	asks(0, func() { o.Follow[Local] = follow })
	o.Follow[Local] = Follow{Ranges: []string{"10.96.0.0/11"}}
	s = accept(b, o)
	assert.Assert(t, is.Len(s.Problems, 1))
	assert.Check(t, is.Contains(s.Problems[0].Message, `its annotation networking.liqo.io/follow is "10.64.0.0/10,fd64::/16", while "10.96.0.0/11" was asked for`))
}

// Nothing is begun where there is a peering, or another invitation.
func TestAloneRefuses(t *testing.T) {
	other := record(false)
	other.ID = "fedcba9876543210"
	invitedBy := func(rec invitation.Record) func(*Both) {
		return func(b *Both) { b[Local].Invitation, b[Local].Record = &corev1.Secret{}, rec }
	}
	used := record(false)
	used.Used = &invitation.Answer{Key: invitation.Key{9}}
	asked, accepted, accepting := other, used, record(true)
	accepting.ID = other.ID
	asked.Asks = &invitation.Answer{Key: invitation.Key{8}}
	accepted.ID, accepted.Done = other.ID, true
	for _, c := range []struct {
		name   string
		plan   func(*Both, *Options) Step
		rec    invitation.Record
		change func(*Both)
		want   string
	}{
		{"invite: itself", invite, record(false), func(b *Both) { b[Remote].ID = "milan" }, "it is this cluster's own ID"},
		{"invite: there is a peering", invite, record(false), func(b *Both) { b[Local].Configurations = []v1beta1.Configuration{{}} }, "there are objects of one"},
		{"invite: this side dials", invite, record(false), func(b *Both) { b[Local].Clients = []v1beta1.GatewayClient{{}} }, "there are objects of one"},
		{"invite: there is an invitation", invite, record(false), invitedBy(other), "there is one already, which can be accepted until 2026"},
		{"invite: somebody is asked", invite, record(false), invitedBy(asked), "a gateway has answered it, with the fingerprint " + invitation.Fingerprint(invitation.Key{8})},
		{"invite: they are peers", invite, record(false), invitedBy(accepted), "the clusters are peers already"},
		{"invite: this side was invited", invite, record(false), invitedBy(accepting), "it is being accepted here"},
		{"accept: there is a peering", accept, record(true), func(b *Both) { b[Local].Keys = []v1beta1.PublicKey{{}} }, "there are objects of one"},
		{"accept: this side is dialled", accept, record(true), func(b *Both) { b[Local].Servers = []v1beta1.GatewayServer{{}} }, "there are objects of one"},
		{"accept: this side dials", accept, record(true), func(b *Both) { b[Local].Clients = []v1beta1.GatewayClient{{}} }, "there are objects of one"},
		{"accept: this side dials for another invitation", accept, record(true), func(b *Both) {
			c := v1beta1.GatewayClient{}
			c.Annotations = map[string]string{v1beta1.AnnotationInvitation: other.ID}
			b[Local].Clients = []v1beta1.GatewayClient{c}
		}, "there are objects of one"},
		{"accept: this side has invited", accept, record(true), invitedBy(other), "there are objects of one"},
		{"revoke: there is none", revoke, record(false), func(*Both) {}, "there is none"},
		{"revoke: there is somebody else's server", revoke, record(false), func(b *Both) { b[Local].Servers = []v1beta1.GatewayServer{{}} }, "there is none"},
		{"revoke: it was used", revoke, record(false), invitedBy(used), "it was used already, by a gateway with the fingerprint " + invitation.Fingerprint(invitation.Key{9})},
		{"revoke: the other side's", revoke, record(false), invitedBy(record(true)), "it was rome who has invited"},
	} {
		b := one()
		c.change(b)
		s := c.plan(b, alone(t, c.rec))
		assert.Check(t, is.Len(s.Changes, 0), c.name)
		if assert.Check(t, len(s.Problems) > 0, c.name) {
			assert.Check(t, strings.Contains(s.Problems[0].Message, c.want), "%s: %+v", c.name, s.Problems)
		}
	}
	b := one()
	g := v1beta1.GatewayServer{}
	g.ManagedFields = by(string(FieldOwner), `{"f:spec":{}}`)
	b[Local].Servers = []v1beta1.GatewayServer{g}
	assert.Check(t, is.Len(revoke(b, alone(t, record(false))).Problems, 0), "an invite that was ended before its Secret was made")
	b, o := one(), alone(t, record(false))
	o.ServiceType = corev1.ServiceTypeClusterIP
	assert.Check(t, is.Contains(invite(b, o).Problems[0].Fix, "isthmusctl peer invite milan"))
}
