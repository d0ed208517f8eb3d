package apitest

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// killer passes requests on to the API servers, until as many writes as it is set
// to have been made; then it kills. What meddle does comes before each request is passed on.
type killer struct {
	left   atomic.Int64
	kill   atomic.Pointer[func()]
	meddle func(*http.Request)
}

// between returns a kubeconfig that leads to a cluster through the killer.
func (k *killer) between(o *operator) string {
	config := o.cp.RESTConfig()
	transport, err := rest.TransportFor(config)
	assert.NilError(o.t, err)
	to, err := url.Parse(config.Host)
	assert.NilError(o.t, err)
	proxy := &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) {
		if k.meddle != nil {
			k.meddle(r.In)
		}
		r.SetURL(to)
	}}
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

// overtaken interrupts isthmusctl network, which then takes back what it did. The first object that it takes
// back is written by somebody else between its read and its write, once.
func (p *pair) overtaken(args ...string) {
	p.t.Helper()
	var takesBack, overtook atomic.Bool
	k := &killer{meddle: func(r *http.Request) {
		if r.Method != http.MethodPatch || !takesBack.Load() || overtook.Swap(true) {
			return
		}
		o := &unstructured.Unstructured{}
		o.SetAPIVersion("networking.liqo.io/v1beta1")
		o.SetKind("GatewayServer")
		o.SetNamespace("liqo-tenant-milan")
		o.SetName("milan")
		assert.Check(p.t, strings.HasSuffix(r.URL.Path, "/liqo-tenant-milan/gatewayservers/milan"), r.URL.Path)
		assert.Check(p.t, p.rome.client.Patch(p.t.Context(), o, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"overtook":%q}}}`, time.Now()))))
	}}
	k.left.Store(1000)
	cmd := exec.CommandContext(p.t.Context(), p.milan.isthmusctl, append([]string{"network", "--kubeconfig", p.milan.kubeconfig, "--remote-kubeconfig", k.between(p.rome)}, args...)...)
	out := &log{}
	cmd.Stdout, cmd.Stderr = out, out
	assert.NilError(p.t, cmd.Start())
	until(p.t, "it waits", func() bool { return strings.Contains(out.String(), "waiting for ") })
	takesBack.Store(true)
	assert.NilError(p.t, cmd.Process.Signal(os.Interrupt))
	assert.ErrorContains(p.t, cmd.Wait(), "exit status 1")
	assert.Check(p.t, overtook.Load(), "nothing was taken back:\n%s", out)
	assert.Check(p.t, is.Contains(out.String(), "what this run had made was taken back (--atomic)"))
	p.rome.kubectl("", "annotate", "gatewayserver", "-n", "liqo-tenant-milan", "milan", "overtook-")
}
