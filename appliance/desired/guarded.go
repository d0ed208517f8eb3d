package desired

import (
	"fmt"
	"path"
	"runtime"
	"strings"
)

// guarded compiles one object. A panic in that, which is a bug of ours, is a problem
// of this object: all others go on.
func guarded[T any](compile func() (T, []string)) (out T, problems []string) {
	defer func() {
		if r := recover(); r != nil {
			var none T
			out, problems = none, []string{fmt.Sprintf("it can't be compiled, which is a bug of Isthmus (panic: %v at %s): write it another way or delete it, and report the bug", r, panicSite())}
		}
	}()
	return compile()
}

// panicSite returns the line that the panic which is being recovered from came from.
func panicSite() string {
	pcs := make([]uintptr, 32)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs)])
	panicked := false
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		ours := !strings.HasPrefix(f.Function, "runtime.")
		if panicked && ours {
			return fmt.Sprintf("%s:%d", path.Base(f.File), f.Line)
		}
		panicked = panicked || f.Function == "runtime.gopanic"
	}
	return "an unknown line"
}
