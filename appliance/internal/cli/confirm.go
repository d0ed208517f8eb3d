package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// errNoAnswer is the error for a question that nobody has answered: the input has ended.
var errNoAnswer = errors.New("nobody has answered")

// confirm asks a question whose answer is yes or no; an empty line is a no. It returns
// errNoAnswer, or the error of ctx when that is done first, which is when somebody presses
// Ctrl-C.
func (p *program) confirm(ctx context.Context, question string) (bool, error) {
	fmt.Fprintf(p.err, "%s [y/N] ", question)
	if p.lines == nil {
		p.lines = bufio.NewReader(p.in) // one, since it reads ahead
	}
	line, err := typed(ctx, func() (string, error) { return p.lines.ReadString('\n') })
	line = strings.ToLower(strings.TrimSpace(line))
	if err != nil && line == "" {
		fmt.Fprintln(p.err) // the question's line has no end yet
		if ctx.Err() == nil {
			err = errNoAnswer
		}
		return false, err
	}
	return slices.Contains([]string{"y", "yes"}, line), nil
}

// typed returns what read reads of a person, or an error when ctx is done first. A read that
// nobody answers then goes on until the process ends.
func typed[T any](ctx context.Context, read func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	got := make(chan result, 1)
	go func() {
		value, err := read()
		got <- result{value, err}
	}()
	select {
	case <-ctx.Done():
		var none T
		return none, fmt.Errorf("interrupted: %w", ctx.Err())
	case r := <-got:
		return r.value, r.err
	}
}

// confirmed asks whether to go on, where there is somebody to ask and nobody has said yes
// beforehand.
func (p *program) confirmed(ctx context.Context, yes bool, question string) bool {
	if yes || p.json || !isTerminal(p.in) {
		return true
	}
	yes, _ = p.confirm(ctx, question)
	return yes
}
