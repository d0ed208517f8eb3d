package expect_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// TestExplain is what a person reads when the world is not as expected: every
// case is one thing that is wrong with it, and what reach, source, path and
// never say about it.
func TestExplain(t *testing.T) {
	for _, tc := range []struct {
		name   string
		proto  string
		break_ func(*fakeWorld)
	}{
		{"nothing is wrong", "tcp", func(*fakeWorld) {}},
		{"nothing is wrong with icmp", "icmp", func(*fakeWorld) {}},
		{"lost in the tunnel", "udp", func(w *fakeWorld) { w.answers, w.fails, w.hops = false, prober.ErrorTimeout, seedsPath()[:4] }},
		{"no connection", "tcp", func(w *fakeWorld) { w.answers, w.fails, w.hops = false, prober.ErrorTimeout, nil }},
		{"server silent", "udp", func(w *fakeWorld) { w.answers, w.fails = false, prober.ErrorTimeout }},
		{"translated by the gateway", "tcp", func(w *fakeWorld) {
			w.translate = map[string]netip.Addr{"milan/gateway": netip.MustParseAddr("10.0.2.9")}
		}},
		{"past the gateways", "tcp", func(w *fakeWorld) {
			w.hops, w.udpOnWAN = []string{"milan/web", "milan/node-1", "milan/router", "wan", "rome/router", "rome/node-1", "rome/web"}, 0
		}},
		{"reply by another node", "tcp", func(w *fakeWorld) {
			w.back = slices.Clone(seedsPath())
			slices.Reverse(w.back)
			w.back = slices.Insert(w.back, 2, "rome/router")
		}},
		{"readable", "tcp", func(w *fakeWorld) { w.clearText = true }},
		{"rings too small", "tcp", func(w *fakeWorld) { w.lost = 7 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			tc.break_(w)
			from, to := ref(t, row, "milan/web"), ref(t, row, "rome/web")
			var via []expect.Ref
			for _, h := range []string{"milan/web", "milan/node-1", "milan/gateway", "rome/gateway", "rome/node-1", "rome/web"} {
				via = append(via, ref(t, row, h))
			}
			var b strings.Builder
			for _, e := range []expect.Expectation{
				&expect.Reach{From: from, To: to, Proto: tc.proto},
				&expect.Source{SeenBy: to, Is: from},
				&expect.Path{Via: via, Symmetric: true},
				&expect.Never{Payload: "token", On: ref(t, row, "wan")},
			} {
				res, err := e.Check(t.Context(), row)
				assert.NilError(t, err)
				fmt.Fprintf(&b, "%s: %v\n", e, res.OK)
				if !res.OK {
					fmt.Fprintf(&b, "  want  %s\n  got   %s\n  why   %s\n  path  %v reply %v\n", res.Want, res.Got, res.Why, res.Path, res.Reply)
				}
			}
			golden.Assert(t, b.String(), strings.ReplaceAll(tc.name, " ", "-")+".golden")
		})
	}
}

