package invitation

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

func sample() Invitation {
	return Invitation{
		ID: "0123456789abcdef", From: "milan", To: "rome", Key: Key{1}, PrivateKey: Key{2}, Addresses: []string{"203.0.113.10", "vpn.example.com", "2001:db8::1"},
		Port: 31840, MTU: 1340, Expires: time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC),
	}
}

// The text survives whatever a chat makes of its lines.
func TestText(t *testing.T) {
	text, err := sample().Text()
	assert.NilError(t, err)
	assert.Assert(t, strings.Count(text, "\n") <= 8, text)
	for _, shape := range []string{text, strings.ReplaceAll(text, "\n", " "), "  " + strings.ReplaceAll(text, "\n", "\r\n\t")} {
		got, err := Parse(shape)
		assert.NilError(t, err)
		assert.DeepEqual(t, got, sample())
	}
}

// with returns the text of sample after a change.
func with(change func(*Invitation)) string {
	i := sample()
	change(&i)
	text, err := i.Text()
	if err != nil {
		panic(err)
	}
	return text
}

// packed returns the text with this payload, and the right checksum.
func packed(payload string) string {
	body := base64.RawURLEncoding.EncodeToString([]byte(payload))
	return fmt.Sprintf("%s 1 %s\n%s\n", prefix, sum(body), body)
}

// An altered text is told from a wrong one.
func TestParseRefuses(t *testing.T) {
	text := with(func(*Invitation) {})
	lines := strings.Split(text, "\n")
	for _, c := range []struct{ name, text, want string }{
		{"nothing", "", "this is not an invitation"},
		{"something else", "kubectl get pods", "this is not an invitation"},
		{"far too much", prefix + strings.Repeat(" x", maxText), "this is not an invitation"},
		{"the first line only", lines[0], "not as it was printed"},
		{"without its last line", strings.Join(lines[:len(lines)-2], "\n"), "not as it was printed"},
		{"a letter is another", strings.Replace(text, "A", "B", 1), "not as it was printed"},
		{"another version", strings.Replace(text, prefix+" 1", prefix+" 2", 1), `of version "2"`},
		{"an unknown field", packed(`{"id":"0123456789abcdef","rm":"-rf"}`), "unknown field"},
		{"two payloads", packed(`{}{}`), "more after its end"},
		{"no ID", with(func(i *Invitation) { i.ID = "x" }), "ID can't be right"},
		{"from and to are one", with(func(i *Invitation) { i.To = i.From }), "cluster ID"},
		{"a name that is none", with(func(i *Invitation) { i.From = "Milan!" }), "cluster ID"},
		{"no key", with(func(i *Invitation) { i.PrivateKey = Key{} }), "key"},
		{"no address", with(func(i *Invitation) { i.Addresses = nil }), "endpoint"},
		{"an address with a flag", with(func(i *Invitation) { i.Addresses = []string{"--x"} }), "endpoint"},
		{"no port", with(func(i *Invitation) { i.Port = 0 }), "endpoint"},
		{"no MTU", with(func(i *Invitation) { i.MTU = 1 }), "MTU"},
		{"no end", with(func(i *Invitation) { i.Expires = time.Time{} }), "time of its end"},
	} {
		_, err := Parse(c.text)
		assert.Check(t, is.ErrorContains(err, c.want), c.name)
	}
}

func networks() Networks {
	return Networks{Pod: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, External: []netip.Prefix{netip.MustParsePrefix("10.71.0.0/16")}}
}

func answer() Answer {
	return Answer{ID: "0123456789abcdef", From: "rome", To: "milan", Key: Key{3}, Networks: networks()}
}

func TestMessages(t *testing.T) {
	b, err := Encode(answer())
	assert.NilError(t, err)
	assert.Equal(t, string(b[len(b)-1]), "\n")
	got, err := Read[Answer](strings.NewReader(string(b) + "what follows"))
	assert.NilError(t, err)
	same(t, got, answer())

	psk := Key{4}
	reply := Reply{ID: answer().ID, Verdict: Accepted, PresharedKey: &psk, Networks: networks()}
	b, err = Encode(reply)
	assert.NilError(t, err)
	again, err := Decode[Reply](b)
	assert.NilError(t, err)
	same(t, again, reply)

	// The largest that can be fits.
	full := answer()
	full.From, full.To = strings.Repeat("a", 63), strings.Repeat("b", 63)
	for i := range MaxNetworks {
		full.Networks.Pod = append(full.Networks.Pod[:i:i], netip.MustParsePrefix(fmt.Sprintf("172.16.%d.128/25", 100+i)))
		full.Networks.External = append(full.Networks.External[:i:i], netip.MustParsePrefix(fmt.Sprintf("172.17.%d.128/25", 100+i)))
	}
	b, err = Encode(full)
	assert.NilError(t, err)
	_, err = Decode[Answer](b)
	assert.NilError(t, err)
}

