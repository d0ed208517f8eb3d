package world

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"

	"github.com/gorilla/websocket"
)

// Messages of a stream: the first is the request as JSON text, all others are
// binary and begin with their channel.
const (
	channelStdin = iota // empty: the end
	channelStdout
	channelStderr
	channelResize // JSON
	channelExit   // JSON, the last
)

type exitMessage struct {
	Code  int    `json:"code"`
	Error string `json:"error,omitempty"`
}

// A channelWriter writes to one channel of a connection.
type channelWriter struct {
	mu      *sync.Mutex
	conn    *websocket.Conn
	channel byte
}

func (w channelWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.conn.WriteMessage(websocket.BinaryMessage, append([]byte{w.channel}, b...)); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (w channelWriter) json(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

// serveStream runs one command over a websocket.
func serveStream(w http.ResponseWriter, r *http.Request, run ExecFunc) {
	upgrader := websocket.Upgrader{}
	conn, err := upgrader.Upgrade(w, r, nil)
	if err != nil {
		return // answered already
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()

	var req ExecRequest
	if err := conn.ReadJSON(&req); err != nil {
		return
	}
	var mu sync.Mutex
	exit := channelWriter{&mu, conn, channelExit}
	stdin, toStdin := io.Pipe()
	resize := make(chan Resize, 1)
	go func() {
		defer cancel() // the client is gone
		defer toStdin.Close()
		defer close(resize)
		for {
			_, b, err := conn.ReadMessage()
			if err != nil || len(b) == 0 {
				return
			}
			switch b[0] {
			case channelStdin:
				if len(b) == 1 {
					toStdin.Close()
				} else if _, err := toStdin.Write(b[1:]); err != nil {
					continue // the command has ended its input, not the stream
				}
			case channelResize:
				var s Resize
				if json.Unmarshal(b[1:], &s) == nil {
					select {
					case resize <- s:
					case <-ctx.Done():
					}
				}
			}
		}
	}()
	code, err := run(ctx, req, Streams{
		Stdin: stdin, Stdout: channelWriter{&mu, conn, channelStdout}, Stderr: channelWriter{&mu, conn, channelStderr}, Resize: resize,
	})
	stdin.Close()
	msg := exitMessage{Code: code}
	if err != nil {
		msg.Error = err.Error()
	}
	if exit.json(msg) == nil {
		mu.Lock()
		conn.WriteMessage(websocket.CloseMessage, websocket.FormatCloseMessage(websocket.CloseNormalClosure, ""))
		mu.Unlock()
	}
}

// runStream is the client's side of serveStream.
func runStream(ctx context.Context, conn *websocket.Conn, req ExecRequest, stdin io.Reader, stdout, stderr io.Writer, resize <-chan Resize) (int, error) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	defer conn.Close()
	if err := conn.WriteJSON(req); err != nil {
		return 0, err
	}
	var mu sync.Mutex
	in := channelWriter{&mu, conn, channelStdin}
	go func() {
		if stdin != nil {
			if _, err := io.Copy(in, stdin); err != nil {
				return
			}
		}
		in.Write(nil)
	}()
	done := make(chan struct{})
	defer close(done)
	go func() {
		w := channelWriter{&mu, conn, channelResize}
		for {
			select {
			case <-done:
				return
			case s, ok := <-resize:
				if !ok || w.json(s) != nil {
					return
				}
			}
		}
	}()
	for {
		_, b, err := conn.ReadMessage()
		if err != nil {
			if ctx.Err() != nil {
				return 0, ctx.Err()
			}
			return 0, err
		}
		if len(b) == 0 {
			continue
		}
		switch b[0] {
		case channelStdout:
			_, err = stdout.Write(b[1:])
		case channelStderr:
			_, err = stderr.Write(b[1:])
		case channelExit:
			var msg exitMessage
			if err := json.Unmarshal(b[1:], &msg); err != nil {
				return 0, err
			}
			if msg.Error != "" {
				return msg.Code, errors.New(msg.Error)
			}
			return msg.Code, nil
		}
		if err != nil {
			return 0, err
		}
	}
}
