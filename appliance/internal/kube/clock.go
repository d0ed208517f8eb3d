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
// (RFC 9110 §6.6.1), and goes by this machine's clock from then on. apart is by how much the
// cluster's clock is ahead, negative where it is behind, and 0 where both agree within
// seconds.
func Clock(ctx context.Context, config *rest.Config) (now func() time.Time, apart time.Duration, err error) {
	c, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, 0, err
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, 0, err
	}
	// /version is for everybody who may log in (ClusterRole system:public-info-viewer).
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("version").String(), nil)
	if err != nil {
		return nil, 0, err
	}
	asked := time.Now()
	answer, err := c.Do(req)
	if err != nil {
		return nil, 0, err
	}
	took := time.Since(asked)
	defer answer.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, 1<<16))
	date, err := http.ParseTime(answer.Header.Get("Date"))
	if err != nil {
		return nil, 0, fmt.Errorf("the API server's answer has no date: %w", err)
	}
	if apart = date.Sub(asked.Add(took / 2)); apart.Abs() <= clocksAgree {
		apart = 0
	}
	return func() time.Time { return time.Now().Add(apart) }, apart, nil
}
