package plan

import (
	"cmp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// hostReports collects, for every RouteConfiguration and
// FirewallConfiguration, what hosts report about its current generation.
func (p *planner) hostReports() {
	generation := map[objectKey]int64{}
	for _, o := range p.s.Routes {
		generation[objectKey{"RouteConfiguration", o.Namespace, o.Name}] = o.Generation
	}
	for _, o := range p.s.Firewalls {
		generation[objectKey{"FirewallConfiguration", o.Namespace, o.Name}] = o.Generation
	}
	reports := make(map[objectKey][]v1beta1.HostCondition, len(generation))
	collect := func(host string, applied []cluster.Applied) {
		for _, a := range applied {
			key := objectKey{a.Object.Kind, a.Object.Namespace, a.Object.Name}
			if current, exists := generation[key]; !exists || a.ObservedGeneration != current {
				continue
			}
			c := v1beta1.HostCondition{Host: host, Type: v1beta1.HostApplied, Status: metav1.ConditionTrue, LastTransitionTime: metav1.NewTime(a.Since)}
			if !a.OK {
				c.Type = v1beta1.HostError
			}
			reports[key] = append(reports[key], c)
		}
	}
	for _, n := range p.s.InternalNodes {
		if !n.Deleting {
			collect(n.Name, n.Applied)
		}
	}
	for _, r := range p.s.Reports {
		collect(strings.TrimPrefix(r.Name, v1beta1.GatewayNamePrefix), r.Applied)
	}
	conditions := func(kind string, m cluster.Meta) []v1beta1.HostCondition {
		list := reports[objectKey{kind, m.Namespace, m.Name}]
		slices.SortStableFunc(list, func(a, b v1beta1.HostCondition) int {
			return cmp.Or(strings.Compare(a.Host, b.Host), a.LastTransitionTime.Compare(b.LastTransitionTime.Time))
		})
		return list
	}
	planned := map[objectKey]bool{}
	for _, o := range p.out.Objects {
		switch o.(type) {
		case *v1beta1.RouteConfiguration, *v1beta1.FirewallConfiguration:
			planned[objectKey{o.GetObjectKind().GroupVersionKind().Kind, o.GetNamespace(), o.GetName()}] = true
		}
	}
	// An object that is not planned any more is about to go.
	goes := func(kind string, m cluster.Meta) bool {
		return m.Labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy && !planned[objectKey{kind, m.Namespace, m.Name}]
	}
	for _, r := range p.s.Routes {
		if goes("RouteConfiguration", r.Meta) {
			continue
		}
		o := &v1beta1.RouteConfiguration{TypeMeta: typeMeta("RouteConfiguration"), ObjectMeta: existing(r.Meta)}
		o.Status.Conditions = conditions("RouteConfiguration", r.Meta)
		p.out.Statuses = append(p.out.Statuses, o)
	}
	for _, f := range p.s.Firewalls {
		if goes("FirewallConfiguration", f.Meta) {
			continue
		}
		o := &v1beta1.FirewallConfiguration{TypeMeta: typeMeta("FirewallConfiguration"), ObjectMeta: existing(f.Meta)}
		o.Status.Conditions = conditions("FirewallConfiguration", f.Meta)
		p.out.Statuses = append(p.out.Statuses, o)
	}
}

// A failure is what some hosts say of an object that they could not apply.
type failure struct {
	object  objectKey
	message string
}

// hostEvents tells of what hosts report: objects that are not in force there,
// and what is wrong with the hosts themselves. It is told once, however many
// hosts say it; the status says which.
func (p *planner) hostEvents() {
	about := p.reportable()
	hosts := map[failure][]string{}
	collect := func(host string, applied []cluster.Applied) {
		for _, a := range applied {
			key := objectKey{a.Object.Kind, a.Object.Namespace, a.Object.Name}
			if m, exists := about[key]; exists && !a.OK && a.ObservedGeneration == m.Generation && p.sound(m) && len(p.invalid[key]) == 0 {
				f := failure{key, a.Message}
				hosts[f] = append(hosts[f], host)
			}
		}
	}
	report := func(m cluster.Meta, host string, applied []cluster.Applied, conditions []cluster.Condition) {
		if _, exists := about[keyOf(m.Ref)]; !exists {
			return
		}
		collect(host, applied)
		for _, c := range conditions {
			if !c.OK && c.Type != ConditionAccepted {
				p.hostEvent(m.Ref, c.Reason, c.Type+" is False: "+c.Message)
			}
		}
	}
	for _, n := range p.s.InternalNodes {
		report(n.Meta, "node "+n.Name, n.Applied, n.Conditions)
	}
	for _, r := range p.s.Reports {
		report(r.Meta, "gateway "+strings.TrimPrefix(r.Name, v1beta1.GatewayNamePrefix), r.Applied, r.Conditions)
	}
	for f, list := range hosts {
		p.hostEvent(about[f.object].Ref, ReasonNotApplied, "not in force on "+several(list)+": "+f.message)
	}
}

// reportable returns the objects that hosts report on, and those that they
// report in, except for what is about to go.
func (p *planner) reportable() map[objectKey]cluster.Meta {
	planned := map[objectKey]bool{}
	for _, o := range p.out.Objects {
		planned[objectKey{o.GetObjectKind().GroupVersionKind().Kind, o.GetNamespace(), o.GetName()}] = true
	}
	out := map[objectKey]cluster.Meta{}
	add := func(m cluster.Meta) {
		if !m.Deleting && (planned[keyOf(m.Ref)] || m.Labels[v1beta1.LabelManagedBy] != v1beta1.ManagedBy) {
			out[keyOf(m.Ref)] = m
		}
	}
	for _, o := range p.s.Routes {
		add(o.Meta)
	}
	for _, o := range p.s.Firewalls {
		add(o.Meta)
	}
	for _, o := range p.s.Fabrics {
		add(o.Meta)
	}
	for _, o := range p.s.Tunnels {
		add(o.Meta)
	}
	for _, o := range p.s.Configurations {
		add(o.Meta)
	}
	for _, o := range p.s.PublicKeys {
		add(o.Meta)
	}
	for _, o := range p.s.InternalNodes {
		add(o.Meta)
	}
	for _, o := range p.s.Reports {
		add(o.Meta)
	}
	return out
}

// several names a host, or says what kind of hosts they are: a message with a
// list in it would be another one with every host that joins in.
func several(hosts []string) string {
	if len(hosts) == 1 {
		return hosts[0]
	}
	kind, _, _ := strings.Cut(hosts[0], " ")
	for _, h := range hosts {
		if !strings.HasPrefix(h, kind+" ") {
			return "several hosts"
		}
	}
	return "several " + kind + "s"
}

func (p *planner) hostEvent(o cluster.Ref, reason, message string) {
	p.event(o, Warning, reason, message)
	p.out.Events[len(p.out.Events)-1].Reported = true
}
