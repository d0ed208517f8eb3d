package pods

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// logFile is the output of one run of a container: a line per line, preceded
// by its time. Readers can wait for more.
type logFile struct {
	path string

	mu      sync.Mutex
	file    *os.File
	changed chan struct{} // closed and replaced by every write
	closed  bool
}

func createLog(path string) (*logFile, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	return &logFile{path: path, file: f, changed: make(chan struct{})}, nil
}

// Write appends one line, with or without its end.
func (l *logFile) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	entry := append([]byte(time.Now().UTC().Format(time.RFC3339Nano)), ' ')
	entry = append(entry, bytes.TrimSuffix(line, []byte("\n"))...)
	_, err := l.file.Write(append(entry, '\n'))
	close(l.changed)
	l.changed = make(chan struct{})
	return len(line), err
}

func (l *logFile) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	close(l.changed)
	return l.file.Close()
}

// state returns whether more may come, and a channel that closes when it did.
func (l *logFile) state() (closed bool, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed, l.changed
}

// copyLog writes the lines of all streams to w and closes it when they ended.
func copyLog(w io.WriteCloser, streams ...io.ReadCloser) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, s := range streams {
		wg.Go(func() {
			defer s.Close()
			r := bufio.NewReaderSize(s, 64<<10)
			for {
				line, err := r.ReadSlice('\n') // a longer line comes in parts
				if len(line) > 0 {
					mu.Lock()
					_, _ = w.Write(line)
					mu.Unlock()
				}
				if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
					return
				}
			}
		})
	}
	wg.Wait()
	w.Close()
}

// read copies the log to w as the options say; with Follow until the container
// has ended or ctx is done.
func (l *logFile) read(ctx context.Context, w io.Writer, opts corev1.PodLogOptions) error {
	f, err := os.Open(l.path)
	if err != nil {
		return fmt.Errorf("log: %w", err)
	}
	defer f.Close()
	if opts.TailLines != nil {
		if err := seekTail(f, *opts.TailLines); err != nil {
			return err
		}
	}
	var since time.Time
	if opts.SinceTime != nil {
		since = opts.SinceTime.Time
	}
	if opts.SinceSeconds != nil {
		since = time.Now().Add(-time.Duration(*opts.SinceSeconds) * time.Second)
	}
	left := int64(-1)
	if opts.LimitBytes != nil {
		left = *opts.LimitBytes
	}
	r := bufio.NewReader(f)
	var partial string
	for {
		closed, changed := l.state() // before reading, or a write could be missed
		for {
			part, err := r.ReadString('\n')
			partial += part
			if err != nil {
				break // the end of the file, perhaps within a line
			}
			out, ok := render(partial, since, opts.Timestamps)
			partial = ""
			if !ok {
				continue
			}
			if left >= 0 {
				out = out[:min(int64(len(out)), left)]
				left -= int64(len(out))
			}
			if _, err := io.WriteString(w, out); err != nil {
				return err
			}
			if left == 0 {
				return nil
			}
		}
		if !opts.Follow || closed {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// render returns a line as the reader wants it, or false when it is too old.
func render(line string, since time.Time, timestamps bool) (string, bool) {
	stamp, text, _ := strings.Cut(line, " ")
	if !since.IsZero() {
		if t, err := time.Parse(time.RFC3339Nano, stamp); err == nil && t.Before(since) {
			return "", false
		}
	}
	if timestamps {
		return line, true
	}
	return text, true
}

// seekTail moves to the last n lines.
func seekTail(f *os.File, n int64) error {
	b, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	end := len(bytes.TrimSuffix(b, []byte("\n")))
	pos := len(b)
	if n > 0 {
		pos = end
		for ; n > 0 && pos > 0; n-- {
			pos = bytes.LastIndexByte(b[:pos], '\n')
			if pos < 0 {
				pos = 0
				break
			}
			if n == 1 {
				pos++
			}
		}
	}
	_, err = f.Seek(int64(pos), io.SeekStart)
	return err
}

// tail returns the last n bytes of the output, without times.
func (l *logFile) tail(n int64) string {
	var b strings.Builder
	lines := int64(80)
	_ = l.read(context.Background(), &b, corev1.PodLogOptions{TailLines: &lines})
	s := b.String()
	return s[max(0, int64(len(s))-n):]
}
