package world

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Programs that have lost their API server connect again, all at the same time
// if they go on at the same time: on one emulated processor each handshake then
// takes as long as all of them, and beyond the 10 s that a client allows (of
// client-go's transport), so that all fail and begin again. So a program goes on
// when the processor has nothing better to do, but is not kept waiting for long.
const (
	thawPace     = 200 * time.Millisecond // at least, from one program to the next
	thawPatience = 2 * time.Second        // at most
	thawLook     = 50 * time.Millisecond  // from one look at the processor to the next
	// thawBusy is the number of threads that want the processor, the one that
	// looks included, at which it has something to do.
	thawBusy = 3
)

// thawInTurn lets the process groups that are stopped go on one after the other,
// the one that was started first before the others. proc is /proc.
func thawInTurn(ctx context.Context, proc string) error {
	groups, err := stoppedGroups(proc)
	if err != nil {
		return err
	}
	for _, g := range groups {
		if err := unix.Kill(-g, unix.SIGCONT); err != nil && !errors.Is(err, unix.ESRCH) { // it has ended
			return fmt.Errorf("SIGCONT to process group %d: %w", g, err)
		}
		if err := waitIdle(ctx, proc); err != nil {
			return err
		}
	}
	return nil
}

// waitIdle waits for thawPace, and until few threads want the processor.
func waitIdle(ctx context.Context, proc string) error {
	start := time.Now()
	tick := time.NewTicker(thawLook)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		took := time.Since(start)
		if took < thawPace {
			continue
		}
		n, err := runnable(proc)
		if err != nil {
			return err
		}
		if n < thawBusy || took > thawPatience {
			return nil
		}
	}
}

// runnable is the number of threads that run or want to (proc(5), loadavg).
func runnable(proc string) (int, error) {
	path := filepath.Join(proc, "loadavg")
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b))
	if len(fields) < 4 {
		return 0, fmt.Errorf("%s has %d fields", path, len(fields))
	}
	n, _, _ := strings.Cut(fields[3], "/")
	return strconv.Atoi(n)
}

// stoppedGroups are the process groups that have a stopped process, in the order
// of their numbers, which is that of their start.
func stoppedGroups(proc string) ([]int, error) {
	stats, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "stat"))
	if err != nil {
		return nil, err
	}
	var groups []int
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) { // it has ended
			continue
		}
		if err != nil {
			return nil, err
		}
		// "pid (comm) state ppid pgrp …", where comm may have brackets of its own.
		fields := strings.Fields(string(b)[strings.LastIndexByte(string(b), ')')+1:])
		if len(fields) < 3 {
			return nil, fmt.Errorf("%s has %d fields after the name", path, len(fields))
		}
		g, err := strconv.Atoi(fields[2])
		if err != nil {
			return nil, fmt.Errorf("%s: process group: %w", path, err)
		}
		// Group 0 is the kernel's own, and of those that PID 1 has started:
		// none of the world's programs, and no number for kill(2).
		if fields[0] == "T" && g > 0 {
			groups = append(groups, g)
		}
	}
	slices.Sort(groups)
	return slices.Compact(groups), nil
}
