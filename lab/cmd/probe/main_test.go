package main

import (
	"bufio"
	"bytes"
	"io"
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// Names come from /etc/hosts here, as from any resolver.
func TestAddressOf(t *testing.T) {
	for _, tt := range []struct{ to, want, err string }{
		{"10.1.0.5", "10.1.0.5:8080", ""},
		{"10.1.0.5:80", "10.1.0.5:80", ""},
		{"fd00::5", "[fd00::5]:8080", ""},
		{"[fd00::5]:80", "[fd00::5]:80", ""},
		{"localhost:80", ":80", ""},
		{"localhost", ":8080", ""},
		{"localhost:http", "", `"http" is not a port`},
		{"localhost:65536", "", `"65536" is not a port`},
		{"", "", "write an address, or a name"},
	} {
		got, err := addressOf(t.Context(), tt.to, 8080)
		if tt.err != "" {
			assert.Check(t, is.ErrorContains(err, tt.err), tt.to)
			continue
		}
		assert.NilError(t, err, tt.to)
		assert.Check(t, strings.HasSuffix(got.String(), tt.want), "%s: %s", tt.to, got)
		if strings.HasPrefix(tt.to, "localhost") {
			assert.Check(t, got.Addr().IsLoopback(), "%s: %s", tt.to, got)
		}
	}
}

func TestLookup(t *testing.T) {
	var out bytes.Buffer
	cmd := newRoot()
	cmd.SetArgs([]string{"lookup", "localhost"})
	cmd.SetOut(&out)
	assert.NilError(t, cmd.ExecuteContext(t.Context()))
	for line := range strings.Lines(out.String()) {
		a, err := netip.ParseAddr(strings.TrimSpace(line))
		assert.NilError(t, err)
		assert.Check(t, a.IsLoopback(), line)
	}
	assert.Check(t, out.Len() > 0)
}

// TestServeUntilEOF: with --until-eof, a server of load ends with its input.
func TestServeUntilEOF(t *testing.T) {
	in, toServer := io.Pipe()
	fromServer, out := io.Pipe()
	cmd := newRoot()
	cmd.SetArgs([]string{"load", "serve", "--until-eof", "--listen", "127.0.0.1:0"})
	cmd.SetIn(in)
	cmd.SetOut(out)
	ended := make(chan error, 1)
	go func() {
		err := cmd.ExecuteContext(t.Context())
		out.CloseWithError(err)
		ended <- err
	}()
	line, err := bufio.NewReader(fromServer).ReadString('\n')
	assert.NilError(t, err)
	assert.Assert(t, is.Contains(line, "127.0.0.1:"))
	assert.NilError(t, toServer.Close())
	assert.NilError(t, <-ended)
}
