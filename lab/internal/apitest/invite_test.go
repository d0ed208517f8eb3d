package apitest

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"strings"
	"sync"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// invites has milan invite rome, whose isthmusctl knows nothing of milan but the text. What
// the two gateways would do, carry and balance do here.
func (p *pair) invites() {
	defer p.handing()()
	text := p.invitation()
	out := p.milan.run("peer", "invite", "--list")
	assert.Check(p.t, is.Contains(out, "rome   us           open"))
	for _, c := range []struct {
		name string
		by   *operator
		args []string
		want string
	}{
		{"a second one", p.milan, []string{"invite", "rome"}, "there is one already, which can be accepted until"},
		{"itself", p.milan, []string{"invite", "milan"}, "it is this cluster's own ID"},
		{"own", p.milan, []string{"accept", text}, "it is the invitation of this cluster itself, milan"},
		{"altered", p.rome, []string{"accept", strings.Replace(text, "eyJ", "eyK", 1)}, "is not as it was printed"},
		{"cut off", p.rome, []string{"accept", strings.Join(strings.Split(text, "\n")[:3], "\n")}, "is not as it was printed"},
		{"none there is", p.milan, []string{"invite", "oslo", "--revoke"}, "there is none"},
		{"by a ClusterIP", p.milan, []string{"invite", "oslo", "--gw-server-service-type", "ClusterIP"}, "let the other side invite: there, isthmusctl peer invite milan"},
	} {
		_, errs, err := c.by.try(append([]string{"peer"}, c.args...)...)
		assert.Check(p.t, err != nil, c.name)
		assert.Check(p.t, is.Contains(errs, c.want), c.name)
	}
	out = p.rome.run("peer", "accept", text, "--wait", "--timeout", "4m")
	assert.Check(p.t, is.Contains(out, "rome and milan are peers"))
	assert.Check(p.t, is.Contains(out, "They are connected."))
	p.invited()
	assert.Check(p.t, is.Contains(p.rome.run("peer", "accept", text), "are peers already: nothing to do"))
	_, errs, err := p.milan.try("peer", "invite", "rome", "--revoke")
	assert.Check(p.t, err != nil && strings.Contains(errs, "it was used already, by a gateway with the fingerprint"), errs)
	p.forgets()

	// What is refused is taken back.
	expired := p.invitation("--expires", "1s")
	until(p.t, "the invitation has expired", func() bool {
		return strings.Contains(p.milan.run("peer", "invite", "--list"), "expired")
	})
	_, errs, err = p.rome.try("peer", "accept", expired, "--timeout", "4m")
	assert.Check(p.t, err != nil && strings.Contains(errs, "refused: the invitation has expired at"), errs)
	assert.Check(p.t, is.Contains(errs, "what this run had made was taken back"))
	until(p.t, "the gateway is gone", func() bool { return len(p.rome.list(p.t.Context(), "GatewayClient")) == 0 })
	assert.Check(p.t, is.Contains(p.milan.run("peer", "invite", "rome", "--revoke"), "is revoked"))
	p.nothing()
	p.refusesKey()
	p.approves()
	p.acceptKilled()
}

// invitesInVain has milan invite where there is no load balancer: what was made until then
// is taken back by the command that ends an invitation.
func (p *pair) invitesInVain() {
	saysInVain(p.t, "peer invite rome", []string{
		"GatewayServer liqo-tenant-rome/rome in milan to have an endpoint: no load balancer has given Service gw-rome an address",
		"peer invite rome once more, with --gw-server-service-type NodePort",
		"if milan can't be reached from outside, let the other side invite: there, isthmusctl peer invite milan",
	}, func(timeout string) string {
		_, errs, err := p.milan.try("peer", "invite", "rome", "--timeout", timeout)
		assert.Check(p.t, err != nil)
		return errs
	})
	assert.Check(p.t, is.Contains(p.milan.run("peer", "invite", "rome", "--revoke"), "is revoked"))
	p.nothing()
}

