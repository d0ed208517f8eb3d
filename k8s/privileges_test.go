package k8s

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

// A pod is the template of one, wherever in an object it is.
type pod struct {
	spec       map[string]any
	containers []map[string]any // and init containers
}

// pods returns the templates of pods in objects.
func pods(objects []map[string]any) []pod {
	var out []pod
	var walk func(node any)
	walk = func(node any) {
		switch n := node.(type) {
		case []any:
			for _, v := range n {
				walk(v)
			}
		case map[string]any:
			if list, ok := n["containers"].([]any); ok {
				init, _ := n["initContainers"].([]any)
				p := pod{spec: n}
				for _, c := range slices.Concat(init, list) {
					p.containers = append(p.containers, c.(map[string]any))
				}
				out = append(out, p)
			}
			for _, key := range slices.Sorted(maps.Keys(n)) {
				walk(n[key])
			}
		}
	}
	for _, o := range objects {
		walk(o)
	}
	return out
}

// grants returns what the containers of a pod have beyond what Pod Security
// calls restricted, each as "container: what".
func (p pod) grants() []string {
	paths := map[any]string{}
	volumes, _ := p.spec["volumes"].([]any)
	for _, v := range volumes {
		v := v.(map[string]any)
		if host, ok := v["hostPath"].(map[string]any); ok {
			paths[v["name"]] = host["path"].(string)
		}
	}
	var out []string
	for _, c := range p.containers {
		name := c["name"].(string)
		if name == "gateway" && strings.Contains(fmt.Sprint(c["args"]), "--netns=") {
			name = "gateway in liqo-netns"
		}
		say := func(what string) { out = append(out, name+": "+what) }
		security, _ := c["securityContext"].(map[string]any)
		if p.spec["hostNetwork"] == true {
			say("host network")
		}
		if security["runAsUser"] == 0.0 {
			say("root")
		}
		if security["privileged"] == true {
			say("privileged")
		}
		capabilities, _ := security["capabilities"].(map[string]any)
		add, _ := capabilities["add"].([]any)
		for _, a := range add {
			say(a.(string))
		}
		mounts, _ := c["volumeMounts"].([]any)
		for _, m := range mounts {
			if path, ok := paths[m.(map[string]any)["name"]]; ok {
				say(path)
			}
		}
	}
	return out
}

var grantRow = regexp.MustCompile("(?m)^\\| ([^|]+) \\| `([^`]+)` \\| (.+) \\|$")

// Everything that a container has beyond the ordinary is in README.md with its
// reason, and nothing else is.
func TestPrivilegesHaveReasons(t *testing.T) {
	out, err := render(t, full())
	assert.NilError(t, err)
	has := map[string]bool{}
	for _, p := range pods(documents(t, out)) {
		for _, g := range p.grants() {
			has[g] = true
		}
	}
	text, err := os.ReadFile("README.md")
	assert.NilError(t, err)
	said := map[string]bool{}
	for _, row := range grantRow.FindAllStringSubmatch(string(text), -1) {
		said[row[1]+": "+row[2]] = true
	}
	assert.DeepEqual(t, slices.Sorted(maps.Keys(said)), slices.Sorted(maps.Keys(has)))
}
