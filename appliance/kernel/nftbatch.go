package kernel

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/userdata"
	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A batch gathers the messages of one transaction. It sends nothing.
type batch struct {
	*nftables.Conn
	taken []nl.Message
}

func newBatch() (*batch, error) {
	b := &batch{}
	var err error
	// The library hands its messages to nobody but a socket, or who stands in
	// for one. Of the errors that this may return, this one ends its waiting
	// for answers.
	b.Conn, err = nftables.New(nftables.WithTestDial(func(msgs []nl.Message) ([]nl.Message, error) {
		b.taken = msgs
		return nil, os.ErrPermission
	}))
	return b, err
}

// messages returns all that has been gathered, to be sent at once.
func (b *batch) messages() ([]nl.Message, error) {
	if err := b.Flush(); !errors.Is(err, os.ErrPermission) {
		return nil, fmt.Errorf("compose a transaction: %w", err)
	}
	for i := range b.taken {
		m := &b.taken[i]
		m.Header.Sequence, m.Header.PID, m.Header.Length = 0, 0, 0 // of the socket that sends it
		if m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSET {
			m.Data = withIntervalData(m.Data)
		}
	}
	return b.taken, nil
}

// withIntervalData adds to a message about a map whose values are intervals, a
// first address and a last one, that they are. The kernel does not care, but
// nft(8) can't print the rules that use the map without it.
func withIntervalData(msg []byte) []byte {
	var key, data uint32
	eachAttr(msg[4:], func(t uint16, v []byte) {
		switch t {
		case unix.NFTA_SET_KEY_LEN:
			key = binaryutil.BigEndian.Uint32(v)
		case unix.NFTA_SET_DATA_LEN:
			data = binaryutil.BigEndian.Uint32(v)
		}
	})
	if data != 2*key {
		return msg
	}
	// As nft(8) has it: both in the byte order of the network.
	const bigEndian = 2
	text := userdata.AppendUint32(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, bigEndian)
	text = userdata.AppendUint32(text, userdata.NFTNL_UDATA_SET_DATABYTEORDER, bigEndian)
	text = userdata.AppendUint32(text, userdata.NFTNL_UDATA_SET_DATA_INTERVAL, 1)
	a := attrs{b: slices.Clone(msg)}
	a.bytes(unix.NFTA_SET_USERDATA, text) // of two attributes the kernel takes the last
	return a.b
}

// commit sends a transaction and waits for its answers.
func (n *nft) commit(b *batch) error {
	msgs, err := b.messages()
	if err != nil {
		return err
	}
	if _, err := n.write.SendMessages(msgs); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	var failed error
	for _, m := range msgs {
		if m.Header.Flags&nl.Acknowledge == 0 {
			continue
		}
		_, err := n.write.Receive()
		if err == nil {
			continue
		}
		switch {
		case failed == nil:
			failed = err
		case !errors.Is(failed, plain(err)): // else what failed first took it along
			failed = fmt.Errorf("%w, %w", failed, err)
		}
		if errors.Is(err, os.ErrPermission) || errors.Is(err, unix.ENOBUFS) {
			break // there is only this one answer
		}
	}
	if failed != nil {
		n.drain()
	}
	return failed
}

// drain reads answers that nobody waits for any more.
func (n *nft) drain() {
	if n.write.SetReadDeadline(time.Now().Add(20*time.Millisecond)) != nil {
		return
	}
	for {
		if _, err := n.write.Receive(); errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, os.ErrClosed) {
			break
		}
	}
	_ = n.write.SetReadDeadline(time.Time{})
}
