// Package archtest keeps the packages of the appliance and the lab apart, as
// the design says. It has nothing but a test.
package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

const module = "github.com/isthmus-net/isthmus/"

// root is the repository, seen from the directory of this package.
var root = filepath.Join("..", "..", "..")

// only says which packages may import a library, by path prefix: a package
// or all below it. A library that is not listed is free.
var only = map[string][]string{
	// Whoever changes a kernel's network.
	"github.com/vishvananda/netlink":    network,
	"github.com/google/nftables":        network,
	"github.com/mdlayher/netlink":       network,
	"golang.zx2c4.com/wireguard":        {"appliance/kernel"},
	"golang.zx2c4.com/wireguard/wgctrl": network,
	// Keys only; TestKeys says whose. The lab's world takes a key from a link
	// and gives it back, to end its sessions.
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes": slices.Concat(withKeys, []string{"lab/internal/world"}),
	"k8s.io/":                                             kubernetes,
	"sigs.k8s.io/controller-runtime":                      kubernetes,
	module + "appliance/fieldpath":                        {},                                                                            // tests only
	module + "appliance/nettest":                          {"appliance/nettest/apiserver", "lab/internal/controlplane/controlplanetest"}, // and tests
	module + "appliance/nettest/apiserver":                {},                                                                            // tests only
	module + "lab/internal/controlplane/controlplanetest": {},                                                                            // tests only
	module + "appliance/nettest/sysctl":                   {"appliance/nettest", "lab/internal/netns", "lab/internal/supervisor"},
	module + "appliance/internal/archtest":                {},
}

// network are the packages that speak to a kernel: one of the appliance, and
// the lab where it builds its world.
var network = []string{
	"appliance/kernel", "lab/internal/netns", "lab/internal/world", "lab/internal/vm", "lab/internal/supervisor", "lab/internal/pods",
}

// kubernetes are the packages that speak to an API server, or are its types.
// For those that may import the types only, see typesOnly. The lab is a user
// of clusters.
var kubernetes = []string{
	"appliance/api", "appliance/internal/kube", "appliance/internal/controllers", "appliance/internal/teardown", "appliance/internal/cli",
	"appliance/internal/access", "appliance/internal/peer", "appliance/internal/peers",
	"appliance/internal/daemon", "appliance/cmd", "appliance/plan", "appliance/nettest/apiserver", "lab",
}

// typesOnly may import what is after the colon of Kubernetes and no more.
var typesOnly = map[string][]string{
	// What nodes a pod may run on is the scheduler's to say.
	"appliance/plan": {"k8s.io/api/", "k8s.io/apimachinery/", "k8s.io/component-helpers/scheduling/"},
}

// pure packages import each other and those parts of the standard library
// that neither do I/O nor read a clock.
var (
	pure   = []string{"appliance/netstate", "appliance/cluster", "appliance/ipam", "appliance/desired", "appliance/trace"}
	impure = []string{"os", "net", "time", "log", "context", "syscall", "sync", "io/fs", "io/ioutil", "math/rand", "crypto/rand"}
	// values are the exceptions: parts of those that are values only.
	values = map[string][]string{
		"net/netip": pure,
		"time":      {"appliance/cluster"}, // time.Time in Meta; nobody asks what time it is
	}
)

// withKeys are the packages that a private key may pass through: of isthmusctl the one
// that writes a peering to files, with the key pairs of its gateways. An invitation has the
// key of its temporary peer.
var withKeys = []string{
	"appliance/kernel", "appliance/internal/controllers", "appliance/internal/daemon", "appliance/internal/peer", "appliance/internal/invitation", "appliance/cmd",
}

// globals are package-level variables that are neither errors nor constants
// in all but name, with the reason.
var globals = map[string]string{
	"appliance/api:SchemeBuilder":      "controller-runtime's way to register types",
	"appliance/api:AddToScheme":        "controller-runtime's way to register types",
	"appliance/api:localSchemeBuilder": "controller-runtime's way to register types",
	"appliance/api:GroupVersion":       "a constant of a struct type",
	"appliance/api:SchemeGroupVersion": "a constant of a struct type",
	"appliance/cmd:version":            "set by the linker",
	"lab/cmd:version":                  "set by the linker",
}

