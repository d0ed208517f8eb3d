package kube

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

// clocksAgree is by how much two clocks may differ that are the same to us: an answer tells
// the time in whole seconds, and takes a while.
const clocksAgree = 5 * time.Second

// Clock returns the clock of a cluster: what its controller judges by is not what the
// machine of a user says. It asks the API server once, whose answers have a Date
// (RFC 9110 §6.6.1), and goes on by this machine's clock and the difference. Where both agree
// within seconds, it is this machine's clock.
func Clock(ctx context.Context, config *rest.Config) (now func() time.Time, err error) {
	c, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, err
	}
	// /version is for everybody who may log in (ClusterRole system:public-info-viewer).
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("version").String(), nil)
	if err != nil {
		return nil, err
	}
	asked := time.Now()
	answer, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	took := time.Since(asked)
	defer answer.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, 1<<16))
	date, err := http.ParseTime(answer.Header.Get("Date"))
	if err != nil {
		return nil, fmt.Errorf("the API server's answer has no date: %w", err)
	}
	ahead := date.Sub(asked.Add(took / 2))
	if ahead.Abs() <= clocksAgree {
		return time.Now, nil
	}
	return func() time.Time { return time.Now().Add(ahead) }, nil
}
