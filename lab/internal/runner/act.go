package runner

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// fieldOwner is the lab's name in the managed fields of what it applies.
const fieldOwner = "isthmus-lab-scenario"

// An undoList takes back what a row did, last first.
type undoList []undoing

// An undoing takes back one thing.
type undoing struct {
	do     func(context.Context) error
	object types.UID // of the object that goes back to what it was; "": it is about something else
}

func (u *undoList) add(f func(context.Context) error) { *u = append(*u, undoing{do: f}) }

// addObject adds what makes an object what it was, unless the list has that
// already: an object that was changed several times goes back at once, and nobody
// acts upon what it was in between.
func (u *undoList) addObject(object types.UID, f func(context.Context) error) {
	if !slices.ContainsFunc(*u, func(e undoing) bool { return e.object == object }) {
		*u = append(*u, undoing{f, object})
	}
}

// undoTime ends undoing that hangs. Each part of it that waits has a bound of its
// own.
const undoTime = 15 * time.Minute

// run undoes all, and returns what could not be undone.
func (u *undoList) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, undoTime)
	defer cancel()
	var errs []error
	for i := len(*u) - 1; i >= 0; i-- {
		errs = append(errs, (*u)[i].do(ctx))
	}
	*u = nil
	return errors.Join(errs...)
}

// name makes what was added after the first n say what it undoes.
func (u undoList) name(n int, action scenario.Action) {
	for i := range u[n:] {
		do := u[n+i].do
		u[n+i].do = func(ctx context.Context) error {
			if err := do(ctx); err != nil {
				return fmt.Errorf("undo %s: %w", action, err)
			}
			return nil
		}
	}
}

// interval is that of a flow.
func (r *Runner) interval(a *scenario.Flow) time.Duration {
	if a.Fresh {
		return max(a.Interval, r.FreshInterval)
	}
	return max(a.Interval, r.FlowInterval)
}

// act does one thing. A fault is that it could not be done as the scenario says:
// a command failed, an API server refused an object, a gateway did not move, a
// name stands for nothing or for what it must not. An error is only what the lab
// itself got wrong; see ofLab.
func (r *Runner) act(ctx context.Context, row *expect.Row, a scenario.Action, undo *undoList) (*report.Fault, error) {
	if _, flow := a.(*scenario.Flow); !flow {
		row.Directory.MayChange()
	}
	n := len(*undo)
	fault, err := r.do(ctx, row, a, undo)
	undo.name(n, a)
	if err == nil || ofLab(ctx, err) {
		return fault, err
	}
	return actionFault(a.String(), err), nil
}

func (r *Runner) do(ctx context.Context, row *expect.Row, a scenario.Action, undo *undoList) (*report.Fault, error) {
	switch a := a.(type) {
	case *scenario.Apply:
		return r.apply(ctx, row, a, undo)
	case *scenario.Delete:
		return nil, r.delete(ctx, a)
	case *scenario.Exec:
		return r.execOnce(ctx, row, a, undo)
	case *scenario.Kill:
		target, err := killTarget(ctx, row, a.Of.Operand)
		if err != nil {
			return nil, err
		}
		return nil, r.World.KillContainer(ctx, target, "")
	case *scenario.Flow:
		f, err := row.OpenFlow(ctx, expect.Stream{
			From: a.From.Operand, To: a.To.Operand, Proto: a.Proto, Bind: a.Bind, Interval: r.interval(a), Fresh: a.Fresh,
		})
		if err != nil {
			return nil, err
		}
		row.Flows[a.Name] = f
		return nil, nil
	case *scenario.Impair:
		return nil, r.impair(ctx, row, a, undo)
	case *scenario.NodeLeaves:
		return nil, r.moveNode(ctx, row, a.Node.Operand, r.nodeLeaves, undo)
	case *scenario.NodeLost:
		return nil, r.moveNode(ctx, row, a.Node.Operand, r.World.LoseNode, undo)
	case *scenario.NodeJoins:
		return nil, r.moveNode(ctx, row, a.Node.Operand, nil, undo)
	case *scenario.NodeReboots:
		return r.reboot(ctx, row, a.Node.Operand)
	case *scenario.NodeDrained:
		return r.drain(ctx, row, a, undo)
	case *scenario.Kubectl:
		return r.kubectl(ctx, row, a, undo)
	case *scenario.GatewayMoves:
		return r.moveGateway(ctx, row, a, undo)
	case *scenario.PodMoves:
		return r.movePod(ctx, row, a, undo)
	case *scenario.Rewrite:
		return r.rewrite(ctx, row, a, undo)
	case *scenario.Connect:
		return nil, r.connect(ctx, a, undo)
	case *scenario.Disconnect:
		return nil, r.disconnect(ctx, a.In, a.Peer)
	case *scenario.Install:
		return r.operate(ctx, a.In, a.With, a.String(), undo, func(o deploy.Operator) error { return o.Install(ctx, a.In, a.Values) })
	case *scenario.Upgrade:
		return r.operate(ctx, a.In, a.With, a.String(), undo, func(o deploy.Operator) error { return o.Upgrade(ctx, a.In, a.Values) })
	case *scenario.Uninstall:
		return r.operate(ctx, a.In, a.With, a.String(), undo, func(o deploy.Operator) error { return o.Uninstall(ctx, a.In, a.Purge) })
	case *scenario.Remember:
		// Hosts may not have applied yet what was made just now.
		look := func(ctx context.Context) (expect.Remembered, error) { return expect.Remember(ctx, row, a.Of) }
		seen, err := look(ctx)
		if err == nil {
			seen, err = unchanged(ctx, r, seen, look, func(a, b expect.Remembered) bool { return len(a.Compare(b)) == 0 })
		}
		row.Remembered[a.Name] = seen
		return nil, err
	}
	return nil, fmt.Errorf("no way to do %T", a)
}