// A file is a parsed source file that is not a test.
type file struct {
	pkg, path string
	ast       *ast.File
	fset      *token.FileSet
}

// files parses the sources itself: unlike a run of "go list", the files that
// a test opens are known to the test cache, so that an edit is never missed.
func files(t *testing.T) []file {
	t.Helper()
	var out []file
	for _, top := range []string{"appliance", "lab"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel, _ := filepath.Rel(root, path)
			switch {
			case d.IsDir() && (rel == filepath.Join("lab", "kubernetes") || d.Name() == "testdata"):
				return filepath.SkipDir // a module of its own
			case !strings.HasSuffix(path, ".go"), strings.HasSuffix(path, "_test.go"):
				return nil
			}
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			out = append(out, file{filepath.ToSlash(filepath.Dir(rel)), rel, f, fset})
			return nil
		})
		assert.NilError(t, err)
	}
	return out
}

// TestImports holds I1, I2, I3, I6: who may import what.
func TestImports(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range files(t) {
		seen[f.pkg] = true
		for _, spec := range f.ast.Imports {
			imp, err := strconv.Unquote(spec.Path.Value)
			assert.NilError(t, err)
			if why := forbidden(f.pkg, imp); why != "" {
				t.Errorf("%s imports %s: %s", f.path, imp, why)
			}
		}
	}
	for _, p := range slices.Concat(pure, []string{"appliance/kernel", "appliance/nettest"}) {
		if !seen[p] {
			t.Errorf("package %s is gone; correct the lists of this test", p)
		}
	}
}

// forbidden says why a package may not import another, or nothing.
func forbidden(pkg, imp string) string {
	// The longest prefix decides: wgctrl is not wireguard-go.
	rule := ""
	for lib := range only {
		if hasPrefix(imp, lib) && len(lib) > len(rule) {
			rule = lib
		}
	}
	if rule != "" && !within(pkg, only[rule]) {
		return "only " + strings.Join(only[rule], ", ") + " may"
	}
	if types, ok := typesOnly[pkg]; ok && (rule == "k8s.io/" || rule == "sigs.k8s.io/controller-runtime") {
		if !slices.ContainsFunc(types, func(p string) bool { return strings.HasPrefix(imp, p) }) {
			return "of Kubernetes only " + strings.Join(types, ", ")
		}
	}
	own, isOwn := strings.CutPrefix(imp, module)
	if isOwn && within(pkg, []string{"appliance"}) && within(own, []string{"lab"}) {
		return "the appliance does not know the lab"
	}
	if !within(pkg, pure) {
		return ""
	}
	switch {
	case isOwn && within(own, pure):
		return ""
	case isOwn, strings.Contains(imp, "."):
		return "a pure package imports pure ones and the standard library"
	case within(imp, impure) && !within(pkg, values[imp]):
		return "a pure package does no I/O and reads no clock"
	}
	return ""
}

// TestCommands holds the other half of I1: nobody in the appliance runs ip,
// nft or anything else; and I14: exits and signals are for main.
func TestCalls(t *testing.T) {
	for _, f := range files(t) {
		names := imports(f.ast)
		ast.Inspect(f.ast, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, ok := sel.X.(*ast.Ident)
			if !ok {
				return true
			}
			at := f.fset.Position(sel.Pos())
			switch call := names[x.Name] + "." + sel.Sel.Name; call {
			case "os/exec.Command", "os/exec.CommandContext":
				if within(f.pkg, []string{"appliance"}) && f.pkg != "appliance/nettest" {
					t.Errorf("%s: the appliance runs no programs", at)
				}
			case "os.Exit", "os/signal.Notify", "os/signal.NotifyContext", "log.Fatal", "log.Fatalf", "syscall.Exit":
				if f.ast.Name.Name != "main" {
					t.Errorf("%s: %s belongs into main", at, call)
				}
			}
			return true
		})
	}
}

// imports returns the import paths of a file by the names they have in it.
func imports(f *ast.File) map[string]string {
	out := map[string]string{}
	for _, spec := range f.Imports {
		path, _ := strconv.Unquote(spec.Path.Value)
		name := path[strings.LastIndex(path, "/")+1:]
		if spec.Name != nil {
			name = spec.Name.Name
		}
		out[name] = path
	}
	return out
}