// TestNever: an absence counts where the probes themselves passed, encrypted.
func TestNever(t *testing.T) {
	for _, tc := range []struct {
		name         string
		break_       func(*fakeWorld)
		ok, notFinal bool
		got          string
	}{
		{"passed encrypted", func(*fakeWorld) {}, true, true, "none in 100 packets on wan, among them 2 encrypted ones of the probes"},
		{"only the gateways' own packets are encrypted", func(w *fakeWorld) { w.unsealed = true }, false, true,
			"probe token1: milan/gateway sent it into a tunnel at 00:16:40.000, but no encrypted packet of its length anywhere before it came out"},
		{"another way than the network", func(w *fakeWorld) { w.sealedOnWAN = 0 }, false, true,
			"probe token1: the encrypted packet that milan/gateway sent at 00:16:40.000 did not pass wan: it went another way, or wan is not between the gateways"},
		{"past the gateways", func(w *fakeWorld) { w.hops = []string{"milan/web", "milan/node-1", "rome/node-1", "rome/web"} }, false, true,
			"probe token1: 0 hosts sent it into a tunnel, there and back, instead of two: it, or its answer, went another way"},
		{"the answer past the gateways", func(w *fakeWorld) { w.back = []string{"rome/web", "rome/node-1", "milan/node-1", "milan/web"} }, false, true,
			"probe token1: 1 hosts sent it into a tunnel, there and back, instead of two: it, or its answer, went another way"},
		{"readable beside the tunnel", func(w *fakeWorld) { w.clearText = true }, false, false, "28 frames with the payload in clear text"},
		{"overwritten", func(w *fakeWorld) { w.lost = 3 }, false, false, "3 packets on wan were overwritten before they were searched; an absence proves nothing"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			tc.break_(w)
			_, err := row.Send(t.Context(), ref(t, row, "milan/web").Operand, ref(t, row, "rome/web").Operand, "udp", 0)
			assert.NilError(t, err)
			res, err := (&expect.Never{Payload: "token", On: ref(t, row, "wan")}).Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.ok, "%+v", res)
			assert.Equal(t, res.Got, tc.got)
			assert.Equal(t, res.OK || !res.Final, tc.notFinal)
		})
	}
}

// TestRetransmission: a second copy of every packet is the same path.
func TestRetransmission(t *testing.T) {
	w, row := newFake(t)
	w.hops = append(seedsPath(), seedsPath()...)
	e := &expect.Path{Via: []expect.Ref{ref(t, row, "milan/web"), ref(t, row, "milan/node-1"), ref(t, row, "milan/gateway"), ref(t, row, "rome/gateway"), ref(t, row, "rome/node-1"), ref(t, row, "rome/web")}}
	_, err := row.Send(t.Context(), ref(t, row, "milan/web").Operand, ref(t, row, "rome/web").Operand, "udp", 0)
	assert.NilError(t, err)
	res, err := e.Check(t.Context(), row)
	assert.NilError(t, err)
	assert.Assert(t, res.OK, "%+v", res)
}

// TestUnreachable: all of several probes must fail, in the way that is meant,
// and none for want of being sent.
func TestUnreachable(t *testing.T) {
	for _, tc := range []struct {
		name, proto, as string
		break_          func(*fakeWorld)
		ok              bool
		got, why        string
		probes          int
	}{
		{"drop", "tcp", "drop", func(*fakeWorld) {}, true, "no answer within 1s; so 3 probes in 2s", "", 3},
		{"reset", "tcp", "reset", func(w *fakeWorld) { w.fails = prober.ErrorRefused }, true, "refused: the host answers, nothing listens there; so 3 probes in 2s", "", 3},
		{"icmp", "udp", "icmp", func(w *fakeWorld) { w.fails = prober.ErrorICMPHost }, true, "ICMP host unreachable; so 3 probes in 2s", "", 3},
		{"in another way", "tcp", "drop", func(w *fakeWorld) { w.fails = prober.ErrorICMPHost }, false, "ICMP host unreachable", "it is unreachable, but in another way than the row says; as told", 1},
		{"answered", "tcp", "drop", func(w *fakeWorld) { w.answers = true }, false, "rome/web answered",
			"by way of milan/web, milan/node-1, milan/gateway, rome/gateway, rome/node-1, rome/web", 1},
		{"answered at last", "udp", "drop", func(w *fakeWorld) { w.answersAfter = 2 }, false, "rome/web answered",
			"by way of milan/web, milan/node-1, milan/gateway, rome/gateway, rome/node-1, rome/web", 3},
		{"never sent", "udp", "drop", func(w *fakeWorld) { w.hops = nil }, false, "no answer within 1s", "the request did not leave milan/web, so it says nothing of rome/web", 1},
		{"the lab's error", "udp", "drop", func(w *fakeWorld) { w.fails = prober.ErrorOther }, false, "other: as told", "it is unreachable, but in another way than the row says; as told", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			synctest.Test(t, func(t *testing.T) {
				w.answers, w.fails = false, prober.ErrorTimeout
				tc.break_(w)
				start := time.Now()
				e := &expect.Unreachable{From: ref(t, row, "milan/web"), To: ref(t, row, "rome/web"), Proto: tc.proto, As: tc.as}
				res, err := e.Check(t.Context(), row)
				assert.NilError(t, err)
				assert.Equal(t, res.OK, tc.ok, "%+v", res)
				assert.Equal(t, res.Got, tc.got)
				assert.Equal(t, res.Why, tc.why)
				assert.Equal(t, len(row.Probes), tc.probes)
				tokens := map[string]bool{}
				for i, p := range row.Probes {
					tokens[p.Token] = true
					assert.Equal(t, p.Sent.Sub(start), time.Duration(i)*time.Second)
				}
				assert.Equal(t, len(tokens), tc.probes, "each has a token of its own")
			})
		})
	}
}

