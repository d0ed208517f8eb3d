package probe

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

// Whatever comes from the peer's address: it is refused, or it is a PING, whose
// answer is a PONG that fits into a datagram, or it is a PONG, which counts only
// for a probe that was sent.
func FuzzMessage(f *testing.F) {
	for _, text := range []string{
		`{"clusterID":"rome","msgType":"PING","timeStamp":"2026-03-14T13:00:00.5+01:00","mtu":1420}`,
		`{"clusterID":"rome","msgType":"PONG","timeStamp":"2026-03-14T12:00:00Z"}`,
		`{"msgType":"PING","timeStamp":"2026-03-14T13:00:00Z","nonce":[1,{"a":null}]}`,
		`{"msgtype":"PING"}`, `{"MSGTYPE":"PONG","msgType":"PING"}`, "{\"m\u017fgType\":\"PING\"}",
		`null`, `[]`, `{"msgType":7}`, `{"msgType":"PING","mtu":1e9}`, `{"msgType":"PING","mtu":-1}`, `{"msgType":"PONG","timeStamp":"9999-12-31T23:59:59Z"}`, "",
	} {
		f.Add([]byte(text))
	}
	sent := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:min(len(b), maxMessage)] // what is read of it
		m, err := decode(b)
		if err != nil {
			return
		}
		if m.Type == typePong {
			track := newTracker(12*time.Second, 5)
			stamp := track.send(sent, false)
			_, counts := track.receive(sent.Add(time.Millisecond), m.Time)
			assert.Equal(t, counts, m.Time.UnixNano() == stamp.UnixNano())
			return
		}
		assert.Equal(t, m.Type, typePing)
		reply, err := answer(b)
		if err != nil {
			return
		}
		assert.Assert(t, len(reply) <= maxMessage, "%d bytes", len(reply))
		r, err := decode(reply)
		assert.NilError(t, err, "%s", reply)
		assert.Equal(t, r.Type, typePong, "%s", reply)
	})
}
