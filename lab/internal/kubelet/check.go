package kubelet

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/isthmus-net/isthmus/lab/internal/cgroup"
)

// Check says what this machine lacks for nodes with containerd, whose programs
// are in binDir and images in imageDir. It looks only.
func Check(binDir, imageDir string) error {
	var errs []error
	for _, name := range Programs() {
		if _, err := os.Stat(filepath.Join(binDir, name)); err != nil {
			errs = append(errs, fmt.Errorf("%s is not in %s", name, binDir))
		}
	}
	for _, name := range []string{"runc", "nsenter"} {
		if _, err := exec.LookPath(name); err != nil {
			errs = append(errs, fmt.Errorf("%s is not installed", name))
		}
	}
	for _, name := range Images() {
		if _, err := os.Stat(filepath.Join(imageDir, name)); err != nil {
			errs = append(errs, fmt.Errorf("the image %s is not in %s", name, imageDir))
		}
	}
	// A kernel with a module for it loads the module at the first mount.
	if text, err := os.ReadFile("/proc/filesystems"); err == nil && !bytes.Contains(text, []byte("\toverlay\n")) {
		if exec.Command("modprobe", "--dry-run", "overlay").Run() != nil {
			errs = append(errs, errors.New("the kernel has no overlayfs"))
		}
	}
	cgroups, err := cgroup.Open()
	if err == nil {
		err = cgroups.Check()
	}
	if err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