// TestGlobals holds I13: no state in packages, and nothing that runs before
// main.
func TestGlobals(t *testing.T) {
	for _, f := range files(t) {
		if ast.IsGenerated(f.ast) {
			continue
		}
		assigned := assignments(f.ast)
		for _, d := range f.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.Name == "init" && d.Recv == nil && !within(f.pkg, []string{"appliance/api"}) {
					t.Errorf("%s: no init functions", f.fset.Position(d.Pos()))
				}
			case *ast.GenDecl:
				if d.Tok == token.VAR {
					for _, s := range d.Specs {
						checkGlobal(t, f, s.(*ast.ValueSpec), assigned)
					}
				}
			}
		}
	}
}

// checkGlobal allows errors, tables of constants, what is computed once and compiled regular
// expressions, none of them assigned to later.
func checkGlobal(t *testing.T, f file, s *ast.ValueSpec, assigned map[string]bool) {
	for i, name := range s.Names {
		at := f.fset.Position(name.Pos())
		switch {
		case name.Name == "_", excepted(f.pkg, name.Name):
		case assigned[name.Name]:
			t.Errorf("%s: package variable %s is assigned to", at, name.Name)
		case len(s.Values) <= i && !embedded(f, name):
			t.Errorf("%s: package variable %s has no value: it will be given one later", at, name.Name)
		case len(s.Values) > i && !constant(s.Values[i]):
			t.Errorf("%s: package variable %s is not an error, a table of constants, what is computed once (sync.OnceValue) or a regular expression", at, name.Name)
		}
	}
}

func excepted(pkg, name string) bool {
	for key := range globals {
		p, n, _ := strings.Cut(key, ":")
		if n == name && within(pkg, []string{p}) {
			return true
		}
	}
	return false
}

// embedded reports whether a variable is filled by a go:embed line.
func embedded(f file, name *ast.Ident) bool {
	line := f.fset.Position(name.Pos()).Line
	for _, g := range f.ast.Comments {
		for _, c := range g.List {
			if strings.HasPrefix(c.Text, "//go:embed") && f.fset.Position(c.Pos()).Line < line && line-f.fset.Position(c.Pos()).Line <= 2 {
				return true
			}
		}
	}
	return false
}

// constant reports whether an expression is one that never changes: made of
// literals, composite literals, and a few calls.
func constant(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.BasicLit, *ast.Ident, *ast.SelectorExpr, *ast.FuncLit:
		return true
	case *ast.CompositeLit:
		return !slices.ContainsFunc(e.Elts, func(e ast.Expr) bool { return !constant(e) })
	case *ast.KeyValueExpr:
		return constant(e.Key) && constant(e.Value)
	case *ast.UnaryExpr:
		return e.Op != token.ARROW && constant(e.X)
	case *ast.BinaryExpr:
		return constant(e.X) && constant(e.Y)
	case *ast.ParenExpr:
		return constant(e.X)
	case *ast.CallExpr:
		fun := e.Fun
		if generic, ok := fun.(*ast.IndexExpr); ok {
			fun = generic.X // reflect.TypeFor[int]
		}
		switch fun := fun.(type) {
		case *ast.SelectorExpr:
			x, _ := fun.X.(*ast.Ident)
			if x == nil {
				return false
			}
			switch x.Name + "." + fun.Sel.Name {
			case "errors.New", "fmt.Errorf", "regexp.MustCompile", "sync.OnceValue", "sync.OnceValues", "filepath.Join", "base32.NewEncoding", "strings.NewReplacer", "resource.MustParse":
				return true
			}
			// Values of netip and reflect never change.
			return x.Name == "netip" || x.Name == "reflect" || slices.Contains([]string{"WithPadding", "WithKind", "WithResource"}, fun.Sel.Name)
		case *ast.ArrayType, *ast.Ident:
			return !slices.ContainsFunc(e.Args, func(e ast.Expr) bool { return !constant(e) })
		}
	}
	return false
}

