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
		switch m.Header.Type {
		case unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWSET:
			m.Data = withSetData(m.Data)
		case unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE:
			withoutHeaderChecksum(m.Data)
		}
	}
	return b.taken, nil
}

// noHeaderChecksum is, in an expression that writes into a packet, the place of the
// header's checksum where the header has none: that of IPv6. The library sends the
// flags, by which the kernel corrects the checksum of what follows, only together with
// a checksum of the header.
const noHeaderChecksum = 0xff

// withoutHeaderChecksum takes such places out of a message about a rule, and leaves the
// flags, as nft(8) sends them. Linux 7.2 ignores, and does not refuse, a checksum of an
// IPv6 header.
func withoutHeaderChecksum(msg []byte) {
	eachAttr(msg[4:], func(t uint16, v []byte) {
		if t != unix.NFTA_RULE_EXPRESSIONS {
			return
		}
		eachAttr(v, func(_ uint16, v []byte) {
			payload := false
			eachAttr(v, func(t uint16, v []byte) { // the name comes first
				switch {
				case t == unix.NFTA_EXPR_NAME:
					payload = asString(v) == "payload"
				case t == unix.NFTA_EXPR_DATA && payload:
					withoutChecksum(v)
				}
			})
		})
	})
}

func withoutChecksum(expression []byte) {
	var kind, place []byte
	eachAttr(expression, func(t uint16, v []byte) {
		switch t {
		case unix.NFTA_PAYLOAD_CSUM_TYPE:
			kind = v
		case unix.NFTA_PAYLOAD_CSUM_OFFSET:
			place = v
		}
	})
	if len(kind) == 4 && len(place) == 4 && binaryutil.BigEndian.Uint32(place) == noHeaderChecksum {
		clear(kind) // NFT_PAYLOAD_CSUM_NONE
		clear(place)
	}
}

// withSetData adds to a message about a map what its values are: marks, or intervals
// of a first address and a last one. The kernel does not care, but nft(8) can't print
// the rules that use the map without it.
func withSetData(msg []byte) []byte {
	// As nft(8) numbers the byte orders of a host and of the network.
	const hostEndian, bigEndian = 1, 2
	var key, data, dataType uint32
	eachAttr(msg[4:], func(t uint16, v []byte) {
		switch t {
		case unix.NFTA_SET_KEY_LEN:
			key = binaryutil.BigEndian.Uint32(v)
		case unix.NFTA_SET_DATA_LEN:
			data = binaryutil.BigEndian.Uint32(v)
		case unix.NFTA_SET_DATA_TYPE:
			dataType = binaryutil.BigEndian.Uint32(v)
		}
	})
	text := userdata.AppendUint32(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, bigEndian)
	switch {
	case dataType == nftables.TypeMark.GetNFTMagic():
		text = userdata.AppendUint32(text, userdata.NFTNL_UDATA_SET_DATABYTEORDER, hostEndian)
	case data == 2*key:
		text = userdata.AppendUint32(text, userdata.NFTNL_UDATA_SET_DATABYTEORDER, bigEndian)
		text = userdata.AppendUint32(text, userdata.NFTNL_UDATA_SET_DATA_INTERVAL, 1)
	default:
		return msg
	}
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
