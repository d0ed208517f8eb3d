package prober

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// slowConn takes so long to send a message.
type slowConn struct {
	net.Conn
	takes time.Duration
}

func (c slowConn) Write(b []byte) (int, error) {
	time.Sleep(c.takes)
	return len(b), nil
}

// TestSilence: what has no processor to send hears nothing, and that is nobody's silence.
func TestSilence(t *testing.T) {
	for _, tt := range []struct {
		name   string
		stream func(wait, send, answer func())
		want   time.Duration
	}{
		{"it sends and nothing comes back", func(wait, send, _ func()) {
			for range 100 {
				wait()
				time.Sleep(FlowInterval)
				send()
			}
		}, 5 * time.Second},
		{"it stands still for four seconds", func(wait, send, _ func()) {
			wait()
			time.Sleep(FlowInterval + 4*time.Second)
			send()
		}, FlowInterval},
		{"it still stands still", func(wait, _, _ func()) {
			wait()
			time.Sleep(FlowInterval + 4*time.Second)
		}, FlowInterval},
		{"the answer is read before it sends again", func(wait, send, answer func()) {
			wait()
			time.Sleep(FlowInterval)
			send()
			wait()
			time.Sleep(FlowInterval + 4*time.Second)
			answer()
			send()
		}, 2 * FlowInterval},
		{"it stood still before the silence began", func(wait, send, answer func()) {
			wait()
			time.Sleep(FlowInterval + 4*time.Second)
			send()
			answer()
			for range 20 {
				wait()
				time.Sleep(FlowInterval)
				send()
			}
		}, time.Second},
		{"a little late is not still", func(wait, send, _ func()) {
			for range 10 {
				wait()
				time.Sleep(FlowInterval + stallTime - time.Millisecond)
				send()
			}
		}, 990 * time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &stream{next: 1, last: time.Now(), sent: make([]time.Time, 1), missing: map[int]bool{}}
				tt.stream(func() { s.wait(FlowInterval) },
					func() { s.send(slowConn{}, "udp", nil) },
					func() { s.got(s.report.Sent, Server{}) })
				assert.Equal(t, s.take().Gap, tt.want)
			})
		})
	}
	t.Run("a message that waits to go out", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := &stream{next: 1, last: time.Now(), sent: make([]time.Time, 1)}
			s.wait(FlowInterval)
			time.Sleep(FlowInterval)
			s.send(slowConn{takes: 3 * time.Second}, "udp", nil)
			s.wait(FlowInterval)
			assert.Equal(t, s.take().Gap, 3*time.Second+FlowInterval)
		})
	})
}

// TestKeepMore: what comes while nobody reads is there when somebody does.
func TestKeepMore(t *testing.T) {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	assert.NilError(t, err)
	defer conn.Close()
	assert.NilError(t, keepMore(conn))
	raw, err := conn.SyscallConn()
	assert.NilError(t, err)
	size := 0
	assert.NilError(t, raw.Control(func(fd uintptr) {
		size, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF)
	}))
	assert.NilError(t, err)
	var forced error
	assert.NilError(t, raw.Control(func(fd uintptr) {
		forced = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	}))
	if forced == nil {
		assert.Equal(t, size, 2*receiveBuffer, "the kernel counts twice: socket(7)")
	} else {
		assert.Assert(t, size > 0)
	}
}
