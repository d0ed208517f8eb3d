package expect

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
)

// An API reaches the API servers of a lab with kinds and names as users write
// them.
type API struct {
	config func(ctx context.Context, cluster string) (*rest.Config, error)
	mu     sync.Mutex
	made   map[string]*clusterAPI
}

type clusterAPI struct {
	dynamic   dynamic.Interface
	mapper    meta.RESTMapper
	config    *rest.Config
	discovery discovery.DiscoveryInterface
}

// NewAPI returns access by the configurations that config returns.
func NewAPI(config func(ctx context.Context, cluster string) (*rest.Config, error)) *API {
	return &API{config: config, made: map[string]*clusterAPI{}}
}

func (a *API) cluster(ctx context.Context, name string) (*clusterAPI, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c, ok := a.made[name]; ok {
		return c, nil
	}
	cfg, err := a.config(ctx, name)
	if err != nil {
		return nil, err
	}
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // the API server's own fairness is enough
	dyn, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	server, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return nil, err
	}
	// The short names would be asked for again with every kind.
	disco := memory.NewMemCacheClient(server)
	groups, err := restmapper.GetAPIGroupResources(disco)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: kinds: %w", name, err)
	}
	mapper := restmapper.NewShortcutExpander(restmapper.NewDiscoveryRESTMapper(groups), disco, func(string) {})
	c := &clusterAPI{dyn, mapper, cfg, disco}
	a.made[name] = c
	return c, nil
}

// Forget makes the next call learn a cluster's kinds anew.
func (a *API) Forget(cluster string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.made, cluster)
}

// Mapping finds what "internalnode", "gws" or "ips.ipam.liqo.io" stands for.
func (a *API) Mapping(ctx context.Context, cluster, kind string) (*meta.RESTMapping, error) {
	c, err := a.cluster(ctx, cluster)
	if err != nil {
		return nil, err
	}
	resource, group, _ := strings.Cut(strings.ToLower(kind), ".")
	gvk, err := c.mapper.KindFor(schema.GroupVersionResource{Group: group, Resource: resource})
	if err != nil {
		a.Forget(cluster) // it may be defined in a moment
		return nil, fmt.Errorf("cluster %s: %w", cluster, err)
	}
	return c.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
}

// Resource returns access to the objects of one mapping.
func (a *API) Resource(ctx context.Context, cluster string, m *meta.RESTMapping, namespace string) (dynamic.ResourceInterface, error) {
	c, err := a.cluster(ctx, cluster)
	if err != nil {
		return nil, err
	}
	if m.Scope.Name() == meta.RESTScopeNameNamespace && namespace != "" {
		return c.dynamic.Resource(m.Resource).Namespace(namespace), nil
	}
	return c.dynamic.Resource(m.Resource), nil
}

// MappingOf finds how objects of a kind are reached.
func (a *API) MappingOf(ctx context.Context, cluster string, gvk schema.GroupVersionKind) (*meta.RESTMapping, error) {
	c, err := a.cluster(ctx, cluster)
	if err != nil {
		return nil, err
	}
	m, err := c.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		a.Forget(cluster)
	}
	return m, err
}

// List returns all objects of a kind, in all namespaces.
func (a *API) List(ctx context.Context, cluster, kind string) ([]unstructured.Unstructured, error) {
	m, err := a.Mapping(ctx, cluster, kind)
	if err != nil {
		return nil, err
	}
	return a.list(ctx, cluster, m)
}

func (a *API) list(ctx context.Context, cluster string, m *meta.RESTMapping) ([]unstructured.Unstructured, error) {
	r, err := a.Resource(ctx, cluster, m, "")
	if err != nil {
		return nil, err
	}
	l, err := r.List(ctx, metav1.ListOptions{})
	if err != nil {
		if NotServed(err) {
			a.Forget(cluster)
		}
		return nil, err
	}
	return l.Items, nil
}

// NotServed tells whether an error says that a cluster has no such kind: it was
// not defined when the kinds were learned, or is no longer.
func NotServed(err error) bool { return meta.IsNoMatchError(err) || apierrors.IsNotFound(err) }

// Everything returns all objects of a cluster of every kind that can be listed,
// but those of the kinds that are left out.
func (a *API) Everything(ctx context.Context, cluster string, leftOut func(gvk schema.GroupVersionKind) bool) ([]unstructured.Unstructured, error) {
	c, err := a.cluster(ctx, cluster)
	if err != nil {
		return nil, err
	}
	// Kinds come and go: what was learned of them before does not count.
	server, err := discovery.NewDiscoveryClientForConfig(c.config)
	if err != nil {
		return nil, err
	}
	lists, err := server.ServerPreferredResources()
	if err != nil {
		return nil, fmt.Errorf("cluster %s: kinds: %w", cluster, err)
	}
	var out []unstructured.Unstructured
	for _, l := range lists {
		gv, err := schema.ParseGroupVersion(l.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, r := range l.APIResources {
			if !slices.Contains(r.Verbs, "list") || leftOut(gv.WithKind(r.Kind)) {
				continue
			}
			all, err := c.dynamic.Resource(gv.WithResource(r.Name)).List(ctx, metav1.ListOptions{})
			switch {
			case apierrors.IsNotFound(err): // its definition has just gone
			case err != nil:
				return nil, fmt.Errorf("cluster %s: list %s: %w", cluster, r.Name, err)
			default:
				out = append(out, all.Items...)
			}
		}
	}
	return out, nil
}

// Find returns the object "kind/name" in a namespace; without one, the only
// object of that name in all namespaces. No object is no error.
func (a *API) Find(ctx context.Context, cluster, object, namespace string) (*unstructured.Unstructured, error) {
	kind, name, _ := strings.Cut(object, "/")
	all, err := a.List(ctx, cluster, kind)
	if err != nil {
		return nil, err
	}
	var found []unstructured.Unstructured
	for _, o := range all {
		if o.GetName() == name && (namespace == "" || o.GetNamespace() == namespace) {
			found = append(found, o)
		}
	}
	switch len(found) {
	case 0:
		return nil, nil
	case 1:
		return &found[0], nil
	}
	return nil, fmt.Errorf("cluster %s has %d objects %s: say the namespace", cluster, len(found), object)
}
