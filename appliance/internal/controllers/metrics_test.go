package controllers

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// testMetrics asks all three programs for their metrics, with the roles that each
// has in a cluster: they answer who may get /metrics of the API server, and nobody
// else.
func (w *world) testMetrics(admin *rest.Config, controller string) {
	reader, other := w.token("prometheus"), w.token("other")
	w.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "prometheus-isthmus"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "isthmus-metrics"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "liqo", Name: "prometheus"}},
	})
	for _, tt := range []struct{ program, url string }{
		{"controller", "https://" + controller + "/metrics"},
		{"node", w.guarded(admin, "system:serviceaccount:liqo:isthmus-node")},
		{"gateway", w.guarded(admin, "system:serviceaccount:"+tenant+":gw-rome")},
	} {
		poll.WaitOn(w.t, func(poll.LogT) poll.Result { // a refusal is remembered for half a minute
			if code, body := w.ask(tt.url, reader); code != http.StatusOK {
				return poll.Continue("%s: %d %.200s", tt.program, code, body)
			}
			return poll.Success()
		}, poll.WithTimeout(time.Minute), poll.WithDelay(100*time.Millisecond))
		for _, refused := range []struct {
			token, what string
			want        int
		}{
			{"", "no token", http.StatusUnauthorized},
			{"guessed", "a word that is no token", http.StatusInternalServerError}, // as the library answers
			{other, "somebody without the right", http.StatusForbidden},
		} {
			code, body := w.ask(tt.url, refused.token)
			assert.Check(w.t, is.Equal(code, refused.want), "%s, %s: %.200s", tt.program, refused.what, body)
			assert.Check(w.t, !strings.Contains(body, "isthmus_"), "%s, %s: %.200s", tt.program, refused.what, body)
		}
		_, body := w.ask(tt.url, reader)
		assert.Check(w.t, is.Contains(body, "isthmus_controller_passes_total"), tt.program)
	}
}

// token returns a token of a new ServiceAccount.
func (w *world) token(account string) string {
	w.t.Helper()
	o := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: account}}
	w.create(o)
	request := &authenticationv1.TokenRequest{}
	assert.NilError(w.t, w.c.SubResource("token").Create(w.t.Context(), o, request))
	return request.Status.Token
}

// guarded serves a metric behind the guard of a daemon with the rights of an
// account.
func (w *world) guarded(admin *rest.Config, account string) string {
	w.t.Helper()
	config := rest.CopyConfig(admin)
	config.Impersonate = rest.ImpersonationConfig{UserName: account, Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	guard, err := kube.NewGuard(config, slog.New(slog.NewTextHandler(w.log, nil)))
	assert.NilError(w.t, err)
	h, err := guard(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "isthmus_controller_passes_total 1") }))
	assert.NilError(w.t, err)
	s := httptest.NewTLSServer(h)
	w.t.Cleanup(s.Close)
	return s.URL + "/metrics"
}

// ask gets a page with a token; empty: without one.
func (w *world) ask(url, token string) (int, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), http.MethodGet, url, nil)
	assert.NilError(w.t, err)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	c := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the certificate is the program's own
	}}
	res, err := c.Do(req)
	assert.NilError(w.t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	assert.NilError(w.t, err)
	return res.StatusCode, string(body)
}
