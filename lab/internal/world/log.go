package world

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// A Log is what a component of the control plane or a container has written, or
// a part of it. Every run of a container has a log of its own.
type Log struct {
	Name string `json:"name"` // "milan/kube-apiserver", "milan/node-1/log/liqo_isthmus-node-abcde_<uid>/node/0", "agent", "console"
	Text string `json:"text"`
	// Instance tells a log from an earlier one of that name.
	Instance uint64 `json:"instance,omitempty"`
	// Offset is how many bytes were written before Text.
	Offset int64 `json:"offset,omitempty"`
	// Gap says that something before Text that was asked for is not there any
	// more: the log was begun anew.
	Gap bool `json:"gap,omitempty"`
}

// End is where the log ends now.
func (l Log) End() LogMark { return LogMark{l.Instance, l.Offset + int64(len(l.Text))} }

// A LogMark is a place in a log: after so many bytes of it.
type LogMark struct {
	Instance uint64 `json:"instance,omitempty"`
	Offset   int64  `json:"offset"`
}

// Since is the part of a log after a mark. What was marked must be a part of it.
func (l Log) Since(m LogMark) Log {
	skip := m.Offset - l.Offset
	if m.Instance != l.Instance || skip < 0 || skip > int64(len(l.Text)) {
		l.Gap = true
		return l
	}
	l.Text, l.Offset = l.Text[skip:], m.Offset
	return l
}

// A LogQuery asks for logs.
type LogQuery struct {
	// Pod is a pod as for exec; empty: all logs.
	Pod string `json:"pod,omitempty"`
	// Since has the places, by the names of the logs, from which on they are
	// wanted; logs without one are wanted whole. Nil: only the end of each.
	Since map[string]LogMark `json:"since,omitempty"`
}

// logTail is how much of a log is handed out to those who want its end.
const logTail = 2 << 20

// LogsUnder returns the log files below a directory that a query is about. They
// are called what name makes of their paths in it; those that it calls nothing
// are left out. The query's pod is for name to look at.
func LogsUnder(dir string, q LogQuery, name func(path string) string) ([]Log, error) {
	var logs []Log
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) { // pods come and go
				return nil
			}
			return err
		}
		if !d.Type().IsRegular() || !strings.HasSuffix(path, ".log") {
			return nil
		}
		inside, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		l := Log{Name: name(strings.TrimSuffix(inside, ".log"))}
		if l.Name == "" {
			return nil
		}
		err = l.read(path, q)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		logs = append(logs, l)
		return err
	})
	return logs, err
}

// read fills in what a query wants of a log file.
func (l *Log) read(path string, q LogQuery) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		l.Instance = sys.Ino
	}
	mark, marked := q.Since[l.Name]
	switch {
	case q.Since == nil:
		l.Offset = max(0, st.Size()-logTail)
	case marked && mark.Instance == l.Instance && mark.Offset <= st.Size():
		l.Offset = mark.Offset
	case marked:
		l.Gap = true
	}
	if _, err := f.Seek(l.Offset, io.SeekStart); err != nil {
		return err
	}
	b, err := io.ReadAll(f)
	l.Text = string(b)
	return err
}

// logs returns the logs of all containers, or of one pod's. Who waits for a line
// asks again and again: all logs would keep an emulated machine from writing it.
func (a *agent) logs(q LogQuery) ([]Log, error) {
	if q.Pod == "" {
		return LogsUnder(a.cfg.Dir, q, func(path string) string { return path })
	}
	parts := strings.Split(q.Pod, "/")
	if len(parts) != 3 {
		return nil, fmt.Errorf("%w: %q is not cluster/namespace/pod", ErrNoTarget, q.Pod)
	}
	return LogsUnder(a.cfg.Dir, q, func(path string) string {
		if strings.HasPrefix(path, parts[0]+"/") && strings.Contains(path, "/log/"+parts[1]+"_"+parts[2]+"_") {
			return path
		}
		return ""
	})
}
