package daemon

import (
	"maps"
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

// A trial is a story of what happens at which second; what is in force is looked at
// at its end.
func TestTrial(t *testing.T) {
	older, fresh, later := version{"a", 1}, version{"b", 1}, version{"b", 2}
	type event struct {
		at   float64
		what string
	}
	for _, tt := range []struct {
		name                string
		story               []event
		known, held, trying versions
		taken               bool
	}{
		{"nothing is known yet", []event{{0, "begin"}, {0.1, "applied"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"the API server answers all the time", []event{{0, "begin"}, {0.1, "applied"}, {0.2, "answer"}, {3, "answer"}, {5.1, "answer"}},
			versions{older: true, fresh: true}, versions{}, versions{}, false},
		{"not long enough yet", []event{{0, "begin"}, {0.1, "applied"}, {0.2, "answer"}, {5, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"nothing had to be changed", []event{{0, "begin"}, {0.1, "unchanged"}},
			versions{older: true, fresh: true}, versions{}, versions{}, false},
		{"nothing had to be changed, for the process before had done it", []event{{0, "resume"}, {0.1, "unchanged"}, {5.1, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, true},
		{"an answer before it is applied says nothing", []event{{0, "begin"}, {9, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"one answer is missing", []event{{0, "begin"}, {0.1, "applied"}, {5, "silence"}, {5.5, "answer"}},
			versions{older: true, fresh: true}, versions{}, versions{}, false},
		{"silence: it is taken back", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, true},
		{"silence after some answers", []event{{0, "begin"}, {0.1, "applied"}, {3, "answer"}, {7.9, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"and on", []event{{0, "begin"}, {0.1, "applied"}, {3, "answer"}, {8, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, true},
		{"the process was stopped for 6 s: nobody asked", []event{{0, "begin"}, {0.1, "applied"}, {3, "answer"}, {10, "stopped for 6 s"}, {10, "silence"}, {13.9, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"and then there is silence", []event{{0, "begin"}, {0.1, "applied"}, {3, "answer"}, {10, "stopped for 6 s"}, {10, "silence"}, {14, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, true},
		{"a trial is no shorter for it", []event{{0, "begin"}, {0.1, "applied"}, {3, "answer"}, {10, "stopped for 6 s"}, {11, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"what came after it is not moved into the future", []event{{0, "begin"}, {9.9, "applied"}, {10, "stopped for 6 s"}, {15, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, true},
		{"an outage is no shorter for it", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {12, "stopped for 6 s"}, {15.2, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, true},
		{"without it the API server answers: it is tried once more", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {6.2, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"the last moment", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {15.1, "silence"}, {15.1, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"the API server was away for a moment, and it was not the object", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {6.2, "answer"},
			{6.3, "applied"}, {11.3, "answer"}}, versions{older: true, fresh: true}, versions{}, versions{}, false},
		{"what is silent twice stays out, also when the process ended in between", []event{{0, "resume the second trial"}, {0.1, "unchanged"},
			{5.1, "silence"}, {5.2, "taken back"}, {6.2, "answer"}}, versions{older: true}, versions{fresh: true}, versions{}, false},
		{"what is silent twice stays out", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {6.2, "answer"},
			{6.3, "applied"}, {11.3, "silence"}, {11.4, "taken back"}, {12.4, "answer"}}, versions{older: true}, versions{fresh: true}, versions{}, false},
		{"an outage in the second trial: it returns", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {6.2, "answer"},
			{6.3, "applied"}, {11.3, "silence"}, {11.4, "taken back"}, {21.4, "silence"}}, versions{older: true, fresh: true}, versions{}, versions{}, false},
		{"another change in the second trial: both are tried anew", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {6.2, "answer"},
			{6.3, "applied"}, {7, "begin later"}, {7.1, "applied"}, {12.2, "silence"}, {12.3, "taken back"}, {13, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true, later: true}, false},
		{"an answer before it is taken back was not caused by that", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.15, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"what a pass did that had begun before is not it", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "applied"}, {6, "silence"}, {16, "silence"}},
			versions{older: true}, versions{}, versions{fresh: true}, true},
		{"an ordinary outage: it returns", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {15.2, "silence"}},
			versions{older: true, fresh: true}, versions{}, versions{}, false},
		{"and is not taken back again", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "taken back"}, {15.2, "silence"},
			{15.3, "applied"}, {30, "silence"}, {60, "answer"}, {61, "applied"}, {90, "silence"}},
			versions{older: true, fresh: true}, versions{}, versions{}, false},
		{"another change while one is tried", []event{{0, "begin"}, {0.1, "applied"}, {4, "begin later"}, {4.1, "applied"}, {5.5, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true, later: true}, false},
		{"another change while one is taken back has to wait", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {5.2, "begin later"}, {5.3, "taken back"}, {6, "answer"}},
			versions{older: true}, versions{}, versions{fresh: true}, false},
		{"it is deleted while it is taken back", []event{{0, "begin"}, {0.1, "applied"}, {5.1, "silence"}, {6, "deleted"}, {7, "taken back"}, {8, "answer"}},
			versions{older: true}, versions{}, versions{}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr := newTrial()
			tr.accept(versions{older: true})
			start := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
			for _, e := range tt.story {
				now := start.Add(time.Duration(e.at * float64(time.Second)))
				switch e.what {
				case "begin":
					tr.begin(versions{fresh: true})
				case "resume":
					tr.resume(versions{fresh: true}, false)
				case "resume the second trial":
					tr.resume(versions{fresh: true}, true)
				case "begin later":
					tr.begin(versions{later: true})
				case "applied", "unchanged":
					tr.passed(now, false, e.what == "applied")
				case "taken back":
					tr.passed(now, true, true)
				case "answer", "silence":
					tr.hear(now, e.what == "answer")
				case "stopped for 6 s":
					tr.excuse(now, 6*time.Second)
				case "deleted":
					tr.keep(versions{older: true})
				}
			}
			assert.Assert(t, maps.Equal(tr.known, tt.known), "known: %v", tr.known)
			assert.Assert(t, maps.Equal(tr.held, tt.held), "held: %v", tr.held)
			assert.Assert(t, maps.Equal(tr.trying, tt.trying), "trying: %v", tr.trying)
			assert.Equal(t, tr.taken, tt.taken)
			for v := range tt.held {
				assert.Assert(t, tr.out(v))
			}
			assert.Equal(t, tr.out(fresh), tt.taken || tt.held[fresh])
			assert.Assert(t, !tr.out(older))
		})
	}
}
