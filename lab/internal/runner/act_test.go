package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A refusingLab is one where nothing can be done: commands end as they are told
// to, nodes do not move, and the API servers, which have no objects, refuse all
// that is written.
type refusingLab struct {
	World
	topology *topology.Topology
	api      string // URL of the API servers
	ends     world.ExecResult
	fails    error // of commands and nodes
}

func (l *refusingLab) Status(context.Context) (world.Status, error) {
	s := world.Status{Spec: world.Plan(l.topology)}
	for _, c := range l.topology.Clusters {
		cs := world.ClusterStatus{Name: c.Name, Nodes: []string{"node-1"}}
		cs.Pods = []world.PodStatus{{Namespace: "default", Name: "web", Node: "node-1", IP: netip.MustParseAddr("10.0.1.2")}}
		s.Clusters = append(s.Clusters, cs)
	}
	return s, nil
}

func (l *refusingLab) Exec(context.Context, world.ExecRequest) (world.ExecResult, error) {
	return l.ends, l.fails
}
func (l *refusingLab) ExecStream(context.Context, world.ExecRequest, io.Reader, io.Writer, io.Writer, <-chan world.Resize) (int, error) {
	return 0, l.fails
}
func (l *refusingLab) JoinNode(context.Context, string, string) error       { return l.fails }
func (l *refusingLab) LeaveNode(context.Context, string, string) error      { return l.fails }
func (l *refusingLab) LoseNode(context.Context, string, string) error       { return l.fails }
func (l *refusingLab) RebootNode(context.Context, string, string) error     { return l.fails }
func (l *refusingLab) KillContainer(context.Context, string, string) error  { return l.fails }
func (l *refusingLab) Inventory(context.Context) ([]world.Inventory, error) { return nil, l.fails }
func (l *refusingLab) RESTConfig(context.Context, string) (*rest.Config, error) {
	return &rest.Config{Host: l.api}, nil
}

