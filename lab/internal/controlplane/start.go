package controlplane

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"
)

// poll is the interval between two looks at a component that starts.
const poll = 50 * time.Millisecond

func start(ctx context.Context, cfg Config) (_ *ControlPlane, err error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	if _, err := os.Stat(cfg.Binary); err != nil {
		return nil, fmt.Errorf("cluster %s: the Kubernetes binary is missing: %w; build it with `make kubernetes`", cfg.Name, err)
	}
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "log"), 0o755); err != nil {
		return nil, err
	}
	if err := cfg.portsFree(ctx); err != nil {
		return nil, err
	}
	c := &ControlPlane{cfg: cfg, procs: map[string]*process{}, took: map[string]time.Duration{}}
	keys := filepath.Join(cfg.Dir, "pki")
	if cfg.Keys != "" {
		c.pki, err = copyPKI(cfg.Keys, keys)
	} else {
		c.pki, err = newPKI(keys, cfg.Name, c.Address(), cfg.ServiceCIDR, cfg.Nodes)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster %s: keys: %w", cfg.Name, err)
	}
	if c.client, err = kubernetes.NewForConfig(c.RESTConfig()); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.startEtcd(ctx); err != nil {
		return nil, err
	}
	if err := c.StartComponent(ctx, APIServer); err != nil {
		return nil, err
	}
	cfg.Serving()
	g, gctx := errgroup.WithContext(ctx)
	for _, component := range []string{ControllerManager, Scheduler} {
		g.Go(func() error { return c.StartComponent(gctx, component) })
	}
	g.Go(func() error { return c.until(gctx, "the controller manager", c.controllerManagerWorks) })
	if !c.warm && c.cfg.EtcdData == "" {
		g.Go(func() error { return c.installCRDs(gctx) })
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	if c.cfg.CacheDir != "" && c.cfg.EtcdData == "" {
		if err := c.keepCopy(); err != nil {
			cfg.Logger.Warn("no copy of the control plane is kept: the next one takes as long", "err", err)
		}
	}
	return c, nil
}

// controllerManagerWorks tells it from what it writes, which pods need.
func (c *ControlPlane) controllerManagerWorks(ctx context.Context) error {
	if _, err := c.client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{}); err != nil {
		return err
	}
	root, err := c.client.CoreV1().ConfigMaps(metav1.NamespaceDefault).Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
	if err == nil && root.Data["ca.crt"] != string(c.pki.ca.pem) {
		return errors.New("ConfigMap default/kube-root-ca.crt has another cluster's certificate authority")
	}
	return err
}

const crdsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// installCRDs creates the CRDs and waits until they are established.
func (c *ControlPlane) installCRDs(ctx context.Context) error {
	begin := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	for _, content := range c.cfg.CRDs {
		g.Go(func() error { return c.installCRD(ctx, content) })
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("cluster %s: %w", c.cfg.Name, err)
	}
	c.record("CRDs", time.Since(begin))
	return nil
}

func (c *ControlPlane) installCRD(ctx context.Context, content []byte) error {
	var crd struct {
		Metadata struct{ Name string }
		Status   struct {
			Conditions []struct{ Type, Status string }
		}
	}
	if err := yaml.Unmarshal(content, &crd); err != nil {
		return fmt.Errorf("CRD: %w", err)
	}
	name := crd.Metadata.Name
	rest := c.client.Discovery().RESTClient()
	if err := rest.Post().AbsPath(crdsPath).SetHeader("Content-Type", "application/yaml").Body(content).Do(ctx).Error(); err != nil {
		return fmt.Errorf("create CRD %s: %w", name, err)
	}
	return c.until(ctx, "CRD "+name, func(ctx context.Context) error {
		b, err := rest.Get().AbsPath(crdsPath, name).DoRaw(ctx)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(b, &crd); err != nil {
			return err
		}
		for _, cond := range crd.Status.Conditions {
			if cond.Type == "Established" && cond.Status == "True" {
				return nil
			}
		}
		return errors.New("it is not established")
	})
}

func (c *ControlPlane) record(what string, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.took[what] = took
}

