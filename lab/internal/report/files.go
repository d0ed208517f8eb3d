package report

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// A Dir is the directory of a run: runs/<time>-<seed>, with runs/latest
// pointing to it.
type Dir struct{ Path string }

// NewDir makes the directory of a run.
func NewDir(runs string, started time.Time, seed string) (Dir, error) {
	name := started.UTC().Format("20060102T150405") + "-" + seed
	path := filepath.Join(runs, name)
	if err := os.MkdirAll(path, 0o755); err != nil {
		return Dir{}, noSpace(runs, fmt.Errorf("directory for the results: %w", err))
	}
	latest := filepath.Join(runs, "latest")
	next := latest + "." + seed
	if err := os.Symlink(name, next); err != nil {
		return Dir{}, noSpace(runs, fmt.Errorf("link to the results: %w", err))
	}
	if err := os.Rename(next, latest); err != nil {
		return Dir{}, fmt.Errorf("link to the results: %w", err)
	}
	return Dir{path}, nil
}

// noSpace adds what to do to an error for want of disk space.
func noSpace(runs string, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: there is no space left for results: remove old ones in %s", err, runs)
	}
	return err
}

// WriteResult writes result.json, and in summary.txt what PrintSummary prints.
func (d Dir) WriteResult(run Run) error {
	var summary strings.Builder
	PrintSummary(&summary, run)
	if err := os.WriteFile(filepath.Join(d.Path, "summary.txt"), []byte(summary.String()), 0o644); err != nil {
		return d.noSpace(err)
	}
	f, err := os.Create(filepath.Join(d.Path, "result.json"))
	if err != nil {
		return d.noSpace(err)
	}
	defer f.Close()
	if err := WriteJSON(f, run); err != nil {
		return d.noSpace(err)
	}
	return d.noSpace(f.Close())
}

func (d Dir) noSpace(err error) error { return noSpace(filepath.Dir(d.Path), err) }

// WriteJSON writes a run as indented JSON.
func WriteJSON(w io.Writer, run Run) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(run)
}

// ReadResult reads the result.json of a run.
func ReadResult(path string) (Run, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return Run{}, err
	}
	var run Run
	if err := json.Unmarshal(b, &run); err != nil {
		return Run{}, fmt.Errorf("%s: %w", path, err)
	}
	return run, nil
}

// RowDir makes the directory for the evidence of a row.
func (d Dir) RowDir(r Row) (string, error) {
	path := filepath.Join(d.Path, filepath.FromSlash(r.Name))
	if r.Sabotage != "" {
		path = filepath.Join(path, "sabotage")
	}
	return path, d.noSpace(os.MkdirAll(path, 0o755))
}

type junitSuites struct {
	XMLName xml.Name     `xml:"testsuites"`
	Tests   int          `xml:"tests,attr"`
	Fails   int          `xml:"failures,attr"`
	Errors  int          `xml:"errors,attr"`
	Skipped int          `xml:"skipped,attr"`
	Time    string       `xml:"time,attr"`
	Suites  []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name    string      `xml:"name,attr"`
	Tests   int         `xml:"tests,attr"`
	Fails   int         `xml:"failures,attr"`
	Errors  int         `xml:"errors,attr"`
	Skipped int         `xml:"skipped,attr"`
	Time    string      `xml:"time,attr"`
	Cases   []junitCase `xml:"testcase"`
}

type junitCase struct {
	Class      string           `xml:"classname,attr"`
	Name       string           `xml:"name,attr"`
	File       string           `xml:"file,attr,omitempty"`
	Time       string           `xml:"time,attr"`
	Properties *junitProperties `xml:"properties"`
	Failure    *junitMessage    `xml:"failure"`
	Error      *junitMessage    `xml:"error"`
	Skipped    *junitMessage    `xml:"skipped"`
	Out        string           `xml:"system-out,omitempty"`
}

type junitProperties struct {
	Properties []junitProperty `xml:"property"`
}