// refuseWrites is an API server with the core kinds and no objects. It refuses
// all writes.
func refuseWrites(t *testing.T) string {
	t.Helper()
	answers := map[string]any{
		"/api":  metav1.APIVersions{Versions: []string{"v1"}},
		"/apis": metav1.APIGroupList{},
		"/api/v1": metav1.APIResourceList{GroupVersion: "v1", APIResources: []metav1.APIResource{
			{Name: "configmaps", SingularName: "configmap", Kind: "ConfigMap", Namespaced: true, Verbs: metav1.Verbs{"get", "list"}},
			{Name: "pods", SingularName: "pod", Kind: "Pod", Namespaced: true, Verbs: metav1.Verbs{"get", "list"}},
			{Name: "nodes", SingularName: "node", Kind: "Node", Verbs: metav1.Verbs{"get", "list"}},
		}},
		"/api/v1/nodes":      corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}},
		"/api/v1/pods":       corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}},
		"/api/v1/configmaps": corev1.ConfigMapList{TypeMeta: metav1.TypeMeta{Kind: "ConfigMapList", APIVersion: "v1"}},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, ok := answers[r.URL.Path]
		switch {
		case r.Method != http.MethodGet:
			answer = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: metav1.StatusReasonInvalid, Code: 422, Message: "spec.cidr: this is no network"}
			w.WriteHeader(422)
		case !ok:
			answer = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: metav1.StatusReasonNotFound, Code: 404, Message: "there is none"}
			w.WriteHeader(404)
		}
		assert.Check(t, json.NewEncoder(w).Encode(answer))
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// TestActionFails: what can't be done as the scenario says is a fault of the
// step, which names the action, what went wrong, and how. The lab's own errors
// are errors, whatever the action.
func TestActionFails(t *testing.T) {
	topo, err := topology.Load("../../../topologies/two-clusters.yaml")
	assert.NilError(t, err)
	ref := func(text string) expect.Ref {
		o, err := operand.Parse(text, topo)
		assert.NilError(t, err)
		return expect.Ref{Text: text, Operand: o}
	}
	const object = "apiVersion: v1\nkind: ConfigMap\nmetadata: { name: x, namespace: default }\n"
	apply := &scenario.Apply{In: "milan", Objects: object}
	exec := &scenario.Exec{On: ref("milan/web"), Run: "show things"}
	connect := &scenario.Connect{Peering: topology.Peering{Server: "milan", Client: "rome"}}
	exits := world.ExecResult{Code: 3, Stdout: []byte("1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n"), Stderr: []byte("no such thing\n")}
	last := "2\n3\n4\n5\n6\n7\n8\n9\n10\nno such thing"

	for _, tc := range []struct {
		name           string
		action         scenario.Action
		ends           world.ExecResult
		fails          error
		apiGone        bool
		notTold        bool
		got, why, want string // of the fault
		err            string // of the lab
	}{
		{name: "exec", action: exec, ends: exits, want: "exit code 0", got: "exit code 3", why: last},
		{name: "exec where there is no pod", action: &scenario.Exec{On: ref("milan/gateway"), Run: "show things"}, fails: fmt.Errorf("%w: milan/gateway", world.ErrNoTarget),
			got: "no such target: milan/gateway"},
		{name: "exec without an agent", action: exec, fails: fmt.Errorf("%w: agent: EOF", world.ErrNoAnswer), err: "the lab does not answer: agent: EOF"},
		{name: "exec without a lab", action: exec, fails: world.ErrNotRunning, err: "the lab is not running"},
		{name: "exec with a name of nobody", action: &scenario.Exec{On: ref("milan/web"), Run: "show {rome/gateway.ip}"}, got: "{rome/gateway.ip}: rome/gateway.ip has no address"},
		{name: "apply", action: apply, got: "configmap/x: spec.cidr: this is no network"},
		{name: "apply of an unknown kind", action: &scenario.Apply{In: "milan", Objects: strings.Replace(object, "ConfigMap", "Nothing", 1)},
			got: `nothing/x: no matches for kind "Nothing" in version "v1"`},
		{name: "apply without a control plane", action: apply, apiGone: true, err: "connection refused"},
		{name: "apply that must be refused, without a control plane", action: &scenario.Apply{In: "milan", Objects: object, Refused: "refused"}, apiGone: true, err: "connection refused"},
		{name: "apply that is refused for another reason", action: &scenario.Apply{In: "milan", Objects: object, Refused: "too long"},
			want: `refused with a message that matches "too long"`, got: "spec.cidr: this is no network"},
		{name: "rewrite", action: &scenario.Rewrite{In: "milan", Versions: object, Times: 2}, got: "spec.cidr: this is no network"},
		{name: "delete", action: &scenario.Delete{In: "milan", Object: "pod/nobody"}, got: "there is no pod/nobody in milan"},
		{name: "kill", action: &scenario.Kill{Of: ref("milan/gateway")}, got: "milan/gateway has no address: there is no such pod"},
		{name: "flow", action: &scenario.Flow{Name: "f", From: ref("milan/web"), To: ref("rome/gateway"), Proto: "tcp"}, got: "rome/gateway has no address"},
		{name: "node leaves", action: &scenario.NodeLeaves{Node: ref("milan/node-1")}, fails: errors.New("it stays"), got: "it stays"},
		{name: "node that is there joins", action: &scenario.NodeJoins{Node: ref("milan/node-1")}, got: "milan/node-1 is there already"},
		{name: "node joins", action: &scenario.NodeJoins{Node: ref("milan/node-2")}, fails: errors.New("it is not ready"), got: "it is not ready"},
		{name: "node joins without a lab", action: &scenario.NodeJoins{Node: ref("milan/node-2")}, fails: world.ErrNotRunning, err: "the lab is not running"},
		{name: "node reboots", action: &scenario.NodeReboots{Node: ref("milan/node-1")}, fails: errors.New("it is off"), got: "it is off"},
		{name: "node is drained", action: &scenario.NodeDrained{Node: ref("milan/node-1")}, ends: exits, want: "exit code 0",
			got: "kubectl drain node-1 --ignore-daemonsets --delete-emptydir-data --pod-selector='!" + deploy.ProbeLabel + "' --timeout=1m0s in milan: exit code 3", why: last},
		{name: "gateway moves", action: &scenario.GatewayMoves{Of: "milan", Peer: "rome", To: ref("milan/node-1")}, got: "milan/gateway.rome has no address: there is no such pod"},
		{name: "pod moves", action: &scenario.PodMoves{Pod: ref("milan/web"), To: ref("milan/node-2")}, got: "there is no pod web in milan"},
		{name: "kubectl", action: &scenario.Kubectl{In: "milan", Run: "get things"}, ends: exits, want: "exit code 0", got: "kubectl get things in milan: exit code 3", why: last},
		{name: "connect", action: connect, got: "peering milan–rome: not connected"},
		{name: "connect without being told how", action: connect, notTold: true, err: "connect clusters: the runner was not told how"},
		{name: "disconnect", action: &scenario.Disconnect{In: "milan", Peer: "rome"}, got: `no matches for kind "Namespace" in version "v1"`},
		{name: "install without being told how", action: &scenario.Install{In: "milan"}, notTold: true, err: "install: the runner was not told how"},
		{name: "remember", action: &scenario.Remember{Name: "r", Of: []string{"milan"}}, fails: errors.New("no inventory"), got: "no inventory"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := &refusingLab{topology: topo, api: refuseWrites(t), ends: tc.ends, fails: tc.fails}
			if tc.apiGone {
				gone := httptest.NewServer(http.NotFoundHandler())
				gone.Close()
				l.api = gone.URL
			}
			r := &Runner{World: l, Seed: "1"}
			if !tc.notTold {
				r.Connect = func(context.Context, topology.Peering) error {
					return errors.New("peering milan–rome: not connected")
				}
			}
			r.setup()
			row := func() *expect.Row {
				return &expect.Row{
					World: l, Topology: topo, API: r.api, Directory: expect.NewDirectory(l, r.api, topo), NewToken: r.token,
					Flows: map[string]*expect.FlowState{}, Outputs: map[string]expect.Ran{}, Remembered: map[string]expect.Remembered{},
				}
			}
			var undo undoList
			fault, err := r.act(t.Context(), row(), tc.action, &undo)
			if tc.err != "" {
				assert.ErrorContains(t, err, tc.err)
				assert.Assert(t, fault == nil, "%+v", fault)
				return
			}
			assert.NilError(t, err)
			assert.Assert(t, fault != nil)
			assert.Equal(t, fault.Got, tc.got)
			assert.Equal(t, fault.Why, tc.why)
			if tc.want != "" {
				assert.Equal(t, fault.Want, tc.want)
			} else {
				assert.Equal(t, fault.Expectation, tc.action.String())
			}

			cancelled, cancel := context.WithCancel(t.Context())
			cancel()
			r.moved = nil
			if fault, err := r.act(cancelled, row(), tc.action, &undo); fault != nil {
				t.Errorf("a run that was ended blames the product: %+v, %v", fault, err)
			}
		})
	}
}

