package kube

import (
	"context"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"k8s.io/client-go/rest"
)

// Whatever an API server answers, it is there; who is no API server of this cluster
// has not answered. Each question has a connection of its own.
func TestKnock(t *testing.T) {
	var connections atomic.Int32
	status, body := http.StatusOK, ""
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api" || r.Header.Get("Authorization") != "Bearer secret" {
			status = http.StatusTeapot
		}
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}))
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			connections.Add(1)
		}
	}
	server.StartTLS()
	defer server.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	knock, err := NewKnock(&rest.Config{Host: server.URL, BearerToken: "secret", TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	assert.NilError(t, err)
	dialled := netip.MustParseAddrPort(server.Listener.Addr().String())

	for i, tt := range []struct {
		status int
		body   string
		want   []string // besides the address that was dialled
	}{
		{http.StatusOK, `{"serverAddressByClientCIDRs":[{"clientCIDR":"0.0.0.0/0","serverAddress":"172.18.1.1:6443"},{"clientCIDR":"::/0","serverAddress":"[fd00::1]:6443"}]}`,
			[]string{"172.18.1.1:6443", "[fd00::1]:6443"}},
		{http.StatusOK, `{"serverAddressByClientCIDRs":[{"clientCIDR":"0.0.0.0/0","serverAddress":"api.example.org:6443"}]}`, nil},
		{http.StatusOK, `not JSON`, nil},
		{http.StatusForbidden, `{}`, nil},
		{http.StatusInternalServerError, `etcd is away`, nil},
	} {
		status, body = tt.status, tt.body
		got, err := knock(t.Context())
		assert.NilError(t, err)
		assert.Equal(t, status, tt.status, "the question was another one")
		want := []netip.AddrPort{dialled}
		for _, a := range tt.want {
			want = append(want, netip.MustParseAddrPort(a))
		}
		slices.SortFunc(want, netip.AddrPort.Compare)
		assert.Assert(t, slices.Equal(got, want), "%v, not %v", got, want)
		assert.Equal(t, connections.Load(), int32(i+1))
	}

	other, err := NewKnock(&rest.Config{Host: server.URL, BearerToken: "secret"}) // which does not know its certificate
	assert.NilError(t, err)
	_, err = other(t.Context())
	assert.ErrorContains(t, err, "certificate")

	server.Close()
	_, err = knock(t.Context())
	assert.ErrorContains(t, err, "refused")

	// One that takes connections and says nothing.
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	assert.NilError(t, err)
	defer mute.Close()
	silent, err := NewKnock(&rest.Config{Host: "https://" + mute.Addr().String()})
	assert.NilError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = silent(ctx)
	assert.ErrorContains(t, err, "deadline exceeded")
}