// TestUnreachableFor: how long is what the scenario says.
func TestUnreachableFor(t *testing.T) {
	w, row := newFake(t)
	synctest.Test(t, func(t *testing.T) {
		w.answers, w.fails = false, prober.ErrorTimeout
		e := &expect.Unreachable{From: ref(t, row, "milan/web"), To: ref(t, row, "rome/web"), Proto: "udp", As: "drop", For: 5 * time.Second}
		res, err := e.Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Assert(t, res.OK, "%+v", res)
		assert.Equal(t, len(row.Probes), 6)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = e.Check(ctx, row)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

// TestBlind: a world without captures finds out whether something is reached,
// and says nothing of the way.
func TestBlind(t *testing.T) {
	for _, answers := range []bool{true, false} {
		w, row := newFake(t)
		w.blind, w.answers, w.fails = true, answers, prober.ErrorTimeout
		res, err := (&expect.Reach{From: ref(t, row, "milan/web"), To: ref(t, row, "rome/web"), Proto: "tcp"}).Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, answers)
		assert.Equal(t, res.Why, "")
		res, err = (&expect.Unreachable{From: ref(t, row, "milan/web"), To: ref(t, row, "rome/web"), Proto: "tcp", As: "drop"}).Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, !answers)
	}
}

func TestOperands(t *testing.T) {
	_, row := newFake(t)
	var got []string
	for _, o := range expect.Operands("ping {rome/web.ip} {user.ip} {.status.x} {milan/nobody.ip} { accept; }", row.Topology) {
		got = append(got, o.String())
	}
	assert.DeepEqual(t, got, []string{"rome/web.ip", "user.ip"})
}

func TestKubectlPrints(t *testing.T) {
	for _, tc := range []struct{ prints, why string }{
		{"NAME NODE IP LOCAL NODE IP REMOTE AGE\nnode-1 <ip> <age>", ""},
		{"NAME NODE IP LOCAL NODE IP REMOTE AGE\nnode-1 <age> <age>", `line 2: "10.0.1.1" instead of "<age>"`},
		{"NAME NODE IP LOCAL NODE IP REMOTE AGE\nnode-1 <ip> <ip> <age>", "line 2 has 3 words, not 4: node-1   10.0.1.1                         5m2s"},
		{"NAME NODE IP LOCAL NODE IP REMOTE AGE\nnode-1 <ip> <age>\nnode-2 <ip> <age>", "line is missing: node-2 <ip> <age>"},
		{"NAME LOCAL REMOTE AGE", "line 1 has 8 words, not 4: NAME     NODE IP LOCAL   NODE IP REMOTE   AGE"},
	} {
		w, row := newFake(t)
		e := &expect.Kubectl{In: "milan", Run: "get internalnodes -o wide", Prints: tc.prints}
		res, err := e.Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, tc.why == "")
		assert.Equal(t, res.Why, tc.why)
		assert.DeepEqual(t, w.ran[0], []string{"milan/control-plane", "kubernetes", "kubectl", "get", "internalnodes", "-o", "wide"})
	}
}