type junitProperty struct {
	Name  string `xml:"name,attr"`
	Value string `xml:"value,attr"`
}

// retriedProperty has, once for each time that something was tried again, the
// error of the lab that was the reason.
const retriedProperty = "retried"

func retriedProperties(reasons []string) *junitProperties {
	if len(reasons) == 0 {
		return nil
	}
	var out junitProperties
	for _, r := range reasons {
		out.Properties = append(out.Properties, junitProperty{retriedProperty, r})
	}
	return &out
}

type junitMessage struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes a run as JUnit XML: a suite per scenario with a case per row,
// and the suite labs with a case per lab.
func WriteJUnit(w io.Writer, run Run) error {
	all := junitSuites{Time: seconds(run.Took)}
	if len(run.Labs) > 0 {
		all.add(labsSuite(run.Labs))
	}
	for _, s := range run.Scenarios {
		suite := junitSuite{Name: s.Name}
		var took Duration
		for _, r := range s.Rows {
			took += r.Took
			suite.add(s, r)
		}
		suite.Time = seconds(took)
		all.add(suite)
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	e := xml.NewEncoder(w)
	e.Indent("", "  ")
	if err := e.Encode(all); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}

func (all *junitSuites) add(suite junitSuite) {
	all.Tests += suite.Tests
	all.Fails += suite.Fails
	all.Errors += suite.Errors
	all.Skipped += suite.Skipped
	all.Suites = append(all.Suites, suite)
}

func labsSuite(labs []Lab) junitSuite {
	suite := junitSuite{Name: "labs", Tests: len(labs)}
	var took Duration
	for _, l := range labs {
		took += l.Took
		c := junitCase{Class: suite.Name, Name: l.Name, Time: seconds(l.Took), Properties: retriedProperties(l.Retried)}
		if l.Error != "" {
			c.Error = &junitMessage{l.Error, l.Error}
			suite.Errors++
		} else if l.Left != "" {
			c.Error = &junitMessage{l.Left, l.Left}
			suite.Errors++
		}
		suite.Cases = append(suite.Cases, c)
	}
	suite.Time = seconds(took)
	return suite
}

func (suite *junitSuite) add(s Scenario, r Row) {
	c := junitCase{Class: s.Name, Name: r.Name, File: s.File, Time: seconds(r.Took), Properties: retriedProperties(r.Retried)}
	if r.Sabotage != "" {
		c.Name += " [" + r.Sabotage + "]"
	}
	switch r.Verdict {
	case Fail, XPass:
		c.Failure = &junitMessage{r.FirstFault(), faults(r)}
		suite.Fails++
	case Infra:
		c.Error = &junitMessage{r.Reason, r.Reason}
		suite.Errors++
	case Skip, XFail:
		c.Skipped = &junitMessage{string(r.Verdict) + ": " + r.Reason, ""}
		suite.Skipped++
	}
	for _, st := range r.Steps {
		c.Out += fmt.Sprintf("%s (%s)\n", st.Name, st.Took)
		for _, n := range st.Notes {
			c.Out += "  " + n + "\n"
		}
		for _, e := range st.Excused {
			c.Out += "  exceeded: " + e + "\n"
		}
	}
	suite.Tests++
	suite.Cases = append(suite.Cases, c)
}

// FirstFault is what a row failed for: a sabotage has its reason, since its steps
// are those that held.
func (r Row) FirstFault() string {
	if r.Sabotage != "" && r.Reason != "" {
		return r.Reason
	}
	for _, s := range r.Steps {
		for _, f := range s.Failures {
			return s.Name + ": want " + f.Want + ", got " + f.Found()
		}
	}
	return r.Reason
}

func faults(r Row) string {
	var b strings.Builder
	for _, s := range r.Steps {
		for _, f := range s.Failures {
			printFault(&b, f)
		}
	}
	return b.String()
}

func seconds(d Duration) string { return fmt.Sprintf("%.3f", time.Duration(d).Seconds()) }
