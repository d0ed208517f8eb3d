package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A monitor speaks to QEMU (the QEMU Machine Protocol).
type monitor struct {
	mu     sync.Mutex
	conn   *net.UnixConn
	in     *json.Decoder
	agreed bool // on capabilities, which QEMU wants first
}

// monitorTimeout is how long QEMU may take for an answer: some milliseconds,
// seconds while it reads a machine's memory on a busy host.
const monitorTimeout = 3 * time.Minute

// newMonitor takes the connection on which QEMU has been started.
func newMonitor(conn *net.UnixConn) *monitor { return &monitor{conn: conn, in: json.NewDecoder(conn)} }

// do runs a command with its arguments, and puts what it returns into result
// when that is not nil.
func (m *monitor) do(command string, arguments, result any) error {
	return m.doWith(command, arguments, nil, result)
}

// doWith passes a file along.
func (m *monitor) doWith(command string, arguments any, file *os.File, result any) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.agreed {
		if err := m.exchange("qmp_capabilities", nil, nil, nil); err != nil {
			return err
		}
		m.agreed = true
	}
	return m.exchange(command, arguments, file, result)
}

func (m *monitor) exchange(command string, arguments any, file *os.File, result any) error {
	msg := map[string]any{"execute": command}
	if arguments != nil {
		msg["arguments"] = arguments
	}
	b, err := json.Marshal(msg)
	if err != nil {
		return err
	}
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	m.conn.SetDeadline(time.Now().Add(monitorTimeout))
	if _, _, err := m.conn.WriteMsgUnix(append(b, '\n'), rights, nil); err != nil {
		return fmt.Errorf("QEMU's monitor: %s: %w", command, err)
	}
	for {
		var answer struct {
			Return json.RawMessage `json:"return"`
			Error  *struct{ Desc string }
		}
		if err := m.in.Decode(&answer); err != nil {
			return fmt.Errorf("QEMU's monitor: %s: %w", command, err)
		}
		switch {
		case answer.Error != nil:
			return fmt.Errorf("QEMU's monitor: %s: %s", command, answer.Error.Desc)
		case answer.Return == nil: // the greeting, or an event
		case result != nil:
			return json.Unmarshal(answer.Return, result)
		default:
			return nil
		}
	}
}

// migration waits until the migration that is under way has ended.
func (m *monitor) migration(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		var q struct {
			Status    string `json:"status"`
			ErrorDesc string `json:"error-desc"`
		}
		if err := m.do("query-migrate", nil, &q); err != nil {
			return err
		}
		switch q.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("QEMU's migration %s: %s", q.Status, q.ErrorDesc)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// Pause stops the machine: its processors, and with them its clock.
func (m *Machine) Pause() error { return m.monitor.do("stop", nil, nil) }

// Resume lets it go on.
func (m *Machine) Resume() error { return m.monitor.do("cont", nil, nil) }

// SaveMemory hands the memory and the devices of a machine that is paused to
// write.
func (m *Machine) SaveMemory(ctx context.Context, write func(io.Reader) error) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	if err := m.monitor.do("migrate-set-parameters", map[string]any{"max-bandwidth": int64(1) << 40}, nil); err != nil {
		return err
	}
	const name = "snapshot"
	if err := m.monitor.doWith("getfd", map[string]any{"fdname": name}, w, nil); err != nil {
		return err
	}
	w.Close() // QEMU has its own
	written := make(chan error, 1)
	go func() {
		err := write(r)
		r.Close() // ends a migration that nobody reads any more
		written <- err
	}()
	err = m.monitor.do("migrate", map[string]any{"uri": "fd:" + name}, nil)
	if err == nil {
		err = m.monitor.migration(ctx)
	}
	return errors.Join(err, <-written)
}

// socketPair makes a connection: the one end for us, the other one for QEMU.
func socketPair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "qemu")
	f := os.NewFile(uintptr(fds[0]), "lab")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return c.(*net.UnixConn), theirs, nil
}