func TestExpand(t *testing.T) {
	_, row := newFake(t)
	for text, want := range map[string]string{
		"ping {rome/web.ip}":                  "ping 10.1.1.2",
		"{milan/gateway.ip} {user.ip}":        "10.0.2.9 203.0.113.101",
		"{milan/gateway.node.nodename}":       "node-2",
		"{milan/gateway.othernode.ip}/32":     "172.18.1.11/32",
		"{.status.x} ${a%.*} { accept; } {2}": "{.status.x} ${a%.*} { accept; } {2}",
	} {
		got, err := row.Expand(t.Context(), text)
		assert.NilError(t, err)
		assert.Equal(t, got, want)
	}
	_, err := row.Expand(t.Context(), "{milan/node-1.internal}")
	assert.ErrorContains(t, err, "milan/node-1 has no address of the internal CIDR yet")
}

// An address in a regular expression is one address, however many there are that begin so.
func TestPattern(t *testing.T) {
	_, row := newFake(t)
	for _, tc := range []struct {
		pattern, text string
		matches       bool
	}{
		{"^via {rome/web.ip} dev", "via 10.1.1.2 dev eth0", true},
		{"via {rome/web.ip}", "via 10.1.1.2/32", true},
		{"{rome/web.ip}", "10.1.1.23", false},
		{"{rome/web.ip}", "110.1.1.2", false},
		{"{rome/web.ip}", "10.111.2", false},
		{"^({milan/gateway.node.ip}|{rome/web.ip}):[0-9]{2}$", "172.18.1.12:80", true},
	} {
		got, err := row.Pattern(t.Context(), tc.pattern)
		assert.NilError(t, err)
		assert.Equal(t, got.MatchString(tc.text), tc.matches, "%s in %s", tc.pattern, tc.text)
	}
	_, err := row.Pattern(t.Context(), "via {milan/node-1.internal}")
	assert.ErrorContains(t, err, "milan/node-1 has no address of the internal CIDR yet")
}

func TestLogAndMarks(t *testing.T) {
	w, row := newFake(t)
	name := "milan/node-2/log/liqo-tenant-rome_gw-rome-x_1-2-3/gateway/0"
	w.logs = []world.Log{{Name: name, Text: "level=INFO msg=old\n"}}
	row.LogMarks = expect.Marks(w.logs)
	w.logs[0].Text += "level=INFO msg=new\n"
	for line, ok := range map[string]bool{"msg=new": true, "msg=old": false} {
		res, err := (&expect.Log{Of: ref(t, row, "milan/gateway"), Line: line}).Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, ok, "%+v", res)
	}
}

func TestFlow(t *testing.T) {
	for _, tc := range []struct{ breaks, why string }{
		{"", ""},
		{prober.ErrorReset, "reset: connection reset by peer"},
	} {
		w, row := newFake(t)
		w.fails = tc.breaks
		f, err := row.OpenFlow(t.Context(), expect.Stream{From: ref(t, row, "milan/web").Operand, To: ref(t, row, "rome/web").Operand, Proto: "tcp"})
		assert.NilError(t, err)
		defer f.Close()
		row.Flows["f"] = f
		e := &expect.Flow{Name: "f", Alive: true, Gap: time.Second}
		var res expect.Result
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
			res, err = e.Check(t.Context(), row)
			assert.NilError(t, err)
			if res.OK || res.Final {
				break
			}
		}
		assert.Equal(t, res.OK, tc.why == "", "%+v", res)
		assert.Equal(t, res.Why, tc.why)
	}
}

