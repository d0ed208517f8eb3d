// Package scenario reads the files of scenarios/: what happens in a topology,
// and what must hold. Everything that will run is known, and every name
// checked, before anything is built; package runner runs it.
package scenario

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/goccy/go-yaml/ast"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// A Scenario is a file of scenarios/.
type Scenario struct {
	Name        string
	File        string
	Description string
	Topology    *topology.Topology
	World       string // WorldAuto, WorldVM or WorldNative
	XFail       string // why it is known to fail; empty: it must pass
	Matrix      []Dimension
	Rows        []Row // names and values; Build makes what runs
	Sabotage    []Sabotage
	AllowLogs   []*regexp.Regexp // error lines that are no failure

	mu    sync.Mutex // of file, which rows that run at once read
	file  *yamlfile.File
	steps []ast.Node
	sabot []ast.Node
}

// Worlds that a scenario can ask for.
const (
	WorldAuto   = "auto"
	WorldVM     = "vm"
	WorldNative = "native"
)

// Overlays are the values that the key overlay of a matrix can have.
func Overlays() []string { return []string{OverlayGeneve, OverlayVXLAN} }

// The overlays between the nodes of a cluster, as the chart's value
// networking.overlay calls them.
const (
	OverlayGeneve = string(networkingv1beta1.OverlayGeneve)
	OverlayVXLAN  = string(networkingv1beta1.OverlayVXLAN)
)

// Features are what a scenario can require of the world: kinds of links, a
// queueing discipline, nftables' flow tables, IP virtual servers. WireGuard is
// the kernel's own; that of user space serves who does not require it.
func Features() []string {
	return []string{"geneve", "vxlan", "wireguard", "dummy", "vrf", topology.FeatureNetem, topology.FeatureIPVS, "flowtable"}
}

// requirable is what a scenario can require: features of the world, and programs.
func requirable() []string { return slices.Concat(Features(), world.Programs()) }

// A Step is a step of a row.
type Step struct {
	Name   string
	Do     Actions
	Expect expect.List
	Within time.Duration // how long expectations are given to come true
	Pos    yamlfile.Pos
}

// DefaultWithin is how long expectations are given when a step does not say.
const DefaultWithin = 10 * time.Second

// A Sabotage must turn the scenario red at one expectation of the step Fails.
type Sabotage struct {
	Index       int      // in the file
	Depends     bool     // it is only for some rows
	Withhold    string   // kind/name of an object that is refused and removed
	Namespace   string   // of the object; empty: the name is unique in the cluster
	In          []string // clusters of the object
	Plant       *Plant   // foreign state, instead
	Pause       bool     // the plant has daemons of its host stand still
	Before      string   // step before which it is done; empty: the first one
	Fails       string
	Expectation []int // indices, in the step Fails, of the expectations of which one must be the first to fail
}

// A Plant adds something to a host that the daemons must not touch.
type Plant struct {
	On   expect.Ref `lab:"on,required" doc:"host or pod"`
	Run  string     `lab:"run,required" doc:"shell commands that add it"`
	Undo string     `lab:"undo,required" doc:"shell commands that take it away"`
}

// String names the sabotage.
func (s Sabotage) String() string {
	text := fmt.Sprintf("withhold %s in %s", s.Withhold, strings.Join(s.In, " and "))
	switch {
	case s.Pause:
		text = fmt.Sprintf("pause the daemons of %s", s.Plant.On)
	case s.Plant != nil:
		text = fmt.Sprintf("plant on %s: %s", s.Plant.On, strings.Join(strings.Fields(s.Plant.Run), " "))
	}
	if s.Before != "" {
		text += fmt.Sprintf(", before %q", s.Before)
	}
	return text
}

// file is the shape of a scenario file. Steps and sabotage are read again for
// every row, with the row's values.
type file struct {
	Description string        `lab:"description,required" doc:"what is shown, in a sentence"`
	Topology    string        `lab:"topology,required" doc:"name of a file of topologies/"`
	World       string        `lab:"world" enum:"auto|vm|native" doc:"default auto"`
	Requires    []requirement `lab:"requires,one" doc:"features of the world, and programs of bin/ that are built for scenarios: where one is lacking, rows are skipped"`
	XFail       string        `lab:"xfail" doc:"why it is known to fail"`
	Matrix      []dimension   `lab:"matrix,key=Key" doc:"every combination is a row; {key} is its value; overlay is the cluster's"`
	Exclude     []condition   `lab:"exclude" doc:"combinations that are no row"`
	Steps       []ast.Node    `lab:"steps,required"`
	Sabotage    []ast.Node    `lab:"sabotage,required" doc:"each must turn the scenario red"`
	Logs        logsFile      `lab:"logs"`
}

type logsFile struct {
	Allow []string `lab:"allow,one" doc:"regular expressions of error lines that are no failure"`
}

type stepFile struct {
	Name   string        `lab:"name,required" doc:"what the step shows"`
	When   condition     `lab:"when" doc:"only in rows with these values: { overlay: vxlan }"`
	Do     Actions       `lab:"do" doc:"what happens"`
	Expect expect.List   `lab:"expect" doc:"what must hold afterwards"`
	Within time.Duration `lab:"within" min:"100ms" max:"10m" doc:"default 10s"`
}

