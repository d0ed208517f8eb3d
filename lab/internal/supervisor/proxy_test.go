package supervisor

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

// TestAnswerBeforeEndOfRequest: an agent that answers before the request has
// ended is heard to the end.
func TestAnswerBeforeEndOfRequest(t *testing.T) {
	const question, answer = "question", 1 << 20
	agentServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Check(t, http.NewResponseController(w).EnableFullDuplex())
		_, err := io.ReadFull(r.Body, make([]byte, len(question)))
		assert.Check(t, err)
		_, err = io.WriteString(w, strings.Repeat("x", answer))
		assert.Check(t, err)
	}))
	defer agentServer.Close()
	l := &lab{agent: &agent{dial: func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", agentServer.Listener.Addr().String())
	}}}
	front := httptest.NewServer(l.proxy())
	defer front.Close()

	defer agentServer.CloseClientConnections()
	defer front.CloseClientConnections()

	body, more := io.Pipe()
	defer more.Close()
	go io.WriteString(more, question)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, front.URL, body)
	assert.NilError(t, err)
	resp, err := http.DefaultClient.Do(req)
	assert.NilError(t, err)
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	assert.NilError(t, err)
	assert.Equal(t, len(got), answer)
}