// TestFlowExcused: a stream that was silent for longer than its bound, and for no longer than a
// slow machine may make it, passes, and the result says by how much.
func TestFlowExcused(t *testing.T) {
	for patience, want := range map[int]string{
		1: "",
		3: "flow f: it was silent for 60ms; the bound is 50ms, and 250ms on a machine as slow as this one was",
	} {
		_, row := newFake(t)
		row.Patience = patience
		f, err := row.OpenFlow(t.Context(), expect.Stream{From: ref(t, row, "milan/web").Operand, To: ref(t, row, "rome/web").Operand, Proto: "tcp"})
		assert.NilError(t, err)
		row.Flows["f"] = f
		row.StepStarted = time.Now().Add(-time.Minute) // watched for long enough
		e := &expect.Flow{Name: "f", Gap: 50 * time.Millisecond, Whole: true}
		var res expect.Result
		for deadline := time.Now().Add(5 * time.Second); !res.OK && !res.Final && time.Now().Before(deadline); {
			res, err = e.Check(t.Context(), row)
			assert.NilError(t, err)
		}
		f.Close()
		assert.Equal(t, res.OK, want != "", "%+v", res)
		assert.Equal(t, res.Excused, want)
	}
}

// A stream is silent when nothing comes back, not when it was reset or nobody has looked.
func TestFlowSilent(t *testing.T) {
	for _, tc := range []struct {
		name     string
		mute     bool
		fails    string
		why      string
		patience int // how many times as long all takes
	}{
		{"nothing comes back", true, "", "", 1},
		{"nothing comes back, of an emulated machine", true, "", "", 3},
		{"something comes back", false, "", "after the step began", 1},
		{"it was reset", true, prober.ErrorReset, "reset: connection reset by peer", 1},
	} {
		w, row := newFake(t)
		w.mute, w.fails, row.Patience = tc.mute, tc.fails, tc.patience
		f, err := row.OpenFlow(t.Context(), expect.Stream{From: ref(t, row, "milan/web").Operand, To: ref(t, row, "rome/web").Operand, Proto: "udp"})
		assert.NilError(t, err)
		row.Flows["f"] = f
		e := &expect.Flow{Name: "f", Silent: 100 * time.Millisecond}
		var res expect.Result
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
			res, err = e.Check(t.Context(), row)
			assert.NilError(t, err)
			if res.OK || res.Final {
				break
			}
		}
		f.Close()
		assert.Equal(t, res.OK, tc.why == "", "%s: %+v", tc.name, res)
		assert.Check(t, strings.Contains(res.Why, tc.why), "%s: %+v", tc.name, res)
		assert.Assert(t, !res.OK || time.Since(row.StepStarted) >= e.Silent*time.Duration(tc.patience), tc.name)
	}
}

// What was silent before the step counts for those who ask for the whole life.
func TestFlowWhole(t *testing.T) {
	_, row := newFake(t)
	f, err := row.OpenFlow(t.Context(), expect.Stream{From: ref(t, row, "milan/web").Operand, To: ref(t, row, "rome/web").Operand, Proto: "tcp"})
	assert.NilError(t, err)
	defer f.Close()
	row.Flows["f"] = f
	row.StepStarted = time.Now().Add(time.Hour) // after all that is reported
	for _, tc := range []struct {
		whole bool
		why   string
	}{
		{false, "it has not spoken yet since the step began"},
		{true, "silent for 60ms"},
	} {
		e := &expect.Flow{Name: "f", Alive: true, Gap: 50 * time.Millisecond, Whole: tc.whole}
		var res expect.Result
		for deadline := time.Now().Add(5 * time.Second); res.Why != tc.why && time.Now().Before(deadline); {
			res, err = e.Check(t.Context(), row)
			assert.NilError(t, err)
		}
		assert.Equal(t, res.Why, tc.why)
	}
}

func TestLeftovers(t *testing.T) {
	before := expect.Leftovers{"a": 1, "b": 1, "d": 1, "e": 2}
	more, less := before.Compare(expect.Leftovers{"b": 1, "c": 1, "d": 2, "e": 1})
	assert.DeepEqual(t, more, []string{"c", "d"}) // one more of what is there twice
	assert.DeepEqual(t, less, []string{"a", "e"})
}

