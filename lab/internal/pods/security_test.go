package pods_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func security(t *testing.T, w *world) {
	// Bits by capability(7): NET_ADMIN 12, NET_RAW 13; the default set is
	// containerd's.
	const defaults, netAdmin, netRaw = 0xa80425fb, 1 << 12, 1 << 13
	// The machine that runs the test may lack some itself.
	status, err := os.ReadFile("/proc/self/status")
	assert.NilError(t, err)
	var own uint64
	_, after, _ := strings.Cut(string(status), "CapBnd:")
	_, err = fmt.Sscanf(after, "%x", &own)
	assert.NilError(t, err)
	for _, tc := range []struct {
		name, context string
		effective     uint64
		bounding      uint64
		status        map[string]string
		fails         map[string]string // command → error
		works         []string
	}{
		{
			name: "default", context: "{}", effective: defaults, bounding: defaults, status: map[string]string{"NoNewPrivs": "0", "Uid": "0"},
			fails: map[string]string{
				"write /proc/sys/net/ipv4/ip_forward 1":    "read-only file system",
				"write /sys/class/net/eth0/ifalias x":      "read-only file system",
				"open /dev/net/tun":                        "no such file",
				"open /dev/kmsg":                           "no such file",
				"open /proc/sysrq-trigger":                 "read-only file system|no such file",
				"write /bin/box x":                         "text file busy|read-only file system",
				"write /proc/sys/net/ipv4/conf/all/foo 10": "read-only file system|no such file",
			},
			works: []string{"open /dev/null", "write /tmp/x y", "ls /proc/1", "id"},
		},
		{
			name: "net-admin", context: `{capabilities: {drop: [ALL], add: [NET_ADMIN, NET_RAW]}, allowPrivilegeEscalation: false}`,
			effective: netAdmin | netRaw, bounding: netAdmin | netRaw, status: map[string]string{"NoNewPrivs": "1"},
			fails: map[string]string{"write /proc/sys/net/ipv4/ip_forward 1": "read-only file system"},
		},
		{
			// As in a real cluster: an added capability is of no use to a
			// user that is not root.
			name: "non-root", context: `{runAsUser: 65532, runAsGroup: 65533, runAsNonRoot: true, capabilities: {add: [NET_ADMIN]}}`,
			effective: 0, bounding: defaults | netAdmin, status: map[string]string{"Uid": "65532", "Gid": "65533", "CapAmb": "0000000000000000"},
			fails: map[string]string{"write /etc/x y": "permission denied"},
		},
		{
			name: "privileged", context: "{privileged: true}", effective: own, bounding: own,
			works: []string{"write /proc/sys/net/ipv4/conf/all/forwarding 1", "open /dev/net/tun"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w.pod(t, tc.name, `containers: [{name: main, image: "box:test", args: [wait], securityContext: `+tc.context+`}]`)
			w.until(t, tc.name, "ready", ready)
			for who, file := range map[string]string{"the container": "/proc/1/status", "a command in it": "/proc/self/status"} {
				out, code := w.exec(t, tc.name, "cat", file)
				assert.Equal(t, code, 0, out)
				got := map[string]string{}
				for line := range strings.SplitSeq(out, "\n") {
					k, v, _ := strings.Cut(line, ":")
					got[k], _, _ = strings.Cut(strings.TrimSpace(v), "\t")
				}
				assert.Equal(t, got["CapEff"], fmt.Sprintf("%016x", tc.effective), who)
				assert.Equal(t, got["CapPrm"], fmt.Sprintf("%016x", tc.effective), who)
				assert.Equal(t, got["CapBnd"], fmt.Sprintf("%016x", tc.bounding), who)
				for k, v := range tc.status {
					assert.Equal(t, got[k], v, "%s of %s", k, who)
				}
			}
			for command, want := range tc.fails {
				out, code := w.exec(t, tc.name, strings.Fields(command)...)
				assert.Equal(t, code, 1, command)
				ok := slices.ContainsFunc(strings.Split(want, "|"), func(s string) bool { return strings.Contains(out, s) })
				assert.Assert(t, ok, "%s: %s", command, out)
			}
			for _, command := range tc.works {
				out, code := w.exec(t, tc.name, strings.Fields(command)...)
				assert.Equal(t, code, 0, "%s: %s", command, out)
			}
		})
	}
	t.Run("a command runs in the container's PID namespace", func(t *testing.T) {
		w.pod(t, "pids", `containers: [{name: main, image: "box:test", args: [wait]}]`)
		w.until(t, "pids", "ready", ready)
		out, _ := w.exec(t, "pids", "id")
		var uid, gid, pid int
		_, err := fmt.Sscan(out, &uid, &gid, &pid)
		assert.NilError(t, err)
		assert.Assert(t, pid < 50, out)
	})
}

