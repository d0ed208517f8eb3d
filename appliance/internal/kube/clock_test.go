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
		name        string
		ahead, want time.Duration
	}{
		{"both clocks agree", 0, 0},
		{"a second is what the answer takes", time.Second, 0},
		{"the cluster's clock is ahead", time.Hour, time.Hour},
		{"the cluster's clock is behind", -26 * time.Hour, -26 * time.Hour},
	} {
		t.Run(c.name, func(t *testing.T) {
			var path string
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				path = r.URL.Path
				w.Header().Set("Date", time.Now().Add(c.ahead).UTC().Format(http.TimeFormat))
			}))
			defer s.Close()
			now, err := kube.Clock(t.Context(), &rest.Config{Host: s.URL + "/clusters/milan"})
			assert.NilError(t, err)
			assert.Equal(t, path, "/clusters/milan/version")
			before := time.Now()
			off := now().Sub(before.Add(c.want))
			assert.Check(t, off.Abs() < 30*time.Second, "%v off", off)
			if c.want == 0 {
				assert.Check(t, off >= 0 && off <= time.Since(before), "not this machine's clock: %v off", off)
			}
		})
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Header()["Date"] = nil }))
	defer s.Close()
	_, err := kube.Clock(t.Context(), &rest.Config{Host: s.URL})
	assert.ErrorContains(t, err, "the API server's answer has no date")
}
