package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/access"
)

// A blockResult is what peer block and peer unblock print as JSON.
type blockResult struct {
	ID      string `json:"clusterID"`
	Blocked bool   `json:"blocked"`
	Block   string `json:"block,omitempty"` // by whom, when and why
	Changed bool   `json:"changed"`
	Applied bool   `json:"applied,omitempty"` // --wait: the gateway has said so
}

func (p *program) peerBlockCommand() *cobra.Command {
	var reason, key string
	var list bool
	var wait waitFlags
	cmd := &cobra.Command{
		Use:   "block [ID]",
		Short: "Cut a peer off at once, on this side alone",
		Long: `block cuts the cluster with this ID off: its key is taken out of the WireGuard of this
cluster's gateway, so that nothing of the peer's is decrypted and nothing is sent to it.
The objects of the peering stay. It is the annotation ` + v1beta1.AnnotationBlocked + `
of the peering's Configuration, which may as well be written by kubectl or from Git; it
blocks whatever its value is. With --wait it returns once the gateway says that the peer is cut off.

With --key a key is cut off in place of a cluster, by its fingerprint or its base64: whatever
PublicKey has it, now or later, and whoever answers an invitation with it. That lasts when
the objects of the peering are deleted and made anew. It is an entry of the ConfigMap
` + v1beta1.BlockedKeysConfigMap + ` in the namespace of the installation, by the fingerprint.`,
		Example: example(
			"isthmusctl peer block rome --reason 'key leaked' --wait",
			"isthmusctl peer unblock rome --wait",
			"",
			"isthmusctl peer block --key 01d0-fabd-251f-cbbe --reason 'key leaked' --wait",
			"isthmusctl peer block --list",
			"isthmusctl peer unblock --key 01d0-fabd-251f-cbbe --wait",
		),
		Args: func(_ *cobra.Command, args []string) error {
			if !oneOf(len(args) == 1, key != "", list) || len(args) > 1 {
				return errors.New("name the peer by its ID, or give --key and no ID, or --list alone")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case list:
				return p.listBlockedKeys(cmd.Context())
			case key != "":
				return p.setKeyBlock(cmd.Context(), key, true, reason, wait)
			}
			return p.setBlock(cmd.Context(), args[0], true, reason, wait)
		},
	}
	wait.add(cmd.Flags(), "wait until the gateway says that the peer is cut off")
	cmd.Flags().StringVar(&reason, "reason", "", "`text` that the conditions repeat")
	cmd.Flags().StringVar(&key, "key", "", "block this `key`, by its fingerprint or its base64, in place of a peer")
	cmd.Flags().BoolVar(&list, "list", false, "show the keys that are blocked")
	return cmd
}

