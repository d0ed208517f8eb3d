package prober

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// receiveBuffer is how many bytes a UDP socket keeps until somebody reads them. The kernel
// counts 768 for a small datagram and doubles what it is asked for, so this is ten seconds
// of a thousand a second. Its own 212,992 (socket(7), rmem_default) are a quarter of a second:
// less than a process may have to wait for a processor. What is lost for that reason says
// nothing of the network.
const receiveBuffer = 4 << 20

// keepMore gives a socket that buffer: net.core.rmem_max does not hold for who has
// CAP_NET_ADMIN, and others get what it allows.
func keepMore(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var forced error
	err = raw.Control(func(fd uintptr) {
		forced = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	})
	if errors.Is(forced, unix.EPERM) {
		forced = conn.SetReadBuffer(receiveBuffer)
	}
	if err = errors.Join(err, forced); err != nil {
		return fmt.Errorf("receive buffer of %s: %w", conn.LocalAddr(), err)
	}
	return nil
}
