package plan

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// ConditionRolledOut says whether the Deployment of a gateway is what its template
// makes of it now, and whether the peering has come back since.
const ConditionRolledOut = "RolledOut"

// Reasons of ConditionRolledOut.
const (
	ReasonRolledOut         = "RolledOut"
	ReasonWaitingForTurn    = "WaitingForTurn"
	ReasonPullingImage      = "PullingImage"
	ReasonImagePullFailed   = "ImagePullFailed"
	ReasonWaitingForConnect = "WaitingForConnection"
	ReasonRolloutStopped    = "RolloutStopped"
)

// How long a rollout waits.
const (
	reconnectTime = time.Minute     // for a peering, once its new pod is there
	newPodTime    = time.Minute     // for that pod
	pullTime      = 5 * time.Minute // for images
	pullRest      = time.Minute     // before it is tried with another pod
	// A Connection says the same before and after if its gateway comes back fast, so
	// that no change of it leads to a plan.
	lookAgain = 2 * time.Second
)

// A turn is what a rollout has to know about one gateway.
type turn struct {
	name    string // Kind namespace/name
	exists  bool   // it has a Deployment
	changed bool   // whose pods are not what the template makes of them now
	// own says that nothing but its own object has changed since, edited that this has,
	// whatever else did.
	own, edited bool
	// back says that its pods get a device because of a node on which they would not
	// work without it.
	back      bool
	connected bool      // its peering works; by a report of its new pod, if it was rolled
	rolled    time.Time // when its pod was replaced while Connected, if it has not been since
	newPod    time.Time // when the pod came that is there now; zero: it is not there
	override  string    // how a user has the rollout go on without it
	pull      pullState
	pullWhat  string // image, node and reason
}

// A pullState is how far the images of a new template are.
type pullState int

const (
	pulled pullState = iota // or they were there before
	pulling
	pullFailed
)

// An action is what to do with a gateway.
type action int

const (
	write action = iota // its Deployment, whose pod stays unless its own object says otherwise
	hold                // it stays as it runs
	pull                // it stays as it runs, and its new images are pulled
	roll                // its pod is replaced, in its turn
)

// A step is what a rollout does with one gateway, and what there is to say of it.
type step struct {
	action
	rolled          time.Time // to be remembered on its Deployment
	reason, message string    // of ConditionRolledOut, which is True with ReasonRolledOut
	failed          bool      // to be told as an event, too
	due             time.Time // when time alone makes it another step; zero: never
}

// rollout decides what becomes of every gateway at this moment. What one template
// or image changes is many gateways, so those go one after the other: the pod of
// the next is replaced when its images have been pulled and the peering before
// is Connected again. A peering that is not Connected has nothing to lose, and
// nobody waits for it. What users change in a gateway's own object is theirs to
// say, and done at once.
func rollout(list []turn, now time.Time) []step {
	out := make([]step, len(list))
	// Who has the turn, and who stopped the rollout; empty: nobody.
	var busy, stopped string
	var staged []int
	for i, t := range list {
		switch {
		case !t.exists || t.changed && t.own:
			out[i] = step{action: write, rolled: t.rolled, reason: ReasonRolledOut}
			if !t.rolled.IsZero() {
				out[i].reason, out[i].message, out[i].due = ReasonWaitingForConnect, "its pod is replaced; then it has to be Connected again", now.Add(lookAgain)
			}
		case t.changed:
			staged = append(staged, i)
			continue
		default:
			out[i] = t.after(now)
		}
		if out[i].reason == ReasonRolloutStopped {
			stopped = t.name + ": " + out[i].message
		} else if !out[i].rolled.IsZero() {
			busy = t.name
		}
	}
	// First who was made worse by the template before, then who has begun to pull,
	// then who has nothing to lose.
	slices.SortStableFunc(staged, func(i, j int) int { return cmp.Compare(list[i].rank(), list[j].rank()) })
	for _, i := range staged {
		t, s := list[i], &out[i]
		// A peering that is down and whose user has changed something about it can't wait,
		// nor one that may be down for want of what it gets.
		urgent := (t.edited || t.back) && !t.connected
		switch {
		case stopped != "" && !urgent:
			*s = step{action: hold, rolled: t.rolled, reason: ReasonRolloutStopped, message: "its pod stays as it is, since the rollout has stopped at " + stopped}
			continue
		case busy != "" && !urgent:
			*s = step{action: hold, rolled: t.rolled, reason: ReasonWaitingForTurn, message: "its pod is replaced after that of " + busy, due: now.Add(lookAgain)}
			continue
		}
		switch *s = t.next(now); {
		case s.failed && t.connected:
			stopped = t.name + ": " + s.message
		case s.failed: // others have images of their own, and something to lose
		default:
			busy = t.name
		}
	}
	return out
}

// rank is the order of gateways that are to be replaced.
func (t turn) rank() int {
	switch {
	case !t.rolled.IsZero():
		return 0
	case t.pull == pulling && t.pullWhat != "":
		return 1
	case !t.connected:
		return 2
	}
	return 3
}

// next is the step of a gateway whose turn it is.
func (t turn) next(now time.Time) step {
	switch t.pull {
	case pulling:
		return step{action: pull, rolled: t.rolled, reason: ReasonPullingImage, message: "its images are pulled before its pod is replaced" + t.pullWhat, due: now.Add(pullRest)}
	case pullFailed:
		return step{action: pull, rolled: t.rolled, failed: true, reason: ReasonImagePullFailed, due: now.Add(pullRest),
			message: t.pullWhat + ": its pod stays as it is; correct the image in the template (image.name and image.version of the chart), or see to it that the node can pull it: that is tried again"}
	}
	s := step{action: roll, reason: ReasonRolledOut, due: now.Add(lookAgain)}
	if t.connected || !t.rolled.IsZero() { // it worked once
		s.rolled, s.reason, s.message = now, ReasonWaitingForConnect, "its pod is replaced; then it has to be Connected again"
	}
	return s
}

// after is the step of a gateway whose pod is what its template makes of it: is
// the peering Connected again, if it was?
func (t turn) after(now time.Time) step {
	if t.rolled.IsZero() || t.connected {
		return step{reason: ReasonRolledOut}
	}
	limit := t.rolled.Add(newPodTime + reconnectTime)
	if !t.newPod.IsZero() {
		limit = later(t.rolled, t.newPod).Add(reconnectTime)
	}
	s := step{rolled: t.rolled, due: now.Add(lookAgain)}
	if now.Before(limit) {
		s.reason, s.message = ReasonWaitingForConnect, "its pod has been replaced; now it has to be Connected again"
		return s
	}
	s.reason, s.failed = ReasonRolloutStopped, true
	s.message = fmt.Sprintf("it was Connected until its pod was replaced at %s, and has not been again within %v: other gateways keep their pods until it is, or until its template changes; to have them go on without it, %s",
		t.rolled.UTC().Format(time.RFC3339), reconnectTime, t.override)
	return s
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
