package main

import (
	"context"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	// alwaysAtOnce is how many labs run at a time, if so many may, however busy
	// the machine is.
	alwaysAtOnce = 2
	// roomIdle is the share of its processors' time that a machine must have left
	// to get a further lab. Labs that left two processors 25 to 50 % had no row that
	// was red by chance; those that left them 6 to 10 % had some.
	roomIdle = 0.25
	// roomTime is how long it must have had that, and how long labs that were begun
	// may take until they show what they need.
	roomTime = 20 * time.Second
)

// waitForRoom waits until the machine has room for a lab beside those that always
// run. It is false when none waits any more.
func waitForRoom(ctx context.Context, q *queue) bool {
	tick := time.NewTicker(roomTime / 10)
	defer tick.Stop()
	began, before := time.Now(), readProcessors()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
		if q.empty() {
			return false
		}
		if time.Since(began) < roomTime {
			continue
		}
		now := readProcessors()
		if now.idleSince(before) >= roomIdle {
			return true
		}
		began, before = time.Now(), now
	}
}

// processors is what a machine's processors have done since it started, in ticks.
type processors struct{ idle, all uint64 }

// readProcessors reads /proc/stat (proc_stat(5)). It is zero where that can't be
// read, which means no room.
func readProcessors() processors {
	b, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(b), "\n")
	return parseProcessors(line)
}

// parseProcessors reads the line of all processors: user, nice, system, idle,
// iowait, irq, softirq, steal; what guests took is in the first two already.
func parseProcessors(line string) (p processors) {
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return processors{}
	}
	for i, f := range fields[1:9] {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return processors{}
		}
		p.all += n
		if i == 3 || i == 4 {
			p.idle += n
		}
	}
	return p
}

// idleSince is the share of time, 0 to 1, for which the processors had nothing to
// do since an earlier reading.
func (p processors) idleSince(before processors) float64 {
	if p.all <= before.all || p.idle < before.idle {
		return 0
	}
	return float64(p.idle-before.idle) / float64(p.all-before.all)
}
