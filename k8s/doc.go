// Package k8s has the manifests below it, for programs that carry them along,
// and tests them.
package k8s

import (
	"embed"
	"io/fs"
)

//go:embed all:chart
var files embed.FS

// Chart returns the files of the Helm chart, by their names in it, such as
// Chart.yaml.
func Chart() (map[string][]byte, error) {
	out := map[string][]byte{}
	err := fs.WalkDir(files, "chart", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		out[path[len("chart/"):]], err = files.ReadFile(path)
		return err
	})
	return out, err
}
