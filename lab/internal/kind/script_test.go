package kind

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// containerd is a crictl that knows one pod, with one container that runs.
const containerd = `#!/bin/sh
case "$*" in
'pods --quiet --state ready --namespace default --name ^web$') echo 1a2b ;;
'inspectp 1a2b') printf '{"info":{"runtimeSpec":{"linux":{"namespaces":[{"type":"ipc","path":"/x"},{"type":"network","path":"%s"}]}}}}' "$NETNS" ;;
'ps --quiet --pod 1a2b' | 'ps --quiet --pod 1a2b --name ^probe$') echo 3c4d ;;
'inspect 3c4d') printf '{"info":{"pid":%s}}' "$VICTIM" ;;
esac
`

// script runs one of the scripts for nodes here.
func script(t *testing.T, text string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", append([]string{"-c", text, "sh"}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// The scripts that nodes run find a pod's network namespace and its processes by
// what containerd says.
func TestScripts(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "jq", "nsenter", "ip")
	ns := nettest.NewNS(t)
	bin := t.TempDir()
	assert.NilError(t, os.WriteFile(filepath.Join(bin, "crictl"), []byte(containerd), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("NETNS", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.FD()))
	ns.Run("ip", "link", "add", "lab-pod", "type", "veth", "peer", "name", "lab-peer")

	out, err := script(t, inPod, "default", "web", "ip", "-o", "link", "show", "lab-pod")
	assert.NilError(t, err, out)
	assert.Check(t, is.Contains(out, "lab-pod"))
	out, err = script(t, inPod, "default", "web", "sh", "-c", "exit 7")
	assert.ErrorContains(t, err, "exit status 7", out)
	out, err = script(t, inPod, "default", "nobody", "ip", "link")
	assert.ErrorContains(t, err, "exit status 125")
	assert.Equal(t, strings.TrimSpace(out), "containerd runs no pod default/nobody")

	victim := exec.CommandContext(t.Context(), "cat")
	stdin, err := victim.StdinPipe()
	assert.NilError(t, err)
	defer stdin.Close()
	assert.NilError(t, victim.Start())
	t.Setenv("VICTIM", fmt.Sprint(victim.Process.Pid))
	for _, container := range []string{"", "probe"} {
		out, err = script(t, killScript, "default", "web", container)
		assert.NilError(t, err, out)
	}
	assert.ErrorContains(t, victim.Wait(), "killed")
	out, err = script(t, killScript, "default", "nobody", "")
	assert.ErrorContains(t, err, "exit status 1", out)
	out, err = script(t, killScript, "default", "web", "sidecar")
	assert.ErrorContains(t, err, "exit status 1", out)
	assert.Equal(t, strings.TrimSpace(out), "pod default/web has no running container sidecar")
}
