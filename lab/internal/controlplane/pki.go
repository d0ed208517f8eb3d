package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// validity is how long a lab may live; nothing renews its certificates.
const validity = 365 * 24 * time.Hour

// Users that have a kubeconfig beside the nodes', and their groups.
var users = []struct {
	name, commonName string
	groups           []string
}{
	{"admin", "admin", []string{"system:masters"}},
	{ControllerManager, "system:kube-controller-manager", nil},
	{Scheduler, "system:kube-scheduler", nil},
	{"kube-proxy", "system:kube-proxy", nil},
	{FlannelUser, FlannelUser, nil},
}

// pki is every key of one cluster, and the kubeconfigs made of them.
type pki struct {
	dir         string
	ca          authority
	adminCert   keyPair
	kubeconfigs map[string][]byte
	nodes       map[string]NodeCredentials
}

type keyPair struct{ cert, key []byte } // PEM

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// newPKI makes all keys and writes into dir what the components read.
func newPKI(dir, cluster string, server netip.AddrPort, serviceCIDR netip.Prefix, nodes []Node) (*pki, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	p := &pki{dir: dir, kubeconfigs: map[string][]byte{}, nodes: map[string]NodeCredentials{}}
	var err error
	if p.ca, err = newAuthority("isthmus-lab-" + cluster); err != nil {
		return nil, err
	}
	frontProxy, err := newAuthority("isthmus-lab-front-proxy-" + cluster)
	if err != nil {
		return nil, err
	}
	write := func(name string, content []byte) {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), content, 0o600)
		}
	}
	leaf := func(a authority, commonName string, groups []string, names []string, addrs ...netip.Addr) (k keyPair) {
		if err == nil {
			k, err = a.leaf(commonName, groups, names, addrs)
		}
		return k
	}
	file := func(name string, k keyPair) {
		write(name+".crt", k.cert)
		write(name+".key", k.key)
	}
	write("ca.crt", p.ca.pem)
	caKey, err := encodeKey(p.ca.key)
	if err != nil {
		return nil, err
	}
	write("ca.key", caKey) // the controller manager signs with it
	write("front-proxy-ca.crt", frontProxy.pem)
	file("front-proxy-client", leaf(frontProxy, "front-proxy-client", nil, nil))
	file("apiserver", leaf(p.ca, "kube-apiserver", nil,
		[]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
		server.Addr(), netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback(), serviceCIDR.Masked().Addr().Next()))
	file("apiserver-kubelet-client", leaf(p.ca, "kube-apiserver-kubelet-client", []string{"system:masters"}, nil))

	sa, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	saKey, err := encodeKey(sa)
	if err != nil {
		return nil, err
	}
	saPub, err := x509.MarshalPKIXPublicKey(sa.Public())
	if err != nil {
		return nil, err
	}
	write("sa.key", saKey)
	write("sa.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: saPub}))

	kubeconfig := func(user string, k keyPair) (out []byte) {
		if err == nil {
			out, err = p.kubeconfig(cluster, server, user, k)
		}
		return out
	}
	for _, u := range users {
		k := leaf(p.ca, u.commonName, u.groups, nil)
		if u.name == "admin" {
			p.adminCert = k
		}
		p.kubeconfigs[u.name] = kubeconfig(u.name, k)
		write(u.name+".kubeconfig", p.kubeconfigs[u.name])
	}
	for _, n := range nodes {
		user := "system:node:" + n.Name
		serving := leaf(p.ca, user, []string{"system:nodes"}, []string{n.Name}, n.Addr)
		p.nodes[n.Name] = NodeCredentials{
			Node:                n.Name,
			Kubeconfig:          kubeconfig(user, leaf(p.ca, user, []string{"system:nodes"}, nil)),
			KubeProxyKubeconfig: p.kubeconfigs["kube-proxy"],
			FlannelKubeconfig:   p.kubeconfigs[FlannelUser],
			ServingCert:         serving.cert,
			ServingKey:          serving.key,
			ClientCA:            p.ca.pem,
		}
	}
	return p, err
}

