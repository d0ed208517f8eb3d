package scenario

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
)

// Rewrite applies the versions of a RouteConfiguration or FirewallConfiguration
// in turn, each when the hosts that it is for report that the one before is in
// their kernels. What the row found is restored at its end.
type Rewrite struct {
	In       string `lab:"in,required" doc:"cluster"`
	Times    int    `lab:"times,required" min:"1" max:"10000" doc:"how often it is written"`
	Versions string `lab:"versions,required" doc:"YAML documents: the versions of one object; {milan/web.ip} is an address"`
}

// Lint checks that the versions are of one object that hosts report on.
func (a *Rewrite) Lint(l *expect.Linter) {
	l.Cluster(&a.In)
	l.Text(&a.Versions)
	versions, err := ParseObjects(a.Versions)
	switch {
	case err != nil:
		l.Problem(&a.Versions, "", "%v", err)
	case len(versions) < 2:
		l.Problem(&a.Versions, "", "with fewer than two versions nothing is rewritten")
	case !slices.Contains([]string{"RouteConfiguration", "FirewallConfiguration"}, versions[0].GetKind()):
		l.Problem(&a.Versions, "a RouteConfiguration or FirewallConfiguration", "hosts do not report on a %s", versions[0].GetKind())
	case slices.ContainsFunc(versions, func(o *unstructured.Unstructured) bool { return objectID(o) != objectID(versions[0]) }):
		l.Problem(&a.Versions, "", "the versions are not of one object")
	}
}

func objectID(o *unstructured.Unstructured) [3]string {
	return [3]string{o.GetKind(), o.GetNamespace(), o.GetName()}
}

// String names the object and how often it is written.
func (a *Rewrite) String() string {
	versions, err := ParseObjects(a.Versions)
	if err != nil || len(versions) == 0 {
		return "rewrite in " + a.In
	}
	return fmt.Sprintf("rewrite %s/%s in %s %d times", strings.ToLower(versions[0].GetKind()), versions[0].GetName(), a.In, a.Times)
}
