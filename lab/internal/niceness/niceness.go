// Package niceness sets how willingly a process waits for a processor. An
// emulated machine has one, and what is measured there should be the network,
// not the queue for it: probes go first, daemons last. And the machine itself
// goes before what runs beside it.
package niceness

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Set gives every thread of this process a niceness, from -20 (first) to 19.
// Niceness belongs to a thread (setpriority(2), "C library/kernel
// differences"); threads and processes that are started later have that of
// their creator. Less than before needs CAP_SYS_NICE.
func Set(niceness int) error { return SetProcess(os.Getpid(), niceness) }

// SetProcess is Set for another process.
func SetProcess(pid, niceness int) error {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return fmt.Errorf("niceness: %w", err)
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		// A thread that has ended since is none that could be set.
		if err := unix.Setpriority(unix.PRIO_PROCESS, tid, niceness); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("niceness %d of process %d: %w", niceness, pid, err)
		}
	}
	return nil
}

// SetGroup gives every thread of another process group a niceness that is by
// more than this process' own, 19 at most. Zero does nothing: that is what they
// have.
func SetGroup(group, more int) error {
	if more == 0 {
		return nil
	}
	// The system call returns 20 minus the niceness (getpriority(2)).
	own, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return fmt.Errorf("niceness: %w", err)
	}
	niceness := min(20-own+more, 19)
	if err := unix.Setpriority(unix.PRIO_PGRP, group, niceness); err != nil {
		return fmt.Errorf("niceness %d of process group %d: %w", niceness, group, err)
	}
	return nil
}
