package daemon

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/crypto/blake2s"
	"golang.org/x/crypto/chacha20poly1305"
	"golang.zx2c4.com/wireguard/device"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// initiation is the first message of a handshake, as a clock that shows at makes it
// (https://www.wireguard.com/papers/wireguard.pdf, §5.4.2 and §5.4.4).
func initiation(t *testing.T, own *ecdh.PrivateKey, peer *ecdh.PublicKey, at time.Time) []byte {
	t.Helper()
	hash := func(parts ...[]byte) []byte {
		h := blake2s.Sum256(bytes.Join(parts, nil))
		return h[:]
	}
	seal := func(key, plain, with []byte) []byte {
		aead, err := chacha20poly1305.New(key)
		assert.NilError(t, err)
		return aead.Seal(nil, make([]byte, chacha20poly1305.NonceSize), plain, with)
	}
	chain := hash([]byte(device.NoiseConstruction))
	mix := func(input []byte) (key []byte) {
		var c, k [blake2s.Size]byte
		device.KDF2(&c, &k, chain, input)
		chain = c[:]
		return k[:]
	}
	shared := func(k *ecdh.PrivateKey) []byte {
		secret, err := k.ECDH(peer)
		assert.NilError(t, err)
		return secret
	}
	ephemeral, err := ecdh.X25519().GenerateKey(rand.Reader)
	assert.NilError(t, err)
	public := ephemeral.PublicKey().Bytes()
	h := hash(hash(chain, []byte(device.WGIdentifier)), peer.Bytes())
	var c [blake2s.Size]byte
	device.KDF1(&c, chain, public)
	chain, h = c[:], hash(h, public)
	static := seal(mix(shared(ephemeral)), own.PublicKey().Bytes(), h)
	h = hash(h, static)
	// TAI64N (https://cr.yp.to/libtai/tai64.html): seconds, and billionths of one.
	stamp := binary.BigEndian.AppendUint64(nil, 1<<62+10+uint64(at.Unix()))
	stamp = binary.BigEndian.AppendUint32(stamp, uint32(at.Nanosecond()))
	timestamp := seal(mix(shared(own)), stamp, h)

	msg := binary.LittleEndian.AppendUint32(nil, device.MessageInitiationType)
	msg = binary.LittleEndian.AppendUint32(msg, 77) // the sender's number for it
	msg = bytes.Join([][]byte{msg, public, static, timestamp}, nil)
	mac, err := blake2s.New128(hash([]byte(device.WGLabelMAC1), peer.Bytes()))
	assert.NilError(t, err)
	mac.Write(msg)
	return append(mac.Sum(msg), make([]byte, blake2s.Size128)...)
}

// TestClientWithAnEarlierClock: a client's gateway comes up on a node whose clock is an
// hour behind that of the node that it was on before. Its server takes no handshake that
// is older than the last one; it has to forget when that was.
func TestClientWithAnEarlierClock(t *testing.T) {
	t.Parallel()
	nettest.Need(t, "ip")
	milan, rome := nettest.Another(t), nettest.Another(t)
	impl := implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)
	serverSide := child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: impl}
	clientSide := child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: impl, Endpoint: milanAddr.String()}
	serverPrivate, clientPrivate := writeKeys(t, serverSide.KeysDir), writeKeys(t, clientSide.KeysDir)
	serverSide.PeerKey, clientSide.PeerKey = clientPrivate.PublicKey().Bytes(), serverPrivate.PublicKey().Bytes()
	for _, ns := range []*nettest.NS{milan, rome} { // through the tunnel or not at all
		ns.Run("ip", "route", "add", "unreachable", "169.254.0.0/16")
	}
	logs := &logBuffer{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of both:\n%s", logs)
		}
	})
	serverSide.start(t, milan, logs)

	// What the client sent from its last node.
	var before *net.UDPConn
	rome.Do(func() {
		var err error
		before, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(milanAddr, desired.WireGuardPort)))
		assert.Check(t, err)
	})
	within(t, 20*time.Second, func() error {
		if _, err := before.Write(initiation(t, clientPrivate, serverPrivate.PublicKey(), time.Now().Add(time.Hour))); err != nil {
			return err // nobody listens yet
		}
		if err := before.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			return err
		}
		answer := make([]byte, 200)
		n, err := before.Read(answer)
		if err == nil && (n != device.MessageResponseSize || answer[0] != device.MessageResponseType) {
			err = fmt.Errorf("%d bytes of type %d", n, answer[0])
		}
		return err
	})
	assert.NilError(t, before.Close())

	began := time.Now()
	clientSide.start(t, rome, logs)
	up := through(t, rome)
	within(t, 60*time.Second, up)
	took := time.Since(began)
	t.Logf("the client got through after %v (%s WireGuard)", took.Round(time.Millisecond), impl)
	if took < ownPatience/2 {
		t.Fatal("the server has not refused the client: nothing was tried")
	}
}
