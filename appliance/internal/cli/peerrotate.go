package cli

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/access"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A rotateResult is what peer rotate prints as JSON.
type rotateResult struct {
	ID       string `json:"clusterID"`
	Rotation string `json:"rotation"`
	// Phase is that of the Connection's status.rotation.
	Phase   string `json:"phase"`
	Message string `json:"message,omitempty"`
	// Silence is how long there was no session.
	Silence string `json:"silence,omitempty"`
	// PublicKey is what the other side has to write, after a rotation that it was not
	// asked about.
	PublicKey string `json:"publicKey,omitempty"`
}

// rotateFlags are those of peer rotate and peer repair.
type rotateFlags struct {
	share, allowLoss, wait, yes bool
	rotation.Manner
	timeout time.Duration
}

func (p *program) peerRotateCommand() *cobra.Command {
	var f rotateFlags
	cmd := &cobra.Command{
		Use:   "rotate ID",
		Short: "Give this cluster's gateway of a peering a new key pair",
		Long: `rotate gives the gateway of the peering with the cluster of this ID a new key pair, and the
peering a new pre-shared key where it has one. The gateways agree on it through the tunnel,
so there is nothing to do on the other side, which may keep its peers from it by the value
networking.keyRotation.accept. If there is no handshake with the new keys within 30 s, both
have the old ones again.

One tunnel can't take data with both keys, so some packets are lost between the switch of one
side and that of the other: 16 and 22 of 1,000 a second were measured. Connections live on.
The key of the other side's gateway is changed by the same command there.

The other side knows the key before for 24 hours more, for isthmusctl peer repair, unless
--compromised says that it is in other hands.`,
		Example: example("isthmusctl peer rotate rome --wait", "isthmusctl peer rotate rome --psk --wait --yes"),
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.rotate(cmd.Context(), args[0], f)
		},
	}
	cmd.Flags().BoolVar(&f.share, "psk", false, "give the peering a pre-shared key if it has none; one that it has is changed anyway")
	cmd.Flags().BoolVar(&f.allowLoss, "allow-loss", false, "change the key pair without asking the peer: there is no connection until its administrator has written the new public key, which is printed")
	f.add(cmd)
	cmd.MarkFlagsMutuallyExclusive("allow-loss", "compromised") // nobody is asked, so nobody is told
	return cmd
}

// add adds the flags that rotate and repair have in common.
func (f *rotateFlags) add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.Compromised, "compromised", false, "the keys before are in other hands: the other side forgets them at once, so they are of no use for isthmusctl peer repair")
	cmd.Flags().BoolVar(&f.wait, "wait", false, "wait until it is known what came of it")
	cmd.Flags().BoolVarP(&f.yes, "yes", "y", false, "do not ask whether to go on")
	cmd.Flags().DurationVar(&f.timeout, "timeout", rotation.Patience+2*rotation.Trial, "longest `time` to wait")
}

// A gatewayObject is the GatewayServer or GatewayClient of a peering.
type gatewayObject struct {
	client.Object
	resource string
	keys     *corev1.ObjectReference // nil: there are none yet
	own      string                  // spec.secretRef: the user's own keys; empty: ours
}

// gatewayOf returns the gateway of the peer with this ID.
func (c *cluster) gatewayOf(ctx context.Context, id string) (gatewayObject, error) {
	var servers v1beta1.GatewayServerList
	var clients v1beta1.GatewayClientList
	of := client.MatchingLabels{v1beta1.LabelRemoteClusterID: id}
	err := errors.Join(c.client.List(ctx, &servers, of), c.client.List(ctx, &clients, of))
	if meta.IsNoMatchError(err) {
		return gatewayObject{}, fmt.Errorf("Isthmus is not installed in the cluster at %s: isthmusctl install", c.config.Host)
	}
	if err != nil {
		return gatewayObject{}, fmt.Errorf("list the gateways of %s: %w", id, err)
	}
	var out []gatewayObject
	for i := range servers.Items {
		out = append(out, gatewayObject{&servers.Items[i], "gatewayservers", servers.Items[i].Status.SecretRef, servers.Items[i].Spec.SecretRef.Name})
	}
	for i := range clients.Items {
		out = append(out, gatewayObject{&clients.Items[i], "gatewayclients", clients.Items[i].Status.SecretRef, clients.Items[i].Spec.SecretRef.Name})
	}
	if len(out) != 1 {
		if len(out) == 0 {
			return gatewayObject{}, fmt.Errorf("the cluster at %s has no gateway for a peer %q: isthmusctl peer list shows those there are", c.config.Host, id)
		}
		return gatewayObject{}, fmt.Errorf("the cluster at %s has %d gateways for the peer %q, and this command is for one: isthmusctl peer list shows them", c.config.Host, len(out), id)
	}
	return out[0], nil
}

