package kind

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/kind/pkg/cluster"
	"sigs.k8s.io/kind/pkg/log"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// An Engine is a container engine that answers.
type Engine struct {
	Name    string // docker, nerdctl, finch or podman
	Version string
	Local   bool // its containers are processes of this machine
}

// podman is the engine that has no daemon: what it does a lab may have asked for.
const podman = "podman"

// engines are those that kind speaks to, in the order in which it looks for
// them, each with what makes its server say its version and the name of its machine.
var engines = []struct{ name, format string }{
	{"docker", "{{.ServerVersion}} {{.Name}}"},
	{"nerdctl", "{{.ServerVersion}} {{.Name}}"},
	{"finch", "{{.ServerVersion}} {{.Name}}"},
	{podman, "{{.Version.Version}} {{.Host.Hostname}} {{json .Host}}"},
}

// refusedPodman says why kind makes no cluster with a Podman, as its library would when the lab
// begins (sigs.k8s.io/kind, pkg/cluster/internal/create, validateProvider). host is what Podman
// says of its host, as JSON. A Podman before 4.0 says nothing of controllers, and kind takes it.
func refusedPodman(host string) error {
	var h struct {
		CgroupVersion     string
		CgroupControllers []string
		Security          struct{ Rootless bool }
	}
	if err := json.Unmarshal([]byte(host), &h); err != nil {
		return fmt.Errorf("podman is installed but can't be used: read what it says of its host: %w", err)
	}
	if !h.Security.Rootless {
		return nil
	}
	var missing []string
	for _, c := range []string{"memory", "pids", "cpu"} {
		if h.CgroupControllers != nil && !slices.Contains(h.CgroupControllers, c) {
			missing = append(missing, c)
		}
	}
	var why string
	switch {
	case h.CgroupVersion != "v2":
		why = "kind needs cgroup version 2 for that, and this machine has " + h.CgroupVersion
	case len(missing) > 0:
		why = "systemd does not let it limit what kind limits (cgroup controllers " + strings.Join(missing, ", ") +
			"): set Delegate=yes for user@.service, as https://kind.sigs.k8s.io/docs/user/rootless/ says"
	default:
		return nil
	}
	return errors.New("podman is installed but can't be used: it runs without root, and " + why + "; run the lab as root (sudo), and Podman makes its containers as root, too")
}

// engineVariable is how users tell kind which engine to take.
const engineVariable = "KIND_EXPERIMENTAL_PROVIDER"

// engineTime is how long an engine may take to say its version: a socket that
// nobody serves may keep the client waiting.
const engineTime = time.Minute

// FindEngine returns the engine that kind shall use: the one that the user
// names, or the first one that answers. kind itself is content with a client
// that is installed. The error says what is missing.
func FindEngine(ctx context.Context) (Engine, error) {
	wanted := os.Getenv(engineVariable)
	var names []string
	var errs []error
	for _, e := range engines {
		if wanted != "" && wanted != e.name {
			continue
		}
		names = append(names, e.name)
		if _, err := exec.LookPath(e.name); err != nil {
			continue
		}
		var answer string
		var err error
		if e.name == podman {
			err = usePodmanSettings() // what it is asked then goes by what clusters will need
		}
		if err == nil {
			answer, err = askServer(ctx, e.name, e.format)
		}
		version, rest, _ := strings.Cut(answer, " ")
		machine, host, _ := strings.Cut(rest, " ")
		if err == nil && e.name == podman {
			err = refusedPodman(host)
		}
		if err == nil {
			here, err := os.Hostname()
			return Engine{Name: e.name, Version: version, Local: err == nil && machine == here}, nil
		}
		if ctx.Err() != nil {
			return Engine{}, err // no other is asked either
		}
		errs = append(errs, err)
	}
	switch {
	case len(names) == 0:
		return Engine{}, fmt.Errorf("%s=%s is no engine that kind can use: set it to docker, nerdctl, finch or podman, or unset it", engineVariable, wanted)
	case len(errs) == 0 && wanted != "":
		return Engine{}, fmt.Errorf("%s=%s, which is not installed", engineVariable, wanted)
	case len(errs) == 0:
		return Engine{}, errors.New("none of " + strings.Join(names, ", ") + " is installed")
	}
	return Engine{}, errors.Join(errs...)
}

