// Package deploy brings the appliance into the clusters of a lab, the way an
// operator would: the chart rendered by Helm's SDK, or isthmusctl; the pods of
// the topology, and each peering as the plain objects that a user writes.
// Nothing is set up behind the API server's back; the only difference to
// production is that image names stand for local binaries.
package deploy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// Names of what the lab installs.
const (
	Release      = "isthmus"
	Namespace    = networkingv1beta1.DefaultNamespace
	PodNamespace = "default" // of the topology's pods

	// Image and ProbeImage are mapped to local binaries by the lab's kubelet.
	Image      = "isthmus:dev"
	ProbeImage = "isthmus-lab/probe:dev"
)

// Clusters gives access to the API servers of a lab.
type Clusters interface {
	RESTConfig(cluster string) (*rest.Config, error)
}

// Config is what to install. Topology, Overlay, Clusters and ChartDir are
// required, and Exec where the topology is installed by isthmusctl.
type Config struct {
	Topology *topology.Topology
	Overlay  networkingv1beta1.Overlay
	Clusters Clusters
	ChartDir string
	Exec     ExecFunc
	OwnDNS   bool        // the clusters bring a DNS server, as those of kubeadm do
	Progress func(Phase) // optional; called when a phase ends
	// Services returns when all nodes reach Services; optional. Daemons that
	// start before that fail and start again.
	Services func(ctx context.Context) error
	// Reach returns when a pod of one cluster has had an answer from a pod of
	// the other; optional. It is called as soon as both sides of a peering
	// have each other's key.
	Reach func(ctx context.Context, from, to topology.Pod) error
}

// A Phase is a step of the installation that has ended.
type Phase struct {
	Name string
	Took time.Duration
}

// Result holds what Install measured.
type Result struct {
	// PeeringApplied is the moment when the first object of the first
	// peering was sent to an API server, or when the appliance was ready,
	// whatever came last.
	PeeringApplied time.Time
	// FirstReply is when the last of the peerings had its first answer from
	// one pod to another; zero when Config.Reach is nil, or no two pods of the
	// topology are on the two sides of a peering.
	FirstReply time.Time
	Phases     []Phase
}

// An installer carries what the steps share.
type installer struct {
	cfg     Config
	clients map[string]client.Client
	// services returns when all nodes reach Services, if anybody knows.
	services func(context.Context) error
	mu       sync.Mutex
	result   Result
}

// Install brings everything of the topology into the clusters and waits
// until it has converged: all pods ready, every tunnel connected, every
// object applied on every host that it is meant for. The error says what is
// still missing.
func Install(ctx context.Context, cfg Config) (Result, error) {
	if cfg.Topology == nil || cfg.Overlay == "" || cfg.Clusters == nil || cfg.ChartDir == "" || cfg.Exec == nil && cfg.Topology.Install == topology.InstallCLI {
		return Result{}, errors.New("deploy: Topology, Overlay, Clusters and ChartDir are required, and Exec for isthmusctl")
	}
	in := &installer{cfg: cfg, clients: map[string]client.Client{}, services: once(cfg.Services)}
	for _, c := range cfg.Topology.Clusters {
		cl, err := NewClient(cfg.Clusters, c.Name)
		if err != nil {
			return in.result, err
		}
		in.clients[c.Name] = cl
	}
	for _, together := range in.phases() {
		if err := in.run(ctx, together); err != nil {
			return in.result, err
		}
	}
	return in.result, nil
}

// phases are what there is to do, those side by side that can be.
func (in *installer) phases() [][]phase {
	pods := []phase{{"pods created", in.each(in.createPods)}}
	if !in.cfg.OwnDNS && slices.ContainsFunc(in.cfg.Topology.Clusters, hasDNS) {
		pods = append(pods, phase{"CoreDNS created", in.each(in.createDNS)})
	}
	converged := []phase{{"converged", in.waitConverged}}
	// The objects of peerings may come before the appliance is ready: it
	// finds them when it starts.
	ready := []phase{{"appliance ready", in.applianceReady}, {"peerings connected", in.connectPeerings}}
	switch in.cfg.Topology.Install {
	case topology.InstallNone:
		return [][]phase{pods, {{"converged", in.waitUntouched}}}
	case topology.InstallCLI:
		return [][]phase{append(pods, phase{"installed by isthmusctl", in.runInstall}), ready, converged}
	}
	return [][]phase{append(pods, phase{"chart installed", in.installCharts}), ready, converged}
}

