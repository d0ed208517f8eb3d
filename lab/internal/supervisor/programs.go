package supervisor

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
)

// checkProgram says what is wrong with one of the lab's programs: it is not
// there, it is none, or it wants a dynamic linker. Pods and the virtual machine
// have no linker, and starting such a program in them fails with "no such file
// or directory", of which nobody thinks that it means the linker.
func checkProgram(dir, name string) error {
	f, err := elf.Open(filepath.Join(dir, name))
	var format *elf.FormatError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is missing in %s: run `make %s`", name, dir, makes(name))
	case errors.As(err, &format), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF): // the header ends early
		return fmt.Errorf("%s in %s is no program (%w): remove it and run `make %s`", name, dir, err, makes(name))
	case err != nil:
		return fmt.Errorf("%s in %s: %w", name, dir, err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return fmt.Errorf("%s in %s was built with cgo and is linked dynamically, which nothing in a pod can load: remove it and run `make %s`, or go build with CGO_ENABLED=0", name, dir, makes(name))
	}
	return nil
}

// makes is the target of the Makefile that makes a program.
func makes(name string) string {
	switch {
	case name == "cni/flannel", name == "flanneld":
		return "flannel"
	case strings.HasPrefix(name, "cni/"):
		return "cni"
	case strings.HasPrefix(name, "containerd"), name == "ctr", name == "helm":
		return "nodes"
	case strings.HasPrefix(name, "kube"):
		return "kubernetes"
	}
	return "build"
}