func (p *program) peerUnblockCommand() *cobra.Command {
	var key string
	var wait waitFlags
	cmd := &cobra.Command{
		Use:     "unblock [ID]",
		Short:   "Let a peer that was blocked connect again",
		Long:    `unblock takes back what isthmusctl peer block has done. The gateways connect by themselves.`,
		Example: example("isthmusctl peer unblock rome --wait", "isthmusctl peer unblock --key 01d0-fabd-251f-cbbe --wait"),
		Args: func(_ *cobra.Command, args []string) error {
			if !oneOf(len(args) == 1, key != "") || len(args) > 1 {
				return errors.New("name the peer by its ID, or give --key and no ID")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if key != "" {
				return p.setKeyBlock(cmd.Context(), key, false, "", wait)
			}
			return p.setBlock(cmd.Context(), args[0], false, "", wait)
		},
	}
	wait.add(cmd.Flags(), "wait until the gateways have heard from each other")
	cmd.Flags().StringVar(&key, "key", "", "let this `key` in again, by its fingerprint or its base64, in place of a peer")
	return cmd
}

// oneOf reports whether exactly one of these is so.
func oneOf(list ...bool) bool {
	n := 0
	for _, is := range list {
		if is {
			n++
		}
	}
	return n == 1
}

// setBlock blocks the peer with this ID, or ends that, and tells what became of it.
func (p *program) setBlock(ctx context.Context, id string, block bool, reason string, wait waitFlags) error {
	if err := wait.check(); err != nil {
		return err
	}
	c, err := p.connect()
	if err != nil {
		return err
	}
	list, err := c.configurationsOf(ctx, id)
	if err != nil {
		return err
	}
	var todo []v1beta1.Configuration
	var rights []access.Right
	r := blockResult{ID: id, Blocked: block}
	for _, o := range list {
		text, blocked := o.Annotations[v1beta1.AnnotationBlocked]
		if blocked != block {
			todo = append(todo, o)
			rights = append(rights, access.Right{Verb: "patch", Group: v1beta1.GroupVersion.Group, Resource: "configurations", Namespace: o.Namespace})
		} else if block {
			r.Block = text
		}
		if wait.wait {
			rights = append(rights, access.Right{Verb: "list", Group: v1beta1.GroupVersion.Group, Resource: "connections", Namespace: o.Namespace})
		}
	}
	lacking, err := access.Missing(ctx, c.client, rights)
	if err != nil {
		return err
	}
	if len(lacking) > 0 {
		return fmt.Errorf("nothing was changed: you may not %s: ask an administrator of the cluster at %s for this right", lacking[0], c.config.Host)
	}
	if block && len(todo) > 0 {
		r.Block = c.blockText(ctx, time.Now(), reason)
	}
	for _, o := range todo {
		was := o.DeepCopy()
		if block {
			metav1.SetMetaDataAnnotation(&o.ObjectMeta, v1beta1.AnnotationBlocked, r.Block)
		} else {
			delete(o.Annotations, v1beta1.AnnotationBlocked)
		}
		if err := c.client.Patch(ctx, &o, client.MergeFrom(was), client.FieldOwner("isthmusctl")); err != nil {
			return fmt.Errorf("annotate Configuration %s/%s: %w", o.Namespace, o.Name, err)
		}
		r.Changed = true
	}
	w := blockWait{what: id, done: "is not blocked any more", blocked: block}
	if block {
		w.done = "is blocked in its Configuration"
	}
	for _, o := range list {
		w.peerings = append(w.peerings, peering{id, o.Namespace})
	}
	return p.endBlock(ctx, c, w, wait, &r.Applied, &r)
}

// String says what was done.
func (r blockResult) String() string {
	switch {
	case r.Blocked && r.Applied:
		return r.ID + " is blocked: this cluster's gateway has taken its key out of WireGuard. To end that: isthmusctl peer unblock " + r.ID
	case r.Applied:
		return r.ID + " is not blocked, and connected."
	case r.Blocked && r.Changed:
		return fmt.Sprintf("%s is blocked: its gateway is cut off as soon as this cluster's gateway has read that, and isthmusctl peer list shows it.", r.ID)
	case r.Blocked:
		return fmt.Sprintf("%s is blocked already (%s): nothing to do.", r.ID, orNoReason(r.Block))
	case r.Changed:
		return r.ID + " is no longer blocked: the gateways connect by themselves."
	}
	return r.ID + " is not blocked: nothing to do."
}

// orNoReason returns by whom, when and why something is blocked, as it is written.
func orNoReason(text string) string { return cmp.Or(text, "without a reason") }

// configurationsOf returns the Configurations of the peer with this ID.
func (c *cluster) configurationsOf(ctx context.Context, id string) ([]v1beta1.Configuration, error) {
	var all v1beta1.ConfigurationList
	if err := c.client.List(ctx, &all); meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("Isthmus is not installed in the cluster at %s: isthmusctl install", c.config.Host)
	} else if err != nil {
		return nil, fmt.Errorf("list configurations.%s: %w", v1beta1.GroupVersion.Group, err)
	}
	known := map[string]bool{}
	var out []v1beta1.Configuration
	for _, o := range all.Items {
		remote := o.Labels[v1beta1.LabelRemoteClusterID]
		known[remote] = true
		if remote == id {
			out = append(out, o)
		}
	}
	delete(known, "")
	if id == "" || len(out) == 0 {
		return nil, fmt.Errorf("no Configuration in the cluster at %s is of a peer %q: those that have one are: %s", c.config.Host, id, orDash(strings.Join(slices.Sorted(maps.Keys(known)), ", ")))
	}
	return out, nil
}

// blockText says who blocks, when and why.
func (c *cluster) blockText(ctx context.Context, now time.Time, reason string) string {
	text := "by " + c.user(ctx) + " at " + now.UTC().Format(time.RFC3339)
	if reason != "" {
		text += ": " + reason
	}
	return text
}

// user is who runs this program, as the API server calls them.
func (c *cluster) user(ctx context.Context) string {
	me, err := c.clients.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil || me.Status.UserInfo.Username == "" {
		return "a user whom the API server does not name"
	}
	return me.Status.UserInfo.Username
}
