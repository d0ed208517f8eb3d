package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// A Knock asks the API server whether it is there, each time over a connection of
// its own: one that is open may go on where no new one can be made. It returns where
// the API server answers: the address that the connection went to, that of a Service
// for instance, and those by which it calls itself. Any answer counts, also that it
// may not be asked or does not feel well.
type Knock func(context.Context) ([]netip.AddrPort, error)

// NewKnock returns what asks the API server of a configuration.
func NewKnock(config *rest.Config) (Knock, error) {
	url, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("address of the API server %s: %w", config.Host, err)
	}
	tls, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, fmt.Errorf("certificates for %s: %w", config.Host, err)
	}
	transport, err := rest.HTTPWrappersForConfig(config, &http.Transport{
		TLSClientConfig: tls, Proxy: config.Proxy, DialContext: config.Dial, DisableKeepAlives: true,
	})
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", config.Host, err)
	}
	// Every authenticated user may read it (system:discovery).
	url = url.JoinPath("/api")
	return func(ctx context.Context) ([]netip.AddrPort, error) {
		var out []netip.AddrPort
		add := func(text string) {
			if a, err := netip.ParseAddrPort(text); err == nil { // a name says nothing about packets
				out = append(out, netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port()))
			}
		}
		ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
			GotConn: func(c httptrace.GotConnInfo) { add(c.Conn.RemoteAddr().String()) },
		})
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url.String(), nil)
		if err != nil {
			return nil, err
		}
		answer, err := transport.RoundTrip(req)
		if err != nil {
			return nil, fmt.Errorf("ask %s whether it is there: %w", url, err)
		}
		defer answer.Body.Close()
		var versions metav1.APIVersions
		if answer.StatusCode == http.StatusOK && json.NewDecoder(answer.Body).Decode(&versions) == nil {
			for _, a := range versions.ServerAddressByClientCIDRs {
				add(a.ServerAddress)
			}
		}
		slices.SortFunc(out, netip.AddrPort.Compare)
		return slices.Compact(out), nil
	}, nil
}
