package apitest

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A log is what a process has written so far.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// until waits until something is so, for 30 s.
func until(t *testing.T, what string, so func() bool) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if !so() {
			return poll.Continue("%s", what)
		}
		return poll.Success()
	}, poll.WithTimeout(2*time.Minute), poll.WithDelay(100*time.Millisecond))
}

// lateLease is what a controller says whose API server did not answer within 3 s: on a busy
// machine it may be too late with the lease. An update that was given up may have been made, and the
// next one is refused then. The texts are those of client-go's leaderelection.go.
var lateLease = regexp.MustCompile(`level=ERROR .*(retrieving (resource lock|lease)|creating lease|(update|release) lease).*(context deadline exceeded|Operation cannot be fulfilled)`)

// controller runs the controller beside the cluster, as what the revision of its
// Deployment is now, and returns how to end it as a kubelet does: it has to end
// well.
func (o *operator) controller() (end func()) {
	o.t.Helper()
	out := &log{}
	cmd := exec.CommandContext(o.t.Context(), o.isthmus, "controller", "--kubeconfig", o.kubeconfig, "--leader-election", "--identity", "test", "--revision", o.revision())
	cmd.Stdout, cmd.Stderr = out, out
	assert.NilError(o.t, cmd.Start())
	until(o.t, "the controller leads", func() bool { return strings.Contains(out.String(), "Successfully acquired lease") })
	return func() {
		o.t.Helper()
		assert.NilError(o.t, cmd.Process.Signal(syscall.SIGTERM))
		assert.Check(o.t, cmd.Wait(), out.String())
		if lateLease.MatchString(out.String()) {
			return // who can't ask for the lease in time can't give it back
		}
		assert.Check(o.t, !strings.Contains(out.String(), "level=ERROR"), out.String())
		lease, err := o.cp.Client().CoordinationV1().Leases("liqo").Get(o.t.Context(), "isthmus-controller", metav1.GetOptions{})
		assert.NilError(o.t, err)
		assert.Check(o.t, lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "", "the lease was not given back")
	}
}

// revision is the pod-template-hash of the newest ReplicaSet of the controller.
func (o *operator) revision() string {
	o.t.Helper()
	hash := ""
	until(o.t, "the controller's Deployment has a ReplicaSet", func() bool {
		d, err := o.cp.Client().AppsV1().Deployments("liqo").Get(o.t.Context(), "isthmus-controller", metav1.GetOptions{})
		assert.NilError(o.t, err)
		sets, err := o.cp.Client().AppsV1().ReplicaSets("liqo").List(o.t.Context(), metav1.ListOptions{})
		assert.NilError(o.t, err)
		for _, s := range sets.Items {
			const number = "deployment.kubernetes.io/revision"
			if d.Status.ObservedGeneration == d.Generation && metav1.IsControlledBy(&s, d) && s.Annotations[number] == d.Annotations[number] {
				hash = s.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
			}
		}
		return hash != ""
	})
	return hash
}

// readyPods makes all pods ready, as if there were nodes, until ctx is done: those
// in namespaces of tenants as long as gateways is true.
func (o *operator) readyPods(ctx context.Context, gateways *atomic.Bool) {
	every(ctx, 200*time.Millisecond, func() {
		list, err := o.cp.Client().CoreV1().Pods("").List(ctx, metav1.ListOptions{})
		if err != nil {
			return // the control plane ends
		}
		for _, pod := range list.Items {
			api := o.cp.Client().CoreV1().Pods(pod.Namespace)
			switch {
			case pod.DeletionTimestamp != nil:
				err = api.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
			case pod.Labels[v1beta1.LabelComponent] == v1beta1.ComponentGatewayPull:
				if len(pod.Status.ContainerStatuses) > 0 {
					continue
				}
				for _, c := range pod.Spec.Containers { // there is no registry
					pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, corev1.ContainerStatus{
						Name: c.Name, Image: c.Image, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no such image"}},
					})
				}
				_, err = api.UpdateStatus(ctx, &pod, metav1.UpdateOptions{})
			case pod.Status.Phase != corev1.PodRunning && (pod.Namespace == "liqo" || gateways.Load()):
				pod.Status.Phase = corev1.PodRunning
				pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()})
				_, err = api.UpdateStatus(ctx, &pod, metav1.UpdateOptions{})
			}
			if err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
				o.t.Errorf("pod %s: %v", pod.Name, err)
			}
		}
	})
}

// every does something again and again until ctx is done.
func every(ctx context.Context, interval time.Duration, do func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			do()
		}
	}
}

