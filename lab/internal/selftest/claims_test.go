package selftest

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// Rows of claims.yaml, and the step in which each makes its claim.
const (
	rightly   = "claims/rightly/"
	wrongly   = "claims/wrongly/"
	claimStep = "the claim"
)

// lost is why a stream that loses messages is refused. One whose process stood still says that it is
// silent, or that it has not spoken, in place of a number: at least one of three must say the number.
const (
	lostNumber = `[1-9][0-9]* messages were lost`
	lost       = `(` + lostNumber + `|it is silent, for|it has not spoken yet since the step began)`
)

// wrongClaims says for each claim why the lab must refuse it when it is made
// wrongly.
func wrongClaims() map[string]reason {
	return map[string]reason{
		"reach-port":            {`reaches`, `got refused: the host answers, nothing listens there`},
		"reach-host":            {`user reaches milan/web`, `got (no answer within|network unreachable|ICMP )`},
		"reach-pod":             {`reaches rome/probe`, `got .*rome/web answered`},
		"reach-cluster":         {`reaches milan/web`, `got .*rome/web answered`},
		"reach-echo":            {`reaches rome/probe`, `got .*rome/web answered`},
		"unreachable-reached":   {`can't reach rome/web`, `got rome/web answered`},
		"unreachable-refused":   {`can't reach rome/web`, `got (refused|the connection was reset).*it is unreachable, but in another way than the row says`},
		"unreachable-unsent":    {`can't reach rome/web`, `the request did not leave milan/web`},
		"source":                {`rome/probe sees milan/probe`, `it saw [0-9.]+ \(milan/web`},
		"source-echo":           {`rome/probe sees milan/probe`, `it saw [0-9.]+ \(milan/web`},
		"conntrack-mark":        {`with the mark of milan/node-1`, `got mark 0`},
		"conntrack-host":        {`rome/web tracks`, `got no entry with replies of [0-9.]+ to port`},
		"mss":                   {`MSS 1460`, `got MSS 1400`},
		"mtu":                   {`is 1441, and the sender of a longer one is told`, `got 1440 bytes pass`},
		"mtu-above":             {`MTU .* is of any length, and longer ones vanish`, `longer ones vanish\ngot 1440 bytes pass; one more: error`},
		"rate":                  {`at least 1000000000 bytes per second`, `got [0-9]+ bytes per second`},
		"path-hop":              {`path`, `went from milan/gateway to rome/gateway instead of milan/router`},
		"path-end":              {`path`, `went from rome/node-2 to rome/probe instead of rome/node-1`},
		"path-inside":           {`inside vxlan`, `saw it on eth0, going out, by itself`},
		"path-symmetric":        {`and back`, `the reply went from milan/node-2 to milan/router instead of milan/node-1`},
		"never-readable":        {`nothing readable on rome/gateway`, `frames with the payload in clear text`},
		"never-elsewhere":       {`nothing readable on user`, `the encrypted packet that .* sent at .* did not pass user: it went another way`},
		"kubectl-is":            {`is node-2`, `got \{\.metadata\.name\} = "node-1"`},
		"kubectl-matches":       {`matches`, `got \{\.spec\.podCIDR\} = "10\.0\.`},
		"kubectl-absent-field":  {`without`, `got \{\.data\.it\} = "is so"`},
		"kubectl-absent-object": {`no configmap/selftest-has`, `got it exists`},
		"kubectl-exists":        {`node/node-3`, `got it does not exist`},
		"kubectl-mistyped":      {`podCDIR`, `there is no field "podCDIR".*did you mean "podCIDR"`},
		"kubectl-prints":        {`kubectl get node`, `"node/node-1" instead of "node/node-2"`},
		"kubectl-fails":         {`kubectl get node`, `succeeds\ngot .*not found.*exit code 1`},
		"event":                 {`event Normal of pod/selftest-nowhere`, `got [1-9]\d* other events since the row began.*Warning FailedScheduling pod/selftest-nowhere`},
		"event-before":          {`event Normal Scheduled of pod`, `got 0 other events since the row began, and [1-9]\d* from before`},
		"log":                   {`log of milan/gateway`, `got none of the [1-9][0-9]* lines since the row began`},
		"flow-alive":            {`flow it lives`, `(nothing came back for|it has not spoken yet since the step began)`},
		"flow-gap":              {`no silence over 1s`, `(silent for|it has not spoken yet since the step began)`},
		"flow-lost":             {`at most 0 lost`, lost},
		"flow-silent":           {`is silent for 1s`, `got it speaks`},
		"flow-lost-for":         {`at most those of 40ms lost`, lost},
		"flow-lost-percent":     {`at most 10 of 100 lost`, lost},
		"flow-whole":            {`no silence over 1s since it was opened`, `silent for`},
		"flow-answered":         {`answered by rome/probe`, `got it broke\nrome/web answered .*, not rome/probe`},
		"output-contains":       {`prints "it is not so"`, `got it is so`},
		"output-lacks":          {`does not print`, `got it is so`},
		"output-matches":        {`matches`, `got it is so`},
		"output-code":           {`exit code 0`, `\(exit code 3\)`},
		"output-fails":          {`on milan/node-1: echo it is so; exit 3`, `want exit code 0\ngot exit code 3`},
		"refused":               {`is refused`, `got the API server accepted it`},
		"gone":                  {`nothing is left over`, `1 things more.*\+ milan/node-1: .*selftest`},
		"same-kernels":          {`as in before`, `\+ milan/node-1: .*selftest`},
		"same-objects":          {`as in before`, `~ milan: Service default/kubernetes: metadata\.labels\.selftest`},
	}
}

