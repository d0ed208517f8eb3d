package scenario

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// Load reads and checks a scenario file; its topology is looked for in the
// folder topologies. All that is wrong is in the error, each with its place.
func Load(path, topologies string) (*Scenario, error) {
	f, err := yamlfile.Read(path)
	if err != nil {
		return nil, err
	}
	return load(f, topologies)
}

// Parse is Load for a file in memory; path is for messages and the name.
func Parse(path string, src []byte, topologies string) (*Scenario, error) {
	return load(yamlfile.Parse(path, src), topologies)
}

// LoadAll reads all scenarios of a folder, sorted by name. The error joins
// what is wrong with each; the others are returned.
func LoadAll(scenarios, topologies string) ([]*Scenario, error) {
	paths, err := filepath.Glob(filepath.Join(scenarios, "*.yaml"))
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("no scenarios in %s: run lab in the repository, or say --scenarios", scenarios)
	}
	var out []*Scenario
	var errs []error
	for _, p := range paths {
		s, err := Load(p, topologies)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, s)
	}
	return out, errors.Join(errs...)
}

// Schema returns the JSON schema of scenario files.
func Schema() map[string]any {
	s := yamlfile.Schema(file{}, "scenarios/NAME.yaml: what happens in a topology, and what must hold")
	properties := s["properties"].(map[string]any)
	properties["steps"] = map[string]any{"type": "array", "items": yamlfile.SchemaOf(stepFile{})}
	properties["sabotage"] = map[string]any{"type": "array", "items": yamlfile.SchemaOf(sabotageFile{}), "description": "each must turn the scenario red"}
	return s
}

func load(f *yamlfile.File, topologies string) (*Scenario, error) {
	if f.Root == nil {
		return nil, f.Err()
	}
	var in file
	f.Decode(f.Root, &in, nil)
	s := &Scenario{
		Name:        strings.TrimSuffix(filepath.Base(f.Path), ".yaml"),
		File:        f.Path,
		Description: in.Description,
		World:       in.World,
		XFail:       in.XFail,
		file:        f,
		steps:       in.Steps,
		sabot:       in.Sabotage,
	}
	if s.World == "" {
		s.World = WorldAuto
	}
	for i := range in.Logs.Allow {
		re, err := regexp.Compile(in.Logs.Allow[i])
		if err != nil {
			f.Problem(f.At(&in.Logs.Allow[i]), "write it as in https://pkg.go.dev/regexp/syntax", "this is no regular expression: %v", err)
			continue
		}
		s.AllowLogs = append(s.AllowLogs, re)
	}
	s.addMatrix(f, &in)
	if !s.findTopology(f, &in, topologies) {
		return nil, f.Err() // no name can be checked without it
	}
	s.lint(f)
	if err := f.Err(); err != nil {
		return nil, err
	}
	s.Sabotage = s.BuildSabotage(s.Rows[0])
	return s, nil
}

func (s *Scenario) findTopology(f *yamlfile.File, in *file, topologies string) bool {
	if in.Topology == "" || len(s.Rows) == 0 {
		return false
	}
	t, err := topology.Load(filepath.Join(topologies, in.Topology+".yaml"))
	if errors.Is(err, os.ErrNotExist) {
		paths, _ := filepath.Glob(filepath.Join(topologies, "*.yaml")) // the pattern is fine
		var names []string
		for _, p := range paths {
			names = append(names, strings.TrimSuffix(filepath.Base(p), ".yaml"))
		}
		f.Problem(f.At(&in.Topology), yamlfile.DidYouMean(in.Topology, names), "there is no topology %q in %s", in.Topology, topologies)
		return false
	}
	if err != nil {
		f.Problem(f.At(&in.Topology), "", "topology %s: %v", in.Topology, err)
		return false
	}
	s.Topology = t
	return true
}

// lint builds every row once; the same mistake in many rows is one problem.
func (s *Scenario) lint(f *yamlfile.File) {
	used := map[string]bool{}
	unclear := map[yamlfile.Pos]bool{}
	for i, r := range s.Rows {
		l := s.newLinter()
		var steps []Step
		var names []string
		for _, n := range s.steps {
			if !s.holds(n, r) {
				continue
			}
			var in stepFile
			f.Decode(n, &in, r.subst(s.Topology, used))
			st := Step{in.Name, in.Do, in.Expect, in.Within, yamlfile.PosOf(n)}
			if in.Name != "" && slices.Contains(names, in.Name) {
				f.Problem(f.At(&in.Name), "give one of them another name: sabotages and reports name steps", "two steps of the same row are called %q", in.Name)
			}
			names = append(names, in.Name)
			if len(in.Do) == 0 && len(in.Expect) == 0 {
				f.Problem(st.Pos, "add do or expect", "the step does nothing and expects nothing")
			}
			st.lint(l)
			steps = append(steps, st)
			s.Rows[i].needNetem(st.Do)
		}
		if len(names) == 0 && len(s.steps) > 0 {
			f.Problem(yamlfile.PosOf(s.steps[0]), "change the when of a step, or exclude the row", "row %s has no step: the when of every step leaves it out", r.Name)
		}
		lintControls(f, steps)
		s.lintSabotage(f, r, used, unclear, steps)
	}
	s.lintWhen(f, used)
	if len(s.steps) == 0 {
		f.Problem(yamlfile.PosOf(f.Root), "add steps", "the scenario has no step")
	}
	if len(s.sabot) == 0 {
		f.Problem(yamlfile.PosOf(f.Root), "name an object to withhold, state to plant, or a host whose daemons pause, and the step that then fails", "the scenario has no sabotage: nobody knows whether it can fail")
	}
	for _, d := range s.Matrix {
		if !used[d.Key] && d.Key != overlayKey && len(s.steps) > 0 {
			f.Problem(yamlfile.PosOf(f.Root), "use {"+d.Key+"} in a step, or remove it", "the matrix key %q is never used", d.Key)
		}
	}
}