func token(t *testing.T, w *world) {
	w.pod(t, "caller", `containers: [{name: main, image: "box:test", args: [wait]}]`)
	w.until(t, "caller", "ready", ready)
	var out string
	poll.WaitOn(t, func(poll.LogT) poll.Result { // kube-proxy may need a moment for 10.96.0.1
		out, _ = w.exec(t, "caller", "api", "/api/v1/namespaces/default/pods")
		return result(strings.HasPrefix(out, "403"), "%s", out)
	}, poll.WithTimeout(20*time.Second))
	assert.Assert(t, is.Contains(out, `system:serviceaccount:default:default`))

	raw, code := w.exec(t, "caller", "cat", "/var/run/secrets/kubernetes.io/serviceaccount/token")
	assert.Equal(t, code, 0)
	review := func() (bool, map[string]string) {
		r, err := w.review(t, raw)
		assert.NilError(t, err)
		return r.Status.Authenticated, flatten(r.Status.User.Extra)
	}
	ok, extra := review()
	assert.Assert(t, ok)
	p, err := w.client.CoreV1().Pods("default").Get(t.Context(), "caller", metav1.GetOptions{})
	assert.NilError(t, err)
	assert.Equal(t, extra["authentication.kubernetes.io/pod-name"], "caller")
	assert.Equal(t, extra["authentication.kubernetes.io/node-name"], p.Spec.NodeName, "which the policy of the node daemon reads")
	zero := int64(0)
	assert.NilError(t, w.client.CoreV1().Pods("default").Delete(t.Context(), "caller", metav1.DeleteOptions{GracePeriodSeconds: &zero}))
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		ok, _ := review()
		return result(!ok, "the token is still good")
	}, poll.WithTimeout(30*time.Second)) // the API server remembers for 10 s that it was
}

func hostPaths(t *testing.T, w *world) {
	for _, node := range []string{"node-1", "node-2"} {
		w.pod(t, "host-"+node, `
nodeName: `+node+`
volumes:
- {name: tun, hostPath: {path: /dev/net/tun, type: CharDevice}}
- {name: state, hostPath: {path: /var/lib/isthmus, type: DirectoryOrCreate}}
containers:
- {name: main, image: "box:test", args: [wait], volumeMounts: [{name: tun, mountPath: /dev/net/tun}, {name: state, mountPath: /state}]}`)
		w.until(t, "host-"+node, "ready", ready)
	}
	out, code := w.exec(t, "host-node-1", "open", "/dev/net/tun")
	assert.Equal(t, code, 0, out)
	out, code = w.exec(t, "host-node-1", "write", "/state/x", "y")
	assert.Equal(t, code, 0, out)
	out, _ = w.exec(t, "host-node-2", "ls", "/state")
	assert.Equal(t, out, "", "nodes do not share their disks")
	_, err := os.Stat("/var/lib/isthmus")
	assert.Assert(t, os.IsNotExist(err), "the machine's own /var is not touched")
}

// review asks the API server what it thinks of a token.
func (w *world) review(t *testing.T, token string) (*authenticationv1.TokenReview, error) {
	t.Helper()
	return w.client.AuthenticationV1().TokenReviews().Create(t.Context(),
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
}

func flatten(extra map[string]authenticationv1.ExtraValue) map[string]string {
	out := map[string]string{}
	for k, v := range extra {
		out[k] = strings.Join(v, ",")
	}
	return out
}
