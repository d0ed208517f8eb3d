package kernel

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestAnEditIsRepairedOnce: the kernel tells of one transaction in many
// messages, and we repair it when we have read the first. The others, read
// after that, don't make us repair it again; what is edited then does.
func TestAnEditIsRepairedOnce(t *testing.T) {
	t.Parallel()
	ns, test := openWith(t)
	need(t, ns, FeatureNAT)
	nettest.Need(t, "nft")
	want := netstate.State{Tables: []netstate.Table{many(3)}}
	converge(t, ns, want)
	const rules = 1000
	script := strings.Repeat("add rule ip isthmus-maps prerouting accept\n", rules)
	for try := range 20 {
		test.Run("sh", "-c", fmt.Sprintf("printf %%s '%s' | nft -f -", script))
		select {
		case <-ns.Changed():
		case <-time.After(5 * time.Second):
			t.Fatal("the edit was not announced")
		}
		assert.Assert(t, !netstate.Diff(observe(t, ns), want).Empty(), "edit %d was not seen", try)
		converge(t, ns, want)
		test.Run("nft", "add", "rule", "ip", "isthmus-maps", "prerouting", "accept")
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			if netstate.Diff(observe(t, ns), want).Empty() {
				return poll.Continue("the edit after repair %d is not seen", try)
			}
			return poll.Success()
		}, poll.WithDelay(time.Millisecond), poll.WithTimeout(5*time.Second))
		converge(t, ns, want)
	}
}
