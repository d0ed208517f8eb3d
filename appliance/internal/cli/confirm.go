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
	type answer struct {
		line string
		err  error
	}
	got := make(chan answer, 1)
	go func() { // a read that nobody ends: it lasts as long as the process
		line, err := p.lines.ReadString('\n')
		got <- answer{line, err}
	}()
	select {
	case <-ctx.Done():
		fmt.Fprintln(p.err)
		return false, ctx.Err()
	case a := <-got:
		if a.err != nil && strings.TrimSpace(a.line) == "" {
			fmt.Fprintln(p.err)
			return false, errNoAnswer
		}
		return slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(a.line))), nil
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