// TestPathInVXLAN: packets pass the gateways' nodes outside of the overlay. A
// node that is the gateway's, too, is one hop.
func TestPathInVXLAN(t *testing.T) {
	far := []string{"milan/web", "milan/node-1", "milan/node-2!vxlan", "milan/node-2", "milan/gateway", "rome/gateway", "rome/node-2", "rome/node-1!vxlan", "rome/node-1", "rome/web"}
	near := []string{"milan/probe", "milan/node-2", "milan/gateway", "rome/gateway", "rome/node-2", "rome/probe"}
	for _, tc := range []struct {
		name, from, to string
		hops, back     []string
		want           string // why it is not as expected; empty: it is
	}{
		{"on other nodes", "milan/web", "rome/web", far, nil, ""},
		{"on the gateways' nodes", "milan/probe", "rome/probe", near, nil, ""},
		{"the reply skips the gateway's node", "milan/web", "rome/web", far,
			[]string{"rome/web", "rome/node-1", "rome/node-2", "rome/gateway", "milan/gateway", "milan/node-1", "milan/web"},
			"the reply went from milan/gateway to milan/node-1 instead of milan/node-2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			w.hops, w.back = tc.hops, tc.back
			from, to := ref(t, row, tc.from), ref(t, row, tc.to)
			e := &expect.Path{Symmetric: true}
			for _, h := range []string{tc.from, tc.from + ".node", "milan/gateway.node", "milan/gateway", "rome/gateway", "rome/gateway.node", tc.to + ".node", tc.to} {
				e.Via = append(e.Via, ref(t, row, h))
			}
			_, err := row.Send(t.Context(), from.Operand, to.Operand, "tcp", 0)
			assert.NilError(t, err)
			res, err := e.Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.want == "", "%+v", res)
			assert.Equal(t, res.Why, tc.want)
		})
	}
}

// TestPathInside: what nodes send each other is inside the encapsulation, or
// the path says where it was not.
func TestPathInside(t *testing.T) {
	for _, tc := range []struct{ name, inside, hop, want string }{
		{"inside", "geneve", "milan/node-2!geneve", ""},
		{"inside another one", "geneve", "milan/node-2!vxlan", "milan/node-2 saw it on eth0, going in, inside vxlan"},
		{"outside", "vxlan", "milan/node-2", "milan/node-2 saw it on eth0, going in, by itself"},
		{"not asked for", "", "milan/node-2", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			w.hops = []string{"milan/web", tc.hop, "rome/web"}
			e := &expect.Path{Inside: tc.inside, Symmetric: true}
			for _, h := range strings.Fields(strings.Replace("milan/web HOP rome/web", "HOP", map[bool]string{true: "milan/node-2"}[!strings.Contains(tc.hop, "!")], 1)) {
				e.Via = append(e.Via, ref(t, row, h))
			}
			_, err := row.Send(t.Context(), ref(t, row, "milan/web").Operand, ref(t, row, "rome/web").Operand, "tcp", 0)
			assert.NilError(t, err)
			res, err := e.Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.want == "", "%+v", res)
			assert.Equal(t, res.Why, tc.want)
		})
	}
}

// TestPathInsideNothing: where a path leads from node to node, something must
// have been seen inside the encapsulation.
func TestPathInsideNothing(t *testing.T) {
	for _, tc := range []struct {
		name string
		hops []string
		want string
	}{
		{"seen", seedsPath(), ""},
		{"not seen on the gateway's node, nor on the other", slices.DeleteFunc(seedsPath(), func(h string) bool { return h == "milan/node-2!geneve" }),
			"nothing inside geneve was seen between node-1 and node-2 of milan"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			w.hops = tc.hops
			e := &expect.Path{Inside: "geneve"}
			for _, h := range []string{"milan/web", "milan/node-1", "milan/gateway", "rome/gateway", "rome/node-1", "rome/web"} {
				e.Via = append(e.Via, ref(t, row, h))
			}
			w.onlyOn = map[string]string{"milan/node-1": "veth0", "rome/node-1": "veth0"}
			_, err := row.Send(t.Context(), ref(t, row, "milan/web").Operand, ref(t, row, "rome/web").Operand, "udp", 0)
			assert.NilError(t, err)
			res, err := e.Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.want == "", "%+v", res)
			assert.Equal(t, res.Why, tc.want)
		})
	}
}

