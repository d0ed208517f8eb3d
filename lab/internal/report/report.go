// Package report says how a run went: on the terminal, as JSON, as JUnit XML,
// and as a directory of evidence for what failed. It knows results, not how
// they came about.
package report

import "time"

// Exit codes of `lab run`.
const (
	ExitPass  = 0 // everything held
	ExitFail  = 1 // an expectation did not hold
	ExitUsage = 2 // wrong usage, or a mistake in a file
	ExitInfra = 3 // the machine or the lab failed
	ExitNone  = 4 // nothing ran
)

// A Verdict is how a row ended.
type Verdict string

// Verdicts.
const (
	Pass  Verdict = "pass"
	Fail  Verdict = "fail"
	XFail Verdict = "xfail" // failed as a known limitation says
	XPass Verdict = "xpass" // passed although a known limitation says it can't: fails
	Skip  Verdict = "skip"  // this machine lacks something
	Infra Verdict = "infra" // the lab failed, not the product
)

// A Run is a whole run.
type Run struct {
	Seed      string     `json:"seed"`
	World     string     `json:"world"`           // as asked for; auto: each lab says its own
	Again     string     `json:"again,omitempty"` // flags for one row once more; empty: --keep
	Version   string     `json:"version"`
	Started   time.Time  `json:"started"`
	Took      Duration   `json:"took"`
	Slowdown  float64    `json:"slowdown,omitempty"` // how many times as long as at best the machine took for the same work
	Labs      []Lab      `json:"labs"`
	Scenarios []Scenario `json:"scenarios"`
}

// A Lab is a world that was built for the run, or used by it.
type Lab struct {
	Name     string   `json:"name"` // topology-world-overlay
	Topology string   `json:"topology"`
	World    string   `json:"world"`
	Overlay  string   `json:"overlay"`
	Phases   []Phase  `json:"phases"`
	Took     Duration `json:"took"`              // until it was taken down
	Retried  []string `json:"retried,omitempty"` // why it was built again, each time
	Error    string   `json:"error,omitempty"`
	Left     string   `json:"left,omitempty"` // why taking it down has left something
	// LeftOut are the sabotages that were not made, because --sabotage-time was over before
	// their turn.
	LeftOut []string `json:"sabotagesLeftOut,omitempty"`
	// OutOfTime are the rows and sabotages that did not begin, because --time was over before
	// their turn.
	OutOfTime []string `json:"outOfTime,omitempty"`
}

// A Phase is a step of building a lab, or what a row did beside its steps.
type Phase struct {
	Name string   `json:"name"`
	Took Duration `json:"took"`
}

// A Scenario is a scenario's rows in one lab, or sabotages of them.
type Scenario struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	File        string `json:"file"`
	World       string `json:"world"`
	Overlay     string `json:"overlay"`
	Sabotage    bool   `json:"sabotage,omitempty"`
	Rows        []Row  `json:"rows"`
}

// A Row is one row of a scenario's matrix, or one sabotage of it.
type Row struct {
	Name     string   `json:"name"` // scenario/value/value
	Verdict  Verdict  `json:"verdict"`
	Reason   string   `json:"reason,omitempty"` // of skip, xfail, xpass and infra, and of a sabotage that failed
	Took     Duration `json:"took"`
	Sabotage string   `json:"sabotage,omitempty"` // what was done to turn it red
	Steps    []Step   `json:"steps"`
	Phases   []Phase  `json:"phases,omitempty"`  // of its time, what is no step's
	Retried  []string `json:"retried,omitempty"` // errors of the lab after which it ran again
	Bundle   string   `json:"bundle,omitempty"`  // directory with the evidence
	// NoPackets: the row's world captures none, so that there are none in the bundle.
	NoPackets bool `json:"noPackets,omitempty"`
}

// A Step is a step of a row that ran.
type Step struct {
	Name  string   `json:"name"`
	Took  Duration `json:"took"`
	Notes []string `json:"notes,omitempty"` // what was measured
	// Excused are bounds that were exceeded, but by less than is allowed on a slow machine.
	Excused  []string `json:"excused,omitempty"`
	Failures []Fault  `json:"failures,omitempty"`
	// Commands are those of a step that failed.
	Commands []Command `json:"commands,omitempty"`
}

// A Command is how one ended that a scenario had run.
type Command struct {
	Command string `json:"command"`
	Code    int    `json:"code"` // its exit code
	Stdout  string `json:"stdout,omitempty"`
	Stderr  string `json:"stderr,omitempty"`
}

// A Fault is an expectation that did not hold.
type Fault struct {
	Expectation string   `json:"expectation"`
	Place       string   `json:"place,omitempty"` // file:line:col
	Want        string   `json:"want"`
	Got         string   `json:"got"`
	Why         string   `json:"why,omitempty"`
	Path        []string `json:"path,omitempty"` // hosts that saw the packet
	Reply       []string `json:"reply,omitempty"`
}

// Found is what was there in place of what is wanted, and the reason if there is one.
func (f Fault) Found() string {
	if f.Why == "" {
		return f.Got
	}
	return f.Got + ": " + f.Why
}

// Failed tells whether a verdict turns the run red.
func (v Verdict) Failed(ci bool) bool {
	return v == Fail || v == XPass || v == Skip && ci
}

// A Duration is a time in seconds with three digits, in JSON and for people.
type Duration time.Duration