// StartComponent starts a component that is not running and waits until it is
// healthy.
func (c *ControlPlane) StartComponent(ctx context.Context, component string) error {
	flags, err := c.flags(component)
	if err != nil {
		return err
	}
	c.mu.Lock()
	if p, ok := c.procs[component]; ok && p.running() {
		c.mu.Unlock()
		return nil
	}
	begin := time.Now()
	c.cfg.Progress("cluster %s: starting %s", c.cfg.Name, component)
	p, err := c.cfg.launch(component, flags)
	if err == nil {
		c.procs[component] = p
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if err := c.until(ctx, component, c.healthy(component)); err != nil {
		return err
	}
	c.record(component, time.Since(begin))
	c.cfg.Logger.Info("started", "cluster", c.cfg.Name, "component", component, "pid", p.cmd.Process.Pid, "took", time.Since(begin).Round(time.Millisecond))
	return nil
}

// StopComponent ends a component; its data stay. The lab uses it to show what
// happens without an API server.
func (c *ControlPlane) StopComponent(component string) error {
	if !slices.Contains(Components(), component) {
		return c.unknown(component)
	}
	c.mu.Lock()
	p := c.procs[component]
	delete(c.procs, component)
	c.mu.Unlock()
	if p != nil {
		p.stop()
		c.cfg.Logger.Info("stopped", "cluster", c.cfg.Name, "component", component)
	}
	return nil
}

// Close stops all components, last started first. Files stay.
func (c *ControlPlane) Close() error {
	var errs []error
	for _, component := range slices.Backward(Components()) {
		errs = append(errs, c.StopComponent(component))
	}
	return errors.Join(errs...)
}

// Running returns the process IDs of the components that run.
func (c *ControlPlane) Running() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	pids := map[string]int{}
	for name, p := range c.procs {
		if p.running() {
			pids[name] = p.cmd.Process.Pid
		}
	}
	return pids
}

func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (c *ControlPlane) unknown(component string) error {
	return fmt.Errorf("cluster %s: no component %q; there are %s", c.cfg.Name, component, strings.Join(Components(), ", "))
}

// until polls check; it fails early when a component has ended.
func (c *ControlPlane) until(ctx context.Context, what string, check func(context.Context) error) error {
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		c.mu.Lock()
		for _, p := range c.procs {
			if !p.running() {
				c.mu.Unlock()
				return c.cfg.ended(p)
			}
		}
		c.mu.Unlock()
		select {
		case <-ctx.Done():
			return fmt.Errorf("cluster %s: %s is not ready: %w; last answer: %w; logs are in %s", c.cfg.Name, what, ctx.Err(), err, filepath.Join(c.cfg.Dir, "log"))
		case <-ticker.C:
		}
	}
}

// healthy returns the check of a component.
func (c *ControlPlane) healthy(component string) func(context.Context) error {
	switch component {
	case Etcd:
		return c.connects(c.cfg.Ports.EtcdClient)
	case APIServer:
		return func(ctx context.Context) error {
			b, err := c.client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
			if err != nil && len(b) > 0 && !apierrors.IsForbidden(err) {
				return fmt.Errorf("%w: %s", err, b)
			}
			return err
		}
	case ControllerManager:
		return c.healthz(c.cfg.Ports.ControllerManager)
	default:
		return c.healthz(c.cfg.Ports.Scheduler)
	}
}

func (c *ControlPlane) connects(port uint16) func(context.Context) error {
	return func(ctx context.Context) error {
		conn, err := c.cfg.dial(ctx, "tcp", loopbackPort(port))
		if err != nil {
			return err
		}
		return conn.Close()
	}
}

// healthz asks the loopback port of a component, which has the API server's certificate.
func (c *ControlPlane) healthz(port uint16) func(context.Context) error {
	return func(ctx context.Context) error {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(c.pki.ca.pem)
		transport := &http.Transport{DialContext: c.cfg.dial, TLSClientConfig: &tls.Config{RootCAs: roots}}
		defer transport.CloseIdleConnections()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+loopbackPort(port)+"/healthz", nil)
		if err != nil {
			return err
		}
		resp, err := (&http.Client{Transport: transport}).Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", resp.Status, b)
		}
		return err
	}
}

func loopbackPort(port uint16) string {
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String()
}

// noElection: a component that cannot renew its lease ends itself, so the
// lab's outages of the API server would take the others down. There is only
// one of each.
const noElection = "--leader-elect=false"