func killTarget(ctx context.Context, row *expect.Row, o operand.Operand) (string, error) {
	return row.Directory.PodTarget(ctx, o)
}

func (r *Runner) apply(ctx context.Context, row *expect.Row, a *scenario.Apply, undo *undoList) (*report.Fault, error) {
	text, err := row.Expand(ctx, a.Objects)
	if err != nil {
		return nil, err
	}
	objects, err := scenario.ParseObjects(text)
	if err != nil {
		return nil, err
	}
	refused, err := row.Pattern(ctx, a.Refused)
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		err := r.applyOne(ctx, a.In, o, undo)
		switch {
		case err != nil && (a.Refused == "" || ofLab(ctx, err)):
			return nil, fmt.Errorf("%s/%s: %w", strings.ToLower(o.GetKind()), o.GetName(), err)
		case a.Refused == "":
			continue
		}
		if fault := refusal(refused, o, err); fault != nil {
			return fault, nil
		}
	}
	return nil, nil
}

// refusal checks that an object was refused with the message expected.
func refusal(message *regexp.Regexp, o *unstructured.Unstructured, err error) *report.Fault {
	name := strings.ToLower(o.GetKind()) + "/" + o.GetName()
	fault := &report.Fault{Expectation: name + " is refused", Want: fmt.Sprintf("refused with a message that matches %q", message)}
	if err == nil {
		fault.Got = "the API server accepted it"
		return fault
	}
	if message.MatchString(err.Error()) {
		return nil
	}
	fault.Got = err.Error()
	return fault
}

// resource is how objects of an object's kind and namespace are reached.
func (r *Runner) resource(ctx context.Context, cluster string, o *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	m, err := r.api.MappingOf(ctx, cluster, o.GroupVersionKind())
	if err != nil {
		return nil, err
	}
	return r.api.Resource(ctx, cluster, m, o.GetNamespace())
}

