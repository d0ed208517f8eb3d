package peer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

// Config is what Run needs.
type Config struct {
	Clusters [2]Cluster
	// Peer is the ID of the peer of Clusters[Local], for actions in one cluster alone.
	Peer    string
	Action  Action
	Options Options
	// Say is told what was done, and Waiting what is waited for now.
	Say, Waiting func(text string)
	// Kinds returns the kinds of objects in namespaces that a side serves; only
	// Reset and Atomic ask.
	Kinds func(Side) ([]schema.GroupVersionKind, error)
}

// A Done is an object of the result, and what was done to it.
type Done struct {
	Ref
	Deed Deed `json:"action"`
}

// unchanged is the deed of an object that was as it should be.
const unchanged Deed = "unchanged"

// A Result is what a run did.
type Result struct {
	Action   Action       `json:"action"`
	Clusters [2]EndOfPair `json:"clusters"`
	Objects  []Done       `json:"objects"`
	Notes    []string     `json:"notes,omitempty"`
	// Changed is how many objects were made, updated or deleted.
	Changed int `json:"changed"`
	// Connected: both gateways have heard from each other.
	Connected  bool `json:"connected"`
	RolledBack bool `json:"rolledBack,omitempty"`
	// Invited is what the text of an invitation needs, and Fingerprint that of the other
	// side's gateway, once it is known.
	Invited     *Invited `json:"-"`
	Fingerprint string   `json:"fingerprint,omitempty"`
	Seconds     float64  `json:"seconds"`
}

// EndOfPair is one of the two clusters in a result.
type EndOfPair struct {
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	Role      string `json:"role,omitempty"` // server or client
}

const (
	// pollTime is the time between two looks at both clusters.
	pollTime = 200 * time.Millisecond
	// refusalTime is how long a controller's refusal has to stand: it may be about
	// what was there a moment ago.
	refusalTime = 3 * time.Second
	// rollbackTime is how long taking back may take.
	rollbackTime = time.Minute
)

// run is one in progress.
type run struct {
	Config
	both    Both
	journal []entry
	result  Result
	started time.Time
	ids     [2]Identity
	clock   *clock
}

// An entry of the journal is a change that was made.
type entry struct {
	Change
	before client.Object // of an update
}

// Run does what the action says. It returns what was done also with an error:
// a RefusedError, TimeoutError, ReadError, NotInstalledError, or a write that
// failed.
func Run(ctx context.Context, cfg Config) (Result, error) {
	r := &run{Config: cfg, started: time.Now()}
	r.result.Action = cfg.Action
	if cfg.Action == Invite || cfg.Action == Accept {
		cfg.Options.Invitation.Follow = cfg.Options.Follow[Local].Annotations()
		var err error
		if r.Options.sealed, err = cfg.Options.Invitation.Fields(); err != nil {
			return r.result, err
		}
	}
	limited, cancel, clock := limit(ctx, cfg.Options.Timeout, cfg.Options.ApprovalTimeout)
	defer cancel()
	r.clock = clock
	err := r.identify(limited)
	switch {
	case err == nil:
		err = r.converge(limited)
	case ctx.Err() == nil && limited.Err() != nil:
		err = fmt.Errorf("no answer within %v: %w", cfg.Options.Timeout, err)
	}
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = fmt.Errorf("interrupted%s", r.resume()) // in the middle of a request
	}
	r.summarize()
	if err != nil && r.Options.Atomic && len(r.journal) > 0 {
		// Not in the time of ctx: that is over, or somebody has pressed Ctrl-C.
		back, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
		defer cancel()
		if r.agreed(back) {
			// Not taken back on one side: the invitation is used up on the other.
			err = fmt.Errorf("%w\nthe other side has accepted, so nothing was taken back: run the same command again", err)
		} else if failed := r.rollBack(back); failed != nil {
			err = fmt.Errorf("%w\ntaking it back failed: %w", err, failed)
		} else {
			r.result.RolledBack = true
			if refused := (*RefusedError)(nil); errors.As(err, &refused) {
				refused.TakenBack = true
			} else {
				err = fmt.Errorf("%w\nwhat this run had made was taken back%s", err, r.flagAtomic())
			}
		}
	}
	r.result.Seconds = time.Since(r.started).Seconds()
	return r.result, err
}