// askServer asks an engine's server, by its client.
func askServer(ctx context.Context, name, format string) (string, error) {
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, engineTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, "info", "--format", format)
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	cmd.WaitDelay = time.Second // children may keep the pipes open
	err := cmd.Run()
	answer := strings.TrimSpace(out.String())
	if err == nil && answer != "" {
		return answer, nil
	}
	why := strings.TrimSpace(problem.String())
	switch {
	case caller.Err() != nil:
		return "", fmt.Errorf("ask %s for its version: %w", name, context.Cause(caller))
	case ctx.Err() != nil:
		why = "no answer within " + engineTime.String()
	case why == "" && err != nil:
		why = err.Error()
	case why == "":
		why = "it does not say its server's version"
	}
	return "", fmt.Errorf("%s is installed but can't be used: %s", name, strings.ReplaceAll(why, "\n", " "))
}

// provider returns kind's library for an engine.
func provider(name string, logger log.Logger) (*cluster.Provider, error) {
	var option cluster.ProviderOption
	switch name {
	case "docker":
		option = cluster.ProviderWithDocker()
	case "nerdctl", "finch":
		option = cluster.ProviderWithNerdctl(name)
	case podman:
		if err := usePodmanSettings(); err != nil {
			return nil, err
		}
		option = cluster.ProviderWithPodman()
	default:
		return nil, fmt.Errorf("container engine %q: kind knows docker, nerdctl, finch and podman", name)
	}
	return cluster.NewProvider(option, cluster.ProviderWithLogger(logger)), nil
}

// EngineProbe is the name of the probe for the container engine.
const EngineProbe = "container engine"

// Doctor probes this machine for what the world kind needs.
func Doctor(ctx context.Context, binDir string) []world.Probe {
	needed := []string{World}
	engine := world.Probe{Name: EngineProbe, OK: true, Needed: needed, Fix: "make kind installs Podman and builds the images; or install Docker or nerdctl, start it, and be allowed to use it (docker: be in the group docker, or use sudo)"}
	e, err := FindEngine(ctx)
	engine.Detail = e.Name + " " + e.Version
	if err != nil {
		engine.OK, engine.Detail = false, err.Error()
		if wanted := os.Getenv(engineVariable); wanted != "" {
			engine.Fix = "unset " + engineVariable + ", so that another engine is taken, or install and start the one that it names"
		}
	}
	images := world.Probe{Name: "files for kind", OK: true, Detail: filepath.Join(binDir, world.ImagesDir), Needed: needed, Fix: "make kind (make kind-image, where there is an engine other than Podman)"}
	var missing []string
	for _, file := range needs(binDir) {
		if _, err := os.Stat(file); err != nil {
			missing = append(missing, strings.TrimPrefix(file, binDir+string(filepath.Separator)))
		}
	}
	if len(missing) > 0 {
		images.OK, images.Detail = false, "not in "+binDir+": "+strings.Join(missing, ", ")
	}
	probes := []world.Probe{engine, images, probeInotify()}
	if e.Name == podman && e.Local {
		probes = append(probes, probeHelpers(helperDirs))
	}
	return probes
}

// helperDirs is where Podman looks for the programs that make its networks
// (containers.conf(5), helper_binaries_dir).
var helperDirs = []string{"/usr/local/libexec/podman", "/usr/local/lib/podman", "/usr/libexec/podman", "/usr/lib/podman"}

// probeHelpers looks for the programs that make Podman's networks and answer for its containers'
// names, which Debian only recommends with it. Without aardvark-dns a lab of two clusters took 4m39
// in place of 41 s; without netavark none was tried.
func probeHelpers(dirs []string) world.Probe {
	p := world.Probe{Name: "Podman's network", OK: true, Detail: "netavark and aardvark-dns", Fix: "make kind, or apt-get install netavark aardvark-dns"}
	var missing []string
	for program, does := range map[string]string{"netavark": "makes its networks", "aardvark-dns": "answers for the names of containers: nodes wait for names that nobody answers"} {
		if !slices.ContainsFunc(dirs, func(dir string) bool {
			_, err := os.Stat(filepath.Join(dir, program))
			return err == nil
		}) {
			missing = append(missing, program+", which "+does)
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		p.OK, p.Detail = false, "Podman lacks "+strings.Join(missing, "; ")
	}
	return p
}

// archive is the file of an image for this machine's architecture. The
// engine's machine is taken to have the same.
func archive(binDir, program string) string {
	return filepath.Join(binDir, world.ImagesDir, program+"-"+runtime.GOARCH+".tar")
}

// Files are the files of bin that a lab is made from, by their paths in it.
func Files() []string { return needs("") }

// needs are the files of bin that a lab needs.
func needs(binDir string) []string {
	files := []string{nodeImage(binDir), archive(binDir, "isthmus"), archive(binDir, "probe")}
	for _, p := range append([]string{expect.ProbeProgram, "flanneld", "cni/flannel"}, operatorPrograms...) {
		files = append(files, filepath.Join(binDir, p))
	}
	return files
}
