package pods_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func parseCIDR(s string) (netip.Prefix, *net.IPNet, error) {
	_, n, err := net.ParseCIDR(s)
	return netip.MustParsePrefix(s), n, err
}

// One world serves all of it: it takes five seconds to make.
func TestNodes(t *testing.T) {
	w := newWorld(t)
	for _, tc := range []struct {
		name string
		run  func(*testing.T, *world)
	}{
		{"a Deployment, a Service and a DaemonSet", workloads},
		{"logs and exec by kubectl", logsAndExec},
		{"a killed container starts again", restart},
		{"init containers and pods that finish", finish},
		{"probes", probes},
		{"volumes", volumes},
		{"environment", environment},
		{"security", security},
		{"service account token", token},
		{"host paths and devices", hostPaths},
		{"what cannot run says why", refused},
		{"deletion", deletion},
	} {
		t.Run(tc.name, func(t *testing.T) { tc.run(t, w) })
	}
	t.Run("nothing remains", func(t *testing.T) { nothingRemains(t, w) })
}

func workloads(t *testing.T, w *world) {
	out, err := w.kubectl(t, strings.NewReader(workloadsYAML), "apply", "-f", "-")
	assert.NilError(t, err, out)
	out, err = w.kubectl(t, nil, "rollout", "status", "deployment/web", "--timeout=30s")
	assert.NilError(t, err, out)
	out, err = w.kubectl(t, nil, "rollout", "status", "daemonset/agent", "--timeout=30s")
	assert.NilError(t, err, out)

	list, err := w.client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
	assert.NilError(t, err)
	assert.Equal(t, len(list.Items), 2)
	a, b := list.Items[0], list.Items[1]
	assert.Assert(t, a.Spec.NodeName != b.Spec.NodeName)

	t.Run("pods of different nodes see each other's address", func(t *testing.T) {
		out, code := w.exec(t, a.Name, "get", "http://"+b.Status.PodIP+":8080/")
		assert.Equal(t, code, 0, out)
		assert.Equal(t, out, b.Name+" from "+a.Status.PodIP)
	})
	t.Run("by the other node, not by the router", func(t *testing.T) {
		h, err := netlink.NewHandleAt(vnetns.NsHandle(w.nodes[a.Spec.NodeName].Fd()))
		assert.NilError(t, err)
		defer h.Close()
		routes, err := h.RouteGet(net.ParseIP(b.Status.PodIP))
		assert.NilError(t, err)
		assert.Equal(t, routes[0].Gw.String(), b.Status.HostIP)
	})
	t.Run("a hostNetwork pod has the node's address", func(t *testing.T) {
		agents, err := w.client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=agent"})
		assert.NilError(t, err)
		assert.Equal(t, len(agents.Items), 2)
		for _, p := range agents.Items {
			assert.Equal(t, p.Status.PodIP, p.Status.HostIP)
			out, code := w.exec(t, a.Name, "get", "http://"+p.Status.PodIP+":9000/")
			assert.Equal(t, code, 0, out)
			assert.Assert(t, is.Contains(out, p.Spec.NodeName+" from "))
		}
	})
	t.Run("ClusterIP and NodePort, in both modes of kube-proxy", func(t *testing.T) {
		svc, err := w.client.CoreV1().Services("default").Get(t.Context(), "web", metav1.GetOptions{})
		assert.NilError(t, err)
		for _, p := range []corev1.Pod{a, b} {
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				out, code := w.exec(t, p.Name, "get", "http://"+svc.Spec.ClusterIP+"/")
				return result(code == 0 && strings.HasPrefix(out, "web-"), "%s: %s", p.Name, out)
			}, poll.WithTimeout(20*time.Second))
		}
		for _, node := range []string{"172.18.1.11", "172.18.1.12"} {
			seen := map[string]bool{}
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				out, err := w.outsideGet(fmt.Sprintf("http://%s:%d/", node, svc.Spec.Ports[0].NodePort))
				if err == nil {
					name, _, _ := strings.Cut(out, " ")
					seen[name] = true
				}
				return result(len(seen) == 2, "node %s reaches %v; %s %v", node, seen, out, err)
			}, poll.WithTimeout(20*time.Second), poll.WithDelay(20*time.Millisecond))
		}
	})
}

