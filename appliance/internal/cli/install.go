package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	helmrelease "helm.sh/helm/v3/pkg/release"
	"helm.sh/helm/v3/pkg/storage/driver"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// installation is what install and upgrade have in common.
type installation struct {
	*program
	values        values
	dryRun        bool
	output        string
	crds          string
	wait          bool
	timeout       time.Duration
	takeOwnership bool
	replaceCRDs   bool
	upgrade       bool
}

func (p *program) installCommand() *cobra.Command {
	i := &installation{program: p}
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install Isthmus in a cluster",
		Long: `Install Isthmus in the cluster of the current context, and wait until it runs,
with the gateways that are asked for already.

First it looks for whatever would make that fail or do damage: wrong values,
permissions that you lack, older CRDs, kernels that are too old, the network of
Liqo at work. If there is anything, nothing is changed.

The networks of pods and Services are found where the cluster tells them. What it
does not tell is asked for by the name of the value. The same objects are made by
"helm install isthmus k8s/chart" and by applying what --output yaml prints.`,
		Example: example(
			"# The name by which peers will know this cluster is all that is always needed.",
			"isthmusctl install --set discovery.config.clusterID=milan",
			"",
			"# See what would be installed, and whether it could be.",
			"isthmusctl install --set discovery.config.clusterID=milan --dry-run",
			"",
			"# Plain manifests, without a cluster: the kinds first, then the rest.",
			"isthmusctl install -f values.yaml --output yaml --crds only | kubectl apply --server-side -f -",
			"isthmusctl install -f values.yaml --output yaml --crds skip | kubectl apply -f -",
		),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return i.run(cmd.Context()) },
	}
	i.flags(cmd)
	cmd.Flags().BoolVar(&i.replaceCRDs, "replace-crds", false, "bring CRDs that are older than this program up to date; their objects stay")
	return cmd
}

func (p *program) upgradeCommand() *cobra.Command {
	i := &installation{program: p, upgrade: true}
	cmd := &cobra.Command{
		Use:   "upgrade",
		Short: "Bring an installation up to date, or change its values",
		Long: `Bring the installation up to the version of this program, CRDs first, and wait
until all its pods run, those of gateways among them: the controller replaces
them when the templates have changed. Values that were given before stay unless
they are given again. What is in the kernels of nodes stays and goes on forwarding
while daemons are replaced; through a gateway nothing passes until the new one is
there.`,
		Example: example(
			"isthmusctl upgrade",
			"isthmusctl upgrade --set networking.overlay=auto",
			"isthmusctl upgrade --set metrics.enabled=true --dry-run",
		),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return i.run(cmd.Context()) },
	}
	i.flags(cmd)
	return cmd
}

func (i *installation) flags(cmd *cobra.Command) {
	i.values.add(cmd)
	f := cmd.Flags()
	f.BoolVar(&i.dryRun, "dry-run", false, "change nothing: look whether it could be done, and say what would be")
	f.StringVarP(&i.output, "output", "o", "", "`yaml`: print the manifests and change nothing; asks no cluster when ipam.podCIDRs and ipam.serviceCIDR are given")
	f.StringVar(&i.crds, "crds", "include", "with --output yaml: `include` the CRDs, print them only, or skip them")
	f.BoolVar(&i.wait, "wait", true, "wait until all pods run, and all gateways are those of the present templates")
	f.DurationVar(&i.timeout, "timeout", 5*time.Minute, "longest `time` to wait, for all of it together")
	f.BoolVar(&i.takeOwnership, "take-ownership", false, "make objects that are there already part of the release")
}

// A result is what install and upgrade print as JSON.
type result struct {
	Release   string `json:"release"`
	Namespace string `json:"namespace"`
	Revision  int    `json:"revision,omitempty"`
	Version   string `json:"version"`
	ClusterID string `json:"clusterID"`
	DryRun    bool   `json:"dryRun,omitempty"`
	Objects   []ref  `json:"objects"`
	// Gateways are those that run as the templates say now, if that was waited
	// for.
	Gateways []ref `json:"gateways,omitempty"`
	// Warnings say what will not work with these values in this cluster.
	Warnings []string `json:"warnings,omitempty"`
}

// A ref names an object.
type ref struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Namespace  string `json:"namespace,omitempty"`
	Name       string `json:"name"`
}

func refs(list []document) []ref {
	out := make([]ref, 0, len(list))
	for _, d := range list {
		out = append(out, ref{d.object.GetAPIVersion(), d.object.GetKind(), d.object.GetNamespace(), d.object.GetName()})
	}
	return out
}

