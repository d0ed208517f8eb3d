package expect_test

import (
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
)

// External networks that overlap always, as two clusters with the default have them.
var external = [2]string{"10.70.0.0/16", "10.71.0.0/16"}

// TestChosenNetworks: probes go where a cluster says that another one's pods are,
// unless it must not say that. Then reach and source fail, and the lab does not.
func TestChosenNetworks(t *testing.T) {
	same := [2]string{"10.1.0.0/16", "10.1.0.0/16"}
	for _, tc := range []struct {
		name     string
		pod      [2]string // how milan calls rome's pods
		external [2]string // and its external addresses
		to       string    // where the probe went
		why      string
	}{
		{"not remapped, for nothing overlaps", same, external, "10.1.1.2", ""},
		{"not said yet", [2]string{"10.1.0.0/16", ""}, external, "", "10.1.1.2 has no address in milan yet: its Configuration of rome does not say how it is called there"},
		{"remapped for nothing", [2]string{"10.1.0.0/16", "10.2.0.0/16"}, external, "", "Configuration liqo-tenant-rome/rome of milan: status.remote.cidr.pod, for rome's 10.1.0.0/16, is 10.2.0.0/16, although nothing of milan overlaps the original"},
		{"remapped onto the own pods", [2]string{"10.1.0.0/16", "10.0.0.0/16"}, external, "", "is 10.0.0.0/16, which overlaps its own pod CIDR, 10.0.0.0/16"},
		{"remapped onto its external addresses", [2]string{"10.1.0.0/16", "10.71.0.0/16"}, external, "", "is 10.71.0.0/16, which overlaps what it calls rome's 10.70.0.0/16, 10.71.0.0/16"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, row := newFake(t)
			w.serveAPI(t)
			w.objects = []object{configuration("milan", "rome", tc.pod, tc.external), configuration("rome", "milan", [2]string{"10.0.0.0/16", "10.0.0.0/16"}, external)}
			res, err := (&expect.Reach{From: ref(t, row, "milan/web"), To: ref(t, row, "rome/web"), Proto: "tcp"}).Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.why == "", "%+v", res)
			if tc.why == "" {
				ran := w.ran[len(w.ran)-1]
				assert.Equal(t, ran[slices.Index(ran, "--to")+1], tc.to)
				return
			}
			assert.Assert(t, strings.Contains(res.Got, tc.why), res.Got)
			assert.Equal(t, len(w.ran), 0, "nothing was sent: %v", w.ran)

			// The same of the address that is expected as a source.
			_, err = row.Send(t.Context(), ref(t, row, "milan/web").Operand, ref(t, row, "milan/web").Operand, "tcp", 0)
			assert.NilError(t, err)
			w.server = nil
			res, err = (&expect.Source{SeenBy: ref(t, row, "milan/web"), Is: ref(t, row, "remapped(rome/web, milan)")}).Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Assert(t, !res.OK)
			assert.Assert(t, strings.Contains(res.Why, tc.why), "%+v", res)
		})
	}
}

// TestUnknownSource: the address for unknown sources is the first one of the
// topology's external network, as the other cluster calls that.
func TestUnknownSource(t *testing.T) {
	for external, want := range map[[2]string]string{
		external:                         "10.71.0.0",
		{"10.70.0.0/16", "10.0.0.0/16"}:  "overlaps its own pod CIDR",
		{"10.70.0.0/16", "10.70.0.0/16"}: "overlaps its own external CIDR",
		{"10.70.0.0/16", "10.71.0.0/17"}: "not as long as the original",
	} {
		w, row := newFake(t)
		w.serveAPI(t)
		w.objects = []object{configuration("milan", "rome", [2]string{"10.1.0.0/16", "10.1.0.0/16"}, external)}
		a, err := row.Directory.Address(t.Context(), ref(t, row, "unknown(rome, milan)").Operand, "")
		if strings.HasPrefix(want, "10.") {
			assert.NilError(t, err)
			assert.Equal(t, a.String(), want)
			continue
		}
		assert.ErrorIs(t, err, expect.ErrChoice)
		assert.ErrorContains(t, err, want)
	}
}

// TestMappedHost: of an IP object its cluster chooses the address.
func TestMappedHost(t *testing.T) {
	for given, want := range map[string]string{"10.70.0.5": "", "10.70.0.0": "which stands for unknown sources", "10.1.0.5": "not in the external CIDR"} {
		w, row := newFake(t)
		w.serveAPI(t)
		w.objects = []object{
			configuration("milan", "rome", [2]string{"10.1.0.0/16", "10.1.0.0/16"}, external),
			{cluster: "rome", kind: "IP", namespace: "default", name: "user", spec: map[string]any{"ip": "203.0.113.101"}, status: map[string]any{"ip": given}},
		}
		e := &expect.Reach{From: ref(t, row, "milan/web"), To: ref(t, row, "external(user, rome)"), Proto: "icmp"}
		w.hops = []string{"milan/web", "milan/gateway", "rome/gateway", "user"}
		res, err := e.Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Equal(t, res.OK, want == "", "%+v", res)
		if want == "" {
			ran := w.ran[len(w.ran)-1]
			assert.Equal(t, ran[slices.Index(ran, "--to")+1], "10.71.0.5")
			continue
		}
		assert.Assert(t, strings.Contains(res.Got, want), res.Got)
	}
}

// TestChoicesStay: until a row has done something, what a cluster has chosen
// stays as it is.
func TestChoicesStay(t *testing.T) {
	for _, acted := range []bool{false, true} {
		w, row := newFake(t)
		w.serveAPI(t)
		unknown := ref(t, row, "unknown(rome, milan)").Operand
		for _, called := range []string{"10.71.0.0/16", "10.71.0.0/16", "10.72.0.0/16"} {
			w.objects = []object{configuration("milan", "rome", [2]string{"10.1.0.0/16", "10.1.0.0/16"}, [2]string{"10.70.0.0/16", called})}
			if acted {
				row.Directory.MayChange()
			}
			a, err := row.Directory.Address(t.Context(), unknown, "")
			if called == "10.72.0.0/16" && !acted {
				assert.ErrorIs(t, err, expect.ErrChoice)
				assert.ErrorContains(t, err, "what milan calls rome's external CIDR 10.70.0.0/16 was 10.71.0.0/16 and is 10.72.0.0/16 now, although nothing was done")
				continue
			}
			assert.NilError(t, err)
			assert.Equal(t, a.String()+"/16", called)
		}
	}
}