// TestEveryKindIsClaimed: for each kind of expectation there is a claim that is
// wrong, and the same kind of claim that is right.
func TestEveryKindIsClaimed(t *testing.T) {
	s := loadOwn(t)["claims"]
	assert.Assert(t, s != nil)
	kinds := map[string]map[string]bool{rightly: {}, wrongly: {}}
	var claims []string
	for _, row := range s.Rows {
		for said, of := range kinds {
			claim, is := strings.CutPrefix(row.Name, said)
			if !is {
				continue
			}
			if said == wrongly {
				claims = append(claims, claim)
			}
			for _, st := range s.Build(row) {
				if st.Name == claimStep {
					assert.Equal(t, len(st.Expect), 1, row.Name)
					of[st.Expect[0].Name] = true
					// What these two fail at has the name of what the step does.
					if said == wrongly && claim != "output-fails" && claim != "refused" {
						want := wrongClaims()[claim].expectation
						assert.Check(t, matches(t, want, st.Expect[0].String()), "%s: wrongClaims looks for %q in the expectation, which is %q", row.Name, want, st.Expect[0])
					}
				}
			}
		}
	}
	for _, kind := range expect.Names() {
		for said, of := range kinds {
			assert.Check(t, of[kind], "%s is claimed nowhere in %s: add a claim of it to %s/claims.yaml", kind, said, ownScenarios)
		}
	}
	for _, claim := range claims {
		_, ok := wrongClaims()[claim]
		assert.Check(t, ok, "nothing says why the claim %s is wrong: add it to wrongClaims", claim)
	}
	for claim := range wrongClaims() {
		assert.Check(t, slices.Contains(claims, claim), "there is no claim %s in %s/claims.yaml", claim, ownScenarios)
	}
}

// TestLab: in one lab, wrong claims fail for their reasons and right ones pass;
// the sabotage that is proof passes, and those that are none fail.
func TestLab(t *testing.T) {
	needLab(t)
	t.Parallel()
	own, err := filepath.Abs(ownScenarios)
	assert.NilError(t, err)
	rows, sabotages := rowsOf(runLab(t, repository(t), "--scenarios", own, "--sabotage=after"))
	for claim, why := range wrongClaims() {
		t.Run(claim, func(t *testing.T) {
			failsFor(t, rows[wrongly+claim], claimStep, why)
			passes(t, rows[rightly+claim])
		})
	}
	counted := slices.ContainsFunc([]string{"flow-lost", "flow-lost-for", "flow-lost-percent"}, func(claim string) bool {
		return slices.ContainsFunc(rows[wrongly+claim].Steps, func(s report.Step) bool {
			return slices.ContainsFunc(s.Failures, func(f report.Fault) bool { return matches(t, lostNumber, f.Why) })
		})
	})
	assert.Check(t, counted, "no stream was refused for the number of messages that it lost")
	for _, s := range []string{"sabotages", "looks"} {
		passes(t, rows[s])
	}
	found := map[string]bool{}
	for _, sab := range ownSabotages() {
		t.Run(sab.what, func(t *testing.T) {
			for name, row := range sabotages {
				if !strings.Contains(name, sab.what) {
					continue
				}
				found[name] = true
				if sab.reason == "" {
					passes(t, row)
					return
				}
				assert.Equal(t, row.Verdict, report.Fail, row.Reason)
				assert.Check(t, matches(t, "^"+sab.reason, row.Reason), "the reason is %q", row.Reason)
				assert.Check(t, len(row.Retried) == 0, "it was tried again: %q", row.Retried)
				return
			}
			t.Errorf("there is no such sabotage")
		})
	}
	for name := range sabotages {
		assert.Check(t, found[name], "nothing says what becomes of %q: add it to ownSabotages", name)
	}
}

func passes(t *testing.T, row report.Row) {
	t.Helper()
	if row.Verdict == report.Pass {
		return
	}
	t.Errorf("%q is %q, not %q: %s", row.Name, row.Verdict, report.Pass, row.Reason)
	for _, s := range row.Steps {
		for _, f := range s.Failures {
			t.Errorf("%s: %s: want %s, got %s\n%s", s.Name, f.Expectation, f.Want, f.Got, f.Why)
		}
	}
}

// An ownSabotage is one of sabotages.yaml, looks.yaml or claims.yaml.
type ownSabotage struct {
	what   string // a part of its text that no other one has
	reason string // why it is no proof, as a regular expression; empty: it is
}

func ownSabotages() []ownSabotage {
	return []ownSabotage{
		{"claims: withhold routeconfiguration/rome-node-gw", ""},
		{"selftest-breaks", ""},
		{"looks: plant on milan/gateway: : selftest-nothing", `the row passed all the same: none of its expectations depends on plant`},
		{"sabotages: plant on milan/gateway: : selftest-nothing", `the row passed all the same: none of its expectations depends on plant`},
		{"selftest-else", `"milan/web reaches rome/web by tcp" failed at "something is done and the pod answers" \((?s:.*)\), instead of "rome/web sees milan/web"`},
		{"selftest-lock", `an action failed at "something is done and the pod answers"`},
		{"service-nodeport-routing", `the row passed all the same: none of its expectations depends on withhold`},
		{"selftest-stream", `the row passed all the same: none of its expectations depends on plant`},
		{"selftest-cannot", `it could not be made, so it proves nothing: exit code 7`},
		{"selftest-is-not-there", `it could not be made, so it proves nothing: there is no firewallconfiguration/selftest-is-not-there in milan`},
		{"selftest-stays", `what undoes it does not make everything as it was: .*selftest-stays`},
		{"selftest-undo", `it was noticed, but could not be undone: .*exit code 7`},
	}
}
