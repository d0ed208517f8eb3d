package kind

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// nodeImage is the file of the image of nodes, which make kind-image writes; see
// command nodeimage. The engine's machine is taken to have the architecture of
// this one.
func nodeImage(binDir string) string {
	return filepath.Join(binDir, World, "node-"+runtime.GOARCH+".tar")
}

// imageName is the name of the image in an archive.
func imageName(file string) (string, error) {
	m, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(file) })
	if err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	if len(m) != 1 || len(m[0].RepoTags) != 1 {
		return "", fmt.Errorf("%s: it has %d images; one with one name is expected: make node-images kind-image", file, len(m))
	}
	return m[0].RepoTags[0], nil
}

// ensureNodeImage gives the engine the image of nodes, unless it has it, and
// returns its name. The tag is made of what is in the image.
func (l *Lab) ensureNodeImage(ctx context.Context, binDir string, say func(message string, start time.Time)) (string, error) {
	engine := l.record.Engine
	file := nodeImage(binDir)
	image, err := imageName(file)
	if err != nil {
		return "", err
	}
	tag, err := name.NewTag(image)
	if err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	repository := tag.RegistryStr() + "/" + tag.RepositoryStr()
	have, err := run(ctx, engine, "images", "--filter", "reference="+repository, "--format", "{{.Repository}}:{{.Tag}}")
	if err != nil {
		return "", err
	}
	images := strings.Fields(have)
	if !slices.Contains(images, image) {
		start := time.Now()
		if _, err := run(ctx, engine, "load", "--input", file); err != nil {
			return "", err
		}
		say("image "+image+" given to "+engine, start)
	}
	old := slices.DeleteFunc(images, func(name string) bool { return name == image })
	return image, l.removeImages(ctx, old)
}

// removeImages removes images that were built earlier, unless there is another lab: it may be
// about to make containers of one of them. The engine keeps those that containers have.
func (l *Lab) removeImages(ctx context.Context, images []string) error {
	unlock, err := rundir.LockBase(filepath.Dir(l.dir))
	if err != nil {
		return err
	}
	defer unlock()
	if labs, err := List(filepath.Dir(l.dir)); err != nil || len(labs) > 1 {
		return err
	}
	for _, image := range images {
		_, _ = run(ctx, l.record.Engine, "rmi", image)
	}
	return nil
}

// run runs a command of an engine's client. What it complained of is in the
// error.
func run(ctx context.Context, engine string, args ...string) (stdout string, err error) {
	var out, problem strings.Builder
	cmd := exec.CommandContext(ctx, engine, args...)
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", engine, strings.Join(args, " "), err, strings.TrimSpace(problem.String()))
	}
	return out.String(), nil
}
