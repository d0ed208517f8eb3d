package kube_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

func TestClock(t *testing.T) {
	for _, c := range []struct {
		name  string
		ahead time.Duration
		apart bool
	}{
		{"both clocks agree", 0, false},
		{"a second is what the answer takes", time.Second, false},
		{"the cluster's clock is ahead", time.Hour, true},
		{"the cluster's clock is behind", -26 * time.Hour, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var path string
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				path = r.URL.Path
				w.Header().Set("Date", time.Now().Add(c.ahead).UTC().Format(http.TimeFormat))
			}))
			defer s.Close()
			now, apart, err := kube.Clock(t.Context(), &rest.Config{Host: s.URL + "/clusters/milan"})
			assert.NilError(t, err)
			assert.Equal(t, path, "/clusters/milan/version")
			want := c.ahead
			if !c.apart {
				assert.Equal(t, apart, time.Duration(0))
				want = 0
			}
			assert.Check(t, (apart-want).Abs() < 30*time.Second, "%v apart", apart)
			assert.Check(t, now().Sub(time.Now().Add(want)).Abs() < 30*time.Second)
		})
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Header()["Date"] = nil }))
	defer s.Close()
	_, _, err := kube.Clock(t.Context(), &rest.Config{Host: s.URL})
	assert.ErrorContains(t, err, "the API server's answer has no date")
}
