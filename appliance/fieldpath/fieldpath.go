// Package fieldpath writes fields of Kubernetes objects by their paths, as tests
// of bad input name them: spec.table.rules[].routes[].dst.
package fieldpath

import "strings"

// Steps splits a path into the names that lead to a field; the step into a list
// is "[]".
func Steps(path string) []string {
	return strings.Split(strings.ReplaceAll(path, "[]", ".[]"), ".")
}

// Put writes value where path leads to in the JSON object at, into the first
// items of lists, and makes what is not there yet.
func Put(at map[string]any, path string, value any) { put(at, Steps(path), value) }

func put(at map[string]any, steps []string, value any) {
	switch {
	case len(steps) == 1:
		at[steps[0]] = value
	case steps[1] == "[]":
		list, _ := at[steps[0]].([]any)
		if len(list) == 0 {
			list = []any{map[string]any{}}
		}
		if len(steps) == 2 {
			list[0] = value
		} else {
			put(list[0].(map[string]any), steps[2:], value)
		}
		at[steps[0]] = list
	default:
		next, ok := at[steps[0]].(map[string]any)
		if !ok {
			next = map[string]any{}
			at[steps[0]] = next
		}
		put(next, steps[1:], value)
	}
}