// TestConntrack: the entry is found by whom its replies are of and the port that they
// go to.
func TestConntrack(t *testing.T) {
	const table = `tcp      6 119 TIME_WAIT src=10.80.0.1 dst=10.1.1.2 sport=7777 dport=8080 src=10.1.1.2 dst=10.70.0.0 sport=8080 dport=7777 [ASSURED] mark=5 use=1
tcp      6 119 TIME_WAIT src=10.80.0.2 dst=10.1.1.2 sport=40000 dport=8080 src=10.1.1.2 dst=10.70.0.0 sport=8080 dport=40000 [ASSURED] mark=0 use=1
`
	for _, tc := range []struct {
		table string
		ok    bool
		got   string
	}{
		{table, true, "tcp 6 119 TIME_WAIT src=10.80.0.2 dst=10.1.1.2 sport=40000 dport=8080 src=10.1.1.2 dst=10.70.0.0 sport=8080 dport=40000 [ASSURED] mark=0 use=1"},
		{strings.ReplaceAll(table, "mark=0", "mark=2"), false, "mark 2"},
		{strings.ReplaceAll(table, "mark=0", "mark=1073741826"), false, "mark 2"}, // and what says which direction is the tunnel's
		{strings.ReplaceAll(table, " mark=0", ""), false, "an entry that does not say its mark: this kernel keeps none"},
		{table + strings.ReplaceAll(table, "mark=0", "mark=2"), false, "2 entries with replies of 10.1.1.2 to port 40000"}, // which of the two is it?
		{strings.ReplaceAll(table, "dport=40000 [", "dport=40001 ["), false, "no entry with replies of 10.1.1.2 to port 40000"},
		{ // another row's connection to another pod, from the same port
			table + `tcp 6 70 TIME_WAIT src=10.0.1.2 dst=10.1.0.2 sport=40000 dport=8080 src=10.1.0.2 dst=10.0.1.2 sport=8080 dport=40000 [ASSURED] mark=3 use=1` + "\n", true,
			"tcp 6 119 TIME_WAIT src=10.80.0.2 dst=10.1.1.2 sport=40000 dport=8080 src=10.1.1.2 dst=10.70.0.0 sport=8080 dport=40000 [ASSURED] mark=0 use=1",
		},
	} {
		w, row := newFake(t)
		w.prints = tc.table
		_, err := row.Send(t.Context(), ref(t, row, "milan/web").Operand, ref(t, row, "rome/web").Operand, "tcp", 0)
		assert.NilError(t, err)
		e := &expect.Conntrack{On: ref(t, row, "milan/gateway"), SeenBy: ref(t, row, "rome/web")}
		res, err := e.Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, tc.ok, "%+v", res)
		assert.Equal(t, res.Got, tc.got)
		again := 0 // another probe, which comes from another port
		if strings.HasPrefix(tc.got, "2 entries") {
			again = 1
		}
		assert.Equal(t, len(w.sent), 1+again)
	}
}