// outsideGet asks from the host outside.
func (w *world) outsideGet(url string) (string, error) {
	var out bytes.Buffer
	cmd := exec.Command(w.box, "get", url)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := netns.Do(w.outside, cmd.Start); err != nil {
		return "", err
	}
	err := cmd.Wait()
	return out.String(), err
}

func result(ok bool, format string, args ...any) poll.Result {
	if ok {
		return poll.Success()
	}
	return poll.Continue(format, args...)
}

const workloadsYAML = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: web}}}]
      containers: [{name: web, image: "box:test", args: [serve, "8080"], readinessProbe: {httpGet: {port: 8080}}}]
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec:
      hostNetwork: true
      terminationGracePeriodSeconds: 0
      containers: [{name: agent, image: "box:test", args: [serve, "9000"], ports: [{containerPort: 9000}]}]
`

func logsAndExec(t *testing.T, w *world) {
	w.pod(t, "talk", `containers: [{name: main, image: "box:test", args: [wait]}, {name: other, image: "box:test", args: [serve, "81"]}]`)
	w.until(t, "talk", "ready", ready)
	poll.WaitOn(t, func(poll.LogT) poll.Result { // ready, without a probe, is before the first line
		out, err := w.kubectl(t, nil, "logs", "talk", "-c", "other")
		return result(err == nil && out == "serving on 81\n", "%s %v", out, err)
	}, poll.WithTimeout(time.Minute))
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		out, err := w.kubectl(t, nil, "logs", "talk", "-c", "main")
		return result(err == nil && out == "waiting\n", "%s %v", out, err)
	}, poll.WithTimeout(time.Minute))
	out, err := w.kubectl(t, nil, "logs", "talk", "-c", "main", "--timestamps", "--tail=1")
	assert.NilError(t, err, out)
	stamp, text, _ := strings.Cut(out, " ")
	assert.Equal(t, text, "waiting\n")
	_, err = time.Parse(time.RFC3339Nano, stamp)
	assert.NilError(t, err)

	out, err = w.kubectl(t, strings.NewReader("over the wire"), "exec", "-i", "talk", "-c", "main", "--", "box", "copy")
	assert.NilError(t, err, out)
	assert.Equal(t, out, "over the wire")
	out, err = w.kubectl(t, nil, "exec", "talk", "-c", "main", "--", "box", "exit", "7")
	assert.ErrorContains(t, err, "exit status 7", out)
	out, err = w.kubectl(t, nil, "exec", "talk", "-c", "main", "--", "nothing")
	assert.ErrorContains(t, err, "exit status")
	assert.Assert(t, is.Contains(out, "executable file not found in PATH"))

	t.Run("with a terminal", func(t *testing.T) {
		var out bytes.Buffer
		code, err := w.registry.Exec(t.Context(), pods.ExecRequest{
			Cluster: cluster, Namespace: "default", Pod: "talk", Argv: []string{"box", "open", "/dev/tty"}, TTY: true, Stdout: &out,
		})
		assert.NilError(t, err)
		assert.Equal(t, code, 0, out.String())
	})
	t.Run("follow ends with the container", func(t *testing.T) {
		stream, err := w.client.CoreV1().Pods("default").GetLogs("talk", &corev1.PodLogOptions{Container: "main", Follow: true}).Stream(t.Context())
		assert.NilError(t, err)
		defer stream.Close()
		r := bufio.NewReader(stream)
		line, err := r.ReadString('\n')
		assert.NilError(t, err)
		assert.Equal(t, line, "waiting\n")
		out, err := w.kubectl(t, nil, "delete", "pod", "talk", "--grace-period=5")
		assert.NilError(t, err, out)
		rest, err := io.ReadAll(r)
		assert.NilError(t, err)
		assert.Equal(t, string(rest), "told to end\n")
	})
}

func restart(t *testing.T, w *world) {
	w.pod(t, "again", `containers: [{name: main, image: "box:test", args: [wait]}]`)
	w.until(t, "again", "ready", ready)
	poll.WaitOn(t, func(poll.LogT) poll.Result { // ready, without a probe, is before the first line
		b, err := w.client.CoreV1().Pods("default").GetLogs("again", &corev1.PodLogOptions{}).DoRaw(t.Context())
		return result(err == nil && len(b) > 0, "%s %v", b, err)
	}, poll.WithDelay(10*time.Millisecond))
	pid := w.pid(t, "again")
	assert.NilError(t, syscall.Kill(pid, syscall.SIGKILL))
	p := w.until(t, "again", "restarted", func(p *corev1.Pod) bool { return p.Status.ContainerStatuses[0].RestartCount == 1 && ready(p) })
	last := p.Status.ContainerStatuses[0].LastTerminationState.Terminated
	assert.Equal(t, last.ExitCode, int32(137))
	assert.Equal(t, last.Reason, "Error")
	assert.Assert(t, w.pid(t, "again") != pid)
	out, err := w.kubectl(t, nil, "logs", "again", "--previous")
	assert.NilError(t, err, out)
	assert.Equal(t, out, "waiting\n")
}

func (w *world) pid(t *testing.T, name string) int {
	t.Helper()
	for _, p := range w.registry.Pods() {
		if p.Name == name {
			assert.Equal(t, len(p.Containers), 1)
			return p.Containers[0].PID
		}
	}
	t.Fatalf("pod %s is not registered", name)
	return 0
}

func finish(t *testing.T, w *world) {
	w.pod(t, "steps", `
