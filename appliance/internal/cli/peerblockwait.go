package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

// waitFlags say whether to wait for a gateway, and for how long.
type waitFlags struct {
	wait    bool
	timeout time.Duration
}

func (w *waitFlags) add(f *pflag.FlagSet, until string) {
	f.BoolVar(&w.wait, "wait", false, until)
	f.DurationVar(&w.timeout, "timeout", peer.DefaultTimeout, "longest `time` to wait")
}

func (w waitFlags) check() error {
	if w.timeout <= 0 {
		return fmt.Errorf("--timeout %v: write a time that is longer than nothing, such as %v", w.timeout, peer.DefaultTimeout)
	}
	return nil
}

// A peering is what a peer has in one namespace.
type peering struct{ id, namespace string }

// A blockWait is what a block, or its end, is to lead to.
type blockWait struct {
	what     string // is blocked, or no longer: a peer, or a key
	done     string // what has been done to it
	blocked  bool
	peerings []peering // whose Connections are to say so
}

// endBlock waits for gateways, if that is asked for and there are any, notes in applied that
// they have said so, and prints the result.
func (p *program) endBlock(ctx context.Context, c *cluster, w blockWait, wait waitFlags, applied *bool, result fmt.Stringer) error {
	if wait.wait && len(w.peerings) > 0 {
		if err := p.awaitBlock(ctx, c, w, wait.timeout); err != nil {
			return err
		}
		*applied = true
	}
	if p.json {
		return p.print(result)
	}
	_, err := fmt.Fprintln(p.out, result)
	return err
}

// awaitBlock waits until all Connections of the peerings say what w does. What was
// written stays when they do not.
func (p *program) awaitBlock(ctx context.Context, c *cluster, w blockWait, timeout time.Duration) error {
	out := newTicker(p.err)
	defer out.end()
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	tick := time.NewTicker(gatewayPoll)
	defer tick.Stop()
	for {
		connections, err := c.connectionsOf(ctx, w.peerings)
		why := notYet(connections, w.blocked)
		switch {
		case apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err):
			return fmt.Errorf("%w: ask an administrator for it, or do not wait", err)
		case err != nil:
			why = err.Error()
		case why == "":
			return nil
		}
		out.waiting("waiting for the gateway of " + w.what + ": " + why)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline.C:
			return fmt.Errorf("%s %s, but the gateway has not said so after %v: %s: see isthmusctl peer list, and kubectl get pods -n %s", w.what, w.done, timeout, why, w.peerings[0].namespace)
		case <-tick.C:
		}
	}
}

// connectionsOf returns the Connections of peerings, which may be named more than once.
func (c *cluster) connectionsOf(ctx context.Context, of []peering) ([]v1beta1.Connection, error) {
	var out []v1beta1.Connection
	for i, at := range of {
		if slices.Contains(of[:i], at) {
			continue
		}
		var list v1beta1.ConnectionList
		if err := c.client.List(ctx, &list, client.InNamespace(at.namespace), client.MatchingLabels{v1beta1.LabelRemoteClusterID: at.id}); err != nil {
			return nil, fmt.Errorf("list connections.%s in %s: %w", v1beta1.GroupVersion.Group, at.namespace, err)
		}
		out = append(out, list.Items...)
	}
	return out, nil
}

// notYet says what the Connections lack to be blocked, or connected; empty: nothing. Where
// a gateway has nothing to say, there is no Connection, and nothing is known.
func notYet(list []v1beta1.Connection, blocked bool) string {
	if len(list) == 0 {
		return "there is no Connection: no gateway of this peer is running"
	}
	want := "Connected"
	if blocked {
		want = v1beta1.ReasonBlocked
	}
	var lacking []string
	for _, o := range list {
		reason, message := "", ""
		if said := meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionConnected); said != nil {
			reason, message = said.Reason, said.Message
		}
		if reason != want {
			lacking = append(lacking, fmt.Sprintf("Connection %s/%s says %s", o.Namespace, o.Name, cmp.Or(message, "nothing yet")))
		}
	}
	return strings.Join(lacking, "; ")
}
