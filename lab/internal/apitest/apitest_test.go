// Package apitest shows on a real kube-apiserver what the CRDs and admission
// policies of this repository accept, store, refuse and print. It holds tests
// only.
package apitest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane/controlplanetest"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"
	"gotest.tools/v3/poll"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"
)

const namespace = "default"

// api is a control plane with the CRDs of k8s/crds.
type api struct {
	cp     *controlplane.ControlPlane
	binary string
	client dynamic.Interface
	mapper *restmapper.DeferredDiscoveryRESTMapper
	crds   []*unstructured.Unstructured
	valid  map[string]*unstructured.Unstructured // by file name without .yaml
}

func TestAPI(t *testing.T) {
	t.Parallel()
	a := start(t)
	t.Run("columns", func(t *testing.T) { columns(t, a) }) // first: it wants to be alone with its objects
	t.Run("valid", func(t *testing.T) { valid(t, a) })
	t.Run("invalid", func(t *testing.T) { invalid(t, a) })
	t.Run("schema", func(t *testing.T) { schemas(t, a) })
	t.Run("wrong types", func(t *testing.T) { wrongTypes(t, a) })
	t.Run("bad input", func(t *testing.T) { badInput(t, a) })
	t.Run("policies", func(t *testing.T) { policies(t, a) })
}

func start(t *testing.T) *api {
	t.Helper()
	binary := nettest.Built(t, "kubernetes")
	begin := time.Now()
	cp, err := controlplane.Start(t.Context(), controlplane.Config{
		Name: "apitest", Dir: t.TempDir(), Binary: binary, Address: netip.MustParseAddr("127.0.0.1"), Ports: controlplanetest.FreePorts(t),
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"), PodCIDR: netip.MustParsePrefix("10.0.0.0/16"),
	})
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, cp.Close()) })
	t.Logf("control plane ready after %v", time.Since(begin).Round(time.Millisecond))
	a := &api{cp: cp, binary: binary, valid: map[string]*unstructured.Unstructured{}}
	rc := cp.RESTConfig()
	a.client, err = dynamic.NewForConfig(rc)
	assert.NilError(t, err)
	a.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(cp.Client().Discovery()))

	files, err := filepath.Glob("../../../k8s/crds/*.yaml")
	assert.NilError(t, err)
	assert.Assert(t, len(files) > 0, "k8s/crds is empty: run `make generate`")
	for _, f := range files {
		crd := a.read(t, f)
		_, err := a.create(t.Context(), crd)
		assert.NilError(t, err, f)
		a.crds = append(a.crds, crd)
	}
	for _, crd := range a.crds {
		a.established(t, crd.GetName())
	}
	files, err = filepath.Glob("testdata/valid/*.yaml")
	assert.NilError(t, err)
	for _, f := range files {
		u := a.read(t, f)
		a.valid[strings.TrimSuffix(filepath.Base(f), ".yaml")] = u
		// Discovery learns of a CRD a moment after it is established.
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			if _, err := a.resource(u); err != nil {
				a.mapper.Reset()
				return poll.Continue("%s: %v", f, err)
			}
			return poll.Success()
		}, poll.WithDelay(50*time.Millisecond), poll.WithTimeout(2*time.Minute))
	}
	return a
}

func (a *api) established(t *testing.T, name string) {
	t.Helper()
	gvr := metav1.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		crd, err := a.client.Resource(schemaGVR(gvr)).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return poll.Error(err)
		}
		conditions, _, _ := unstructured.NestedSlice(crd.Object, "status", "conditions")
		for _, c := range conditions {
			m := c.(map[string]any)
			if m["type"] == "Established" && m["status"] == "True" {
				return poll.Success()
			}
			if m["status"] == "False" && m["type"] == "NonStructuralSchema" {
				return poll.Error(fmt.Errorf("%v", m["message"]))
			}
		}
		return poll.Continue("%s: %v", name, conditions)
	}, poll.WithDelay(20*time.Millisecond), poll.WithTimeout(2*time.Minute))
}

