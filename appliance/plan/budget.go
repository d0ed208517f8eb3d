package plan

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"text/template"
	"text/template/parse"
)

// templateBudget is what filling in one gateway template may cost, in
// characters: those of the actions, each time that one is executed, and those
// that are written or handed to a function. The chart's own templates cost less
// than 3,000. What costs a hundred times as much takes some milliseconds.
const templateBudget = 1 << 18

// errBudget is returned for a template that would never end, or fill the
// memory: nothing else can be planned meanwhile.
var errBudget = fmt.Errorf("it takes more than %d characters to fill the template in: let no range and no template of it repeat so much", templateBudget)

// errFormat is returned for a format that makes much of little.
var errFormat = errors.New("printf: a width or a precision has three digits at most, and is not *")

// A budget is what is left of templateBudget. text/template can't be
// interrupted, so what repeats itself in a template pays each time.
type budget struct{ left int }

func newBudget() *budget { return &budget{left: templateBudget} }

// spend takes n from the budget. No n gives anything back.
func (b *budget) spend(n int) error {
	if b.left -= max(n, 0); b.left < 0 {
		return errBudget
	}
	return nil
}

// spendName is the function that stands at the beginning of what can be
// repeated.
const spendName = "_spend"

// functions are those of text/template that make text, with their cost.
func (b *budget) functions() template.FuncMap {
	costs := func(f func(args ...any) string) func(args ...any) (string, error) {
		return func(args ...any) (string, error) {
			if _, err := b.spendArguments(args); err != nil {
				return "", err
			}
			return f(args...), nil
		}
	}
	return template.FuncMap{
		spendName: func(n int) (string, error) { return "", b.spend(n) },
		"printf":  b.printf,
		"print":   costs(fmt.Sprint), "println": costs(fmt.Sprintln),
		"html": costs(template.HTMLEscaper), "js": costs(template.JSEscaper), "urlquery": costs(template.URLQueryEscaper),
	}
}

// spendArguments takes the length of all arguments of a function, as text, and
// returns that of the longest.
func (b *budget) spendArguments(args []any) (longest int, err error) {
	for _, a := range args {
		n := len(fmt.Sprint(a))
		if err := b.spend(n); err != nil {
			return 0, err
		}
		longest = max(longest, n)
	}
	return longest, nil
}

// wide is a width or a precision in a format that is not to be.
var wide = regexp.MustCompile(`\*|[1-9][0-9]{3}`)

// printf is fmt.Sprintf. Each verb may write the longest argument once more,
// and as many as sixteen characters for one of it (%#v).
func (b *budget) printf(format string, args ...any) (string, error) {
	if wide.MatchString(format) {
		return "", errFormat
	}
	longest, err := b.spendArguments(args)
	if err != nil {
		return "", err
	}
	const width, most = 999, 16
	if len(format)+strings.Count(format, "%")*(width+most*longest) > b.left {
		return "", errBudget
	}
	out := fmt.Sprintf(format, args...)
	return out, b.spend(len(out))
}

// A limited writer fails when the budget is used up.
type limited struct {
	io.Writer
	*budget
}

// Write implements io.Writer.
func (l limited) Write(text []byte) (int, error) {
	if err := l.spend(len(text)); err != nil {
		return 0, err
	}
	return l.Writer.Write(text)
}

// parse parses one string of a gateway template: with the budget's functions,
// and so that what can be repeated pays for itself.
func (b *budget) parse(text string) (*template.Template, error) {
	if err := b.spend(len(text)); err != nil {
		return nil, err
	}
	t, err := template.New("").Option("missingkey=error").Funcs(b.functions()).Parse(text)
	if err != nil {
		return nil, err
	}
	for _, each := range t.Templates() {
		if err := errors.Join(b.payRanges(each.Root), b.pay(each.Root)); err != nil { // it may call itself
			return nil, err
		}
	}
	return t, nil
}

// payRanges has the bodies of all ranges in a list pay.
func (b *budget) payRanges(list *parse.ListNode) error {
	if list == nil {
		return nil
	}
	for _, node := range list.Nodes {
		var branch *parse.BranchNode
		switch node := node.(type) {
		case *parse.IfNode:
			branch = &node.BranchNode
		case *parse.WithNode:
			branch = &node.BranchNode
		case *parse.RangeNode:
			branch = &node.BranchNode
			if err := b.pay(branch.List); err != nil {
				return err
			}
		default:
			continue
		}
		if err := errors.Join(b.payRanges(branch.List), b.payRanges(branch.ElseList)); err != nil {
			return err
		}
	}
	return nil
}

// pay puts before a list what takes its length from the budget, and takes it once
// for itself: lists in lists are long together.
func (b *budget) pay(list *parse.ListNode) error {
	n := len(list.String())
	if err := b.spend(n); err != nil {
		return err
	}
	payment, err := template.New("").Funcs(b.functions()).Parse(fmt.Sprintf("{{%s %d}}", spendName, n+1))
	if err != nil {
		return err
	}
	list.Nodes = append(payment.Root.Nodes, list.Nodes...)
	return nil
}
