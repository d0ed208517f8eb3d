package plan

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// at is n seconds after the start of a test.
func at(n int) time.Time {
	return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).Add(time.Duration(n) * time.Second)
}

func (a action) String() string { return [...]string{"write", "hold", "pull", "roll"}[a] }

// TestRollout: what becomes of gateways, two minutes after the start.
func TestRollout(t *testing.T) {
	const now = 120
	same := turn{exists: true, connected: true}                                             // as its template says
	old := turn{exists: true, connected: true, changed: true}                               // of the template before
	down := turn{exists: true, changed: true}                                               // and not Connected
	with := func(t turn, change func(*turn)) turn { change(&t); return t }                  // t, changed
	rolled := func(n int) turn { return turn{exists: true, rolled: at(n)} }                 // and not Connected since
	came := func(t turn, n int) turn { return with(t, func(t *turn) { t.newPod = at(n) }) } // its new pod
	images := func(t turn, s pullState, what string) turn {
		return with(t, func(t *turn) { t.pull, t.pullWhat = s, what })
	}
	own := func(t turn) turn { return with(t, func(t *turn) { t.own, t.edited = true, true }) }
	edited := func(t turn) turn { return with(t, func(t *turn) { t.edited = true }) }
	for _, tc := range []struct {
		name  string
		turns []turn
		want  string // action and reason of each
	}{
		{"nothing to do", []turn{same, same}, "write RolledOut, write RolledOut"},
		{"not Connected, but nothing to do", []turn{{exists: true}}, "write RolledOut"},
		{"a new gateway", []turn{{}, old, {}}, "write RolledOut, roll WaitingForConnection, write RolledOut"},
		{"one after the other", []turn{old, old, old}, "roll WaitingForConnection, hold WaitingForTurn, hold WaitingForTurn"},
		{"the next waits for the one before", []turn{came(rolled(100), 110), old}, "write WaitingForConnection, hold WaitingForTurn"},
		{"until that is Connected", []turn{with(came(rolled(100), 110), func(t *turn) { t.connected = true }), old}, "write RolledOut, roll WaitingForConnection"},
		{"at the end of 60 s it has stopped", []turn{came(rolled(50), 60), old, old}, "write RolloutStopped, hold RolloutStopped, hold RolloutStopped"},
		{"not a second before", []turn{came(rolled(50), 61), old}, "write WaitingForConnection, hold WaitingForTurn"},
		{"it counts from the roll when the pod is older", []turn{came(rolled(61), 10), old}, "write WaitingForConnection, hold WaitingForTurn"},
		{"the pod has a minute to come", []turn{rolled(1), old}, "write WaitingForConnection, hold WaitingForTurn"},
		{"and no more", []turn{rolled(0), old}, "write RolloutStopped, hold RolloutStopped"},
		{"Connected again after a stop", []turn{with(came(rolled(0), 1), func(t *turn) { t.connected = true }), old}, "write RolledOut, roll WaitingForConnection"},
		{"the template changes again: first who was made worse", []turn{old, with(came(rolled(0), 1), func(t *turn) { t.changed = true }), old}, "hold WaitingForTurn, roll WaitingForConnection, hold WaitingForTurn"},
		{"the template changes back: the others have what they are to have", []turn{same, with(came(rolled(0), 1), func(t *turn) { t.changed = true })}, "write RolledOut, roll WaitingForConnection"},
		{"what is down goes first, and nobody waits for it", []turn{old, down, down}, "hold WaitingForTurn, roll RolledOut, hold WaitingForTurn"},
		{"what is down waits for what was Connected", []turn{came(rolled(100), 110), down}, "write WaitingForConnection, hold WaitingForTurn"},
		{"what is down stays after a stop", []turn{came(rolled(0), 1), down}, "write RolloutStopped, hold RolloutStopped"},
		{"its user changes it meanwhile", []turn{came(rolled(0), 1), edited(down)}, "write RolloutStopped, roll RolledOut"},
		{"one may be down for want of what it gets", []turn{came(rolled(0), 1), with(down, func(t *turn) { t.back = true })}, "write RolloutStopped, roll RolledOut"},
		{"one that works can wait, whatever its user changes", []turn{came(rolled(0), 1), edited(old)}, "write RolloutStopped, hold RolloutStopped"},
		{"users' changes are done at once", []turn{own(old), own(old), own(down)}, "write RolledOut, write RolledOut, write RolledOut"},
		{"also during a rollout", []turn{came(rolled(100), 110), own(old), old}, "write WaitingForConnection, write RolledOut, hold WaitingForTurn"},
		{"and one that was rolled stays one", []turn{own(came(with(rolled(0), func(t *turn) { t.changed = true }), 1)), old}, "write WaitingForConnection, hold WaitingForTurn"},
		{"images first", []turn{images(old, pulling, ""), images(old, pulling, "")}, "pull PullingImage, hold WaitingForTurn"},
		{"who has begun goes on", []turn{images(down, pulling, ""), images(old, pulling, " on node a")}, "hold WaitingForTurn, pull PullingImage"},
		{"an image that can't be pulled stops all", []turn{images(old, pullFailed, "image x"), old}, "pull ImagePullFailed, hold RolloutStopped"},
		{"of what is down, only that", []turn{images(down, pullFailed, "image x"), old}, "pull ImagePullFailed, roll WaitingForConnection"},
		{"after it was pulled", []turn{images(old, pulled, ""), images(old, pulling, "")}, "roll WaitingForConnection, hold WaitingForTurn"},
		{"a user's change of what is down does not come before its image", []turn{came(rolled(0), 1), edited(images(down, pulling, ""))}, "write RolloutStopped, pull PullingImage"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for i := range tc.turns {
				tc.turns[i].name = fmt.Sprintf("GatewayServer t/%c", 'a'+i)
			}
			var got []string
			for i, s := range rollout(tc.turns, at(now)) {
				got = append(got, s.action.String()+" "+s.reason)
				was := tc.turns[i]
				switch {
				case s.reason == ReasonRolledOut:
					assert.Check(t, s.rolled.IsZero() && s.message == "", "%+v", s)
				case s.action == roll:
					assert.Check(t, s.rolled.Equal(at(now)), "%+v", s)
				default:
					assert.Check(t, s.message != "" && s.rolled.Equal(was.rolled), "%+v", s)
				}
				assert.Check(t, s.failed == (s.action != hold && (s.reason == ReasonRolloutStopped || s.reason == ReasonImagePullFailed)), "%+v", s)
			}
			assert.Equal(t, strings.Join(got, ", "), tc.want)
		})
	}
}