func (a *api) read(t *testing.T, path string) *unstructured.Unstructured {
	t.Helper()
	b, err := os.ReadFile(path)
	assert.NilError(t, err)
	b, err = yaml.YAMLToJSONStrict(b)
	assert.NilError(t, err, path)
	u := &unstructured.Unstructured{}
	assert.NilError(t, u.UnmarshalJSON(b), path)
	return u
}

// resource returns the client for the kind of an object.
func (a *api) resource(u *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	gvk := u.GroupVersionKind()
	m, err := a.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return nil, err
	}
	if m.Scope.Name() == meta.RESTScopeNameNamespace {
		ns := u.GetNamespace()
		if ns == "" {
			ns = namespace
		}
		return a.client.Resource(m.Resource).Namespace(ns), nil
	}
	return a.client.Resource(m.Resource), nil
}

func (a *api) create(ctx context.Context, u *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	r, err := a.resource(u)
	if err != nil {
		return nil, err
	}
	return r.Create(ctx, u, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict})
}

// store creates an object, with its status when the kind has that subresource,
// and returns what the server has. It is deleted after the test.
func (a *api) store(t *testing.T, u *unstructured.Unstructured) *unstructured.Unstructured {
	t.Helper()
	got, err := a.create(t.Context(), u)
	assert.NilError(t, err)
	r, err := a.resource(u)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, r.Delete(context.Background(), u.GetName(), metav1.DeleteOptions{})) })
	if u.Object["status"] != nil {
		got.Object["status"] = u.Object["status"]
		got, err = r.UpdateStatus(t.Context(), got, metav1.UpdateOptions{FieldValidation: metav1.FieldValidationStrict})
		assert.NilError(t, err)
	}
	return got
}

// valid shows that an object of every kind is stored as it was given.
func valid(t *testing.T, a *api) {
	kinds := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(a.valid)) {
		u := a.valid[name]
		kinds[u.GetKind()] = true
		t.Run(name, func(t *testing.T) {
			got := a.store(t, u.DeepCopy())
			r, err := a.resource(u)
			assert.NilError(t, err)
			got, err = r.Get(t.Context(), got.GetName(), metav1.GetOptions{})
			assert.NilError(t, err)
			for _, part := range []string{"spec", "status"} {
				assert.DeepEqual(t, got.Object[part], u.Object[part])
			}
			assert.DeepEqual(t, got.GetLabels(), u.GetLabels())
			assert.DeepEqual(t, got.GetAnnotations(), u.GetAnnotations())
		})
	}
	for _, crd := range a.crds {
		kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
		assert.Assert(t, kinds[kind], "testdata/valid has no %s", kind)
	}
}

// refusal is one case of testdata/invalid.
type refusal struct {
	Name  string         `json:"name"`
	From  string         `json:"from"`
	By    string         `json:"by"`
	Patch map[string]any `json:"patch"`
	Want  string         `json:"want"`
}

// invalid shows an object that is refused for every rule, and that no rule of
// any CRD is without one.
func invalid(t *testing.T, a *api) {
	files, err := filepath.Glob("testdata/invalid/*.yaml")
	assert.NilError(t, err)
	said := map[string][]string{} // messages by kind
	for _, f := range files {
		b, err := os.ReadFile(f)
		assert.NilError(t, err)
		var cases []refusal
		assert.NilError(t, yaml.UnmarshalStrict(b, &cases), f)
		for _, tc := range cases {
			t.Run(strings.TrimSuffix(filepath.Base(f), ".yaml")+"/"+tc.Name, func(t *testing.T) {
				base, ok := a.valid[tc.From]
				assert.Assert(t, ok, "testdata/valid/%s.yaml does not exist", tc.From)
				err := a.refused(t, base, tc)
				assert.Assert(t, apierrors.IsInvalid(err) || apierrors.IsBadRequest(err), "%v", err)
				assert.Assert(t, is.Contains(err.Error(), tc.Want))
				said[base.GetKind()] = append(said[base.GetKind()], err.Error())
			})
		}
	}
	for _, crd := range a.crds {
		kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
		for _, rule := range rules(openAPI(crd)) {
			covered := slices.ContainsFunc(said[kind], func(s string) bool { return strings.Contains(s, rule) })
			assert.Check(t, covered, "%s: nothing in testdata/invalid breaks the rule %q", kind, rule)
		}
	}
}

