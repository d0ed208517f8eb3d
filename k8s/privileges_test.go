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

var rightRow = regexp.MustCompile("(?m)^\\| ([^|`]+) \\| ((?:`[a-z/]+`(?:, )?)+) ([a-z, ]+) \\| .+ \\|$")

// What the programs may do to objects that others have, too, is in README.md, with
// what is left of it.
func TestRightsAreSaid(t *testing.T) {
	sensitive := []string{"secrets", "deployments", "pods", "tokenreviews", "subjectaccessreviews"}
	roles := map[string]string{"isthmus-controller": "controller", "isthmus-node": "node", "liqo-gateway": "gateway"}
	raw, err := os.ReadFile("chart/rbac/role.yaml")
	assert.NilError(t, err)
	has, said := map[string]bool{}, map[string]bool{}
	for _, o := range documents(t, string(raw)) {
		who := roles[o["metadata"].(map[string]any)["name"].(string)]
		for _, r := range o["rules"].([]any) {
			r := r.(map[string]any)
			for _, resource := range r["resources"].([]any) {
				for _, verb := range r["verbs"].([]any) {
					if who != "" && slices.Contains(sensitive, resource.(string)) {
						has[fmt.Sprint(who, ": ", resource, " ", verb)] = true
					}
				}
			}
		}
	}
	text, err := os.ReadFile("README.md")
	assert.NilError(t, err)
	for _, row := range rightRow.FindAllStringSubmatch(string(text), -1) {
		for who := range strings.SplitSeq(row[1], ", ") {
			for resource := range strings.SplitSeq(strings.ReplaceAll(row[2], "`", ""), ", ") {
				for verb := range strings.SplitSeq(row[3], ", ") {
					if slices.Contains(sensitive, resource) {
						said[fmt.Sprint(who, ": ", resource, " ", verb)] = true
					}
				}
			}
		}
	}
	assert.DeepEqual(t, slices.Sorted(maps.Keys(said)), slices.Sorted(maps.Keys(has)))
}

// A gateway that never encrypts in userspace has nothing of its node.
func TestChartTun(t *testing.T) {
	for implementation, want := range map[string]bool{"kernel": false, "userspace": true, "auto": true} {
		v := minimal()
		v["networking"] = map[string]any{"gatewayTemplates": map[string]any{
			"wireguard": map[string]any{"implementation": implementation}, "netns": map[string]any{"enabled": true},
		}}
		out, err := render(t, v)
		assert.NilError(t, err)
		gateways := 0
		for _, p := range pods(documents(t, out)) {
			grants := p.grants()
			if !slices.ContainsFunc(grants, func(g string) bool { return strings.HasPrefix(g, "gateway") }) {
				continue
			}
			gateways++
			has := slices.ContainsFunc(grants, func(g string) bool { return strings.HasSuffix(g, ": /dev/net/tun") })
			assert.Check(t, has == want, "%s: %v", implementation, grants)
			assert.Check(t, strings.Contains(fmt.Sprint(p.spec["volumes"]), "/dev/net/tun") == want, implementation)
		}
		assert.Equal(t, gateways, 4)
	}
}

// Without requests a gateway would be the first to be evicted.
func TestChartRequests(t *testing.T) {
	out, err := render(t, minimal())
	assert.NilError(t, err)
	gateways := 0
	for _, p := range pods(documents(t, out)) {
		for _, c := range p.containers {
			if c["name"] != "gateway" {
				continue
			}
			gateways++
			resources, _ := c["resources"].(map[string]any)
			requests, _ := resources["requests"].(map[string]any)
			assert.Check(t, requests["cpu"] != nil && requests["memory"] != nil, "%v", c["resources"])
		}
	}
	assert.Equal(t, gateways, 2)
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
