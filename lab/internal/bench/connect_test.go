package bench

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
)

// TestMeasureConnect: what counts is the first answer, whether the command ends before or after
// it; every peering is forgotten again, and what went wrong is told.
func TestMeasureConnect(t *testing.T) {
	after := func(d time.Duration, err error) func(context.Context) error {
		return func(context.Context) error {
			time.Sleep(d)
			return err
		}
	}
	for _, tc := range []struct {
		name    string
		connect func(context.Context) error
		answers time.Duration
		broken  error // of the probe
		want    time.Duration
		err     string
	}{
		{name: "it ends before", connect: after(time.Second, nil), answers: 3 * time.Second, want: 3 * time.Second},
		{name: "it ends after", connect: after(4*time.Second, nil), answers: 2 * time.Second, want: 2 * time.Second},
		{name: "it fails", connect: after(time.Second, errors.New("no right")), answers: time.Hour, err: "no pod had an answer within 2m0s\nno right"},
		{name: "nobody can look", connect: after(time.Second, nil), answers: time.Hour, broken: errors.New("the lab is gone"), err: "the lab is gone"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var start time.Time
				prepared, disconnected := 0, 0
				c := ConnectConfig{
					Ways: []Way{{Name: "w", Prepare: func(context.Context) error {
						prepared++
						time.Sleep(time.Minute)
						start = time.Now()
						return nil
					}, Connect: tc.connect}},
					Pairs:      2,
					Reached:    func(context.Context) (bool, error) { return time.Since(start) >= tc.answers, tc.broken },
					Disconnect: func(context.Context) error { disconnected++; return nil },
				}
				got, err := MeasureConnect(t.Context(), c)
				if tc.err != "" {
					assert.ErrorContains(t, err, tc.err)
					assert.Equal(t, disconnected, 1)
					return
				}
				assert.NilError(t, err)
				assert.DeepEqual(t, got, [][]float64{{tc.want.Seconds(), tc.want.Seconds()}})
				assert.Equal(t, prepared, 2)
				assert.Equal(t, disconnected, 2)
			})
		})
	}
}

func TestConnectReport(t *testing.T) {
	rows := SummarizeConnect([]Way{{Name: "objects"}, {Name: "network connect"}}, [][]float64{{2, 4, 2}, {4, 6, 6}})
	var b strings.Builder
	ConnectReport{Overlay: "vxlan", Pairs: 3, Rows: rows}.Write(&b)
	assert.Equal(t, b.String(), `
from the beginning to the first answer of a pod, vxlan overlay
  3 interleaved pairs: median (smallest–largest)
                                  time         to objects
  objects           2.00 s (2.00–4.00)   1.00 (1.00–1.00)
  network connect   6.00 s (4.00–6.00)   2.00 (1.50–3.00)

Compare ratios: the times are this machine's.
`)
}