// replaces upgrades with a gateway there, whose pods the controller replaces.
func (o *operator) replaces() {
	o.run(append([]string{"install", "--wait=false"}, installArgs...)...)
	o.kubectl(`
{apiVersion: v1, kind: Namespace, metadata: {name: liqo-tenant-rome, labels: {liqo.io/remote-cluster-id: rome}}}
---
{apiVersion: networking.liqo.io/v1beta1, kind: GatewayServer, metadata: {namespace: liqo-tenant-rome, name: rome, labels: {liqo.io/remote-cluster-id: rome}}, spec: {endpoint: {serviceType: ClusterIP, port: 51840}}}
---
# Refused, because a peering has one: nothing runs for it, and nobody waits for it.
{apiVersion: networking.liqo.io/v1beta1, kind: GatewayClient, metadata: {namespace: liqo-tenant-rome, name: second, labels: {liqo.io/remote-cluster-id: rome}}, spec: {endpoint: {addresses: [203.0.113.2], port: 51840, protocol: UDP}}}
`, "apply", "-f", "-")
	var gateways atomic.Bool
	gateways.Store(true)
	ctx, cancel := context.WithCancel(o.t.Context())
	var kubelet sync.WaitGroup
	kubelet.Go(func() { o.readyPods(ctx, &gateways) })
	defer kubelet.Wait()
	defer cancel()

	end := o.controller()
	var result struct {
		Error    string
		Gateway  struct{ Kind, Namespace, Name string }
		Gateways []struct{ Kind, Namespace, Name string }
	}
	parse := func(text string) {
		o.t.Helper()
		result.Error, result.Gateways = "", nil
		assert.NilError(o.t, json.Unmarshal([]byte(text), &result), text)
	}
	upgrade := func(args ...string) (string, string, error) {
		return o.try(append([]string{"upgrade", "--json"}, args...)...)
	}
	// Nothing of the templates changes: what is there already counts.
	out, errs, err := upgrade()
	assert.NilError(o.t, err, "%s%s", out, errs)
	parse(out)
	assert.Equal(o.t, len(result.Gateways), 1, out)
	assert.Equal(o.t, result.Gateways[0].Name, "rome")

	// The controller that is there makes the gateway from the new template; the
	// next one may make something else of it, so that is waited for.
	first := o.gatewayPod()
	stdout, stderr := &log{}, &log{}
	cmd := exec.CommandContext(o.t.Context(), o.isthmusctl, "--kubeconfig", o.kubeconfig, "upgrade", "--json", "--set", "logLevel=debug", "--timeout=4m")
	cmd.Stdout, cmd.Stderr = stdout, stderr
	assert.NilError(o.t, cmd.Start())
	upgraded := make(chan error, 1)
	go func() { upgraded <- cmd.Wait() }()
	until(o.t, "upgrade waits for the next controller", func() bool {
		return strings.Contains(stderr.String(), "waiting for GatewayServer liqo-tenant-rome/rome: Deployment gw-rome is that of the controller before")
	})
	until(o.t, "the gateway has another pod", func() bool { pod := o.gatewayPod(); return pod != "" && pod != first })
	end()
	end = o.controller()
	assert.NilError(o.t, <-upgraded, "%s%s", stdout, stderr)
	parse(stdout.String())
	assert.Equal(o.t, len(result.Gateways), 1, stdout.String())

	// A busy machine may not have come as far as the reason when the time is over: the
	// same upgrade with twice the time does.
	inVain := func(timeout time.Duration, args, wants []string) {
		o.t.Helper()
		for range 5 {
			out, _, err := upgrade(append(args, "--timeout="+timeout.String())...)
			timeout *= 2
			assert.Assert(o.t, err != nil, "upgrade %q did not wait for the gateway", args)
			parse(out)
			if !slices.ContainsFunc(wants, func(want string) bool { return !strings.Contains(result.Error, want) }) {
				return
			}
		}
		for _, want := range wants {
			assert.Check(o.t, is.Contains(result.Error, want))
		}
	}
	// No place for the new pod.
	gateways.Store(false)
	inVain(8*time.Second, []string{"--set", "networking.gatewayTemplates.ping.interval=3s"},
		[]string{"GatewayServer liqo-tenant-rome/rome is not replaced after ", "Deployment gw-rome", "nodes", "kubectl describe pods -n liqo-tenant-rome", "isthmusctl upgrade"})
	assert.Equal(o.t, result.Gateway.Kind+" "+result.Gateway.Namespace+"/"+result.Gateway.Name, "GatewayServer liqo-tenant-rome/rome")
	gateways.Store(true)
	o.run("upgrade")

	// An image that can't be pulled costs no pod.
	first = o.gatewayPod()
	inVain(8*time.Second, []string{"--set", "image.version=nxet"},
		[]string{"GatewayServer liqo-tenant-rome/rome is not replaced after ", "Deployment gw-rome is not that of", "the controller says: image ", ":nxet can't be pulled", "no such image", "image.version"})
	o.run("upgrade", "--set", "image.version=")
	until(o.t, "the pod that pulls is gone, and the gateway's is the same", func() bool { return o.gatewayPod() == first })

	// A template that is not there: the gateway goes on with what it has.
	o.kubectl("", "patch", "gatewayserver", "-n", "liqo-tenant-rome", "rome", "--type=merge", "-p", `{"spec": {"serverTemplateRef": {"kind": "WgGatewayServerTemplate", "name": "special", "namespace": "liqo"}}}`)
	inVain(4*time.Second, nil,
		[]string{"GatewayServer liqo-tenant-rome/rome", "there is no WgGatewayServerTemplate liqo/special", "the controller says: spec.serverTemplateRef"})

	end()
	cancel()
	kubelet.Wait()
	o.run("uninstall", "--purge")
	o.kubectl("", "delete", "namespace", "liqo-tenant-rome")
}

// gatewayPod is the name of the gateway's pod; empty while there is not exactly
// one.
func (o *operator) gatewayPod() string {
	o.t.Helper()
	list, err := o.cp.Client().CoreV1().Pods("liqo-tenant-rome").List(o.t.Context(), metav1.ListOptions{})
	assert.NilError(o.t, err)
	if len(list.Items) != 1 || list.Items[0].DeletionTimestamp != nil {
		return ""
	}
	return list.Items[0].Name
}
