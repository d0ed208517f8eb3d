package scenario

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// An Action is something that a step does: *Apply, *Delete, *Exec, *Kill,
// *Stop, *Flow, *Impair, *Rewrite, *NodeLeaves, *NodeLost, *NodeJoins, *NodeReboots,
// *NodeDrained, *GatewayMoves, *PodMoves, *Connect, *Disconnect, *Kubectl,
// *Install, *Upgrade, *Uninstall or *Remember.
type Action interface {
	// Lint resolves names and reports what can't be meant.
	Lint(l *expect.Linter)
	// String is the action on one line.
	String() string
}

// Apply applies objects to a cluster. They are deleted when the row ends.
type Apply struct {
	In      string `lab:"in,required" doc:"cluster"`
	Objects string `lab:"objects,required" doc:"YAML documents; {milan/web.ip} is an address"`
	// Refused expects the API server to refuse them with a message like this.
	Refused string `lab:"refused" doc:"regular expression: the API server must refuse each with such a message"`
}

// Delete deletes an object of a cluster and waits until it is gone.
type Delete struct {
	In        string `lab:"in,required" doc:"cluster"`
	Object    string `lab:"object,required" doc:"kind/name"`
	Namespace string `lab:"namespace" doc:"of the object; may be left out when the name is unique in the cluster"`
}

// Exec runs a shell command on a host, or in the network namespace of a pod.
type Exec struct {
	On   expect.Ref `lab:"on,required" doc:"host or pod"`
	Run  string     `lab:"run,required" doc:"shell commands; {milan/web.ip} is an address, $TMPDIR a directory of the lab's own, $PATIENCE how many times as long commands may wait here: --timeout $((90 * PATIENCE))s"`
	Name string     `lab:"name" doc:"for expect: output: { of: … }"`
	Undo string     `lab:"undo" doc:"shell commands for the end of the row"`
	// Fails allows another exit code than 0.
	Fails bool `lab:"fails" doc:"an exit code other than 0 is no mistake"`
	// Again runs it before every look at its output.
	Again bool `lab:"again" doc:"run it again before every look at its output"`
}

// Kill kills the process of a pod with SIGKILL.
type Kill struct {
	Of expect.Ref
}

// Stop ends a component of a control plane for some time. What the step does after it
// is done while the component is away, and the expectations of the step must hold
// from then on until the time is over.
type Stop struct {
	In        string        `lab:"in,required" doc:"cluster"`
	Component string        `lab:"component,required" enum:"etcd|kube-apiserver|kube-controller-manager|kube-scheduler"`
	For       time.Duration `lab:"for,required" min:"100ms" max:"10m" doc:"the expectations of the step must hold all that time"`
}

// Flow opens a long-lived numbered stream that runs until the row ends.
type Flow struct {
	Name     string        `lab:"name,required" doc:"for expect: flow: { name: … }"`
	From     expect.Ref    `lab:"from,required"`
	To       expect.Ref    `lab:"to,required"`
	Proto    string        `lab:"proto" enum:"tcp|udp" doc:"default tcp"`
	Interval time.Duration `lab:"interval" min:"1ms" max:"10s" doc:"between two messages; default 50ms"`
	Bind     string        `lab:"bind" doc:"address:port to send from; default: as the kernel chooses"`
	Fresh    bool          `lab:"fresh" doc:"a new socket for every message: each is translated anew (udp)"`
}

func actions() map[string]func() Action {
	return map[string]func() Action{
		"apply":  func() Action { return &Apply{} },
		"delete": func() Action { return &Delete{} },
		"exec":   func() Action { return &Exec{} },
		"kill":   func() Action { return &Kill{} },
		"stop":   func() Action { return &Stop{} },
		"flow":   func() Action { return &Flow{} },

		"impair":       func() Action { return &Impair{} },
		"rewrite":      func() Action { return &Rewrite{} },
		"nodeLeaves":   func() Action { return &NodeLeaves{} },
		"nodeLost":     func() Action { return &NodeLost{} },
		"nodeJoins":    func() Action { return &NodeJoins{} },
		"nodeReboots":  func() Action { return &NodeReboots{} },
		"nodeDrained":  func() Action { return &NodeDrained{} },
		"kubectl":      func() Action { return &Kubectl{} },
		"gatewayMoves": func() Action { return &GatewayMoves{} },
		"podMoves":     func() Action { return &PodMoves{} },
		"connect":      func() Action { return &Connect{} },
		"disconnect":   func() Action { return &Disconnect{} },
		"install":      func() Action { return &Install{} },
		"upgrade":      func() Action { return &Upgrade{} },
		"uninstall":    func() Action { return &Uninstall{} },
		"remember":     func() Action { return &Remember{} },
	}
}

// Actions are the actions of a step, in order: a mapping, or a list of
// mappings.
type Actions []Action

// UnmarshalLab reads the list.
func (a *Actions) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	nodes := []ast.Node{n}
	if seq, ok := n.(*ast.SequenceNode); ok {
		nodes = seq.Values
	}
	all := actions()
	for _, n := range nodes {
		pairs, ok := f.Mapping(n, "do")
		if !ok {
			continue
		}
		for _, p := range pairs {
			make, ok := all[p.Key]
			if !ok {
				hint := yamlfile.DidYouMean(p.Key, slices.Sorted(maps.Keys(all)))
				if p.Key == "sleep" || p.Key == "wait" {
					hint = "expectations wait by themselves: within: 20s"
				}
				f.Problem(p.Pos, hint, "unknown action %q", p.Key)
				continue
			}
			action := make()
			f.Decode(p.Value, action, subst)
			isStop := func(x Action) bool { _, is := x.(*Stop); return is }
			if isStop(action) && slices.ContainsFunc(*a, isStop) {
				f.Problem(p.Pos, "write a step for each", "a step can stop one component only")
				continue
			}
			*a = append(*a, action)
		}
	}
}

