package exchange

import (
	"testing"

	"gotest.tools/v3/assert"
)

// FuzzDecode: whatever a peer sends, what is taken of it can be written again, means the same
// then, and is within the bounds.
func FuzzDecode(f *testing.F) {
	whole, err := Encode(full())
	assert.NilError(f, err)
	f.Add(whole)
	for _, text := range []string{
		``, `{}`, `null`, `[]`, `{"version":1,"program":"v1"}`, `{"version":9,"program":"v9","new":[1,{}]}`,
		`{"version":1,"program":"v1","networks":{"pod":["::ffff:10.0.0.0/112"]}}`, `{"version":1,"program":"v1","networks":{"pod":["0.0.0.0/0"]}}`,
		`{"version":1,"program":"v1","endpoint":{"addresses":["::ffff:192.0.2.1"],"port":1}}`, `{"VERSION":1,"Program":"v1","version":2}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Decode(b)
		if err != nil {
			assert.DeepEqual(t, m, Message{}, cmpPrefix)
			return
		}
		again, err := Encode(m)
		if err != nil {
			// JSON may be shorter than ours is: without empty lists, for one.
			assert.Assert(t, len(b) > MaxMessage/2, "%v: %s", err, b)
			return
		}
		n, err := Decode(again)
		assert.NilError(t, err)
		assert.Assert(t, m.Equal(n), "%s: %+v is not %+v", b, n, m)
		if m.Endpoint != nil {
			for _, a := range m.Endpoint.Addresses {
				assert.Assert(t, dialled(a), "%q", a)
			}
		}
	})
}
