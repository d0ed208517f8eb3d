package scenario

import (
	"fmt"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
)

// A Lack is what a world has not, and who asks for it first.
type Lack struct {
	What string // the same for all who ask for it
	At   string // a step and what it does or expects, or a sabotage; empty: all of a scenario
}

// FirstLack is the first of a row's actions and expectations that a world has not
// what it takes for. The two functions say what that is, or nothing.
func (s *Scenario) FirstLack(r Row, action func(Action) string, expectation func(expect.Expectation) string) (lack Lack, ok bool) {
	for _, st := range s.Build(r) {
		for _, a := range st.Do {
			if why := action(a); why != "" {
				return Lack{why, fmt.Sprintf("step %q: %s", st.Name, a)}, true
			}
		}
		for _, e := range st.Expect {
			if why := expectation(e.Expectation); why != "" {
				return Lack{why, fmt.Sprintf("step %q: expect %s", st.Name, e)}, true
			}
		}
	}
	return Lack{}, false
}
