package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

const (
	// bufferSize is for sockets that send or receive thousands of messages
	// at once: 5,000 firewall rules in one transaction, with their echoes.
	bufferSize = 8 << 20
	// batchSize is how many requests are sent before their answers are read.
	// The answers must fit in a receive buffer of the default size.
	batchSize = 128
	// dumpTries is how often a list is read that changes while it is read.
	dumpTries = 10
)

// An rtnl is a socket of rtnetlink(7) for everything that the library does
// not do, or not in batches. It is not safe for concurrent use.
type rtnl struct{ c *nl.Conn }

func openRTNL() (*rtnl, error) {
	c, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	enlarge(c)
	// Both only better the messages and the speed; kernel 5.10 has them.
	_ = c.SetOption(nl.ExtendedAcknowledge, true)
	_ = c.SetOption(nl.GetStrictCheck, true)
	return &rtnl{c}, nil
}

// enlarge gives a socket large buffers, or as large ones as it may have
// without privilege.
func enlarge(c *nl.Conn) {
	for size := bufferSize; size >= 64<<10; size /= 2 {
		if c.SetReadBuffer(size) == nil && c.SetWriteBuffer(size) == nil {
			break
		}
	}
}

// A request is a message of rtnetlink, to be acknowledged.
type request struct {
	typ   uint16
	flags nl.HeaderFlags
	data  []byte
}

func (r request) message() nl.Message {
	return nl.Message{
		Header: nl.Header{Type: nl.HeaderType(r.typ), Flags: nl.Request | nl.Acknowledge | r.flags},
		Data:   r.data,
	}
}

// do carries out one request.
func (n *rtnl) do(r request) error { return n.batch([]request{r})[0] }

// batch carries out requests in their order and returns an error, or nil,
// for each.
func (n *rtnl) batch(rs []request) []error {
	errs := make([]error, len(rs))
	for start := 0; start < len(rs); start += batchSize {
		chunk := rs[start:min(start+batchSize, len(rs))]
		msgs := make([]nl.Message, len(chunk))
		for i, r := range chunk {
			msgs[i] = r.message()
		}
		sent, err := n.c.SendMessages(msgs)
		if err != nil {
			for i := start; i < len(rs); i++ {
				errs[i] = err
			}
			return errs
		}
		// The kernel handles requests in order, so the answers are too; the
		// sequence number only skips answers to a request given up earlier.
		for i := 0; i < len(sent); {
			replies, err := n.c.Receive()
			var op *nl.OpError
			switch {
			case err == nil && len(replies) > 0 && replies[0].Header.Sequence == sent[i].Header.Sequence:
			case errors.As(err, &op) && op.Sequence == sent[i].Header.Sequence:
				errs[start+i] = plain(op)
			case err == nil, errors.As(err, &op) && op.Sequence != 0:
				continue
			default:
				for j := start + i; j < len(rs); j++ {
					errs[j] = err
				}
				return errs
			}
			i++
		}
	}
	return errs
}

// each carries out one request for each value. Its errors name the value, in a
// sentence that begins with what; those that are fine are none.
func each[T fmt.Stringer](n *rtnl, what string, vs []T, encode func(T) (request, error), fine ...error) []error {
	var errs []error
	var reqs []request
	var sent []T
	for _, v := range vs {
		r, err := encode(v)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s %s: %w", what, v, err))
			continue
		}
		reqs, sent = append(reqs, r), append(sent, v)
	}
	for i, err := range n.batch(reqs) {
		if err != nil && !slices.ContainsFunc(fine, func(f error) bool { return errors.Is(err, f) }) {
			errs = append(errs, fmt.Errorf("%s %s: %w", what, sent[i], err))
		}
	}
	return errs
}

// indexOf returns the index of a link.
func indexOf(index map[string]int, dev string) (int, error) {
	i, ok := index[dev]
	if !ok {
		return 0, &netstate.NoLinkError{Name: dev}
	}
	return i, nil
}

// plain returns what the kernel said, without where netlink was when it said
// it.
func plain(err error) error {
	var op *nl.OpError
	if !errors.As(err, &op) {
		return err
	}
	if op.Message != "" {
		return fmt.Errorf("%w (%s)", op.Err, op.Message)
	}
	return op.Err
}

// letWrite waits before a list that changed is read again, longer each time: 225
// ms in all. After a drain, kube-proxy with iptables wrote tables so fast that
// all tries of a node came to nothing when they were made at once.
func letWrite(try int) {
	if try > 0 {
		time.Sleep(time.Duration(try) * 5 * time.Millisecond)
	}
}

// dump returns the answers to a list request, read in one piece.
func dump(c *nl.Conn, typ uint16, data []byte) ([]nl.Message, error) {
	for try := range dumpTries {
		letWrite(try)
		msgs, err := c.Execute(nl.Message{
			Header: nl.Header{Type: nl.HeaderType(typ), Flags: nl.Request | nl.Dump},
			Data:   data,
		})
		if err != nil {
			return nil, plain(err)
		}
		if !interrupted(msgs) {
			return msgs, nil
		}
	}
	return nil, fmt.Errorf("the list changed %d times while it was read", dumpTries)
}

func interrupted(msgs []nl.Message) bool {
	for _, m := range msgs {
		if m.Header.Flags&nl.DumpInterrupted != 0 {
			return true
		}
	}
	return false
}

// attrs encodes netlink attributes after a header of fixed length.
type attrs struct{ b []byte }

func (a *attrs) bytes(typ uint16, v []byte) {
	n := 4 + len(v)
	a.b = binary.NativeEndian.AppendUint16(a.b, uint16(n))
	a.b = binary.NativeEndian.AppendUint16(a.b, typ)
	a.b = append(a.b, v...)
	for len(a.b)%4 != 0 {
		a.b = append(a.b, 0)
	}
}

func (a *attrs) u8(typ uint16, v uint8)      { a.bytes(typ, []byte{v}) }
func (a *attrs) u32(typ uint16, v uint32)    { a.bytes(typ, binary.NativeEndian.AppendUint32(nil, v)) }
func (a *attrs) str(typ uint16, v string)    { a.bytes(typ, append([]byte(v), 0)) }
func (a *attrs) ip(typ uint16, v netip.Addr) { a.bytes(typ, v.AsSlice()) }

func (a *attrs) nest(typ uint16, f func(*attrs)) {
	var in attrs
	f(&in)
	a.bytes(typ|unix.NLA_F_NESTED, in.b)
}

// eachAttr calls f for every attribute in b.
func eachAttr(b []byte, f func(typ uint16, v []byte)) {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

func appendU32s(b []byte, vs ...uint32) []byte {
	for _, v := range vs {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

func asU32(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(v)
}

func asString(v []byte) string { return unix.ByteSliceToString(v) }

func asAddr(v []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(v)
	return a
}

func family(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