// TestUndoFails: what could not be undone says which action it is of, and the
// rest is undone all the same.
func TestUndoFails(t *testing.T) {
	drain := &scenario.NodeDrained{}
	drain.Node.Text = "milan/node-1"
	var order []string
	undone := func(name string, err error) func(context.Context) error {
		return func(context.Context) error { order = append(order, name); return err }
	}
	var undo undoList
	undo.add(undone("sabotage", errors.New("the policy is still there")))
	undo.add(undone("agent", fmt.Errorf("%w: agent", world.ErrNoAnswer)))
	undo.add(undone("gateway", errors.New("it did not move back")))
	undo.add(undone("command", &exitError{4, "no such rule\n"}))
	undo.add(undone("fine", nil))
	undo.name(1, drain)
	err := undo.run(t.Context())
	assert.DeepEqual(t, order, []string{"fine", "command", "gateway", "agent", "sabotage"})
	assert.Error(t, err, "undo milan/node-1 is drained: exit code 4: no such rule\nundo milan/node-1 is drained: it did not move back\n"+
		"undo milan/node-1 is drained: the lab does not answer: agent\nthe policy is still there")
	assert.Equal(t, len(undo), 0)
}

// TestUndoObjects: an object that a row has changed several times goes back at
// once to what it was, at the place of the first change. One that was deleted and
// made again is another one.
func TestUndoObjects(t *testing.T) {
	var order []string
	undone := func(name string) func(context.Context) error {
		return func(context.Context) error { order = append(order, name); return nil }
	}
	var undo undoList
	undo.addObject("endpoint", undone("endpoint, as it was"))
	undo.add(undone("command"))
	undo.addObject("configuration", undone("configuration is removed"))
	undo.addObject("endpoint", undone("endpoint, as the first step left it"))
	undo.add(undone("another command"))
	undo.addObject("endpoint made again", undone("endpoint made again is removed"))
	assert.NilError(t, undo.run(t.Context()))
	assert.DeepEqual(t, order, []string{"endpoint made again is removed", "another command", "configuration is removed", "command", "endpoint, as it was"})
}

// TestPatience: commands of scenarios are told how much longer they may wait in an emulated machine.
func TestPatience(t *testing.T) {
	for patience, want := range map[int]int{0: 1, 1: 1, 3: 3} {
		assert.Equal(t, (&Runner{Patience: patience}).wholePatience(time.Time{}), want)
	}
}
