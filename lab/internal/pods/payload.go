package pods

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// file is a file of a volume whose content comes from the API.
type file struct {
	content []byte
	mode    os.FileMode
}

const defaultFileMode = 0o644

func fileMode(own, volume *int32) os.FileMode {
	switch {
	case own != nil:
		return os.FileMode(*own)
	case volume != nil:
		return os.FileMode(*volume)
	}
	return defaultFileMode
}

func configMapData(cm *corev1.ConfigMap) map[string][]byte {
	out := maps.Clone(cm.BinaryData)
	if out == nil {
		out = map[string][]byte{}
	}
	for k, v := range cm.Data {
		out[k] = []byte(v)
	}
	return out
}

// selectKeys returns the files of a Secret or ConfigMap: all keys, or those of
// items under the paths they give.
func selectKeys(data map[string][]byte, items []corev1.KeyToPath, mode *int32, optional *bool, what string) (map[string]file, error) {
	out := map[string]file{}
	if len(items) == 0 {
		for k, v := range data {
			out[k] = file{v, fileMode(nil, mode)}
		}
		return out, nil
	}
	for _, item := range items {
		v, ok := data[item.Key]
		if !ok {
			if optional != nil && *optional {
				continue
			}
			return nil, fmt.Errorf("%s has no key %q", what, item.Key)
		}
		out[item.Path] = file{v, fileMode(item.Mode, mode)}
	}
	return out, nil
}

func downward(pod *corev1.Pod, items []corev1.DownwardAPIVolumeFile, mode *int32) (map[string]file, error) {
	out := map[string]file{}
	for _, item := range items {
		var v string
		var err error
		switch {
		case item.FieldRef != nil:
			v, err = fieldPath(pod, item.FieldRef.FieldPath)
		case item.ResourceFieldRef != nil:
			v, err = resourceField(pod, &corev1.Container{}, item.ResourceFieldRef)
		}
		if err != nil {
			return nil, fmt.Errorf("downwardAPI %s: %w", item.Path, err)
		}
		out[item.Path] = file{[]byte(v), fileMode(item.Mode, mode)}
	}
	return out, nil
}

func digestOf(files map[string]file) string {
	h := sha256.New()
	for _, k := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(h, "%q %o %d\n", k, files[k].mode, len(files[k].content))
		h.Write(files[k].content)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// writeAtomically makes dir hold exactly files. Readers see either the old
// content or the new: dir/..data links to a directory with the content, and a
// rename of that link replaces all of it. dir/KEY links to ..data/KEY.
func writeAtomically(dir string, files map[string]file, group int) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	content, err := os.MkdirTemp(dir, ".."+time.Now().UTC().Format("2006_01_02_15_04_05."))
	if err != nil {
		return err
	}
	if err := os.Chmod(content, 0o755); err != nil {
		return err
	}
	heads := map[string]bool{} // first element of each path
	for path, f := range files {
		if !filepath.IsLocal(path) {
			return fmt.Errorf("path %q leads out of the volume", path)
		}
		full := filepath.Join(content, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			return err
		}
		mode := f.mode
		if group >= 0 {
			mode |= 0o440
		}
		if err := os.WriteFile(full, f.content, mode); err != nil {
			return err
		}
		if group >= 0 {
			if err := os.Chown(full, 0, group); err != nil {
				return err
			}
		}
		if err := os.Chmod(full, mode); err != nil { // whatever the umask is
			return err
		}
		head, _, _ := strings.Cut(path, "/")
		heads[head] = true
	}
	data := filepath.Join(dir, "..data")
	old, _ := os.Readlink(data)
	next := filepath.Join(dir, "..data_tmp")
	_ = os.Remove(next)
	if err := os.Symlink(filepath.Base(content), next); err != nil {
		return err
	}
	if err := os.Rename(next, data); err != nil {
		return err
	}
	for head := range heads {
		link := filepath.Join(dir, head)
		if _, err := os.Lstat(link); err == nil {
			continue
		}
		if err := os.Symlink(filepath.Join("..data", head), link); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "..") && !heads[e.Name()] {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if old != "" {
		return os.RemoveAll(filepath.Join(dir, old))
	}
	return nil
}
