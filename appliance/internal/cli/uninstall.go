package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chartutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/teardown"
)

// uninstallation is one run of uninstall.
type uninstallation struct {
	*program
	purge   bool
	dryRun  bool
	force   bool
	timeout time.Duration
}

func (p *program) uninstallCommand() *cobra.Command {
	u := &uninstallation{program: p}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove Isthmus from a cluster, without a trace",
		Long: `Remove Isthmus from the cluster of the current context: stop the controller,
delete what it has made, have every node undo what is in its kernel and wait until
all have, and then remove what was installed.

The CRDs stay, and with them the objects that you wrote (Configurations,
gateways with their keys, IPs, …), so that an installation that comes after finds
them. --purge removes these as well, and the namespace if isthmusctl made it.
Namespaces of peerings stay: they are yours.`,
		Example: example(
			"isthmusctl uninstall",
			"",
			"# Leave the API as it was before Isthmus was installed.",
			"isthmusctl uninstall --purge",
			"",
			"# Although a node does not come back.",
			"isthmusctl uninstall --force --timeout 30s",
		),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return u.run(cmd.Context()) },
	}
	f := cmd.Flags()
	f.BoolVar(&u.purge, "purge", false, "remove the CRDs and all their objects, too")
	f.BoolVar(&u.dryRun, "dry-run", false, "change nothing: look whether it could be done, and say what would be")
	f.BoolVar(&u.force, "force", false, "go on without nodes that do not answer in time")
	f.DurationVar(&u.timeout, "timeout", 2*time.Minute, "longest `time` that a step may take")
	return cmd
}

// A removal is what uninstall prints as JSON.
type removal struct {
	Release   string `json:"release"`
	Namespace string `json:"namespace"`
	DryRun    bool   `json:"dryRun,omitempty"`
	Purged    bool   `json:"purged"`
	Removed   []ref  `json:"removed"`
	// Kept is how many objects of each CRD stay.
	Kept map[string]int `json:"kept,omitempty"`
}

func (u *uninstallation) run(ctx context.Context) error {
	c, err := loadChart()
	if err != nil {
		return err
	}
	cl, err := u.connect()
	if err != nil {
		return err
	}
	helm, err := u.helm()
	if err != nil {
		return err
	}
	// What a chart of any values has, for its kinds; the objects are found by
	// their labels.
	m, err := render(c, cl.namespace, map[string]any{
		"discovery": map[string]any{"config": map[string]any{"clusterID": "any"}},
		"ipam":      map[string]any{"podCIDRs": []any{"10.0.0.0/16"}, "serviceCIDR": "10.96.0.0/16"},
	}, nil, chartutil.DefaultCapabilities)
	if err != nil {
		return err
	}
	problems, err := cl.checkRights(ctx, manifest{objects: m.objects}, "get", "list", "delete")
	if err != nil {
		return err
	}
	if err := refuse(problems); err != nil {
		return err
	}
	last, err := lastRelease(helm)
	if err != nil {
		return err
	}
	installed, err := cl.installed(ctx, m)
	if err != nil {
		return err
	}
	if last == nil && len(installed) == 0 && !u.purge {
		return fmt.Errorf("there is no installation in namespace %s: name its namespace by --namespace", cl.namespace)
	}
	out := removal{Release: release, Namespace: cl.namespace, DryRun: u.dryRun, Purged: u.purge, Removed: refs(installed)}
	if u.purge {
		out.Removed = append(out.Removed, refs(m.crds)...)
	}
	if u.dryRun {
		return u.tell(out)
	}
	p := &progress{out: u.err}
	err = teardown.Run(ctx, teardown.Config{
		Client: cl.client, Namespace: cl.namespace, Timeout: u.timeout, Force: u.force,
		Progress: func(text string) { p.say("%s", text) },
	})
	if err != nil {
		return fmt.Errorf("%w (run it again when that is mended: what is done stays done)", err)
	}
	if last != nil {
		p.say("removing the release")
		a := action.NewUninstall(helm)
		a.DisableHooks, a.Wait, a.Timeout = true, true, u.timeout // the hook has just been done
		if err := p.during(ctx, cl.notReady, func() error { _, err := a.Run(release); return err }); err != nil {
			return fmt.Errorf("remove the release: %w", err)
		}
	}
	// What was applied without Helm.
	for _, d := range installed {
		if err := cl.client.Delete(ctx, d.object.DeepCopy(), client.PropagationPolicy(metav1.DeletePropagationForeground)); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete %s %s: %w", d.object.GetKind(), d.object.GetName(), err)
		}
	}
	if err := cl.gone(ctx, installed, u.timeout); err != nil {
		return err
	}
	if !u.purge {
		out.Kept, err = cl.kept(ctx, m.crds)
		if err != nil {
			return err
		}
		return u.tell(out)
	}
	p.say("removing %d CRDs with their objects", len(m.crds))
	if err := cl.deleteCRDs(ctx, m.crds); err != nil {
		return err
	}
	if err := cl.deleteNamespace(ctx, u.timeout, p); err != nil {
		return err
	}
	return u.tell(out)
}