func (i *installation) run(ctx context.Context) error {
	if i.output != "" && i.output != "yaml" {
		return fmt.Errorf("--output %q: only yaml is known; --json prints the result of an installation", i.output)
	}
	if i.crds != "include" && i.crds != "only" && i.crds != "skip" {
		return fmt.Errorf("--crds %q: write include, only or skip", i.crds)
	}
	c, err := loadChart()
	if err != nil {
		return err
	}
	given, err := i.values.merged(i.in)
	if err != nil {
		return err
	}
	if i.output == "yaml" && !i.upgrade && networksGiven(given) {
		m, err := render(c, *i.cluster.Namespace, given, nil, chartutil.DefaultCapabilities)
		if err != nil {
			return err
		}
		if err := refuse(checkNetworks(m.objects)); err != nil {
			return err
		}
		return i.printYAML(m)
	}
	cl, err := i.connect()
	if err != nil {
		return err
	}
	helm, err := i.helm()
	if err != nil {
		return err
	}
	// Before anything is read that takes a permission.
	problems, err := cl.checkRights(ctx, manifest{})
	if err != nil {
		return err
	}
	if err := refuse(problems); err != nil {
		return err
	}
	all := given
	last, err := lastRelease(helm)
	switch {
	case err != nil:
		return err
	case i.upgrade && last == nil:
		return fmt.Errorf("there is no installation in namespace %s to upgrade: use isthmusctl install, or name the namespace by --namespace", cl.namespace)
	case i.upgrade:
		all = mergeValues(last.Config, given)
	case last != nil && i.output == "" && last.Info.Status != helmrelease.StatusUninstalled:
		return fmt.Errorf("it is installed in namespace %s already (revision %d, %s): use isthmusctl upgrade to change it, or isthmusctl uninstall", cl.namespace, last.Version, last.Info.Status)
	}
	m, err := render(c, cl.namespace, all, cl.config, cl.capabilities)
	if err != nil {
		return err
	}
	if i.output == "yaml" {
		return i.printYAML(m)
	}
	if err := cl.preflight(ctx, m, i.upgrade, i.takeOwnership, i.replaceCRDs); err != nil {
		return err
	}
	out := result{Release: release, Namespace: cl.namespace, Version: c.Metadata.AppVersion, ClusterID: clusterID(m), DryRun: i.dryRun, Objects: refs(m.objects)}
	p := &progress{out: i.err}
	if text := cl.spoofing(ctx, all); text != "" {
		out.Warnings = append(out.Warnings, text)
		p.say("warning: %s", text)
	}
	if i.dryRun {
		return i.tell(out)
	}
	start := time.Now()
	rel, err := i.apply(ctx, cl, helm, c, m, given, p)
	if err != nil {
		return err
	}
	out.Revision = rel.Version
	if i.wait {
		if out.Gateways, err = cl.awaitGateways(ctx, start, i.timeout, p); err != nil {
			return err
		}
	}
	return i.tell(out)
}

// networksGiven reports whether the chart has nothing to find out.
func networksGiven(v map[string]any) bool {
	ipam, _ := v["ipam"].(map[string]any)
	pods, _ := ipam["podCIDRs"].([]any)
	pod, _ := ipam["podCIDR"].(string)
	service, _ := ipam["serviceCIDR"].(string)
	return (len(pods) > 0 || pod != "") && service != ""
}

// clusterID is the ID that a manifest gives the cluster.
func clusterID(m manifest) string {
	for _, d := range m.objects {
		if d.object.GetKind() == "ConfigMap" && d.object.GetName() == v1beta1.ClusterIDConfigMap {
			id, _, _ := unstructured.NestedString(d.object.Object, "data", v1beta1.ClusterIDKey)
			return id
		}
	}
	return ""
}

// lastRelease returns the newest revision of the release; nil: there is none.
func lastRelease(helm *action.Configuration) (*helmrelease.Release, error) {
	rel, err := helm.Releases.Last(release)
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for the release: %w", err)
	}
	return rel, nil
}

// namespaceObject is the namespace of an installation. The level of Pod Security
// is what a host network and NET_ADMIN need; the label says that isthmusctl may
// remove it.
func namespaceObject(name string) *corev1.Namespace {
	return &corev1.Namespace{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			v1beta1.LabelManagedBy: "isthmusctl", "pod-security.kubernetes.io/enforce": "privileged",
		}},
	}
}

