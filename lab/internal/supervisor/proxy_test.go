package supervisor

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

// TestProxyAnswersEarly: an agent may answer before it has the whole request.
// The answer is not cut off.
func TestProxyAnswersEarly(t *testing.T) {
	answer := bytes.Repeat([]byte("sighting "), 1<<20)
	inside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Check(t, http.NewResponseController(w).EnableFullDuplex())
		_, err := w.Write(answer)
		assert.Check(t, err)
		assert.Check(t, http.NewResponseController(w).Flush())
		_, err = io.Copy(io.Discard, r.Body)
		assert.Check(t, err)
	}))
	defer inside.Close()
	l := &lab{agent: &agent{dial: func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", inside.Listener.Addr().String())
	}}}
	outside := httptest.NewServer(l.proxy())
	defer outside.Close()

	conn, err := net.Dial("tcp", outside.Listener.Addr().String())
	assert.NilError(t, err)
	defer conn.Close()
	assert.NilError(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: lab\r\nContent-Length: 2\r\n\r\n{")
	assert.NilError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	assert.NilError(t, err, "there is no answer before the request has ended")
	defer resp.Body.Close()
	_, err = io.WriteString(conn, "}")
	assert.NilError(t, err)
	got, err := io.ReadAll(resp.Body)
	assert.NilError(t, err)
	assert.Equal(t, len(got), len(answer))
}