// assignments returns the names that functions of a file assign to and that
// they did not declare themselves, as far as one can see without types.
func assignments(f *ast.File) map[string]bool {
	out := map[string]bool{}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Body == nil {
			continue
		}
		local := map[string]bool{}
		ast.Inspect(fn, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Field:
				for _, name := range n.Names {
					local[name.Name] = true
				}
			case *ast.ValueSpec:
				for _, name := range n.Names {
					local[name.Name] = true
				}
			case *ast.AssignStmt:
				for _, l := range n.Lhs {
					id, ok := l.(*ast.Ident)
					switch {
					case !ok:
					case n.Tok == token.DEFINE:
						local[id.Name] = true
					case !local[id.Name]:
						out[id.Name] = true
					}
				}
			case *ast.RangeStmt:
				for _, e := range []ast.Expr{n.Key, n.Value} {
					if id, ok := e.(*ast.Ident); ok && n.Tok == token.DEFINE {
						local[id.Name] = true
					}
				}
			}
			return true
		})
	}
	return out
}

// TestKeys holds the part of I12 that imports show: the library that makes
// and parses private keys is for those that keep them.
func TestKeys(t *testing.T) {
	for _, f := range files(t) {
		for name, path := range imports(f.ast) {
			if (path == "golang.zx2c4.com/wireguard/wgctrl/wgtypes" || path == "crypto/ecdh") && within(f.pkg, []string{"appliance"}) && !within(f.pkg, withKeys) {
				t.Errorf("%s imports %s as %s: private keys are for %s only", f.path, path, name, strings.Join(withKeys, ", "))
			}
		}
	}
}

// TestSkips: a test is skipped by nettest alone, which fails in CI and names
// what is missing.
func TestSkips(t *testing.T) {
	for _, top := range []string{"appliance", "lab", "k8s"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			names := imports(f)
			ast.Inspect(f, func(n ast.Node) bool {
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				x, ok := sel.X.(*ast.Ident)
				if !ok {
					return true
				}
				skips := slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, sel.Sel.Name) && names[x.Name] == ""
				if skips || names[x.Name] == "gotest.tools/v3/skip" {
					t.Errorf("%s: skip by nettest.SkipOrFail, Need, NeedRoot, Built or Slow", fset.Position(sel.Pos()))
				}
				return true
			})
			return nil
		})
		assert.NilError(t, err)
	}
}

// TestForbidden keeps the test honest: each of these must be refused.
func TestForbidden(t *testing.T) {
	for _, tt := range []struct {
		pkg, imp string
		want     bool
	}{
		{"appliance/desired", "github.com/vishvananda/netlink", true},
		{"appliance/agent", "github.com/google/nftables/expr", true},
		{"appliance/kernel", "github.com/google/nftables/expr", false},
		{"appliance/agent", "golang.zx2c4.com/wireguard/wgctrl", true},
		{"lab/internal/world", "golang.zx2c4.com/wireguard/device", true},
		{"lab/internal/world", "golang.zx2c4.com/wireguard/wgctrl", false},
		{"appliance/netstate", "net/netip", false},
		{"appliance/netstate", "net", true},
		{"appliance/netstate", "net/http", true},
		{"appliance/netstate", "time", true},
		{"appliance/cluster", "time", false},
		{"appliance/desired", "sync/atomic", true},
		{"appliance/desired", module + "appliance/cluster", false},
		{"appliance/desired", module + "appliance/kernel", true},
		{"appliance/desired", "k8s.io/api/core/v1", true},
		{"appliance/agent", "k8s.io/client-go/kubernetes", true},
		{"appliance/plan", "k8s.io/api/core/v1", false},
		{"appliance/plan", "k8s.io/client-go/kubernetes", true},
		{"appliance/plan", "sigs.k8s.io/controller-runtime/pkg/client", true},
		{"appliance/kernel", module + "appliance/nettest", true},
		{"appliance/agent", module + "lab/internal/world", true},
		{"appliance/internal/controllers", "sigs.k8s.io/controller-runtime", false},
	} {
		if got := forbidden(tt.pkg, tt.imp); (got != "") != tt.want {
			t.Errorf("%s imports %s: %q", tt.pkg, tt.imp, got)
		}
	}
}

// hasPrefix reports whether an import path is a library or in it.
func hasPrefix(imp, lib string) bool {
	return imp == lib || strings.HasPrefix(imp, strings.TrimSuffix(lib, "/")+"/")
}

// within reports whether path is one of dirs or lies below one.
func within(path string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(d string) bool { return path == d || strings.HasPrefix(path, d+"/") })
}
