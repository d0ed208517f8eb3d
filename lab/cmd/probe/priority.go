package main

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// niceness of what measures.
const niceness = -15

// raisePriority lets this process run before others that want the processor:
// what it measures is the network, not the queue for a processor that an
// emulated machine has one of. It needs CAP_SYS_NICE; without it everything
// stays as it is.
//
// Niceness belongs to a thread (setpriority(2), "C library/kernel
// differences"); those that are started later have that of their creator.
func raisePriority() {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return
	}
	for _, t := range tasks {
		if tid, err := strconv.Atoi(t.Name()); err == nil {
			_ = unix.Setpriority(unix.PRIO_PROCESS, tid, niceness)
		}
	}
}
