package kind

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/kind/pkg/cluster/nodes"
)

// A sent is a file that a node gets: what a file of this machine holds, or a text.
type sent struct {
	to   string // on the node
	mode int64
	from string // on this machine; empty: text
	text string
}

// program is a program of this machine, for a node.
func program(from, to string) sent { return sent{to: to, mode: 0o755, from: from} }

// text is a file that a node can read.
func text(to, content string) sent { return sent{to: to, mode: 0o644, text: content} }

// send gives a node files, and makes their directories. They go by one command: where an engine
// runs it, each takes a third of a second, and the chart has 37 files.
func send(ctx context.Context, n nodes.Node, files ...sent) error {
	out, in := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := pack(in, files)
		in.CloseWithError(err)
		packed <- err
	}()
	err := runOn(ctx, n, out, "tar", "-x", "--no-same-owner", "-C", "/")
	out.Close() // who packs ends when nobody reads any more
	if problem := <-packed; problem != nil && !errors.Is(problem, io.ErrClosedPipe) {
		return problem
	}
	return err
}

// pack writes files as tar(1) reads them.
func pack(w io.Writer, files []sent) error {
	archive := tar.NewWriter(w)
	for _, f := range files {
		var content io.Reader = strings.NewReader(f.text)
		size := int64(len(f.text))
		if f.from != "" {
			file, err := os.Open(f.from)
			if err != nil {
				return err
			}
			defer file.Close()
			info, err := file.Stat()
			if err != nil {
				return err
			}
			content, size = file, info.Size()
		}
		err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(f.to, "/"), Mode: f.mode, Size: size})
		if err == nil {
			_, err = io.Copy(archive, content)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.to, err)
		}
	}
	return archive.Close()
}

// chart is the chart, for where it is on this machine, so that a command that names it means
// the same on both.
func chart(dir string) ([]sent, error) {
	var out []sent
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, sent{to: path, mode: 0o644, from: path})
		}
		return err
	})
	return out, err
}
