package scenario

import (
	"fmt"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// Install installs the appliance in a cluster by isthmusctl install or helm
// install, as an operator does, and waits until it runs. At the end of the row
// the cluster has the installation that it had when the row began.
type Install struct {
	In     string `lab:"in,required" doc:"cluster"`
	With   string `lab:"with" enum:"isthmusctl|helm" doc:"the program that installs; default isthmusctl"`
	Values Values `lab:"values" doc:"of the chart, over those that the lab gives"`
}

// Upgrade changes the values of an installation by isthmusctl upgrade or helm
// upgrade and waits until the node daemons, the controller and the gateways are
// the new ones. At the end of the row they are changed back.
type Upgrade struct {
	In     string `lab:"in,required" doc:"cluster"`
	With   string `lab:"with" enum:"isthmusctl|helm" doc:"the program that upgrades; default isthmusctl"`
	Values Values `lab:"values,required" doc:"of the chart, that change"`
}

// Uninstall removes the appliance from a cluster by isthmusctl uninstall, or by
// helm uninstall, which leaves the kinds. At the end of the row it is installed
// again if it was when the row began.
type Uninstall struct {
	In    string `lab:"in,required" doc:"cluster"`
	With  string `lab:"with" enum:"isthmusctl|helm" doc:"the program that uninstalls; default isthmusctl"`
	Purge bool   `lab:"purge" doc:"with the kinds and all their objects"`
}

// Remember looks at clusters, the kernels of all their hosts and all objects of
// their APIs, for expect: same: { as: … }.
type Remember struct {
	Name string   `lab:"name,required" doc:"for expect: same: { as: … }"`
	Of   []string `lab:"of,one" doc:"clusters; default all"`
}

// Values are values of the chart, as in a file for helm.
type Values map[string]any

// UnmarshalLab reads any mapping.
func (v *Values) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	if _, ok := f.Mapping(n, "values"); ok {
		*v, _ = anyValue(f, n, subst).(map[string]any)
	}
}

// anyValue is what a node of YAML stands for.
func anyValue(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) any {
	switch n := n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		out := map[string]any{}
		pairs, _ := f.Mapping(n, "values")
		for _, p := range pairs {
			out[p.Key] = anyValue(f, p.Value, subst)
		}
		return out
	case *ast.SequenceNode:
		out := make([]any, 0, len(n.Values))
		for _, e := range n.Values {
			out = append(out, anyValue(f, e, subst))
		}
		return out
	case *ast.NullNode:
		return nil
	case *ast.BoolNode:
		return n.Value
	case *ast.IntegerNode:
		return n.Value
	case *ast.FloatNode:
		return n.Value
	}
	text, _ := f.Scalar(n, subst, "a value of the chart")
	return text
}

// LabSchema describes any mapping to editors.
func (*Values) LabSchema() map[string]any { return map[string]any{"type": "object"} }

// String is the values on one line.
func (v Values) String() string {
	text, err := yaml.Marshal(map[string]any(v))
	if err != nil {
		return err.Error()
	}
	return strings.Join(strings.FieldsFunc(string(text), func(r rune) bool { return r == '\n' }), "; ")
}

// Lint checks the cluster, and that there is a release to be.
func (a *Install) Lint(l *expect.Linter) { lintInstallation(l, &a.In) }

// Lint checks the cluster, and that there is a release to change.
func (a *Upgrade) Lint(l *expect.Linter) { lintInstallation(l, &a.In) }

// Lint checks the cluster, what the program can do, and that the next row finds
// its peerings.
func (a *Uninstall) Lint(l *expect.Linter) {
	lintInstallation(l, &a.In)
	if a.Purge && a.With == deploy.ByHelm {
		l.Problem(&a.Purge, "delete them by the action kubectl", "helm leaves the kinds")
	}
	if peers := l.Topology.PresentPeers(a.In); a.Purge && len(peers) > 0 {
		l.Problem(&a.Purge, "write absent: true into the topology, and connect it first", "%s and %s peer from the start, and the next row needs that", a.In, peers[0])
	}
}

func lintInstallation(l *expect.Linter, in *string) {
	l.Cluster(in)
	if l.Topology.Install == topology.InstallChart {
		l.Problem(in, "write install: isthmusctl, or none, into the topology", "topology %s is installed without isthmusctl, which finds no release there", l.Topology.Name)
	}
}

// Lint checks the clusters, fills in all when there are none, and remembers the
// name.
func (a *Remember) Lint(l *expect.Linter) {
	for i := range a.Of {
		l.Cluster(&a.Of[i])
		if slices.Contains(a.Of[:i], a.Of[i]) {
			l.Problem(&a.Of[i], "", "%s is named twice", a.Of[i])
		}
	}
	if len(a.Of) == 0 {
		for _, c := range l.Topology.Clusters {
			a.Of = append(a.Of, c.Name)
		}
	}
	l.Remembered[a.Name] = true
}

// String is the action on one line, for plans and reports.
func (a *Install) String() string {
	what := "install in " + a.In + by(a.With)
	if len(a.Values) == 0 {
		return what
	}
	return fmt.Sprintf("%s with %s", what, a.Values)
}

// String is the action on one line, for plans and reports.
func (a *Upgrade) String() string {
	return fmt.Sprintf("upgrade in %s%s to %s", a.In, by(a.With), a.Values)
}

// String is the action on one line, for plans and reports.
func (a *Uninstall) String() string {
	if a.Purge {
		return "uninstall in " + a.In + by(a.With) + " with all kinds"
	}
	return "uninstall in " + a.In + by(a.With)
}

// by names the program, unless it is the usual one.
func by(program string) string {
	if program == "" || program == deploy.ByIsthmusctl {
		return ""
	}
	return " by " + program
}

// String is the action on one line, for plans and reports.
func (a *Remember) String() string {
	return "remember " + strings.Join(a.Of, ", ") + " as " + a.Name
}