// handing has done what two gateways and a load balancer do, until what it returns is called.
func (p *pair) handing() (end func()) {
	ctx, cancel := context.WithCancel(p.t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.carry(ctx) })
	running.Go(func() { p.milan.balance(ctx) })
	return func() { cancel(); running.Wait() }
}

// forgets removes both sides of a peering.
func (p *pair) forgets() {
	for _, side := range []struct {
		of *operator
		id string
	}{{p.rome, "milan"}, {p.milan, "rome"}} {
		assert.Check(p.t, is.Contains(side.of.run("peer", "remove", side.id, "--wait"), "This cluster has forgotten "+side.id))
		assert.Check(p.t, is.Contains(side.of.run("peer", "remove", side.id), "nothing to do"))
	}
	p.nothing()
}

// refusesKey accepts no invitation of a gateway whose key is blocked.
func (p *pair) refusesKey() {
	var answer struct{ Text, Fingerprint string }
	assert.NilError(p.t, json.Unmarshal([]byte(p.milan.run("peer", "invite", "rome", "--json")), &answer))
	p.rome.run("peer", "block", "--key", answer.Fingerprint, "--reason", "key leaked")
	_, errs, err := p.rome.try("peer", "accept", answer.Text)
	assert.Check(p.t, err != nil)
	assert.Check(p.t, is.Contains(errs, "refused, nothing was changed: the gateway of milan has the key with the fingerprint "+answer.Fingerprint+", which this cluster has blocked by ConfigMap liqo/isthmus-blocked-keys (by "))
	assert.Check(p.t, is.Contains(errs, ": key leaked): isthmusctl peer unblock --key "+answer.Fingerprint+" ends that"))
	p.rome.run("peer", "unblock", "--key", answer.Fingerprint)
	p.milan.run("peer", "invite", "rome", "--revoke")
	p.nothing()
}

// acceptKilled kills peer accept after each of its writes, and runs it again.
func (p *pair) acceptKilled() {
	const writes = 3 // a namespace, a GatewayClient, a Secret
	for n := 1; n <= writes+1; n++ {
		text := p.invitation()
		k := &killer{}
		k.left.Store(int64(n))
		cmd := exec.CommandContext(p.t.Context(), p.rome.isthmusctl, "peer", "--kubeconfig", k.between(p.rome), "accept", text, "--timeout", "4m")
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		kill := func() { _ = cmd.Process.Kill() }
		k.kill.Store(&kill)
		err := cmd.Run()
		if n > writes {
			assert.NilError(p.t, err, out.String())
		} else {
			assert.Assert(p.t, err != nil && k.left.Load() <= 0, "it was not killed: %s", out.String())
		}
		said := p.rome.run("peer", "accept", text, "--wait", "--timeout", "4m")
		assert.Check(p.t, is.Contains(said, "They are connected."), "killed after %d writes", n)
		p.invited()
		p.forgets()
	}
}

// leastInvitations has two users invite and accept, with the rights that the two roles
// name, and nothing else.
func (p *pair) leastInvitations() {
	defer p.handing()()
	user := p.as("operator")
	_, errs, err := user.milan.try("peer", "invite", "rome")
	assert.Check(p.t, err != nil)
	assert.Check(p.t, is.Contains(errs, "you may not create secrets in namespace liqo-tenant-rome"))
	for _, o := range []*operator{p.milan, p.rome} {
		o.kubectl("", "create", "clusterrolebinding", "invitations", "--clusterrole=isthmus-invitations", "--user=operator")
	}
	until(p.t, "the authorizers know of the role", func() bool {
		_, _, ours := user.milan.try("peer", "invite", "--list")
		_, _, theirs := user.rome.try("peer", "invite", "--list")
		return ours == nil && theirs == nil
	})
	user.invitation()
	assert.Check(p.t, is.Contains(user.milan.run("peer", "invite", "rome", "--revoke"), "is revoked"))
	// Who may not see everything in the namespace has left it.
	p.milan.kubectl("", "delete", "namespace", "liqo-tenant-rome", "--ignore-not-found")
	p.nothing()

	text := user.invitation()
	out := user.rome.run("peer", "accept", text, "--wait", "--timeout", "4m")
	assert.Check(p.t, is.Contains(out, "They are connected."))
	p.invited()
	user.rome.run("peer", "remove", "milan", "--wait")
	user.milan.run("peer", "remove", "rome", "--wait")
	for _, side := range []struct {
		of *operator
		ns string
	}{{p.rome, "liqo-tenant-milan"}, {p.milan, "liqo-tenant-rome"}} {
		side.of.kubectl("", "delete", "namespace", side.ns, "--ignore-not-found")
	}
	p.nothing()
}

