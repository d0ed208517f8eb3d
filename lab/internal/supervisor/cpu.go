package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// clockTick is the unit of times in /proc/PID/stat: USER_HZ, which is 100 on
// every architecture that Go has.
const clockTick = 10 * time.Millisecond

// processorTime adds up what the processes in a /proc have taken, in user and in
// kernel mode, by the names of their programs. What a process took that has
// ended counts as that of the one that waited for it.
func processorTime(proc string) (map[string]time.Duration, error) {
	stats, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "stat"))
	if err != nil {
		return nil, err
	}
	sum := map[string]time.Duration{}
	for _, stat := range stats {
		took, err := processTime(stat)
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		argv, err := os.ReadFile(filepath.Join(filepath.Dir(stat), "cmdline"))
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if name := programName(strings.Split(string(argv), "\x00")); name != "" {
			sum[name] += took
		}
	}
	return sum, nil
}

// gone tells that a process ended while it was looked at.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

// processTime reads utime, stime, cutime and cstime (proc_pid_stat(5)).
func processTime(stat string) (time.Duration, error) {
	b, err := os.ReadFile(stat)
	if err != nil {
		return 0, err
	}
	// The second field, in brackets, may have brackets and spaces itself; what
	// follows is numbered from 3.
	fields := strings.Fields(string(b)[strings.LastIndexByte(string(b), ')')+1:])
	if len(fields) < 15 {
		return 0, fmt.Errorf("%s has %d fields after the name", stat, len(fields))
	}
	var ticks int64
	for _, f := range fields[11:15] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", stat, err)
		}
		ticks += n
	}
	return time.Duration(ticks) * clockTick, nil
}

// programName is what a person calls a process: our programs, and Kubernetes'
// own in one binary, are told apart by their first argument.
func programName(argv []string) string {
	program := filepath.Base(argv[0])
	if argv[0] == "/proc/self/exe" {
		program = "lab"
	}
	switch {
	case argv[0] == "":
		return "" // a thread of the kernel, or a process that has ended
	case len(argv) < 2 || strings.HasPrefix(argv[1], "-"):
	case program == "kubernetes":
		return argv[1]
	case slices.Contains([]string{"isthmus", "lab", "probe"}, program):
		return program + " " + argv[1]
	}
	return program
}
