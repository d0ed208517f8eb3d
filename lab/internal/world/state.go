package world

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// stateCommands is what is asked on every host. Those whose program is not
// installed are left out.
var stateCommands = []string{
	"ip -d address",
	"ip rule",
	"ip route show table all",
	"ip -6 rule",
	"ip -6 route show table all",
	"ip neigh",
	"bridge fdb show",
	"nft list ruleset",
	"wg show",
	"conntrack -L",
}

// StateCommands is what explains the state of a host, a command line each.
func StateCommands() []string { return slices.Clone(stateCommands) }

// A namedNamespace is a host or a pod with a namespace of its own.
type namedNamespace struct {
	name string
	ns   *Namespace
}

func (a *agent) namespaces() []namedNamespace {
	all := a.registry.Pods()
	gateways := gatewaysByCluster(all)
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []namedNamespace
	if a.network != nil {
		for _, h := range a.network.all() {
			out = append(out, namedNamespace{h.name, h.ns})
		}
	}
	for _, p := range all {
		if ns := p.Own(); ns != nil {
			out = append(out, namedNamespace{podHost(p, gateways), &Namespace{File: ns}})
		}
	}
	return out
}

// state asks the tools on every host, two hosts at a time.
func (a *agent) state(ctx context.Context) []HostState {
	namespaces := a.namespaces()
	out := make([]HostState, len(namespaces))
	var wg sync.WaitGroup
	slots := make(chan struct{}, 2)
	for i, n := range namespaces {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			out[i] = hostState(ctx, n)
		})
	}
	wg.Wait()
	slices.SortFunc(out, func(a, b HostState) int { return strings.Compare(a.Host, b.Host) })
	return out
}

func hostState(ctx context.Context, n namedNamespace) HostState {
	s := HostState{Host: n.name}
	for _, command := range stateCommands {
		if ctx.Err() != nil {
			return s
		}
		argv := strings.Fields(command)
		if _, err := exec.LookPath(argv[0]); err != nil {
			continue
		}
		var out strings.Builder
		code, err := RunIn(ctx, n.ns, ExecRequest{Argv: argv}, Streams{Stdout: &out, Stderr: &out})
		switch {
		case err != nil:
			out.WriteString(err.Error())
		case code != 0 && argv[0] == "wg": // this kernel has no WireGuard
			continue
		}
		s.Sections = append(s.Sections, StateSection{Command: command, Output: out.String()})
	}
	return s
}

// logTail is how much of a log file is handed out.
const logTail = 2 << 20

// LogsUnder returns the ends of the log files below a directory, named by
// their paths in it. A nil want wants all.
func LogsUnder(dir string, want func(name string) bool) ([]Log, error) {
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
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		name = strings.TrimSuffix(name, ".log")
		if want != nil && !want(name) {
			return nil
		}
		text, err := tail(path, logTail)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		logs = append(logs, Log{Name: name, Text: text})
		return nil
	})
	return logs, err
}

// podLogs returns the logs of one pod's containers, by the pod's target. Who
// waits for a line asks again and again: all logs would keep an emulated
// machine from writing it.
func (a *agent) podLogs(target string) ([]Log, error) {
	parts := strings.Split(target, "/")
	if len(parts) != 3 {
		return nil, fmt.Errorf("%w: %q is not cluster/namespace/pod", ErrNoTarget, target)
	}
	return LogsUnder(a.cfg.Dir, func(name string) bool {
		return strings.HasPrefix(name, parts[0]+"/") && strings.Contains(name, "/log/"+parts[1]+"_"+parts[2]+"_")
	})
}

func tail(path string, n int64) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > n {
		if _, err := f.Seek(-n, io.SeekEnd); err != nil {
			return "", err
		}
	}
	b, err := io.ReadAll(f)
	return string(b), err
}