func (r *Runner) applyOne(ctx context.Context, cluster string, o *unstructured.Unstructured, undo *undoList) error {
	m, err := r.api.MappingOf(ctx, cluster, o.GroupVersionKind())
	if err != nil {
		return err
	}
	if m.Scope.Name() == meta.RESTScopeNameNamespace && o.GetNamespace() == "" {
		o.SetNamespace("default")
	}
	res, err := r.api.Resource(ctx, cluster, m, o.GetNamespace())
	if err != nil {
		return err
	}
	before, err := res.Get(ctx, o.GetName(), metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	existed := err == nil
	if existed && r.OfOthers {
		return fmt.Errorf("cluster %s has %s %s/%s already, which this row would create: run it when that is gone; if a run that was killed has left it, delete it there, with the kubeconfig of that cluster: kubectl delete %[2]s -n %[3]s %[4]s",
			cluster, strings.ToLower(o.GetKind()), o.GetNamespace(), o.GetName())
	}
	after, err := res.Apply(ctx, o.GetName(), o, metav1.ApplyOptions{FieldManager: fieldOwner, Force: true})
	if err != nil {
		return err
	}
	undo.addObject(after.GetUID(), func(ctx context.Context) error {
		if !existed {
			return r.remove(ctx, cluster, m, o.GetNamespace(), o.GetName())
		}
		return restore(ctx, r.allowAction(restoreTime), res, before)
	})
	return nil
}

// restoreTime is how long others may be faster in changing an object.
const restoreTime = 10 * time.Second

// restore makes an object what it was, with who owns which field of it: what a later
// apply leaves out is removed if the one before has put it there. Custom resources are not
// updated without the version that is to be replaced.
func restore(ctx context.Context, given allowance, res dynamic.ResourceInterface, before *unstructured.Unstructured) error {
	return until(ctx, given, before.GetName()+" was changed again and again", func(ctx context.Context) (bool, error) {
		now, err := res.Get(ctx, before.GetName(), metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		old := before.DeepCopy()
		old.SetResourceVersion(now.GetResourceVersion())
		_, err = res.Update(ctx, old, metav1.UpdateOptions{})
		if apierrors.IsConflict(err) {
			return false, nil
		}
		return err == nil, err
	})
}

func (r *Runner) delete(ctx context.Context, a *scenario.Delete) error {
	o, err := r.api.Find(ctx, a.In, a.Object, a.Namespace)
	if err != nil {
		return err
	}
	if o == nil {
		return fmt.Errorf("there is no %s in %s", a.Object, a.In)
	}
	m, err := r.api.MappingOf(ctx, a.In, o.GroupVersionKind())
	if err != nil {
		return err
	}
	return r.remove(ctx, a.In, m, o.GetNamespace(), o.GetName())
}

// removeTime is how long an object's finalizers are given.
const removeTime = 30 * time.Second

// remove deletes an object and waits until it, or at least this incarnation
// of it, is gone.
func (r *Runner) remove(ctx context.Context, cluster string, m *meta.RESTMapping, namespace, name string) error {
	res, err := r.api.Resource(ctx, cluster, m, namespace)
	if err != nil {
		return err
	}
	old, err := res.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return err
	}
	if err := res.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	what := strings.ToLower(m.GroupVersionKind.Kind) + "/" + name
	return until(ctx, r.allowAction(removeTime), what+" is still there", func(ctx context.Context) (bool, error) {
		now, err := res.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		return err == nil && now.GetUID() != old.GetUID(), err
	})
}

// await calls look every 100 ms until it is done. What is not done within the
// allowance is a fault of the product, which gets what was seen last; what keeps
// look from seeing is an error of the lab.
func await(ctx context.Context, given allowance, fault report.Fault, look func(context.Context) (seen string, done bool, err error)) (*report.Fault, error) {
	var failed error
	why := until(ctx, given, "it is not so: "+fault.Want, func(ctx context.Context) (bool, error) {
		seen, done, err := look(ctx)
		if err != nil {
			if ctx.Err() == nil { // otherwise the time was over
				failed = err
			}
			return false, err
		}
		fault.Got = seen
		return done, nil
	})
	if why == nil || failed != nil || ctx.Err() != nil {
		return nil, why
	}
	return &fault, nil
}

// until calls done every 100 ms until it is, at most for as long as the allowance
// says.
func until(ctx context.Context, given allowance, otherwise string, done func(context.Context) (bool, error)) error {
	why := func() error {
		return fmt.Errorf("after %v %s", time.Since(given.since).Round(100*time.Millisecond), otherwise)
	}
	// What hangs ends when the slowest machine would have had enough time.
	ctx, cancel := context.WithDeadlineCause(ctx, given.end(), fmt.Errorf("after %v %s", time.Until(given.end()).Round(time.Second), otherwise))
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := done(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if ok || err != nil {
			return err
		}
		if given.over(0) {
			return why()
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

func (r *Runner) execOnce(ctx context.Context, row *expect.Row, a *scenario.Exec, undo *undoList) (*report.Fault, error) {
	ran, err := r.exec(ctx, row, a)
	if err != nil {
		return nil, err
	}
	if a.Undo != "" {
		// The address a name stands for may have changed by then: expand now.
		text, err := row.Expand(ctx, a.Undo)
		if err != nil {
			return nil, err
		}
		undo.add(func(ctx context.Context) error {
			res, err := r.shell(ctx, row, a.On.Operand, text)
			if err == nil && res.Code != 0 {
				err = fmt.Errorf("%s: %w", strings.TrimSpace(text), exitErrorOf(res))
			}
			return err
		})
	}
	if ran.Code != 0 && !a.Fails {
		return nil, exitErrorOf(ran.ExecResult)
	}
	return nil, nil
}

// exec runs the command of an action and remembers its output.
func (r *Runner) exec(ctx context.Context, row *expect.Row, a *scenario.Exec) (expect.Ran, error) {
	text, err := row.Expand(ctx, a.Run)
	if err != nil {
		return expect.Ran{}, err
	}
	res, err := r.shell(ctx, row, a.On.Operand, text)
	if err != nil {
		return expect.Ran{}, err
	}
	ran := expect.Ran{Command: strings.TrimSpace(text), MayFail: a.Fails, ExecResult: res}
	row.Outputs[a.Name], row.Outputs[""] = ran, ran
	row.Ran = append(row.Ran, ran)
	return ran, nil
}

// commands are those that were run, each as it ended the last time.
func commands(ran []expect.Ran) []report.Command {
	var out []report.Command
	for _, c := range ran {
		out = slices.DeleteFunc(out, func(x report.Command) bool { return x.Command == c.Command })
		out = append(out, report.Command{Command: c.Command, Code: c.Code, Stdout: string(c.Stdout), Stderr: string(c.Stderr)})
	}
	return out
}

func (r *Runner) shell(ctx context.Context, row *expect.Row, on operand.Operand, text string) (world.ExecResult, error) {
	target, err := row.ExecTarget(ctx, on)
	if err != nil {
		return world.ExecResult{}, err
	}
	return r.World.Exec(ctx, world.ExecRequest{
		Target: target, Host: true, Argv: []string{"sh", "-c", text},
		Env: []string{patienceVariable + "=" + strconv.Itoa(r.wholePatience(row.Started))},
	})
}

// patienceVariable is a variable of the commands of scenarios: how many times as long a command
// may wait as it would on a machine that has nothing else to do, rounded up.
const patienceVariable = "PATIENCE"

func (r *Runner) wholePatience(since time.Time) int {
	return max(r.Patience, 1) * int(math.Ceil(r.Pace.Since(since)))
}
