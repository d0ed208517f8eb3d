package plan

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	appsv1 "k8s.io/api/apps/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// What would never end, or fill the memory, is refused at once and by its
// field. What a template needs is not.
func TestTemplateBudget(t *testing.T) {
	values := templateValues{Name: "gw-rome", Spec: v1beta1.GatewayClientSpec{
		Endpoint: v1beta1.EndpointStatus{Addresses: strings.Split(strings.Repeat("203.0.113.1,", 63)+"203.0.113.1", ",")},
	}}
	const budget, format = "takes more than 262144 characters", "a width or a precision has three digits at most"
	for _, test := range []struct{ name, text, want, err string }{
		{name: "a range over all addresses", text: `{{range $i, $a := .Spec.Endpoint.Addresses}}{{if $i}},{{end}}{{$a}}{{end}}`,
			want: strings.Repeat("203.0.113.1,", 63) + "203.0.113.1"},
		{name: "a range over nothing", text: `{{range .Spec.Endpoint.Ports}}{{.}}{{else}}none{{end}}`, want: "none"},
		{name: "a range in a range that breaks", text: `{{range 3}}{{range 9}}{{break}}{{end}}{{.}}{{continue}}-{{end}}`, want: "012"},
		{name: "a template that is called", text: `{{define "a"}}<{{.}}>{{end}}{{template "a" .Name}}{{template "a" 1}}`, want: "<gw-rome><1>"},
		{name: "printf", text: `{{printf "%s-%04d %5.1f %v" .Name 7 1.25 true}}`, want: "gw-rome-0007   1.2 true"},
		{name: "printf of nothing", text: `{{printf "%d %s"}}`, want: "%!d(MISSING) %!s(MISSING)"},
		{name: "functions", text: `{{print 1 2}}{{html "<"}}{{urlquery "a b"}}{{js "'"}}{{len .Name}}{{slice .Name 3}}{{println}}`, want: `1 2&lt;a+b\'7rome` + "\n"},

		{name: "a range over a number", text: `{{range 1000000000000}}{{end}}`, err: budget},
		{name: "ranges in ranges", text: strings.Repeat(`{{range 1000}}`, 9) + strings.Repeat(`{{end}}`, 9), err: budget},
		{name: "in an if, a with and an else", text: `{{if false}}{{else}}{{with 1}}{{range 1000000000000}}{{continue}}{{end}}{{end}}{{end}}`, err: budget},
		{name: "in the else of a range", text: `{{range .Spec.Endpoint.Ports}}{{else}}{{range 1000000000000}}{{end}}{{end}}`, err: budget},
		{name: "a template that calls itself", text: `{{define "a"}}{{template "a"}}{{end}}{{template "a"}}`, err: budget},
		{name: "a template that calls itself twice", text: `{{define "a"}}{{if .}}{{template "a" (slice . 1)}}{{template "a" (slice . 1)}}{{end}}{{end}}{{template "a" "` + strings.Repeat("x", 64) + `"}}`, err: budget},
		{name: "a block that calls itself", text: `{{block "a" .}}{{template "a"}}{{end}}`, err: budget},
		{name: "much out of little", text: `{{range 9000}}{{$}}{{end}}`, err: budget},
		{name: "a text that is doubled", text: `{{$x := "0123456789"}}` + strings.Repeat(`{{$x = print $x $x}}`, 60), err: budget},
		{name: "a text that is doubled by printf", text: `{{$x := "0123456789"}}` + strings.Repeat(`{{$x = printf "%s%[1]s" $x}}`, 60), err: budget},
		{name: "a text that is escaped", text: `{{$x := "'"}}` + strings.Repeat(`{{$x = js $x}}`, 60), err: budget},
		{name: "one text, many times", text: `{{$x := printf "%0999d%0999d%0999d%0999d%0999d" 1 1 1 1 1}}{{printf "` + strings.Repeat("%[1]s", 2000) + `" $x}}`, err: budget},
		{name: "a wide number", text: `{{printf "%9999999d" 1}}`, err: format},
		{name: "a wide number of which an argument is the width", text: `{{printf "%*d" 999999 1}}`, err: format},
		{name: "many wide numbers", text: `{{printf "` + strings.Repeat("%999d", 1000) + `"}}`, err: budget},
		{name: "a template that gives itself more", text: `{{define "a"}}{{_spend -1000000}}{{template "a"}}{{end}}{{template "a"}}`, err: budget},
		{name: "a long string", text: `{{/*` + strings.Repeat("x", 1<<20) + `*/}}`, err: budget},
		{name: "a deep string", text: strings.Repeat(`{{range 1}}`, 1<<13) + strings.Repeat(`{{end}}`, 1<<13), err: budget},
	} {
		t.Run(test.name, func(t *testing.T) {
			source, err := json.Marshal(map[string]any{"metadata": map[string]string{"name": test.text}})
			assert.NilError(t, err)
			var got appsv1.Deployment
			start := time.Now()
			_, err = render(source, values, &got)
			assert.Assert(t, time.Since(start) < 10*time.Second, "it took %v", time.Since(start))
			if test.err != "" {
				assert.ErrorContains(t, err, "spec.template.metadata.name: ")
				assert.ErrorContains(t, err, test.err)
				assert.Assert(t, len(err.Error()) < 1000, "%v", err)
				return
			}
			assert.NilError(t, err)
			assert.Equal(t, got.Name, test.want)
		})
	}
}

// The budget is that of the whole template, not of each of its strings.
func TestTemplateBudgetIsShared(t *testing.T) {
	var list []string
	for range 100 {
		list = append(list, "{{range 500}}xxxxxxxx{{end}}")
	}
	source, err := json.Marshal(map[string]any{"metadata": map[string]any{"finalizers": list}})
	assert.NilError(t, err)
	var got appsv1.Deployment
	_, err = render(source, templateValues{}, &got)
	assert.ErrorContains(t, err, "takes more than")
	source, err = json.Marshal(map[string]any{"metadata": map[string]any{"finalizers": list[:10]}})
	assert.NilError(t, err)
	_, err = render(source, templateValues{}, &got)
	assert.NilError(t, err)
}
