package scenario

import (
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
)

// Kubectl runs kubectl as the administrator of a cluster. What it refuses is a
// fault.
type Kubectl struct {
	In   string `lab:"in,required" doc:"cluster"`
	Run  string `lab:"run,required" doc:"arguments, as a shell reads them: rollout restart -n liqo daemonset/isthmus-node; {milan/web.ip} is an address"`
	Undo string `lab:"undo" doc:"arguments for the end of the row"`
}

// Lint checks the cluster and the names.
func (a *Kubectl) Lint(l *expect.Linter) {
	l.Cluster(&a.In)
	l.Text(&a.Run)
	l.Text(&a.Undo)
	if strings.HasPrefix(strings.TrimSpace(a.Run), "kubectl ") {
		l.Problem(&a.Run, "leave out kubectl", "the arguments start with the program")
	}
}

// String is the command on one line.
func (a *Kubectl) String() string {
	return "in " + a.In + ": kubectl " + strings.Join(strings.Fields(a.Run), " ")
}
