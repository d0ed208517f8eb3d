package controllers

import (
	"context"
	"testing"

	"gotest.tools/v3/assert"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// aLease is a lease as the API server keeps it: who has not seen the last
// version can't write.
type aLease struct {
	record        resourcelock.LeaderElectionRecord
	version, seen int
	late          []string // holders whose writes arrive before the next ones
}

func (l *aLease) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	l.seen = l.version
	r := l.record
	return &r, nil, nil
}

func (l *aLease) Update(_ context.Context, r resourcelock.LeaderElectionRecord) error {
	if len(l.late) > 0 {
		l.record.HolderIdentity, l.late = l.late[0], l.late[1:]
		l.version++
	}
	if l.seen != l.version {
		return apierrors.NewConflict(coordinationv1.Resource("leases"), name, nil)
	}
	l.record, l.version = r, l.version+1
	l.seen = l.version
	return nil
}

func (*aLease) Create(context.Context, resourcelock.LeaderElectionRecord) error { return nil }
func (*aLease) RecordEvent(string)                                              {}
func (*aLease) Identity() string                                                { return "me" }
func (*aLease) Describe() string                                                { return name }

// TestReleasingLock: a lease is given back although renewals of ours arrive
// late, not although somebody else has it; and nothing else is tried again.
func TestReleasingLock(t *testing.T) {
	for _, tc := range []struct {
		name   string
		late   []string
		write  string // the holder
		holder string // afterwards
		fails  bool
	}{
		{"nothing arrives late", nil, "", "", false},
		{"a renewal does", []string{"me"}, "", "", false},
		{"two do", []string{"me", "me"}, "", "", false},
		{"it is somebody else's", []string{"other"}, "", "other", true},
		{"a renewal is not tried again", []string{"me"}, "me", "me", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			lease := &aLease{record: resourcelock.LeaderElectionRecord{HolderIdentity: "me"}, late: tc.late}
			err := releasingLock{lease}.Update(t.Context(), resourcelock.LeaderElectionRecord{HolderIdentity: tc.write})
			assert.Equal(t, apierrors.IsConflict(err), tc.fails, "%v", err)
			assert.Equal(t, lease.record.HolderIdentity, tc.holder)
		})
	}
}