// LabSchema describes the list to editors.
func (*Actions) LabSchema() map[string]any {
	properties := map[string]any{}
	for name, make := range actions() {
		properties[name] = yamlfile.SchemaOf(make())
	}
	one := map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
	return map[string]any{"anyOf": []any{one, map[string]any{"type": "array", "items": one}}}
}

// UnmarshalLab reads the name.
func (k *Kill) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	f.Decode(n, &k.Of, subst)
}

// LabSchema describes a name to editors.
func (*Kill) LabSchema() map[string]any { return (&expect.Ref{}).LabSchema() }

// Lint checks the cluster and that the objects are objects.
func (a *Apply) Lint(l *expect.Linter) {
	l.Cluster(&a.In)
	l.Text(&a.Objects)
	l.Pattern(&a.Refused)
	objects, err := ParseObjects(a.Objects)
	switch {
	case err != nil:
		l.Problem(&a.Objects, "", "%v", err)
	case len(objects) == 0 && a.Objects != "":
		l.Problem(&a.Objects, "", "there is no object in it")
	}
}

// ParseObjects reads YAML documents as Kubernetes objects.
func ParseObjects(text string) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	d := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
	for {
		o := &unstructured.Unstructured{}
		err := d.Decode(&o.Object)
		switch {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, fmt.Errorf("object %d: %w", len(out)+1, err)
		case len(o.Object) == 0:
			continue
		case o.GetKind() == "" || o.GetAPIVersion() == "" || o.GetName() == "":
			return nil, fmt.Errorf("object %d needs apiVersion, kind and metadata.name", len(out)+1)
		}
		out = append(out, o)
	}
}

// Lint checks the cluster.
func (a *Delete) Lint(l *expect.Linter) {
	l.Cluster(&a.In)
	if a.Object != "" && strings.Count(a.Object, "/") != 1 {
		l.Problem(&a.Object, "such as pod/web", "%q is not kind/name", a.Object)
	}
}

// Lint resolves the host and remembers the name.
func (a *Exec) Lint(l *expect.Linter) {
	l.Resolve(&a.On)
	lintScript(l, &a.Run)
	lintScript(l, &a.Undo)
	l.Execs[a.Name], l.Execs[""] = true, true
}

// lintScript checks the text of shell commands, which keep files in the lab's own
// directory only.
func lintScript(l *expect.Linter, text *string) {
	l.Text(text)
	if strings.Contains(*text, "/tmp/") {
		l.Problem(text, "write $TMPDIR/ for /tmp/", "/tmp is the machine's, where another lab that runs the scenario has its files, too; $TMPDIR is the lab's own")
	}
}

// Lint resolves the pod.
func (a *Kill) Lint(l *expect.Linter) {
	l.Resolve(&a.Of)
	switch a.Of.Kind {
	case "", operand.Pod, operand.Gateway, operand.Daemon, operand.Controller:
	default:
		l.Problem(&a.Of, "name a pod: milan/gateway, milan/node-1.daemon, milan/controller, milan/web", "%s is no pod", a.Of)
	}
}

// Lint checks the cluster.
func (a *Stop) Lint(l *expect.Linter) { l.Cluster(&a.In) }

// Lint resolves the ends and remembers the name.
func (a *Flow) Lint(l *expect.Linter) {
	l.Resolve(&a.From)
	l.Resolve(&a.To)
	if a.Proto == "" {
		a.Proto = "tcp"
	}
	if _, err := netip.ParseAddrPort(a.Bind); a.Bind != "" && err != nil {
		l.Problem(&a.Bind, "such as 169.254.20.10:5555", "%q is no address with a port", a.Bind)
	}
	if a.Fresh && (a.Proto != "udp" || a.Bind != "") {
		l.Problem(&a.Fresh, "proto: udp, without bind", "only udp from any port can have a new socket for every message")
	}
	if l.Flows[a.Name] {
		l.Problem(&a.Name, "", "a flow is called %q already", a.Name)
	}
	l.Flows[a.Name] = true
	l.Unnamed[a.Name] = expect.LeadsElsewhere(a.To.Operand)
}

// String names the objects, not what is in them.
func (a *Apply) String() string {
	objects, err := ParseObjects(a.Objects)
	if err != nil {
		return "apply in " + a.In
	}
	var names []string
	for _, o := range objects {
		names = append(names, strings.ToLower(o.GetKind())+"/"+o.GetName())
	}
	return "apply " + strings.Join(names, ", ") + " in " + a.In
}

// String is the action on one line, for plans and reports.
func (a *Delete) String() string { return "delete " + a.Object + " in " + a.In }

// String is the command on one line, however it was written.
func (a *Exec) String() string {
	return "on " + a.On.Text + ": " + strings.Join(strings.Fields(a.Run), " ")
}

// String is the action on one line, for plans and reports.
func (a *Kill) String() string { return "kill " + a.Of.Text }

// String says for how long, too: the step takes that time.
func (a *Stop) String() string { return fmt.Sprintf("stop %s in %s for %v", a.Component, a.In, a.For) }

// String names the flow as later steps do.
func (a *Flow) String() string {
	return fmt.Sprintf("flow %s: %s from %s to %s", a.Name, a.Proto, a.From, a.To)
}
