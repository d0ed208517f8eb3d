package world

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// setTime sets the clock of the machine.
func setTime(t time.Time) error {
	tv := unix.NsecToTimeval(t.UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	return nil
}
