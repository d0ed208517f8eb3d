package pods

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// terminal is a pseudo terminal for an exec with a TTY. It belongs to this
// machine's devpts; the command inherits the open slave.
type terminal struct {
	master, slave *os.File
	copied        chan struct{} // closed when all output was copied
}

func openTerminal() (*terminal, error) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	var slave *os.File
	if err == nil {
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		master.Close()
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	return &terminal{master: master, slave: slave, copied: make(chan struct{})}, nil
}

// copy moves bytes and sizes between the user and the terminal until the
// command has closed its end.
func (t *terminal) copy(req ExecRequest) {
	if req.Stdin != nil {
		go func() { _, _ = io.Copy(t.master, req.Stdin) }()
	}
	go func() {
		defer close(t.copied)
		if req.Stdout != nil {
			// EIO is how a terminal says that the other end is closed.
			_, _ = io.Copy(req.Stdout, t.master)
		}
	}()
	if req.Resize != nil {
		go func() {
			for size := range req.Resize {
				_ = unix.IoctlSetWinsize(int(t.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
			}
		}()
	}
}

// drain waits until the last output of a command that ended was copied. A
// descendant may hold the terminal open for longer than we care.
func (t *terminal) drain() {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-t.copied:
	case <-timer.C:
	}
}

func (t *terminal) close() {
	t.slave.Close()
	t.master.Close()
}