func (p *program) rotate(ctx context.Context, id string, f rotateFlags) error {
	c, err := p.connect()
	if err != nil {
		return err
	}
	g, err := c.gatewayOf(ctx, id)
	if err != nil {
		return err
	}
	var conn v1beta1.Connection
	key := client.ObjectKey{Namespace: g.GetNamespace(), Name: plan.GatewayName(g.GetName())}
	if err := c.client.Get(ctx, key, &conn); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("Connection %s: %w", key, err)
	}
	if err := canRotate(g, &conn, id, f); err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	rights := []access.Right{{Verb: "patch", Group: v1beta1.GroupVersion.Group, Resource: g.resource, Namespace: g.GetNamespace()}}
	if f.allowLoss && g.keys != nil { // to say what the new public key is
		rights = append(rights, access.Right{Verb: "get", Resource: "secrets", Namespace: g.GetNamespace(), Name: g.keys.Name})
	}
	lacking, err := access.Missing(ctx, c.client, rights)
	if err != nil {
		return err
	}
	if len(lacking) > 0 {
		return fmt.Errorf("nothing was changed: you may not %s: ask an administrator of the cluster at %s for this right", lacking[0], c.config.Host)
	}
	var before []byte
	if f.allowLoss {
		if before, err = c.publicKeyOf(ctx, g); err != nil {
			return err
		}
	}
	cost := fmt.Sprintf("Between the two switches some packets to and from %s are lost (16 and 22 of 1,000 a second were measured); connections live on.", id)
	if f.allowLoss {
		cost = fmt.Sprintf("There is no connection to %s until its administrator has written the new public key of this cluster's gateway.", id)
	}
	if f.Compromised {
		cost += " Afterwards the keys of before are of no use for isthmusctl peer repair."
	}
	if f.Repair {
		cost = fmt.Sprintf("For 24 hours after a change of keys the gateway of %s knows the key that this one had before: by that the two agree on new keys. It costs nothing, since they are not connected.", id)
	}
	fmt.Fprintln(p.err, cost)
	if !p.confirmed(ctx, f.yes, "Change the keys of the gateway?") {
		return errors.New("nothing was changed")
	}
	r := rotateResult{ID: id}
	if r.Rotation, err = c.wishFor(ctx, g, f); err != nil {
		return err
	}
	switch {
	case f.allowLoss:
		err = c.awaitKey(ctx, g, before, &r, f.timeout)
	case f.wait:
		err = c.awaitRotation(ctx, g, &r, f.timeout)
	}
	if err != nil {
		return err
	}
	if p.json {
		err = p.print(r)
	} else {
		_, err = fmt.Fprintln(p.out, r)
	}
	if r.Phase == string(rotation.Aborted) {
		return errors.New("the gateway has the keys that it had")
	}
	return err
}

// canRotate returns why the keys of a gateway can't be changed now, or not together with the
// peer.
func canRotate(g gatewayObject, conn *v1beta1.Connection, id string, f rotateFlags) error {
	const alone = "--allow-loss changes the key of this side alone"
	r := conn.Status.Rotation
	switch {
	case g.own != "":
		return fmt.Errorf("the keys of the gateway are in Secret %s/%s, which spec.secretRef names: whoever has made it changes them there", g.GetNamespace(), g.own)
	case f.Repair && conn.Status.Value == v1beta1.Connected:
		return fmt.Errorf("the gateways of this cluster and %s are connected as far as is known: isthmusctl peer rotate %s changes their keys; if the key was restored just now, try again in 15 s", id, id)
	case f.Repair && slices.ContainsFunc(conn.Status.Conditions, func(c metav1.Condition) bool { return c.Reason == v1beta1.ReasonBlocked }):
		return fmt.Errorf("%s is cut off here, so its gateway can't be reached: isthmusctl peer unblock %s", id, id)
	case f.Repair:
		return nil
	case f.allowLoss && r != nil && r.By == v1beta1.RotationByUs && (r.Phase == string(rotation.Waiting) || r.Phase == string(rotation.Trying)):
		return fmt.Errorf("the gateway is changing its keys already, together with %s: wait until status.rotation of Connection %s/%s is Committed or Aborted, %v at most", id, conn.Namespace, conn.Name, rotation.Patience+rotation.Trial)
	case f.allowLoss, conn.AgreesOnKeys():
		return nil
	case conn.Status.Value != v1beta1.Connected:
		return fmt.Errorf("the gateways of this cluster and %s are not connected (%s), so they can't agree on new keys: see isthmusctl peer list; %s", id, cmp.Or(string(conn.Status.Value), "no status"), alone)
	}
	return fmt.Errorf("the gateway of %s has not said that it takes part in changes of keys: it is one of another system or of an older Isthmus, or has just been connected; %s", id, alone)
}

