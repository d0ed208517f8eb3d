package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/access"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

// A followResult is what peer follow prints as JSON.
type followResult struct {
	ID      string                       `json:"clusterID"`
	Ranges  string                       `json:"ranges,omitempty"` // that are allowed; empty: nothing is followed
	Max     string                       `json:"max,omitempty"`
	Forgets []v1beta1.CIDR               `json:"forgets,omitempty"` // what the peer has withdrawn
	Changed bool                         `json:"changed"`
	Was     *v1beta1.ConfigurationFollow `json:"was,omitempty"` // the status before the change
}

// follow is one run of isthmusctl peer follow.
type follow struct {
	*program
	peer.Follow
	none, forget bool
}

func (p *program) peerFollowCommand() *cobra.Command {
	f := &follow{program: p}
	cmd := &cobra.Command{
		Use:   "follow ID",
		Short: "Let a peer add networks by telling them, within ranges",
		Long: `follow says which networks the cluster with this ID may have besides those that are
written in its Configuration here. What its gateway tells through the tunnel counts at once,
where it is within the ranges and the number, and overlaps nothing of this cluster, of other
peers, and of what nodes need. It is never remapped. What the peer tells no more is reached for
10 minutes; --forget ends that now. It is the annotations ` + v1beta1.AnnotationFollow + ` and
` + v1beta1.AnnotationFollowMax + ` of the Configuration, whose status.follow has what has
come of them. Without flags, follow shows that.`,
		Example: example(
			"isthmusctl peer follow rome --range 10.64.0.0/10 --max 2",
			"isthmusctl peer follow rome",
			"isthmusctl peer follow rome --forget",
			"isthmusctl peer follow rome --none",
		),
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd.Context(), args[0]) },
	}
	cmd.Flags().StringSliceVar(&f.Ranges, "range", nil, "`range` that the peer's networks may be in; several are separated by commas")
	cmd.Flags().IntVar(&f.Max, "max", 0, fmt.Sprintf("`number` of networks that the peer may add (default %d)", v1beta1.DefaultFollowMax))
	cmd.Flags().BoolVar(&f.none, "none", false, "follow nothing any more: what was followed ends now")
	cmd.Flags().BoolVar(&f.forget, "forget", false, "end now what the peer has withdrawn")
	return cmd
}

// check finds flags that can't be meant.
func (f *follow) check() error {
	ranges := len(f.Ranges) > 0
	if (ranges || f.none || f.forget) && !oneOf(ranges, f.none, f.forget) || f.Max != 0 && !ranges {
		return errors.New("give --range, with or without --max, or --none alone, or --forget alone, or nothing to see what is followed")
	}
	return f.Check("range", "max")
}

// change brings the annotations of a Configuration to what is asked for. It reports whether
// that changes them, and notes in r what they are.
func (f *follow) change(o *v1beta1.Configuration, r *followResult) bool {
	set := func(annotation, text string) bool {
		if is, there := o.Annotations[annotation]; is == text && there == (text != "") {
			return false
		}
		if metav1.SetMetaDataAnnotation(&o.ObjectMeta, annotation, text); text == "" {
			delete(o.Annotations, annotation)
		}
		return true
	}
	var changed bool
	switch {
	case len(f.Ranges) > 0:
		for _, annotation := range []string{v1beta1.AnnotationFollow, v1beta1.AnnotationFollowMax} {
			changed = set(annotation, f.Annotations()[annotation]) || changed
		}
	case f.none:
		for _, annotation := range []string{v1beta1.AnnotationFollow, v1beta1.AnnotationFollowMax, v1beta1.AnnotationForget} {
			changed = set(annotation, "") || changed
		}
	case f.forget && o.Status.Follow != nil:
		var last time.Time
		for _, n := range o.Status.Follow.Networks {
			if n.WithdrawnAt != nil {
				r.Forgets = append(r.Forgets, n.CIDR)
				if n.WithdrawnAt.After(last) {
					last = n.WithdrawnAt.Time
				}
			}
		}
		// By the clock that wrote it, not by that of this machine.
		if !last.IsZero() {
			changed = set(v1beta1.AnnotationForget, last.UTC().Format(time.RFC3339))
		}
	}
	r.Ranges, r.Max = o.Annotations[v1beta1.AnnotationFollow], o.Annotations[v1beta1.AnnotationFollowMax]
	r.Changed = r.Changed || changed
	return changed
}

func (f *follow) run(ctx context.Context, id string) error {
	if err := f.check(); err != nil {
		return err
	}
	c, err := f.connect()
	if err != nil {
		return err
	}
	list, err := c.configurationsOf(ctx, id)
	if err != nil {
		return err
	}
	r := followResult{ID: id}
	type change struct{ was, is v1beta1.Configuration }
	var todo []change
	var rights []access.Right
	for _, o := range list {
		r.Was = o.Status.Follow
		was := o.DeepCopy()
		if f.change(&o, &r) {
			todo = append(todo, change{*was, o})
			rights = append(rights, access.Right{Verb: "patch", Group: v1beta1.GroupVersion.Group, Resource: "configurations", Namespace: o.Namespace})
		}
	}
	lacking, err := access.Missing(ctx, c.client, rights)
	if err != nil {
		return err
	}
	if len(lacking) > 0 {
		return fmt.Errorf("nothing was changed: you may not %s: ask an administrator of the cluster at %s for this right", lacking[0], c.config.Host)
	}
	for _, x := range todo {
		if err := c.client.Patch(ctx, &x.is, client.MergeFrom(&x.was), client.FieldOwner("isthmusctl")); err != nil {
			return fmt.Errorf("annotate Configuration %s/%s: %w", x.is.Namespace, x.is.Name, err)
		}
	}
	if f.json {
		return f.print(r)
	}
	_, err = fmt.Fprint(f.out, f.text(r))
	return err
}

// text says what was done, and without flags what is followed.
func (f *follow) text(r followResult) string {
	switch {
	case f.forget && len(r.Forgets) == 0:
		return r.ID + " has withdrawn nothing that is still followed: nothing to do.\n"
	case f.forget:
		return fmt.Sprintf("What %s has withdrawn is not followed any longer: %v.\n", r.ID, r.Forgets)
	case r.Ranges == "":
		return r.ID + " adds no networks by telling them. To let it: isthmusctl peer follow " + r.ID + " --range 10.64.0.0/10\n"
	}
	limit := r.Max
	if limit == "" {
		limit = strconv.Itoa(v1beta1.DefaultFollowMax)
	}
	out := fmt.Sprintf("%s may add %s networks in %s by telling them.\n", r.ID, limit, r.Ranges)
	if len(f.Ranges) > 0 || r.Was == nil {
		return out
	}
	for _, n := range r.Was.Networks {
		if n.WithdrawnAt != nil {
			out += fmt.Sprintf("  %s %s, withdrawn at %s\n", n.Type, n.CIDR, n.WithdrawnAt.UTC().Format(time.RFC3339))
		} else {
			out += fmt.Sprintf("  %s %s\n", n.Type, n.CIDR)
		}
	}
	for _, n := range r.Was.Refused {
		out += fmt.Sprintf("  ✗ %s %s\n", n.CIDR, n.Message)
	}
	return out
}