// savedPKI is what a pki has in memory only, as JSON.
type savedPKI struct {
	CA, AdminCert, AdminKey []byte
	Kubeconfigs             map[string][]byte
	Nodes                   map[string]NodeCredentials
}

const savedPKIFile = "pki.json"

// SaveKeys copies the keys and all that was made of them into dir, which must
// not exist.
func (c *ControlPlane) SaveKeys(dir string) error {
	p := c.pki
	if _, err := copyTree(p.dir, dir); err != nil {
		return fmt.Errorf("cluster %s: save keys: %w", c.cfg.Name, err)
	}
	b, err := json.Marshal(savedPKI{p.ca.pem, p.adminCert.cert, p.adminCert.key, p.kubeconfigs, p.nodes})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, savedPKIFile), b, 0o600)
}

// copyPKI takes over what SaveKeys has saved. It makes no more certificates.
func copyPKI(from, dir string) (*pki, error) {
	if _, err := copyTree(from, dir); err != nil {
		return nil, err
	}
	b, err := os.ReadFile(filepath.Join(dir, savedPKIFile))
	if err != nil {
		return nil, err
	}
	var s savedPKI
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(from, savedPKIFile), err)
	}
	return &pki{dir: dir, ca: authority{pem: s.CA}, adminCert: keyPair{s.AdminCert, s.AdminKey}, kubeconfigs: s.Kubeconfigs, nodes: s.Nodes}, nil
}

func (p *pki) path(name string) string { return filepath.Join(p.dir, name) }

func (p *pki) admin(server netip.AddrPort) *rest.Config {
	return &rest.Config{
		Host: "https://" + server.String(),
		TLSClientConfig: rest.TLSClientConfig{
			CAData: p.ca.pem, CertData: p.adminCert.cert, KeyData: p.adminCert.key,
		},
		// The lab's own clients are few and in a hurry.
		QPS: 500, Burst: 500,
	}
}

// kubeconfig has names of its own for a cluster's server and user, so that those of several
// clusters can be read together.
func (p *pki) kubeconfig(cluster string, server netip.AddrPort, user string, k keyPair) ([]byte, error) {
	entry := user + "@" + cluster
	return clientcmd.Write(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{cluster: {
			Server: "https://" + server.String(), CertificateAuthorityData: p.ca.pem,
		}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{entry: {ClientCertificateData: k.cert, ClientKeyData: k.key}},
		Contexts:       map[string]*clientcmdapi.Context{cluster: {Cluster: cluster, AuthInfo: entry}},
		CurrentContext: cluster,
	})
}

func newAuthority(commonName string) (authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return authority{}, err
	}
	t, err := template(commonName)
	if err != nil {
		return authority{}, err
	}
	t.IsCA, t.BasicConstraintsValid = true, true
	t.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return authority{}, fmt.Errorf("certificate authority %s: %w", commonName, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return authority{}, err
	}
	return authority{cert, key, encodeCert(der)}, nil
}

// leaf signs a certificate that serves and authenticates; groups are the
// organisations that Kubernetes reads as groups.
func (a authority) leaf(commonName string, groups, names []string, addrs []netip.Addr) (keyPair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return keyPair{}, err
	}
	t, err := template(commonName)
	if err != nil {
		return keyPair{}, err
	}
	t.Subject.Organization = groups
	t.DNSNames = names
	for _, addr := range addrs {
		t.IPAddresses = append(t.IPAddresses, net.IP(addr.AsSlice()))
	}
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, key.Public(), a.key)
	if err != nil {
		return keyPair{}, fmt.Errorf("certificate %s: %w", commonName, err)
	}
	keyPEM, err := encodeKey(key)
	return keyPair{encodeCert(der), keyPEM}, err
}

func template(commonName string) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: commonName},
		NotBefore:    time.Now().Add(-time.Hour), // a VM's clock may be behind
		NotAfter:     time.Now().Add(validity),
	}, nil
}

func encodeCert(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), err
}
