package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// An origin is what a lab is made from. It is in the run directory of every lab
// that has come up whole: everything was installed and has converged.
type origin struct {
	Checkout string `json:"checkout"` // the folder with topologies, k8s and bin
	// Files are hashes: of the topology, of the chart, and of each file of bin/
	// that is used.
	Files map[string]string `json:"files"`
}

// originOf reads what a lab would be made from now.
func (b builder) originOf(c labConfig) (origin, error) {
	paths := map[string]string{"the topology": c.topology.File, "the chart": b.place.chart()}
	files := kind.Files()
	if c.world != kind.World {
		cfg := b.config(c)
		files = cfg.Files()
	}
	for _, f := range files {
		paths["bin/"+f] = filepath.Join(b.place.bin(), f)
	}
	// This program makes the objects, and is the lab's first process.
	exe, err := os.Executable()
	if err != nil {
		return origin{}, err
	}
	paths["the program lab"] = exe
	o := origin{Checkout: b.place.root, Files: map[string]string{}}
	for what, path := range paths {
		if o.Files[what], err = treeSum(path); err != nil {
			return origin{}, fmt.Errorf("%s: %w", what, err)
		}
	}
	return o, nil
}

// parts are the origin as what a snapshot of the lab depends on.
func (o origin) parts() []string {
	var out []string
	for _, what := range slices.Sorted(maps.Keys(o.Files)) {
		out = append(out, what+" "+o.Files[what])
	}
	return out
}

// differs says what is another thing in a lab that would be made now; nothing
// when all is the same.
func (o origin) differs(now origin) string {
	if o.Checkout != now.Checkout {
		return "it is of the checkout " + o.Checkout
	}
	for _, what := range slices.Sorted(maps.Keys(now.Files)) {
		if o.Files[what] != now.Files[what] {
			return what + " is another one since it was made"
		}
	}
	return ""
}

func originFile(lab string) string {
	return filepath.Join(rundir.Path(lab), supervisor.OriginFile)
}

// keep writes the origin of a lab that has come up whole.
func (o origin) keep(lab string) error {
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	return os.WriteFile(originFile(lab), text, 0o600)
}

// readOrigin is the origin of a lab that has come up whole; fs.ErrNotExist: it
// has not.
func readOrigin(lab string) (o origin, err error) {
	text, err := os.ReadFile(originFile(lab))
	if err != nil {
		return o, err
	}
	return o, json.Unmarshal(text, &o)
}

// treeSum is a hash of the files of a directory and their paths in it, or of one
// file.
func treeSum(dir string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%d:%s%d:", len(name), name, info.Size())
		_, err = io.Copy(h, f)
		return err
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// A reuse finds labs that are up and that are what would be built now.
type reuse struct {
	place place
	mu    sync.Mutex
	now   map[string]origin // by the name of the lab
}

func newReuse(p place) *reuse { return &reuse{place: p, now: map[string]origin{}} }

// find returns the lab of that name. There is none, and why is empty, when none
// runs; why tells on one line why the one that runs is of no use.
func (r *reuse) find(ctx context.Context, c labConfig) (client labClient, why string) {
	client, err := findLab(c.name)
	if errors.Is(err, world.ErrNotRunning) {
		return nil, ""
	}
	if err != nil {
		return nil, firstLine(err.Error())
	}
	if dir := rundir.Path(c.name); !rundir.Mine(dir) {
		uid, err := rundir.Owner(dir)
		if err != nil {
			return nil, firstLine(err.Error())
		}
		return nil, rundir.UserName(uid) + " has made it"
	}
	status, err := client.Status(ctx)
	switch {
	case errors.Is(err, kind.ErrLost):
		return nil, "it " + kind.ErrLost.Error()
	case err != nil:
		return nil, "it does not answer: " + firstLine(err.Error())
	case status.Phase != world.PhaseReady:
		return nil, "it is " + status.Phase
	}
	was, err := readOrigin(c.name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "it has not come up whole: its lab up is still at work, has failed or was interrupted"
	}
	if err != nil {
		return nil, firstLine(err.Error())
	}
	now, err := r.origin(c)
	if err != nil {
		return nil, firstLine(err.Error())
	}
	if why := was.differs(now); why != "" {
		return nil, why
	}
	return client, ""
}

// up tells the chooser whether a lab is up that can be used.
func (r *reuse) up(ctx context.Context) labUp {
	return func(t *topology.Topology, world, overlay string) bool {
		c, _ := r.find(ctx, labConfig{name: labName(t, world, overlay), topology: t, world: world, overlay: overlay})
		return c != nil
	}
}

// origin reads files once.
func (r *reuse) origin(c labConfig) (origin, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o, ok := r.now[c.name]; ok {
		return o, nil
	}
	o, err := builder{place: r.place}.originOf(c)
	if err == nil {
		r.now[c.name] = o
	}
	return o, err
}
