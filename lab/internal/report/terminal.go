package report

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// MarshalJSON writes seconds with three digits.
func (d Duration) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%.3f", time.Duration(d).Seconds()), nil
}

// UnmarshalJSON reads seconds.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s float64
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	*d = Duration(math.Round(s*1000)) * Duration(time.Millisecond)
	return nil
}

// String is for people: 0.8s, 12.4s, 2m05s.
func (d Duration) String() string {
	t := time.Duration(d)
	if t >= time.Minute {
		return fmt.Sprintf("%dm%02ds", int(t.Minutes()), int(t.Seconds())%60)
	}
	return fmt.Sprintf("%.1fs", t.Seconds())
}

// PrintScenario prints one line when all its rows went as they should, and
// what went wrong otherwise.
func PrintScenario(w io.Writer, s Scenario, run Run) {
	c := count(s.Rows)
	var took time.Duration
	for _, r := range s.Rows {
		took += time.Duration(r.Took)
	}
	rows := times(len(s.Rows), "row", "rows")
	if s.Sabotage {
		rows = times(len(s.Rows), "sabotage", "sabotages")
	}
	switch {
	case c[Fail]+c[XPass]+c[Infra] > 0:
		fmt.Fprintf(w, " ✗ %-24s %-12s %s\n", s.Name, rows, Duration(took))
	case c[Pass]+c[XFail] > 0:
		fmt.Fprintf(w, " ✓ %-24s %-12s %s%s\n", s.Name, rows, Duration(took), retried(s.Rows))
	case slices.ContainsFunc(s.Rows, func(r Row) bool { return r.Reason != s.Rows[0].Reason }):
		fmt.Fprintf(w, " – %-24s skipped:\n", s.Name)
	default:
		fmt.Fprintf(w, " – %-24s skipped: %s\n", s.Name, s.Rows[0].Reason)
		return
	}
	said := map[string]bool{}
	for _, r := range s.Rows {
		switch r.Verdict {
		case Infra:
			if said[r.Reason] {
				fmt.Fprintf(w, "   ✗ %s  the same\n", r.Name)
				continue
			}
			said[r.Reason] = true
			printRow(w, s, r, run)
		case Fail, XPass:
			printRow(w, s, r, run)
		case XFail, Skip:
			fmt.Fprintf(w, "     – %s %s: %s\n", r.Name, r.Verdict, r.Reason)
		}
	}
}