// installed returns the objects of the installation, by their labels.
func (c *cluster) installed(ctx context.Context, m manifest) ([]document, error) {
	kinds := map[schema.GroupVersionKind]bool{
		// Those that depend on values.
		{Version: "v1", Kind: "ConfigMap"}:                                  true,
		{Group: "monitoring.coreos.com", Version: "v1", Kind: "PodMonitor"}: true,
	}
	for _, d := range m.objects {
		kinds[d.object.GroupVersionKind()] = true
	}
	var out []document
	for gvk := range kinds {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
		err := c.client.List(ctx, list, client.MatchingLabels{labelPartOf: "isthmus", "app.kubernetes.io/instance": release, v1beta1.LabelManagedBy: "Helm"})
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", gvk.Kind, err)
		}
		for _, o := range list.Items {
			if ns := o.GetNamespace(); ns == "" || ns == c.namespace {
				out = append(out, document{object: &o})
			}
		}
	}
	return out, nil
}

// gone waits until none of the objects is left.
func (c *cluster) gone(ctx context.Context, list []document, timeout time.Duration) error {
	for _, d := range list {
		o := d.object.DeepCopy()
		err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
			err := c.client.Get(ctx, client.ObjectKeyFromObject(d.object), o)
			return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
		})
		if err != nil {
			return fmt.Errorf("%s %s is still there: %w", d.object.GetKind(), d.object.GetName(), err)
		}
	}
	return nil
}

// kept counts the objects of CRDs that stay.
func (c *cluster) kept(ctx context.Context, crds []document) (map[string]int, error) {
	out := map[string]int{}
	for _, d := range crds {
		crd, err := d.crd()
		if err != nil {
			return nil, err
		}
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(schema.GroupVersionKind{Group: crd.Spec.Group, Version: crd.Spec.Versions[0].Name, Kind: crd.Spec.Names.ListKind})
		err = c.client.List(ctx, list)
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", crd.Spec.Names.Plural, err)
		}
		if n := len(list.Items); n > 0 {
			out[crd.Name] = n
		}
	}
	return out, nil
}

// deleteNamespace deletes the namespace of the installation, if isthmusctl made
// it, and waits until it is gone.
func (c *cluster) deleteNamespace(ctx context.Context, timeout time.Duration, p *progress) error {
	var ns corev1.Namespace
	if err := c.client.Get(ctx, client.ObjectKey{Name: c.namespace}, &ns); err != nil {
		return client.IgnoreNotFound(err)
	}
	if ns.Labels[v1beta1.LabelManagedBy] != "isthmusctl" {
		p.say("namespace %s stays: somebody else made it", c.namespace)
		return nil
	}
	if err := c.client.Delete(ctx, &ns); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete Namespace %s: %w", c.namespace, err)
	}
	return p.during(ctx, func(context.Context) string { return "waiting for the end of namespace " + c.namespace }, func() error {
		return c.gone(ctx, []document{{object: &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": c.namespace},
		}}}}, timeout)
	})
}

// tell prints the result.
func (u *uninstallation) tell(r removal) error {
	if u.json {
		return u.print(r)
	}
	if r.DryRun {
		for _, o := range r.Removed {
			fmt.Fprintf(u.out, "%s %s\n", o.Kind, o.Name)
		}
		fmt.Fprintf(u.out, "%d objects of namespace %s and of the cluster would be removed, and the kernels of all nodes restored. Nothing was changed.\n", len(r.Removed), r.Namespace)
		return nil
	}
	fmt.Fprintf(u.out, "Isthmus is gone from namespace %s and from the kernels of all nodes.\n", r.Namespace)
	total := 0
	for _, n := range r.Kept {
		total += n
	}
	if total > 0 {
		fmt.Fprintf(u.out, "%d objects that you wrote stay, with their CRDs: isthmusctl uninstall --purge removes them.\n", total)
	} else if !r.Purged {
		fmt.Fprintln(u.out, "The CRDs stay: isthmusctl uninstall --purge removes them.")
	}
	return nil
}