// invitation returns the text of a new one.
func (p *pair) invitation(args ...string) string {
	var answer struct{ Text string }
	assert.NilError(p.t, json.Unmarshal([]byte(p.milan.run(append([]string{"peer", "invite", "rome", "--json"}, args...)...)), &answer))
	return answer.Text
}

// invited checks that both gateways know each other, and share a key. Each controller ends
// its part by itself: that one side is connected does not say that the other one has ended.
func (p *pair) invited() {
	until(p.t, "both controllers have ended the invitation", func() bool {
		return p.ended(p.milan, "liqo-tenant-rome", "rome") && p.ended(p.rome, "liqo-tenant-milan", "milan")
	})
	var shared [2][]byte
	for i, x := range []struct {
		of, at         *operator
		name, here, id string
	}{{p.milan, p.rome, "gw-rome", "liqo-tenant-rome", "milan"}, {p.rome, p.milan, "gw-milan", "liqo-tenant-milan", "rome"}} {
		var keys, invitation, handover corev1.Secret
		get := func(s *corev1.Secret, name string) {
			assert.NilError(p.t, x.of.client.Get(p.t.Context(), client.ObjectKey{Namespace: x.here, Name: name}, s))
		}
		get(&keys, x.name)
		shared[i] = keys.Data["presharedKey"]
		assert.Check(p.t, is.Len(shared[i], 32))
		get(&invitation, strings.TrimPrefix(x.name, "gw-")+"-invitation")
		assert.Check(p.t, !bytes.Contains(invitation.Data["invitation"], []byte(`"privateKey"`)), "the temporary key stays")
		get(&handover, x.name+"-handover")
		assert.Check(p.t, is.Len(handover.Data, 0))
		theirs := x.at.list(p.t.Context(), "PublicKey")
		assert.Assert(p.t, is.Len(theirs, 1))
		assert.Check(p.t, theirs[0].GetAnnotations()["networking.liqo.io/preshared-key"] != "")
	}
	assert.DeepEqual(p.t, shared[0], shared[1])
}

// ended reports whether the invitation is done, and nothing of it is left with the gateway.
func (p *pair) ended(of *operator, namespace, peer string) bool {
	var made, handover corev1.Secret
	for name, s := range map[string]*corev1.Secret{peer + "-invitation": &made, "gw-" + peer + "-handover": &handover} {
		assert.NilError(p.t, of.client.Get(p.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, s))
	}
	return bytes.Contains(made.Data["invitation"], []byte(`"done":true`)) && len(handover.Data) == 0
}

