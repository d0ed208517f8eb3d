package kube_test

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"testing"

	"gotest.tools/v3/assert"
	certutil "k8s.io/client-go/util/cert"

	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// TestSelfSigned: a server with such a certificate is what it says to whoever knows
// the certificate, and no two are the same.
func TestSelfSigned(t *testing.T) {
	cert, err := kube.SelfSigned()
	assert.NilError(t, err)
	again, err := kube.SelfSigned()
	assert.NilError(t, err)
	assert.Check(t, !cert.Leaf.Equal(again.Leaf))

	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.TLS = &tls.Config{Certificates: []tls.Certificate{*cert}}
	s.StartTLS()
	defer s.Close()
	knows := x509.NewCertPool()
	knows.AddCert(cert.Leaf)
	get := func(pool *x509.CertPool) error {
		c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
		defer c.CloseIdleConnections()
		res, err := c.Get(s.URL)
		if err == nil {
			res.Body.Close()
		}
		return err
	}
	assert.NilError(t, get(knows))
	assert.ErrorContains(t, get(x509.NewCertPool()), "certificate")
}

// What a start of a daemon pays for its certificate, and what it would pay for the
// one that controller-runtime makes.
func BenchmarkSelfSigned(b *testing.B) {
	b.Run("P-256", func(b *testing.B) {
		for b.Loop() {
			_, err := kube.SelfSigned()
			assert.NilError(b, err)
		}
	})
	b.Run("RSA", func(b *testing.B) {
		for b.Loop() {
			_, _, err := certutil.GenerateSelfSignedCertKey("localhost", nil, nil)
			assert.NilError(b, err)
		}
	})
}
