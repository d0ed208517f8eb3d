package vm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// kvmProbe is how long the probe boot under KVM may take: it takes half a
// second where KVM works.
const kvmProbe = 8 * time.Second

// Accelerator returns KVM when a guest has booted under it since this machine
// started, else TCG, and why. The verdict is kept in the cache.
func Accelerator(ctx context.Context, img Image, cacheDir string) (accelerator, why string) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return TCG, "/dev/kvm: " + err.Error()
	}
	f.Close()
	if cacheDir == "" {
		if cacheDir, err = DefaultCacheDir(); err != nil {
			return TCG, err.Error()
		}
	}
	verdict := filepath.Join(cacheDir, "kvm-"+kvmKey(ctx, img))
	if b, err := os.ReadFile(verdict); err == nil {
		if accelerator, why, ok := strings.Cut(strings.TrimSpace(string(b)), " "); ok {
			return accelerator, why
		}
	}
	accelerator, why = KVM, "a guest booted under it"
	if err := probeKVM(ctx, img); err != nil {
		if ctx.Err() != nil {
			return TCG, ctx.Err().Error()
		}
		accelerator, why = TCG, "no guest boots under /dev/kvm: "+lastLine([]byte(err.Error()))
	}
	// Only a memory: without it the next one probes again.
	_ = os.WriteFile(verdict, []byte(accelerator+" "+why+"\n"), 0o644)
	return accelerator, why
}

// kvmKey stands for everything that the verdict depends on.
func kvmKey(ctx context.Context, img Image) string {
	h := newHash()
	bootID, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	h.text(string(bootID) + img.Kernel.Release)
	if qemu, err := look("qemu-system-x86_64"); err == nil {
		version, _ := exec.CommandContext(ctx, qemu, "--version").Output()
		h.text(string(version))
	}
	return h.String()
}

func probeKVM(ctx context.Context, img Image) error {
	dir, remove, err := rundir.Temporary()
	if err != nil {
		return err
	}
	defer remove()
	ctx, cancel := context.WithTimeoutCause(ctx, kvmProbe, fmt.Errorf("it got stuck for %s", kvmProbe))
	defer cancel()
	m, err := Boot(Config{Image: img, CommandLine: []string{"lab.mode=none"}, Dir: dir, Accelerator: KVM, Memory: 512, CPUs: 1})
	if err != nil {
		return err
	}
	defer m.Kill()
	if err := m.WaitBooted(ctx); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	return nil
}
