package cli

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	model "github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/access"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A keyBlock is what peer block --key and peer unblock --key print as JSON, and a line of
// peer block --list.
type keyBlock struct {
	Fingerprint string   `json:"fingerprint"`
	Blocked     bool     `json:"blocked"`
	Block       string   `json:"block,omitempty"`      // by whom, when and why
	PublicKeys  []string `json:"publicKeys,omitempty"` // those that have the key, as namespace/name
	Changed     bool     `json:"changed"`
	Applied     bool     `json:"applied,omitempty"` // --wait: the gateways have said so
}

// parseKey returns the fingerprint of a public key, or the one that is written.
func parseKey(text string) (model.Fingerprint, error) {
	if key, err := base64.StdEncoding.DecodeString(text); err == nil && len(key) == len(netstate.Key{}) {
		return model.FingerprintOf(key), nil
	}
	f, err := model.ParseFingerprint(text)
	if err != nil {
		return f, fmt.Errorf("--key %q: %w, or the base64 of a public key, as spec.publicKey of a PublicKey has it", text, err)
	}
	return f, nil
}

// setKeyBlock blocks the key, or ends that, and tells what became of it.
func (p *program) setKeyBlock(ctx context.Context, text string, block bool, reason string, wait waitFlags) error {
	if err := wait.check(); err != nil {
		return err
	}
	f, err := parseKey(text)
	if err != nil {
		return err
	}
	c, err := p.connect()
	if err != nil {
		return err
	}
	verbs := []string{"list", "patch"}
	if block {
		verbs = append(verbs, "create")
	}
	var rights []access.Right
	for _, verb := range verbs {
		rights = append(rights, access.Right{Verb: verb, Resource: "configmaps", Namespace: c.namespace})
	}
	rights = append(rights, access.Right{Verb: "list", Group: v1beta1.GroupVersion.Group, Resource: "publickeies"})
	if wait.wait {
		rights = append(rights, access.Right{Verb: "list", Group: v1beta1.GroupVersion.Group, Resource: "connections"})
	}
	lacking, err := access.Missing(ctx, c.client, rights)
	if err != nil {
		return err
	}
	if len(lacking) > 0 {
		return fmt.Errorf("nothing was changed: you may not %s: ask an administrator of the cluster at %s for this right", lacking[0], c.config.Host)
	}
	if err := c.installedHere(ctx); err != nil {
		return err
	}
	of, err := c.publicKeysOf(ctx, f)
	if err != nil {
		return err
	}
	r := keyBlock{Fingerprint: f.String(), Blocked: block}
	for _, k := range of {
		r.PublicKeys = append(r.PublicKeys, k.Namespace+"/"+k.Name)
	}
	if block {
		err = c.blockKey(ctx, f, reason, &r)
	} else {
		err = c.unblockKey(ctx, f, &r)
	}
	if err != nil {
		return err
	}
	w := blockWait{what: "the key " + r.Fingerprint, done: "is no longer blocked", blocked: block}
	if block {
		w.done = "is blocked"
	}
	for _, k := range of {
		w.peerings = append(w.peerings, peering{k.Labels[v1beta1.LabelRemoteClusterID], k.Namespace})
	}
	return p.endBlock(ctx, c, w, wait, &r.Applied, &r)
}

// String says what was done.
func (r keyBlock) String() string {
	of := "No PublicKey has it now."
	if len(r.PublicKeys) > 0 {
		of = "PublicKeys that have it: " + strings.Join(r.PublicKeys, ", ") + "."
	}
	switch {
	case r.Blocked && r.Applied:
		return fmt.Sprintf("The key %s is blocked: this cluster's gateways have taken it out of WireGuard. %s To end that: isthmusctl peer unblock --key %s", r.Fingerprint, of, r.Fingerprint)
	case r.Applied:
		return fmt.Sprintf("The key %s is no longer blocked, and its gateway is connected again. %s", r.Fingerprint, of)
	case r.Blocked && r.Changed:
		return fmt.Sprintf("The key %s is blocked, in whatever object it is: gateways take it out of WireGuard as soon as they have read that. %s", r.Fingerprint, of)
	case r.Blocked:
		return fmt.Sprintf("The key %s is blocked already (%s): nothing to do. %s", r.Fingerprint, orNoReason(r.Block), of)
	case r.Changed:
		return fmt.Sprintf("The key %s is no longer blocked. %s", r.Fingerprint, of)
	}
	return fmt.Sprintf("The key %s is not blocked: nothing to do.", r.Fingerprint)
}

// installedHere returns an error where the namespace is not that of the installation:
// nobody would read what is blocked in it.
func (c *cluster) installedHere(ctx context.Context) error {
	var ids corev1.ConfigMapList
	err := c.client.List(ctx, &ids, client.InNamespace(c.namespace), client.MatchingLabels{v1beta1.LabelAppName: v1beta1.ClusterIDConfigMap})
	if err != nil {
		return fmt.Errorf("list configmaps in namespace %s: %w", c.namespace, err)
	}
	if len(ids.Items) == 0 {
		return fmt.Errorf("nothing was changed: Isthmus is not installed in namespace %s of the cluster at %s: name its namespace by --namespace, or isthmusctl install", c.namespace, c.config.Host)
	}
	return nil
}