restartPolicy: OnFailure
volumes: [{name: shared, emptyDir: {}}]
initContainers:
- {name: first, image: "box:test", args: [fail-once, /shared/first], volumeMounts: [{name: shared, mountPath: /shared}]}
- {name: beside, image: "box:test", args: [serve, "8080"], restartPolicy: Always, startupProbe: {tcpSocket: {port: 8080}}}
- {name: second, image: "box:test", args: [write, /shared/second, "done"], volumeMounts: [{name: shared, mountPath: /shared}]}
containers: [{name: main, image: "box:test", args: [cat, /shared/second], volumeMounts: [{name: shared, mountPath: /shared}]}]`)
	p := w.until(t, "steps", "succeeded", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodSucceeded })
	assert.Equal(t, p.Status.InitContainerStatuses[0].RestartCount, int32(1))
	assert.Equal(t, p.Status.ContainerStatuses[0].State.Terminated.Reason, "Completed")
	out, err := w.kubectl(t, nil, "logs", "steps", "-c", "main")
	assert.NilError(t, err, out)
	assert.Equal(t, out, "done\n")

	w.pod(t, "fails", `{restartPolicy: Never, containers: [{name: main, image: "box:test", args: [exit, "3"], terminationMessagePolicy: FallbackToLogsOnError}]}`)
	p = w.until(t, "fails", "failed", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	assert.Equal(t, p.Status.ContainerStatuses[0].State.Terminated.ExitCode, int32(3))
	assert.Equal(t, p.Status.ContainerStatuses[0].State.Terminated.Message, "exiting 3\n")
}

func probes(t *testing.T, w *world) {
	w.pod(t, "readiness", `
containers:
- {name: main, image: "box:test", args: [serve, "8080", /tmp/ready], ports: [{name: http, containerPort: 8080}],
   readinessProbe: {httpGet: {path: /ready, port: http}, periodSeconds: 1, failureThreshold: 1}}`)
	w.until(t, "readiness", "running", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	out, code := w.exec(t, "readiness", "write", "/tmp/ready", "")
	assert.Equal(t, code, 0, out)
	p := w.until(t, "readiness", "ready", ready)
	assert.Equal(t, p.Status.ContainerStatuses[0].RestartCount, int32(0))

	w.pod(t, "liveness", `
containers:
- {name: main, image: "box:test", args: [wait],
   livenessProbe: {exec: {command: [box, exit, "1"]}, periodSeconds: 1, failureThreshold: 1}}`)
	w.until(t, "liveness", "restarted", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount > 0
	})
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		events, err := w.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=liveness"})
		ok := err == nil && slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			return e.Reason == "Unhealthy" && strings.Contains(e.Message, "exit code 1")
		})
		return result(ok, "%v %v", events, err)
	})
}

func volumes(t *testing.T, w *world) {
	secrets := w.client.CoreV1().Secrets("default")
	s, err := secrets.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "keys"}, StringData: map[string]string{"a": "one", "b": "two"}}, metav1.CreateOptions{})
	assert.NilError(t, err)
	_, err = w.client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "settings"}, Data: map[string]string{"k": "v"}}, metav1.CreateOptions{})
	assert.NilError(t, err)
	w.pod(t, "files", `