func retried(rows []Row) string {
	n := 0
	for _, r := range rows {
		n += len(r.Retried)
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("   (%s after errors of the lab)", times(n, "retry", "retries"))
}

func times(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

func printRow(w io.Writer, sc Scenario, r Row, run Run) {
	fmt.Fprintf(w, "   ✗ %s  %s\n", r.Name, r.Took)
	if r.Sabotage != "" {
		fmt.Fprintf(w, "       sabotage   %s\n", r.Sabotage)
	}
	if r.Verdict == Infra {
		field(w, "the lab", r.Reason)
	} else if r.Reason != "" {
		field(w, "", r.Reason)
	}
	for i, s := range r.Steps {
		if len(s.Failures) == 0 || sc.Sabotage {
			continue
		}
		fmt.Fprintf(w, "     step %d  %s\n", i+1, s.Name)
		for _, f := range s.Failures {
			printFault(w, f)
		}
	}
	pattern := r.Name
	if r.Bundle != "" {
		field(w, "evidence", r.Bundle)
	}
	world := ""
	if sc.World != "" {
		world = " --world " + sc.World
	}
	sabotage := ""
	if sc.Sabotage {
		sabotage = " --sabotage"
	}
	field(w, "again", fmt.Sprintf("lab run %s --seed %s%s%s %s", pattern, run.Seed, world, sabotage, cmp.Or(run.Again, "--keep")))
	switch {
	case r.Bundle == "":
	case r.NoPackets:
		field(w, "packets", "none: this world captures nothing; logs, objects and the state of hosts are in "+r.Bundle)
	default:
		field(w, "packets", readPackets(r))
	}
}

// readPackets is how to look at the packets of a row. tcpdump refuses the file:
// WireGuard's interfaces have no Ethernet header, and the others have one. The
// file has every packet once for each interface that it passed, so only those of
// the host where a path ended are asked for.
func readPackets(r Row) string {
	file, only := r.Bundle+"/capture.pcapng", ""
	if host := lastSeen(r); host != "" {
		only = fmt.Sprintf(` -Y 'frame.interface_name contains "%s:"'`, host)
	}
	return fmt.Sprintf("tshark -nr %s%s | less\nwireshark %s", file, only, file)
}

// lastSeen is the last host that saw the packet, or the reply to it, of the
// first expectation that knows, or nothing.
func lastSeen(r Row) string {
	for _, s := range r.Steps {
		for _, f := range s.Failures {
			if all := slices.Concat(f.Path, f.Reply); len(all) > 0 {
				return all[len(all)-1]
			}
		}
	}
	return ""
}

func printFault(w io.Writer, f Fault) {
	field(w, "expect", f.Expectation+placeOf(f))
	field(w, "want", f.Want)
	field(w, "got", f.Got)
	field(w, "why", f.Why)
	if len(f.Path) > 0 || len(f.Reply) > 0 {
		reply := "none"
		if len(f.Reply) > 0 {
			reply = strings.Join(f.Reply, " ─ ")
		}
		path := "none"
		if len(f.Path) > 0 {
			path = strings.Join(f.Path, " ─ ")
		}
		field(w, "path", path)
		field(w, "reply", reply)
	}
}

func placeOf(f Fault) string {
	if f.Place == "" {
		return ""
	}
	return "  (" + f.Place + ")"
}

// field prints a name and a value that may have several lines.
func field(w io.Writer, name, value string) {
	if value == "" {
		return
	}
	for i, line := range strings.Split(strings.TrimRight(value, "\n"), "\n") {
		if i > 0 {
			name = ""
		}
		fmt.Fprintf(w, "       %-9s %s\n", name, line)
	}
}

// worthSaying is the slowdown of a machine from which on the last line names it.
const worthSaying = 1.5

// PrintSummary prints what failed of several rows, what was tried again and why, and
// which bounds of rows were exceeded by less than is allowed on a slow machine, a line
// each, and then the last line of a run. What a sabotage does to a stream is meant.
func PrintSummary(w io.Writer, run Run) {
	var rows, sabotages []Row
	for _, s := range run.Scenarios {
		if s.Sabotage {
			sabotages = append(sabotages, s.Rows...)
		} else {
			rows = append(rows, s.Rows...)
		}
	}
	if len(rows)+len(sabotages) > 1 {
		printFailures(w, run)
	}
	var parts []string
	if len(rows) > 0 || len(sabotages) == 0 {
		parts = append(parts, verdicts(times(len(rows), "row", "rows"), rows))
	}
	if len(sabotages) > 0 {
		parts = append(parts, verdicts(times(len(sabotages), "sabotage", "sabotages"), sabotages))
	}
	retries, leftOut, outOfTime, excused := 0, 0, 0, 0
	for _, l := range run.Labs {
		retries += len(l.Retried)
		leftOut += len(l.LeftOut)
		outOfTime += len(l.OutOfTime)
	}
	for _, r := range slices.Concat(rows, sabotages) {
		retries += len(r.Retried)
	}
	for _, r := range rows {
		for _, st := range r.Steps {
			excused += len(st.Excused)
		}
	}
	if leftOut > 0 {
		parts = append(parts, times(leftOut, "sabotage", "sabotages")+" not made: the time of --sabotage-time was over before their turn")
	}
	if outOfTime > 0 {
		parts = append(parts, times(outOfTime, "row or sabotage", "rows and sabotages")+" left out: the time of --time was over before their turn")
	}
	if retries > 0 {
		parts = append(parts, times(retries, "retry", "retries")+" after errors of the lab")
	}
	if run.Slowdown >= worthSaying {
		parts = append(parts, fmt.Sprintf("the machine was busy: work took %.1f times as long as when it is idle, and bounds of steps were as much longer", run.Slowdown))
	}
	if excused > 0 {
		parts = append(parts, times(excused, "bound was", "bounds were")+" exceeded, but by less than is allowed on a machine as slow as this one")
	}
	fmt.Fprintf(w, "%s · %s\n", strings.Join(parts, "; "), run.Took)
}

// printFailures prints a line for each lab and row that failed, and for each error
// of the lab after which something was tried again. Where labs run beside each
// other, nobody could find them between the others. What failed with its lab is
// counted in the line of the lab, which says why.
func printFailures(w io.Writer, run Run) {
	dead := func(s Scenario, r Row) bool {
		return slices.ContainsFunc(run.Labs, func(l Lab) bool { return l.ended(s, r) })
	}
	for _, l := range run.Labs {
		for _, why := range l.Retried {
			fmt.Fprintf(w, "again: lab %s: %s\n", l.Name, brief(why, lineOfLab))
		}
		if l.Error != "" {
			fmt.Fprintf(w, "failed: lab %s%s: %s\n", l.Name, withIt(run, l), brief(l.Error, lineOfLab))
		}
		if l.Left != "" {
			fmt.Fprintf(w, "failed: lab %s is not all gone: %s\n", l.Name, brief(l.Left, lineOfLab))
		}
	}
	for _, s := range run.Scenarios {
		for _, r := range s.Rows {
			name := r.Name
			if s.World != "" {
				name += fmt.Sprintf(" (%s)", strings.TrimSuffix(s.World+" "+s.Overlay, " "))
			}
			if r.Sabotage != "" {
				name += fmt.Sprintf(" [%s]", brief(r.Sabotage, lineOfRow))
			}
			for _, why := range r.Retried {
				fmt.Fprintf(w, "again: %s: %s\n", name, brief(why, lineOfRow))
			}
			switch {
			case dead(s, r):
			case r.Verdict == Fail, r.Verdict == XPass:
				fmt.Fprintf(w, "failed: %s: %s\n", name, brief(r.FirstFault(), lineOfRow))
			case r.Verdict == Infra:
				fmt.Fprintf(w, "not judged: %s: %s\n", name, brief(r.Reason, lineOfRow))
			}
			if s.Sabotage {
				continue
			}
			for _, st := range r.Steps {
				for _, e := range st.Excused {
					fmt.Fprintf(w, "exceeded: %s: %s: %s\n", name, st.Name, brief(e, lineOfRow))
				}
			}
		}
	}
}

// ended reports whether a row was not run because l had failed.
func (l Lab) ended(s Scenario, r Row) bool {
	return l.Error != "" && r.Reason == l.Error && s.World == l.World && s.Overlay == l.Overlay
}

// withIt counts the rows and sabotages that failed with a lab.
func withIt(run Run, l Lab) string {
	rows, sabotages := 0, 0
	for _, s := range run.Scenarios {
		for _, r := range s.Rows {
			switch {
			case !l.ended(s, r):
			case s.Sabotage:
				sabotages++
			default:
				rows++
			}
		}
	}
	var parts []string
	if rows > 0 {
		parts = append(parts, times(rows, "row", "rows"))
	}
	if sabotages > 0 {
		parts = append(parts, times(sabotages, "sabotage", "sabotages"))
	}
	if len(parts) == 0 {
		return ""
	}
	return " with its " + strings.Join(parts, " and ")
}

// How many characters of a reason are printed in the line of a row, and in that of
// a lab, which stands for many rows.
const (
	lineOfRow = 400
	lineOfLab = 1500
)

// brief is a text in one line of so many characters at most. What is left out is
// in the middle: an error has its cause at the end.
func brief(s string, most int) string {
	r := []rune(strings.Join(strings.Fields(s), " "))
	if len(r) <= most {
		return string(r)
	}
	start, end := r[:most/3], r[len(r)-(most-most/3-3):]
	return strings.TrimSpace(string(start)) + " … " + strings.TrimSpace(string(end))
}

// verdicts says how many rows ended how.
func verdicts(what string, rows []Row) string {
	c := count(rows)
	parts := []string{fmt.Sprintf("%d passed", c[Pass])}
	for _, v := range []Verdict{Fail, XFail, XPass, Skip, Infra} {
		if c[v] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", c[v], map[Verdict]string{
				Fail: "failed", XFail: "failed as known", XPass: "passed unexpectedly", Skip: "skipped", Infra: "not judged: the lab failed",
			}[v]))
		}
	}
	return what + ": " + strings.Join(parts, ", ")
}

func count(rows []Row) map[Verdict]int {
	c := map[Verdict]int{}
	for _, r := range rows {
		c[r.Verdict]++
	}
	return c
}

// ExitCode is what a run ends with. In CI a skip is a failure. What a lab has left is
// the lab's.
func (run Run) ExitCode(ci bool) int {
	ran, failed, infra := false, false, false
	for _, s := range run.Scenarios {
		for _, r := range s.Rows {
			ran = ran || r.Verdict != Skip
			failed = failed || r.Verdict.Failed(ci)
			infra = infra || r.Verdict == Infra
		}
	}
	infra = infra || slices.ContainsFunc(run.Labs, func(l Lab) bool { return l.Left != "" })
	switch {
	case failed:
		return ExitFail
	case infra:
		return ExitInfra
	case !ran:
		return ExitNone
	}
	return ExitPass
}
