package main

import (
	"bytes"
	"io"
	"sync"
)

// A sequence gives several writers one output without mixing what they write:
// what a later one writes is kept until those before it are closed.
type sequence struct {
	out   io.Writer
	mu    sync.Mutex
	parts []*part
}

// A part is one of the writers of a sequence.
type part struct {
	sequence *sequence
	kept     bytes.Buffer
	closed   bool
}

func newSequence(out io.Writer) *sequence { return &sequence{out: out} }

// add adds a writer behind the others.
func (q *sequence) add() *part {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := &part{sequence: q}
	q.parts = append(q.parts, p)
	return p
}

// Write writes, or keeps.
func (p *part) Write(b []byte) (int, error) {
	q := p.sequence
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.turn() == p {
		return q.out.Write(b)
	}
	return p.kept.Write(b)
}

// Close lets those behind it write.
func (p *part) Close() error {
	q := p.sequence
	q.mu.Lock()
	defer q.mu.Unlock()
	p.closed = true
	for _, other := range q.parts {
		if _, err := other.kept.WriteTo(q.out); err != nil {
			return err
		}
		if !other.closed {
			break
		}
	}
	return nil
}

// turn is the first part that is not closed.
func (q *sequence) turn() *part {
	for _, p := range q.parts {
		if !p.closed {
			return p
		}
	}
	return nil
}
