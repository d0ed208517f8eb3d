package daemon

import (
	"context"
	"crypto/ecdh"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Names of the files with the keys, which are the fields of the Secret.
const (
	privateKeyFile   = v1beta1.PrivateKeyField
	publicKeyFile    = v1beta1.PublicKeyField
	presharedKeyFile = v1beta1.PresharedKeyField // only where there is one
)

// A privateKey is a Curve25519 private key. However it is printed, the key stays
// out.
type privateKey struct{ Bytes [32]byte }

// String is for fmt's %v and %s.
func (privateKey) String() string { return "(private key)" }

// GoString is for fmt's %#v.
func (k privateKey) GoString() string { return k.String() }

// MarshalText is for JSON and what else encodes text.
func (k privateKey) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// LogValue is for slog.
func (k privateKey) LogValue() slog.Value { return slog.StringValue(k.String()) }

// A keyring holds the key pair of the gateway as the files last said.
type keyring struct {
	dir     string
	log     *slog.Logger
	changed chan struct{}

	mu      sync.Mutex
	have    bool
	private privateKey
	public  netstate.Key
	shared  privateKey // pre-shared, of the file; zero: none
	// learned is a pre-shared key that the file does not have yet; zero: none.
	learned privateKey
	// rotated is what counts in place of the files since keys were changed.
	rotated rotated
	// lent is the private key of a temporary tunnel, which is in use in place of the
	// gateway's own; nil: none is.
	lent *privateKey
}

func newKeyring(dir string, log *slog.Logger) *keyring {
	return &keyring{dir: dir, log: log, changed: make(chan struct{}, 1)}
}

// errNoKeys says that the files aren't there.
var errNoKeys = errors.New("no keys yet")

// loadKeys reads and checks the two files.
func loadKeys(dir string) (privateKey, netstate.Key, error) {
	var private privateKey
	var public netstate.Key
	for _, f := range []struct {
		name string
		into []byte
	}{{privateKeyFile, private.Bytes[:]}, {publicKeyFile, public[:]}} {
		path := filepath.Join(dir, f.name)
		b, err := os.ReadFile(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return privateKey{}, netstate.Key{}, fmt.Errorf("%w: %s does not exist: the Secret of the gateway needs the fields %s and %s, 32 bytes each",
				errNoKeys, path, privateKeyFile, publicKeyFile)
		case err != nil:
			return privateKey{}, netstate.Key{}, fmt.Errorf("read key: %w", err)
		case len(b) != len(f.into):
			return privateKey{}, netstate.Key{}, fmt.Errorf("%s has %d bytes, want 32: write the raw key, not its base64 form, into the Secret", path, len(b))
		}
		copy(f.into, b)
	}
	k, err := ecdh.X25519().NewPrivateKey(private.Bytes[:])
	if err != nil {
		return privateKey{}, netstate.Key{}, fmt.Errorf("%s is no Curve25519 private key", filepath.Join(dir, privateKeyFile))
	}
	if subtle.ConstantTimeCompare(k.PublicKey().Bytes(), public[:]) != 1 {
		return privateKey{}, netstate.Key{}, fmt.Errorf("%s does not belong to %s in %s: delete the Secret of the gateway to have a new pair made",
			publicKeyFile, privateKeyFile, dir)
	}
	return private, public, nil
}

// loadShared reads the pre-shared key; zero: there is none.
func loadShared(dir string) (privateKey, error) {
	var out privateKey
	path := filepath.Join(dir, presharedKeyFile)
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return out, nil
	case err != nil:
		return out, fmt.Errorf("read key: %w", err)
	case len(b) != len(out.Bytes):
		return out, fmt.Errorf("%s has %d bytes, want 32: write the raw key, not its base64 form, into the Secret", path, len(b))
	}
	copy(out.Bytes[:], b)
	return out, nil
}

// refresh reads the files again and tells whether the pair is another one. A
// pair that can't be read any more stays in use.
func (k *keyring) refresh() error {
	private, public, err := loadKeys(k.dir)
	if err != nil {
		return err
	}
	shared, err := loadShared(k.dir)
	if err != nil {
		return err
	}
	k.mu.Lock()
	if k.shared != shared {
		k.learned = privateKey{} // it has come
	}
	same := k.have && k.public == public && k.shared == shared
	k.have, k.private, k.public, k.shared = true, private, public, shared
	k.mu.Unlock()
	if !same {
		k.log.Info("keys loaded", "dir", k.dir, "publicKey", public)
		notify(k.changed)
	}
	return nil
}

// keysInterval is how often the files are looked at. The kubelet itself takes
// up to a minute to bring a changed Secret into a volume, by renaming a
// directory, which file notification misses easily.
const keysInterval = 2 * time.Second

// run keeps the pair up to date, and says so when it can't.
func (k *keyring) run(ctx context.Context) error {
	once := newOnce(k.log)
	for ctx.Err() == nil {
		once.report("keys", k.refresh())
		pause(ctx, keysInterval)
	}
	return nil
}

// publicKey returns the one in use, and false before there is any.
func (k *keyring) publicKey() (netstate.Key, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	instead := k.rotated.private
	if k.lent != nil {
		instead = k.lent
	}
	if instead != nil {
		public, err := invitation.Key(instead.Bytes).Public()
		return netstate.Key(public), err == nil
	}
	return k.public, k.have
}

// rotated is what counts in place of the files since keys were changed.
type rotated struct {
	private *privateKey                 // nil: that of the file
	shared  map[netstate.Key]privateKey // pre-shared, by the peer's public key; zero: none
}

// rotate has other keys used than those of the files.
func (k *keyring) rotate(r rotated) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rotated = r
}

// learn takes a pre-shared key that the file does not have yet.
func (k *keyring) learn(key [32]byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.learned = privateKey{key}
}

// preshared is the pre-shared key in use; zero: there is none. k.mu is held.
func (k *keyring) preshared() privateKey {
	if k.learned != (privateKey{}) {
		return k.learned
	}
	return k.shared
}

// shares returns the pre-shared key of the peering; nil: it has none.
func (k *keyring) shares() *invitation.Key {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.preshared() == (privateKey{}) {
		return nil
	}
	key := invitation.Key(k.preshared().Bytes)
	return &key
}

// lend has another private key used than the gateway's own; nil ends that.
func (k *keyring) lend(key *invitation.Key) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.lent = nil; key != nil {
		k.lent = &privateKey{*key}
	}
}

// presharedKey returns the fingerprint of the pre-shared key; zero: there is none.
func (k *keyring) presharedKey() netstate.Fingerprint {
	k.mu.Lock()
	defer k.mu.Unlock()
	return netstate.FingerprintOf(k.preshared().Bytes)
}

// sharedForKernel is kernel.Config.PresharedKey. A gateway has one peer, which may have two
// keys.
func (k *keyring) sharedForKernel(dev string, peer netstate.Key) ([32]byte, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if key := k.rotated.shared[peer]; key != (privateKey{}) {
		return key.Bytes, nil
	}
	if k.preshared() == (privateKey{}) {
		return [32]byte{}, fmt.Errorf("pre-shared key of %s: %w", dev, errNoKeys)
	}
	return k.preshared().Bytes, nil
}

// forKernel is kernel.Config.PrivateKey.
func (k *keyring) forKernel(dev string) ([32]byte, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.lent != nil {
		return k.lent.Bytes, nil
	}
	if k.rotated.private != nil {
		return k.rotated.private.Bytes, nil
	}
	if !k.have {
		return [32]byte{}, fmt.Errorf("private key of %s: %w", dev, errNoKeys)
	}
	return k.private.Bytes, nil
}
