package kernel

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
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
		case <-time.After(30 * time.Second):
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
		}, poll.WithDelay(time.Millisecond), poll.WithTimeout(30*time.Second))
		converge(t, ns, want)
	}
}

// brokenSocket is a netlink socket from which nothing can be read for a while, which
// no kernel does at will.
type brokenSocket struct {
	until time.Time
	reads int
}

func (s *brokenSocket) Receive() ([]nl.Message, error) {
	s.reads++
	if time.Now().Before(s.until) {
		return nil, unix.EIO
	}
	return nil, unix.EBADF // it has been closed
}

// TestMonitorBacksOff: an error that stays is tried again more and more rarely, and
// each time the loop is told to look. Whoever closes the monitor does not wait for it.
func TestMonitorBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closing, start := make(chan struct{}), time.Now()
		m := &monitor{changed: make(chan struct{}, 1), closing: closing}
		s := &brokenSocket{until: start.Add(10 * time.Minute)}
		lost := 0
		m.watch(s, func(nl.Message) {}, func() { lost++ })
		assert.Equal(t, lost, s.reads-1)
		assert.Assert(t, s.reads > 60 && s.reads < 80, "%d reads", s.reads)
		assert.Equal(t, len(m.changed), 1)

		s.until = time.Now().Add(time.Hour)
		time.AfterFunc(time.Minute, func() { close(closing) })
		start = time.Now()
		m.watch(s, func(nl.Message) {}, func() {})
		assert.Equal(t, time.Since(start), time.Minute)
	})
}

// TestHear: who asks what somebody else has edited waits for a monitor that is late, and does not
// for messages that are lost.
func TestHear(t *testing.T) {
	for _, tt := range []struct {
		name string
		told time.Duration // when the monitor reads it
		lost time.Duration // when it learns that messages are lost; 0: never
		want time.Duration
	}{
		{"late", 3 * time.Second, 0, 3 * time.Second},
		{"lost meanwhile", time.Hour, time.Second, time.Second},
		{"lost before", time.Hour, -1, hearsLost},
		{"lost, and told all the same", 20 * time.Millisecond, -1, 20 * time.Millisecond},
		{"never told", time.Hour, 0, hearsLate},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &monitor{changed: make(chan struct{}, 1), news: make(chan struct{}), edited: map[netstate.TableID]struct{}{}, heard: 7}
				generation := nl.Message{Data: []byte{0, 0, 0, 0, 8, 0, unix.NFTA_GEN_ID, 0, 0, 0, 0, 8}}
				generation.Header.Type = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
				over := time.AfterFunc(tt.told, func() { m.table(generation) })
				switch {
				case tt.lost < 0:
					m.missed()
				case tt.lost > 0:
					time.AfterFunc(tt.lost, m.missed)
				}
				start := time.Now()
				m.hear(8, m.losses)
				assert.Equal(t, time.Since(start), tt.want)
				over.Stop()

				// What is caught up with is over. What was lost later is not.
				m.table(generation)
				m.missed()
				m.hear(8, m.losses-1)
				start = time.Now()
				m.hear(9, m.losses)
				assert.Equal(t, time.Since(start), hearsLost)
				m.hear(8, m.losses)
				start = time.Now()
				m.hear(9, m.losses)
				assert.Equal(t, time.Since(start), hearsLate)
			})
		})
	}
}
