package deploy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
)

// A Manifest is what a chart renders to: CRDs first, then everything else in
// Helm's install order.
type Manifest struct {
	CRDs, Objects []*unstructured.Unstructured
}

// Render renders the chart in dir with values over its own, as `helm install
// --namespace NAMESPACE` would. An error names the template.
func Render(dir, release, namespace string, values map[string]any) (Manifest, error) {
	var m Manifest
	chart, err := loader.Load(dir)
	if err != nil {
		return m, fmt.Errorf("load chart %s: %w", dir, err)
	}
	if err := chartutil.ProcessDependencies(chart, values); err != nil {
		return m, fmt.Errorf("chart %s: %w", dir, err)
	}
	// What Helm would learn from the API server; the chart asks for nothing
	// beyond the version.
	capabilities := chartutil.DefaultCapabilities.Copy()
	top, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{
		Name: release, Namespace: namespace, Revision: 1, IsInstall: true,
	}, capabilities)
	if err != nil {
		return m, fmt.Errorf("chart %s: values: %w", dir, err)
	}
	files, err := engine.Render(chart, top)
	if err != nil {
		return m, fmt.Errorf("render chart %s: %w", dir, err)
	}
	for name := range files {
		if base := filepath.Base(name); base == "NOTES.txt" || strings.HasPrefix(base, "_") {
			delete(files, name)
		}
	}
	_, manifests, err := releaseutil.SortManifests(files, capabilities.APIVersions, releaseutil.InstallOrder)
	if err != nil {
		return m, fmt.Errorf("render chart %s: %w", dir, err)
	}
	for _, crd := range chart.CRDObjects() {
		objs, err := decode(crd.File.Data)
		if err != nil {
			return m, fmt.Errorf("%s: %w", crd.Filename, err)
		}
		m.CRDs = append(m.CRDs, objs...)
	}
	slices.SortFunc(m.CRDs, func(a, b *unstructured.Unstructured) int { return strings.Compare(a.GetName(), b.GetName()) })
	for _, f := range manifests {
		objs, err := decode([]byte(f.Content))
		if err != nil {
			return m, fmt.Errorf("%s: %w", f.Name, err)
		}
		m.Objects = append(m.Objects, objs...)
	}
	return m, nil
}

// decode reads a stream of YAML documents; empty ones are passed over.
func decode(data []byte) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	d := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		u := &unstructured.Unstructured{}
		err := d.Decode(&u.Object)
		switch {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, err
		case len(u.Object) == 0:
			continue
		case u.GetKind() == "" || u.GetAPIVersion() == "":
			return nil, fmt.Errorf("a document has no apiVersion or kind: %.80v", u.Object)
		}
		out = append(out, u)
	}
}
