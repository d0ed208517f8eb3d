package plan

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// ConditionAccepted says whether an object is used as it is written. A
// Configuration has NetworkCIDRsConfigured instead.
const ConditionAccepted = "Accepted"

// Reasons of conditions and events.
const (
	ReasonAccepted       = "Accepted"
	ReasonConfigured     = "NetworkCIDRsConfigured"
	ReasonWaiting        = "WaitingForNetworks"
	ReasonInvalidField   = "InvalidField"
	ReasonMasked         = "HostBitsMasked"
	ReasonNoRemoteID     = "MissingRemoteClusterID"
	ReasonBadRemoteID    = "InvalidRemoteClusterID"
	ReasonIDMismatch     = "RemoteClusterIDMismatch"
	ReasonRemoteIsLocal  = "RemoteIsLocal"
	ReasonDuplicate      = "Duplicate"
	ReasonNoCIDRs        = "NoRemoteCIDRs"
	ReasonSelfOverlap    = "SelfOverlapping"
	ReasonFamily         = "AddressFamily"
	ReasonPoolsExhausted = "PoolsExhausted"
	ReasonOverlaps       = "Overlaps"
	ReasonMoved          = "Remapped"
	ReasonNoTemplate     = "TemplateMissing"
	ReasonBadTemplate    = "TemplateInvalid"
	ReasonNoSecret       = "SecretMissing"
	ReasonBadSecret      = "SecretInvalid"
	ReasonNoEndpoint     = "EndpointMissing"
	ReasonBadKey         = "InvalidKey"
	ReasonNameTaken      = "NameTaken"
	ReasonNamespace      = "NamespaceMismatch"
	ReasonPodSecurity    = "PodSecurity"
	ReasonNoNetwork      = "NetworkMissing"
	ReasonNetworkFull    = "NetworkFull"
	ReasonNetworkChanged = "NetworkChanged"
	ReasonBadAddress     = "AddressUnusable"
	ReasonNameShortened  = "NameShortened"
	ReasonNotApplied     = "NotApplied"
	ReasonContradicts    = "Contradicts"
	ReasonNotUsed        = "NotUsed"
	ReasonUndisturbed    = "HostsUndisturbed"
	ReasonTakesOver      = "TakesOverHosts"
	ReasonFollowed       = "NetworkFollowed"
	ReasonNotFollowed    = "NetworkNotFollowed"
	ReasonWithdrawn      = "NetworkWithdrawn"
	ReasonNotTold        = "NetworksNotTold"
	ReasonPlanFailed     = "PlanFailed"
	ReasonNotWritten     = "NotWritten"

	ReasonOverlayUnsupported = "OverlayUnsupported"
	ReasonNeedsVXLAN         = "NeedsVXLAN"
	ReasonDuplicateVTEP      = "DuplicateVTEP"
	ReasonInvalidVTEP        = "InvalidVTEP"
	ReasonNoVTEP             = "WaitingForVTEP"
)

// A verdict is what the plan thinks of an object of the user.
type verdict struct {
	object   cluster.Ref
	reason   string // of the first refusal; empty: accepted
	messages []string
	quiet    bool     // refused, but only for the time being: no event
	remarks  []remark // of an object that is accepted all the same
}

type remark struct{ kind, reason, message string }

// verdict returns what is thought of m so far.
func (p *planner) verdict(m cluster.Meta) *verdict {
	v := p.verdicts[keyOf(m.Ref)]
	if v == nil {
		v = &verdict{object: m.Ref}
		p.verdicts[keyOf(m.Ref)] = v
	}
	return v
}

// refuse says that m can't be used. The message says what to do.
func (p *planner) refuse(m cluster.Meta, reason, format string, args ...any) {
	v := p.verdict(m)
	if v.reason == "" || v.quiet {
		v.reason, v.quiet = reason, false
	}
	v.messages = append(v.messages, fmt.Sprintf(format, args...))
}

