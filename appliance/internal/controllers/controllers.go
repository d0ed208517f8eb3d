// Package controllers is the controller: it reads everything from informers,
// asks package plan what must exist, and writes the difference.
//
// There is one reconcile for the whole cluster, level triggered: any change
// leads to a pass, and a pass knows nothing of what changed. What a pass needs
// to remember lives in objects. Nothing is decided here but how a difference is
// written.
package controllers

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// name of the controller: of its lease, in events and in managed fields.
const name = "isthmus-controller"

// Config is what the controller needs. REST is required.
type Config struct {
	REST      *rest.Config
	Namespace string // system namespace; required
	Options   cluster.Options
	// RefuseRotation says that no peer may change its key, or the pre-shared one.
	RefuseRotation bool
	// RotateEvery is how long a gateway's key pair is in use; 0: until somebody wishes for
	// another one.
	RotateEvery time.Duration

	LeaderElection bool
	// Identity tells replicas apart; the host name when empty. A container
	// that restarts keeps it, and with it the lease.
	Identity string

	// HealthAddress is host:port of /healthz and /readyz, MetricsAddress of
	// /metrics, by TLS and for those who may get that path of the API server;
	// empty or "0": not served.
	HealthAddress, MetricsAddress string

	Resync   time.Duration // a pass at least this often; default 10 min
	Debounce time.Duration // changes are collected for this long; default 100 ms
	// EventDelay is how long what hosts report must last before an event
	// tells of it; default 10 s. They try again every 5 s at most.
	EventDelay time.Duration
	Logger     *slog.Logger // optional

	planner func(cluster.Snapshot) plan.Result // plan.Cluster, but for tests
}

func (c *Config) setDefaults() error {
	if c.REST == nil {
		return errors.New("controllers: REST is required")
	}
	if c.Namespace == "" {
		return errors.New("controllers: Namespace is required: the namespace that the chart is installed in")
	}
	for _, p := range c.Options.Pools {
		if !p.IsValid() || p != p.Masked() {
			return fmt.Errorf("pool %v has host bits: write %v", p, p.Masked())
		}
	}
	if c.Identity == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("identity: %w", err)
		}
		c.Identity = host
	}
	c.Resync = cmp.Or(c.Resync, 10*time.Minute)
	c.Debounce = cmp.Or(c.Debounce, 100*time.Millisecond)
	c.EventDelay = cmp.Or(c.EventDelay, 10*time.Second)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.planner == nil {
		c.planner = plan.Cluster
	}
	return nil
}

// For its own metrics, and because it grants the same to gateways:
//
// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create
//
// +kubebuilder:rbac:groups="",resources=events,verbs=create;patch

// Run is the controller. It returns when ctx is done, or when somebody else has
// taken the lease.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.setDefaults(); err != nil {
		return err
	}
	// The API server's fairness is the limit; a new peering is hundreds of
	// objects.
	cfg.REST = rest.CopyConfig(cfg.REST)
	cfg.REST.QPS = -1

	newInformer, err := kube.NewInformer(cfg.REST, cfg.Logger)
	if err != nil {
		return err
	}
	mgr, err := ctrl.NewManager(cfg.REST, manager.Options{
		Scheme: kube.Scheme(),
		Cache:  cacheOptions(cfg.Namespace, newInformer),
		Logger: logr.FromSlogHandler(cfg.Logger.Handler()),

		HealthProbeBindAddress: cmp.Or(cfg.HealthAddress, "0"),
		Metrics: metricsserver.Options{
			BindAddress: cmp.Or(cfg.MetricsAddress, "0"), SecureServing: true, FilterProvider: kube.MetricsFilter,
			TLSOpts: []func(*tls.Config){kube.ServeSelfSigned},
		},
	})
	if err != nil {
		return err
	}
	recorder, stop, err := newRecorder(cfg.REST, mgr.GetScheme())
	if err != nil {
		return err
	}
	defer stop()
	r := &reconciler{
		cfg:      cfg,
		log:      cfg.Logger,
		cache:    mgr.GetClient(),
		direct:   mgr.GetAPIReader(),
		recorder: recorder,
		scheme:   mgr.GetScheme(),
		metrics:  newMetrics(),
		changed:  make(chan struct{}, 1),
	}
	if r.apiServers, err = apiServerEndpoints(mgr, newInformer); err != nil {
		return fmt.Errorf("informers of the API server's addresses: %w", err)
	}
	if err := r.watch(ctx, mgr.GetCache()); err != nil {
		return err
	}
	var loop manager.Runnable = manager.RunnableFunc(r.run)
	if cfg.LeaderElection {
		lock, err := newLock(cfg)
		if err != nil {
			return err
		}
		loop = &leader{lock: lock, duration: leaseDuration, deadline: renewDeadline, retry: retryPeriod, act: r.run, log: r.log}
	}
	var synced atomic.Bool
	if err := errors.Join(
		mgr.AddHealthzCheck("pass", func(*http.Request) error { return r.dog.Err() }),
		mgr.AddReadyzCheck("informers", func(*http.Request) error {
			if !synced.Load() {
				return errors.New("not everything has been read from the API server yet")
			}
			return nil
		}),
		mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
			synced.Store(mgr.GetCache().WaitForCacheSync(ctx) && r.apiServers.WaitForCacheSync(ctx))
			return nil
		})),
		mgr.Add(r.apiServers),
		mgr.Add(loop),
	); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

// ParsePools parses a list of pools.
func ParsePools(list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, text := range list {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("pool %q: write a network, for example 10.0.0.0/8", text)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}
