package daemon

import (
	"cmp"
	"maps"
	"strings"
	"time"
)

// The times of a trial.
const (
	// trialTime is how long the API server has to answer after a change. What cuts a
	// host off does so at once, for whoever connects anew.
	trialTime = 5 * time.Second
	// trialSilence is how long it may be silent before the change is taken back: longer
	// than a busy one takes for one answer, and than TCP takes for a lost SYN (1 and 3 s,
	// RFC 6298 §2).
	trialSilence = 5 * time.Second
	// trialBack is how long a change stays taken back while the API server stays silent:
	// then it was not the change.
	trialBack = 10 * time.Second
)

// A version is an object of a user's own as it was written at one time.
type version struct {
	UID        string `json:"uid"`
	Generation int64  `json:"generation"`
}

// versions is a set.
type versions map[version]bool

// A trial decides which versions of users' objects are in force on a host, by
// whether the API server answers it. One that is new is tried: if the API server falls
// silent right after it was applied, it is taken back. If the API server answers then,
// the object is tried once more, for the API server may have been away for its own reasons just
// then; when that ends in the same way it was the object, which stays out. If the API server does
// not answer without it either, it was an ordinary outage, and the object is in force for good.
//
// It has no clock, and asks nobody.
type trial struct {
	known  versions // in force for good
	held   versions // out for good
	trying versions // new ones
	taken  bool     // trying is taken back
	again  bool     // trying is tried for the second time
	// resumed says that trying was in force already when the process began.
	resumed bool
	// done says that the kernel is as taken says, since when that is so, and heard when
	// the API server answered last.
	done         bool
	since, heard time.Time
}

func newTrial() *trial { return &trial{known: versions{}, held: versions{}, trying: versions{}} }

// out reports whether a version is not in force.
func (t *trial) out(v version) bool { return t.held[v] || t.taken && t.trying[v] }

// decided reports whether nothing has to be found out about a version, or is being.
func (t *trial) decided(v version) bool { return t.known[v] || t.held[v] || t.trying[v] }

// running reports whether the API server is to be asked.
func (t *trial) running() bool { return len(t.trying) > 0 }

// begin tries versions that are about to be applied. While others are taken back
// nothing new is begun: they are tried when that is decided.
func (t *trial) begin(fresh versions) {
	if t.taken || len(fresh) == 0 {
		return
	}
	maps.Copy(t.trying, fresh)
	t.done, t.again = false, false
}

// resume goes on with a trial that another process has begun, and perhaps applied; again says that
// it is the second one.
func (t *trial) resume(v versions, again bool) {
	t.begin(v)
	t.resumed = len(v) > 0
	t.again = t.resumed && again
}

// accept puts versions in force for good, untried.
func (t *trial) accept(v versions) { maps.Copy(t.known, v) }

// keep forgets all versions but those of objects that are there.
func (t *trial) keep(there versions) {
	for _, set := range []versions{t.known, t.held, t.trying} {
		maps.DeleteFunc(set, func(v version, _ bool) bool { return !there[v] })
	}
	if !t.running() {
		t.taken = false
	}
}

// passed notes that the kernel has been made as the trial said when taken was read
// of it. Where nothing had to be changed nothing is tried.
func (t *trial) passed(now time.Time, taken, changed bool) {
	switch {
	case !t.running() || t.done || taken != t.taken:
	case !taken && !changed && !t.resumed:
		t.conclude(t.known)
	default:
		t.done, t.since, t.heard = true, now, now
	}
}

// hear notes whether the API server answers, and reports whether other versions
// are to be in force now, or others for good.
func (t *trial) hear(now time.Time, answers bool) bool {
	if !t.running() {
		return false
	}
	if !t.done {
		if t.taken && answers { // by itself, with the change
			t.taken, t.done, t.since, t.heard = false, true, now, now
			return true
		}
		return false
	}
	switch {
	case t.taken && answers && !t.again:
		t.taken, t.done, t.again = false, false, true
	case t.taken && answers:
		t.conclude(t.held)
	case t.taken && now.Sub(t.since) >= trialBack, !t.taken && answers && now.Sub(t.since) >= trialTime:
		t.conclude(t.known)
	case t.taken:
		return false
	case answers:
		t.heard = now
		return false
	case now.Sub(t.heard) >= trialSilence:
		t.taken, t.done = true, false
	default:
		return false
	}
	return true
}

// excuse takes a time out of the trial in which nobody asked, since the process did not run:
// it was stopped, or its machine was. No silence of the API server is in it. What happened
// after that time is not moved beyond now.
func (t *trial) excuse(now time.Time, d time.Duration) {
	for _, at := range []*time.Time{&t.since, &t.heard} {
		if *at = at.Add(d); at.After(now) {
			*at = now
		}
	}
}

// conclude ends the trial.
func (t *trial) conclude(set versions) {
	maps.Copy(set, t.trying)
	clear(t.trying)
	t.taken, t.again, t.resumed = false, false, false
}

func compareVersions(a, b version) int {
	return cmp.Or(strings.Compare(a.UID, b.UID), cmp.Compare(a.Generation, b.Generation))
}