securityContext: {fsGroup: 1234}
volumes:
- {name: keys, secret: {secretName: keys, defaultMode: 0400}}
- {name: all, projected: {sources: [{configMap: {name: settings, items: [{key: k, path: deep/k}]}}, {downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]}}
- {name: absent, configMap: {name: absent, optional: true}}
- {name: scratch, emptyDir: {}}
containers:
- name: main
  image: box:test
  args: [wait]
  securityContext: {readOnlyRootFilesystem: true}
  volumeMounts:
  - {name: keys, mountPath: /keys}
  - {name: all, mountPath: /all}
  - {name: absent, mountPath: /absent}
  - {name: scratch, mountPath: /scratch}
  - {name: keys, mountPath: /etc/one, subPath: a}`)
	w.until(t, "files", "ready", ready)
	for _, tc := range []struct{ want, argv string }{
		{"onetwo", "cat /keys/a /keys/b"},
		{"v", "cat /all/deep/k"},
		{`app="files"`, "cat /all/labels"},
		{"one", "cat /etc/one"},
		{"", "write /scratch/x y"},
		{"open /x: read-only file system", "write /x y"},
		{"open /keys/a: read-only file system", "write /keys/a y"},
	} {
		out, _ := w.exec(t, "files", strings.Fields(tc.argv)...)
		assert.Equal(t, out, tc.want, tc.argv)
	}
	s.StringData = map[string]string{"a": "changed", "c": "new"}
	s.Data = nil
	_, err = secrets.Update(t.Context(), s, metav1.UpdateOptions{})
	assert.NilError(t, err)
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		out, _ := w.exec(t, "files", "cat", "/keys/a", "/keys/c")
		return result(out == "changednew", "%s", out)
	}, poll.WithTimeout(30*time.Second))
	_, code := w.exec(t, "files", "cat", "/keys/b")
	assert.Equal(t, code, 1, "a removed key is gone")
}

func environment(t *testing.T, w *world) {
	w.pod(t, "variables", `
containers:
- name: main
  image: box:test
  command: [box]
  args: ["$(CMD)"]
  resources: {limits: {cpu: 1500m}}
  envFrom: [{prefix: CM_, configMapRef: {name: settings}}]
  env:
  - {name: CMD, value: env}
  - {name: PLAIN, value: "$(CMD) $$(CMD) $(NONE)"}
  - {name: SECRET, valueFrom: {secretKeyRef: {name: keys, key: a}}}
  - {name: MAYBE, valueFrom: {secretKeyRef: {name: keys, key: none, optional: true}}}
  - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
  - {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: LABEL, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}}
  - {name: CPU, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}`)
	p := w.until(t, "variables", "ended once", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount > 0
	})
	out, err := w.kubectl(t, nil, "logs", "variables", "--previous")
	assert.NilError(t, err, out)
	lines := strings.Split(out, "\n")
	for _, want := range []string{
		"PLAIN=env $(CMD) $(NONE)", "SECRET=changed", "NODE=" + p.Spec.NodeName, "IP=" + p.Status.PodIP, "LABEL=variables", "CPU=2", "CM_k=v",
		"KUBERNETES_SERVICE_HOST=10.96.0.1", "HOSTNAME=variables", "FROM_IMAGE=yes",
	} {
		assert.Assert(t, slices.Contains(lines, want), "%s is not in\n%s", want, out)
	}
	assert.Assert(t, !strings.Contains(out, "MAYBE="))
}

func refused(t *testing.T, w *world) {
	for _, tc := range []struct{ name, spec, reason, message string }{
		{"image", `containers: [{name: main, image: "nginx:latest"}]`, "ErrImageNeverPull", `image "nginx:latest" is not known to this lab, which pulls nothing; it has box:test`},
		{"root", `{securityContext: {runAsNonRoot: true}, containers: [{name: main, image: "box:test"}]}`, "CreateContainerConfigError", "set runAsUser"},
		{"command", `containers: [{name: main, image: "box:test", command: [sh]}]`, "RunContainerError", `"sh": executable file not found in PATH`},
		{"config", `containers: [{name: main, image: "box:test", env: [{name: A, valueFrom: {configMapKeyRef: {name: nothing, key: a}}}]}]`, "CreateContainerConfigError", `configmaps "nothing" not found`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w.pod(t, "bad-"+tc.name, tc.spec)
			p := w.until(t, "bad-"+tc.name, "waiting", func(p *corev1.Pod) bool {
				s := p.Status.ContainerStatuses
				return len(s) > 0 && s[0].State.Waiting != nil && s[0].State.Waiting.Reason == tc.reason
			})
			assert.Assert(t, is.Contains(p.Status.ContainerStatuses[0].State.Waiting.Message, tc.message))
		})
	}
	w.pod(t, "bad-sysctl", `{securityContext: {sysctls: [{name: net.ipv4.ip_forward, value: "1"}]}, containers: [{name: main, image: "box:test"}]}`)
	p := w.until(t, "bad-sysctl", "failed", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	assert.Equal(t, p.Status.Reason, "SysctlForbidden")
}

func deletion(t *testing.T, w *world) {
	w.pod(t, "stubborn", `containers: [{name: main, image: "box:test", args: [stubborn]}]`)
	w.until(t, "stubborn", "ready", ready)
	// It is ready as soon as it runs, before it ignores the signal.
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		b, err := w.client.CoreV1().Pods("default").GetLogs("stubborn", &corev1.PodLogOptions{}).DoRaw(t.Context())
		return result(err == nil && strings.Contains(string(b), "not going"), "%s%v", b, err)
	}, poll.WithTimeout(time.Minute), poll.WithDelay(20*time.Millisecond))
	pid := w.pid(t, "stubborn")
	grace := int64(1)
	begin := time.Now()
	assert.NilError(t, w.client.CoreV1().Pods("default").Delete(t.Context(), "stubborn", metav1.DeleteOptions{GracePeriodSeconds: &grace}))
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		_, err := w.client.CoreV1().Pods("default").Get(t.Context(), "stubborn", metav1.GetOptions{})
		return result(apierrors.IsNotFound(err), "%v", err)
	}, poll.WithTimeout(time.Minute), poll.WithDelay(20*time.Millisecond))
	took := time.Since(begin)
	assert.Assert(t, took >= time.Second, "the grace period was not granted: %v", took)
	assert.Assert(t, took < 25*time.Second, "%v", took) // the default is 30 s
	assert.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
}

func nothingRemains(t *testing.T, w *world) {
	zero := int64(0)
	for _, kind := range []string{"deployment", "daemonset"} {
		out, err := w.kubectl(t, nil, "delete", kind, "--all")
		assert.NilError(t, err, out)
	}
	assert.NilError(t, w.client.CoreV1().Pods("default").DeleteCollection(t.Context(), metav1.DeleteOptions{GracePeriodSeconds: &zero}, metav1.ListOptions{}))
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		l, err := w.client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(l.Items) > 0 {
			return poll.Continue("%v %v", err, l)
		}
		return result(len(w.registry.Pods()) == 0, "%v", w.registry.Pods())
	}, poll.WithTimeout(20*time.Second))
	for node := range w.nodes {
		// A pod that is deleted by force is gone from the API before its
		// network is.
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			left, err := filepath.Glob(filepath.Join(w.dir, node, "cni/ipam/lab/10.*"))
			return result(err == nil && len(left) == 0, "addresses are not released: %v %v", left, err)
		}, poll.WithTimeout(time.Minute), poll.WithDelay(20*time.Millisecond))
	}
	w.stop()
	w.ended.Wait()
	running := w.cp.Running()
	entries, err := filepath.Glob("/proc/[0-9]*")
	assert.NilError(t, err)
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(e, "cmdline"))
		if err != nil || len(b) == 0 {
			continue
		}
		argv := strings.ReplaceAll(string(b), "\x00", " ")
		isControlPlane := false
		for _, pid := range running {
			isControlPlane = isControlPlane || e == fmt.Sprintf("/proc/%d", pid)
		}
		assert.Assert(t, isControlPlane || e == "/proc/1", "%s is left: %s", e, argv)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	assert.NilError(t, err)
	assert.Assert(t, !strings.Contains(string(mounts), w.dir), "a mount is left")
}