func TestMessagesRefused(t *testing.T) {
	const (
		head = `{"version":1,"message":{"id":"0123456789abcdef",`
		key  = `"key":"AwAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",`
		nets = `"pod":["10.1.0.0/16"],"external":["10.71.0.0/16"]}}`
	)
	answer := func(b []byte) error { _, err := Decode[Answer](b); return err }
	reply := func(b []byte) error { _, err := Decode[Reply](b); return err }
	receipt := func(b []byte) error { _, err := Decode[Receipt](b); return err }
	for _, c := range []struct {
		name   string
		decode func([]byte) error
		text   string
		want   string
	}{
		{"sound", answer, head + `"from":"rome","to":"milan",` + key + nets, ""},
		{"an unknown field", answer, head + `"from":"rome","to":"milan","more":1,` + key + nets, "unknown field"},
		{"another version", answer, strings.Replace(head, "1", "2", 1) + `"from":"rome","to":"milan",` + key + nets, "version 2"},
		{"two in one", answer, head + `"from":"rome","to":"milan",` + key + nets + "{}", "more after its end"},
		{"too long", answer, head + strings.Repeat(" ", MaxMessage), "longer than"},
		{"no key", answer, head + `"from":"rome","to":"milan",` + nets, "key"},
		{"half a key", answer, head + `"from":"rome","to":"milan","key":"AwAA",` + nets, "no key"},
		{"a name that is none", answer, head + `"from":"../rome","to":"milan",` + key + nets, "not a cluster ID"},
		{"no networks", answer, head + `"from":"rome","to":"milan",` + key + `"pod":[],"external":["10.71.0.0/16"]}}`, "0 networks"},
		{"host bits", answer, head + `"from":"rome","to":"milan",` + key + `"pod":["10.1.0.7/16"],"external":["10.71.0.0/16"]}}`, "not a network"},
		{"accepted without a key", reply, head + `"verdict":"accepted",` + nets, "presharedKey"},
		{"refused without a reason", reply, head + `"verdict":"refused","pod":null,"external":null}}`, "reason"},
		{"a reason that writes on a terminal", reply, head + `"verdict":"refused","reason":"\u001b[2J","pod":null,"external":null}}`, "reason"},
		{"refused with networks", reply, head + `"verdict":"refused","reason":"no",` + nets, "more than a reason"},
		{"no verdict", reply, head + `"verdict":"perhaps","pod":null,"external":null}}`, "verdict"},
		{"a receipt of nothing", receipt, head + `"received":false}}`, "does not say that the reply was received"},
	} {
		err := c.decode([]byte(c.text))
		if c.want == "" {
			assert.NilError(t, err, c.name)
			continue
		}
		assert.Check(t, is.ErrorContains(err, c.want), c.name)
	}
	_, err := Read[Answer](strings.NewReader(strings.Repeat("x", 2*MaxMessage)))
	assert.ErrorContains(t, err, "longer than")
}

// Keys do not get into what is printed by accident.
func TestKeysStayOut(t *testing.T) {
	i := sample()
	for _, text := range []string{fmt.Sprint(i), fmt.Sprintf("%+v", i), fmt.Sprintf("%#v", i.PrivateKey)} {
		assert.Check(t, !strings.Contains(text, "2 0 0"), text)
		assert.Check(t, is.Contains(text, "(key)"))
	}
}

func TestFingerprint(t *testing.T) {
	assert.Equal(t, Fingerprint(Key{1}), "01d0-fabd-251f-cbbe") // SHA-256 of 01 00 … 00
	private := Key{7}
	public, err := private.Public()
	assert.NilError(t, err)
	assert.Assert(t, public != private)
}