func TestMTU(t *testing.T) {
	for _, tc := range []struct {
		prints, got string
		ok          bool
	}{
		{`{"largest":1390,"above":"error","pmtu":1390,"server":rome/web}`, "1390 bytes pass; one more: error; the sender's kernel knows of 1390", true},
		{`{"largest":1390,"above":"error","pmtu":1340,"server":rome/web}`, "1390 bytes pass; one more: error; the sender's kernel knows of 1340", false},
		{`{"largest":1390,"above":"silent","pmtu":1500,"server":rome/web}`, "1390 bytes pass; one more: silent; the sender's kernel knows of 1500", false},
		{`{"largest":1400,"above":"error","pmtu":1400,"server":rome/web}`, "1400 bytes pass; one more: error; the sender's kernel knows of 1400", false},
		// A pod of the sender's own cluster has the same address.
		{`{"largest":1390,"above":"error","pmtu":1390,"server":{"cluster":"milan","pod":"web"}}`, "milan/web answered", false},
		{`{"largest":1390,"above":"error","pmtu":1390}`, "a server that does not say who it is answered", false},
		{`{"largest":0,"above":"","pmtu":0}`, "0 bytes pass; one more: ; the sender's kernel knows of 0", false},
	} {
		w, row := newFake(t)
		w.prints = strings.ReplaceAll(tc.prints, "rome/web", `{"cluster":"rome","pod":"web"}`)
		e := &expect.MTU{From: ref(t, row, "milan/web"), To: ref(t, row, "rome/web"), Is: 1390, Above: "error"}
		res, err := e.Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, tc.ok, "%+v", res)
		assert.Equal(t, res.Got, tc.got)
	}
}

// TestMSS: what counts is the SYN that came in at the server.
func TestMSS(t *testing.T) {
	w, row := newFake(t)
	w.mss = map[string]int{"milan/web": 1460, "rome/web": 1350}
	_, err := row.Send(t.Context(), ref(t, row, "milan/web").Operand, ref(t, row, "rome/web").Operand, "tcp", 0)
	assert.NilError(t, err)
	for is, ok := range map[int]bool{1350: true, 1460: false} {
		res, err := (&expect.MSS{SeenBy: ref(t, row, "rome/web"), Is: is}).Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, ok, "%+v", res)
		assert.Equal(t, res.Got, "MSS 1350")
	}
}

// TestOutput: what a command printed counts only where it ended as it should,
// and what it did not print only where it printed something.
func TestOutput(t *testing.T) {
	two := 2
	for _, tc := range []struct {
		name string
		ran  expect.Ran
		e    expect.Output
		ok   bool
		why  string
	}{
		{"printed", ran(0, false, "a b"), expect.Output{Contains: "a", Lacks: "c"}, true, ""},
		{"not printed", ran(0, false, "a b"), expect.Output{Lacks: "b"}, false, ""},
		{"failed", ran(1, false, "a b"), expect.Output{Contains: "a"}, false, "the command failed, so what it printed proves nothing; write fails: true where it may"},
		{"failed without a word", ran(1, false, ""), expect.Output{Lacks: "c"}, false, "the command failed, so what it printed proves nothing; write fails: true where it may"},
		{"may fail", ran(1, true, "a b"), expect.Output{Contains: "a"}, true, ""},
		{"failed as it should", ran(2, false, "a b"), expect.Output{Contains: "a", Code: &two}, true, ""},
		{"failed in another way", ran(1, true, "a b"), expect.Output{Contains: "a", Code: &two}, false, ""},
		{"nothing is printed", ran(0, false, ""), expect.Output{Lacks: "c"}, false, "it printed nothing at all, so nothing is missing from it; write matches: '^$' where that is meant"},
		{"nothing is meant", ran(0, false, ""), expect.Output{Lacks: "c", Matches: "^$"}, false, "it printed nothing at all, so nothing is missing from it; write matches: '^$' where that is meant"},
		{"only nothing is meant", ran(0, false, ""), expect.Output{Matches: "^$"}, true, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, row := newFake(t)
			row.Outputs[""] = tc.ran
			res, err := tc.e.Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.ok, "%+v", res)
			assert.Equal(t, res.Why, tc.why)
		})
	}
}

func ran(code int, mayFail bool, printed string) expect.Ran {
	return expect.Ran{Command: "show", MayFail: mayFail, ExecResult: world.ExecResult{Code: code, Stdout: []byte(printed)}}
}
