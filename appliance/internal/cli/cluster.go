package cli

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chartutil"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// A cluster is the one that is worked on.
type cluster struct {
	config       *rest.Config
	client       client.Client
	clients      kubernetes.Interface
	capabilities *chartutil.Capabilities
	namespace    string
}

// clockTime is how long a cluster may take to tell its time.
const clockTime = 5 * time.Second

// clock returns the clock of a cluster, by which its controller judges. Where the cluster
// does not tell it, this machine's has to do; the next request says why it does not answer.
func clock(ctx context.Context, config *rest.Config) func() time.Time {
	ctx, cancel := context.WithTimeout(ctx, clockTime)
	defer cancel()
	now, err := kube.Clock(ctx, config)
	if err != nil {
		return time.Now
	}
	return now
}

// connect returns the cluster of the flags, once it has answered.
func (p *program) connect() (*cluster, error) {
	config, err := p.cluster.ToRESTConfig()
	if err != nil {
		return nil, fmt.Errorf("which cluster: %w: name one by --kubeconfig or --context", err)
	}
	c := &cluster{config: config, namespace: *p.cluster.Namespace}
	if c.clients, err = kubernetes.NewForConfig(config); err != nil {
		return nil, err
	}
	v, err := c.clients.Discovery().ServerVersion()
	if err != nil {
		return nil, fmt.Errorf("the API server at %s does not answer: %w", config.Host, err)
	}
	versions, err := action.GetVersionSet(c.clients.Discovery())
	if err != nil {
		return nil, fmt.Errorf("ask %s what it serves: %w", config.Host, err)
	}
	c.capabilities = &chartutil.Capabilities{
		KubeVersion: chartutil.KubeVersion{Version: v.GitVersion, Major: v.Major, Minor: v.Minor},
		APIVersions: versions, HelmVersion: chartutil.DefaultCapabilities.HelmVersion,
	}
	scheme := kube.Scheme()
	if err := apiextensionsv1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c.client, err = client.New(config, client.Options{Scheme: scheme})
	return c, err
}

// helm returns what Helm's actions work with: the releases are where helm looks
// for them, in Secrets of the namespace.
func (p *program) helm() (*action.Configuration, error) {
	cfg := new(action.Configuration)
	// What Helm has to say is either in its error or in ours.
	err := cfg.Init(&discoveryInMemory{ConfigFlags: p.cluster}, *p.cluster.Namespace, "secret", func(string, ...any) {})
	return cfg, err
}

// discoveryInMemory tells Helm which cluster it works on, and keeps the kinds that
// the cluster serves for this one run. The flags alone would keep them for six hours
// in ~/.kube/cache by the API server's address, which may be another cluster's by
// then.
type discoveryInMemory struct {
	*genericclioptions.ConfigFlags
	once   sync.Once
	cached discovery.CachedDiscoveryInterface
	err    error
}

// ToDiscoveryClient returns the one client that all share, so that what one of
// them invalidates is read anew for all.
func (m *discoveryInMemory) ToDiscoveryClient() (discovery.CachedDiscoveryInterface, error) {
	m.once.Do(func() {
		config, err := m.ToRESTConfig()
		if err != nil {
			m.err = err
			return
		}
		client, err := discovery.NewDiscoveryClientForConfig(config)
		if err != nil {
			m.err = err
			return
		}
		m.cached = memory.NewMemCacheClient(client)
	})
	return m.cached, m.err
}

// ToRESTMapper finds kinds in what that client has read.
func (m *discoveryInMemory) ToRESTMapper() (meta.RESTMapper, error) {
	client, err := m.ToDiscoveryClient()
	if err != nil {
		return nil, err
	}
	return restmapper.NewDeferredDiscoveryRESTMapper(client), nil
}

// patience is how long something may take before it is said to go on.
const patience = 2 * time.Second

// A progress tells what is being done: each step when it begins to take long,
// and again whenever there is news of it.
type progress struct {
	out  io.Writer
	mu   sync.Mutex
	last string
}

// say prints a line, unless it is the last one again.
func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if text := fmt.Sprintf(format, args...); text != p.last {
		p.last = text
		fmt.Fprintln(p.out, text)
	}
}

// during prints what a step waits for while it runs: after 2 s, and then
// whenever that has changed.
func (p *progress) during(ctx context.Context, waitingFor func(context.Context) string, step func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(patience)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if text := waitingFor(ctx); text != "" && ctx.Err() == nil {
					p.say("%s", text)
				}
			}
		}
	})
	err := step()
	cancel()
	wg.Wait()
	return err
}
