package scenario

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// placeholder is {key} or {key.part}. Whatever else stands in braces (jsonpath,
// YAML, nft sets, {milan/web.ip}) is not ours.
var placeholder = regexp.MustCompile(`\{([a-z][a-zA-Z0-9_-]*)(?:\.([a-z]+))?\}`)

// subst replaces the keys of the matrix by the row's values. used, when not
// nil, learns which keys were.
func (r Row) subst(t *topology.Topology, used map[string]bool) yamlfile.Subst {
	return func(text string) (string, error) {
		var failed error
		out := placeholder.ReplaceAllStringFunc(text, func(m string) string {
			parts := placeholder.FindStringSubmatch(m)
			v, ok := r.value(parts[1])
			if !ok {
				if failed == nil && !outsideHost(t, parts[1]) {
					failed = r.unknown(parts[1])
				}
				return m
			}
			if used != nil {
				used[parts[1]] = true
			}
			s, err := part(t, v, parts[2])
			if err != nil && failed == nil {
				failed = err
			}
			return s
		})
		return out, failed
	}
}

// outsideHost allows {user.ip}.
func outsideHost(t *topology.Topology, name string) bool {
	for _, o := range t.Outside {
		if o.Name == name {
			return true
		}
	}
	return false
}

func (r Row) unknown(key string) error {
	var keys []string
	for _, v := range r.Vars {
		keys = append(keys, v.Key)
	}
	if len(keys) == 0 {
		return fmt.Errorf("{%s}: the scenario has no matrix", key)
	}
	return fmt.Errorf("{%s}: no such key in the matrix; %s", key, yamlfile.DidYouMean(key, keys))
}

// part is what {key.part} stands for.
func part(t *topology.Topology, value, name string) (string, error) {
	switch name {
	case "":
		return value, nil
	case "ip", "internal":
		return "{" + value + "." + name + "}", nil
	}
	o, err := operand.Parse(value, t)
	if _, whole := t.Cluster(value); whole {
		o, err = operand.Operand{Cluster: value}, nil
	}
	if err != nil {
		return value, err
	}
	switch name {
	case "cluster":
		return o.Cluster, nil
	case "node":
		if o.Node == 0 {
			return value, fmt.Errorf("%s: which node it is on is known only when it runs", value)
		}
		return o.Cluster + "/" + operand.NodeName(o.Node), nil
	case "nodename":
		return operand.NodeName(o.Node), nil
	case "name":
		return o.Name, nil
	case "peer":
		peers := t.Peers(o.Cluster)
		if len(peers) != 1 {
			return value, fmt.Errorf("%s has %d peers, so {….peer} is nobody", o.Cluster, len(peers))
		}
		return peers[0], nil
	}
	return value, fmt.Errorf("{….%s}: %s", name, strings.TrimSuffix(yamlfile.DidYouMean(name, []string{"ip", "internal", "node", "nodename", "cluster", "peer", "name"}), "?"))
}