func (st *Step) lint(l *expect.Linter) {
	for _, a := range st.Do {
		a.Lint(l)
	}
	for _, e := range st.Expect {
		e.Lint(l)
	}
}

func (s *Scenario) lintSabotage(f *yamlfile.File, r Row, used map[string]bool, unclear map[yamlfile.Pos]bool, steps []Step) {
	var names []string
	for _, st := range steps {
		names = append(names, st.Name)
	}
	any := false
	for _, n := range s.sabot {
		if !s.holds(n, r) {
			continue
		}
		any = true
		var in sabotageFile
		f.Decode(n, &in, r.subst(s.Topology, used))
		l := s.newLinter()
		for i := range in.In {
			l.Cluster(&in.In[i])
		}
		ways := 0
		for _, said := range []bool{in.Withhold != "", in.Plant != nil, in.Pause.Text != ""} {
			if said {
				ways++
			}
		}
		switch {
		case ways != 1:
			f.Problem(yamlfile.PosOf(n), "write one of them", "a sabotage needs one of withhold, plant and pause, and no more than one")
		case in.Withhold != "" && strings.Count(in.Withhold, "/") != 1:
			f.Problem(f.At(&in.Withhold), "such as routeconfiguration/rome-node-gw", "%q is not kind/name", in.Withhold)
		case in.Withhold != "" && len(in.In) == 0:
			f.Problem(yamlfile.PosOf(n), "in: "+s.Topology.Clusters[0].Name, "say in which cluster the object is withheld")
		case in.Withhold == "" && len(in.In) > 0:
			f.Problem(f.At(&in.In[0]), "leave out in", "in is the cluster of an object that is withheld, and this sabotage withholds none")
		case in.Withhold == "" && in.Namespace != "":
			f.Problem(f.At(&in.Namespace), "leave out namespace", "namespace is that of an object that is withheld, and this sabotage withholds none")
		case in.Pause.Text != "":
			l.Resolve(&in.Pause)
		case in.Plant != nil:
			l.Resolve(&in.Plant.On)
			lintScript(l, &in.Plant.Run)
			lintScript(l, &in.Plant.Undo)
		}
		for _, name := range []*string{&in.Before, &in.Fails} {
			if *name == "" || slices.Contains(names, *name) {
				continue
			}
			hint := "the steps are: " + strings.Join(names, "; ")
			if c := yamlfile.Closest(*name, names); c != "" {
				hint = fmt.Sprintf("did you mean %q?", c)
			}
			f.Problem(f.At(name), hint, "no step is called %q", *name)
		}
		fails := slices.Index(names, in.Fails)
		if fails < 0 {
			continue
		}
		if slices.Index(names, in.Before) > fails {
			f.Problem(f.At(&in.Before), "", "%q comes after the step that is to fail", in.Before)
		}
		if at := yamlfile.PosOf(n); !unclear[at] { // a row is enough: texts differ from row to row
			unclear[at] = s.lintFailing(f, &in, &steps[fails])
		}
	}
	if !any && len(s.sabot) > 0 {
		f.Problem(yamlfile.PosOf(s.sabot[0]), "change the when of a sabotage, or add one", "row %s has no sabotage, so nobody knows whether it can fail: the when of every sabotage leaves it out", r.Name)
	}
}

// lintFailing demands that a sabotage says which expectation must fail, and
// tells whether it does not.
func (s *Scenario) lintFailing(f *yamlfile.File, in *sabotageFile, st *Step) (unclear bool) {
	const hint = "write its kind, such as reach, or a part of its text that no other one has"
	_, problem := st.expectations(in.Expectation)
	switch {
	case problem == "":
	case len(st.Expect) == 0:
		f.Problem(f.At(&in.Fails), "name a step with an expectation", "the step %q expects nothing, so nothing of it can fail", st.Name)
	case len(in.Expectation) == 0:
		f.Problem(f.At(&in.Fails), "add expectation: "+st.Expect[0].Name, "the step %q has %d expectations: say which one must fail", st.Name, len(st.Expect))
	default:
		f.Problem(f.At(&in.Expectation), hint, "%s", problem)
	}
	return problem != ""
}
