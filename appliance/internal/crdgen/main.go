// Command crdgen finishes the CRDs that controller-gen wrote: it says in
// OpenAPI what markers can't. Addresses of format "ip" become "ipv4 or ipv6",
// Kubernetes' own workload schemas lose their prose, which would make two CRDs
// larger than all others together, and pods have the one field that the public CRDs
// have of an older Kubernetes. Run it by go generate ./appliance/api.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crdgen:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: crdgen DIRECTORY")
	}
	files, err := filepath.Glob(filepath.Join(args[0], "*.yaml"))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("%s: no CRDs there", args[0])
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		done, err := finish(text)
		if err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
		if bytes.Equal(done, text) {
			continue
		}
		if err := os.WriteFile(f, done, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// finish returns the CRD as it is to be applied.
func finish(text []byte) ([]byte, error) {
	var crd map[string]any
	if err := yaml.Unmarshal(text, &crd); err != nil {
		return nil, err
	}
	walk(crd, false)
	out, err := yaml.Marshal(crd)
	if err != nil {
		return nil, err
	}
	return append([]byte("---\n"), out...), nil
}

// walk rewrites a schema in place. In terse parts descriptions are dropped.
func walk(node any, terse bool) {
	switch n := node.(type) {
	case []any:
		for _, v := range n {
			walk(v, terse)
		}
	case map[string]any:
		if n["format"] == "ip" {
			delete(n, "format")
			n["anyOf"] = []any{map[string]any{"format": "ipv4"}, map[string]any{"format": "ipv6"}}
		}
		if _, isText := n["description"].(string); isText && terse {
			delete(n, "description")
		}
		if _, pod := n["schedulingGroup"]; pod && terse {
			n["workloadRef"] = workloadRef()
		}
		for name, v := range n {
			walk(v, terse || foreign(name, v))
		}
	}
}

// workloadRef is the schema of spec.workloadRef of pods, which was alpha in
// Kubernetes 1.35, of which the public CRDs are, and is schedulingGroup since 1.36: a
// manifest that has it is taken. Nothing is made of it.
func workloadRef() map[string]any {
	text := map[string]any{"type": "string"}
	return map[string]any{
		"type":       "object",
		"properties": map[string]any{"name": text, "podGroup": text, "podGroupReplicaKey": text},
		"required":   []any{"name", "podGroup"},
	}
}

// foreign tells the schemas of Deployments and Services, which are described
// where they come from, by a property that nothing else has.
func foreign(name string, v any) bool {
	if name != "spec" {
		return false
	}
	schema, _ := v.(map[string]any)
	properties, _ := schema["properties"].(map[string]any)
	_, deployment := properties["progressDeadlineSeconds"]
	_, service := properties["clusterIPs"]
	return deployment || service
}
