package daemon

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Kinds whose every object is reported on. Of other kinds only what is wrong
// is reported.
const (
	kindRoute    = "RouteConfiguration"
	kindFirewall = "FirewallConfiguration"
)

// objects are those that a host's state was computed from.
type objects struct {
	routes    []cluster.RouteConfiguration
	firewalls []cluster.FirewallConfiguration
	tunnels   []cluster.GeneveTunnel
}

// maxMessage bounds the text in a status.
const maxMessage = 1024

// blame says which objects are not in force because of what could not be
// applied, and why. Changes that nobody's object asked for blame nobody.
func blame(o objects, remaining netstate.Changes, err error) map[cluster.Ref]string {
	out := map[cluster.Ref]string{}
	if err == nil || remaining.Empty() {
		return out
	}
	failures := leaves(err)
	because := func(ref cluster.Ref, hints ...string) {
		if _, done := out[ref]; !done {
			out[ref] = reason(failures, hints...)
		}
	}
	routes := slices.Concat(remaining.AddRoutes, remaining.ReplaceRoutes)
	links := slices.Concat(remaining.AddLinks, remaining.ChangeLinks, remaining.RecreateLinks)
	for _, rc := range o.routes {
		for _, rule := range rc.Rules {
			for _, r := range remaining.AddRules {
				if ruleOf(rule, r) {
					because(rc.Ref, r.String())
				}
			}
			for _, tr := range rule.Routes {
				for _, r := range routes {
					if routeOf(tr, r) {
						because(rc.Ref, r.String(), r.Dst.String())
					}
				}
				for _, l := range links {
					if tr.Dev == l.Name {
						because(rc.Ref, l.Name)
					}
				}
			}
		}
	}
	for _, fc := range o.firewalls {
		for _, t := range remaining.SetTables {
			if t.ID() == desired.TableOf(fc) {
				because(fc.Ref, "table "+t.ID().String()+":", t.Name)
			}
		}
	}
	for _, t := range o.tunnels {
		for _, l := range links {
			if l.Kind == netstate.KindGeneve && l.Geneve.VNI == t.VNI {
				because(t.Ref, l.Name)
			}
		}
	}
	return out
}

// ruleOf reports whether the kernel's rule r may have come from the rule of an
// object. One without destination may stand for several that have one each, and
// one for all that comes by nodes' links for several that have a link each.
func ruleOf(rule cluster.RouteRule, r netstate.Rule) bool {
	return (!r.Dst.IsValid() || maskedEqual(rule.Dst, r.Dst)) && maskedEqual(rule.Src, r.Src) &&
		(rule.IIF == r.IIF || r.Not && !r.Unreachable && strings.HasPrefix(rule.IIF, desired.NodeLinkPrefix)) && rule.OIF == r.OIF && rule.Mark == r.Mark
}

// routeOf is ruleOf for routes. The table is left out: rules of several
// objects may share one.
func routeOf(tr cluster.TableRoute, r netstate.Route) bool {
	return maskedEqual(tr.Dst, r.Dst) && tr.Via == r.Via && (tr.Dev == "" || tr.Dev == r.Dev)
}

// leaves returns the single failures of a joined error. What one failure wraps
// besides its cause, such as that something is not supported, is part of it.
func leaves(err error) []string {
	for e := err; e != nil; e = errors.Unwrap(e) {
		if all, ok := joined(e); ok {
			var out []string
			for _, each := range all {
				out = append(out, leaves(each)...)
			}
			return out
		}
	}
	return []string{err.Error()}
}

// joined returns the failures that errors.Join has put together, which it
// shows a line each.
func joined(err error) ([]error, bool) {
	u, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil, false
	}
	var text []string
	for _, each := range u.Unwrap() {
		text = append(text, each.Error())
	}
	return u.Unwrap(), err.Error() == strings.Join(text, "\n")
}

// reason returns the first failure that has one of the hints in it, or all.
func reason(failures []string, hints ...string) string {
	for _, hint := range hints {
		for _, f := range failures {
			if strings.Contains(f, hint) {
				return shorten(f)
			}
		}
	}
	return shorten(strings.Join(failures, "; "))
}

func shorten(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxMessage], "") + " …"
}

// applied turns the results of desired, and what then could not be applied,
// into the report on each object. Since stays what it was as long as OK does.
func applied(results []cluster.Applied, failed map[cluster.Ref]string, was []cluster.Applied, now time.Time) []cluster.Applied {
	type id struct{ kind, namespace, name string }
	of := func(r cluster.Ref) id { return id{r.Kind, r.Namespace, r.Name} }
	before := make(map[id]cluster.Applied, len(was))
	for _, a := range was {
		before[of(a.Object)] = a
	}
	var out []cluster.Applied
	for _, a := range results {
		if msg, bad := failed[a.Object]; bad && a.OK {
			a.OK, a.Message = false, msg
		}
		if a.OK && a.Object.Kind != kindRoute && a.Object.Kind != kindFirewall && a.Message == "" {
			continue
		}
		a.Since = now
		if b, ok := before[of(a.Object)]; ok && b.OK == a.OK && !b.Since.IsZero() {
			a.Since = b.Since
		}
		a.Message = shorten(a.Message)
		out = append(out, a)
	}
	slices.SortFunc(out, func(a, b cluster.Applied) int {
		return cmp.Or(strings.Compare(a.Object.Kind, b.Object.Kind),
			strings.Compare(a.Object.Namespace, b.Object.Namespace),
			strings.Compare(a.Object.Name, b.Object.Name))
	})
	return out
}

// equalApplied compares reports.
func equalApplied(a, b []cluster.Applied) bool {
	return slices.EqualFunc(a, b, func(a, b cluster.Applied) bool {
		return a.Object == b.Object && a.ObservedGeneration == b.ObservedGeneration &&
			a.OK == b.OK && a.Message == b.Message && a.Since.Equal(b.Since)
	})
}
