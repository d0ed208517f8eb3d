package supervisor_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

func TestTheSameNetworkInAMachine(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "qemu-system-x86_64")
	nettest.Slow(t, "boots a virtual machine")
	// The machine's agent is this program.
	bin := t.TempDir()
	exe, err := os.ReadFile("/proc/self/exe")
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(filepath.Join(bin, "lab"), exe, 0o755))
	for _, name := range []string{"first", "restored"} {
		t.Run(name, func(t *testing.T) {
			c, err := supervisor.Start(t.Context(), supervisor.Config{
				Name: name, World: supervisor.VM, Spec: two(t), BinDir: bin, RunDir: runDir(t), Ephemeral: true, KubernetesLess: true, Snapshots: true,
				Progress: func(p world.Progress) { t.Log(p.Message, p.Took) },
			})
			assert.NilError(t, err)
			defer c.Close()
			checkMachine(t, c)
			s, err := c.Status(t.Context())
			assert.NilError(t, err)
			assert.Assert(t, s.VM.Restored || name == "first", "the second one was not restored")
		})
	}
}

func checkMachine(t *testing.T, c *world.Client) {
	t.Helper()
	since := time.Now()
	sh(t, c, "milan/node-1", "ping -c1 -W5 172.18.1.2") // the control plane, outside of the machine
	sh(t, c, "rome/control-plane", "busybox ping -c1 -W5 172.18.2.11")
	sh(t, c, "milan/node-1", "ping -c1 -W5 172.18.2.11")
	sh(t, c, "milan/node-1", "ip link add g type geneve id 1 remote 172.18.1.12 && ip link add w type wireguard && [ -z \"$(ls /sys/module/br_netfilter 2>/dev/null)\" ]")

	s, err := c.Status(t.Context())
	assert.NilError(t, err)
	assert.Equal(t, s.VM.Retries, 0)
	assert.Equal(t, len(s.VM.Warnings), 0, "%q", s.VM.Warnings)
	t.Logf("%+v", *s.VM)

	w, err := c.WirePackets(t.Context(), world.WireQuery{On: "wan", Since: since})
	assert.NilError(t, err)
	// The question itself passes the management network with the token in it.
	seen, err := c.Sightings(t.Context(), world.SightingQuery{Token: "0ddba11c0ffee000"})
	assert.NilError(t, err)
	assert.Equal(t, len(seen), 0, "%v", seen)
	echoes := 0
	for _, f := range w.Flows {
		if f.Proto == "icmp" {
			echoes += f.Packets
		}
	}
	assert.Equal(t, echoes, 2, "one echo and its reply: %+v", w.Flows)
}
