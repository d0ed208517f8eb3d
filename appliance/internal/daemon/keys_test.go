package daemon

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// writeKeys puts a new key pair into dir and returns it.
func writeKeys(t *testing.T, dir string) *ecdh.PrivateKey {
	t.Helper()
	k, err := ecdh.X25519().GenerateKey(rand.Reader)
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(filepath.Join(dir, privateKeyFile), k.Bytes(), 0o600))
	assert.NilError(t, os.WriteFile(filepath.Join(dir, publicKeyFile), k.PublicKey().Bytes(), 0o600))
	return k
}

func TestKeyring(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	k := newKeyring(dir, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))

	assert.ErrorContains(t, k.refresh(), "privateKey does not exist")
	_, ok := k.publicKey()
	assert.Assert(t, !ok)
	_, err := k.forKernel("liqo-tunnel")
	assert.ErrorIs(t, err, errNoKeys)

	first := writeKeys(t, dir)
	assert.NilError(t, k.refresh())
	<-k.changed
	pub, ok := k.publicKey()
	assert.Assert(t, ok)
	assert.DeepEqual(t, pub[:], first.PublicKey().Bytes())
	private, err := k.forKernel("liqo-tunnel")
	assert.NilError(t, err)
	assert.DeepEqual(t, private[:], first.Bytes())

	assert.NilError(t, k.refresh())
	select {
	case <-k.changed:
		t.Error("told of a change that was none")
	default:
	}

	// A pair that does not match, or has another form, is refused; the one in
	// use stays.
	assert.NilError(t, os.WriteFile(filepath.Join(dir, publicKeyFile), make([]byte, 32), 0o600))
	assert.ErrorContains(t, k.refresh(), "does not belong to")
	assert.NilError(t, os.WriteFile(filepath.Join(dir, privateKeyFile), []byte("c2VjcmV0"), 0o600))
	assert.ErrorContains(t, k.refresh(), "raw key")
	pub, ok = k.publicKey()
	assert.Assert(t, ok)
	assert.DeepEqual(t, pub[:], first.PublicKey().Bytes())

	second := writeKeys(t, dir)
	assert.NilError(t, k.refresh())
	<-k.changed
	pub, _ = k.publicKey()
	assert.DeepEqual(t, pub[:], second.PublicKey().Bytes())

	// A pre-shared key is a file more, and one of another form is refused.
	assert.Equal(t, k.presharedKey(), netstate.Fingerprint{})
	_, err = k.sharedForKernel("liqo-tunnel", pub)
	assert.ErrorIs(t, err, errNoKeys)
	shared := [32]byte{31: 9}
	assert.NilError(t, os.WriteFile(filepath.Join(dir, presharedKeyFile), shared[:], 0o600))
	assert.NilError(t, k.refresh())
	<-k.changed
	assert.Equal(t, k.presharedKey(), netstate.FingerprintOf(shared))
	got, err := k.sharedForKernel("liqo-tunnel", pub)
	assert.NilError(t, err)
	assert.Equal(t, got, shared)
	assert.NilError(t, os.WriteFile(filepath.Join(dir, presharedKeyFile), []byte("c2VjcmV0"), 0o600))
	assert.ErrorContains(t, k.refresh(), "raw key")
	assert.Equal(t, k.presharedKey(), netstate.FingerprintOf(shared))

	for _, secret := range [][]byte{first.Bytes(), second.Bytes(), shared[:]} {
		for _, form := range []string{"%s", "%x", "%v"} {
			assert.Assert(t, !bytes.Contains(log.Bytes(), fmt.Appendf(nil, form, secret)), "a private key is in the log")
		}
	}
}

func TestPrivateKeyPrintsNothing(t *testing.T) {
	k := privateKey{Bytes: [32]byte{1, 2, 3}}
	var log bytes.Buffer
	l := slog.New(slog.NewJSONHandler(&log, nil))
	l.Info("x", "key", k, "ptr", &k, "in", struct{ K privateKey }{k})
	for _, s := range []string{fmt.Sprint(k), fmt.Sprintf("%v %+v %#v %s %x", k, k, k, k, k), fmt.Sprint(&k), log.String()} {
		assert.Assert(t, !bytes.Contains([]byte(s), []byte("1 2 3")) && !bytes.Contains([]byte(s), []byte("1,2,3")) &&
			!bytes.Contains([]byte(s), []byte("010203")) && !bytes.Contains([]byte(s), []byte("0x1, 0x2")), s)
	}
}