type sabotageFile struct {
	When      condition  `lab:"when" doc:"only in rows with these values: { overlay: vxlan }"`
	Withhold  string     `lab:"withhold" doc:"kind/name: refused by its name, then deleted"`
	Namespace string     `lab:"namespace" doc:"of the object"`
	In        []string   `lab:"in,one" doc:"clusters of the object: it is withheld in each of them"`
	Plant     *Plant     `lab:"plant" doc:"foreign kernel state"`
	Pause     expect.Ref `lab:"pause" doc:"host or pod: its daemons stand still"`
	Before    string     `lab:"before" doc:"name of the step before which it is done; default: before the first"`
	Fails     string     `lab:"fails,required" doc:"name of the step that must fail"`

	Expectation oneOrMore `lab:"expectation" doc:"the expectation of that step that must be the first to fail: its kind, or a part of its text as lab run --plan prints it; a list where it is one of several by chance; default: the only one"`
}

// plant is what is planted: what the file says, or what has daemons stand still.
func (in *sabotageFile) plant() *Plant {
	if in.Pause.Text == "" {
		return in.Plant
	}
	return &Plant{On: in.Pause, Run: signalDaemons("STOP"), Undo: signalDaemons("CONT")}
}

// signalDaemons are the commands that send a signal to the daemons in the network namespace in
// which they run. They fail where there is no daemon.
func signalDaemons(signal string) string {
	return `cd /proc; here=$(readlink self/ns/net); daemons=
for p in [0-9]*; do
  [ "$(readlink $p/ns/net)" = "$here" ] && [ "$(cat $p/comm)" = isthmus ] && kill -` + signal + ` $p && daemons=$daemons$p,
done
[ "$daemons" ] || { echo "no daemon of Isthmus runs here" >&2; exit 1; }
`
}

// Build makes the steps of a row, new each time: expectations remember what
// they saw.
func (s *Scenario) Build(r Row) []Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.build(r)
}

func (s *Scenario) build(r Row) []Step {
	steps := make([]Step, 0, len(s.steps))
	for _, n := range s.steps {
		if !s.holds(n, r) {
			continue
		}
		var in stepFile
		s.file.Decode(n, &in, r.subst(s.Topology, nil))
		st := Step{in.Name, in.Do, in.Expect, in.Within, yamlfile.PosOf(n)}
		if st.Within == 0 {
			st.Within = DefaultWithin
		}
		steps = append(steps, st)
	}
	l := s.newLinter()
	for i := range steps {
		steps[i].lint(l)
	}
	return steps
}

// BuildSabotage makes the sabotages of a row.
func (s *Scenario) BuildSabotage(r Row) []Sabotage {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Sabotage, 0, len(s.sabot))
	steps := s.build(r)
	for i, n := range s.sabot {
		if !s.holds(n, r) {
			continue
		}
		var in sabotageFile
		s.file.Decode(n, &in, r.subst(s.Topology, nil))
		plant := in.plant()
		if plant != nil {
			s.newLinter().Resolve(&plant.On)
		}
		sab := Sabotage{
			Index: i, Depends: len(in.When) > 0, Withhold: in.Withhold, Namespace: in.Namespace, In: in.In,
			Plant: plant, Pause: in.Pause.Text != "", Before: in.Before, Fails: in.Fails,
		}
		for _, st := range steps {
			if st.Name == in.Fails {
				sab.Expectation, _ = st.expectations(in.Expectation)
			}
		}
		out = append(out, sab)
	}
	return out
}

// expectation returns the index of the expectation of a step that a text names:
// its kind or, where that names none, a part of what its String says. Where the
// text is empty, or names none or several, the problem says which there are.
func (st *Step) expectation(text string) (index int, problem string) {
	var all []string
	var byKind, byText []int
	for i, e := range st.Expect {
		all = append(all, fmt.Sprintf("%q", e))
		if e.Name == text {
			byKind = append(byKind, i)
		}
		if strings.Contains(e.String(), text) {
			byText = append(byText, i)
		}
	}
	found := byKind
	if len(found) == 0 {
		found = byText
	}
	switch len(found) {
	case 0:
		return 0, "names no expectation of the step, which has " + strings.Join(all, ", ")
	case 1:
		return found[0], ""
	}
	return 0, fmt.Sprintf("names %d expectations of the step, which has %s", len(found), strings.Join(all, ", "))
}

// expectations are the indices of those that texts name; without a text the only
// one that the step has.
func (st *Step) expectations(texts []string) (indices []int, problem string) {
	if len(texts) == 0 {
		texts = []string{""}
	}
	for _, text := range texts {
		i, problem := st.expectation(text)
		if problem != "" {
			return nil, fmt.Sprintf("%q %s", text, problem)
		}
		indices = append(indices, i)
	}
	return indices, ""
}

// Place is where something is in the scenario's file.
func (s *Scenario) Place(p yamlfile.Pos) string {
	return fmt.Sprintf("%s:%d:%d", s.File, p.Line, p.Col)
}

func (s *Scenario) newLinter() *expect.Linter {
	return &expect.Linter{
		File: s.file, Topology: s.Topology,
		Flows: map[string]bool{}, Unnamed: map[string]bool{}, Execs: map[string]bool{}, Reached: map[string]bool{}, Remembered: map[string]bool{},
	}
}
