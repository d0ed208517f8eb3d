package peer

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/access"
)

// rights are what it takes to do the rest of an action on a side. What has been
// read already is not among them.
func rights(b *Both, on Side, action Action, o *Options) []access.Right {
	f := &b[on]
	var out []access.Right
	add := func(verb, group, resource, namespace string) {
		out = append(out, access.Right{Verb: verb, Group: group, Resource: resource, Namespace: namespace})
	}
	ns, group := f.Namespace.Name, v1beta1.GroupVersion.Group
	exists := f.Namespace.UID != ""
	gateway := "gatewayclients"
	if on == serverSide(b) {
		gateway = "gatewayservers"
	}
	switch action {
	case Init, Connect:
		if !exists {
			add("create", "", "namespaces", "")
		}
		kinds := []string{"configurations"}
		if action == Connect {
			kinds = append(kinds, gateway)
			if !o.KeepKeys {
				kinds = append(kinds, "publickeies")
				add("get", "", "secrets", ns)
			}
			add("list", group, "connections", ns)
		}
		for _, k := range kinds {
			add("create", group, k, ns)
			add("list", group, k, ns)
			if o.Atomic {
				add("delete", group, k, ns)
			}
		}
		if o.Atomic && !exists {
			add("delete", "", "namespaces", "")
		}
		for _, k := range updated(b, on, action, o) {
			add("patch", group, k, ns)
		}
	case Invite, Accept:
		gateway := "gatewayclients"
		if action == Invite {
			gateway = "gatewayservers"
		}
		kinds := [][2]string{{group, gateway}, {"", "secrets"}}
		if !exists {
			kinds = append(kinds, [2]string{"", "namespaces"})
		}
		for _, k := range kinds {
			in := ns
			if k[1] == "namespaces" {
				in = ""
			}
			add("create", k[0], k[1], in)
			if o.Atomic {
				add("delete", k[0], k[1], in)
			}
		}
		add("get", "", "secrets", ns)
		if o.Invitation.Approve {
			add("update", "", "secrets", ns) // the yes or no is written into the invitation
		}
	case Disconnect, Reset, Remove, Revoke:
		if action == Revoke {
			add("delete", "", "secrets", ns)
		}
		if len(f.Servers) > 0 {
			add("delete", group, "gatewayservers", ns)
		}
		if len(f.Clients) > 0 {
			add("delete", group, "gatewayclients", ns)
		}
		if len(f.Keys) > 0 {
			add("delete", group, "publickeies", ns)
		}
		if action != Disconnect && len(f.Configurations) > 0 {
			add("delete", group, "configurations", ns)
		}
		if action != Disconnect && exists {
			add("delete", "", "namespaces", "")
		}
	}
	return out
}

// updated are the resources of which a connect changes an object that is there, since a flag
// asks for it or the other side is not what it was.
func updated(b *Both, on Side, action Action, o *Options) []string {
	var s Step // what it waits for, and what is wrong, is told elsewhere
	changes := configure(b, o, &s)
	if server := serverSide(b); action == Connect {
		changes = append(changes, adoptGateways(b, server, o, &s)...)
		changes = append(changes, exchanged(b, server, o, &s)...)
	}
	var out []string
	for _, c := range changes {
		if c.On != on || c.Deed != Update {
			continue
		}
		_, kind := kindOf(c.Object)
		if r := resourceOf(kind); !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	return out
}

// exchanged are the changes to objects that are there of all that the sides have to learn of each
// other, whatever has to be waited for in between.
func exchanged(b *Both, server Side, o *Options, s *Step) []Change {
	on := server.other()
	if len(b[server].Servers) != 1 || len(b[on].Clients) != 1 {
		return nil
	}
	g, c := &b[server].Servers[0], &b[on].Clients[0]
	var out []Change
	if endpoint := dialled(g.Status.Endpoint, o); endpoint != nil {
		out = redial(b, on, c, endpoint, o, s)
	}
	if !o.KeepKeys {
		var keys Step
		giveKey(b, server, g, o, &keys)
		giveKey(b, on, c, o, &keys)
		out = append(out, keys.Changes...)
	}
	return out
}

// resourceOf is what the API calls the objects of a kind.
func resourceOf(kind string) string {
	if kind == "PublicKey" {
		return plural(kind)
	}
	return strings.ToLower(kind) + "s"
}

// checkRights returns a RefusedError that names what the users of the two
// clusters may not do, before anything is done.
func (r *run) checkRights(ctx context.Context) error {
	var lacking [2][]access.Right
	g, gctx := errgroup.WithContext(ctx)
	for i, c := range r.Clusters {
		if Side(i) == Remote && r.Action.alone() {
			continue
		}
		g.Go(func() (err error) {
			if lacking[i], err = access.Missing(gctx, c.Client, rights(&r.both, Side(i), r.Action, &r.Options)); err != nil {
				return &ReadError{c, err}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	var out []Problem
	for i, list := range lacking {
		for _, right := range list {
			out = append(out, Problem{Check: "permission", Object: r.ids[i].ID, Message: "you may not " + right.String(),
				Fix: fmt.Sprintf("ask an administrator of that cluster for this right, or use a kubeconfig that has it; %s auth whoami says who you are", r.Clusters[i].Kubectl)})
		}
	}
	if len(out) > 0 {
		return &RefusedError{Problems: out, Changed: len(r.journal) > 0}
	}
	return nil
}
