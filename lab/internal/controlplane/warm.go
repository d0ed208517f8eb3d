package controlplane

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A warm copy is etcd's data of a control plane that has just come up: the
// roles, priority classes, namespaces and service accounts that the components
// of Kubernetes write when they find none, and the CRDs of Config.CRDs, which
// are established. A control plane that starts on it writes none of that. What
// tells one cluster from another is not taken over: see foreign.

// keepWarm is how many copies are kept: each change of a binary or of a CRD
// makes one of some 10 MB.
const keepWarm = 3

// warmFormat changes whenever what is in a copy does.
const warmFormat = "1"

// errNoWarm is why a control plane with a CacheDir neither takes nor makes a
// copy.
var errNoWarm = errors.New("no copies are kept")

// warmPath is the directory of the copy for this configuration, whether it is
// there or not. Its name has all that a copy depends on: the program, its
// flags and the CRDs.
func (c *Config) warmPath() (string, error) {
	if os.Getenv("KUBEBUILDER_ASSETS") != "" {
		return "", fmt.Errorf("%w for the programs of KUBEBUILDER_ASSETS", errNoWarm)
	}
	id, err := buildID(c.Binary)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNoWarm, err)
	}
	h := sha256.New()
	part := func(b []byte) { fmt.Fprintf(h, "%d:%s", len(b), b) }
	part([]byte(warmFormat))
	part(id)
	// Flags of a control plane that is always the same: addresses, paths and
	// ranges of this one are in nothing that is taken over.
	same := &ControlPlane{cfg: Config{Dir: "/", Address: netip.IPv6Unspecified(), Ports: DefaultPorts()}, pki: &pki{dir: "/"}}
	for _, component := range Components() {
		flags, err := same.flags(component)
		if err != nil {
			return "", err
		}
		part([]byte(strings.Join(flags, " ")))
	}
	for _, crd := range c.CRDs {
		part(crd)
	}
	return filepath.Join(c.CacheDir, hex.EncodeToString(h.Sum(nil)[:12])), nil
}

// buildID is what Go's linker wrote into a program: a hash of all that it was
// made from. Reading it takes no time, the program itself has 130 MB.
func buildID(program string) ([]byte, error) {
	f, err := elf.Open(program)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s := f.Section(".note.go.buildid")
	if s == nil {
		return nil, fmt.Errorf("%s has no build ID", program)
	}
	return s.Data()
}

// keepCopy makes the copy for the next control plane, when nobody has made it.
func (c *ControlPlane) keepCopy() error {
	path, err := c.cfg.warmPath()
	if errors.Is(err, errNoWarm) {
		return nil // as Warm says
	}
	if err != nil {
		return err
	}
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(c.cfg.CacheDir, 0o700); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(c.cfg.CacheDir, ".tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := c.SaveEtcd(filepath.Join(tmp, "data")); err != nil {
		return err
	}
	// Another one may have been faster; then its copy stays.
	if err := os.Rename(filepath.Join(tmp, "data"), path); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return prune(c.cfg.CacheDir, path)
}

// halfDone is when nobody is making a copy any more that was begun then.
const halfDone = time.Hour

// prune removes the oldest copies but never the one in hand, and what was never
// finished.
func prune(dir, current string) error {
	left, err := filepath.Glob(filepath.Join(dir, ".tmp-*"))
	if err != nil {
		return err
	}
	for _, p := range left {
		if made(p) < time.Now().Add(-halfDone).UnixNano() {
			if err := os.RemoveAll(p); err != nil {
				return err
			}
		}
	}
	all, err := filepath.Glob(filepath.Join(dir, "[0-9a-f]*"))
	if err != nil || len(all) <= keepWarm {
		return err
	}
	slices.SortFunc(all, func(a, b string) int { return int((made(a) - made(b)) >> 20) })
	var errs []error
	for _, p := range all[:len(all)-keepWarm] {
		if p != current {
			errs = append(errs, os.RemoveAll(p))
		}
	}
	return errors.Join(errs...)
}

// made is when a directory was made, in nanoseconds; 0 when it has gone.
func made(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.ModTime().UnixNano()
}

// foreign are the keys below which everything belongs to the control plane
// that a copy is from; the components write it anew when it is not there.
var foreign = []string{
	// The certificate authorities that the API server and, in every namespace,
	// pods trust. The API server would add its own to what it finds.
	"/registry/configmaps/",
	// The API server's address, which clients of the service kubernetes would
	// go to until its lease ends, and its identity.
	"/registry/masterleases/", "/registry/leases/", "/registry/endpointslices/",
	// The service kubernetes with an address of the service CIDR.
	"/registry/services/", "/registry/servicecidrs/", "/registry/ipaddresses/", "/registry/ranges/",
	"/registry/events/",
}

// namespaces is the prefix of their keys. The UID of kube-system serves many
// programs as the identity of a cluster, so no two clusters may share it.
const namespaces = "/registry/namespaces/"

var uuid = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)

// renew removes from etcd, before an API server reads it, what is foreign, and
// gives the namespaces UIDs of their own. The UIDs of other objects stay; they
// mean nothing beyond their cluster.
func (c *ControlPlane) renew(ctx context.Context) error {
	var found struct {
		KVs []struct{ Key, Value []byte }
	}
	if err := c.etcd(ctx, "range", prefixed(namespaces), &found); err != nil {
		return err
	}
	var operations []any
	for _, kv := range found.KVs {
		// Of the same length, so nothing else in the message changes.
		value := uuid.ReplaceAllFunc(kv.Value, func([]byte) []byte { return newUID() })
		operations = append(operations, map[string]any{"requestPut": map[string]any{"key": kv.Key, "value": value}})
	}
	if len(operations) == 0 {
		return fmt.Errorf("etcd has nothing below %s", namespaces)
	}
	for _, prefix := range foreign {
		operations = append(operations, map[string]any{"requestDeleteRange": prefixed(prefix)})
	}
	return c.etcd(ctx, "txn", map[string]any{"success": operations}, nil)
}

// prefixed is the range of all keys that start with prefix.
func prefixed(prefix string) map[string]any {
	end := []byte(prefix)
	end[len(end)-1]++
	return map[string]any{"key": []byte(prefix), "range_end": end}
}

// newUID makes a random UID (RFC 9562, version 4).
func newUID() []byte {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Appendf(nil, "%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// etcd calls a method of etcd's KV service through its gateway for JSON. Bytes
// are base64 there, as in encoding/json.
func (c *ControlPlane) etcd(ctx context.Context, method string, request, response any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	transport := &http.Transport{DialContext: c.cfg.dial}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+loopbackPort(c.cfg.Ports.EtcdClient)+"/v3/kv/"+method, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("etcd: %s: %s: %s", method, resp.Status, b)
	case response == nil:
		return nil
	}
	return json.Unmarshal(b, response)
}
