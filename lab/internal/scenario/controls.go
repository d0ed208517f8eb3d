package scenario

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// What is absent because nobody could have seen it proves nothing: each absence
// that a row expects has a control, something that is seen to be there in the
// same row by the same means.

// A packet is what an expectation says about packets between two ends.
type packet struct {
	step     int
	from, to string
	behind   string // who answered at the address of to
	proto    string
	port     int
	crosses  bool // from one cluster to another, or from outside
}

// probePort is where the lab's pods listen.
const probePort = 8080

// is tells whether two are of the same ends, by the same protocol and port.
func (p packet) is(other packet) bool {
	return p.from == other.from && p.to == other.to && p.proto == other.proto && p.port == other.port
}

// An object is what an expectation says about an object of an API.
type object struct{ cluster, name, namespace, field string }

// shows tells whether it is there where the other one is expected not to be: the
// same object, or the same field of any object of the kind.
func (o object) shows(absent object) bool {
	if absent.field != "" {
		return o.cluster == absent.cluster && o.field == absent.field && kindOf(o.name) == kindOf(absent.name)
	}
	return o.cluster == absent.cluster && strings.EqualFold(o.name, absent.name) &&
		(o.namespace == absent.namespace || o.namespace == "" || absent.namespace == "")
}

func kindOf(object string) string {
	kind, _, _ := strings.Cut(strings.ToLower(object), "/")
	return kind
}

// A command is what ran where; its output is looked at.
type command struct{ on, run string }

// seen is what a row shows to be there.
type seen struct {
	packets  []packet
	objects  []object
	commands []command
	changes  []int // steps that change something
}

// absence is one that a row expects.
type absence struct {
	step int
	at   yamlfile.Pos
	what expect.Expectation
	ran  command // whose output it is about
}

// lintControls demands a control for each absence that a row expects.
func lintControls(f *yamlfile.File, steps []Step) {
	row, absences := look(steps)
	for _, a := range absences {
		what, hint := row.missing(a)
		if what != "" {
			f.Problem(a.at, hint, "%s", what)
		}
	}
}

// look reads what the steps of a row show, and which absences they expect.
func look(steps []Step) (row seen, absences []absence) {
	flows, named, last := map[string]packet{}, map[string]command{}, command{}
	for i, st := range steps {
		for _, a := range st.Do {
			switch a := a.(type) {
			case *Flow:
				flows[a.Name] = packet{i, a.From.Text, a.To.Text, a.To.Text, a.Proto, probePort, a.From.Cluster != a.To.Cluster}
			case *Exec:
				last = command{a.On.Text, strings.Join(strings.Fields(a.Run), " ")}
				named[a.Name] = last
			}
			switch a.(type) {
			case *Flow, *Remember:
			default:
				row.changes = append(row.changes, i)
			}
		}
		for _, e := range st.Expect {
			found := absence{step: i, at: e.Pos, what: e.Expectation}
			switch e := e.Expectation.(type) {
			case *expect.Reach:
				behind := cmp.Or(e.AnsweredBy.Text, e.To.Text)
				cluster := cmp.Or(e.AnsweredBy.Cluster, e.To.Cluster)
				row.packets = append(row.packets, packet{i, e.From.Text, e.To.Text, behind, e.Proto, cmp.Or(e.Port, probePort), e.From.Cluster != cluster})
			case *expect.Flow:
				if p, ok := flows[e.Name]; ok {
					p.step, p.crosses = i, false // its packets are no probes
					row.packets = append(row.packets, p)
				}
			case *expect.Output:
				found.ran = last
				if e.Of != "" {
					found.ran = named[e.Of]
				}
				if e.Contains != "" || demands(e.Matches) {
					row.commands = append(row.commands, found.ran)
				}
				if found.ran.run != "" && (e.Lacks != "" || e.Matches != "" && !demands(e.Matches)) {
					absences = append(absences, found)
				}
			case *expect.Kubectl:
				found.ran = command{e.In, strings.Join(strings.Fields(e.Run), " ")}
				switch {
				case e.Get != "" && e.Absent, e.Run != "" && e.Matches != "" && !demands(e.Matches):
					absences = append(absences, found)
				case e.Run != "":
					row.commands = append(row.commands, found.ran)
				case e.Field == "" || e.Is != "" || demands(e.Matches):
					row.objects = append(row.objects, object{e.In, e.Get, e.Namespace, e.Field})
				}
			case *expect.Unreachable, *expect.Never, *expect.Gone:
				absences = append(absences, found)
			}
		}
	}
	return row, absences
}

