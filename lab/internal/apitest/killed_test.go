package apitest

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"strings"
	"sync/atomic"

	"gotest.tools/v3/assert"
	"k8s.io/client-go/rest"
)

// killer passes requests on to the API servers, until as many writes as it is set
// to have been made; then it kills.
type killer struct {
	left atomic.Int64
	kill atomic.Pointer[func()]
}

// between returns a kubeconfig that leads to a cluster through the killer.
func (k *killer) between(o *operator) string {
	config := o.cp.RESTConfig()
	transport, err := rest.TransportFor(config)
	assert.NilError(o.t, err)
	to, err := url.Parse(config.Host)
	assert.NilError(o.t, err)
	proxy := &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }}
	proxy.ErrorHandler = func(http.ResponseWriter, *http.Request, error) {} // whoever asked is dead
	proxy.ModifyResponse = func(res *http.Response) error {
		write := res.Request.Method != http.MethodGet && !strings.Contains(res.Request.URL.Path, "selfsubjectaccessreviews")
		if write && k.left.Add(-1) == 0 {
			(*k.kill.Load())() // it has been done, and nobody hears of it
		}
		return nil
	}
	s := httptest.NewServer(proxy)
	o.t.Cleanup(s.Close)
	return o.file("through", fmt.Appendf(nil, `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: "%s"}}]}`, s.URL))
}

// killedAfter runs isthmusctl network and kills it after so many writes. It
// reports whether it came to that.
func (p *pair) killedAfter(writes int, args ...string) bool {
	p.t.Helper()
	k := &killer{}
	k.left.Store(int64(writes))
	cmd := exec.CommandContext(p.t.Context(), p.milan.isthmusctl, append([]string{"network", "--kubeconfig", k.between(p.milan), "--remote-kubeconfig", k.between(p.rome)}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	kill := func() { _ = cmd.Process.Kill() }
	k.kill.Store(&kill)
	err := cmd.Run()
	if k.left.Load() > 0 {
		assert.NilError(p.t, err, out.String())
		return false
	}
	return true
}
