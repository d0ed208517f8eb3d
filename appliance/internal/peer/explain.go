package peer

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// explain says what to look at when an action takes too long, a line each: where the client
// dials, the Service that it should meet there, the pods of both gateways. What can't be
// read is left out.
func explain(ctx context.Context, b *Both, action Action) []string {
	var out []string
	for i := range b {
		f, other := &b[i], &b[1-i]
		for _, g := range f.Clients {
			at := fmt.Sprintf("the gateway of %s dials %s", f.ID, place(g.Spec.Endpoint.Addresses, first(g.Spec.Endpoint.Port, g.Spec.Endpoint.Ports)))
			if len(other.Servers) > 0 {
				if e := other.Servers[0].Status.Endpoint; e != nil {
					at += fmt.Sprintf("; the gateway of %s is at %s: UDP has to reach it there", other.ID, place(e.Addresses, first(e.Port, e.Ports)))
				}
			}
			out = append(out, at)
		}
		for _, g := range f.Servers {
			var s corev1.Service
			name := plan.GatewayName(g.Name)
			if err := f.Cluster.Client.Get(ctx, client.ObjectKey{Namespace: g.Namespace, Name: name}, &s); err == nil {
				out = append(out, fmt.Sprintf("Service %s/%s in %s: %s", g.Namespace, name, f.ID, exposure(&s, again(b, action))))
			} else if client.IgnoreNotFound(err) == nil {
				out = append(out, fmt.Sprintf("Service %s/%s in %s does not exist: does the controller run? %s get pods -n %s", g.Namespace, name, f.ID, f.Cluster.Kubectl, f.Cluster.System))
			}
		}
		if line := pods(ctx, f); line != "" {
			out = append(out, line)
		}
	}
	for i := range b {
		if f := &b[i]; len(f.Servers)+len(f.Clients) > 0 {
			out = append(out, fmt.Sprintf("see %s get connections,services,pods -n %s -o wide", f.Cluster.Kubectl, f.Namespace.Name))
		}
	}
	return out
}

// otherWay says what to do where the side that is to be dialled can't be.
func otherWay(b *Both, action Action) []string {
	f, id := &b[Local], b[Remote].ID
	switch {
	case action == Invite:
		return []string{fmt.Sprintf("if %s can't be reached from outside, let the other side invite: there, isthmusctl peer invite %s", f.ID, f.ID)}
	case action == Accept && f.Reply == nil:
		return []string{fmt.Sprintf("if %s can't be reached from outside, let this side invite: %s peer remove %s, then %s peer invite %s, whose text the administrator of %s accepts",
			id, f.Cluster.Isthmusctl, id, f.Cluster.Isthmusctl, id, id)}
	}
	return nil
}

// again is the command that makes the server's Service another one; empty: none of this action.
func again(b *Both, action Action) string {
	switch action {
	case Invite:
		return fmt.Sprintf("%s peer invite %s", b[Local].Cluster.Isthmusctl, b[Remote].ID)
	case Connect:
		return b[Local].Cluster.Isthmusctl + " network connect"
	}
	return ""
}

// exposure says how a Service is reached. again is the command that makes it another one, if
// there is one.
func exposure(s *corev1.Service, again string) string {
	out := string(s.Spec.Type)
	for _, p := range s.Spec.Ports {
		out += fmt.Sprintf(", port %d", p.Port)
		if p.NodePort != 0 {
			out += fmt.Sprintf(", node port %d", p.NodePort)
		}
	}
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return out
	}
	var at []string
	for _, in := range s.Status.LoadBalancer.Ingress {
		at = append(at, in.IP+in.Hostname)
	}
	if len(at) == 0 {
		out += ", and no load balancer has given it an address"
		if again != "" {
			out += ": if the cluster has none, run " + again + " once more, with --" + FlagServiceType + " NodePort"
		}
		return out
	}
	return out + ", at " + strings.Join(at, ", ")
}

// pods says which pods of a side's gateway do not run.
func pods(ctx context.Context, f *Facts) string {
	if len(f.Servers)+len(f.Clients) == 0 {
		return ""
	}
	var list corev1.PodList
	if err := f.Cluster.Client.List(ctx, &list, client.InNamespace(f.Namespace.Name), client.MatchingLabels{v1beta1.LabelComponent: v1beta1.ComponentGateway}); err != nil {
		return ""
	}
	if len(list.Items) == 0 {
		return fmt.Sprintf("the gateway of %s has no pod in namespace %s: does the controller run? %s get pods -n %s", f.ID, f.Namespace.Name, f.Cluster.Kubectl, f.Cluster.System)
	}
	var out []string
	for _, p := range list.Items {
		state := "is ready"
		if why := kube.PodTrouble(p); why != "" {
			state = "is not ready: " + why
		}
		out = append(out, fmt.Sprintf("pod %s in %s %s", p.Name, f.ID, state))
	}
	return strings.Join(out, "; ")
}