// wait says that m can't be used yet.
func (p *planner) wait(m cluster.Meta, reason, format string, args ...any) {
	v := p.verdict(m)
	if v.reason == "" {
		v.reason, v.quiet = reason, true
	}
	v.messages = append(v.messages, fmt.Sprintf(format, args...))
}

// remark says something about m, which is used.
func (p *planner) remark(m cluster.Meta, kind, reason, format string, args ...any) {
	v := p.verdict(m)
	v.remarks = append(v.remarks, remark{kind, reason, fmt.Sprintf(format, args...)})
}

// sound reports whether nothing has been said against m.
func (p *planner) sound(m cluster.Meta) bool {
	v := p.verdicts[keyOf(m.Ref)]
	return v == nil || v.reason == ""
}

// condition returns the condition of m. Its time is set by who writes it.
func (p *planner) condition(m cluster.Meta, kind, reason, message string) metav1.Condition {
	c := metav1.Condition{
		Type: kind, Status: metav1.ConditionTrue, ObservedGeneration: m.Generation,
		Reason: reason, Message: message,
	}
	v := p.verdicts[keyOf(m.Ref)]
	if v == nil {
		return c
	}
	if v.reason != "" {
		c.Status, c.Reason = metav1.ConditionFalse, v.reason
		c.Message = clip(strings.Join(v.messages, "; "))
		return c
	}
	for _, r := range v.remarks {
		c.Message = strings.TrimPrefix(c.Message+"; "+r.message, "; ")
	}
	c.Message = clip(c.Message)
	return c
}

// clip cuts a message to what a condition and an event can hold.
func clip(s string) string {
	const limit = 1024 // of an event's message; a condition's may be longer
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit-3], "") + "..."
}

func (p *planner) accepted(m cluster.Meta) []metav1.Condition {
	return []metav1.Condition{p.condition(m, ConditionAccepted, ReasonAccepted, "in use as written")}
}

// readProblems sorts what did not parse by object.
func (p *planner) readProblems() {
	for _, e := range p.s.Invalid {
		p.invalid[keyOf(e.Object)] = append(p.invalid[keyOf(e.Object)], e)
	}
	for _, e := range p.s.Notes {
		p.notes[keyOf(e.Object)] = append(p.notes[keyOf(e.Object)], e)
	}
}

// fieldErrors returns what did not parse of what the user wrote into m. A
// status is written anew.
func (p *planner) fieldErrors(m cluster.Meta) []cluster.InvalidError {
	var out []cluster.InvalidError
	for _, e := range p.invalid[keyOf(m.Ref)] {
		if !strings.HasPrefix(e.Field, "status.") {
			out = append(out, e)
		}
	}
	return out
}

// checkFields refuses m if a field of it did not parse.
func (p *planner) checkFields(m cluster.Meta) {
	for _, e := range p.fieldErrors(m) {
		p.refuse(m, ReasonInvalidField, "%s", e.Message())
	}
	for _, e := range p.notes[keyOf(m.Ref)] {
		p.remark(m, Normal, ReasonMasked, "%s", e.Message())
	}
}

// writeEvents tells what is wrong: for every refused object, and for fields
// that did not parse in objects that nobody asked about.
func (p *planner) writeEvents() {
	for _, v := range p.verdicts {
		if v.reason != "" && !v.quiet {
			p.event(v.object, Warning, v.reason, strings.Join(v.messages, "; "))
		}
		if v.reason == "" {
			for _, r := range v.remarks {
				p.event(v.object, r.kind, r.reason, r.message)
			}
		}
	}
	for key, list := range p.invalid {
		if p.verdicts[key] != nil {
			continue
		}
		var messages []string
		for _, e := range list {
			messages = append(messages, e.Message())
		}
		p.event(list[0].Object, Warning, ReasonInvalidField, strings.Join(messages, "; "))
	}
}

func (p *planner) event(o cluster.Ref, kind, reason, message string) {
	p.out.Events = append(p.out.Events, Event{Object: o, Type: kind, Reason: reason, Message: clip(message)})
}