// waitUntouched waits until clusters in which nothing is installed are complete. Scenarios
// compare with how they were then, and what kube-proxies write is part of that.
func (in *installer) waitUntouched(ctx context.Context) error {
	if err := in.services(ctx); err != nil {
		return err
	}
	return in.waitConverged(ctx)
}

// A phase is a step of the installation.
type phase struct {
	name string
	run  func(context.Context) error
}

// run runs phases side by side.
func (in *installer) run(ctx context.Context, together []phase) error {
	g, ctx := errgroup.WithContext(ctx)
	start := time.Now()
	for _, s := range together {
		g.Go(func() error {
			if err := s.run(ctx); err != nil {
				return fmt.Errorf("until %q: %w", s.name, err)
			}
			p := Phase{Name: s.name, Took: time.Since(start)}
			in.mu.Lock()
			defer in.mu.Unlock()
			in.result.Phases = append(in.result.Phases, p)
			if in.cfg.Progress != nil {
				in.cfg.Progress(p)
			}
			return nil
		})
	}
	return g.Wait()
}

// NewClient returns a client for a cluster of the lab that knows the
// appliance's kinds.
func NewClient(clusters Clusters, name string) (client.Client, error) {
	cfg, err := clusters.RESTConfig(name)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	cfg.QPS = -1 // the API server's own fairness is enough
	cl, err := client.New(cfg, client.Options{Scheme: Scheme()})
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	return cl, nil
}

// Scheme returns the kinds of Kubernetes and of the appliance.
func Scheme() *runtime.Scheme {
	s := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(s))
	utilruntime.Must(networkingv1beta1.AddToScheme(s))
	utilruntime.Must(ipamv1alpha1.AddToScheme(s))
	utilruntime.Must(corev1beta1.AddToScheme(s))
	return s
}

// each makes a step of one that runs in all clusters at once.
func (in *installer) each(run func(context.Context, topology.Cluster, client.Client) error) func(context.Context) error {
	return func(ctx context.Context) error {
		g, ctx := errgroup.WithContext(ctx)
		for _, c := range in.cfg.Topology.Clusters {
			g.Go(func() error {
				if err := run(ctx, c, in.clients[c.Name]); err != nil {
					return fmt.Errorf("cluster %s: %w", c.Name, err)
				}
				return nil
			})
		}
		return g.Wait()
	}
}

// installCharts installs the chart in all clusters at once: what the daemons
// run on as soon as the nodes reach Services, everything else before.
func (in *installer) installCharts(ctx context.Context) error {
	services := make(chan struct{})
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		if err := in.services(ctx); err != nil {
			return err
		}
		close(services)
		return nil
	})
	g.Go(func() error {
		return in.each(func(ctx context.Context, c topology.Cluster, cl client.Client) error {
			return in.installChart(ctx, c, cl, services)
		})(ctx)
	})
	return g.Wait()
}

// once makes a function that several steps call, and the first one's call counts
// for all: they end together when it fails. Nil is a function without effect.
func once(run func(context.Context) error) func(context.Context) error {
	var first sync.Once
	var err error
	return func(ctx context.Context) error {
		first.Do(func() {
			if run != nil {
				err = run(ctx)
			}
		})
		return err
	}
}

// runInstall runs isthmusctl in all clusters at once, as soon as what it
// installs can start.
func (in *installer) runInstall(ctx context.Context) error {
	if err := in.services(ctx); err != nil {
		return err
	}
	o := Operator{Topology: in.cfg.Topology, Overlay: in.cfg.Overlay, Clusters: in.cfg.Clusters, ChartDir: in.cfg.ChartDir, Exec: in.cfg.Exec}
	return in.each(func(ctx context.Context, c topology.Cluster, _ client.Client) error {
		return o.Install(ctx, c.Name, nil)
	})(ctx)
}

