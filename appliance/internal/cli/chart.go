package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"helm.sh/helm/v3/pkg/strvals"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/k8s"
)

func readValues(name string, in io.Reader) (map[string]any, error) {
	var text []byte
	var err error
	if name == "-" {
		text, err = io.ReadAll(in)
	} else {
		text, err = os.ReadFile(name)
	}
	if err != nil {
		return nil, err
	}
	var out map[string]any
	if err := yaml.UnmarshalStrict(text, &out); err != nil {
		return nil, fmt.Errorf("it is not a YAML map: %w", err)
	}
	return out, nil
}

// mergeValues returns a with b written over it. What is null in b is in neither:
// CoalesceTables takes it away, so it gets copies. The null is still to be told
// to Helm, which would keep the value that was given before.
func mergeValues(a, b map[string]any) map[string]any {
	return chartutil.CoalesceTables(runtime.DeepCopyJSON(b), runtime.DeepCopyJSON(a))
}

func setValue(text string, into map[string]any) error { return strvals.ParseInto(text, into) }

// loadChart returns the chart that this program carries along.
func loadChart() (*chart.Chart, error) {
	files, err := k8s.Chart()
	if err != nil {
		return nil, err
	}
	var list []*loader.BufferedFile
	for _, name := range slices.Sorted(maps.Keys(files)) {
		list = append(list, &loader.BufferedFile{Name: name, Data: files[name]})
	}
	return loader.LoadFiles(list)
}

// A manifest is what the chart renders to: the objects in Helm's order, and the
// CRDs that come before them. Hooks are left out: nobody applies them.
type manifest struct {
	crds, objects []document
}

// A document is an object, and its text in the chart.
type document struct {
	object *unstructured.Unstructured
	text   string
}

// render renders the chart. Without a config it asks no cluster: what the chart
// would have found there has to be given.
func render(c *chart.Chart, namespace string, given map[string]any, config *rest.Config, capabilities *chartutil.Capabilities) (manifest, error) {
	var m manifest
	top, err := chartutil.ToRenderValues(c, given, chartutil.ReleaseOptions{
		Name: release, Namespace: namespace, Revision: 1, IsInstall: true,
	}, capabilities)
	if err != nil {
		return m, valuesError(err)
	}
	var files map[string]string
	if config == nil {
		files, err = engine.Render(c, top)
	} else {
		files, err = engine.RenderWithClient(c, top, config)
	}
	if err != nil {
		return m, valuesError(err)
	}
	maps.DeleteFunc(files, func(name, _ string) bool {
		return path.Base(name) == "NOTES.txt" || strings.HasPrefix(path.Base(name), "_")
	})
	_, sorted, err := releaseutil.SortManifests(files, capabilities.APIVersions, releaseutil.InstallOrder)
	if err != nil {
		return m, fmt.Errorf("chart: %w", err)
	}
	for _, crd := range c.CRDObjects() {
		if err := decode(&m.crds, string(crd.File.Data)); err != nil {
			return m, fmt.Errorf("%s: %w", crd.Filename, err)
		}
	}
	for _, f := range sorted {
		if err := decode(&m.objects, f.Content); err != nil {
			return m, fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return m, nil
}

// where is what Helm puts before what a template asks for by "fail".
var where = regexp.MustCompile(`^.*execution error at \([^)]*\): `)

// valuesError is what Helm says about values, without where in the chart.
func valuesError(err error) error {
	return fmt.Errorf("values: %s", strings.TrimSpace(where.ReplaceAllString(err.Error(), "")))
}

// decode appends the objects of a stream of YAML documents.
func decode(to *[]document, text string) error {
	d := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		part, err := d.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(part, &u.Object); err != nil {
			return err
		}
		if len(u.Object) > 0 {
			*to = append(*to, document{u, strings.TrimSpace(strings.TrimPrefix(string(part), "---\n"))})
		}
	}
}
