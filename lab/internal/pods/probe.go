package pods

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// eager is how soon a container is probed again that has not started or become
// ready yet; it doubles up to the period of the probe. A lab that waits should
// not wait for a period of ten seconds, and an emulated machine with many
// containers that start should not be busy with asking them.
const eager = 200 * time.Millisecond

// errProbe is the cause with which a run is cancelled.
type errProbe struct{ kind string }

func (e errProbe) Error() string { return e.kind + " probe failed" }

// startProbes probes one run of the container until ctx ends.
func (c *container) startProbes(ctx context.Context) *sync.WaitGroup {
	var wg sync.WaitGroup
	wg.Go(func() {
		if p := c.spec.StartupProbe; p != nil && !c.startup(ctx, p) {
			return
		}
		if p := c.spec.LivenessProbe; p != nil {
			wg.Go(func() { c.liveness(ctx, p) })
		}
		if p := c.spec.ReadinessProbe; p != nil {
			wg.Go(func() { c.readiness(ctx, p) })
		}
	})
	return &wg
}

// startup probes until the first success. Failures count once a period,
// however often it probes.
func (c *container) startup(ctx context.Context, p *corev1.Probe) bool {
	if !pause(ctx, time.Duration(p.InitialDelaySeconds)*time.Second) {
		return false
	}
	patience := period(p) * time.Duration(max(p.FailureThreshold, 1))
	deadline := time.Now().Add(patience)
	for wait := min(eager, period(p)); ; wait = min(2*wait, period(p)) {
		err := c.probe(ctx, p)
		if err == nil {
			c.set(func() {
				c.started = true
				c.ready = c.spec.ReadinessProbe == nil && (!c.init || c.sidecar())
			})
			return true
		}
		if time.Now().After(deadline) {
			c.unhealthy(ctx, "Startup", err)
			c.fail("startup")
			return false
		}
		if !pause(ctx, wait) {
			return false
		}
	}
}

func (c *container) liveness(ctx context.Context, p *corev1.Probe) {
	failures := int32(0)
	for wait := time.Duration(p.InitialDelaySeconds) * time.Second; pause(ctx, wait); wait = period(p) {
		err := c.probe(ctx, p)
		if err == nil {
			failures = 0
			continue
		}
		failures++
		c.unhealthy(ctx, "Liveness", err)
		if failures >= max(p.FailureThreshold, 1)*max(c.pod.node.cfg.LivenessFactor, 1) {
			c.fail("liveness")
			return
		}
	}
}

func (c *container) readiness(ctx context.Context, p *corev1.Probe) {
	var failures, successes int32
	first, soon := true, min(eager, period(p))
	for wait := time.Duration(p.InitialDelaySeconds) * time.Second; pause(ctx, wait); {
		wait = period(p)
		if err := c.probe(ctx, p); err != nil {
			successes = 0
			failures++
			if first {
				wait, soon = soon, min(2*soon, period(p))
				continue
			}
			c.unhealthy(ctx, "Readiness", err)
			if failures >= max(p.FailureThreshold, 1) {
				c.setReady(false)
			}
			continue
		}
		failures = 0
		successes++
		if first {
			wait = soon
		}
		if successes >= max(p.SuccessThreshold, 1) {
			wait = max(period(p), c.pod.node.cfg.ReadyPeriod)
			first = false
			c.setReady(true)
		}
	}
}

func (c *container) setReady(ready bool) {
	c.pod.mu.Lock()
	same := c.ready == ready
	c.pod.mu.Unlock()
	if !same {
		c.set(func() { c.ready = ready })
	}
}

func (c *container) fail(kind string) {
	c.pod.mu.Lock()
	kill := c.kill
	c.pod.mu.Unlock()
	if kill != nil {
		kill(errProbe{kind})
	}
}

