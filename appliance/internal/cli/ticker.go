package cli

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/term"
)

// isTerminal reports whether a stream is one.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// A ticker tells what was done, a line each, and what is waited for: on a terminal
// in one line that is written over, elsewhere in a line whenever that is news and
// has lasted.
type ticker struct {
	out      io.Writer
	terminal bool
	width    int

	mu    sync.Mutex
	text  string    // what is waited for
	since time.Time // since when
	shown string    // of what is waited for: what was printed last
}

func newTicker(out io.Writer) *ticker {
	t := &ticker{out: out, terminal: isTerminal(out), width: 80}
	if t.terminal {
		if w, _, err := term.GetSize(int(out.(*os.File).Fd())); err == nil && w > 0 {
			t.width = w
		}
	}
	return t
}

// say prints what was done.
func (t *ticker) say(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.clear()
	t.text = ""
	if t.terminal {
		text = "✓ " + text
	}
	fmt.Fprintln(t.out, text)
}

// waiting tells what is waited for now.
func (t *ticker) waiting(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if text != t.text {
		t.text, t.since = text, time.Now()
	}
	waited := time.Since(t.since)
	if t.terminal {
		// The end of a line that is too long is missing, and not how long it has been.
		line := []rune(fmt.Sprintf("… %v %s", waited.Round(time.Second), text))
		if now := string(line[:min(len(line), t.width-1)]); now != t.shown {
			t.clear()
			t.shown = now
			fmt.Fprint(t.out, now)
		}
		return
	}
	if waited >= patience && t.shown != text {
		t.shown = text
		fmt.Fprintln(t.out, text)
	}
}

// clear takes the line of what is waited for away.
func (t *ticker) clear() {
	if t.terminal && t.shown != "" {
		fmt.Fprint(t.out, "\r\x1b[K")
		t.shown = ""
	}
}

// end leaves a terminal as it was.
func (t *ticker) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.clear()
}