// refused tries what a case describes and returns the server's answer.
func (a *api) refused(t *testing.T, base *unstructured.Unstructured, tc refusal) error {
	t.Helper()
	r, err := a.resource(base)
	assert.NilError(t, err)
	apply := func(u *unstructured.Unstructured) *unstructured.Unstructured { return merged(t, u, tc.Patch) }
	switch tc.By {
	case "", "create":
		_, err = a.create(t.Context(), apply(base))
	case "update":
		_, err = r.Update(t.Context(), apply(a.store(t, base.DeepCopy())), metav1.UpdateOptions{FieldValidation: metav1.FieldValidationStrict})
	case "status":
		_, err = r.UpdateStatus(t.Context(), apply(a.store(t, base.DeepCopy())), metav1.UpdateOptions{FieldValidation: metav1.FieldValidationStrict})
	default:
		t.Fatalf("by: %q is not create, update or status", tc.By)
	}
	if err == nil && (tc.By == "" || tc.By == "create") {
		_ = r.Delete(t.Context(), base.GetName(), metav1.DeleteOptions{})
	}
	assert.Assert(t, err != nil, "the API server accepted it")
	return err
}

// merged returns the object with a merge patch applied to it.
func merged(t *testing.T, u *unstructured.Unstructured, patch map[string]any) *unstructured.Unstructured {
	t.Helper()
	p, err := json.Marshal(patch)
	assert.NilError(t, err)
	b, err := u.MarshalJSON()
	assert.NilError(t, err)
	b, err = jsonpatch.MergePatch(b, p)
	assert.NilError(t, err)
	out := &unstructured.Unstructured{}
	assert.NilError(t, out.UnmarshalJSON(b))
	return out
}

// ages are what the columns AGE and LAST HANDSHAKE show; they are not compared.
var ages = regexp.MustCompile(`\b(\d+[smhdy])+\b`)

// columns compares what the real kubectl prints, normally and with -o wide.
func columns(t *testing.T, a *api) {
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	b, err := a.cp.Kubeconfig("admin")
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(kubeconfig, b, 0o600))
	kubectl := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), a.binary, append([]string{"kubectl", "--kubeconfig", kubeconfig}, args...)...)
		out, err := cmd.CombinedOutput()
		assert.NilError(t, err, "%s", out)
		return string(out)
	}
	for _, u := range a.valid {
		a.store(t, u.DeepCopy())
	}
	var out strings.Builder
	for _, group := range []string{"networking.liqo.io", "ipam.liqo.io", "core.liqo.io", "net.liqo.io"} {
		args := []string{"api-resources", "--api-group=" + group}
		fmt.Fprintf(&out, "$ kubectl %s\n%s\n", strings.Join(args, " "), trim(kubectl(args...)))
	}
	for _, crd := range a.crds {
		plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
		for _, args := range [][]string{{"get", plural}, {"get", plural, "-o", "wide"}} {
			fmt.Fprintf(&out, "$ kubectl %s\n%s\n", strings.Join(args, " "), trim(kubectl(args...)))
		}
	}
	golden.Assert(t, out.String(), "columns.txt")
	assert.Assert(t, is.Contains(kubectl("get", "liqo"), "routeconfiguration.networking.liqo.io/milan-node-gw"), "the category liqo has all kinds")
}

// trim hides ages and the spaces at the end of lines.
func trim(table string) string {
	var out strings.Builder
	for line := range strings.Lines(table) {
		fields := strings.TrimRight(line, " \n")
		out.WriteString(strings.TrimRight(lastAge(fields), " ") + "\n")
	}
	return out.String()
}

// lastAge replaces the ages in the columns after the name by a word of the same
// width, so that a slow machine prints the same table.
func lastAge(line string) string {
	i := strings.IndexByte(line, ' ')
	if i < 0 {
		return line
	}
	return line[:i] + ages.ReplaceAllStringFunc(line[i:], func(s string) string {
		return fmt.Sprintf("%-*s", len(s), "AGE")
	})
}