func (in *installer) installChart(ctx context.Context, c topology.Cluster, cl client.Client, services <-chan struct{}) error {
	m, err := Render(in.cfg.ChartDir, Release, Namespace, Values(in.cfg.Topology, in.cfg.Overlay, c))
	if err != nil {
		return err
	}
	ns := newUnstructured("v1", "Namespace")
	ns.SetName(Namespace)
	// What the daemons need (host network, NET_ADMIN) is beyond the
	// baseline of Pod Security; `helm install --create-namespace` leaves
	// this label to the operator.
	ns.SetLabels(map[string]string{"pod-security.kubernetes.io/enforce": "privileged"})
	if err := applyOne(ctx, cl, ns); err != nil {
		return err
	}
	var others, workloads []*unstructured.Unstructured
	for _, o := range m.Objects {
		if o.GetKind() == "DaemonSet" || o.GetKind() == "Deployment" {
			workloads = append(workloads, o)
		} else {
			others = append(others, o)
		}
	}
	crds, err := missingCRDs(ctx, cl, m.CRDs)
	if err != nil {
		return err
	}
	if err := applyTogether(ctx, cl, append(crds, others...)); err != nil {
		return err
	}
	select {
	case <-services:
	case <-ctx.Done():
		return ctx.Err()
	}
	return applyTogether(ctx, cl, workloads)
}

// missingCRDs returns those that the cluster has not: as helm install does, those
// that are there stay as they are.
func missingCRDs(ctx context.Context, cl client.Client, crds []*unstructured.Unstructured) ([]*unstructured.Unstructured, error) {
	have := &metav1.PartialObjectMetadataList{}
	have.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinitionList"))
	if err := cl.List(ctx, have); err != nil {
		return nil, fmt.Errorf("list CRDs: %w", err)
	}
	return slices.DeleteFunc(slices.Clone(crds), func(crd *unstructured.Unstructured) bool {
		return slices.ContainsFunc(have.Items, func(h metav1.PartialObjectMetadata) bool { return h.Name == crd.GetName() })
	}), nil
}

// Values are what an operator of a cluster would pass to helm install.
func Values(t *topology.Topology, by networkingv1beta1.Overlay, c topology.Cluster) map[string]any {
	implementation, netns := topology.ImplementationAuto, false
	for _, p := range t.Peerings {
		netns = netns || p.Gateways == topology.GatewaysNetNS
		if (p.Server == c.Name || p.Client == c.Name) && p.Implementation != "" {
			implementation = p.Implementation
		}
	}
	overlay := string(by)
	if t.Overlay != "" {
		overlay = t.Overlay
	}
	values := map[string]any{
		"discovery": map[string]any{"config": map[string]any{"clusterID": c.Name}},
		"ipam": map[string]any{
			"podCIDRs":     []any{c.PodCIDR.String()},
			"serviceCIDR":  c.ServiceCIDR.String(),
			"externalCIDR": c.ExternalCIDR.String(),
			"internalCIDR": c.InternalCIDR.String(),
		},
		"controllerManager": map[string]any{"replicas": cmp.Or(c.Controllers, 1)},
		"networking": map[string]any{
			"overlay": overlay,
			"gatewayTemplates": map[string]any{
				"wireguard": map[string]any{"implementation": implementation},
				"netns":     map[string]any{"enabled": netns},
			},
		},
	}
	// containerd has the image that is released, under the chart's own name.
	if c.Runtime != topology.RuntimeContainerd {
		values["image"] = map[string]any{"name": "isthmus", "version": "dev"}
	}
	return values
}

// applianceReady waits for the appliance in all clusters.
func (in *installer) applianceReady(ctx context.Context) error {
	if err := in.each(in.waitAppliance)(ctx); err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.result.PeeringApplied = latest(in.result.PeeringApplied, time.Now())
	return nil
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// waitAppliance waits until the controller runs and every node's daemon is
// ready.
func (in *installer) waitAppliance(ctx context.Context, c topology.Cluster, cl client.Client) error {
	return Poll(ctx, 3*time.Minute, func(ctx context.Context) (string, error) {
		return podsReady(ctx, cl, client.InNamespace(Namespace), len(c.Present())+1)
	})
}

func notReady(p *corev1.Pod) string {
	return fmt.Sprintf("pod %s/%s is not ready: %s", p.Namespace, p.Name, whyNotReady(p))
}

// podsReady returns why not all of at least n pods are ready.
func podsReady(ctx context.Context, cl client.Client, where client.ListOption, n int) (string, error) {
	var pods corev1.PodList
	if err := cl.List(ctx, &pods, where); err != nil {
		return err.Error(), nil
	}
	for _, p := range pods.Items {
		if !podReady(&p) {
			return notReady(&p), nil
		}
	}
	if len(pods.Items) < n {
		return fmt.Sprintf("%d of %d pods exist", len(pods.Items), n), nil
	}
	return "", nil
}