// publicKeyOf returns the public key of a gateway.
func (c *cluster) publicKeyOf(ctx context.Context, g gatewayObject) ([]byte, error) {
	if g.keys == nil {
		return nil, fmt.Errorf("%s %s/%s has no keys yet: see its status", g.resource, g.GetNamespace(), g.GetName())
	}
	var s corev1.Secret
	key := client.ObjectKey{Namespace: cmp.Or(g.keys.Namespace, g.GetNamespace()), Name: g.keys.Name}
	if err := c.client.Get(ctx, key, &s); err != nil {
		return nil, fmt.Errorf("Secret %s with the keys of the gateway: %w", key, err)
	}
	return s.Data[v1beta1.PublicKeyField], nil
}

// wishFor writes the annotation, and returns the ID of the rotation.
func (c *cluster) wishFor(ctx context.Context, g gatewayObject, f rotateFlags) (string, error) {
	id, err := rotation.NewID(rand.Reader)
	if err != nil {
		return "", err
	}
	now := clock(ctx, c.config)().UTC().Truncate(time.Second)
	text, err := rotation.Wish{ID: id, By: c.user(ctx), At: now, Share: f.share, Alone: f.allowLoss, Manner: f.Manner}.Text()
	if err != nil {
		return "", err
	}
	was := g.DeepCopyObject().(client.Object)
	annotations := g.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[v1beta1.AnnotationRotate] = text
	g.SetAnnotations(annotations)
	if err := c.client.Patch(ctx, g.Object, client.MergeFrom(was), client.FieldOwner("isthmusctl")); err != nil {
		return "", fmt.Errorf("annotate %s %s/%s: %w", g.resource, g.GetNamespace(), g.GetName(), err)
	}
	return id, nil
}

// awaitRotation waits until the gateway has told how it ended.
func (c *cluster) awaitRotation(ctx context.Context, g gatewayObject, r *rotateResult, timeout time.Duration) error {
	key := client.ObjectKey{Namespace: g.GetNamespace(), Name: plan.GatewayName(g.GetName())}
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		var conn v1beta1.Connection
		if err := c.client.Get(ctx, key, &conn); err != nil {
			return false, nil // the API server may be busy
		}
		st := conn.Status.Rotation
		if st == nil || st.ID != r.Rotation {
			return false, nil
		}
		r.Phase, r.Message, r.Silence = st.Phase, st.Message, st.Silence
		return st.Phase == string(rotation.Committed) || st.Phase == string(rotation.Aborted), nil
	})
	if wait.Interrupted(err) {
		return fmt.Errorf("waited %v for status.rotation of Connection %s: it is %s; see the events of %s %s and the log of its gateway", timeout, key, cmp.Or(r.Phase, "not there"), g.resource, g.GetName())
	}
	return err
}

// awaitKey waits for the key pair of a rotation that the peer is not asked about.
func (c *cluster) awaitKey(ctx context.Context, g gatewayObject, before []byte, r *rotateResult, timeout time.Duration) error {
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		now, err := c.publicKeyOf(ctx, g)
		if err != nil || bytes.Equal(now, before) {
			return false, nil
		}
		r.Phase, r.PublicKey = string(rotation.Committed), base64.StdEncoding.EncodeToString(now)
		return true, nil
	})
	if wait.Interrupted(err) {
		return fmt.Errorf("waited %v for the controller to change the key pair: see the events of %s %s/%s", timeout, g.resource, g.GetNamespace(), g.GetName())
	}
	return err
}

// String says what was done.
func (r rotateResult) String() string {
	switch {
	case r.PublicKey != "":
		return fmt.Sprintf("The gateway has a new key pair, which it uses within two minutes. In cluster %s, write its public key: kubectl patch publickeies.networking.liqo.io NAME -n NAMESPACE --type merge -p '{\"spec\":{\"publicKey\":\"%s\"}}'", r.ID, r.PublicKey)
	case r.Phase == string(rotation.Committed):
		return fmt.Sprintf("The gateway has a new key pair, and %s knows it. There was no session for %s.", r.ID, cmp.Or(r.Silence, "less than a millisecond"))
	case r.Phase == string(rotation.Aborted):
		return "Nothing has changed: " + r.Message + "."
	}
	return fmt.Sprintf("The keys are changed as soon as the gateway of %s is ready: status.rotation of the Connection says how far that is.", r.ID)
}