func (c *container) unhealthy(ctx context.Context, kind string, err error) {
	if ctx.Err() == nil {
		c.pod.event(corev1.EventTypeWarning, "Unhealthy", "%s probe of container %s failed: %s", kind, c.spec.Name, err)
	}
}

func period(p *corev1.Probe) time.Duration {
	if p.PeriodSeconds > 0 {
		return time.Duration(p.PeriodSeconds) * time.Second
	}
	return 10 * time.Second
}

// probe asks once, from the node, as the real kubelet does. An answer does not
// count that did not come because the machine slept.
func (c *container) probe(ctx context.Context, p *corev1.Probe) error {
	for {
		before, ok := c.pod.node.cfg.Registry.awake(ctx)
		if !ok {
			return ctx.Err()
		}
		err := c.probeOnce(ctx, p)
		if err == nil {
			return nil
		}
		if after, ok := c.pod.node.cfg.Registry.awake(ctx); !ok || after == before {
			return err
		}
	}
}

func (c *container) probeOnce(ctx context.Context, p *corev1.Probe) error {
	timeout := time.Duration(max(p.TimeoutSeconds, 1)) * time.Second
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	switch {
	case p.HTTPGet != nil:
		return c.probeHTTP(ctx, p.HTTPGet)
	case p.TCPSocket != nil:
		address, err := c.address(p.TCPSocket.Host, p.TCPSocket.Port)
		if err != nil {
			return err
		}
		conn, err := netns.DialContext(ctx, c.pod.node.cfg.NetNS, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	case p.Exec != nil:
		return c.probeExec(ctx, p.Exec)
	case p.GRPC != nil:
		return c.probeGRPC(ctx, p.GRPC)
	}
	return errors.New("the lab's kubelet knows the probes httpGet, tcpSocket, exec and grpc")
}

func (c *container) probeHTTP(ctx context.Context, get *corev1.HTTPGetAction) error {
	address, err := c.address(get.Host, get.Port)
	if err != nil {
		return err
	}
	scheme := "http"
	if get.Scheme == corev1.URISchemeHTTPS {
		scheme = "https"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+address+"/"+strings.TrimPrefix(get.Path, "/"), nil)
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", "kube-probe/lab")
	for _, h := range get.HTTPHeaders {
		req.Header.Add(h.Name, h.Value)
		if strings.EqualFold(h.Name, "Host") {
			req.Host = h.Value
		}
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // as the kubelet: it is a probe, not a secret
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return netns.DialContext(ctx, c.pod.node.cfg.NetNS, network, address)
		},
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode >= 400 {
		return fmt.Errorf("HTTP probe failed with statuscode: %d", resp.StatusCode)
	}
	return nil
}

func (c *container) probeExec(ctx context.Context, action *corev1.ExecAction) error {
	c.pod.mu.Lock()
	proc := c.proc
	c.pod.mu.Unlock()
	if proc == nil {
		return errors.New("the container does not run")
	}
	var out limited
	code, err := proc.exec(ctx, ExecRequest{Argv: action.Command, Stdout: &out, Stderr: &out})
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d: %s", code, out.b)
	}
	return err
}

// limited keeps the beginning of what is written to it.
type limited struct {
	mu sync.Mutex
	b  []byte
}

func (l *limited) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p[:min(len(p), 1024-len(l.b))]...)
	return len(p), nil
}

// address returns where a probe goes: the pod's address unless it names a
// host, and a port by number or name.
func (c *container) address(host string, port intstr.IntOrString) (string, error) {
	if host == "" {
		host = c.pod.withAddresses().Status.PodIP
	}
	number := port.IntValue()
	if port.Type == intstr.String && number == 0 {
		for _, p := range c.spec.Ports {
			if p.Name == port.StrVal {
				number = int(p.ContainerPort)
			}
		}
		if number == 0 {
			return "", fmt.Errorf("container %s has no port named %q", c.spec.Name, port.StrVal)
		}
	}
	return net.JoinHostPort(host, strconv.Itoa(number)), nil
}
