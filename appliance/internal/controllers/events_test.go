package controllers

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
	"k8s.io/client-go/tools/record"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// What the plan says is told at once, what hosts report when it has lasted;
// both once, until they were over and are back.
func TestTell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		recorder := record.NewFakeRecorder(10)
		r := &reconciler{
			cfg: Config{EventDelay: 10 * time.Second}, log: slog.New(slog.DiscardHandler), recorder: recorder, standing: map[event]standing{},
		}
		told := func() (out []string) {
			for {
				select {
				case e := <-recorder.Events:
					out = append(out, e)
				default:
					return out
				}
			}
		}
		planned := plan.Event{Object: cluster.Ref{Kind: "Configuration", Name: "rome", UID: "1"}, Type: plan.Warning, Reason: "Duplicate", Message: "twice"}
		reported := plan.Event{Object: cluster.Ref{Kind: "InternalNode", Name: "node-1", UID: "2"}, Type: plan.Warning, Reason: "NotApplied", Message: "no such device", Reported: true}
		later := reported
		later.Message = "too hot"

		for _, step := range []struct {
			name  string
			after time.Duration
			list  []plan.Event
			told  []string
			next  time.Duration
		}{
			{"both are new", 0, []plan.Event{planned, reported}, []string{"Warning Duplicate twice"}, 10 * time.Second},
			{"one more", 4 * time.Second, []plan.Event{planned, reported, later}, nil, 6 * time.Second},
			{"the first has lasted", 6 * time.Second, []plan.Event{planned, reported, later}, []string{"Warning NotApplied no such device"}, 4 * time.Second},
			{"the second is over in time", 3 * time.Second, []plan.Event{planned, reported}, nil, 0},
			{"nothing new", time.Hour, []plan.Event{planned, reported}, nil, 0},
			{"all is well", time.Second, nil, nil, 0},
			{"both are back", time.Second, []plan.Event{planned, reported}, []string{"Warning Duplicate twice"}, 10 * time.Second},
			{"and have lasted", time.Minute, []plan.Event{planned, reported}, []string{"Warning NotApplied no such device"}, 0},
		} {
			time.Sleep(step.after) // of the test's own clock
			next := r.tell(step.list)
			assert.DeepEqual(t, told(), step.told)
			assert.Equal(t, next, step.next, step.name)
		}
	})
}