// TestRolloutSays: who is held is told by whom, and why.
func TestRolloutSays(t *testing.T) {
	old := turn{name: "GatewayServer t/b", exists: true, connected: true, changed: true}
	stopped := turn{name: "GatewayServer t/a", exists: true, rolled: at(0), newPod: at(3), override: "kubectl annotate it"}
	failed := turn{name: "GatewayClient t/a", exists: true, connected: true, changed: true, pull: pullFailed, pullWhat: "image x:2 can't be pulled on node n: not found"}
	for _, tc := range []struct {
		turns []turn
		want  []string
	}{
		{[]turn{stopped, old}, []string{"stopped at GatewayServer t/a", "until its pod was replaced at 2026-01-01T00:00:00Z", "within 1m0s", "kubectl annotate it"}},
		{[]turn{failed, old}, []string{"stopped at GatewayClient t/a", "image x:2 can't be pulled on node n: not found", "image.version"}},
	} {
		for _, want := range tc.want {
			assert.Check(t, is.Contains(rollout(tc.turns, at(90))[1].message, want))
		}
	}
}

// TestRolloutEnds: whatever happens meanwhile, all gateways have the new template in
// the end unless one stopped them, and no two that were Connected are away at once.
func TestRolloutEnds(t *testing.T) {
	ended, stops := 0, 0
	for seed := range uint64(600) {
		r := rand.New(rand.NewPCG(seed, 1))
		// How a gateway fares: its images, when its pod comes, and its tunnel.
		type fate struct {
			pulls, comes, connects int  // seconds; negative: never
			asked, replaced        int  // when; -1: not yet
			works, worked          bool // its tunnel; when it was replaced
		}
		turns, fates := make([]turn, 1+r.IntN(6)), []fate{}
		unlucky := r.IntN(3) == 0
		for i := range turns {
			works := r.IntN(4) > 0
			turns[i] = turn{name: fmt.Sprint("g", i), exists: true, changed: true, connected: works}
			f := fate{pulls: r.IntN(3) * r.IntN(100), comes: r.IntN(20), connects: r.IntN(50), asked: -1, replaced: -1, works: works}
			if f.pulls > 0 {
				turns[i].pull = pulling
			}
			if unlucky && r.IntN(3) == 0 {
				switch r.IntN(3) {
				case 0:
					if f.pulls > 0 {
						f.pulls = -1
					}
				case 1:
					f.comes = -1
				case 2:
					f.connects = -1
				}
			}
			fates = append(fates, f)
		}
		var log []string
		done := func() bool {
			for _, x := range turns {
				if x.changed || !x.rolled.IsZero() {
					return false
				}
			}
			return true
		}
		stop := false
		now := 0
		for ; now < 3600 && !done() && !stop; now += 1 + r.IntN(3) {
			for i := range turns { // what has happened meanwhile
				x, f := &turns[i], &fates[i]
				if f.asked >= 0 && x.changed {
					if f.pulls < 0 && now > f.asked+30 {
						x.pull = pullFailed
					} else if f.pulls >= 0 && now >= f.asked+f.pulls {
						x.pull = pulled
					}
				}
				if f.replaced >= 0 {
					if f.comes >= 0 && now >= f.replaced+f.comes && x.newPod.IsZero() {
						x.newPod = at(f.replaced + f.comes)
					}
					x.connected = f.works && f.connects >= 0 && !x.newPod.IsZero() && now >= f.replaced+f.comes+f.connects
				}
			}
			steps := rollout(turns, at(now))
			away := 0
			for i, s := range steps {
				x, f := &turns[i], &fates[i]
				log = append(log, fmt.Sprintf("%d: %s %s %s", now, x.name, s.action, s.reason))
				x.rolled = s.rolled
				switch s.action {
				case pull:
					if f.asked < 0 {
						f.asked = now
					}
				case roll:
					assert.Assert(t, x.pull == pulled, strings.Join(log, "\n"))
					f.replaced, f.worked, x.changed, x.connected = now, x.connected, false, false
				}
				if f.worked && !x.connected {
					away++
				}
				stop = stop || s.failed && (s.reason == ReasonRolloutStopped || x.connected)
			}
			assert.Assert(t, away <= 1, "seed %d: %d that were Connected are away:\n%s", seed, away, strings.Join(log, "\n"))
			// A plan that is carried out again is the same one.
			for i, s := range rollout(turns, at(now)) {
				assert.Assert(t, steps[i].action == roll || s.action != roll || steps[i].reason == ReasonWaitingForTurn, "seed %d", seed)
			}
		}
		stuck := 0 // of those that are down, whose image can't be had
		for i, x := range turns {
			if x.pull == pullFailed && !fates[i].works {
				stuck++
			}
		}
		switch {
		case stop:
			stops++
			assert.Assert(t, unlucky, "seed %d: stopped without a reason:\n%s", seed, strings.Join(log, "\n"))
		case stuck == 0:
			ended++
			assert.Assert(t, done(), "seed %d: not done after %d s:\n%s", seed, now, strings.Join(log, "\n"))
		}
	}
	assert.Check(t, ended > 150 && stops > 30, "%d ended, %d stopped", ended, stops)
}