func (c *ControlPlane) flags(component string) ([]string, error) {
	cfg, pki := c.cfg, c.pki
	port := func(p uint16) string { return strconv.Itoa(int(p)) }
	etcd := "http://" + loopbackPort(cfg.Ports.EtcdClient)
	// A certificate for loopback addresses, too. A component that is given none makes two RSA
	// keys for itself, which took a fifth of a second and more.
	certificate, key := "--tls-cert-file="+pki.path("apiserver.crt"), "--tls-private-key-file="+pki.path("apiserver.key")
	switch component {
	case Etcd:
		flags := []string{
			"--data-dir=" + cfg.dataDir(),
			"--listen-client-urls=" + etcd,
			"--listen-peer-urls=http://" + loopbackPort(cfg.Ports.EtcdPeer),
		}
		if path, _ := cfg.binary(Etcd); path != cfg.Binary {
			// etcd's own program wants to be told what ours assumes.
			flags = append(flags, "--advertise-client-urls="+etcd, "--unsafe-no-fsync")
		}
		return flags, nil
	case APIServer:
		reconciler := "lease"
		if cfg.Address.IsLoopback() {
			// A loopback address may not stand in an EndpointSlice.
			reconciler = "none"
		}
		return []string{
			"--etcd-servers=" + etcd,
			"--bind-address=" + cfg.Address.String(),
			"--advertise-address=" + cfg.Address.String(),
			"--endpoint-reconciler-type=" + reconciler,
			"--secure-port=" + port(cfg.Ports.APIServer),
			certificate, key,
			"--client-ca-file=" + pki.path("ca.crt"),
			"--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--allow-privileged",
			"--service-cluster-ip-range=" + cfg.ServiceCIDR.String(),
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + pki.path("sa.pub"),
			"--service-account-signing-key-file=" + pki.path("sa.key"),
			"--kubelet-client-certificate=" + pki.path("apiserver-kubelet-client.crt"),
			"--kubelet-client-key=" + pki.path("apiserver-kubelet-client.key"),
			"--kubelet-certificate-authority=" + pki.path("ca.crt"),
			"--kubelet-preferred-address-types=InternalIP",
			"--requestheader-client-ca-file=" + pki.path("front-proxy-ca.crt"),
			"--requestheader-allowed-names=front-proxy-client",
			"--requestheader-username-headers=X-Remote-User",
			"--requestheader-group-headers=X-Remote-Group",
			"--requestheader-extra-headers-prefix=X-Remote-Extra-",
			"--proxy-client-cert-file=" + pki.path("front-proxy-client.crt"),
			"--proxy-client-key-file=" + pki.path("front-proxy-client.key"),
		}, nil
	case ControllerManager:
		mask := "--node-cidr-mask-size=24"
		if cfg.PodCIDR.Addr().Is6() {
			mask = "--node-cidr-mask-size=64"
		}
		kubeconfig := pki.path(ControllerManager + ".kubeconfig")
		return []string{
			"--kubeconfig=" + kubeconfig,
			"--authentication-kubeconfig=" + kubeconfig,
			"--authorization-kubeconfig=" + kubeconfig,
			"--bind-address=127.0.0.1",
			"--secure-port=" + port(cfg.Ports.ControllerManager),
			certificate, key,
			"--root-ca-file=" + pki.path("ca.crt"),
			"--service-account-private-key-file=" + pki.path("sa.key"),
			"--cluster-signing-cert-file=" + pki.path("ca.crt"),
			"--cluster-signing-key-file=" + pki.path("ca.key"),
			"--use-service-account-credentials",
			"--allocate-node-cidrs",
			"--cluster-cidr=" + cfg.PodCIDR.String(),
			"--service-cluster-ip-range=" + cfg.ServiceCIDR.String(),
			mask,
			// It makes a client for each of its controllers: with the
			// default of 20 a second the first service account takes 5 s.
			"--kube-api-qps=500", "--kube-api-burst=500",
			"--node-monitor-grace-period=" + cfg.NodeGracePeriod.String(),
			// It makes this directory, and by default one of the machine.
			"--flex-volume-plugin-dir=" + filepath.Join(cfg.Dir, "flexvolume"),
			noElection,
			"--profiling=false",
		}, nil
	case Scheduler:
		kubeconfig := pki.path(Scheduler + ".kubeconfig")
		return []string{
			"--kubeconfig=" + kubeconfig,
			"--authentication-kubeconfig=" + kubeconfig,
			"--authorization-kubeconfig=" + kubeconfig,
			"--bind-address=127.0.0.1",
			"--secure-port=" + port(cfg.Ports.Scheduler),
			certificate, key,
			"--kube-api-qps=500", "--kube-api-burst=500",
			noElection,
			"--profiling=false",
		}, nil
	}
	return nil, c.unknown(component)
}