// publicKeysOf returns the PublicKeys with a key, of all peers.
func (c *cluster) publicKeysOf(ctx context.Context, f model.Fingerprint) ([]v1beta1.PublicKey, error) {
	var all v1beta1.PublicKeyList
	if err := c.client.List(ctx, &all); meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("Isthmus is not installed in the cluster at %s: isthmusctl install", c.config.Host)
	} else if err != nil {
		return nil, fmt.Errorf("list publickeies.%s: %w", v1beta1.GroupVersion.Group, err)
	}
	return slices.DeleteFunc(all.Items, func(k v1beta1.PublicKey) bool {
		key, _, _ := k.Current()
		return model.FingerprintOf(key) != f
	}), nil
}

// readBlockedKeys reads the ConfigMap of the keys that are blocked, in the namespace of the
// installation. Where that does not exist, the one returned is empty and has no UID. It
// takes the right to list ConfigMaps of this name.
func readBlockedKeys(ctx context.Context, c client.Client, namespace string) (*corev1.ConfigMap, error) {
	var list corev1.ConfigMapList
	err := c.List(ctx, &list, client.InNamespace(namespace), client.MatchingFields{"metadata.name": v1beta1.BlockedKeysConfigMap})
	switch {
	case err != nil:
		return nil, fmt.Errorf("read ConfigMap %s/%s: %w", namespace, v1beta1.BlockedKeysConfigMap, err)
	case len(list.Items) > 0:
		return &list.Items[0], nil
	}
	o := &corev1.ConfigMap{}
	o.Namespace, o.Name = namespace, v1beta1.BlockedKeysConfigMap
	return o, nil
}

// entries are the keys of the data that are a fingerprint, however it is written.
func entries(o *corev1.ConfigMap, f model.Fingerprint) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(o.Data)), func(text string) bool {
		got, err := model.ParseFingerprint(text)
		return err != nil || got != f
	})
}

// blockKey adds a key to those that are blocked, and says in r what there is of it then.
func (c *cluster) blockKey(ctx context.Context, f model.Fingerprint, reason string, r *keyBlock) error {
	for {
		o, err := readBlockedKeys(ctx, c.client, c.namespace)
		if err != nil {
			return err
		}
		if have := entries(o, f); len(have) > 0 {
			r.Block = o.Data[have[0]]
			return nil
		}
		text := c.blockText(ctx, time.Now(), reason)
		was := o.DeepCopy()
		if o.Data == nil {
			o.Data = map[string]string{}
		}
		o.Data[f.String()] = text
		if o.UID == "" {
			o.Labels = map[string]string{v1beta1.LabelAppName: v1beta1.BlockedKeysConfigMap}
			if err = c.client.Create(ctx, o, peer.FieldOwner); apierrors.IsAlreadyExists(err) {
				continue // somebody else has made it meanwhile
			}
		} else {
			err = c.client.Patch(ctx, o, client.MergeFrom(was), peer.FieldOwner)
		}
		if err != nil {
			return fmt.Errorf("write ConfigMap %s/%s: %w", was.Namespace, was.Name, err)
		}
		r.Block, r.Changed = text, true
		return nil
	}
}

// unblockKey takes a key from those that are blocked.
func (c *cluster) unblockKey(ctx context.Context, f model.Fingerprint, r *keyBlock) error {
	o, err := readBlockedKeys(ctx, c.client, c.namespace)
	if err != nil {
		return err
	}
	was := o.DeepCopy()
	for _, text := range entries(o, f) {
		delete(o.Data, text)
		r.Changed = true
	}
	if !r.Changed {
		return nil
	}
	if err := c.client.Patch(ctx, o, client.MergeFrom(was), peer.FieldOwner); err != nil {
		return fmt.Errorf("write ConfigMap %s/%s: %w", o.Namespace, o.Name, err)
	}
	return nil
}

// blockedKeys returns all keys that are blocked, and who has them.
func (c *cluster) blockedKeys(ctx context.Context) ([]keyBlock, error) {
	o, err := readBlockedKeys(ctx, c.client, c.namespace)
	if err != nil {
		return nil, err
	}
	out := []keyBlock{}
	list, _ := kube.BlockedKeys(o) // of what is no fingerprint the controller tells
	for _, k := range list {
		b := keyBlock{Fingerprint: k.Fingerprint.String(), Blocked: true, Block: k.Why}
		of, err := c.publicKeysOf(ctx, k.Fingerprint)
		if err != nil {
			return nil, err
		}
		for _, key := range of {
			b.PublicKeys = append(b.PublicKeys, key.Namespace+"/"+key.Name)
		}
		out = append(out, b)
	}
	return out, nil
}

// listBlockedKeys prints the keys that are blocked.
func (p *program) listBlockedKeys(ctx context.Context) error {
	c, err := p.connect()
	if err != nil {
		return err
	}
	list, err := c.blockedKeys(ctx)
	if err != nil {
		return err
	}
	if p.json {
		return p.print(list)
	}
	if len(list) == 0 {
		_, err := fmt.Fprintln(p.out, "No key is blocked.")
		return err
	}
	return printBlockedKeys(p.out, list)
}

func printBlockedKeys(out io.Writer, list []keyBlock) error {
	var table bytes.Buffer
	w := tabwriter.NewWriter(&table, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "BLOCKED KEY\tPUBLICKEYS\tWHY")
	for _, b := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\n", b.Fingerprint, orDash(strings.Join(b.PublicKeys, ", ")), orDash(b.Block))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := out.Write(table.Bytes())
	return err
}