func TestRefusal(t *testing.T) {
	end := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	other := answer()
	other.Key = Key{9}
	used := answer()
	open := Record{ID: answer().ID, From: "milan", To: "rome", Expires: end}
	for _, c := range []struct {
		name   string
		open   func(*Record)
		answer func(*Answer)
		at     time.Duration // before the end
		want   string
	}{
		{"in time", nil, nil, time.Second, ""},
		{"at its end", nil, nil, 0, "has expired at 2026-03-14T12:00:00Z by the clock of milan"},
		{"another invitation", nil, func(a *Answer) { a.ID = "fedcba9876543210" }, time.Second, "another invitation"},
		{"another cluster", nil, func(a *Answer) { a.From = "naples" }, time.Second, "is for cluster rome, and naples has answered"},
		{"for somebody else", nil, func(a *Answer) { a.To = "paris" }, time.Second, "is for cluster paris, and this is milan"},
		{"used by another", func(o *Record) { o.Used = &other }, nil, time.Second, "used already, by a gateway with the fingerprint " + Fingerprint(other.Key)},
		{"the same again", func(o *Record) { o.Used = &used }, nil, time.Second, ""},
		{"the same again, after its end", func(o *Record) { o.Used = &used }, nil, -time.Second, ""},
	} {
		o, a := open, answer()
		if c.open != nil {
			c.open(&o)
		}
		if c.answer != nil {
			c.answer(&a)
		}
		got := o.refusal(a, end.Add(-c.at))
		if c.want == "" {
			assert.Check(t, is.Equal(got, ""), c.name)
		} else {
			assert.Check(t, is.Contains(got, c.want), c.name)
		}
	}
}

// TestUndecided asks about a gateway that has answered after somebody had decided about
// another one.
func TestUndecided(t *testing.T) {
	end := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	first, second := answer(), answer()
	second.Key = Key{9}
	for _, c := range []struct {
		name               string
		asks               *Answer
		approved, rejected *Key
		want               string
	}{
		{"nobody has answered", nil, nil, nil, "open"},
		{"one has answered", &first, nil, nil, "asks"},
		{"it was told yes", &first, &first.Key, nil, "open"},
		{"it was told no", &first, nil, &first.Key, "open"},
		{"another after a yes", &second, &first.Key, nil, "asks"},
		{"another after a no", &second, nil, &first.Key, "asks"},
	} {
		r := Record{Expires: end, Asks: c.asks, Approved: c.approved, Rejected: c.rejected}
		assert.Check(t, is.Equal(r.State(end.Add(-time.Second)), c.want), c.name)
		assert.Check(t, is.Equal(r.Undecided(), c.want == "asks"), c.name)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(with(func(*Invitation) {}))
	b, err := json.Marshal(sample())
	assert.NilError(f, err)
	f.Add(string(b))
	f.Fuzz(func(t *testing.T, text string) {
		i, err := Parse(text)
		if err != nil {
			i, err = Parse(packed(text)) // with the right checksum
		}
		if err != nil {
			return
		}
		again, err := i.Text()
		assert.NilError(t, err)
		back, err := Parse(again)
		assert.NilError(t, err)
		assert.DeepEqual(t, back, i)
	})
}

func FuzzDecode(f *testing.F) {
	b, err := Encode(answer())
	assert.NilError(f, err)
	f.Add(b)
	f.Add([]byte(`{"version":1,"message":{"id":"0123456789abcdef","verdict":"refused","reason":"no","pod":null,"external":null}}`))
	f.Add([]byte(`{"version":1,"message":{"id":"0123456789abcdef","received":true}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, err := Decode[Answer](b); err == nil {
			roundTrip(t, a)
		}
		if r, err := Decode[Reply](b); err == nil {
			roundTrip(t, r)
		}
		if o, err := Decode[Offer](b); err == nil {
			roundTrip(t, o)
		}
		if r, err := Decode[Receipt](b); err == nil {
			roundTrip(t, r)
		}
	})
}

// same compares messages: those of netip have fields that assert.DeepEqual can't see.
func same[M message](t *testing.T, got, want M) {
	t.Helper()
	assert.Assert(t, reflect.DeepEqual(got, want), "%+v is not %+v", got, want)
}

func roundTrip[M message](t *testing.T, m M) {
	t.Helper()
	b, err := Encode(m)
	if err != nil { // escaped, it is longer than it was
		return
	}
	again, err := Decode[M](b)
	assert.NilError(t, err)
	same(t, again, m)
}