// approves says no to the gateway that has answered, and yes to the next one.
func (p *pair) approves() {
	for _, say := range []struct{ word, want, there string }{
		{"n", "rome was not let in", "has said no to the gateway with the fingerprint"},
		{"y", "The invitation was used by rome, whose gateway has the fingerprint", ""},
	} {
		text := make(chan string, 1)
		type answer struct {
			errs string
			err  error
		}
		accepted := make(chan answer, 1)
		ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Minute) // an accept that fails leaves it waiting for an hour
		defer cancel()
		go func() {
			_, errs, err := p.rome.try("peer", "accept", <-text, "--timeout", "4m")
			accepted <- answer{errs, err}
		}()
		cmd := exec.CommandContext(ctx, p.milan.isthmusctl, "--kubeconfig", p.milan.kubeconfig, "peer", "invite", "rome", "--approve")
		var errs bytes.Buffer
		cmd.Stdin, cmd.Stderr = strings.NewReader(say.word+"\n"), &errs
		out, err := cmd.StdoutPipe()
		assert.NilError(p.t, err)
		assert.NilError(p.t, cmd.Start())
		var lines strings.Builder
		buffer := make([]byte, 4096)
		for !strings.HasPrefix(lines.String(), "isthmus-invitation") || !strings.HasSuffix(lines.String(), "\n") {
			n, err := out.Read(buffer)
			lines.Write(buffer[:n])
			assert.NilError(p.t, err)
		}
		text <- lines.String()
		_ = cmd.Wait() // what it says tells
		assert.Check(p.t, is.Contains(errs.String(), "Connect? [y/N]"))
		assert.Check(p.t, is.Contains(errs.String(), say.want))
		a := <-accepted
		assert.Check(p.t, is.Contains(a.errs, say.there))
		assert.Check(p.t, (a.err != nil) == (say.there != ""), "peer accept: %v\n%s", a.err, a.errs)
		if say.there != "" {
			p.milan.run("peer", "invite", "rome", "--revoke")
			p.nothing()
		} else {
			p.invited()
			p.forgets()
		}
	}
}

// balance gives every Service of the type LoadBalancer an address, until ctx is done.
func (o *operator) balance(ctx context.Context) {
	every(ctx, 50*time.Millisecond, func() {
		var list corev1.ServiceList
		if o.client.List(ctx, &list) != nil {
			return
		}
		for _, s := range list.Items {
			if s.Spec.Type == corev1.ServiceTypeLoadBalancer && len(s.Status.LoadBalancer.Ingress) == 0 {
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.7"}}
				_ = o.client.Status().Update(ctx, &s) // or the next time
			}
		}
	})
}

// carry takes the answer from rome's gateway to milan's, and the reply back, until ctx is
// done.
func (p *pair) carry(ctx context.Context) {
	every(ctx, 50*time.Millisecond, func() {
		var server, dialler corev1.Secret
		if p.milan.client.Get(ctx, client.ObjectKey{Namespace: "liqo-tenant-rome", Name: "gw-rome-handover"}, &server) != nil ||
			p.rome.client.Get(ctx, client.ObjectKey{Namespace: "liqo-tenant-milan", Name: "gw-milan-handover"}, &dialler) != nil ||
			server.Data["offer"] == nil || dialler.Data["answer"] == nil {
			return
		}
		if !bytes.Equal(server.Data["answer"], dialler.Data["answer"]) {
			server.Data["answer"] = dialler.Data["answer"]
			delete(server.Data, "reply")
			_ = p.milan.client.Update(ctx, &server) // or the next time
			return
		}
		reply := server.Data["reply"]
		if reply == nil || bytes.Equal(reply, dialler.Data["reply"]) && !bytes.Contains(reply, []byte(`"accepted"`)) {
			return
		}
		if !bytes.Contains(reply, []byte(`"accepted"`)) {
			dialler.Data["reply"] = reply
			_ = p.rome.client.Update(ctx, &dialler) // or the next time
			return
		}
		// A controller may be writing, and what one side has makes it forget the handover: each
		// of the two is told until it knows.
		for _, side := range []struct {
			of     *operator
			secret *corev1.Secret
		}{{p.rome, &dialler}, {p.milan, &server}} {
			for ctx.Err() == nil && side.secret.Data != nil {
				side.secret.Data["reply"], side.secret.Data["delivered"] = reply, []byte("true")
				if side.of.client.Update(ctx, side.secret) == nil {
					break
				}
				if err := side.of.client.Get(ctx, client.ObjectKeyFromObject(side.secret), side.secret); apierrors.IsNotFound(err) {
					break // the peering is gone
				}
			}
		}
	})
}