// printYAML prints what kubectl apply is to have.
func (i *installation) printYAML(m manifest) error {
	var docs []string
	if i.crds != "only" {
		ns, err := yaml.Marshal(map[string]any{
			"apiVersion": "v1", "kind": "Namespace",
			"metadata": map[string]any{"name": *i.cluster.Namespace, "labels": namespaceObject("").Labels},
		})
		if err != nil {
			return err
		}
		docs = append(docs, string(ns))
	}
	if i.crds != "skip" {
		for _, d := range m.crds {
			docs = append(docs, d.text)
		}
	}
	if i.crds != "only" {
		for _, d := range m.objects {
			docs = append(docs, d.text)
		}
	}
	for _, text := range docs {
		if _, err := fmt.Fprintf(i.out, "---\n%s\n", strings.TrimSpace(text)); err != nil {
			return err
		}
	}
	return nil
}

// apply carries the installation out.
func (i *installation) apply(ctx context.Context, cl *cluster, helm *action.Configuration, c *chart.Chart, m manifest, given map[string]any, p *progress) (rel *helmrelease.Release, err error) {
	if err := cl.client.Create(ctx, namespaceObject(cl.namespace), fieldOwner); err == nil {
		p.say("namespace %s created", cl.namespace)
	} else if !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create Namespace %s: %w", cl.namespace, err)
	}
	crds := cl.createCRDs
	if i.upgrade || i.replaceCRDs {
		p.say("bringing %d CRDs up to date", len(m.crds))
		crds = cl.applyCRDs
	}
	if err := crds(ctx, m.crds); err != nil {
		return nil, err
	}
	p.say("%s Isthmus %s in namespace %s", map[bool]string{false: "installing", true: "upgrading"}[i.upgrade], c.Metadata.AppVersion, cl.namespace)
	err = p.during(ctx, cl.notReady, func() error {
		var err error
		if i.upgrade {
			a := action.NewUpgrade(helm)
			a.Namespace, a.Wait, a.Timeout, a.TakeOwnership, a.SkipCRDs = cl.namespace, i.wait, i.timeout, i.takeOwnership, true
			a.ResetThenReuseValues = true
			rel, err = a.RunWithContext(ctx, release, c, given)
			return err
		}
		a := action.NewInstall(helm)
		a.ReleaseName, a.Namespace, a.Wait, a.Timeout, a.TakeOwnership, a.SkipCRDs = release, cl.namespace, i.wait, i.timeout, i.takeOwnership, true
		rel, err = a.RunWithContext(ctx, c, given)
		return err
	})
	if err != nil {
		why := cl.notReady(context.WithoutCancel(ctx))
		if why != "" {
			why = "; " + why
		}
		return nil, fmt.Errorf("%w%s: see kubectl describe pods -n %s; try again by isthmusctl upgrade, or take everything back by isthmusctl uninstall", err, why, cl.namespace)
	}
	return rel, nil
}

// notReady says which pods of the installation do not run yet; empty: none.
func (c *cluster) notReady(ctx context.Context) string {
	var list corev1.PodList
	if err := c.client.List(ctx, &list, client.InNamespace(c.namespace), client.MatchingLabels{labelPartOf: "isthmus"}); err != nil {
		return ""
	}
	waiting := ""
	n := 0
	for _, pod := range list.Items {
		why := kube.PodTrouble(pod)
		if why == "" {
			continue
		}
		n++
		if waiting == "" {
			waiting = fmt.Sprintf("%s (%s)", pod.Name, why)
		}
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("waiting for %d of %d pods, among them %s", n, len(list.Items), waiting)
}

// tell prints the result.
func (i *installation) tell(r result) error {
	if i.json {
		return i.print(r)
	}
	if r.DryRun {
		for _, o := range r.Objects {
			fmt.Fprintln(i.out, strings.TrimSpace(fmt.Sprintf("%s %s", o.Kind, strings.TrimPrefix(o.Namespace+"/"+o.Name, "/"))))
		}
		fmt.Fprintf(i.out, "Isthmus %s could be %s in namespace %s as cluster %s: %d objects. Nothing was changed.\n",
			r.Version, map[bool]string{false: "installed", true: "upgraded"}[i.upgrade], r.Namespace, r.ClusterID, len(r.Objects))
		return nil
	}
	gateways := ""
	if n := len(r.Gateways); n > 0 {
		gateways = fmt.Sprintf(", and %d of its gateways run as the templates say", n)
	}
	_, err := fmt.Fprintf(i.out, "Isthmus %s runs in namespace %s as cluster %s (revision %d)%s.\n", r.Version, r.Namespace, r.ClusterID, r.Revision, gateways)
	return err
}