// agreed reports whether the other side has accepted the answer to its invitation.
func (r *run) agreed(ctx context.Context) bool {
	if r.Action != Accept {
		return false
	}
	_ = r.look(ctx) // it may have since; where it can't be read, what was read last counts
	return r.both[Local].accepted()
}

// accepted reports whether the side that invited has taken this side's answer, as far as
// this side knows: it has said so, or all of the invitation is over.
func (f *Facts) accepted() bool {
	return f.Record.Done || f.Reply != nil && f.Reply.Verdict == invitation.Accepted
}

// identify finds out which clusters they are. What is wrong on both sides is said of
// both.
func (r *run) identify(ctx context.Context) error {
	if r.Action.alone() {
		r.ids[Remote].ID = r.Peer
		var err error
		r.ids[Local], err = Identify(ctx, r.Clusters[Local], Template{})
		return err
	}
	var wg sync.WaitGroup
	var failed [2]error
	for i, c := range r.Clusters {
		wg.Go(func() { r.ids[i], failed[i] = Identify(ctx, c, Template{}) })
	}
	wg.Wait()
	return errors.Join(failed[:]...)
}

// look reads both sides.
func (r *run) look(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	var both Both
	for i, c := range r.Clusters {
		if Side(i) == Remote && r.Action.alone() {
			both[i] = Facts{Identity: r.ids[i], Cluster: Cluster{Name: "cluster " + r.Peer}}
			continue
		}
		g.Go(func() (err error) {
			peer := r.ids[1-i].ID
			if both[i], err = Look(gctx, c, r.ids[i], peer); err != nil {
				return err
			}
			switch r.Action {
			case Disconnect, Reset, Remove:
				return both[i].lookMade(gctx, peer)
			case Revoke:
				return errors.Join(both[i].lookMade(gctx, peer), both[i].lookInvitation(gctx, peer))
			case Connect:
				// Who may not read Secrets loses one check.
				if err := both[i].lookInvitation(gctx, peer); !apierrors.IsForbidden(err) {
					return err
				}
			case Invite, Accept:
				return both[i].lookInvitation(gctx, peer)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	r.both = both
	if r.Action != Connect && r.Action != Init && r.Action != Invite && r.Action != Accept {
		return nil
	}
	// Networks may come late, and which template matters depends on the roles.
	server := serverSide(&r.both)
	if r.Action == Invite {
		server = Local
	}
	g, gctx = errgroup.WithContext(ctx)
	for i := range r.both {
		if Side(i) == Remote && r.Action.alone() {
			continue
		}
		t := r.Options.Client
		if Side(i) == server {
			t = r.Options.Server
		}
		f := &r.both[i]
		if t = t.of(&f.Cluster); r.Action == Init || r.Options.SkipValidation {
			t = Template{}
		}
		if f.Pending == "" && (t.Kind == "" || f.Template != nil && f.Template.GetName() == t.Name && f.Template.GetNamespace() == t.Namespace && f.Template.GetKind() == t.Kind) {
			continue
		}
		g.Go(func() (err error) {
			if f.Identity, err = Identify(gctx, f.Cluster, t); err == nil {
				r.ids[i] = f.Identity
			}
			return err
		})
	}
	return g.Wait()
}

// plan returns what is next.
func (r *run) plan() Step {
	r.Options.began = len(r.journal) > 0
	switch r.Action {
	case Disconnect, Reset:
		return remove(&r.both, r.Action, &r.Options)
	case Remove:
		var s Step
		if checkAlone(&r.both, &s); s.busy() {
			return s
		}
		return remove(&r.both, Reset, &r.Options)
	case Invite:
		return invite(&r.both, &r.Options)
	case Revoke:
		return revoke(&r.both, &r.Options)
	case Accept:
		return accept(&r.both, &r.Options)
	}
	return connect(&r.both, r.Action, &r.Options)
}

// converge does what is next until nothing is.
func (r *run) converge(ctx context.Context) error {
	tick := time.NewTicker(pollTime)
	defer tick.Stop()
	seen, allowed := false, false
	var refused string
	var since time.Time
	var step Step
	var away error            // an API server that does not answer any more
	kept := map[string]bool{} // namespaces that stay
	for {
		err := r.look(ctx)
		switch {
		case ctx.Err() != nil && seen:
			return r.late(ctx, step, away)
		case err != nil && (!seen || !Transient(err)):
			return err
		case err != nil:
			away = err
			r.Waiting(err.Error())
		default:
			seen, away = true, nil
			step = r.plan()
			if len(step.Problems) > 0 {
				return &RefusedError{Problems: step.Problems, Changed: len(r.journal) > 0}
			}
			if !allowed && len(step.Changes) > 0 {
				if err := r.checkRights(ctx); err != nil {
					return err
				}
				allowed = true
			}
			acted, err := r.act(ctx, step, kept)
			if err != nil {
				return err
			}
			if acted {
				continue
			}
			r.keep(step)
			if len(step.Waits) == 0 {
				return nil
			}
			r.clock.look(step.Waits[0].Until)
			now := firstRefusal(step)
			if now != refused {
				refused, since = now, time.Now()
			}
			if refused != "" && time.Since(since) >= refusalTime {
				return r.refusal(step)
			}
			r.Waiting("waiting for " + step.Waits[0].Text)
		}
		select {
		case <-ctx.Done():
			return r.late(ctx, step, away)
		case <-tick.C:
		}
	}
}

// act makes the changes of a step and reports whether there were any. What has
// changed meanwhile is looked at again.
func (r *run) act(ctx context.Context, step Step, kept map[string]bool) (acted bool, err error) {
	for _, c := range step.Changes {
		ref := r.both.ref(c.On, c.Object)
		if kept[ref.String()] {
			continue
		}
		if c.Emptied {
			who, err := r.occupants(ctx, c.On)
			if err != nil {
				return acted, err
			}
			if len(who) > 0 {
				kept[ref.String()] = true
				r.note(left(ref, who))
				continue
			}
		}
		acted = true
		if err := r.do(ctx, c); apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) || (c.Deed == Delete && apierrors.IsNotFound(err)) {
			continue
		} else if err != nil {
			return acted, r.failed(c, ref, err)
		}
		r.result.Objects = append(r.result.Objects, Done{ref, c.Deed})
		text := fmt.Sprintf("%s %s", ref, c.Deed)
		if c.Why != "" {
			text += " (" + c.Why + ")"
		}
		r.Say(text)
	}
	return acted, nil
}

// do makes one change and enters it into the journal.
func (r *run) do(ctx context.Context, c Change) error {
	cl := r.Clusters[c.On].Client
	switch c.Deed {
	case Create:
		if err := cl.Create(ctx, c.Object, FieldOwner); err != nil {
			return err
		}
		r.journal = append(r.journal, entry{Change: c})
	case Update:
		before := r.find(c)
		// Fields that we do not know stay.
		if err := cl.Patch(ctx, c.Object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), FieldOwner); err != nil {
			return err
		}
		r.journal = append(r.journal, entry{c, before})
	case Delete:
		uid := c.Object.GetUID()
		if err := cl.Delete(ctx, c.Object, client.Preconditions{UID: &uid}, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
			return err
		}
		r.journal = append(r.journal, entry{Change: c})
	}
	return nil
}

// find returns the object of a change as it was looked at.
func (r *run) find(c Change) client.Object {
	f := &r.both[c.On]
	var all []client.Object
	for i := range f.Configurations {
		all = append(all, &f.Configurations[i])
	}
	for i := range f.Servers {
		all = append(all, &f.Servers[i])
	}
	for i := range f.Clients {
		all = append(all, &f.Clients[i])
	}
	for i := range f.Keys {
		all = append(all, &f.Keys[i])
	}
	i := slices.IndexFunc(all, func(o client.Object) bool { return o.GetUID() == c.Object.GetUID() })
	if i < 0 {
		return nil
	}
	return all[i]
}

// failed says what could not be done.
func (r *run) failed(c Change, ref Ref, err error) error {
	verb := map[Deed]string{Create: "create", Update: "update", Delete: "delete"}[c.Deed]
	fix := ""
	switch {
	case apierrors.IsForbidden(err):
		fix = ": ask an administrator of that cluster for this right, or use a kubeconfig that has it"
	case apierrors.IsInvalid(err):
		fix = ": correct what the message names"
	}
	return fmt.Errorf("%s %s: %w%s%s", verb, ref, err, fix, r.resume())
}

// resume says that what is done stays.
func (r *run) resume() string {
	if r.Options.Atomic || len(r.journal) == 0 {
		return ""
	}
	return " (run it again when that is mended: what is done stays done)"
}

// keep notes the objects that were as they should be.
func (r *run) keep(step Step) {
	for _, ref := range step.InPlace {
		if !slices.ContainsFunc(r.result.Objects, func(d Done) bool { return d.Ref == ref }) {
			r.result.Objects = append(r.result.Objects, Done{ref, unchanged})
		}
	}
	for _, n := range step.Notes {
		r.note(n)
	}
}

func (r *run) note(text string) {
	if !slices.Contains(r.result.Notes, text) {
		r.result.Notes = append(r.result.Notes, text)
		r.Say("note: " + text)
	}
}

// summarize completes the result with what was looked at last.
func (r *run) summarize() {
	server := serverSide(&r.both)
	for i := range r.both {
		f := &r.both[i]
		r.result.Clusters[i] = EndOfPair{ID: r.ids[i].ID, Namespace: f.Namespace.Name}
		if r.Action == Connect {
			r.result.Clusters[i].Role = "client"
			if Side(i) == server {
				r.result.Clusters[i].Role = "server"
			}
		}
	}
	r.result.Changed = len(r.journal)
	_, here := r.both[Local].connected()
	_, there := r.both[Remote].connected()
	r.result.Connected = here && (there || r.Action.alone())
	if r.Action == Invite {
		r.result.Invited = r.both.invited(&r.Options)
	}
	if keys := r.both[Local].Keys; r.Action == Accept && len(keys) > 0 {
		if key, _, _ := keys[0].Current(); len(key) == len(invitation.Key{}) {
			r.result.Fingerprint = invitation.Fingerprint(invitation.Key(key))
		}
	}
}

// flagAtomic names the flag that has asked for it, where there is one.
func (r *run) flagAtomic() string {
	if r.Action.alone() {
		return ""
	}
	return " (--atomic)"
}

// Transient reports whether an error of a cluster may go away by itself.
func Transient(err error) bool {
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		return false
	}
	var none *NotInstalledError
	return !errors.As(err, &none)
}

func firstRefusal(s Step) string {
	for _, w := range s.Waits {
		if w.Refused {
			return w.Text
		}
	}
	return ""
}

// refusal is the error of a controller that can't do what was asked for.
func (r *run) refusal(s Step) error {
	var out []Problem
	for _, w := range s.Waits {
		if w.Refused {
			out = append(out, Problem{Check: "controller", Object: r.ids[w.On].ID, Message: w.Text,
				Fix: fmt.Sprintf("mend that, and run it again; see %s describe configurations,gatewayservers,gatewayclients -n %s", r.Clusters[w.On].Kubectl, r.both[w.On].Namespace.Name)})
		}
	}
	return &RefusedError{Problems: out, Changed: len(r.journal) > 0}
}

// late is the error of a run that has no time left, or that somebody ended.
func (r *run) late(ctx context.Context, step Step, away error) error {
	if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return fmt.Errorf("interrupted%s", r.resume())
	}
	e := &TimeoutError{After: time.Since(r.started)}
	if away != nil {
		e.Waits, step.Waits = []string{away.Error()}, nil
	}
	for _, w := range step.Waits {
		e.Waits = append(e.Waits, "waited for "+w.Text)
	}
	if len(step.Waits) > 0 {
		look, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		e.Look = explain(look, &r.both, r.Action)
		e.Look = append(e.Look, otherWay(&r.both, r.Action)...)
	}
	if text := r.resume(); text != "" {
		e.Look = append(e.Look, "run it again when that is mended, with a longer --timeout where it only takes its time: what is done stays done")
	}
	return e
}

// occupants names what keeps the namespace of a side.
func (r *run) occupants(ctx context.Context, on Side) ([]string, error) {
	kinds, err := r.Kinds(on)
	if err != nil {
		return nil, &ReadError{r.Clusters[on], err}
	}
	return occupants(ctx, r.Clusters[on], r.both[on].Namespace.Name, kinds)
}