// demands tells whether a regular expression demands any text at all. One that is
// none has been reported.
func demands(re string) bool {
	r, err := regexp.Compile(re)
	return re != "" && (err != nil || !r.MatchString(""))
}

// missing says which control an absence lacks, and what to write; nothing when
// it has one.
func (row seen) missing(a absence) (what, hint string) {
	switch e := a.what.(type) {
	case *expect.Unreachable:
		return row.missingPacket(a.step, packet{from: e.From.Text, to: e.To.Text, proto: e.Proto, port: cmp.Or(e.Port, probePort)})
	case *expect.Never:
		if !slices.ContainsFunc(row.packets, func(p packet) bool { return p.crosses && p.step <= a.step }) {
			return "never proves nothing without probes from one cluster to another that are answered", "put such a reach into this step or an earlier one"
		}
	case *expect.Gone:
		if !slices.ContainsFunc(row.changes, func(step int) bool { return step <= a.step }) {
			return "gone proves nothing in a row that has changed nothing so far", "connect, apply or do something else first"
		}
	case *expect.Output:
		if !slices.Contains(row.commands, a.ran) {
			return fmt.Sprintf("what the output of `%s` on %s lacks proves nothing: the row never finds anything in it", a.ran.run, a.ran.on),
				"expect something of it by contains or matches, here or where the same command runs in another step"
		}
	case *expect.Kubectl:
		if e.Run != "" {
			if !slices.Contains(row.commands, a.ran) {
				return fmt.Sprintf("that `kubectl %s` may print nothing proves nothing: the row never finds anything in it", a.ran.run),
					"expect something of the same command by matches or prints in another step"
			}
			return "", ""
		}
		absent := object{e.In, e.Get, e.Namespace, e.Field}
		if !slices.ContainsFunc(row.objects, func(o object) bool { return o.shows(absent) }) {
			if e.Field != "" {
				return fmt.Sprintf("that %s has no %s proves nothing: the row sees no %s in %s that has it", e.Get, e.Field, kindOf(e.Get), e.In),
					"expect the same field of one that has it, by is or matches"
			}
			return fmt.Sprintf("that there is no %s proves nothing: the row never sees it in %s", e.Get, e.In),
				fmt.Sprintf("expect it where it is there: kubectl: { in: %s, get: %q }", e.In, e.Get)
		}
	}
	return "", ""
}

// missingPacket is missing for a target that must not be reached: its sender
// must reach somebody by the same protocol and port, and somebody must reach the
// target by that protocol. The same probe in the same step is a contradiction.
func (row seen) missingPacket(step int, absent packet) (what, hint string) {
	sends, answers := false, false
	for _, p := range row.packets {
		if p.is(absent) && p.step == step {
			continue
		}
		sends = sends || p.from == absent.from && p.proto == absent.proto && p.port == absent.port
		answers = answers || (p.to == absent.to || p.behind == absent.to) && p.proto == absent.proto
	}
	hint = fmt.Sprintf("add such a reach to a step in which it holds, best with the same ends: { from: %s, to: %s, proto: %s }", absent.from, absent.to, absent.proto)
	switch {
	case !sends:
		return fmt.Sprintf("unreachable proves nothing: in this row %s reaches nobody by %s at port %d", absent.from, absent.proto, absent.port), hint
	case !answers:
		return fmt.Sprintf("unreachable proves nothing: in this row nobody reaches %s by %s", absent.to, absent.proto), hint
	}
	return "", ""
}
